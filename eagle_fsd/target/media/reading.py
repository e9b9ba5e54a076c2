"""Lets a target's towers read a prompt's images and sounds, and tests that the prompt is then read right."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle_fsd.core.padding import as_ids
from eagle_fsd.files.fingerprints import digest_tensors, state_of
from eagle_fsd.target.admission.small_tree import difference_of_logits, tolerance
from eagle_fsd.target.media.apart import AROUND, Piece, begins_of, images_of, is_several, whole_piece
from eagle_fsd.target.media.table import AT_PLACES, BY_LAYER, Media, MediaPrompt
from eagle_fsd.target.media.towers import on_towers, own_embeddings, run_towers
from eagle_fsd.target.model import TargetModel
from eagle_fsd.target.session import TargetSession

# Arguments of a decoder's forward that are looked at, or say nothing of the prompt.
KNOWN = {
    *("input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "cache"),
    *("use_cache", "return_dict", "cache_position", "output_attentions", "output_hidden_states"),
    *("mm_token_type_ids", "token_type_ids", AT_PLACES, BY_LAYER),
}
REMEDY = "leave images and sound out, or use another target"
Found = tuple[Tensor, Media]  # media, and their places [1, L] in a prompt


@dataclass(frozen=True)
class Made:
    """What towers made of a piece. places: [1, L] bool. fields: of Media, in order, without its first id."""

    places: Tensor
    fields: tuple[Any, ...]


@torch.inference_mode()
def read_media(target: TargetModel, inputs: Mapping[str, Any]) -> list[int]:
    """Return the token ids of a prompt with images or sound, which the target's towers read now.

    inputs: what the model's processor made of one chat: input_ids [1, L], and pixel_values and such. The ids
    in the places of images are beyond the vocabulary. Where the model reads each image by itself, an image
    has the same ones in every prompt. The first prompt with one image and the first with several are read
    whole as well, as a test. Raises ValueError if the target cannot read them.
    """
    require_towers(target)
    tokens, given = split_inputs(target, inputs)
    table = target.media
    piece = whole_piece(tokens, given, table.placeholders(tokens))
    if is_several(piece.places) not in table.admitted:
        return read_first(target, piece)
    found = one_by_one(target, piece) if table.apart else []
    return numbered(tokens, found or [find_piece(target, piece) or add_piece(target, piece)])


def read_first(target: TargetModel, piece: Piece) -> list[int]:
    """Return the ids of a prompt of a kind that was not tested yet, and test it.

    If it has several images, they are also read one by one, to find out whether that is the same.
    """
    table = target.media
    whole, logits = made_of(target, piece, to_the_end=True)
    assert logits is not None
    found: list[Found] = []
    if is_several(whole.places) and table.apart is not False:
        found = one_by_one(target, replace(piece, places=whole.places))
        table.apart = is_same(target, whole, found) if found else table.apart
    if not table.apart or not found:
        found = [add_piece(target, piece, whole)]
    ids = numbered(piece.tokens, found)
    check_reading(target, ids, logits)
    table.admitted.add(is_several(whole.places))
    return ids


def one_by_one(target: TargetModel, piece: Piece) -> list[Found]:
    """Return the images of a prompt, each read by itself; none if they cannot be taken apart."""
    pieces = images_of(piece.tokens, piece.given, piece.places)
    if len(pieces) == 1:
        return []
    try:
        return [find_piece(target, one) or add_piece(target, one) for one in pieces]
    except ValueError:  # if it is about the images themselves, they will not be read together either
        return []


def require_towers(target: TargetModel) -> None:
    """Raise ValueError if images and sound cannot be read where this target is computed."""
    if target.graphs is not None or target.ranks.several:
        where = "on several ranks" if target.ranks.several else "with OpenVINO"
        raise ValueError(
            f"images and sound are not read {where}: torch must compute them in one process; load the target "
            "with runtime='torch'"
        )


def has_towers(target: TargetModel) -> bool:
    """Return whether a target may read images where it is computed. Only its first prompt with one tells."""
    if target.graphs is not None or target.ranks.several:
        return False
    parts = (target.model, getattr(target.model, "model", None))
    return any(hasattr(part, "get_image_features") for part in parts)


def split_inputs(target: TargetModel, inputs: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    """Return the token ids [1, L] of a processor's output, and all that it holds of images and sound."""
    if "input_ids" not in inputs:
        raise ValueError(
            "the inputs have no input_ids: they must be what the model's processor makes of a chat"
        )
    tokens = as_ids(inputs["input_ids"]).cpu()
    mask = inputs.get("attention_mask")
    if tokens.ndim != 2 or len(tokens) != 1 or (mask is not None and not bool(torch.as_tensor(mask).all())):
        raise ValueError(
            f"input_ids has shape {list(tokens.shape)}: images are read with one prompt at a time, [1, L], "
            "without padding; call read_media for each"
        )
    if int(tokens.min()) < 0 or int(tokens.max()) >= target.vocab_size:
        raise ValueError(
            f"input_ids holds {int(tokens.min())}..{int(tokens.max())}: token ids must be in "
            f"0..{target.vocab_size - 1}; use the target's own processor"
        )
    others = {name: one for name, one in inputs.items() if name not in ("input_ids", "attention_mask")}
    return tokens, others


