"""Texts that are kept between calls: the turns of a chat are what they are without, and less is read."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.every_drafter import engine, every_drafter
from support.read_tokens import ReadTokens
from support.tiny_models import prompts_of, tiny_head, tiny_model

from eagle_fsd import EagleFSD, Fuzzy, GenerationOptions, GenerationOutput, PromptCache, TreeConfig
from eagle_fsd.acceptance.accept import Verdict, Verified
from eagle_fsd.decoding.prompts.prefill import LISTED
from eagle_fsd.drafting.tree_growth import BeamDrafter
from eagle_fsd.runtime.ranks import Ranks
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

TREE = TreeConfig(8, 3, 3)
START, *TURNS = prompts_of([70, 5, 1, 9], seed=3)
WAYS: list[dict[str, Any]] = [{}, {"temperature": 0.9, "top_k": 12, "rule": Fuzzy(0.4)}]


def answer(
    model: EagleFSD, prompt: Sequence[int], kept: PromptCache | None, **options: Any
) -> GenerationOutput:
    options = {"max_new_tokens": 12, "tree": TREE, "seed": 4, **options}
    return model.generate([prompt], [[1] * len(prompt)], prompt_cache=kept, **options)


def ask(model: EagleFSD, prompt: Sequence[int], kept: PromptCache | None, **options: Any) -> list[int]:
    return answer(model, prompt, kept, **options).new_tokens[0]


@pytest.mark.covering(1)
@every_drafter
@pytest.mark.parametrize("options", WAYS, ids=["greedy", "fuzzy"])
def test_the_turns_of_a_chat_are_read_once(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, kept, read = engine(name), PromptCache(), ReadTokens(monkeypatch)
    chat, last = list(START), 0
    for turn in TURNS:
        chat += turn
        wanted = ask(model, chat, None, **options)
        assert read.take() == len(chat) - 1
        output = answer(model, chat, kept, **options)
        assert output.new_tokens == [wanted]
        assert output.stats[0].reused_tokens == (len(chat) - read.count if last else 0)
        # Of an answer the last step's tokens were not read yet, and a drafter may need lists of the last.
        most = len(chat) - 1 if not last else len(turn) + TREE.reach + 1
        assert read.take() <= max(most, LISTED if name in ("lookup", "merged") and last else 0)
        chat += wanted
        last = len(chat)


def test_of_the_same_prompt_one_token_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept, read = engine("eagle"), PromptCache(), ReadTokens(monkeypatch)
    wanted = ask(model, START, kept)
    assert read.take() == len(START) - 1
    assert ask(model, START, kept, temperature=0.8) != wanted  # the last token's logits serve any sampling
    assert ask(model, START, kept) == wanted
    assert read.take() == 2  # one each
    kept.clear()
    assert ask(model, START, kept) == wanted
    assert read.take() == len(START) - 1


def test_a_text_that_its_caller_leaves_is_kept_and_one_that_failed_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, read = engine("eagle"), ReadTokens(monkeypatch)
    ids, options = [START], {"max_new_tokens": 40, "tree": TREE}
    (whole,) = model.generate(ids, **options).new_tokens
    kept = PromptCache()
    for chunk in model.stream(ids, prompt_cache=kept, **options):
        if chunk != whole[: len(chunk)]:
            raise AssertionError
        break
    read.take()
    longer = [*START, *whole[:9]]
    assert ask(model, longer, kept, max_new_tokens=31) == whole[9:]
    assert 0 < read.take() <= 9

    def fail(verified: Verified, verdict: Verdict, emitted: dict[int, int]) -> None:
        raise RuntimeError("not kept")

    with pytest.raises(RuntimeError, match="not kept"):
        ask(model, prompts_of([33], seed=8)[0], kept, observer=fail)
    assert all(text.tokens[0] == START[0] for text in kept.texts_of(model.target, model.drafter).texts)


def test_others_do_not_go_on_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another target nor another way to draft: what was kept is not theirs."""
    first, kept = engine("eagle"), PromptCache()
    ask(first, START, kept)
    for other in (engine("none"), EagleFSD(TargetModel(tiny_model(seed=9)), tiny_head(4)), engine("eagle")):
        read = ReadTokens(monkeypatch)
        wanted = ask(other, START, None)
        read.take()
        assert ask(other, START, kept) == wanted and read.take() == len(START) - 1
        monkeypatch.undo()
    kept.clear()
    for autocast in (True, False):  # which decides the dtype of keys and values
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert ask(first, START, kept) == ask(first, START, None)
    plain = {"tree": TreeConfig(1)}  # it drafts nothing, so that it keeps nothing for a head
    assert ask(first, START, kept, **plain) == ask(first, START, kept) == ask(first, START, None)


def test_texts_of_other_weights_are_not_gone_on_from() -> None:
    """Neither after they were replaced nor after a change in place, of the target or of the head."""
    source = copy.deepcopy(tiny_model())
    model, kept = EagleFSD(TargetModel(source), tiny_head()), PromptCache()

    def reused() -> int:
        return answer(model, START, kept).stats[0].reused_tokens

    first = ask(model, START, kept)
    assert reused()
    source.load_state_dict(copy.deepcopy(tiny_model(seed=9)).state_dict(), assign=True)
    assert ask(model, START, kept) == ask(model, START, None) != first
    assert reused()
    source.load_state_dict(tiny_model().state_dict())
    assert ask(model, START, kept) == first
    with torch.no_grad():
        next(model.drafter.network.parameters()).mul_(2)
    assert [bool(reused()), bool(reused())] == [False, True]


