"""The loop: ragged batches, sizes that must not matter, stopping, and the stats."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from support.tiny_models import KnowingDrafter, greedy_alone, prompts_of, run_loop, tiny_head, tiny_model
from torch import Tensor

from eagle_fsd import EagleFSD, Fuzzy, GenerationStats, Lossless, SamplingConfig, TreeConfig, Typical
from eagle_fsd.acceptance.accept import AcceptanceRule, Verdict
from eagle_fsd.core.tree import DraftTree
from eagle_fsd.decoding import loop
from eagle_fsd.decoding.batch import choose_rows
from eagle_fsd.decoding.steps.emission import Step
from eagle_fsd.decoding.steps.failures import NonFiniteLogits
from eagle_fsd.drafting.drafter import NoDrafter
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

LENGTHS = (6, 1, 19, 11)
NEW_TOKENS = 26
PROMPTS = prompts_of(LENGTHS)
TREE = TreeConfig(16, 5, 3)
SAMPLED = SamplingConfig(temperature=0.9, top_k=40, top_p=0.95)


@functools.cache
def target() -> TargetModel:
    """Return a sliding-window model, so that positions and slots matter beyond the prompt."""
    return TargetModel(tiny_model("mistral"))


@functools.cache
def greedy_texts() -> list[list[int]]:
    return greedy_alone(target().model, PROMPTS, NEW_TOKENS + 8)


def saying(token: int, rows: int) -> KnowingDrafter:
    """Return a drafter that always drafts the same token."""
    return KnowingDrafter([[token] * 64] * rows, reach=None, check=False)


def check_stats(stats: GenerationStats, text: list[int], steps: list[list[int]]) -> None:
    """Check that the counts follow from the chunks, and the accepts from the counts, but for a cut step."""
    sizes = [len(step) for step in steps if step]
    assert stats.steps == len(sizes) == sum(stats.accept_histogram)
    assert stats.new_tokens == len(text) == sum(k * n for k, n in enumerate(stats.accept_histogram))
    assert [sizes.count(k) for k in range(len(stats.accept_histogram))] == stats.accept_histogram
    drafted = stats.exact_accepts + stats.fuzzy_accepts
    assert stats.new_tokens - stats.steps <= drafted <= stats.new_tokens - stats.steps + 1
    assert stats.tau == pytest.approx(len(text) / len(sizes))


# --- ragged batches ---


@pytest.mark.parametrize("drafting", ["head", "knowing"])
def test_greedy_rows_equal_the_same_prompt_alone(drafting: str) -> None:
    """Rows of different lengths that finish at different times: each equals the target's own text."""
    limits = [26, 3, 17, 9]
    drafter = tiny_head() if drafting == "head" else KnowingDrafter(greedy_texts())
    made = run_loop(target(), PROMPTS, drafter, limits)
    assert made.texts == [text[:limit] for text, limit in zip(greedy_texts(), limits, strict=True)]
    for row in range(len(PROMPTS)):
        check_stats(made.stats[row], made.texts[row], [step[row] for step in made.steps])
    assert [len(step) for step in made.steps] == [len(PROMPTS)] * len(made.steps)
    done = [max(i for i, step in enumerate(made.steps) if step[row]) for row in range(len(PROMPTS))]
    assert len(set(done)) == len(done), "the rows were meant to finish at different times"
    if drafting == "knowing":
        assert all(stats.tau > 2 for stats in made.stats)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "rule",
    [Lossless(), Fuzzy(threshold=0.5), Fuzzy(threshold=0.5, mode="paper"), Typical()],
    ids=["lossless", "hybrid", "paper", "typical"],
)
@pytest.mark.parametrize(
    ("capacity", "sure"),
    [
        *((1, 0.0), (512, 0.012)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((512, 0.0), (1, 0.012))),
    ],
)
def test_sampled_rows_equal_the_same_prompt_alone(rule: AcceptanceRule, capacity: int, sure: float) -> None:
    """Row r of seed s draws the same numbers as the prompt alone with the stream (s, r).

    This also holds in caches that grow, and if the rows' trees have different sizes.
    """
    limits = [26, 5, 17, 9]
    settings = {"rule": rule, "sampling": SAMPLED, "tree": TreeConfig(12, 3, 4, sure)}
    batch = run_loop(target(), PROMPTS, tiny_head(), limits, seed=40, capacity=capacity, **settings)
    for row, (prompt, limit) in enumerate(zip(PROMPTS, limits, strict=True)):
        alone = run_loop(target(), [prompt], tiny_head(), limit, seed=[(40, row)], **settings)
        assert batch.texts[row] == alone.texts[0]
        assert batch.stats[row] == alone.stats[0]
    named = run_loop(target(), PROMPTS, tiny_head(), limits, seed=[(40, row) for row in range(4)], **settings)
    assert named.texts == batch.texts


