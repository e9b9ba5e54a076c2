"""A draft vocabulary: its logits, and the target's text, which it must not change."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from support.drafters import feed
from support.stubs import generator
from support.tiny_models import HIDDEN, VOCAB, greedy_alone, prompts_of, tiny_head, tiny_model
from support.trap_models import VOCAB as EXACT_VOCAB
from support.trap_models import exact_pair, random_tokens
from torch import Tensor, nn

from eagle_fsd import EagleFSD, Fuzzy, HeadConfig, Lossless, TreeConfig, Typical
from eagle_fsd.acceptance.divergence import DIVERGENCES, SPARSE_DIVERGENCES
from eagle_fsd.acceptance.other_rules import Cactus, Ensemble, FLy
from eagle_fsd.core.tree import root_only
from eagle_fsd.drafting.draft_vocabulary import DraftVocabulary
from eagle_fsd.drafting.eagle_head import DraftHead
from eagle_fsd.engine import GenerationOutput
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training.data.token_counts import rank_tokens

TREE = TreeConfig(12, 4, 3)
RULES = [
    *(Lossless(), Fuzzy(0.3), Fuzzy(0.9, "reverse_kl", mode="paper"), Fuzzy(0.3, "js_top10")),
    *(Typical(), Cactus(0.5), Ensemble(0.3), FLy(0.0, 1)),
]


def some_tokens(count: int, vocab_size: int = VOCAB, seed: int = 0) -> Tensor:
    """Return distinct tokens in random order."""
    return torch.randperm(vocab_size, generator=generator(seed))[:count]


# --- a head and its draft tokens ---


def test_a_restricted_head_keeps_its_weights_and_its_keys() -> None:
    head, tokens = tiny_head(), some_tokens(7)
    before = {key: value.clone() for key, value in head.state_dict().items()}
    assert head.restrict(tokens) is head and head.config.draft_vocab_size == 7
    assert head.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[key]) for key, value in head.state_dict().items())
    tokens[0] = -1  # the caller's tensor is the caller's
    assert head.draft_tokens.tolist() == some_tokens(7).tolist()
    assert head.bfloat16().draft_tokens.dtype == torch.int64
    assert head.restrict(None).draft_tokens is None and head.config.draft_vocab_size is None


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([1, 2], dtype=torch.int32), "draft_tokens is torch.int32: .* torch.int64; "),
        (torch.ones(1, 2, dtype=torch.int64), r"draft_tokens has shape \[1, 2\]: it must be \[K\]"),
        (torch.tensor([], dtype=torch.int64), r"draft_tokens has shape \[0\]: .* at least one"),
        (torch.tensor([3, VOCAB]), r"draft_tokens holds 3..96: .* 0..95; "),
        (torch.tensor([3, -1]), r"draft_tokens holds -1..3"),
        (torch.tensor([3, 5, 5]), "draft_tokens holds 5 more than once: token ids must be distinct; "),
    ],
)
def test_tokens_that_are_no_draft_vocabulary(tokens: Tensor, message: str) -> None:
    head = tiny_head()
    with pytest.raises(ValueError, match=message) as caught:
        head.restrict(tokens)
    assert "\n" not in str(caught.value)
    assert head.draft_tokens is None and head.config.draft_vocab_size is None


def test_a_size_alone_makes_no_head() -> None:
    with pytest.raises(ValueError, match=r"draft_vocab_size is 9: .* call restrict"):
        DraftHead(HeadConfig(16, 32, 2, 1, 8, 64, draft_vocab_size=9))
    with pytest.raises(ValueError, match=r"draft_vocab_size is 65: it must be at most the vocab_size \(64\)"):
        HeadConfig(16, 32, 2, 1, 8, 64, draft_vocab_size=65)
    with pytest.raises(ValueError, match="draft_vocab_size is 0: it must be an integer between 1 and "):
        HeadConfig(16, 32, 2, 1, 8, 64, draft_vocab_size=0)


# --- its logits ---


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "granite", "cohere", "gptj"])
def test_logits_of_few_tokens_are_those_of_all(family: str) -> None:
    """Soft-caps, scales and biases included; in the order of the tokens."""
    target, tokens = TargetModel(tiny_model(family, "eager")), some_tokens(20)
    features = torch.randn(2, 3, HIDDEN, generator=generator(1))
    vocabulary = DraftVocabulary(target, tokens)
    with torch.no_grad():
        wanted = target.logits(features)[..., tokens]
        torch.testing.assert_close(vocabulary.logits(features), wanted, atol=1e-5, rtol=1e-5)
        assert vocabulary.logits(features).dtype == torch.float32
    assert vocabulary.lm_head.weight.shape == (20, HIDDEN) and vocabulary.lm_head.weight.is_contiguous()
    assert torch.equal(vocabulary.embed(torch.arange(VOCAB)), target.embed(torch.arange(VOCAB)))


def test_an_lm_head_that_is_more_than_its_rows_is_asked_whole() -> None:
    class Doubled(nn.Linear):
        def forward(self, features: Tensor) -> Tensor:
            return 2 * super().forward(features)

    model = tiny_model()
    doubled = Doubled(HIDDEN, VOCAB, bias=False)
    doubled.weight = model.lm_head.weight
    model.lm_head = doubled
    target, tokens = TargetModel(model), some_tokens(5)
    features = torch.randn(1, 2, HIDDEN, generator=generator(1))
    with torch.no_grad():
        found = DraftVocabulary(target, tokens).logits(features)
        assert torch.equal(found, target.logits(features)[..., tokens])


def test_a_draft_over_the_whole_vocabulary() -> None:
    log_q = torch.randn(2, 3, 4, generator=generator(0)).log_softmax(-1)
    whole = replace(root_only(torch.tensor([1, 2]), 10), log_q=log_q, drafted=torch.tensor([6, 0, 9, 3]))
    whole = whole.whole_log_q(10)
    assert torch.equal(whole[..., [6, 0, 9, 3]], log_q)
    assert (whole[..., [1, 2, 4, 5, 7, 8]] == -torch.inf).all()
    torch.testing.assert_close(whole.exp().sum(-1), torch.ones(2, 3))


# --- the text ---


@functools.cache
def exact_target() -> TargetModel:
    return TargetModel(exact_pair()[0])


def drafted_with(tokens: Tensor | None, **options: object) -> GenerationOutput:
    """Generate with a target whose head is never wrong, with this draft vocabulary."""
    engine = EagleFSD(exact_target(), exact_pair()[1].restrict(tokens))
    return engine.generate(random_tokens(3, 12), max_new_tokens=40, tree=TREE, **options)


def test_greedy_text_is_the_targets_and_tau_says_what_the_vocabulary_holds() -> None:
    """The head is never wrong: paths are full if all tokens of the text are in the vocabulary.

    tau is 1 if none is, and between if some are. The text is the target's own each time.
    """
    texts = greedy_alone(exact_target().model, random_tokens(3, 12).tolist(), 40)
    counts = torch.bincount(torch.tensor(texts).flatten(), minlength=EXACT_VOCAB)
    used = int((counts > 0).sum())
    assert 8 <= used <= EXACT_VOCAB - 4
    whole = drafted_with(None)
    taus = {}
    for name, tokens in {
        "those of the text": rank_tokens(counts, used),
        "half of them": rank_tokens(counts, used // 2),
        "the others": (counts == 0).nonzero()[:, 0],
    }.items():
        made = drafted_with(tokens)
        assert made.new_tokens == texts
        taus[name] = [stats.tau for stats in made.stats]
    assert whole.new_tokens == texts and all(stats.tau > 4 for stats in whole.stats)
    assert taus["those of the text"] == [stats.tau for stats in whole.stats]
    assert all(1 < tau < stats.tau for tau, stats in zip(taus["half of them"], whole.stats, strict=True))
    assert taus["the others"] == [1.0] * 3


@pytest.mark.covering(1)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_tokens_in_any_order_are_no_restriction(rule: object, temperature: float) -> None:
    """Texts and accepts are the same as with the full vocabulary, under every rule."""
    whole = drafted_with(None, rule=rule, temperature=temperature, seed=0)
    assert all(stats.exact_accepts for stats in whole.stats)
    for tokens in (torch.arange(EXACT_VOCAB), some_tokens(EXACT_VOCAB, EXACT_VOCAB)):
        made = drafted_with(tokens, rule=rule, temperature=temperature, seed=0)
        assert made.new_tokens == whole.new_tokens
        for ours, theirs in zip(made.stats, whole.stats, strict=True):
            assert ours.accept_histogram == theirs.accept_histogram
            assert ours.fuzzy_accepts == theirs.fuzzy_accepts


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "granite", "gptj"])
def test_greedy_text_of_real_classes(family: str) -> None:
    model = tiny_model(family, "eager")
    engine = EagleFSD(TargetModel(model), tiny_head().restrict(some_tokens(11)))
    prompts = prompts_of((5, 5, 5))
    made = engine.generate(torch.tensor(prompts), max_new_tokens=20, tree=TREE)
    assert made.new_tokens == greedy_alone(model, prompts, 20)


def test_only_tokens_of_the_vocabulary_are_drafted() -> None:
    """A tree holds only them. Its log q is a distribution over them, and -inf elsewhere."""
    tokens = some_tokens(7)
    engine = EagleFSD(TargetModel(tiny_model()), tiny_head().restrict(tokens))
    drafter = engine.drafter.make(1, 64, TreeConfig(16, 5, 8))
    with torch.inference_mode():
        feed(drafter, torch.randn(1, 3, HIDDEN, generator=generator(0)), torch.tensor([[5, 6, 7]]), [3])
        tree = drafter.draft(torch.tensor([7]), TREE)
    assert set(tree.tokens[0, 1:].tolist()) <= set(tokens.tolist())
    assert torch.equal(tree.drafted[tree.columns[:, 1:]], tree.tokens[:, 1:])
    whole = tree.whole_log_q(VOCAB)
    assert tree.log_q.shape[-1] == 7 and whole.shape[-1] == VOCAB
    assert ((whole > -torch.inf).sum(-1) == 7).all()
    torch.testing.assert_close(whole.exp().sum(-1), torch.ones(whole.shape[:2]))
    plain = replace(tree, log_q=whole, drafted=None, columns=None)
    assert torch.equal(tree.node_log_q(), plain.node_log_q())


def test_rows_are_copied_once() -> None:
    engine = EagleFSD(TargetModel(tiny_model()), tiny_head().restrict(some_tokens(9)))
    weight = engine.drafter.vocabulary.lm_head.weight
    for _ in range(2):
        engine.generate([[1, 2, 3]], max_new_tokens=4, tree=TREE)
    assert engine.drafter.vocabulary.lm_head.weight is weight
    assert EagleFSD(engine.target, tiny_head()).drafter.vocabulary is engine.target


# --- what a draft vocabulary rules out ---


@pytest.mark.parametrize("name", DIVERGENCES)
def test_rules_whose_divergence_is_infinite_are_refused(name: str) -> None:
    """By `generate` and by `stream`, which starts lazily. Threshold 0 asks for no divergence."""
    engine = EagleFSD(TargetModel(tiny_model()), tiny_head().restrict(some_tokens(9)))
    for call in (engine.generate, engine.stream):
        call([[1, 2, 3]], max_new_tokens=3, tree=TREE, rule=Fuzzy(0.0, name))
        if name in SPARSE_DIVERGENCES:
            call([[1, 2, 3]], max_new_tokens=3, tree=TREE, rule=Fuzzy(0.3, name))
            continue
        with pytest.raises(ValueError, match=f"divergence is '{name}': .* 9 tokens; choose one of") as caught:
            call([[1, 2, 3]], max_new_tokens=3, tree=TREE, rule=Fuzzy(0.3, name))
        message = str(caught.value)
        assert "\n" not in message and all(works in message for works in SPARSE_DIVERGENCES)
    plain = EagleFSD(engine.target, tiny_head())
    plain.generate([[1, 2, 3]], max_new_tokens=3, tree=TREE, rule=Fuzzy(0.3, name))


def test_a_tree_wider_than_the_draft_vocabulary() -> None:
    engine = EagleFSD(TargetModel(tiny_model()), tiny_head().restrict(some_tokens(9)))
    engine.generate([[1, 2]], max_new_tokens=3, tree=TreeConfig(16, 3, 9))
    with pytest.raises(
        ValueError, match="top_k of the tree is 10: the head's draft vocabulary has 9 tokens; "
    ):
        engine.stream([[1, 2]], tree=TreeConfig(16, 3, 10))
