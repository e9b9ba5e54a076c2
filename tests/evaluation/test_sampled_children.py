"""Drawn children: every chance against enumerated and simulated twins, the contexts, and the script.

The twins run what the papers describe, child by child, on vocabularies small enough to list all that can be
drawn. They also say what is emitted, so that the claim that p is kept is checked, not assumed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import networkx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.stubs import random_tree
from support.tiny_models import prompts_of, tiny_head, tiny_model
from support.tiny_tokenizer import tiny_tokenizer
from torch import Tensor

from eagle_fsd import EagleFSD, SamplingConfig, TreeConfig
from eagle_fsd.acceptance.accept import Lossless, Verified
from eagle_fsd.acceptance.accept_step import accept
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.sampling import warp
from eagle_fsd.evaluation.measure.sweep import answer as answer_cell
from eagle_fsd.evaluation.sampled_children import acceptance, command
from eagle_fsd.evaluation.sampled_children.command import LIKELIEST, WAYS, WITHOUT, ChildrenMeter, contexts
from eagle_fsd.target.model import TargetModel

UNIT = 60  # the twins' probabilities are whole multiples of 1 / UNIT
Array = NDArray[np.float64]


def weights(seed: int, tokens: int, zeros: int = 0) -> NDArray[np.int64]:
    """Return whole numbers that sum to UNIT, of which `zeros` are 0."""
    draw = np.random.default_rng(seed)
    shares = np.zeros(tokens)
    shares[draw.permutation(tokens)[zeros:]] = draw.dirichlet(np.full(tokens - zeros, 0.7))
    return draw.multinomial(UNIT, shares)


PAIRS = {
    "like": (weights(0, 5), weights(1, 5)),
    "p leaves q": (weights(2, 5), weights(3, 5, zeros=2)),
    "q leaves p": (weights(4, 5, zeros=2), weights(5, 5)),
    "one token": (weights(6, 5), np.array([0, UNIT, 0, 0, 0])),
    "equal": (weights(7, 5), weights(7, 5)),
    "apart": (np.array([UNIT, 0, 0, 0, 0]), np.array([0, 20, 20, 20, 0])),
    "flat": (np.array([30, 10, 10, 5, 5]), np.full(5, 12)),
    "wide": (np.array([16, 4, 12, 8, 3, 7, 10]), np.array([9, 13, 5, 11, 10, 8, 4])),
}
EACH = pytest.mark.parametrize(("p", "q"), PAIRS.values(), ids=PAIRS)


def tensors(p: NDArray[np.int64], q: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    return torch.tensor(p / UNIT)[None], torch.tensor(q / UNIT)[None]


def families(q: Array, count: int) -> Iterator[tuple[list[int], float]]:
    """Yield every list of children that q can give, in drawn order, with its chance."""
    if not count or q.sum() == 0:
        yield [], 1.0
        return
    q = q / q.sum()
    for token in np.flatnonzero(q):
        rest = q.copy()
        rest[token] = 0.0
        for others, chance in families(rest, count - 1):
            yield [int(token), *others], float(q[token]) * chance


def one_after_the_other(p: Array, q: Array, children: list[int]) -> tuple[float, Array]:
    """Try the children of a node; returns the chance that one is accepted, and of every token to be next."""
    refused, emitted = 1.0, np.zeros(len(p))
    p, q = p.copy(), q.copy()
    for child in children:
        q = q / q.sum()
        chance = min(1.0, p[child] / q[child])
        emitted[child] += refused * chance
        refused *= 1 - chance
        if refused < 1e-12:
            return 1.0, emitted
        left = np.maximum(p - q, 0.0)
        p = left / left.sum()
        q[child] = 0.0
    return 1 - refused, emitted + refused * p


def tried(p: Array, q: Array, count: int) -> tuple[float, Array]:
    """Return the acceptance and the distribution of the next token over all lists of children."""
    accepted, emitted = 0.0, np.zeros(len(p))
    for children, chance in families(q, count):
        found, out = one_after_the_other(p, q, children)
        accepted += chance * found
        emitted += chance * out
    return accepted, emitted


def transported(p: dict[int, int], sets: dict[frozenset[int], int]) -> float:
    """Return the largest chance that p's token is in the drawn set: a maximal flow between whole numbers."""
    network = networkx.DiGraph()
    network.add_nodes_from(["sets", "token"])
    for members, mass in sets.items():
        network.add_edge("sets", members, capacity=mass)
        for token in members:
            network.add_edge(members, token)
    for token, mass in p.items():
        network.add_edge(token, "token", capacity=mass)
    return networkx.maximum_flow_value(network, "sets", "token") / sum(p.values())