def digest_given(target: TargetModel, given: Mapping[str, Any]) -> str:
    """Return a digest of what towers are given, and of the state of the weights."""
    tensors = {name: one for name, one in given.items() if isinstance(one, Tensor) and name not in AROUND}
    others = sorted((name, one) for name, one in given.items() if not isinstance(one, Tensor))
    state = (state_of((target.held,)), sorted(tensors), others)
    said = torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)
    return digest_tensors((said, *(tensors[name] for name in sorted(tensors))))


def tower_inputs(
    target: TargetModel, inputs: Mapping[str, Any], prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return what the model's own `generate` is given beside the token ids of a prompt with images.

    Raises ValueError for inputs of other prompts than this one, and where no images are read.
    """
    require_towers(target)
    tokens, given = split_inputs(target, inputs)
    if tokens.tolist() != [list(prompt) for prompt in prompts]:
        raise ValueError(
            f"inputs have one prompt of {tokens.shape[1]} tokens, and input_ids {len(prompts)} of "
            f"{len(prompts[0])}: both must be what the processor made of one chat; pass its own input_ids, "
            "with an attention_mask of ones"
        )
    return on_towers(target, given)


def key_of(target: TargetModel, piece: Piece, places: Tensor) -> str:
    """Return the key of media in these places [1, L] of a piece. The text around them may be any.

    Positions depend on which places follow one another.
    """
    words = digest_tensors((piece.tokens[places], begins_of(places)[places]))
    return f"{digest_given(target, piece.given)} {words}"


def find_piece(target: TargetModel, piece: Piece) -> Found | None:
    """Return the media of a piece if they were read before: their places in the prompt, and they."""
    media = target.media.find(key_of(target, piece, piece.places))
    return None if media is None else (piece.in_prompt(piece.places), media)


def add_piece(target: TargetModel, piece: Piece, made: Made | None = None) -> Found:
    """Return the media of a piece, which are kept from now on. made: of them; None: towers read them."""
    made = made_of(target, piece)[0] if made is None else made
    media = target.media.add(key_of(target, piece, made.places), *made.fields)
    return piece.in_prompt(made.places), media


def made_of(target: TargetModel, piece: Piece, to_the_end: bool = False) -> tuple[Made, Tensor | None]:
    """Return what towers make of a piece, and the prompt's last logits [1, V] if it is read to the end."""
    seen, logits = run_towers(target, piece.tokens, piece.given, to_the_end)
    places = (seen["inputs_embeds"] != own_embeddings(target, piece.tokens)).any(-1).cpu()
    if not bool(places.any()):
        raise ValueError("the inputs have no place for an image or a sound: generate from their input_ids")
    return Made(places, media_of(target, piece.tokens, places, seen)), logits


def is_same(target: TargetModel, whole: Made, found: Sequence[Found]) -> bool:
    """Return whether images that were read one by one are as those that were read together."""
    parts = [media for _, media in found]
    places = sum((where.int() for where, _ in found), torch.zeros_like(whole.places, dtype=torch.int32))
    if not torch.equal(places, whole.places.int()):
        return False
    words, embeddings, offsets, turns, layers = whole.fields
    exact = [(words, [one.words for one in parts]), (offsets, [one.offsets for one in parts])]
    exact += [(turns, [one.turns for one in parts])]
    close = [(embeddings, [one.embeddings for one in parts])]
    close += [(layer, [one.by_layer[at] for one in parts]) for at, layer in enumerate(layers)]
    limit = tolerance(target) / 4  # batches of several images are rounded otherwise
    return all(torch.equal(one, torch.cat(own)) for one, own in exact) and all(
        bool((one - torch.cat(own)).norm() <= limit * one.norm()) for one, own in close
    )


def media_of(target: TargetModel, tokens: Tensor, where: Tensor, seen: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the fields of Media, without its first id, of what a decoder was given for a prompt [1, L]."""
    kind = target.model.config.model_type
    unknown = {name for name, one in seen.items() if isinstance(one, Tensor | list | tuple)} - KNOWN
    if unknown:
        raise ValueError(
            f"target {kind!r} tells its layers of images by {min(unknown)}, which is not known here: {REMEDY}"
        )
    if sees_ahead(seen.get("attention_mask")):
        raise ValueError(
            f"target {kind!r} lets the places of an image attend to those that follow: all must attend to "
            f"what is before them alone; {REMEDY}"
        )
    positions = seen.get("position_ids")
    length = tokens.shape[1]
    usual = torch.arange(length)
    axes = usual[None] if positions is None else positions.reshape(-1, length).cpu()  # [A, L]
    words = ~where[0]
    shifts = filled(axes[0] - usual, words)
    if bool((axes != axes[:1])[:, words].any()) or (not target.media.by_axes and bool((axes != usual).any())):
        raise ValueError(f"target {kind!r} gives text positions by rules that are not known here: {REMEDY}")
    offsets = (axes - usual - shifts)[:, where[0]].T
    behind = shifts[-1] if words[-1] else axes.max() + 1 - length
    turns = (torch.cat((shifts[1:], behind[None])) - shifts)[where[0]]
    layers = [part.to(target.input_device) for part in seen.get(BY_LAYER) or ()]
    embeddings = seen["inputs_embeds"][where.to(seen["inputs_embeds"].device)]
    return tokens[where], embeddings, offsets, turns, tuple(layers)


def filled(shifts: Tensor, words: Tensor) -> Tensor:
    """Return shifts [L] with that of the last word before it in the place of each that is no word."""
    last = torch.where(words, torch.arange(len(words)), -1).cummax(0).values
    return torch.where(last >= 0, shifts[last.clamp(min=0)], 0)


def sees_ahead(mask: Any) -> bool:
    """Return whether an attention mask of a decoder's layers lets a token see one that follows it."""
    if isinstance(mask, Mapping):
        return any(map(sees_ahead, mask.values()))
    if not isinstance(mask, Tensor) or mask.ndim < 4:
        return False
    seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return bool(seen.triu(1).any())


def numbered(tokens: Tensor, found: Sequence[Found]) -> list[int]:
    """Return tokens [1, L] with the ids of the places of media where they are."""
    for where, media in found:
        tokens = tokens.masked_scatter(where, torch.arange(media.first, media.end))
    return MediaPrompt(tokens[0].tolist(), [media for _, media in found])


def check_reading(target: TargetModel, ids: list[int], wanted: Tensor) -> None:
    """Raise ValueError unless a prompt with media gives the logits [1, V] that the whole model gave."""
    session = TargetSession(target, 1, len(ids))
    features = session.prefill(torch.tensor([ids], device=target.device), [len(ids)])
    difference = difference_of_logits(session.logits(features[:, -1:])[0], wanted.to(target.device))
    if not difference < tolerance(target):
        raise ValueError(
            f"target {target.model.config.model_type!r} reads a prompt with images otherwise than its own "
            f"forward does ({difference:.2g}, relative): they must agree; {REMEDY}"
        )
