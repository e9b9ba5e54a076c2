"""Penalties, bans and biases along the paths of trees: Hugging Face's own processors decide what is right."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from support.drafter_laws import random_chain, worst_fit
from support.stubs import Chain, ChainDrafter, ChainTarget
from support.tiny_engine import tiny_engine
from support.tiny_models import VOCAB, attention_of, tiny_model
from torch import Tensor
from transformers.generation import logits_process as theirs

from eagle_fsd import EagleFSD, Fuzzy, GenerationOptions, Lossless, TreeConfig
from eagle_fsd.core.processing import UNPROCESSED, Processing
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.decoding.logits.processing import TextProcessor, process
from eagle_fsd.decoding.request import Terms, Text
from eagle_fsd.decoding.scheduler import Scheduler
from eagle_fsd.drafting.draft_model import DraftModelSpec
from eagle_fsd.runtime.openvino.backend import OpenVINO
from eagle_fsd.runtime.openvino.library import is_installed
from eagle_fsd.target.hf_generate import AnswerPenalties, hf_options
from eagle_fsd.target.model import TargetModel

TREE = TreeConfig(8, 3, 3)
NEW = 24


class Shy(transformers.LogitsProcessor):
    """A processor of a user's own: the last two tokens become less likely."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter_add(1, input_ids[:, -2:], torch.full((len(scores), 2), -0.7))


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "repetition": {"repetition_penalty": 1.3},
    "attraction": {"repetition_penalty": 0.8},
    "answer": {"presence_penalty": 0.6, "frequency_penalty": 0.3},
    "n-grams": {"no_repeat_ngram_size": 2},
    "no token twice": {"no_repeat_ngram_size": 1},
    "bad words": {"bad_words_ids": [[17], [34, 82], [2], [28, 88, 17]]},
    "suppressed": {"suppress_tokens": list(range(0, VOCAB, 7))},
    "bias": {"logit_bias": {7: 1.5, 8: -2.0, (7, 9): 4.0, (9, 7, 11): 6.0}},
    "not yet": {"min_new_tokens": 11},
    "own": {"logits_processor": [Shy()]},
    "all": {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[17], [34, 82]],
        "suppress_tokens": [3, 5],
        "logit_bias": {7: 1.5, (7, 9): 4.0},
        "min_new_tokens": 9,
        "logits_processor": Shy(),
    },
}
ends = {"not yet", "all"}  # with end tokens that come soon


@cache
def engine(family: str, runtime: str = "torch") -> EagleFSD:
    """Return an engine whose drafter is near its target."""
    near = tiny_model(family, attention_of(family))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    graphs = OpenVINO("float32") if runtime == "openvino" else None
    target = TargetModel(tiny_model(family, attention_of(family)), runtime=graphs)
    return EagleFSD(target, DraftModelSpec.for_target(TargetModel(near), target))


def prompts(count: int) -> Tensor:
    return torch.randint(4, VOCAB, (count, 9), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    ("family", "runtime", "name"),
    [
        *(("llama", "torch", name) for name in OPTIONS),
        *(  # other families with all of the options at once, and with each in the long runs
            pytest.param(family, "torch", name, marks=() if name in ("nothing", "all") else pytest.mark.slow)
            for family in ("qwen3", "gemma2")
            for name in OPTIONS
        ),
        *(
            pytest.param(
                *("llama", "openvino", name),
                marks=[pytest.mark.slow, pytest.mark.skipif(not is_installed(), reason="needs openvino")],
            )
            for name in OPTIONS
        ),
    ],
)
def test_greedy_texts_are_hugging_faces(family: str, runtime: str, name: str) -> None:
    model, options = engine(family, runtime), OPTIONS[name]
    model.target.model.generation_config.eos_token_id = [17, 88, 60] if name in ends else None
    ours = model.generate(prompts(40), max_new_tokens=NEW, tree=TREE, **options)
    alone = model.target_alone(prompts(40), max_new_tokens=NEW, **options)
    assert ours.new_tokens == alone.new_tokens
    assert sum(row.new_tokens for row in ours.stats) > 1.15 * sum(row.steps for row in ours.stats)
    if name != "nothing":
        assert ours.new_tokens != unchanged(family, runtime, name in ends)


