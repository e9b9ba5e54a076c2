"""Chains inside vLLM, without vLLM: what a request asks, what a chain emits, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from eagle_fsd.acceptance.accept import Lossless
from eagle_fsd.acceptance.divergence import get_divergence
from eagle_fsd.acceptance.fuzzy import Fuzzy
from eagle_fsd.core.config import PAPER, SamplingConfig
from eagle_fsd.core.sampling import warp
from eagle_fsd.integrations.vllm import shape
from eagle_fsd.integrations.vllm.chain import NO_TOKEN, Chains, Counts, Row, accept_chains, chain_tree
from eagle_fsd.integrations.vllm.settings import (
    GREEDY_BELOW,
    Rule,
    Terms,
    fsd_arguments,
    make_terms,
    request_rule,
    server_defaults,
)

V, MOST = 11, 5  # tokens, nodes of the longest chain
END = 3
GREEDY = SamplingConfig()


# --- what is asked


@pytest.mark.parametrize(
    ("defaults", "asked", "rule"),
    [
        ({}, None, Lossless()),
        ({}, {"session": "x", "fsd_threshold": 0}, Lossless()),
        ({}, {"fsd_threshold": 0.3}, Fuzzy(0.3)),
        ({"threshold": 0.5}, {}, Fuzzy(0.5)),
        ({"threshold": 0.5, "min_p": 0.1}, {"fsd_threshold": 0.2}, Fuzzy(0.2, min_p=0.1)),
        ({"threshold": 0.5, "divergence": "tv"}, {"fsd_threshold": 0}, Lossless()),
        (
            {},
            {
                **{"fsd_threshold": "inf", "fsd_max_overshoot": "Infinity", "fsd_max_consecutive": 2},
                **{"fsd_exact_eos": 0, "fsd_mode": "paper", "fsd_exact_prefix": 3, "fsd_min_gain": 0.5},
            },
            Fuzzy(math.inf, mode=PAPER, max_consecutive=2, exact_eos=False, exact_prefix=3, min_gain=0.5),
        ),
        ({}, {"fsd_threshold": 0.3, "fsd_price": 1.5, "fsd_cost": "kl"}, Fuzzy(0.3, price=1.5, cost="kl")),
    ],
)
def test_a_requests_rule(defaults: dict[str, Any], asked: dict[str, Any] | None, rule: Rule) -> None:
    assert request_rule(defaults, asked) == rule


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"fsd_threshold": -1}, r"^fsd_threshold is -1: it must be a number at least 0"),
        ({"fsd_threshold": "much"}, r"^fsd_threshold is 'much': it must be a number"),
        ({"fsd_threshold": [0.3]}, r"^fsd_threshold is \[0.3\]: it must be a number"),
        ({"fsd_threshold": math.nan}, r"^fsd_threshold is nan"),
        ({"fsd_divergence": "euclid"}, r"^fsd_divergence is 'euclid': it must be one of reverse_kl"),
        ({"fsd_divergence": ["js"]}, r"^fsd_divergence is \['js'\]: it must be"),
        ({"fsd_mode": "first"}, r"^fsd_mode is 'first': it must be one of"),
        ({"fsd_min_p": 2}, r"^fsd_min_p is 2: it must be a number between 0 and 1"),
        ({"fsd_max_consecutive": 1.5}, r"^fsd_max_consecutive is 1.5: it must be an integer"),
        ({"fsd_exact_eos": "yes"}, r"^fsd_exact_eos is 'yes': it must be true or false"),
        ({"fsd_exact_eos": 2}, r"^fsd_exact_eos is 2: it must be true or false"),
        ({"fsd_child": "draft"}, r"^fsd_child is 'draft': vLLM drafts chains"),
        ({"fsd_thresold": 0.3}, r"^fsd_thresold is 0.3: there is no such field; it must be one of threshold"),
    ],
)
def test_wrong_values_of_a_request_are_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        request_rule({}, asked)
    assert "\n" not in str(caught.value)


def test_an_exact_beginning_is_refused_where_lengths_come_late() -> None:
    asked = {"fsd_threshold": 0.3, "fsd_exact_prefix": 4}
    assert request_rule({}, asked).exact_prefix == 4
    with pytest.raises(ValueError, match=r"^fsd_exact_prefix is 4: with asynchronous scheduling"):
        request_rule({}, asked, async_scheduling=True)
    assert request_rule({}, {"fsd_threshold": 0.3}, async_scheduling=True) == Fuzzy(0.3)


def test_defaults_of_a_server() -> None:
    assert server_defaults({}) == server_defaults(None) == server_defaults({"other": 1}) == {}
    assert server_defaults({"fsd": {"threshold": 0.3, "exact_eos": True}}) == {
        "threshold": 0.3,
        "exact_eos": True,
    }
    with pytest.raises(ValueError, match=r"^fsd is 0.3 in additional_config: it must be an object"):
        server_defaults({"fsd": 0.3})
    with pytest.raises(ValueError, match=r"^fsd in additional_config: threshold is -1"):
        server_defaults({"fsd": {"threshold": -1}})


def test_vllms_sampling_parameters() -> None:
    assert make_terms(Lossless(), 0.0, -1, 1.0, (2,)) == Terms(Lossless(), GREEDY, (2,))
    assert make_terms(Lossless(), GREEDY_BELOW / 2, 5, 0.5, ()).sampling == GREEDY
    assert make_terms(Lossless(), 0.7, -1, 0.9, ()).sampling == SamplingConfig(0.7, 0, 0.9)
    assert make_terms(Lossless(), 0.7, 40, 1.0, ()).sampling == SamplingConfig(0.7, 40)
    assert fsd_arguments({"fsd_a": 1, "afsd_b": 2}) == {"a": 1}


# --- chains


def test_a_chain_is_a_tree_with_one_child_at_each_node() -> None:
    tokens = torch.tensor([[5, 6, 7], [8, 9, 9], [4, 5, 6]])
    sound = torch.tensor([[True] * 3, [True] * 3, [True, False, True]])
    tree = chain_tree(tokens, torch.tensor([3, 2, 3]), sound, torch.zeros(3, 3, V), V, MOST)
    assert tree.tokens.tolist() == [[0, 5, 6, 7], [0, 8, 9, 9], [0, 4, 5, 6]]
    # A chain of two has a filler; below a node whose logits are no distribution, nothing is reached.
    assert tree.parents.tolist() == [[-1, 0, 1, 2], [-1, 0, 1, -1], [-1, 0, -1, 2]]
    assert tree.depths.tolist() == [[0, 1, 2, 3], [0, 1, 2, 0], [0, 1, 2, 3]]
    assert tree.owners.tolist() == [[0, 1, 2], [0, 1, -1], [0, 1, 2]]
    assert (tree.depth, tree.largest) == (3, MOST)
    assert chain_tree(tokens, torch.tensor([3, 2, 3]), sound, None, V, MOST).owners.shape == (3, 0)


def a_step(counts: Sequence[int], seed: int, near: float = 1.0) -> tuple[Chains, Tensor]:
    """Draw logits, a draft near to them and its likeliest tokens, and bonuses, for chains."""
    random = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(sum(counts), V, generator=random)
    log_q = (logits + near * torch.randn(sum(counts), V, generator=random)).log_softmax(-1)
    return Chains(log_q.argmax(-1), logits, log_q), torch.randint(V, (len(counts), 1), generator=random)


def plain_greedy(row: Row, tokens: list[int], logits: Tensor, log_q: Tensor, bonus: int) -> list[int]:
    """Walk one chain as it is said: the target's choice, or the draft's token where the rule lets it."""
    rule, out, in_a_row = row.terms.rule, [], 0
    for place, token in enumerate(tokens):
        draw = int(logits[place].argmax())
        if token == draw:
            in_a_row = 0
            out.append(token)
            continue
        followed = False
        if isinstance(rule, Fuzzy):
            p, q = logits[place].softmax(-1), log_q[place].exp()
            followed = (
                float(get_divergence(rule.divergence)(logits[place], log_q[place])) <= rule.threshold
                and not (rule.exact_eos and token in row.terms.ends)
                and float(p[token]) >= rule.min_p * float(p.max())
                and float(q[token]) <= rule.max_overshoot * float(p[token])
                and (rule.max_consecutive is None or in_a_row < rule.max_consecutive)
                and row.emitted + place + 1 > rule.exact_prefix
                and drawn_below(tokens, logits, place + 1) >= rule.min_gain
            )
        if not followed:
            return [*out, draw]
        in_a_row += 1
        out.append(token)
    return [*out, bonus]


def drawn_below(tokens: list[int], logits: Tensor, place: int) -> int:
    """Return how many tokens from a place on are the target's choices, one after the other."""
    matches = [token == int(at.argmax()) for token, at in zip(tokens[place:], logits[place:], strict=True)]
    return [*matches, False].index(False)