@EACH
@pytest.mark.parametrize("count", [1, 2, 3])
def test_trying_drawn_children_keeps_p(p: NDArray[np.int64], q: NDArray[np.int64], count: int) -> None:
    """The total variation between what is emitted and p is 0, and the acceptance is the formula's."""
    accepted, emitted = tried(p / UNIT, q / UNIT, count)
    assert np.abs(emitted - p / UNIT).sum() / 2 < 1e-12
    if count <= 2:
        exact = acceptance.two_without_replacement(*tensors(p, q))
        assert exact[0, count - 1] == pytest.approx(accepted)
    else:
        draw = np.random.default_rng(0)
        found = acceptance.without_replacement(*tensors(p, q), 3, 4000, draw)
        error = float(found.variance[0, 2]) ** 0.5
        assert abs(float(found.mean[0, 2]) - accepted) <= 5 * error + 1e-9
        assert error < 0.002 and (error > 0 or len(p) == 5)  # the short ones leave nothing to chance


@EACH
def test_likeliest_children_with_and_without_a_drawn_one(p: NDArray[np.int64], q: NDArray[np.int64]) -> None:
    fixed = acceptance.likeliest(*tensors(p, q), 3)[0]
    mixed = acceptance.likeliest_and_one_drawn(*tensors(p, q), 3)[0]
    order = tensors(p, q)[1].topk(3).indices[0].tolist()  # equal tokens in torch's order
    for count in (1, 2, 3):
        assert fixed[count - 1] == pytest.approx(sum(p[order[:count]]) / UNIT)
        held = order[: count - 1]
        others = [token for token in range(len(p)) if token not in held and q[token]]
        whole = sum(int(q[token]) for token in others)
        sets = {frozenset([*held, token]): int(q[token]) * UNIT for token in others}
        if not others:
            whole, sets = 1, {frozenset(held): UNIT}
        flow = transported({token: int(p[token]) * whole for token in range(len(p))}, sets)
        assert mixed[count - 1] == pytest.approx(flow)


def test_no_fixed_set_takes_more_than_the_likeliest_tokens_of_p() -> None:
    p, _ = tensors(*PAIRS["like"])
    for count in (1, 2, 3):
        most = max(float(p[0, list(some)].sum()) for some in combinations(range(5), count))
        assert acceptance.likeliest(p, p, 3)[0, count - 1] == pytest.approx(most)


def test_simulated_draws() -> None:
    """Four children of eight tokens: how often one is accepted, and what is emitted."""
    draw, runs, tokens = np.random.default_rng(5), 4000, 8
    p, q = draw.dirichlet(np.full(tokens, 0.5)), draw.dirichlet(np.full(tokens, 0.5))
    accepted, emitted = 0, np.zeros(tokens)
    for _ in range(runs):
        now_p, now_q = p.copy(), q.copy()
        token = None
        for _ in range(4):
            child = int(draw.choice(tokens, p=now_q))
            if draw.random() < now_p[child] / now_q[child]:
                token = child
                break
            now_p = np.maximum(now_p - now_q, 0.0)
            now_p /= now_p.sum()
            now_q[child] = 0.0
            now_q /= now_q.sum()
        accepted += token is not None
        emitted[draw.choice(tokens, p=now_p) if token is None else token] += 1
    assert ((emitted - runs * p) ** 2 / (runs * p)).sum() < 24.3  # 99.9 % of chi-square with 7 degrees
    pair = torch.tensor(p)[None], torch.tensor(q)[None]
    wanted = float(acceptance.without_replacement(*pair, 4, 500, draw).mean[0, 3])
    assert abs(accepted / runs - wanted) < 4 * (wanted * (1 - wanted) / runs) ** 0.5


def test_the_standard_error_is_that_of_repeated_estimates() -> None:
    draw = np.random.default_rng(9)
    p, q = (torch.tensor(draw.dirichlet(np.full(12, 0.4), 1)) for _ in range(2))
    found = [acceptance.without_replacement(p, q, 5, 8, draw) for _ in range(300)]
    means = torch.stack([one.mean[0] for one in found])
    variances = torch.stack([one.variance[0] for one in found]).mean(0)
    assert variances[:2].tolist() == [0.0, 0.0] and bool((means.std(0)[:2] < 1e-12).all())
    ratio = means.var(0)[2:] / variances[2:]
    assert bool(((ratio > 0.75) & (ratio < 1.33)).all())


