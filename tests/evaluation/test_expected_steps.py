"""Expected steps against the walk itself, and rows of them as points."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.stubs import generator, random_tree
from support.whole_distribution import distances, path_distributions

from eagle_fsd import Fuzzy, SamplingConfig
from eagle_fsd.acceptance.accept import AcceptanceRule, Lossless, Verified
from eagle_fsd.acceptance.accept_step import accept
from eagle_fsd.acceptance.rule_names import parse_rule
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.evaluation.analysis.bootstrap import Bootstrap
from eagle_fsd.evaluation.analysis.points import panels
from eagle_fsd.evaluation.commands.exchange import exchange_table
from eagle_fsd.evaluation.measure.observers import StepMeter, expected_step
from eagle_fsd.evaluation.rows import read_raw_rows

VOCAB, ROWS = 9, 8000
NONE = torch.empty(0, dtype=torch.int64)
SAMPLINGS = {"warm": SamplingConfig(1.0), "narrow": SamplingConfig(0.7, 6, 0.9)}
RULES = (
    *("lossless", "js:0.3", "js:0.45:paper:likeliest", "js:inf:price=0.5", "js:inf:swap:price=0.4"),
    *("js:inf:paper:price=0.5:cost=kl", "typical:0.3:0.09", "relaxed_topk:3:0.4", "cactus:0.3"),
    *("ensemble:0.6", "sglang:0.5:0.8", "fly:0.2:1", "fsd_paper:0.4"),
)


def verified_tree(sampling: SamplingConfig, seed: int = 4) -> Verified:
    tree = random_tree(batch=1, nodes=8, depth=3, width=3, vocab_size=VOCAB, seed=seed)
    logits = 1.5 * torch.randn(1, 8, VOCAB, generator=generator(seed))
    return Verified(tree, logits, sampling, NONE)


@pytest.mark.covering(1)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("word", RULES)
def test_the_walk_does_on_average_what_is_expected(word: str, sampling: SamplingConfig) -> None:
    rule, seeds = parse_rule(word), range(30)
    trees = (verified_tree(sampling, seed) for seed in seeds)
    one = next(tree for tree in trees if word == "lossless" or float(expected_step(rule, tree).tv) > 0.05)
    many = Verified(one.tree.select([0] * ROWS), one.logits.expand(ROWS, -1, -1), sampling, NONE)
    verdict = accept(rule, many, RowRandom(3, ROWS), torch.zeros(ROWS, dtype=torch.int64))
    kl, tv = distances(*path_distributions(many, verdict, rule.mode))
    inside = torch.arange(verdict.path.shape[1]) < verdict.length[:, None]
    found = expected_step(rule, one)
    for drawn, expected in (
        (verdict.length.double(), found.tokens),
        (torch.where(inside, tv, 0.0).double().sum(1), found.tv),
        (torch.where(inside, kl, 0.0).double().sum(1), found.kl),
    ):
        error = float(drawn.std()) / math.sqrt(ROWS)
        assert float(drawn.mean()) == pytest.approx(float(expected), abs=5 * error + 1e-5)


@pytest.mark.parametrize("word", RULES)
def test_fillers_change_nothing(word: str) -> None:
    one = verified_tree(SAMPLINGS["warm"])
    tree = replace(one.tree, most=11).filled_up()
    logits = torch.cat((one.logits, one.logits[:, :1].expand(-1, 3, -1)), dim=1)
    wide = Verified(tree, logits, one.sampling, NONE)
    assert tree.tokens.shape[1] == 11
    found, same = (expected_step(parse_rule(word), tree) for tree in (wide, one))
    for mine, other in ((found.tokens, same.tokens), (found.tv, same.tv), (found.kl, same.kl)):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("word", RULES)
def test_a_greedy_step_is_what_is_expected(word: str) -> None:
    """Nothing is drawn, but for the child of a rule that draws one."""
    rule = parse_rule(word)
    for seed in range(6):
        verified = verified_tree(SamplingConfig(), seed)
        verdict = accept(rule, verified, RowRandom(1, 1), torch.zeros(1, dtype=torch.int64))
        _, tv = distances(*path_distributions(verified, verdict, rule.mode))
        found, length = expected_step(rule, verified), int(verdict.length)
        assert float(found.tokens) == pytest.approx(length, abs=1e-5)
        assert float(found.tv) == pytest.approx(float(tv[0, :length].sum()), abs=1e-5)
        assert math.isinf(float(found.kl)) == (float(found.tv) > 0)


def test_the_papers_rule_is_lossless_at_threshold_0() -> None:
    """It has no chances then, and the walk follows the target's draws to the end."""
    for sampling in (*SAMPLINGS.values(), SamplingConfig()):
        verified = verified_tree(sampling)
        found, lossless = (expected_step(parse_rule(word), verified) for word in ("fsd_paper:0", "lossless"))
        assert float(found.tokens) == float(lossless.tokens) and float(found.tv) == 0
    assert float(expected_step(Lossless(), verified_tree(SAMPLINGS["warm"])).tokens) > 1