RULES: list[Rule] = [
    Lossless(),
    Fuzzy(0.05),
    Fuzzy(math.inf),
    Fuzzy(0.4, "tv"),
    Fuzzy(math.inf, exact_eos=False),
    Fuzzy(math.inf, max_consecutive=1),
    Fuzzy(math.inf, exact_prefix=9),
    Fuzzy(0.3, min_p=0.3),
    Fuzzy(0.3, max_overshoot=2.0),
    Fuzzy(math.inf, min_gain=1),
]


def test_greedy_chains_of_mixed_requests_are_a_plain_walk() -> None:
    """Every rule and guard, chains of different lengths, all in one batch; each emits what the walk says."""
    counts = [number // len(RULES) % MOST for number in range(9 * len(RULES))]
    rows = [
        Row(count, Terms(RULES[number % len(RULES)], GREEDY, (END,)), emitted=number % 13)
        for number, count in enumerate(counts)
    ]
    seen, counted = set[tuple[int, int]](), Counts()
    for seed in range(20):
        chains, bonus = a_step(counts, seed)
        out, start = accept_chains(rows, chains, bonus, MOST, counted), 0
        assert out.shape == (len(rows), MOST) and out.dtype == torch.int32
        for row, emitted, last in zip(rows, out.tolist(), bonus.flatten().tolist(), strict=True):
            part = slice(start, start + row.drafted)
            start += row.drafted
            wanted = plain_greedy(
                row, chains.tokens[part].tolist(), chains.logits[part], chains.log_q[part], last
            )
            assert emitted == wanted + [NO_TOKEN] * (MOST - len(wanted)), row
            seen.add((RULES.index(row.terms.rule), len(wanted)))
    assert all((rule, length) in seen for rule in range(2, len(RULES)) for length in (1, 2, 3))
    numbers = counted.read()
    assert numbers["steps"] == 20 * sum(count > 0 for count in counts)
    assert numbers["drafted"] == 20 * sum(counts)
    assert numbers["exact"] > 100 and numbers["fuzzy"] > 100
    assert numbers["exact"] + numbers["fuzzy"] < numbers["drafted"]


def test_a_request_emits_the_same_alone_and_among_others() -> None:
    """Sampled and greedy, each with its own seed, whatever else is in the batch and however long it is."""
    rules = [Lossless(), Fuzzy(0.2), Fuzzy(0.2, mode=PAPER), Fuzzy(0.5, "tv", max_consecutive=1)]
    sampled = [SamplingConfig(0.8), SamplingConfig(1.2, 5, 0.9), GREEDY]
    counts = [4, 1, 3, 0, 2, 4, 3, 2, 1, 4, 4, 3]
    chains, bonus = a_step(counts, 1, near=0.5)

    def row(number: int) -> Row:
        terms = Terms(rules[number % 4], sampled[number % 3], (END,))
        return Row(counts[number], terms, 2, torch.Generator().manual_seed(number))

    together = accept_chains([row(number) for number in range(12)], chains, bonus, MOST)
    for number in range(12):
        start = sum(counts[:number])
        part = slice(start, start + counts[number])
        mine = Chains(chains.tokens[part], chains.logits[part], chains.log_q[part])
        alone = accept_chains([row(number)], mine, bonus[number : number + 1], MOST)[0].tolist()
        assert together[number].tolist() == alone + [NO_TOKEN] * (MOST - len(alone))


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(0.8)])
def test_both_modes_accept_the_same_on_a_chain(sampling: SamplingConfig) -> None:
    chains, bonus = a_step([4] * 50, 6, near=0.5)
    made = []
    for rule in (Fuzzy(0.1), Fuzzy(0.1, mode=PAPER), Lossless()):
        seeded = [Row(4, Terms(rule, sampling), 0, torch.Generator().manual_seed(row)) for row in range(50)]
        made.append(accept_chains(seeded, chains, bonus, MOST).tolist())
    assert made[0] == made[1] != made[2]


