"""The published FSD algorithm through the engine, against one that is written straight down."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.stubs import generator, random_tree
from support.tiny_models import greedy_alone, prompts_of, tiny_head, tiny_model
from support.whole_distribution import path_distributions
from torch import Tensor

from eagle_fsd import EagleFSD, Fuzzy, GenerationOptions, SamplingConfig, TreeConfig
from eagle_fsd.acceptance.accept import Verified
from eagle_fsd.acceptance.accept_step import accept
from eagle_fsd.acceptance.divergence import DIVERGENCES
from eagle_fsd.acceptance.other_rules import PublishedFSD
from eagle_fsd.acceptance.rule_names import describe, parse_rule
from eagle_fsd.cli.arguments import generation_options
from eagle_fsd.cli.flags.parser import build_parser
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.sampling import draw, warp
from eagle_fsd.drafting.draft_model import DraftModelSpec
from eagle_fsd.target.first_layers import first_layers
from eagle_fsd.target.model import TargetModel

DRAFTED = 5
TARGET = TargetModel(tiny_model())


@torch.no_grad()
def logits_of(model: TargetModel, text: list[int]) -> Tensor:
    """Return the logits [n, V] of a plain forward."""
    return model.model(torch.tensor([text]), use_cache=False).logits[0].float()


def published(
    target: TargetModel, draft: TargetModel, prompt: list[int], count: int, options: GenerationOptions
) -> tuple[list[int], list[int]]:
    """Return at least `count` new tokens and how many each step made: Algorithm 1, without cache or tree."""
    divergence = DIVERGENCES[options.rule.divergence]
    random, text, steps = RowRandom(options.seed, 1), list(prompt), []
    while len(text) < len(prompt) + count:
        drafted = list(text)
        for _ in range(DRAFTED):
            drafted.append(int(logits_of(draft, drafted)[-1].argmax()))
        p, q = (logits_of(model, drafted)[len(text) - 1 :] for model in (target, draft))
        accepted = 0
        while accepted < DRAFTED and divergence(p[accepted], q[accepted]) <= options.rule.threshold:
            accepted += 1
        if options.temperature:
            uniform = random.uniform(2 * (DRAFTED + 1))[0, accepted]
            last = int(draw(warp(p[accepted], options.sampling), uniform))
        else:
            last = int(p[accepted].argmax())
        text = [*drafted[: len(text) + accepted], last]
        steps.append(accepted + 1)
    return text[len(prompt) :], steps


# About the medians of what the two models are apart.
SETTINGS = [
    *(("js", 0.12), ("ag", 0.15)),
    *(pytest.param(*one, marks=pytest.mark.slow) for one in (("tv", 0.4), ("reverse_kl", 0.5))),
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.6, 0.0])
@pytest.mark.parametrize(("divergence", "threshold"), SETTINGS)
def test_texts_are_those_of_the_algorithm_written_down(
    divergence: str, threshold: float, temperature: float
) -> None:
    """Token by token and step by step, with the same random numbers."""
    draft = TargetModel(first_layers(TARGET.model, 1))
    model = EagleFSD(TARGET, DraftModelSpec.for_target(draft, TARGET))
    lengths: list[int] = []
    for seed, prompt in enumerate(prompts_of([7, 1, 4])):
        options = GenerationOptions.fsd_paper(threshold, divergence, temperature=temperature, seed=seed)
        wanted, steps = published(TARGET, draft, prompt, 24, options)
        found = model.generate([prompt], options=replace(options, max_new_tokens=len(wanted)))
        assert found.new_tokens == [wanted] and found.stats[0].steps == len(steps)
        lengths += steps
    assert 1 in lengths and max(lengths) > 2, "the threshold tells no tokens apart"


def test_a_first_failure_stops_even_where_the_target_draws_the_drafted_token() -> None:
    """Fuzzy's mode `paper` goes on there; a target that drafts for itself shows it at a tiny threshold."""
    model = EagleFSD(TARGET, DraftModelSpec.for_target(TargetModel(tiny_model(seed=1)), TARGET))
    prompt, tree = prompts_of([6]), TreeConfig(6, 5, 1)
    wanted = greedy_alone(TARGET.model, prompt, 12)
    stops = model.generate(prompt, max_new_tokens=12, tree=tree, rule=PublishedFSD(1e-6))
    assert stops.new_tokens == wanted and stops.stats[0].steps == 12
    same = EagleFSD(TARGET, DraftModelSpec.for_target(TARGET, TARGET))
    goes_on = same.generate(prompt, max_new_tokens=12, tree=tree, rule=PublishedFSD(1e-6))
    assert goes_on.new_tokens == wanted and goes_on.stats[0].steps == 2
    none = torch.empty(0, dtype=torch.int64)
    tree = random_tree(batch=4, nodes=9, depth=4, width=3, vocab_size=9, seed=0)
    logits = torch.randn(4, 9, 9, generator=generator(1))
    verified = Verified(tree, logits, SamplingConfig(1.0), none)
    zeros = torch.zeros(4, dtype=torch.int64)
    never = PublishedFSD(1e-9)
    verdict = accept(never, verified, RowRandom(0, 4), zeros)
    assert verdict.length.tolist() == [1] * 4 and not verdict.fuzzy.any()
    assert max(accept(Fuzzy(1e-9, mode="paper"), verified, RowRandom(0, 4), zeros).length) > 1