@cache
def unchanged(family: str, runtime: str, ends_soon: bool) -> list[list[int]]:
    """Return the texts without any option, for a model whose end tokens are set."""
    return engine(family, runtime).generate(prompts(40), max_new_tokens=NEW, tree=TREE).new_tokens


def random_tree(nodes: int, seed: int, fillers: int) -> DraftTree:
    generator = torch.Generator().manual_seed(seed)
    parents = [-1, *(int(torch.randint(node, (), generator=generator)) for node in range(1, nodes))]
    parents[nodes - fillers :] = [-1] * fillers
    tokens = torch.randint(8, (1, nodes), generator=generator)
    nothing = torch.zeros(1, 0, 8), torch.zeros(1, 0, dtype=torch.int64)
    return DraftTree(tokens, torch.tensor([parents]), torch.zeros(1, nodes).long(), *nothing, depth=nodes)


PROCESSINGS = {
    "repetition": Processing.of(repetition_penalty=1.3),
    "answer": Processing.of(presence_penalty=0.6, frequency_penalty=0.3),
    "one-grams": Processing.of(no_repeat_ngram_size=1),
    "two-grams": Processing.of(no_repeat_ngram_size=2),
    "three-grams": Processing.of(no_repeat_ngram_size=3),
    "bad words": Processing.of(bad_words_ids=[[1], [2, 3], [0], [4, 5, 6], [7, 7, 7, 7]]),
    "bias": Processing.of(logit_bias=[[[1], 2.0], [[2, 3], -3.0], [[4, 3], 1.0], [[5, 5, 3], 0.5]]),
    "not yet": Processing.of(min_new_tokens=6),
    "suppressed": Processing.of(suppress_tokens=[1, 4]),
    "own": Processing.of(logits_processor=Shy()),
}


def one_by_one(processing: Processing, text: list[int], prompt: int, logits: Tensor) -> Tensor:
    """Return what Hugging Face's processors make of one text's logits [V], in the order of `generate`."""
    named = hf_options(processing, prompt)
    ids, scores = torch.tensor([text]), logits[None].clone()
    makers: dict[str, Any] = {
        "sequence_bias": theirs.SequenceBiasLogitsProcessor,
        "repetition_penalty": theirs.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram_size": theirs.NoRepeatNGramLogitsProcessor,
        "bad_words_ids": lambda words: theirs.NoBadWordsLogitsProcessor(words, 0),
        "min_new_tokens": lambda count: theirs.MinNewTokensLengthLogitsProcessor(prompt, count, 0),
        "suppress_tokens": theirs.SuppressTokensLogitsProcessor,
    }
    for name, make in makers.items():
        if name in named:
            scores = make(named[name])(ids, scores)
    for own in named.get("logits_processor", ()):
        scores = own(ids, scores)
    return scores[0]


@pytest.mark.parametrize("name", PROCESSINGS)
def test_every_node_is_processed_as_the_end_of_its_path(name: str) -> None:
    """Few tokens, so that they repeat on paths; the text grows between two trees; fillers do no harm."""
    changed = 0
    for seed in range(20):
        text = torch.randint(8, (7,), generator=torch.Generator().manual_seed(seed)).tolist()
        processing = PROCESSINGS[name]
        processor = TextProcessor(processing, text[:4], eos_token_ids=(0,))
        processor.add(text[4:6])
        processor.add(text[6:])
        for tree in (random_tree(9, seed, 2), random_tree(6, seed + 50, 0)):
            raw = torch.randn(1, tree.tokens.shape[1], 8, generator=torch.Generator().manual_seed(seed))
            found = process(raw, tree, [processor])
            paths: list[list[int]] = []
            for node, parent in enumerate(tree.parents[0].tolist()):
                paths.append([*paths[parent], int(tree.tokens[0, node])] if parent >= 0 else [])
                if parent >= 0 or node == 0:
                    wanted = one_by_one(processing, [*text, *paths[node]], 4, raw[0, node])
                    torch.testing.assert_close(found[0, node], wanted, rtol=1e-6, atol=1e-6)
            changed += not torch.equal(found, raw)
    assert changed > 5