def test_a_seeded_request_draws_equally_many_numbers_in_every_step() -> None:
    """So that a text can be had again whatever is accepted; a greedy one draws none."""
    left = []
    for seed, sampling in ((1, SamplingConfig(0.7)), (2, SamplingConfig(0.7)), (3, GREEDY)):
        random = torch.Generator().manual_seed(5)
        chains, bonus = a_step([1 + seed], seed)
        accept_chains([Row(1 + seed, Terms(Fuzzy(0.3), sampling), 0, random)], chains, bonus, MOST)
        left.append(float(torch.rand(1, generator=random)))
    assert left[0] == left[1] != left[2]
    assert left[2] == float(torch.rand(1, generator=torch.Generator().manual_seed(5)))


@pytest.mark.parametrize("sampling", [SamplingConfig(0.8), SamplingConfig(1.3, 6, 0.9)])
def test_lossless_chains_have_the_targets_distribution(sampling: SamplingConfig) -> None:
    """The first token, and the second where the first was the drafted one, by chi-square."""
    rows, law = 6000, []
    one, _ = a_step([2], 4, near=0.3)
    assert one.log_q is not None
    chains = Chains(one.tokens.repeat(rows), one.logits.repeat(rows, 1), one.log_q.repeat(rows, 1))
    torch.manual_seed(0)
    terms = Terms(Lossless(), sampling)
    out = accept_chains([Row(2, terms)] * rows, chains, torch.full((rows, 1), V - 1), MOST).long()
    followed = out[:, 0] == one.tokens[0]
    for tokens, logits in ((out[:, 0], one.logits[0]), (out[followed, 1], one.logits[1])):
        law = warp(logits, sampling)
        counts = torch.bincount(tokens, minlength=V)
        assert not counts[law == 0].any()
        expected = law[law > 0].double() * len(tokens)
        assert (
            chisquare(counts[law > 0].numpy(), expected.numpy() / expected.sum().item() * len(tokens)).pvalue
            > 1e-4
        )
    # Where both were accepted, vLLM's own draw comes last.
    both = followed & (out[:, 1] == one.tokens[1])
    assert both.any() and (out[both, 2] == V - 1).all() and (out[~both, 2] == NO_TOKEN).all()


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(0.8)])
def test_a_fuzzy_chain_has_its_distribution_in_closed_form(sampling: SamplingConfig) -> None:
    """Hybrid: where the divergence is below the threshold, the drafted token comes always, else p's draw."""
    one, _ = a_step([1], 9, near=0.4)
    assert one.log_q is not None
    one = Chains(one.logits.argsort(-1)[:, -2], one.logits, one.log_q)  # not the target's own choice
    measured = float(get_divergence("js")(one.logits, one.log_q))
    for threshold, always in ((measured * 1.01, True), (measured * 0.99, False)):
        terms = Terms(Fuzzy(threshold), sampling)
        rows = 4000
        chains = Chains(one.tokens.repeat(rows), one.logits.repeat(rows, 1), one.log_q.repeat(rows, 1))
        torch.manual_seed(1)
        out = accept_chains([Row(1, terms)] * rows, chains, torch.zeros(rows, 1).long(), MOST)[:, 0].long()
        share = float((out == one.tokens[0]).float().mean())
        p = float(warp(one.logits, sampling)[0, one.tokens[0]])
        assert share == 1.0 if always else abs(share - p) < 5 * math.sqrt(p / rows) + 1e-9