def test_a_very_sure_draft_keeps_what_it_leaves_to_others() -> None:
    """One token has all but 1e-14 of q, and half of p: the second child is drawn among the others."""
    q = torch.tensor([[1.0, 3e-15, 7e-15]], dtype=torch.float64)
    p = torch.tensor([[0.5, 0.35, 0.15]], dtype=torch.float64)
    # p' is 0, 0.7, 0.3, and the second q is 0, 0.3, 0.7.
    first, second = acceptance.two_without_replacement(p, q)[0].tolist()
    assert first == pytest.approx(0.5) and second == pytest.approx(0.5 + 0.5 * 0.6)
    draw = np.random.default_rng(0)
    third = acceptance.without_replacement(p, q, 3, 2000, draw).mean[0, 2]
    assert third == pytest.approx(tried(p[0].numpy(), q[0].numpy() / q[0].numpy().sum(), 3)[0], abs=0.01)


def test_long_rows_agree_with_each_other() -> None:
    """At the size of a vocabulary: the exact second try against its estimate, and the order of the ways."""
    scores = torch.randn(2, 6, 3000, generator=torch.Generator().manual_seed(2)) * 3
    q, p = (scores[0]).softmax(-1), (scores[0] + 0.5 * scores[1]).softmax(-1)
    draw = np.random.default_rng(1)
    whole = acceptance.without_replacement(p, q, 4, 16, draw)
    exact = acceptance.two_without_replacement(p.double(), q.double())
    assert torch.equal(whole.mean[:, :2], exact)
    mixed = acceptance.likeliest_and_one_drawn(p, q, 4)
    common = torch.minimum(p.double(), q.double()).sum(-1)
    for found in (exact, mixed):
        torch.testing.assert_close(found[:, 0], common, atol=1e-6, rtol=0)
    assert bool((whole.mean.diff(dim=-1) > 0).all())


# -- contexts and the script ----------------------------------


@pytest.mark.parametrize("listed", [False, True])
def test_contexts_are_those_of_a_plain_walk(listed: bool) -> None:
    """Ragged random trees whose target often takes a child; q covers all tokens, or a list of them."""
    draw, batch, vocab = torch.Generator().manual_seed(3), 7, 40
    tree = random_tree(batch, nodes=14, depth=4, width=3, vocab_size=vocab, seed=4)
    if listed:
        some = torch.randperm(vocab, generator=draw)[:30].sort().values
        tree = replace(tree, log_q=tree.log_q[..., some].log_softmax(-1), drafted=some)
    logits = torch.randn(batch, 14, vocab, generator=draw)
    for node in range(1, 14):
        rows = torch.arange(batch)
        logits[rows, tree.parents[:, node], tree.tokens[:, node]] += 3.0
    sampling = SamplingConfig(0.7, 20, 0.95)
    verified = Verified(tree, logits, sampling, torch.empty(0, dtype=torch.int64))
    verdict = accept(Lossless(), verified, RowRandom(0, batch), torch.zeros(batch, dtype=torch.int64))
    counts = torch.tensor([0, 1, 5, 5, 5, 5, 5]).minimum(verdict.length)
    emitted = dict(enumerate(counts.tolist()))
    found = contexts(verified, verdict, emitted)
    place = 0
    for row in range(batch):
        for node in verdict.path[row, : counts[row]].tolist():
            own = [child for child in range(14) if int(tree.parents[row, child]) == node]
            if not own:
                continue
            owner = tree.owners[row].tolist().index(node)
            p = warp(logits[row, node], sampling)
            drafted = torch.arange(vocab) if tree.drafted is None else tree.drafted
            assert (int(found.rows[place]), int(found.children[place])) == (row, len(own))
            torch.testing.assert_close(found.own[place], p[tree.tokens[row, own]].sum())
            torch.testing.assert_close(found.p[place], p[drafted])
            torch.testing.assert_close(found.q[place], warp(tree.log_q[row, owner], sampling))
            place += 1
    assert place == len(found.rows) and place >= 6