def test_sampled_texts_have_the_processed_distribution() -> None:
    """Lossless decoding of a known language, whose last token a processor makes less likely."""
    chain, rows = random_chain(), 1500

    def avoid_last(ids: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter_add(1, ids[:, -1:], torch.full((len(scores), 1), -1.5))

    law = Chain(chain.table - 1.5 * torch.eye(4))
    drafter = ChainDrafter(chain.blend(Chain.random(4, 2), 0.3), rows)
    processing = Processing.of(logits_processor=avoid_last)
    target = ChainTarget(chain, rows)
    pvalue, stats = worst_fit(target, drafter, Lossless(), rows, processing=processing, law=law)
    assert pvalue > 1e-4
    assert sum(one.exact_accepts for one in stats) > rows


def test_a_fuzzy_rule_follows_nothing_that_is_ruled_out() -> None:
    model, banned = engine("llama"), list(range(0, VOCAB, 2))
    for temperature in (0.0, 1.0):
        made = model.generate(
            prompts(8), max_new_tokens=NEW, tree=TREE, rule=Fuzzy(1e9), temperature=temperature, seed=1,
            suppress_tokens=banned, no_repeat_ngram_size=2,
        )  # fmt: skip
        assert sum(row.fuzzy_accepts for row in made.stats) > 0
        for prompt, row in zip(prompts(8).tolist(), made.new_tokens, strict=True):
            assert not set(row) & set(banned)
            pairs = list(zip([*prompt, *row], [*prompt, *row][1:], strict=False))[len(prompt) - 1 :]
            assert len(set(pairs)) == len(pairs)


def test_texts_of_a_batch_are_processed_each_in_its_own_way() -> None:
    model = engine("llama")
    kinds = [*OPTIONS.values(), {"temperature": 0.9, "min_p": 0.1, "presence_penalty": 1.0}]
    scheduler = Scheduler(model.target, model.drafter, TREE, rows=5)
    texts = []
    for number, (keywords, prompt) in enumerate(zip(kinds, prompts(len(kinds)).tolist(), strict=True)):
        options = GenerationOptions(**keywords)
        terms = Terms((17,), Lossless(), options.sampling, options.processing)
        texts.append(Text(number, NEW, terms, prompt=prompt, stream=(7, number), top_logprobs=1))
        scheduler.admit(texts[-1])
    for _ in scheduler.run():
        pass
    for text, keywords in zip(texts, kinds, strict=True):
        shared = {"max_new_tokens": NEW, "tree": TREE, "eos_token_id": 17, "logprobs": 1}
        alone = model.generate([text.prompt], seed=[text.stream], **shared, **keywords)
        assert [text.new_tokens] == alone.new_tokens
        assert [one.token for one in text.logprobs] == text.new_tokens
        mine = torch.tensor([one.logprob for one in text.logprobs])
        theirs_ = torch.tensor([one.logprob for one in alone.logprobs[0]])
        torch.testing.assert_close(mine, theirs_, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_are_those_of_a_plain_forward(temperature: float) -> None:
    model = engine("llama")
    for rule in (Lossless(), Fuzzy(0.5)):
        made = model.generate(
            prompts(3), max_new_tokens=NEW, tree=TREE, rule=rule, temperature=temperature, seed=2, logprobs=4,
            repetition_penalty=1.3,
        )  # fmt: skip
        for row, (sequence, found) in enumerate(zip(made.sequences, made.logprobs, strict=True)):
            text = sequence[: 9 + len(made.new_tokens[row])]
            with torch.no_grad():
                wanted = model.target.model(text[None]).logits[0, 8:-1].log_softmax(-1)
            assert [one.token for one in found] == made.new_tokens[row]
            for step, one in enumerate(found):
                assert one.logprob == pytest.approx(float(wanted[step, one.token]), abs=1e-4)
                best = wanted[step].topk(4)
                assert [token for token, _ in one.top] == best.indices.tolist()
                assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    nothing = model.generate(prompts(1), max_new_tokens=3, tree=TREE, logprobs=0)
    assert [one.top for one in nothing.logprobs[0]] == [[]] * 3
    assert model.generate(prompts(1), max_new_tokens=3, tree=TREE).logprobs is None
    with model.stream(prompts(1), max_new_tokens=9, tree=TREE, logprobs=0) as stream:
        for _ in stream:
            assert len(stream.logprobs) == stream.stats.new_tokens


def test_stop_strings_end_a_text_with_the_token_that_completes_them() -> None:
    model, prompt = tiny_engine(), prompts(1)
    whole = model.generate(prompt, max_new_tokens=40, tree=TREE).new_tokens[0]

    def decode(tokens: list[int]) -> str:
        return model.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    text = decode(whole)
    for stop in (text[6:9], text[11], text[14:22]):  # across tokens, and steps
        made = model.generate(prompt, max_new_tokens=40, tree=TREE, stop_strings=["never there", stop])
        (tokens,), (stats,) = made.new_tokens, made.stats
        assert tokens == whole[: len(tokens)] and stats.finish_reason == "stop"
        assert stats.new_tokens == len(tokens)
        assert stop in decode(tokens) and stop not in decode(tokens[:-1])
        chunks = model.stream(prompt, max_new_tokens=40, tree=TREE, stop_strings=stop)
        assert [token for chunk in chunks for token in chunk] == tokens
    with pytest.raises(ValueError, match="stop_strings need a tokenizer"):
        engine("llama").generate(prompt, stop_strings="x")


def test_several_texts_of_a_prompt_are_those_of_its_streams() -> None:
    model, sampled = engine("llama"), {"max_new_tokens": 9, "tree": TREE, "temperature": 1.0}
    made = model.generate(prompts(2), seed=3, num_return_sequences=3, **sampled)
    assert made.sequences.shape[0] == 6 and made.sequences[:, :9].tolist() == [
        row for row in prompts(2).tolist() for _ in range(3)
    ]
    assert len({tuple(row) for row in made.new_tokens}) == 6
    for row in range(6):
        prompt = prompts(2)[row // 3][None]
        assert model.generate(prompt, seed=[(3, row)], **sampled).new_tokens == [made.new_tokens[row]]
    with pytest.raises(ValueError, match="num_return_sequences is 2 at temperature 0"):
        model.generate(prompts(1), num_return_sequences=2)


def test_a_streamer_is_shown_the_prompt_and_every_token() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.seen: list[int] = []
            self.ended = 0

        def put(self, value: Tensor) -> None:
            assert not self.ended
            self.seen += value.flatten().tolist()

        def end(self) -> None:
            self.ended += 1

    model, recorder = engine("llama"), Recorder()
    made = model.generate(prompts(1), max_new_tokens=9, tree=TREE, streamer=recorder)
    assert recorder.seen == made.sequences[0].tolist() and recorder.ended == 1
    again, rows = Recorder(), prompts(1).tolist()
    try:
        torch.set_default_device("meta")  # where there is no data
        model.generate(rows, max_new_tokens=9, tree=TREE, streamer=again)
    finally:
        torch.set_default_device(None)
    assert again.seen == recorder.seen
    with pytest.raises(ValueError, match="streamer with 2 texts"):
        model.generate(prompts(2), streamer=recorder)


def test_a_models_own_generation_config_is_honoured() -> None:
    """As in Hugging Face, greedy; what the caller says counts more."""
    own = tiny_model("llama")
    own.generation_config = transformers.GenerationConfig(
        repetition_penalty=1.4, no_repeat_ngram_size=3, bad_words_ids=[[17]], suppress_tokens=[5],
        sequence_bias=[[[7], 1.5]], min_new_tokens=3, top_p=0.5, pad_token_id=0,
    )  # fmt: skip
    model = EagleFSD(TargetModel(own), engine("llama").drafter)
    assert model.target.ignored_defaults == {}
    ours = model.generate(prompts(8), max_new_tokens=NEW, tree=TREE)
    wanted = own.generate(prompts(8), max_new_tokens=NEW, do_sample=False)
    assert ours.sequences.tolist() == wanted.tolist()
    off = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": [], "suppress_tokens": []}
    plain = model.generate(prompts(8), max_new_tokens=NEW, tree=TREE, logit_bias={}, min_new_tokens=0, **off)
    assert plain.new_tokens == engine("llama").generate(prompts(8), max_new_tokens=NEW, tree=TREE).new_tokens
    own.generation_config = transformers.GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.9, min_p=0.05
    )
    sampled = {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.05}
    said = engine("llama").generate(prompts(4), max_new_tokens=NEW, tree=TREE, seed=1, **sampled)
    assert model.generate(prompts(4), max_new_tokens=NEW, tree=TREE, seed=1).new_tokens == said.new_tokens
    greedy = model.generate(prompts(4), max_new_tokens=NEW, tree=TREE, temperature=0)
    assert greedy.seed is None


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"repetition_penalty": 0}, r"repetition_penalty is 0: it must be a number between 1e-10 and 1e\+10"),
        ({"repetition_penalty": -1}, "repetition_penalty is -1"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan"),
        ({"frequency_penalty": float("inf")}, "frequency_penalty is inf"),
        ({"presence_penalty": -1e39}, r"presence_penalty is -1e\+39: it must be a number between"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
        ({"bad_words_ids": [[]]}, "bad_words_ids has an empty sequence"),
        ({"bad_words_ids": [3]}, "bad_words_ids has 3: it must be a list"),
        ({"bad_words_ids": "bad"}, "bad_words_ids is 'bad'"),
        ({"suppress_tokens": ["x"]}, "suppress_tokens has 'x'"),
        ({"suppress_tokens": [VOCAB]}, f"suppress_tokens has the token {VOCAB}"),
        ({"bad_words_ids": [[3, VOCAB]]}, f"bad_words_ids has the token {VOCAB}"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias is inf"),
        ({"logit_bias": {3: 1e39}}, r"logit_bias is 1e\+39: it must be a number between"),
        ({"logit_bias": 3}, "logit_bias is 3: it must map tokens"),
        ({"logit_bias": [[1, 2, -3.0]]}, r"logit_bias is \[\[1, 2, -3.0\]\]: it must map tokens"),
        ({"logit_bias": "never"}, "logit_bias is 'never': it must map tokens"),
        ({"logit_bias": {(): 1.0}}, "logit_bias has an empty sequence"),
        ({"min_new_tokens": 1.5}, "min_new_tokens is 1.5"),
        ({"min_new_tokens": 4}, "min_new_tokens is 4: .* between 0 and 3; lower it, or raise max_new_tokens"),
        ({"logits_processor": [3]}, "logits_processor holds 3"),
        ({"logits_processor": lambda ids, scores: scores[:, 1:]}, "returned .* it must return logits"),
        ({"logprobs": 101}, "logprobs is 101"),
        ({"stop_strings": [""]}, "stop_strings has ''"),
        ({"num_return_sequences": 0}, "num_return_sequences is 0"),
        ({"min_p": 1.5}, "min_p is 1.5"),
    ],
)
def test_wrong_values_are_named(keywords: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        engine("llama").generate(prompts(1), max_new_tokens=3, tree=TREE, **keywords)


def test_nothing_asked_is_nothing_done() -> None:
    assert not GenerationOptions().processing.active and GenerationOptions().processing == UNPROCESSED
    assert not hf_options(UNPROCESSED, 4)
    for name, processing in PROCESSINGS.items():
        assert processing.active, name
    assert AnswerPenalties(1.0, 1.0, 2)(torch.tensor([[1, 1, 0]]), torch.zeros(1, 3)).tolist() == [[-2, 0, 0]]
