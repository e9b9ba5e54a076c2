"""The slow, plain twin of the decoding loop: a whole forward for every token, no draft, batch or cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation import logits_process as theirs

from eagle_fsd.core.randomness.noise import RowNoise

TIE = 2e-3  # where the two best tokens are nearer than this, rounding may decide


@dataclass
class PlainTexts:
    """Texts of a target by Hugging Face's own processors and warpers. Sampled ones are drawn by the noise."""

    model: PreTrainedModel
    _known: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)

    @torch.inference_mode()
    def text(
        self, prompt: Sequence[int], options: Mapping[str, Any], stream: tuple[int, int], most: int
    ) -> tuple[list[int], list[float]]:
        """Return the new tokens, and how far each is ahead of the next best one. options: of `generate`."""
        chosen = {name: value for name, value in options.items() if name not in ("rule", "tree")}
        tokens, leads = self._known.setdefault(repr((prompt, chosen, stream, most)), ([], []))
        noise, ends = RowNoise(stream), options["eos_token_id"]
        while len(tokens) < most and not (tokens and tokens[-1] in ends):
            ids = torch.tensor([[*prompt, *tokens]])
            scores = self.model(ids).logits[:, -1].float()
            for change in (*processors(options, len(prompt)), *warpers(options)):
                scores = change(ids, scores)
            if options["temperature"]:
                scores = scores.log_softmax(-1) + noise.places(len(tokens), 1, scores.shape[-1])[0]
            best = scores[0].topk(2)
            tokens.append(int(best.indices[0]))
            leads.append(float(best.values[0] - best.values[1]))
        return tokens, leads


def processors(options: Mapping[str, Any], prompt: int) -> list[Any]:
    """Return Hugging Face's processors of the options, in its order. prompt: its tokens."""
    ends = list(options["eos_token_id"])
    makers = {
        "logit_bias": lambda biases: theirs.SequenceBiasLogitsProcessor(
            [[list(words), bias] for words, bias in biases.items()]
        ),
        "repetition_penalty": theirs.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram_size": theirs.NoRepeatNGramLogitsProcessor,
        "bad_words_ids": lambda words: theirs.NoBadWordsLogitsProcessor(words, ends or None),
        "min_new_tokens": lambda least: theirs.MinNewTokensLengthLogitsProcessor(prompt, least, ends),
    }
    wanted = [name for name in makers if name in options and (ends or name != "min_new_tokens")]
    return [makers[name](options[name]) for name in wanted]


def warpers(options: Mapping[str, Any]) -> list[Any]:
    """Return Hugging Face's warpers of the options, in its order."""
    if not options["temperature"]:
        return []
    found = [theirs.TemperatureLogitsWarper(options["temperature"])]
    found += [theirs.TopKLogitsWarper(options["top_k"])] if options["top_k"] else []
    return found + ([theirs.TopPLogitsWarper(options["top_p"])] if options["top_p"] < 1 else [])


def require_equal(mine: Sequence[int], wanted: Sequence[int], leads: Sequence[float]) -> None:
    """Assert that a text is the wanted one, up to the first near-tie of the wanted one's tokens."""
    pairs = zip(mine, wanted, leads, strict=False)
    place = next((place for place, (one, other, _) in enumerate(pairs) if one != other), None)
    if place is None or leads[place] > TIE:
        assert list(mine) == list(wanted), f"the texts part at token {place}"