@pytest.fixture(scope="module")
def engine() -> EagleFSD:
    target = TargetModel(tiny_model("llama"))
    return EagleFSD(target, tiny_head(), tiny_tokenizer(), base_model="tiny", ea_model="tiny-head")


def test_the_trees_own_children_are_the_likeliest_and_batches_change_nothing(engine: EagleFSD) -> None:
    sums = []
    for size in (1, 3):
        meters = []
        prompts = prompts_of((5, 9, 3))
        for start in range(0, 3, size):
            some = prompts[start : start + size]
            meter = ChildrenMeter(4, 4, np.random.default_rng(0), "hybrid", len(some))
            ids = torch.zeros(len(some), max(map(len, some)), dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(some):
                ids[row, : len(prompt)], mask[row, : len(prompt)] = torch.tensor(prompt), 1
            seeds = [(0, start + row) for row in range(len(some))]
            how = {"max_new_tokens": 10, "temperature": 0.8, "tree": TreeConfig(9, 3, 4)}
            engine.generate(ids, mask, seed=seeds, observer=meter, **how)
            meters += [meter.row(row)["sampled_children"] for row in range(len(some))]
        sums.append(meters)
    for alone, together in zip(*sums, strict=True):
        assert alone["contexts"] == together["contexts"] > 0 < alone["children"] == together["children"]
        for way in WAYS:
            exact = slice(2 if way == WITHOUT else 4)
            torch.testing.assert_close(
                torch.tensor(alone[way]["by_children"][exact]),
                torch.tensor(together[way]["by_children"][exact]),
                atol=1e-4,
                rtol=0,
            )
        assert alone[LIKELIEST]["tree"] == pytest.approx(together[LIKELIEST]["tree"], abs=1e-4)
        assert alone[LIKELIEST]["tree"] <= alone[LIKELIEST]["by_children"][3] + 1e-6


def test_the_script_writes_rows_and_a_table_and_resumes(
    engine: EagleFSD, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "load_engine", lambda _: engine)
    prompts, output = tmp_path / "prompts_few.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text('{"prompt": "Why?"}\n{"prompt": "How so?"}\n')
    argv = ["--prompts", str(prompts), "--output", str(output), "--max-new-tokens", "6"]
    argv += ["--sampling", "1", "0.6/20/0.9", "--children", "1", "3", "--tree", "8/3/3", "--draws", "4"]
    command.main(argv)
    shown = capsys.readouterr().out
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 4 and {row["sampling"]["temperature"] for row in rows} == {0.6, 1.0}
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines()]
    assert [line[0] for line in lines[2:]] == ["1"] * 3 + ["0.6/20/0.9"] * 3
    ours = [row["sampled_children"] for row in rows if row["sampling"]["temperature"] == 1.0]
    contexts = sum(one["contexts"] for one in ours)
    three = sum(one[LIKELIEST]["by_children"][2] for one in ours) / contexts
    gain = sum(one[WITHOUT]["by_children"][2] for one in ours) / contexts - three
    assert lines[3][1:4] == [str(contexts), "3", f"{100 * three:.1f}"]
    assert "±" in lines[3][4] and lines[3][-2].startswith(f"{100 * gain:+.1f}")
    mean = sum(one["children"] for one in ours) / contexts
    assert lines[4][2] == f"the tree's, {mean:.1f}"

    monkeypatch.setattr("eagle_fsd.evaluation.measure.sweep.answer", lambda *_: pytest.fail("made twice"))
    command.main(argv)
    assert capsys.readouterr().out == shown
    monkeypatch.setattr("eagle_fsd.evaluation.measure.sweep.answer", answer_cell)
    command.main([*argv, "--draws", "3"])  # measured otherwise, other rows
    assert len(output.read_text().splitlines()) == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sampling", "0"], "temperature is 0"),
        (["--sampling", "x"], "sampling is 'x'"),
        (["--children", "0"], "children is 0"),
        (["--draws", "1"], "draws is 1"),
        (["--lookup"], "lookup is set"),
        (["--tree", "1/1/1"], "has no drafts"),
        (["--prompts", "gone.jsonl"], "gone.jsonl: cannot be read"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"prompt": "a"}\n')
    monkeypatch.setattr(command, "load_engine", lambda _: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit, match="2"):
        command.main(["--prompts", "p.jsonl", "--output", "rows.jsonl", *arguments])
    assert message in capsys.readouterr().err.splitlines()[-1]