@pytest.mark.parametrize(
    "rule", [Lossless(), Fuzzy(threshold=0.6, divergence="tv", child="target")], ids=["lossless", "fuzzy"]
)
def test_sampled_rows_with_ragged_trees_equal_the_same_prompt_alone(rule: AcceptanceRule) -> None:
    """Trees and accepted paths differ between the rows: their caches drift apart by more than the prompts."""
    texts = greedy_texts()
    settings = {"rule": rule, "sampling": SamplingConfig(temperature=0.05)}
    batch = run_loop(
        target(), PROMPTS, KnowingDrafter(texts, check=False), [24, 9, 13, 21], seed=7, **settings
    )
    for row, prompt in enumerate(PROMPTS):
        drafter = KnowingDrafter(texts[row : row + 1], check=False, first_row=row)
        alone = run_loop(target(), [prompt], drafter, [24, 9, 13, 21][row], seed=[(7, row)], **settings)
        assert batch.texts[row] == alone.texts[0]
        assert batch.stats[row] == alone.stats[0]
    assert max(stats.tau for stats in batch.stats) > 1.5


def test_a_batch_in_another_order_is_the_same_texts() -> None:
    seeds = [(5, row) for row in reversed(range(4))]
    made = run_loop(target(), PROMPTS[::-1], tiny_head(), sampling=SAMPLED, seed=seeds)
    assert made.texts[::-1] == run_loop(target(), PROMPTS, tiny_head(), sampling=SAMPLED, seed=5).texts


def test_seeds_matter() -> None:
    texts = [
        run_loop(target(), PROMPTS[:1], tiny_head(), sampling=SAMPLED, seed=seed).texts for seed in (0, 1, 0)
    ]
    assert texts[0] == texts[2] != texts[1]


# --- sizes that must not matter ---


SIZES = [
    *((1, 1, 1), (1, 5, 8), (2, 1, 1), (2, 3, 4), (3, 2, 1), (4, 3, 1), (6, 5, 1), (5, 1, 4), (9, 1, 8)),
    *((16, 5, 8), (60, 6, 10), (21, 2, 4), (7, 6, 2), (31, 3, 96)),
    *((60, 6, 10, 0.01), (31, 3, 96, 0.012), (16, 5, 8, 0.02), (16, 5, 8, 1.0)),
]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: "/".join(map(str, size)))
def test_greedy_text_does_not_depend_on_the_trees_size(size: tuple[int, int, int]) -> None:
    made = run_loop(target(), PROMPTS, tiny_head(), 12, tree=TreeConfig(*size))
    assert made.texts == [text[:12] for text in greedy_texts()]
    assert all(len(step[row]) <= size[1] + 1 for step in made.steps for row in range(len(PROMPTS)))


def test_levels_that_no_node_could_come_from_are_not_drafted() -> None:
    """A tree of three nodes is at most two deep, whatever depth was asked for."""
    head, forwards = tiny_head(), []
    head.register_forward_hook(lambda *_: forwards.append(None))
    made = [run_loop(target(), PROMPTS[:1], head, 12, tree=TreeConfig(3, depth, 2)) for depth in (2, 50)]
    assert made[0].texts == made[1].texts and made[0].stats == made[1].stats
    first = len(forwards)
    run_loop(target(), PROMPTS[:1], head, 12, tree=TreeConfig(3, 10**9, 2))
    assert len(forwards) - first == first / 2


def test_plain_decoding_is_a_tree_of_one_node() -> None:
    made = run_loop(target(), PROMPTS, NoDrafter(96), 12, tree=TreeConfig(1))
    assert made.texts == [text[:12] for text in greedy_texts()]
    assert all(stats.tau == 1.0 and stats.steps == 12 for stats in made.stats)


@pytest.mark.parametrize("capacity", [1, 5, 64])
def test_text_does_not_depend_on_the_first_capacity(capacity: int) -> None:
    """A cache frozen at its first length would be overrun or lose what it holds."""
    for drafter in (tiny_head(), KnowingDrafter(greedy_texts())):
        made = run_loop(target(), PROMPTS, drafter, NEW_TOKENS, capacity=capacity)
        assert made.texts == [text[:NEW_TOKENS] for text in greedy_texts()]


