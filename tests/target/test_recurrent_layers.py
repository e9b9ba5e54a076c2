"""Targets with recurrent layers: their trees against plain forwards, and their states when rows change."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from scipy.stats import chisquare
from support.stubs import generator, random_tree
from support.tiny_models import (
    RECURRENT,
    VOCAB,
    KnowingEngine,
    attention_of,
    greedy_alone,
    prompts_of,
    tiny_head,
    tiny_model,
)

from eagle_fsd import EagleFSD, PromptCache, TreeConfig
from eagle_fsd.core.padding import pad_left, pad_right
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.decoding.prompts.prefix_cache import KeptText
from eagle_fsd.decoding.request import Terms, Text
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.drafting.draft_model import DraftModelSpec
from eagle_fsd.drafting.tree_growth import slots_per_row
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.fixed_shapes import FixedShapes
from eagle_fsd.runtime.step_recorder import EAGER
from eagle_fsd.target.first_layers import first_layers
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession
from eagle_fsd.target.states.mixers import Mixer, find_mixers
from eagle_fsd.target.states.state_cache import CallStates, StateCache

pytestmark = pytest.mark.skipif(
    not hasattr(transformers.Cache, "get_conv_state"), reason="transformers is older than 5.22"
)
NEW_TOKENS = 20
LENGTHS = (3, 17, 10, 1, 9)
TREE = TreeConfig(16, 5, 3)
# Delta rule; convolution alone; attention and Mamba-2 in one layer; a Mamba that reads no prompt in parts.
ALWAYS = ("qwen3_5", "lfm2", "falcon_h1", "jamba")
every_family = pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in ALWAYS else pytest.mark.slow) for one in RECURRENT]
)
few_families = pytest.mark.parametrize("family", ALWAYS)


@functools.cache
def target_of(family: str) -> TargetModel:
    return TargetModel(tiny_model(family, attention_of(family)))


@functools.cache
def references(family: str) -> list[list[int]]:
    return greedy_alone(target_of(family).model, prompts_of(LENGTHS), NEW_TOKENS)


def path_to(tree: DraftTree, row: int, node: int) -> list[int]:
    path = [node]
    while path[0]:
        path.insert(0, int(tree.parents[row, path[0]]))
    return path


def session_of(target: TargetModel, prompts: Sequence[Sequence[int]]) -> TargetSession:
    session = TargetSession(target, len(prompts), 64)
    session.prefill(pad_right(prompts, 0), [len(prompt) for prompt in prompts])
    return session


def assert_holds(session: TargetSession, texts: Sequence[Sequence[int]]) -> None:
    """Each row has the states of its text, as if it had been read anew."""
    assert isinstance(session.cache, StateCache) and session.cache.row_lengths == [len(one) for one in texts]
    for row, text in enumerate(texts):
        fresh = session_of(session.target, [text]).cache  # type: ignore[arg-type]
        assert isinstance(fresh, StateCache) and fresh.states.keys() == session.cache.states.keys()
        for key, state in fresh.states.items():
            torch.testing.assert_close(session.cache.states[key][row], state[0], rtol=1e-3, atol=1e-3)


# --- Texts ---


@every_family
def test_greedy_texts_are_those_of_generate(family: str) -> None:
    """Of a ragged batch whose rows leave one by one, on trees of which up to five levels are right."""
    target, prompts, wanted = target_of(family), prompts_of(LENGTHS), references(family)
    assert target.recurrent and len({token for text in wanted for token in text}) > 20
    ids, mask = pad_left(prompts, pad=0)
    output = KnowingEngine(target, wanted).generate(ids, mask, max_new_tokens=NEW_TOKENS, tree=TREE)
    assert output.new_tokens == wanted
    assert all(stats.tau > 2 for stats in output.stats)


@pytest.mark.covering(1)
@few_families
@pytest.mark.parametrize("lookup", [False, True])
def test_a_head_and_lookup_draft_for_them(family: str, lookup: bool) -> None:
    """Texts join and leave a batch of two."""
    engine = EagleFSD(target_of(family), tiny_head(), lookup=lookup)
    found = engine.generate_many(
        prompts_of(LENGTHS), batch_size=2, max_new_tokens=NEW_TOKENS, tree=TreeConfig(8, 4, 2)
    )
    assert {text.number: text.new_tokens for text in found} == dict(enumerate(references(family)))


@every_family
def test_a_draft_model_drafts_what_it_would_write_itself(family: str) -> None:
    """The target as its own draft model: every token of every greedy step is accepted."""
    target, prompts = target_of(family), prompts_of(LENGTHS)
    engine = EagleFSD(target, DraftModelSpec.for_target(target, target))
    ids, mask = pad_left(prompts, pad=0)
    output = engine.generate(ids, mask, max_new_tokens=NEW_TOKENS, tree=TreeConfig(5, 4, 1))
    assert output.new_tokens == references(family)
    assert all(stats.tau == 5 for stats in output.stats)
    found = engine.generate_many(prompts, batch_size=2, max_new_tokens=NEW_TOKENS, tree=TreeConfig(8, 4, 2))
    assert {text.number: text.new_tokens for text in found} == dict(enumerate(references(family)))


@pytest.mark.parametrize("family", ["qwen3_5", pytest.param("falcon_h1", marks=pytest.mark.slow)])
@torch.no_grad()
def test_sampled_texts_follow_the_targets_distribution(family: str) -> None:
    """Two tokens behind a prompt, by chi-square over the pairs that are expected at least five times."""
    target, prompt, count = target_of(family), prompts_of((7,))[0], 1000
    first = (2 * target.model(torch.tensor([prompt]), use_cache=False).logits[0, -1]).softmax(-1)
    likely = first.topk(6).indices
    texts = torch.tensor([[*prompt, token] for token in likely.tolist()])
    second = (2 * target.model(texts, use_cache=False).logits[:, -1]).softmax(-1)  # temperature 0.5
    expected = count * first[likely, None] * second  # [6, V]
    output = EagleFSD(target, tiny_head()).generate(
        [prompt] * count, max_new_tokens=2, temperature=0.5, tree=TreeConfig(8, 3, 4), seed=list(range(count))
    )
    pairs = torch.tensor(output.new_tokens)
    begins = pairs[:, :1] == likely  # [count, 6]
    counts = torch.stack([torch.bincount(pairs[rows, 1], minlength=VOCAB) for rows in begins.T])
    kept = expected >= 5
    seen = [*counts[kept].tolist(), count - int(counts[kept].sum())]
    wanted = [*expected[kept].tolist(), count - float(expected[kept].sum())]
    assert kept.sum() > 10 and chisquare(seen, wanted, sum_check=False).pvalue > 1e-3


@few_families
def test_hooks_of_linear_layers_run_once(family: str) -> None:
    """Also on the output that is made for all levels of a tree together."""
    model = tiny_model(family, attention_of(family))
    target, runs = TargetModel(model), list[int]()
    inside = [one for mixer in find_mixers(model.get_decoder()) for one in mixer.children()]
    hooked = [one for one in inside if isinstance(one, torch.nn.Linear)]
    for linear in hooked:
        linear.register_forward_pre_hook(lambda _linear, args: (0.9 * args[0],))
        linear.register_forward_hook(lambda _linear, _args, output: runs.append(1) or 0.9 * output)
    output = EagleFSD(target, tiny_head()).generate([[3, 4, 5]], max_new_tokens=8, tree=TreeConfig(8, 4, 2))
    assert hooked and runs
    assert output.new_tokens == greedy_alone(model, [[3, 4, 5]], 8)


@pytest.mark.parametrize("part", ["decoder", "layers"])
def test_compiled_parts_of_a_model_run_as_they_are(part: str) -> None:
    model = tiny_model("qwen3_5")
    wanted = greedy_alone(model, [[3, 4, 5]], 8)
    for module in [model.model] if part == "decoder" else model.model.layers:
        module.compile(backend="eager")
    output = EagleFSD(TargetModel(model), tiny_head()).generate([[3, 4, 5]], max_new_tokens=8)
    assert output.new_tokens == wanted


# --- States ---


@torch.inference_mode()
@every_family
def test_a_tree_gives_the_logits_of_plain_forwards_and_keeps_the_states_of_its_path(family: str) -> None:
    target, prompts = target_of(family), prompts_of((4, 1, 11))
    session = session_of(target, prompts)
    texts = [list(prompt) for prompt in prompts]
    for step in range(3):
        tree = random_tree(len(texts), 10, 4, 3, VOCAB, seed=step)
        logits, _ = session.verify(tree)
        draw = generator(step)
        paths = []
        for row, text in enumerate(texts):
            node = int(torch.randint(tree.tokens.shape[1], (1,), generator=draw))
            path = path_to(tree, row, node)
            tokens = tree.tokens[row, path].tolist()
            plain = target.model(torch.tensor([[*text, *tokens]]), use_cache=False).logits[0, len(text) :]
            torch.testing.assert_close(logits[row, path], plain, rtol=1e-3, atol=1e-3)
            paths.append(path)
        counts = [len(path) - (step == 1 and len(path) > 1) for path in paths]  # less than the path, too
        counts[step] = 0  # a text that is done commits nothing
        session.keep(pad_right(paths, -1), counts)
        for row, path in enumerate(paths):
            texts[row] += tree.tokens[row, path[: counts[row]]].tolist()
        assert_holds(session, texts)


@torch.inference_mode()
@few_families
def test_states_follow_their_rows(family: str) -> None:
    target, prompts = target_of(family), prompts_of((4, 1, 11, 6))
    session = session_of(target, prompts)
    saved = session.save_row(2, 11)
    session.select([3, 1, 0])
    assert_holds(session, [prompts[3], prompts[1], prompts[0]])
    session.select([0, 1, 2, 2, 1])
    assert_holds(session, [prompts[row] for row in (3, 1, 0, 0, 1)])
    session.replace([1, 4], session_of(target, prompts[2:]))
    assert_holds(session, [prompts[row] for row in (3, 2, 0, 0, 3)])
    session.load_row(0, saved, 11)
    assert_holds(session, [prompts[row] for row in (2, 2, 0, 0, 3)])
    empty = TargetSession(target, 2, 8)
    empty.load_row(1, saved, 11)
    empty.replace([0], TargetSession(target, 1, 8))
    assert empty.cache.row_lengths == [0, 11]
    session.cache.reset()
    session.prefill(pad_right(prompts[:1] * 5, 0), [4] * 5)
    assert_holds(session, prompts[:1] * 5)
    for spoil in (lambda: session.save_row(0, 3), lambda: session.load_row(0, saved, 5)):
        with pytest.raises(ValueError, match="with recurrent states"):
            spoil()
    assert session.cache_bytes > sum(b.nbytes for layer in session.cache.layers.values() for b in layer)


@torch.inference_mode()
@every_family
def test_a_prompt_that_is_read_in_parts_leaves_the_same_states(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, prompts = target_of(family), prompts_of((13, 2, 8))
    whole = TargetSession(target, 3, 64).prefill(pad_right(prompts, 0), [13, 2, 8])
    monkeypatch.setattr("eagle_fsd.runtime.kv_cache.WIDEST", 3)
    behind = []  # how many tokens a call reads behind others

    def texts(mixer: Mixer, part: torch.Tensor, states: CallStates) -> torch.Tensor:
        behind.extend([part.shape[1]] if states.held else [])
        return read(mixer, part, states)

    read = Mixer.texts
    monkeypatch.setattr(Mixer, "texts", texts)
    session = TargetSession(target, 3, 64)
    parts = session.prefill(pad_right(prompts, 0), [13, 2, 8])
    assert session.cache.widest == 3 and max(behind) == (1 if family == "jamba" else 3)
    for row, count in enumerate((13, 2, 8)):
        torch.testing.assert_close(parts[row, :count], whole[row, :count], rtol=1e-3, atol=1e-3)
    assert_holds(session, prompts)


@torch.inference_mode()
@few_families
def test_rounding_does_not_hide_a_layer_that_begins_anew_with_each_part(family: str) -> None:
    """In float16 the test of a small tree has a tolerance that one lost state may stay below."""
    target, (prompt,) = TargetModel(tiny_model(family, attention_of(family)).half()), prompts_of((13,))
    text = torch.tensor([prompt])
    whole, parts = (TargetSession(target, 1, 64) for _ in range(2))
    whole.prefill(text, [13])
    for part in text.split(5, dim=1):
        parts.prefill(part, [part.shape[1]])
    assert isinstance(whole.cache, StateCache) and isinstance(parts.cache, StateCache)
    for key, state in whole.cache.states.items():
        torch.testing.assert_close(parts.cache.states[key], state, rtol=0.05, atol=0.05)


@few_families
def test_a_conversation_goes_on_from_its_end_alone(family: str) -> None:
    engine, prompt = EagleFSD(target_of(family), tiny_head()), prompts_of((20,))[0]
    cache = PromptCache()

    def ask(prompt: list[int]) -> tuple[list[int], int]:
        output = engine.generate([prompt], torch.ones(1, len(prompt)), max_new_tokens=9, prompt_cache=cache)
        assert output.new_tokens == greedy_alone(engine.target.model, [prompt], 9)
        return output.new_tokens[0], output.stats[0].reused_tokens

    answer, reused = ask(prompt)
    assert reused == 0
    longer = [*prompt, *answer, 5, 6, 7]
    answer, reused = ask(longer)
    # What the last step of the first answer emitted was not read.
    assert len(prompt) < reused <= len(longer) - 3
    assert ask([*longer, *answer, 8])[1] > len(longer)
    assert ask([*longer[:-3], 9, 9])[1] == reused  # another turn in the place of the second
    assert ask([*prompt, 11])[1] == 0  # nothing ends there


def test_kept_states_count_as_the_tokens_that_take_as_much_memory() -> None:
    engine, prompt = EagleFSD(target_of("qwen3_5"), tiny_head()), prompts_of((20,))[0]

    def kept(tokens: int) -> list[KeptText]:
        cache = PromptCache(tokens)
        engine.generate([prompt], max_new_tokens=9, prompt_cache=cache)
        return cache._texts.texts

    (text,) = kept(8192)
    states = sum(state.nbytes for state in text.target.states.values())
    slot = sum(part.nbytes for layer in text.target.parts.values() for part in layer) / text.target.slots
    assert 0 <= (text.slots - len(text.tokens)) * slot - states < slot
    assert len(kept(text.slots)) == 1 and not kept(text.slots - 1)


def test_states_of_running_texts_count_too() -> None:
    target, prompts = target_of("qwen3_5"), prompts_of((20, 20, 20))
    kept, plain = PromptCache(), TreeConfig(1)
    EagleFSD(target, None).generate(prompts[:1], max_new_tokens=9, prompt_cache=kept, tree=plain)
    (text,) = kept._texts.texts
    states, slots = text.slots - len(text.tokens), slots_per_row(30, plain)
    assert target.slots_of_states == states > 0

    def scheduler_of(limit: int) -> Scheduler:
        made = Scheduler(target, None, plain, 3, cache_tokens=limit)
        for number, prompt in enumerate(prompts):
            made.admit(Text(number, 10, Terms(()), prompt=prompt, stream=(0, number)))
        return made

    with pytest.raises(ValueError, match=f"needs {slots + states} slots of the cache: cache_tokens allows"):
        scheduler_of(slots + states - 1)
    for rows in (1, 2, 3):
        scheduler = scheduler_of(rows * (slots + states))
        texts, together, most = list(scheduler.waiting), 0, 0
        while scheduler.busy:
            scheduler.step()
            if scheduler.batch is not None:
                together = max(together, len(scheduler.decoding))
                most = max(most, scheduler.batch.target.cache_bytes)
        assert together == rows
        slot = sum(part.nbytes for parts in text.target.parts.values() for part in parts) / text.target.slots
        assert most <= rows * (slots + states) * slot
        assert [one.new_tokens for one in texts] == greedy_alone(target.model, prompts, 10)


@torch.inference_mode()
def test_what_another_thread_learns_of_a_layer_waits_for_the_next_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tree behind a prompt of one token may be the first that a copy of a decoder runs."""
    target, tree = target_of("jamba"), random_tree(1, 10, 4, 3, VOCAB, seed=0)
    wanted, _ = TargetSession(target, 1, 16).verify(tree)
    begin = Mixer.__init__

    def begin_too_early(mixer: Mixer, *args: Any) -> None:
        begin(mixer, *args)
        assert mixer.facts.last is not None
        mixer.last = None

    monkeypatch.setattr(Mixer, "__init__", begin_too_early)
    found, _ = TargetSession(target, 1, 16).verify(tree)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


