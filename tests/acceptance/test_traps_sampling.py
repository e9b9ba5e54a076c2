"""Traps of drawing, stopping and counting: warpers, p = 0, random streams, end tokens, tau, baselines.

Most tests end with the trap itself, set on purpose: what the test checks must then come out wrong.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.trap_models import exact_engine, random_tokens
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import eagle_fsd
from eagle_fsd import EagleFSD, Fuzzy, GenerationStats, Lossless, SamplingConfig, TreeConfig
from eagle_fsd.acceptance.accept import Verdict, Verified
from eagle_fsd.acceptance.accept_step import accept
from eagle_fsd.cli.flags import parser
from eagle_fsd.core.config import CHILDREN
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.sampling import draw, warp
from eagle_fsd.core.stats import Stopwatch
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.decoding.request import Text
from eagle_fsd.decoding.steps import emission

TREE = TreeConfig(16, 5, 8)
PACKAGE = Path(eagle_fsd.__file__).parent


def sources() -> Iterator[tuple[str, ast.AST]]:
    """Every node of the package's syntax, with its file."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            yield file.relative_to(PACKAGE).as_posix(), node


def warper_uses(node: ast.AST) -> bool:
    """Whether a piece of code names one of Hugging Face's logits processors or passes input_ids=None."""
    if isinstance(node, ast.keyword):
        return node.arg == "input_ids" and isinstance(node.value, ast.Constant) and node.value.value is None
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", getattr(node, "name", ""))
    return isinstance(name, str) and name.endswith(("LogitsWarper", "LogitsProcessor", "LogitsProcessorList"))


def test_trap_09_warpers_need_no_prefix() -> None:
    """Trap 9: warpers called with input_ids=None: here warping reads logits alone, node by node, as in HF."""
    logits = 3 * torch.randn(2, 16, 40, generator=torch.Generator().manual_seed(0))  # [B, N, V]
    prefix = random_tokens(1, 5, 40)
    warpers = [TemperatureLogitsWarper(0.6), TopKLogitsWarper(20), TopPLogitsWarper(0.9)]
    ours = warp(logits, SamplingConfig(0.6, 20, 0.9))
    for row in range(2):
        for node in range(16):
            scores = logits[row, node][None]
            for warper in warpers:
                scores = warper(prefix, scores)
            assert torch.allclose(ours[row, node], scores.softmax(-1)[0], atol=1e-6)
    users = [file for file, node in sources() if warper_uses(node)]
    # A check of ours against theirs, and the baseline, whose `generate` calls processors itself.
    assert set(users) <= {"evaluation/gpu/texts.py", "target/hf_generate.py"}
    trap = "from transformers import TopKLogitsWarper\nTopKLogitsWarper(5)(input_ids=None, scores=scores)"
    assert sum(warper_uses(node) for node in ast.walk(ast.parse(trap))) == 3


class Zeros(RowRandom):
    """A stream that only ever says 0, the number at which `r <= p` accepts p = 0."""

    def uniform(self, n: int) -> Tensor:
        return torch.zeros_like(super().uniform(n))


def impossible_child() -> tuple[DraftTree, Tensor]:
    """A root whose likeliest child, token 0, has p = 0, and whose other child, token 3, has not."""
    logits = torch.tensor([[-torch.inf, 1.0, 1.0, 1.0]]).expand(1, 3, 4)
    tree = DraftTree(
        tokens=torch.tensor([[1, 0, 3]]),
        parents=torch.tensor([[-1, 0, 0]]),
        depths=torch.tensor([[0, 1, 1]]),
        log_q=torch.tensor([[[0.9, 0.0, 0.0, 0.1]]]).log(),
        owners=torch.tensor([[0]]),
        depth=1,
    )
    return tree, logits


def decide(rule: Lossless | Fuzzy, sampling: SamplingConfig) -> Verdict:
    tree, logits = impossible_child()
    none = torch.zeros(0, dtype=torch.int64)
    return accept(
        rule,
        Verified(tree, logits, sampling, none),
        Zeros(0, 1),
        torch.zeros(1, dtype=torch.int64),
    )


@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(1.0), SamplingConfig(0.6, 50, 0.9)])
@pytest.mark.parametrize("child", CHILDREN)
def test_trap_10_zero_probability_is_never_accepted(sampling: SamplingConfig, child: str) -> None:
    """Trap 10: `r <= p` accepts a token of p = 0 at r = 0: neither a draw nor any rule may ever take one."""
    assert 0 not in decide(Lossless(), sampling).tokens[0].tolist()
    for mode in ("hybrid", "paper"):
        verdict = decide(Fuzzy(float("inf"), mode=mode, child=child), sampling)
        assert verdict.tokens[0, 0].item() != 0
    verdict = decide(Fuzzy(float("inf"), mode="paper", child=child), sampling)
    assert verdict.path.tolist() == [[0, 2]]  # the possible child is taken