# --- what is no distribution


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(0.8)])
@pytest.mark.parametrize("threshold", [0.0, 0.3, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_target_without_a_distribution_rejects(
    sampling: SamplingConfig, threshold: float, bad: float
) -> None:
    """Whatever the draft is, also where the token that comes of the broken logits is the drafted one."""
    chains, bonus = a_step([3, 3], 2)
    logits = chains.logits.clone()
    logits[1, :] = bad
    rule = Fuzzy(threshold) if threshold else Lossless()
    rows = [Row(3, Terms(rule, sampling), 0, torch.Generator().manual_seed(number)) for number in range(2)]
    for token in range(V):
        tokens = chains.tokens.clone()
        tokens[0] = logits[0].argmax()
        tokens[1] = token
        out = accept_chains(rows, Chains(tokens, logits, chains.log_q), bonus, MOST)
        assert (out[0, 2:] == NO_TOKEN).all()
        assert (out[:, 0] >= 0).all() and (out < V).all()


@pytest.mark.parametrize("sampling", [GREEDY, SamplingConfig(0.8)])
@pytest.mark.parametrize("threshold", [0.3, math.log(2), math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_draft_without_a_distribution_is_followed_only_where_the_target_drew_it(
    sampling: SamplingConfig, threshold: float, bad: float
) -> None:
    chains, bonus = a_step([2] * 40, 3)
    assert chains.log_q is not None
    wrong = chains.log_q.clone()
    wrong[:, 5] = bad
    for log_q in (wrong, torch.full_like(wrong, bad), None):
        emitted = [
            accept_chains(
                [Row(2, Terms(rule, sampling), 0, torch.Generator().manual_seed(row)) for row in range(40)],
                Chains(chains.tokens, chains.logits, log_q),
                bonus,
                MOST,
            ).tolist()
            for rule in (Lossless(), Fuzzy(threshold))
        ]
        assert emitted[0] == emitted[1]


# --- what is needed of vLLM


def test_other_versions_are_refused() -> None:
    for version in ("0.32.0", "0.32.1+cpu", "0.33.0"):
        shape.require_version(version)
    for version in ("0.34.0", "0.31.9", "0.3.2", "0.330.1", "dev"):
        with pytest.raises(ValueError, match=rf"vLLM is '{version}'.*0\.32\.\* or 0\.33\.\*; install vLLM"):
            shape.require_version(version)


def a_config(**changes: Any) -> Any:
    speculation = {
        "method": "eagle",
        "rejection_sample_method": "standard",
        "parallel_drafting": False,
        "use_local_argmax_reduction": False,
        "use_heterogeneous_vocab": False,
    }
    speculation |= {name: changes.pop(name) for name in list(changes) if name in speculation}
    fields = {
        "speculative_config": SimpleNamespace(**speculation),
        "use_v2_model_runner": False,
        "model_config": SimpleNamespace(logprobs_mode=changes.pop("logprobs_mode", "raw_logprobs")),
        "parallel_config": SimpleNamespace(pipeline_parallel_size=changes.pop("stages", 1)),
    }
    return SimpleNamespace(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculative_config": None}, "fsd is set without a draft"),
        ({"method": "ngram"}, "speculative method is 'ngram'.*eagle, eagle3, draft_model"),
        ({"rejection_sample_method": "block"}, "rejection_sample_method is 'block'"),
        ({"parallel_drafting": True}, "parallel_drafting is True"),
        ({"use_local_argmax_reduction": True}, "use_local_argmax_reduction is True"),
        ({"use_heterogeneous_vocab": True}, "use_heterogeneous_vocab is True"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"logprobs_mode": "processed_logprobs"}, "logprobs_mode is 'processed_logprobs'"),
        ({"stages": 2}, "pipeline_parallel_size is 2"),
    ],
)
def test_settings_without_fsd_are_refused(changes: dict[str, Any], said: str) -> None:
    shape.require_settings(a_config())
    with pytest.raises(ValueError, match=said) as caught:
        shape.require_settings(a_config(**changes))
    assert "\n" not in str(caught.value)


class Sampler:
    sampler = None
    is_processed_logprobs_mode = False

    def forward(self, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> None: ...

    def apply_logits_processors(self, logits: Any, sampling_metadata: Any, metadata: Any) -> None: ...

    def _get_logprobs_tensors(
        self,
        max_num_logprobs: int,
        metadata: Any,
        logits: Any,
        target_logits: Any,
        bonus_logits: Any,
        sampled_token_ids: Any,
    ) -> None: ...


class OtherSampler(Sampler):
    def forward(self, metadata: Any, draft_logits: Any, logits: Any, sampling_metadata: Any) -> None: ...  # type: ignore[override]


class ADrafter:
    _last_draft_probs = None

    def _sample_draft_tokens(self, hidden_states: Any, sampling_metadata: Any) -> None: ...

    def take_last_draft_probs(self) -> None: ...


class Runner:
    requests = input_batch = sampler = speculative_config = None

    def __init__(self, drafter: Any, rejection_sampler: Any) -> None:
        self.drafter, self.rejection_sampler = drafter, rejection_sampler

    def _get_spec_decode_draft_probs(self, spec_decode_metadata: Any) -> None: ...


def test_a_runner_of_another_shape_is_refused() -> None:
    shape.require_runner(Runner(ADrafter(), Sampler()))
    with pytest.raises(
        ValueError, match=r"rejection_sampler.forward takes metadata, draft_logits.*install vLLM 0\.32"
    ):
        shape.require_runner(Runner(ADrafter(), OtherSampler()))
    with pytest.raises(ValueError, match=r"drafter object has no _sample_draft_tokens.*install vLLM 0\.32"):
        shape.require_runner(Runner(object(), Sampler()))
    with pytest.raises(ValueError, match=r"model runner SimpleNamespace has no requests.*install vLLM 0\.32"):
        shape.require_runner(SimpleNamespace())