# --- What they do not go with ---


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("granite_hybrid", ["attention", "attention"]),
        ("qwen3_5", ["full_attention", "full_attention"]),
        ("nemotron_h", ["mlp", "attention"]),
    ],
)
def test_a_class_with_recurrent_layers_may_be_used_without_them(family: str, kinds: list[str]) -> None:
    name = "layers_block_type" if family == "nemotron_h" else "layer_types"
    target = TargetModel(tiny_model(family, **{name: kinds, "num_hidden_layers": 2}))
    assert not target.recurrent
    output = EagleFSD(target, tiny_head()).generate([[3, 4, 5]], max_new_tokens=5)
    assert output.new_tokens == greedy_alone(target.model, [[3, 4, 5]], 5)


def test_a_targets_first_layers_may_have_no_states() -> None:
    model = tiny_model("granite_hybrid", layer_types=["attention", "mamba"])
    target, draft = TargetModel(model), TargetModel(first_layers(model, 1))
    assert target.recurrent and not draft.recurrent
    engine = EagleFSD(target, DraftModelSpec.for_target(draft, target))
    output = engine.generate([[3, 4, 5]], max_new_tokens=5)
    assert output.new_tokens == greedy_alone(model, [[3, 4, 5]], 5)


def test_steps_are_not_recorded() -> None:
    target = TargetModel(tiny_model("qwen3_5"), FixedShapes())
    assert target.stepper is EAGER


def test_openvino_is_refused_where_it_is_asked_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"'qwen3_5_text' model with recurrent layers.*use runtime torch"):
        TargetModel(tiny_model("qwen3_5"), runtime=OpenVINO("float32"))
    tiny_model("lfm2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"use runtime torch, without int8 or packed$"):
        EagleFSD.from_pretrained(tmp_path, "none", lookup=True, weight_format="int8", device="cpu")
    with caplog.at_level(logging.INFO):
        engine = EagleFSD.from_pretrained(tmp_path, "none", lookup=True, runtime="auto", device="cpu")
    assert engine.runtime == "torch"
    assert engine.generate([[3, 4, 5]], max_new_tokens=5).new_tokens == greedy_alone(
        engine.target.model, [[3, 4, 5]], 5
    )


def test_the_users_model_is_not_changed() -> None:
    model = tiny_model("qwen3_5")
    before = greedy_alone(model, [[3, 4, 5]], 8)
    mixers = find_mixers(model.get_decoder())
    EagleFSD(TargetModel(model), tiny_head()).generate([[3, 4, 5]], max_new_tokens=8)
    assert mixers and all("forward" not in vars(mixer) for mixer in mixers)
    assert greedy_alone(model, [[3, 4, 5]], 8) == before