def test_trap_10_draw_at_zero() -> None:
    """Trap 10: an inverse CDF read with `<=` gives the first token at u = 0, whatever its p."""
    for vocab in (4, 1000):
        probs = torch.zeros(vocab)
        probs[1:3] = 0.5
        ends = torch.tensor([0.0, 1.0 - 2**-24])
        assert draw(probs.expand(2, vocab), ends).tolist() == [1, 2]
        assert torch.searchsorted(probs.cumsum(0), ends[:1]).tolist() == [0]  # the trap


GLOBAL_RANDOM = {"random", "numpy", "secrets"}


def imported(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    return {(node.module or "").partition(".")[0]} if isinstance(node, ast.ImportFrom) else set()


def sampled_under(engine: EagleFSD, global_seed: int) -> list[list[int]]:
    """Texts of the engine's seed 5 with the process's own generators at `global_seed`."""
    torch.manual_seed(global_seed)
    random.seed(global_seed)
    before = torch.get_rng_state(), random.getstate()
    output = engine.generate(
        random_tokens(2, 12),
        max_new_tokens=24,
        temperature=1.0,
        rule=Fuzzy(0.2),
        tree=TREE,
        seed=5,
    )
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
    return output.new_tokens


# They import numpy for arrays, and their files and folders get random names.
ARRAYS = ("runtime/openvino/", "drafting/lookup/", "hub/loading/weights_on_disk")


def test_trap_11_one_source_of_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 11: random numbers from outside the seeded streams: texts depend on the seed and nothing else."""
    core = [
        file
        for file, node in sources()
        if imported(node) & GLOBAL_RANDOM and not file.startswith(("training/", "evaluation/", *ARRAYS))
    ]
    # Where the seeded streams are made, where files get names that no other process has, and where clients of
    # a full server are told to wait, not all as long.
    assert set(core) == {
        "files/atomic.py",
        "serving/work/line.py",
        "core/randomness/noise.py",
        "core/randomness/streams.py",
    }
    for file in [
        file for folder in ARRAYS for file in (PACKAGE / folder).glob("*.py")
    ]:  # of numpy's random numbers, only those of a fixed seed
        assert not re.search(r"np\.random\.(?!default_rng\(\d)", file.read_text("utf-8")), file
    assert imported(ast.parse("import numpy.random as npr").body[0]) & GLOBAL_RANDOM
    engine = exact_engine(sharpness=1.0)
    with torch.random.fork_rng():
        assert sampled_under(engine, 1) == sampled_under(engine, 2)

        def foreign(rows: RowRandom, n: int) -> Tensor:
            return torch.tensor([[random.random()] * n for _ in rows._rows])

        monkeypatch.setattr(RowRandom, "uniform", foreign)
        with pytest.raises(AssertionError):
            sampled_under(engine, 1)


def test_trap_12_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 12: tokens after an end token kept, one of several end tokens missed, the limit overshot."""
    engine = exact_engine()
    prompt = random_tokens(1, 12)
    text = engine.target_alone(prompt, max_new_tokens=40).new_tokens[0]

    def check() -> None:
        for limit in range(1, 14):
            output = engine.generate(prompt, max_new_tokens=limit, rule=Lossless(), tree=TREE)
            assert output.new_tokens[0] == text[:limit]
            assert output.sequences.shape == (1, 12 + limit)
            assert output.stats[0].finish_reason == "length" and output.stats[0].new_tokens == limit
        firsts = sorted({token: text.index(token) for token in text}.items(), key=lambda item: item[1])
        for (late, place), (early, sooner) in zip(firsts[1:9], firsts[:8], strict=True):
            for ends, last in ((late, place), ([late], place), ([late, early], sooner)):
                output = engine.generate(
                    prompt, max_new_tokens=40, rule=Lossless(), tree=TREE, eos_token_id=ends
                )
                assert output.new_tokens[0] == text[: last + 1]
                assert output.stats[0].finish_reason == "stop" and output.stats[0].new_tokens == last + 1
        engine.target.model.generation_config.eos_token_id = [firsts[9][0], firsts[8][0]]  # the model's own
        try:
            output = engine.generate(prompt, max_new_tokens=40, rule=Lossless(), tree=TREE)
            assert output.new_tokens == engine.target_alone(prompt, max_new_tokens=40).new_tokens
            assert output.new_tokens[0] == text[: firsts[8][1] + 1]
        finally:
            engine.target.model.generation_config.eos_token_id = None

    check()

    def emit(text: Text, step: emission.Step) -> list[int]:
        tokens, stats = step.tokens, text.stats
        stats.record(len(tokens), step.count - 1, 0)
        if stats.new_tokens >= text.limit:
            stats.finish_reason = "length"
        if any(token in text.terms.eos_token_ids for token in tokens):
            stats.finish_reason = "stop"
        return tokens

    monkeypatch.setattr(emission, "emit", emit)  # the trap: a step's tokens are never cut
    with pytest.raises((AssertionError, ValueError)):
        check()


def test_trap_12_relaxed_rules_stop_too() -> None:
    """Trap 12: a rule that follows the draft runs past an end token or the limit."""
    engine = exact_engine(sharpness=1.0)
    rule = Fuzzy(float("inf"), mode="paper", exact_eos=False)
    for seed in range(8):
        output = engine.generate(
            random_tokens(2, 12, seed=seed),
            max_new_tokens=20,
            temperature=1.0,
            rule=rule,
            tree=TREE,
            seed=seed,
            eos_token_id=[3, 9],
        )
        for row, stats in zip(output.new_tokens, output.stats, strict=True):
            assert len(row) == stats.new_tokens <= 20
            assert all(token not in (3, 9) for token in row[:-1])
            assert (row[-1] in (3, 9)) == (stats.finish_reason == "stop")


def test_trap_17_tau_counts_the_targets_own_token() -> None:
    """Trap 17: tau without the target's own token is one less: here it is counted, and said so."""
    engine = exact_engine()
    prompts = random_tokens(2, 12)
    drafted = engine.generate(prompts, max_new_tokens=60, rule=Lossless(), tree=TREE)
    plain = engine.generate(prompts, max_new_tokens=60, rule=Lossless(), tree=TreeConfig(1, 1, 1))
    for stats in drafted.stats:
        assert (stats.steps, stats.new_tokens, stats.tau) == (10, 60, TREE.depth + 1)
        assert stats.accept_histogram == [0] * 6 + [10]
        assert stats.exact_accepts + stats.fuzzy_accepts + stats.steps == stats.new_tokens
        assert (stats.exact_accepts + stats.fuzzy_accepts) / stats.steps == TREE.depth  # the other count
    assert [stats.tau for stats in plain.stats] == [1.0, 1.0]
    assert [stats.tau for stats in engine.target_alone(prompts, max_new_tokens=8).stats] == [1.0, 1.0]
    assert "target's own" in (GenerationStats.tau.__doc__ or "")


def test_trap_18_baseline_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 18: a ratio over an unnamed baseline: it is the target's own `generate`, named in the help."""
    engine = exact_engine()
    calls: list[dict[str, object]] = []
    right = type(engine.target.model).generate

    def generate(*args: object, **kwargs: object) -> object:
        calls.append(kwargs)
        return right(*args, **kwargs)

    monkeypatch.setattr(type(engine.target.model), "generate", generate)
    prompts = random_tokens(2, 12)
    baseline = engine.target_alone(prompts, max_new_tokens=16)
    assert len(calls) == 1  # both rows in one call: the engine's batches are compared with batches
    assert not calls[0].keys() & {"assistant_model", "custom_generate", "prompt_lookup_num_tokens"}
    assert calls[0].get("use_cache") is not False
    assert all(stats.steps == stats.new_tokens == 16 and stats.seconds > 0 for stats in baseline.stats)
    documented = EagleFSD.target_alone.__doc__ or ""
    assert "baseline" in documented and "Hugging Face `generate`" in documented
    (flag,) = (a for a in parser.build_parser()._actions if "--baseline" in a.option_strings)
    assert "Hugging Face generate" in (flag.help or "")


def test_trap_18_baseline_may_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 18: an uncompiled baseline: where the user compiles the target, the baseline runs that too."""
    engine = exact_engine()
    calls: list[str] = []

    def compiled(call: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            calls.append("compiled")
            return call(*args, **kwargs)

        return run

    monkeypatch.setattr(torch, "compile", compiled)  # the real one takes minutes
    engine.target.decoder.compile()
    prompts = random_tokens(1, 12)
    baseline = engine.target_alone(prompts, max_new_tokens=12).new_tokens
    assert len(calls) == 12  # one forward a token
    assert engine.generate(prompts, max_new_tokens=12, rule=Lossless(), tree=TREE).new_tokens == baseline
    assert len(calls) == 12 + 1 + 2  # a prefill and two steps of six tokens


def test_trap_17_record_refuses_a_step_without_own_token() -> None:
    """Trap 17: every step emits at least the target's own token, so that tau never falls below 1."""
    stats = GenerationStats()
    stats.record(3, 2, 0)
    stats.set_times(Stopwatch(), 1.0)
    with pytest.raises(ValueError, match="at least one token"):
        stats.record(0, 0, 0)
    assert stats.tau == 3.0
