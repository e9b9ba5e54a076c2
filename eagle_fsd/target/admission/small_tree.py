"""How far a target is from plain forwards, on a small tree: its logits, and the taps that it shows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from eagle_fsd.core.tree import DraftTree
from eagle_fsd.target.architecture import NARROWED, LogitsTransform
from eagle_fsd.target.graph_decoder import GraphDecoder
from eagle_fsd.target.hf_attention import private_copy
from eagle_fsd.target.session import MaskedForward, TargetSession
from eagle_fsd.target.taps import joined, plain_tapped_decoder

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

HOPELESS = 50.0  # nats below the best token
NARROW_WINDOW = 3  # positions in a sliding window or a chunk while a model is tested
PARTS = (3, 2, 5)  # of the vocabulary, behind which the texts of `tree_difference` begin
PATHS = ([0, 1, 3], [0, 2, 4])  # of `small_tree`


class Candidate(MaskedForward, Protocol):
    """A model that is tested as a target: a TargetModel under construction."""

    config: PreTrainedConfig
    kinds: set[str]
    windows: dict[str, int]
    logits_transform: LogitsTransform
    flash: bool
    recurrent: bool
    slots_of_states: int
    graphs: GraphDecoder | None

    @property
    def model(self) -> PreTrainedModel: ...

    @property
    def decoder(self) -> torch.nn.Module: ...

    @property
    def weight_format(self) -> str: ...

    @property
    def input_device(self) -> torch.device: ...


def tolerance(target: Candidate) -> float:
    """Return the largest relative difference that is put down to rounding.

    Kernels differ in the last bits. A sibling that leaks or a wrong position makes a large difference.
    """
    return 1e-3 if target.dtype == torch.float32 and is_exact(target) else 0.1


def is_exact(target: Candidate) -> bool:
    """Return whether forwards use plain weights as they are, in the model's dtype.

    What another package quantised may compute in other dtypes, and round what enters its layers.
    """
    return target.weight_format == str(target.dtype).removeprefix("torch.")


def has_own_weights(target: Candidate) -> bool:
    """Return whether the model's own forward multiplies with the same weights, so that it is a measure."""
    return target.graphs is None or is_exact(target)


@contextlib.contextmanager
def narrow_windows(target: Candidate) -> Iterator[None]:
    """Narrow the windows and chunks of our masks inside the block, so that a short text outgrows them."""
    windows = target.windows
    target.windows = {kind: size and NARROW_WINDOW for kind, size in windows.items()}
    try:
        yield
    finally:
        target.windows = windows


def tree_difference(target: Candidate) -> float:
    """Return the relative difference between a small tree's logits and those of plain forwards.

    It is the smallest of several texts, see least_difference.
    """
    return least_difference(target, lambda part: difference_on(target, part))


def taps_difference(target: Candidate, taps: tuple[int, ...]) -> float:
    """Return the relative difference between taps, in a prompt and in a small tree, and plain forwards'.

    It is the smallest of several texts, see least_difference.
    """
    return least_difference(target, lambda part: taps_difference_on(target, taps, part))


def least_difference(target: Candidate, on_text: Callable[[int], float]) -> float:
    """Return the smallest difference on several texts, tried until one is within the tolerance.

    Some texts magnify rounding to any degree, and a mistake shows in all. NaN if a difference is. on_text:
    returns that on a text by its part, see small_tree.
    """
    found: list[float] = []
    for part in PARTS:
        found.append(on_text(part))
        if found[-1] < tolerance(target) or math.isnan(found[-1]):
            return found[-1]
    return min(found)


