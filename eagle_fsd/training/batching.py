"""Turn sequences into batches: splits, order, padding, noise and the softmax's tokens, all from one seed."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle_fsd.training.data.examples import batches_by_length
from eagle_fsd.training.data.shards import FeatureSequence
from eagle_fsd.training.loss import Batch, pair
from eagle_fsd.training.schedule import root_mean_square

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lesson:
    """A batch and the tokens [S] of its softmax, on the host; `pinned` copies both for a GPU.

    seed: of the noise, which is added where the batch is learned from.
    """

    batch: Batch
    tokens: Tensor
    seed: int = 0

    def pinned(self) -> Lesson:
        """Return the same lesson in pinned memory, from which a GPU copies by itself."""
        return Lesson(self.batch.pinned(), self.tokens.pin_memory(), self.seed)


def collate(sequences: Sequence[FeatureSequence]) -> Batch:
    """Pad sequences on the right and pair them. Padding carries no loss, and no real position sees it."""
    tokens, learn, features = (
        pad_right([getattr(sequence, name) for sequence in sequences])
        for name in ("tokens", "learn", "features")
    )
    taps = None if sequences[0].taps is None else pad_right([sequence.inputs for sequence in sequences])
    return pair(tokens.long(), features, learn.bool(), taps)


def pad_right(rows: Sequence[Tensor]) -> Tensor:
    """Return rows [n, ...] of different lengths as one tensor [B, n, ...], with zeros behind them."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def batch_plan(
    lengths: Sequence[int], batch_tokens: int, seed: int, epoch: int, pool: int = 512
) -> list[list[int]]:
    """Return the epoch's batches, as lists of sequence numbers.

    Sequences are shuffled, then sorted by length within pools of `pool`, so that a batch has little padding.
    The batches are shuffled again.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    batches: list[list[int]] = []
    for start in range(0, len(order), pool):
        part = order[start : start + pool]
        batches += [
            [part[index] for index in group]
            for group in batches_by_length([lengths[number] for number in part], batch_tokens)
        ]
    return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]


def add_noise(batch: Batch, amount: float, std: float, seed: int) -> Batch:
    """Add EAGLE-1's uniform noise to the input features, up to half of `amount` stds on either side.

    The paper uses 0.2 * 512 / length, on features of about unit std. The noise is drawn where the batch is:
    a GPU's is not that of a CPU.
    """
    if amount == 0:
        return batch
    device = batch.features.device
    generator = torch.Generator(device).manual_seed(seed)
    noise = (torch.rand(batch.features.shape, generator=generator, device=device) - 0.5) * (amount * std)
    return replace(batch, features=(batch.features.float() + noise).to(batch.features.dtype))


def features_std(sequences: Sequence[FeatureSequence]) -> float:
    """Return the std of the features that are learned, one number for all dimensions."""
    learned = torch.cat([sequence.features[sequence.learn].float() for sequence in sequences])
    return max(learned.std().item(), 1e-6)


def input_sizes(sequences: Sequence[FeatureSequence], embedding: Tensor | None) -> Tensor:
    """Return the root mean squares of what `fc` reads: of token embeddings first, then of features, [2 d].

    Without an embedding: of the taps or features alone, as an EAGLE-3 head's `fc` reads them. A dimension
    that is hardly used gets a hundredth of its part's, so that no size is near zero.
    """
    inputs = torch.cat([sequence.inputs for sequence in sequences]).cpu()
    parts = list(inputs.split(sequences[0].features.shape[1], dim=1))
    if embedding is not None:
        tokens = torch.cat([sequence.tokens for sequence in sequences])
        parts.insert(0, embedding[tokens.to(embedding.device)].cpu())
    sizes = [root_mean_square(part) for part in parts]
    return torch.cat([size.clamp_min(max(0.01 * root_mean_square(size).item(), 1e-6)) for size in sizes])


def require_held_out(total: int, count: int, first_source: int) -> None:
    """Raise ValueError unless so many sequences of the first source can be held out of `total`."""
    most = min(first_source, total - 1)
    if most < 1:
        raise ValueError(
            f"the data has {total} sequences, {first_source} of them of the first source: at least one of "
            "these must be held out and another be left to train on; give more data"
        )
    if not 0 < count <= most:
        raise ValueError(
            f"held_out is {count}: it must be in 1..{most}, sequences of the first source with one left to "
            "train on; change --held-out, or give more data"
        )


def split_held_out(total: int, count: int, seed: int, first_source: int) -> tuple[list[int], list[int]]:
    """Split `total` sequences into numbers to train on and to hold out, the latter from the first source."""
    require_held_out(total, count, first_source)
    order = torch.randperm(first_source, generator=torch.Generator().manual_seed(seed))
    chosen = set(order[:count].tolist())
    return [number for number in range(total) if number not in chosen], sorted(chosen)


def without_copies(train: Sequence[int], held: Sequence[int], texts: Sequence[Tensor]) -> list[int]:
    """Return the numbers to train on whose text is none of those held out; data repeats itself.

    How many are left out is logged. Raises ValueError if there are none.
    """
    seen = {tuple(texts[number].tolist()) for number in held}
    others = [number for number in train if tuple(texts[number].tolist()) not in seen]
    if not others:
        raise ValueError(
            f"the data has the same {len(seen)} sequences again and again, and they are held out: there must "
            "be others to train on; give more data"
        )
    if copies := len(train) - len(others):
        logger.info("left out %d sequences that are the same as held-out ones", copies)
    return others


def softmax_tokens(texts: Sequence[Tensor], vocab_size: int, most: int, always: Sequence[int] = ()) -> Tensor:
    """Return the tokens that every batch's softmax runs over, ascending: the texts' `most` frequent.

    always: tokens that must be among them (the end tokens).
    """
    counts = torch.bincount(torch.cat(list(texts)), minlength=vocab_size)
    counts[list(always)] = counts.sum() + 1
    best = counts.argsort(descending=True, stable=True)[:most]
    return best[counts[best] > 0].sort().values


def tokens_of_batch(common: Tensor, batch: Batch) -> Tensor:
    """Return the tokens [S] of a batch's softmax: the common ones and all that occur in the batch.

    Without the latter, a position whose next token is rare would teach a distribution over wrong tokens, and
    text full of names or in another script would hardly be learned.
    """
    return torch.cat((common, batch.next_tokens.flatten())).unique()