def test_no_rule_of_draws_beats_the_swapping_plan_on_a_tree() -> None:
    """What a plan promises: tokens less the price of TV, against every other rule on the same trees."""
    margin = 0.0
    for seed in range(8):
        verified = verified_tree(SAMPLINGS["warm"], seed)
        for price in (0.3, 1.0, 2.0):
            mine = expected_step(Fuzzy(math.inf, mode="swap", price=price), verified)
            for word in RULES:
                other = expected_step(parse_rule(word), verified)
                ahead = float((mine.tokens - price * mine.tv) - (other.tokens - price * other.tv))
                assert ahead >= -1e-5, (word, seed, price)
                margin = max(margin, ahead)
    assert margin > 0.1


def test_rules_that_know_the_text_are_refused() -> None:
    for rule in (Fuzzy(0.3, max_consecutive=1), Fuzzy(0.3, exact_prefix=4)):
        rules: tuple[AcceptanceRule, ...] = (Lossless(), rule)
        with pytest.raises(ValueError, match="max_consecutive and exact_prefix depend on what was accepted"):
            StepMeter(rules, 1)


def test_an_infinite_distance_is_null_in_a_row() -> None:
    meter = StepMeter([Lossless()], 1)
    meter.sums[0, 0] = torch.tensor([3.0, 0.5, math.inf])
    (found,) = meter.row(0)["expected"]
    assert found == {"rule": {"name": "lossless"}, "new_tokens": 3.0, "law": {"tv": 0.5, "kl": None}}


def row_of_steps(sample: str, tokens: float) -> dict[str, Any]:
    def entry(rule: Mapping[str, Any], more: float, tv: float) -> dict[str, Any]:
        return {"rule": dict(rule), "new_tokens": tokens + more, "law": {"tv": tv, "kl": None}}

    return {
        **{"key": "k", "task": "prompts/tiny", "version": 1, "sample": sample, "seed": 0},
        **{"rule": {"name": "lossless"}, "sampling": {"temperature": 1.0}, "tree": {"total_tokens": 8}},
        **{"max_new_tokens": 8, "dtype": "float32", "base_model": "b", "ea_model": "e"},
        **{"draft_vocab_size": None, "finish_reason": "length", "steps": 10, "new_tokens": 8},
        **{"fuzzy_accepts": 0, "seconds": 1.0, "batch_size": 1, "law": {"tv": 0.0, "kl": 0.0}},
        **{"log_p": -1.0, "scores": {}, "token_ids": [1, 2]},
        "expected": [
            entry({"name": "lossless"}, 0.0, 0.0),
            entry({"name": "ensemble", "weight": 0.5}, 4.5, 1.5),
        ],
    }


def test_a_row_of_steps_is_a_row_for_every_rule(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row_of_steps(str(i), 20.0 + i)) + "\n" for i in range(4)))
    rows = read_raw_rows([path], expected=True)[path]
    assert [row.rule["name"] for row in rows[:2]] == ["lossless", "ensemble"] and len(rows) == 8
    assert rows[1].new_tokens == 24.5 and rows[1].tv == 1.5 and rows[1].log_p is None
    how = Bootstrap(100, seed=0)
    table = exchange_table(panels(rows, how)[0], how)
    assert "| ensemble 0.5 | 0.058 | 1.21 | 3.00 (3.00 to 3.00) |" in table  # 1.5 / 26, 26 / 21.5, 4.5 / 1.5
    with pytest.raises(ValueError, match=r"rows.jsonl:1: is a row of --same-trees"):
        read_raw_rows([path])
    spoilt = row_of_steps("9", 1.0)
    del spoilt["expected"][1]["law"]
    path.write_text(json.dumps(spoilt) + "\n")
    with pytest.raises(ValueError, match="it must be rule, new_tokens and law; make the row again"):
        read_raw_rows([path], expected=True)