@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_prompts_longer_than_the_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = prompts_of((40, 3, 17, 1), seed=5)
    whole = run_loop(target(), prompts, tiny_head(), 12, sampling=SAMPLED)
    monkeypatch.setattr("eagle_fsd.runtime.kv_cache.WIDEST", chunk)
    pieces = run_loop(target(), prompts, tiny_head(), 12, sampling=SAMPLED)
    assert pieces.texts == whole.texts
    assert pieces.stats == whole.stats, "the same trees were drafted, too"


def test_prompts_of_one_token() -> None:
    prompts = [[5], [17], [80]]
    wanted = greedy_alone(target().model, prompts, 16)
    assert run_loop(target(), prompts, tiny_head(), 16).texts == wanted
    made = run_loop(target(), prompts, KnowingDrafter(wanted, reach=None), 16)
    assert made.texts == wanted
    assert all(stats.steps == 3 for stats in made.stats)


# --- oracles ---


def test_an_oracle_has_full_paths_accepted_in_every_step() -> None:
    made = run_loop(target(), PROMPTS, KnowingDrafter(greedy_texts(), reach=None), 24)
    for row, stats in enumerate(made.stats):
        assert [len(step[row]) for step in made.steps] == [6, 6, 6, 6]
        assert (stats.tau, stats.exact_accepts, stats.fuzzy_accepts) == (6.0, 20, 0)
        assert stats.accept_histogram == [0, 0, 0, 0, 0, 0, 4]


def test_an_anti_oracle_changes_nothing_and_tau_is_one() -> None:
    made = run_loop(target(), PROMPTS, KnowingDrafter(greedy_texts(), wrong=True), 24)
    assert made.texts == [text[:24] for text in greedy_texts()]
    for stats in made.stats:
        assert (stats.tau, stats.steps, stats.exact_accepts, stats.fuzzy_accepts) == (1.0, 24, 0, 0)


def test_an_infinite_threshold_follows_the_draft_to_its_depth() -> None:
    """A wrong draft is emitted, every step is as long as the tree is deep, and its accepts count as fuzzy."""
    rule = Fuzzy(threshold=float("inf"), mode="paper")
    made = run_loop(target(), PROMPTS, saying(50, rows=4), 24, rule=rule)
    for stats in made.stats:
        assert stats.accept_histogram == [0, 0, 0, 0, 0, 0, 4]
        assert stats.fuzzy_accepts > 15
        assert stats.fuzzy_accepts + stats.exact_accepts == 20


# --- stopping ---


@pytest.mark.parametrize("reach", [None, (0, 5)], ids=["whole paths", "ragged paths"])
def test_nothing_after_an_end_token_inside_an_accepted_path(reach: tuple[int, int] | None) -> None:
    """Every place of the path is tried as the end, the first and the step's own token too."""
    texts = greedy_texts()
    for place in range(14):
        ends = {text[place] for text in texts}  # several end tokens
        firsts = [next(i for i, token in enumerate(text) if token in ends) for text in texts]
        made = run_loop(target(), PROMPTS, KnowingDrafter(texts, reach=reach), 20, eos=sorted(ends))
        assert made.texts == [text[: first + 1] for text, first in zip(texts, firsts, strict=True)]
        for row, stats in enumerate(made.stats):
            assert stats.finish_reason == "stop"
            check_stats(stats, made.texts[row], [step[row] for step in made.steps])


def test_end_tokens_of_generate_are_ours() -> None:
    model = tiny_model("mistral")
    for end in sorted(set(greedy_texts()[0]))[:6]:
        model.generation_config.eos_token_id = [end, 95]
        wanted = greedy_alone(model, PROMPTS[:1], NEW_TOKENS)
        assert wanted[0][-1] in (end, 95) or len(wanted[0]) == NEW_TOKENS
        made = run_loop(target(), PROMPTS[:1], tiny_head(), NEW_TOKENS, eos=[end, 95])
        assert made.texts == wanted


