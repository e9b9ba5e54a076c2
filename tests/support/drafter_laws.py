"""Laws that tests of several drafters assert: what is drawn, whose calibration counts, what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

from eagle_fsd import EagleFSD, SamplingConfig, TreeConfig
from eagle_fsd.acceptance.accept import AcceptanceRule
from eagle_fsd.acceptance.calibration import FILE, Calibration, write_calibrations
from eagle_fsd.core.config import AutoThreshold
from eagle_fsd.core.processing import UNPROCESSED, Processing
from eagle_fsd.core.randomness.streams import RowRandom
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.decoding.batch import Batch
from eagle_fsd.decoding.loop import decode
from eagle_fsd.decoding.request import Request
from eagle_fsd.drafting.drafter import Drafter
from eagle_fsd.drafting.tree_growth import BeamDrafter
from support.stubs import Chain, ChainTarget

CHAIN_TREE = TreeConfig(6, 3, 2)


def random_chain() -> Chain:
    """Return the chain of `worst_fit`, of four tokens."""
    return Chain.random(4, seed=1, scale=0.8)


def worst_fit(
    target: ChainTarget,
    drafter: Drafter,
    rule: AcceptanceRule,
    rows: int,
    length: int = 12,
    processing: Processing = UNPROCESSED,
    law: Chain | None = None,
) -> tuple[float, list[GenerationStats]]:
    """Sample many texts of `random_chain`; return the least p-value over its contexts, and the statistics.

    target, drafter: of `rows` rows; the tree is CHAIN_TREE. law: what the texts should be like; None: the
    target's chain.
    """
    request = Request(
        prompts=torch.randint(4, (rows, 6), generator=torch.Generator().manual_seed(0)).tolist(),
        limits=[length] * rows,
        eos_token_ids=(),
        rule=rule,
        tree=CHAIN_TREE,
        sampling=SamplingConfig(1.0),
        processing=processing,
    )
    made = request.texts()
    steps = list(decode(Batch(target, drafter, RowRandom(3, rows), CHAIN_TREE), made))
    counts = torch.zeros(4, 4, 4, dtype=torch.float64)
    for row, prompt in enumerate(request.prompts):
        text = [*prompt[-2:], *[token for chunks in steps for token in chunks[row]]]
        for context in zip(text, text[1:], text[2:], strict=False):
            counts[context] += 1
    table = (law or target.chain).table
    expected = table.double().softmax(-1) * counts.sum(-1, keepdim=True)
    contexts = [(one, two) for one in range(4) for two in range(4) if expected[one, two].min() >= 5]
    assert len(contexts) > 12
    least = min(chisquare(counts[two].numpy(), expected[two].numpy()).pvalue for two in contexts)
    return least, [text.stats for text in made]


def require_own_calibrations(engines: Sequence[EagleFSD], folder: Path) -> None:
    """Assert that each engine takes the calibration made with its own drafter, and no other's."""
    for made in engines:
        found = Calibration(made.identity(), SamplingConfig(), TreeConfig(), 0.9, 4, [])
        write_calibrations(folder / FILE, [found])
        for other in engines:
            other.settler.folder = folder
            if other is made:
                assert other.calibration(SamplingConfig()).prompts == 4
                continue
            with pytest.raises(ValueError, match="made for another target or head"):
                other.generate([[1, 2]], rule=AutoThreshold())


def require_same_state(
    drafter: BeamDrafter, fresh: BeamDrafter, lengths: Sequence[int], counts: Sequence[int]
) -> None:
    """Assert that a drafter holds of its texts what a fresh one does that read them at once.

    lengths: of the texts, in slots. counts: how much of each row was new; one that got nothing keeps no root.
    """
    for row, count in enumerate(lengths):
        for layer, buffers in fresh.cache.layers.items():
            for mine, its in zip(drafter.cache.layers[layer], buffers, strict=True):
                torch.testing.assert_close(mine[row, :, :count], its[row, :, :count], atol=1e-4, rtol=1e-4)
        if counts[row]:
            torch.testing.assert_close(drafter.root_states[row], fresh.root_states[row], atol=1e-3, rtol=1e-3)
