"""Make an EAGLE-3 head to train: a new one for a target, or one that is trained on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle_fsd.drafting.eagle3.config import Eagle3Config, usual_taps
from eagle_fsd.drafting.eagle3.head import Eagle3Head
from eagle_fsd.drafting.eagle_config import HeadConfig
from eagle_fsd.target.model import TargetModel
from eagle_fsd.training.readout import plain_rows
from eagle_fsd.training.schedule import fill_with_noise

LARGEST_VOCABULARY = 32_000  # drafted tokens of a new head, unless it is told otherwise
# At full size a new head is sure of wrong tokens, and takes a tenth of a short run to unlearn that: after 25
# steps SmolLM2's loss is 6.6 with this, and some 14 without.
START = 0.25
NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f")  # names of a last norm


def choose_taps(target: TargetModel, taps: Sequence[int] | None) -> tuple[int, ...]:
    """Return the taps that are asked for, or the usual ones. Raises ValueError if they are not there."""
    layers = target.config.num_hidden_layers
    chosen = default_taps(layers) if taps is None else tuple(taps)
    if not all(1 <= tap <= layers for tap in chosen):
        what = "the usual taps" if taps is None else "taps"
        raise ValueError(
            f"{what} are {','.join(map(str, chosen))}: they must be between 1 and the target's number of "
            f"layers ({layers}); name others with --taps"
        )
    target.admit_taps(chosen)
    return chosen


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the usual taps for this many layers, or three in a row where two of the usual would be the same.

    The config of a head names taps that are not the usual ones, so that every engine reads the right layers.
    """
    usual, low = usual_taps(layers), min(2, layers - 2)
    return usual if layers < 3 or sorted(set(usual)) == list(usual) else (low, low + 1, low + 2)


@torch.no_grad()
def new_head(
    target: TargetModel, taps: Sequence[int], drafted: Tensor | None, seed: int, inner: int | None = None
) -> Eagle3Head:
    """Return a new head for a target that drafts these tokens [W], in any order; None for all.

    Its layer has the shape of the target's, but for `inner` units of its MLP if they are given. It begins as
    a reader of the highest tap: `fc` passes that tap on, `norm` is the target's, `lm_head` is the target's
    times START, and everything else is small noise.
    """
    drafted = None if drafted is None or len(drafted) == target.vocab_size else drafted.sort().values
    shape = HeadConfig.for_target(target.config, target.hidden_size, target.vocab_size)
    head = Eagle3Head(
        Eagle3Config(
            hidden_size=shape.hidden_size,
            target_size=shape.hidden_size,
            taps=tuple(taps),
            intermediate_size=inner or shape.intermediate_size,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab_size,
            draft_vocab_size=shape.vocab_size if drafted is None else len(drafted),
            rms_norm_eps=shape.rms_norm_eps,
        ),
        drafted,
    )
    fill_with_noise(head, seed)
    head.fc.weight[:, -shape.hidden_size :] = torch.eye(shape.hidden_size)
    head.norm.weight.copy_(last_norm(target))
    rows = plain_rows(target) if drafted is None else plain_rows(target)[drafted]
    # The draft's logits get no transform: the target's scale goes into the rows.
    head.lm_head.weight.copy_(rows.float() * target.logits_transform.scale * START)
    return head


def last_norm(target: TargetModel) -> Tensor:
    """Return the scales [d] by which the target's last norm multiplies; ones if it has none by a known name.

    Families store them in different ways, so they are measured: a norm of alternating +1 and -1 is the
    scales with these signs, and half the difference to that of the negative drops a bias.
    """
    found = (getattr(target.decoder, name, None) for name in NORMS)
    norm = next((module for module in found if module is not None), None)
    if norm is None:
        return torch.ones(target.hidden_size)
    weight = next(norm.parameters())
    signs = torch.ones(target.hidden_size, dtype=weight.dtype, device=weight.device)
    signs[1::2] = -1
    return ((norm(signs[None]) - norm(-signs[None]))[0] / 2 * signs).float().cpu()


def make_trainable(head: Eagle3Head) -> None:
    """Let a head be trained, all of it but embeddings of its own.

    Raises ValueError for a head that cannot be trained here.
    """
    for there, what in ((head.fc, "fc"), (head.lm_head, "lm_head")):
        if there is None:
            raise ValueError(
                f"the head has no {what} of its own: training needs one; start from another head"
            )
    head.train().requires_grad_(True)
    if head.embed_tokens is not None:
        head.embed_tokens.requires_grad_(False)


def require_window(head: Eagle3Head, longest: int) -> None:
    """Raise ValueError unless texts of up to `longest` tokens fit into a head's sliding window."""
    window = min((one for one in head.config.windows if one), default=longest)
    if window < longest:
        raise ValueError(
            f"the head's sliding window is {window}, and texts have up to {longest} tokens: they must fit "
            "into it here; give a smaller --max-length"
        )