@pytest.mark.parametrize("limit", range(1, 14))
def test_never_more_than_the_limit(limit: int) -> None:
    """The limits cover every remainder by the length of a full step. No step is unneeded."""
    made = run_loop(target(), PROMPTS, KnowingDrafter(greedy_texts(), reach=None), limit)
    assert made.texts == [text[:limit] for text in greedy_texts()]
    for row, stats in enumerate(made.stats):
        assert stats.finish_reason == "length"
        assert stats.steps == -(-limit // 6)
        check_stats(stats, made.texts[row], [step[row] for step in made.steps])


def test_an_end_token_in_the_last_place_is_a_stop() -> None:
    text = greedy_texts()[0]
    place = next(i for i in range(4, 20) if text[i] not in text[:i])
    made = run_loop(target(), PROMPTS[:1], tiny_head(), place + 1, eos=[text[place]])
    assert made.texts == [text[: place + 1]]
    assert made.stats[0].finish_reason == "stop"


def test_end_tokens_come_from_the_target_alone() -> None:
    """exact_eos: a rule that follows any draft still does not end a text by it."""
    follow = Fuzzy(threshold=float("inf"))
    made = run_loop(target(), PROMPTS[:1], saying(50, rows=1), 12, rule=follow, eos=[50])
    assert 50 not in made.texts[0]
    assert (made.stats[0].new_tokens, made.stats[0].finish_reason) == (12, "length")
    free = Fuzzy(threshold=float("inf"), exact_eos=False)
    made = run_loop(target(), PROMPTS[:1], saying(50, rows=1), 12, rule=free, eos=[50])
    assert made.texts[0] == [50]
    assert (made.stats[0].finish_reason, made.stats[0].fuzzy_accepts) == ("stop", 1)


# --- the stats ---


@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "rule",
    [Lossless(), Fuzzy(threshold=0.4), Fuzzy(threshold=2.0, divergence="reverse_kl", mode="paper")],
    ids=["lossless", "hybrid", "paper"],
)
def test_stats_add_up_under_every_rule(rule: AcceptanceRule, sampling: SamplingConfig) -> None:
    drafter = KnowingDrafter(greedy_texts(), check=False)
    made = run_loop(target(), PROMPTS, drafter, [26, 3, 17, 9], rule=rule, sampling=sampling, eos=[11, 12])
    for row, stats in enumerate(made.stats):
        check_stats(stats, made.texts[row], [step[row] for step in made.steps])
        assert stats.finish_reason == ("stop" if made.texts[row][-1] in (11, 12) else "length")
        assert not {11, 12} & set(made.texts[row][:-1])
        if isinstance(rule, Lossless):
            assert stats.fuzzy_accepts == 0


def test_no_row_runs_after_its_end() -> None:
    """A finished row leaves the batch: the others go on without it, and its steps yield nothing."""
    made = run_loop(target(), PROMPTS, tiny_head(), [2, 26, 2, 26])
    for step in made.steps[2:]:
        assert step[0] == [] == step[2]
        assert step[1] or step[3]


# --- logits that are not finite ---

NAN, INF = float("nan"), float("inf")
WARM = SamplingConfig(temperature=0.9)
SAMPLINGS = [SamplingConfig(), WARM, SAMPLED, SamplingConfig(1.0, top_p=0.9), SamplingConfig(1e-4)]


def poison_logits(monkeypatch: pytest.MonkeyPatch, poison: Callable[[Tensor, int], None]) -> None:
    """Change every tree's logits [B, N, V] in place; the number of the step counts from 1."""
    target()  # made now, since its admission verifies trees too
    right, steps = TargetSession.verify, itertools.count(1)

    def verify(session: TargetSession, tree: DraftTree) -> tuple[Tensor, Tensor]:
        logits, features = right(session, tree)
        poison(logits, next(steps))
        return logits, features

    monkeypatch.setattr(TargetSession, "verify", verify)