def difference_on(target: Candidate, part: int) -> float:
    """Return `tree_difference` on one text.

    The tree is a(b(d), c(e)) behind a prefix of two tokens; each of its two paths gets a plain forward. A
    model with states reads its prefix twice over, in two parts, as a long prompt is read, which also tells
    how large they are.
    """
    prefix, tokens, tree = small_tree(target, part)
    session = TargetSession(target, batch=1, capacity=16)
    session.prefill(torch.tensor([prefix], device=target.device), [2])
    if target.recurrent:
        session.prefill(torch.tensor([prefix], device=target.device), [2])
        target.slots_of_states = session.save_row(0, 4).slots_of_states
        prefix = prefix * 2
    logits, _ = session.verify(tree)
    plain = plain_forward(target) if has_own_weights(target) else own_forward(target)
    differences = []
    for path in PATHS:
        wanted = plain(prefix + [tokens[node] for node in path])[len(prefix) :].to(target.device)
        differences.append(difference_of_logits(logits[0, path], wanted))
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def difference_of_logits(found: Tensor, wanted: Tensor) -> float:
    """Return the relative difference of logits [n, V], without what no distribution depends on.

    That is a number common to a row, and how far below the best a hopeless token is: either may be so large
    that beside it every mistake seems small. Tokens that both call hopeless count as equal. NaN if any logit
    is.
    """
    found, wanted = (
        (one - one.amax(-1, keepdim=True)).clamp(min=-HOPELESS) for one in (found.float(), wanted.float())
    )
    likely = wanted > -HOPELESS
    counted = likely | ~(found <= -HOPELESS)  # NaN counts
    found, wanted = (
        one - (one * likely).sum(-1, keepdim=True) / likely.sum(-1, keepdim=True) for one in (found, wanted)
    )
    off, size = (found - wanted)[counted].norm(), wanted[likely].norm()
    return 0.0 if off == 0 else float(off / size)


def small_tree(target: Candidate, part: int = 3) -> tuple[list[int], list[int], DraftTree]:
    """Return a prefix, the tokens of five nodes, and the tree a(b(d), c(e)) of them; PATHS are its paths.

    The tokens are those behind the first 1 / part of the vocabulary. Special ones are at its ends.
    """
    text = [(target.vocab_size // part + place) % target.vocab_size for place in range(7)]
    prefix, tokens = text[:2], text[2:]
    tree = DraftTree(
        tokens=torch.tensor([tokens], device=target.device),
        parents=torch.tensor([[-1, 0, 0, 1, 2]], device=target.device),
        depths=torch.tensor([[0, 1, 1, 2, 2]], device=target.device),
        log_q=torch.empty(1, 0, target.vocab_size, device=target.device),
        owners=torch.empty(1, 0, dtype=torch.int64, device=target.device),
        depth=2,
    )
    return prefix, tokens, tree


def taps_difference_on(target: Candidate, taps: tuple[int, ...], part: int) -> float:
    """Return `taps_difference` on one text.

    A plain forward is that of Hugging Face's layers and attention, without our cache and masks. Where weights
    or activations are rounded, the prompt's forward stands for it; see own_forward.
    """
    prefix, tokens, tree = small_tree(target, part)
    session, differences = TargetSession(target, 1, 16, taps), []
    session.prefill(torch.tensor([prefix], device=target.device), [2])
    _, in_tree = session.verify(tree)
    for path in PATHS:
        text = torch.tensor([prefix + [tokens[node] for node in path]], device=target.device)
        prompt = TargetSession(target, 1, 16, taps).prefill(text, [text.shape[1]])[0]
        wanted = plain_taps(target, text, taps)[0] if has_own_weights(target) else prompt
        differences += [distance(prompt, wanted), distance(in_tree[0, path], wanted[len(prefix) :])]
    return max(differences)


def plain_taps(target: Candidate, tokens: Tensor, taps: Sequence[int]) -> Tensor:
    """Return the taps [B, n, taps * d] of texts [B, n] by Hugging Face's own forward, without a cache."""
    decoder = plain_tapped_decoder(target.decoder, target.config.num_hidden_layers, taps)
    _, found = decoder(input_ids=tokens.to(target.input_device), use_cache=False)
    return joined(found, target.device)


def distance(found: Tensor, wanted: Tensor) -> float:
    """Return the relative difference of two tensors; NaN counts as infinite."""
    value = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    return math.inf if math.isnan(value) else value


def plain_forward(target: Candidate) -> Callable[[list[int]], Tensor]:
    """Return the model's own forward of a text, without a cache: tokens to logits [n, V]."""
    model = private_copy(target.model)
    for kind, (field, _) in NARROWED.items():
        if target.windows[kind]:
            setattr(model.config.get_text_config(decoder=True), field, target.windows[kind])

    def run(tokens: list[int]) -> Tensor:
        ids = torch.tensor([tokens], device=target.input_device)
        return model(input_ids=ids, use_cache=False).logits[0].float()

    return run


def own_forward(target: Candidate) -> Callable[[list[int]], Tensor]:
    """Return the target's forward of a text as a prompt: tokens to logits [n, V].

    It stands for the model's own forward where weights are rounded, which some texts magnify to any degree.
    """

    def run(tokens: list[int]) -> Tensor:
        ids = torch.tensor([tokens], device=target.device)
        return target.logits(TargetSession(target, batch=1, capacity=16).prefill(ids, [len(tokens)]))[0]

    return run