def test_many_texts_keep_theirs_for_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept, read = engine("eagle"), PromptCache(), ReadTokens(monkeypatch)
    prompts = [[*START, *turn] for turn in TURNS]
    options, reused = {"batch_size": 2, "max_new_tokens": 12, "tree": TREE}, list[int]()

    def texts(cache: PromptCache | None) -> list[list[int]]:
        found = model.generate_many(prompts, prompt_cache=cache, **options)
        tokens = [text.new_tokens for text in sorted(found, key=lambda text: text.number)]
        reused.append(found.total.reused_tokens)
        return tokens

    wanted = texts(None)
    read.take()
    assert texts(kept) == wanted
    first = read.take()
    assert texts(kept) == wanted
    assert reused[-1] == sum(map(len, prompts)) - read.count
    assert read.take() < first / 4 and first < 2 * len(START)
    assert ask(model, prompts[1], kept) == wanted[1] and read.take() == 1


def test_a_batch_neither_takes_nor_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept, read = engine("eagle"), PromptCache(), ReadTokens(monkeypatch)
    for _ in range(2):
        model.generate([START, START[::-1]], max_new_tokens=4, tree=TREE, prompt_cache=kept)
        assert read.take() == 2 * (len(START) - 1)


def test_room_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = engine("eagle"), ReadTokens(monkeypatch)
    for tokens, again in ((0, len(START) - 1), (60, len(START) - 1), (82, 1)):
        kept = PromptCache(tokens)
        ask(model, START, kept)
        read.take()
        ask(model, START, kept)
        assert read.take() == again, tokens


def test_plain_decoding_goes_on_from_texts_of_any_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = engine("eagle"), ReadTokens(monkeypatch)
    kept, options = PromptCache(), {"max_new_tokens": 12, "tree": TreeConfig(1)}
    wanted = ask(model, START, kept, **options)
    read.take()
    for other in (model, EagleFSD(model.target, None)):
        (text,) = other.generate_many([START], prompt_cache=kept, **options)
        assert text.new_tokens == ask(other, START, kept, **options) == wanted
        assert read.take() == 2  # one each


def test_copies_of_options_have_an_empty_cache_of_their_own() -> None:
    model, options = engine("eagle"), GenerationOptions(prompt_cache=PromptCache(300), max_new_tokens=4)
    model.generate([START], options=options)
    assert f"prompt_cache=PromptCache(tokens={options.prompt_cache.tokens})" in repr(options)
    for copied in (copy.deepcopy(options), pickle.loads(pickle.dumps(options))):
        kept = copied.prompt_cache
        assert kept is not None and kept is not options.prompt_cache and kept.tokens == 300
        assert not kept.texts_of(model.target, model.drafter).texts
        assert model.generate([START], options=copied).new_tokens == [ask(model, START, None)[:4]]


def test_a_cache_does_not_keep_the_models_in_memory() -> None:
    model, kept = EagleFSD(TargetModel(tiny_model()), tiny_head(4)), PromptCache()
    ask(model, START, kept)
    target = weakref.ref(model.target)
    del model
    gc.collect()
    assert target() is None


def test_a_text_that_was_dropped_is_not_used_again() -> None:
    """Another thread may drop a text between another's finding it and going on from it."""
    model, kept = engine("eagle"), PromptCache()
    ask(model, START, kept)
    texts = kept.texts_of(model.target, model.drafter)
    found = texts.find(START)
    assert found is not None
    texts.shrink(0)
    texts.use(found[0])
    assert not texts.texts


def test_of_a_text_that_is_too_long_nothing_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(*_: Any) -> None:
        raise AssertionError

    for part in (TargetSession, BeamDrafter):
        monkeypatch.setattr(part, "save_row", copied)
    ask(engine("eagle"), START, PromptCache(60))


@pytest.mark.parametrize("theirs", [0, 30])
def test_ranks_go_on_from_what_all_of_them_kept(monkeypatch: pytest.MonkeyPatch, theirs: int) -> None:
    model, kept, read = engine("eagle"), PromptCache(), ReadTokens(monkeypatch)
    wanted = ask(model, START, kept)
    read.take()
    monkeypatch.setattr(Ranks, "gather", lambda _, mine: [mine, (theirs, 0)])
    assert ask(model, START, kept) == wanted and read.take() == len(START) - max(theirs, 1)


def test_ranks_are_told_that_only_some_have_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[object, ...]] = []
    monkeypatch.setattr(Ranks, "check_alike", lambda _, *values: told.append(values))
    for kept in (None, PromptCache(), PromptCache()):
        ask(engine("eagle"), START, kept)
    assert told[0] != told[1] == told[2]


def test_what_is_no_cache_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_cache is 8192: it must be a PromptCache"):
        ask(engine("eagle"), START, 8192)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens is -1"):
        PromptCache(-1)