@pytest.mark.covering(1)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("bad", [[NAN], [INF], [NAN, INF], None], ids=["nan", "inf", "both", "nothing"])
def test_logits_that_are_not_finite_end_with_an_error_and_no_text(
    sampling: SamplingConfig, bad: list[float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the third step, in one row of four, at the root: its step and row are named."""

    def poison(logits: Tensor, step: int) -> None:
        if step == 3 and bad:
            logits[2, 0, 7 : 7 + len(bad)] = torch.tensor(bad)
        elif step == 3:
            logits[2, 0] = -INF

    poison_logits(monkeypatch, poison)
    with pytest.raises(NonFiniteLogits, match=r"^step 3 of row 2: .* bfloat16 or float32") as raised:
        run_loop(target(), PROMPTS, tiny_head(), 24, sampling=sampling)
    assert (raised.value.step, raised.value.row) == (3, 2)
    assert isinstance(raised.value, ArithmeticError) and "\n" not in str(raised.value)


def test_the_row_is_named_by_its_place_in_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when rows before it have left the batch."""

    def poison(logits: Tensor, step: int) -> None:
        if step == 9:
            logits[-1] = NAN

    poison_logits(monkeypatch, poison)
    with pytest.raises(NonFiniteLogits, match=r"^step 9 of row 3: "):
        run_loop(target(), PROMPTS, KnowingDrafter(greedy_texts(), wrong=True), [2, 3, 4, 24])


@pytest.mark.parametrize("sampling", [SamplingConfig(), WARM], ids=["greedy", "sampled"])
def test_every_node_of_the_path_counts_and_no_other(
    sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step's path, with NaN at each of its nodes, or at all the others."""
    paths, right = [], loop.to_host

    def noted(verdict: Verdict, sources: torch.Tensor | None) -> list[Step]:
        paths.append(verdict.path)
        return right(verdict, sources)

    monkeypatch.setattr(loop, "to_host", noted)
    settings = {"sampling": sampling, "rule": Fuzzy(threshold=float("inf"), mode="paper", child="target")}
    whole = run_loop(target(), PROMPTS, KnowingDrafter(greedy_texts(), check=False), 12, **settings)
    first = paths[0].clone()

    def off_the_path(logits: Tensor, step: int) -> None:
        if step == 1:
            for row, path in enumerate(first.tolist()):
                others = [node for node in range(logits.shape[1]) if node not in path]
                logits[row, others] = NAN

    with monkeypatch.context() as patch:
        poison_logits(patch, off_the_path)
        drafter = KnowingDrafter(greedy_texts(), check=False)
        made = run_loop(target(), PROMPTS, drafter, 12, **settings)
    assert made.texts == whole.texts and made.stats == whole.stats
    on_path = int((first[1] >= 0).sum())
    assert on_path > 2
    for place in range(on_path):
        with monkeypatch.context() as patch:
            poison_logits(patch, lambda logits, step, place=place: logits[1, first[1, place]].fill_(NAN))
            with pytest.raises(NonFiniteLogits, match=r"^step 1 of row 1: "):
                drafter = KnowingDrafter(greedy_texts(), check=False)
                run_loop(target(), PROMPTS, drafter, 12, **settings)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_token_that_a_model_rules_out_is_no_error(
    sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_logits(monkeypatch, lambda logits, step: logits[:, :, 40:].fill_(-INF))
    made = run_loop(target(), PROMPTS, tiny_head(), 24, sampling=sampling)
    assert all(len(text) == 24 and max(text) < 40 for text in made.texts)


def test_a_stream_ends_with_the_error_after_what_was_right(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = EagleFSD(target(), tiny_head())
    wanted = run_loop(target(), PROMPTS[:1], tiny_head(), 24, tree=TREE)
    poison_logits(monkeypatch, lambda logits, step: logits.fill_(NAN) if step == 3 else None)
    stream = engine.stream(PROMPTS[:1], max_new_tokens=24, tree=TREE)
    chunks = []
    with pytest.raises(NonFiniteLogits, match=r"^step 3 of row 0: "):
        for chunk in stream:
            chunks.append(chunk)
    assert chunks == [step[0] for step in wanted.steps[:2]]
    with pytest.raises(NonFiniteLogits):
        poison_logits(monkeypatch, lambda logits, step: logits.fill_(INF))
        engine.generate(PROMPTS[:1], max_new_tokens=24, tree=TREE)


@pytest.mark.covering(1)
@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "rule", [Lossless(), Fuzzy(0.5), Fuzzy(float("inf"), "tv", mode="paper")], ids=["lossless", "js", "all"]
)
def test_a_draft_of_nan_is_never_accepted_for_its_distribution(
    rule: AcceptanceRule, sampling: SamplingConfig
) -> None:
    """A head that has overflowed: the text is the target's own, and no accept is fuzzy."""
    head = tiny_head()
    with torch.no_grad():
        head.fc.weight.fill_(NAN)
    made = run_loop(target(), PROMPTS, head, 16, rule=rule, sampling=sampling, tree=TREE)
    assert all(stats.fuzzy_accepts == 0 for stats in made.stats)
    if sampling.greedy:
        assert made.texts == [text[:16] for text in greedy_texts()]


# --- which rows stay ---


def test_rows_that_are_done_leave_at_once_or_where_steps_are_recorded_by_halves() -> None:
    assert choose_rows([True, False, True, False], recorded=False) == [1, 3]
    for count, wanted in ((8, 8), (7, 8), (5, 8), (4, 4), (3, 4), (2, 2), (1, 1)):
        done = [row < 8 - count for row in range(8)]
        kept = choose_rows(done, recorded=True)
        assert len(kept) == wanted and set(range(8 - count, 8)) <= set(kept) and kept == sorted(kept)
    assert len(choose_rows([True, True, True, True, False], recorded=True)) == 1
    assert choose_rows([False, False, True, True, False], recorded=True) == [0, 1, 4]
    assert choose_rows([True, False, False], recorded=True) == [1, 2]