def test_the_distribution_in_closed_form_is_the_one_it_draws_from() -> None:
    """At the root: the likeliest child where p and q are close, else p; no guard removes a child."""
    tree = random_tree(batch=6, nodes=11, depth=4, width=4, vocab_size=13, seed=2)
    logits = torch.randn(6, 11, 13, generator=generator(2))
    verified = Verified(tree, logits, SamplingConfig(0.6, 2), torch.arange(13))  # all tokens end a text
    rule = PublishedFSD(0.2)
    verdict = accept(rule, verified, RowRandom(0, 6), torch.zeros(6, dtype=torch.int64))
    r, p = path_distributions(verified, verdict, rule.mode)
    follows = 0
    for row in range(6):
        place = tree.owners[row].tolist().index(0)
        value = DIVERGENCES["js"](logits[row, 0], tree.log_q[row, place])
        children = [n for n in range(11) if tree.parents[row, n] == 0]
        best = max(children, key=lambda n: tree.log_q[row, place, tree.tokens[row, n]].item())
        wanted = p[row, 0].clone()
        if value <= rule.threshold:
            wanted = torch.zeros_like(wanted).index_fill(0, tree.tokens[row, best], 1.0)
            follows += 1
        torch.testing.assert_close(r[row, 0], wanted)
    assert 0 < follows < 6


def test_a_token_that_is_ruled_out_is_never_followed() -> None:
    """Whatever the threshold: a ban or a form makes its logit -inf."""
    tree = random_tree(batch=6, nodes=11, depth=4, width=4, vocab_size=13, seed=2)
    logits = torch.randn(6, 11, 13, generator=generator(2))
    logits[..., ::2] = -torch.inf
    verified = Verified(tree, logits, SamplingConfig(1.0), torch.empty(0, dtype=torch.int64))
    chances = PublishedFSD(torch.inf).chances(verified)
    drafted, even = tree.parents >= 0, tree.tokens % 2 == 0
    assert chances is not None and (drafted & even).any()
    assert not chances[drafted & even].any() and chances[drafted & ~even].any()


def test_it_is_lossless_at_zero_and_known_by_name() -> None:
    model = EagleFSD(TARGET, tiny_head())
    prompt = prompts_of([6])
    found = model.generate(
        prompt, options=GenerationOptions.fsd_paper(0.0, temperature=0.0, max_new_tokens=9)
    )
    assert found.new_tokens == greedy_alone(TARGET.model, prompt, 9)
    assert describe(PublishedFSD(0.2, "tv")) == {"name": "fsd_paper", "threshold": 0.2, "divergence": "tv"}
    assert parse_rule("fsd_paper:0.2:tv") == PublishedFSD(0.2, "tv")
    for bad in ({"threshold": -1.0}, {"divergence": "no"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            PublishedFSD(**bad)
    some = EagleFSD(TARGET, tiny_head().restrict(torch.arange(0, 96, 2)))
    with pytest.raises(ValueError, match="it is infinite where the draft has no probability"):
        some.settler.require_rule(PublishedFSD(0.3, "ag"))


def test_the_preset_is_a_set_of_defaults() -> None:
    def options(*flags: str) -> GenerationOptions:
        return generation_options(build_parser().parse_args([*flags, "--seed", "1", "x"]))

    mine = options("--preset", "fsd-paper")
    assert mine == replace(GenerationOptions.fsd_paper(), seed=mine.seed)
    assert (mine.tree, mine.sampling) == (TreeConfig(6, 5, 1), SamplingConfig(0.6, 50, 0.9))
    flags = "--threshold 0.4 --divergence ag --temperature 0 --depth 3 --total-tokens 4 --preset fsd-paper"
    mine = options(*flags.split())
    assert (mine.rule, mine.tree) == (PublishedFSD(0.4, "ag"), TreeConfig(4, 3, 1)) and mine.sampling.greedy
    assert options("--preset", "fsd-paper", "--rule", "lossless").rule != mine.rule
    parser = build_parser()
    usual = parser.parse_args([])
    parser.parse_args(["--preset", "fsd-paper"])
    assert parser.parse_args([]) == usual
    assert options().rule == Fuzzy(0.0)
