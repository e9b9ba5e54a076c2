"""Whether two tokenizers give the same tokens the same ids, as a target's and its draft model's must."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase


def require_same_vocabulary(
    target: PreTrainedTokenizerBase | None,
    draft: PreTrainedTokenizerBase | None,
    sizes: tuple[int, int],
    name: str,
) -> None:
    """Raise ValueError unless a draft model's token ids mean what the target's mean.

    sizes: how many logits the target and the draft have. Models of one family may pad them differently, so
    only ids that both have are compared, and only those that both tokenizers name. Special tokens may have
    other names: families rename the ones that they reserve. Without a tokenizer the sizes must be equal.
    name: of the draft model.
    """
    if target is None or draft is None:
        if sizes[0] != sizes[1]:
            without = "the target" if target is None else "it"
            raise ValueError(
                f"draft model {name!r} has {sizes[1]} tokens and the target {sizes[0]}, and {without} has no "
                "tokenizer to compare them by: they must be of one family; choose another draft model"
            )
        return
    mine, its = tokens_by_id(target, sizes), tokens_by_id(draft, sizes)
    for number in sorted(mine.keys() & its.keys()):
        if mine[number] != its[number]:
            raise ValueError(
                f"draft model {name!r} has another vocabulary than the target: token {number} is "
                f"{its[number]!r} there and {mine[number]!r} here; choose one of the target's family"
            )
    if not mine.keys() & its.keys():
        raise ValueError(
            f"draft model {name!r} has no token in common with the target; choose one of the target's family"
        )


def tokens_by_id(tokenizer: PreTrainedTokenizerBase, sizes: tuple[int, int]) -> dict[int, str]:
    """Return the ordinary tokens that have logits in both models, by their ids."""
    special = set(tokenizer.all_special_tokens)
    added = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values()}
    return {
        number: token
        for token, number in tokenizer.get_vocab().items()
        if number < min(sizes) and token not in special and token not in added
    }
