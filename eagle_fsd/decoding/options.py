"""How to generate, as callers say it: the keywords of `EagleFSD.generate`, written once and checked first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor

from eagle_fsd.acceptance.accept import AcceptanceRule
from eagle_fsd.acceptance.other_rules import PublishedFSD
from eagle_fsd.core.checks import (
    format_value,
    override,
    plain_numbers,
    require_different_texts,
    require_texts,
)
from eagle_fsd.core.config import (
    FSD_PAPER_SAMPLING,
    FSD_PAPER_TREE,
    AutoThreshold,
    AutoTree,
    Form,
    SamplingConfig,
    TreeConfig,
)
from eagle_fsd.core.padding import Rows
from eagle_fsd.core.processing import Constraint, Processing, Processor
from eagle_fsd.core.randomness.streams import Seed
from eagle_fsd.decoding.logits.constrained import require_ends
from eagle_fsd.decoding.prompts.prompt_cache import PromptCache
from eagle_fsd.decoding.request import Observer, Prompts, Request, Stopper, end_token_ids
from eagle_fsd.target.model import TargetModel

# The options that a model's generation_config may set, by the class that holds them.
SAMPLING = tuple(field.name for field in fields(SamplingConfig))
NOT_OPTIONS = ("own", "constraint")  # fields of Processing that no option of this name sets
# Every option of Processing, switched off: measurements are of the model, not of its generation_config.
UNTOUCHED = {field.name: field.default for field in fields(Processing) if field.name not in NOT_OPTIONS}
PROCESSING = (*UNTOUCHED, "logits_processor")
SEQUENCES = ("bad_words_ids", "suppress_tokens", "logit_bias", "logits_processor", "stop_strings")
ASKED_TO_SAMPLE = {"temperature": 1.0, "top_k": 50}  # Hugging Face's defaults


@dataclass(frozen=True)
class GenerationOptions:
    """How to generate: the arguments of `EagleFSD.generate` beside the prompts.

    max_new_tokens: the most new tokens of each text.
    temperature, top_k, top_p, min_p: see SamplingConfig; temperature 0 is greedy.
    rule: when a drafted token is accepted; None is Lossless(), and AutoThreshold() reads the threshold of a
      quality budget from the head's calibration.
    tree: the draft tree's size; None is TreeConfig(), and total_tokens=1 is plain decoding. AutoTree()
      measures which is fastest here. With an AutoThreshold both take the calibration's tree instead, since a
      budget holds for a tree.
    seed: the same seed and the same tree give the same texts; None draws a fresh one, which the output names.
      Row r of an int seed s draws from the stream (s, r), whatever else is in the batch. A sequence names
      each row's stream, so that seed=[(s, r)] gives row r again on its own.
    eos_token_id: the tokens that end a text; None takes the model's own.
    observer: a function that is called after every step with the verified tree and its logits, the verdict on
      it, and how many tokens each row has emitted; see Observer in decoding/request.py. It changes nothing.
    repetition_penalty, presence_penalty, frequency_penalty, no_repeat_ngram_size, bad_words_ids,
      suppress_tokens, logit_bias, min_new_tokens: see Processing; iterables and mappings of any kind will do.
    logits_processor: functions of your own, such as Hugging Face's LogitsProcessor objects; see Processing.
      They make steps slow, since they are called once for each length of a path.
    logprobs: also return the log-probability of every new token and of this many likeliest tokens there,
      under the target itself, before any option changes the logits. 0: of the new tokens only. None: neither.
    stop_strings: the text ends with the token that completes one of these, wherever in tokens it begins.
    json_schema, regex, grammar: the text's form, of which there is one at most; it needs the extra `schema`.
      A JSON schema is an object or its JSON, a regular expression fits the whole text, and a grammar is in
      Lark's language. All tokens that leave the form are ruled out at every node, for every rule, and an end
      token comes only where the form is complete.
    num_return_sequences: how many texts to sample for each prompt; they are neighbours in the batch.
    prompt_cache: texts that are kept from one call to the next; a prompt that begins like one, such as the
      next turn of a chat, is read from there on. See PromptCache.
    do_sample: as in Hugging Face: False is greedy, and True samples, at temperature 1 with top_k 50 where
      neither a field nor the model says otherwise. None: the temperature says it.

    None for one of temperature ... min_p and repetition_penalty ... min_new_tokens takes what the model's
    generation_config says, as Hugging Face does, else it is off. Raises ValueError for values out of range
    and for a tree of another type.
    """

    max_new_tokens: int = 256
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    rule: AcceptanceRule | AutoThreshold | None = None
    tree: TreeConfig | AutoTree | None = None
    seed: Seed | None = None
    eos_token_id: int | Sequence[int] | None = None
    observer: Observer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    bad_words_ids: Iterable[Iterable[int]] | None = None
    suppress_tokens: Iterable[int] | None = None
    logit_bias: Mapping[Any, float] | Iterable[Any] | None = None
    min_new_tokens: int | None = None
    logits_processor: Processor | Iterable[Processor] | None = None
    logprobs: int | None = None
    stop_strings: str | Iterable[str] | None = None
    num_return_sequences: int = 1
    do_sample: bool | None = None
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    prompt_cache: PromptCache | None = None

    @classmethod
    def fsd_paper(cls, threshold: float = 0.3, divergence: str = "js", **fields: Any) -> GenerationOptions:
        """Return the algorithm of the FSD paper as published, with the settings of its experiments.

        A chain of five greedy drafts, accepted while divergence(p, q) <= threshold on raw distributions; the
        first failure ends the step. The paper drafts with a draft model, and looks nothing up: that is the
        engine's lookup=False. fields: others of this class, which override these settings.
        """
        sampling = asdict(FSD_PAPER_SAMPLING)
        rule = PublishedFSD(threshold, divergence)
        return cls(**{"rule": rule, "tree": FSD_PAPER_TREE, **sampling, **fields})

    def __post_init__(self) -> None:
        for name in SEQUENCES:
            object.__setattr__(self, name, kept(getattr(self, name)))
        if self.stop_strings is not None and not isinstance(self.stop_strings, (str, Iterable)):
            raise ValueError(
                f"stop_strings is {format_value(self.stop_strings)}: it must be a string or a list of them; "
                "fix it"
            )
        require_texts(
            self.max_new_tokens, self.num_return_sequences, self.min_new_tokens, self.logprobs, self.stops
        )
        if self.do_sample not in (None, True, False):
            raise ValueError(
                f"do_sample is {format_value(self.do_sample)}: it must be True or False; leave it out to let "
                "the temperature say it"
            )
        if not (self.observer is None or callable(self.observer)):
            raise ValueError(
                f"observer is {format_value(self.observer)}: it must be a function that is shown every step; "
                "leave it out"
            )
        if not isinstance(self.prompt_cache, PromptCache | None):
            raise ValueError(
                f"prompt_cache is {format_value(self.prompt_cache)}: it must be a PromptCache; leave it out"
            )
        both = None not in (self.do_sample, self.temperature)
        if both and self.do_sample == (self.temperature == 0):
            raise ValueError(
                f"do_sample is {self.do_sample} and temperature is {self.temperature}: they contradict each "
                "other, since temperature 0 is greedy; leave one out"
            )
        _ = self.sampling, self.processing, self.form  # these raise ValueError for bad values
        if self.tree is not None and not isinstance(self.tree, (TreeConfig, AutoTree)):
            raise ValueError(
                f"tree is {self.tree!r}: it must be a TreeConfig, such as TreeConfig(16, 5, 8), or AutoTree()"
            )
        plain_numbers(self)

    @property
    def sampling(self) -> SamplingConfig:
        return SamplingConfig(**self._given(SAMPLING))

    @property
    def processing(self) -> Processing:
        return Processing.of(**self._given(PROCESSING))

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        stops = self.stop_strings or ()
        return (stops,) if isinstance(stops, str) else tuple(stops)

    @property
    def form(self) -> Form | None:
        """What the text must look like."""
        forms = [
            Form(name, source) for name in ("regex", "grammar") if (source := getattr(self, name)) is not None
        ]
        if self.json_schema is not None:
            forms.insert(0, Form.json_schema(self.json_schema))
        if len(forms) > 1:
            raise ValueError(
                f"{forms[1].kind} beside {forms[0].kind}: a text has one form; leave one of them out"
            )
        return forms[0] if forms else None

    def _given(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def request(
        self,
        prompts: Prompts,
        eos_token_ids: Sequence[int],
        rule: AcceptanceRule,
        tree: TreeConfig,
        stoppers: Sequence[Stopper] = (),
        constraint: Constraint | None = None,
    ) -> Request:
        """Return the request for these prompts, with the rule, the tree and the form that were settled."""
        if constraint is not None:
            require_ends(constraint.name, eos_token_ids)
        return Request(
            prompts=prompts.rows,
            limits=prompts.limits,
            eos_token_ids=eos_token_ids,
            rule=rule,
            tree=tree,
            sampling=self.sampling,
            observer=self.observer,
            processing=replace(self.processing, constraint=constraint),
            logprobs=self.logprobs,
            stoppers=stoppers,
            prompt_cache=self.prompt_cache,
        )

    def require_different_texts(self, name: str = "num_return_sequences") -> None:
        """Raise ValueError if several texts of a prompt would be the same. name: what the user calls it."""
        require_different_texts(self.num_return_sequences, self.sampling.greedy, name)

    def with_defaults(
        self, defaults: Mapping[str, Any], named_sampling: Mapping[str, Any] = MappingProxyType({})
    ) -> GenerationOptions:
        """Return the options with a model's own values, see `own_defaults`, for those that are None.

        named_sampling: what the model names for who asks it to sample, as with do_sample.
        """
        if self.do_sample:
            defaults = {**ASKED_TO_SAMPLE, **named_sampling, **defaults}
        elif self.do_sample is not None:  # False, or what equals it
            defaults = {**defaults, "temperature": 0.0}
        own = {name: value for name, value in defaults.items() if getattr(self, name) is None}
        if "min_new_tokens" in own:  # a model's own may be more than this call asks for
            own["min_new_tokens"] = min(own["min_new_tokens"], self.max_new_tokens)
        return replace(self, **own) if own else self


def kept(value: Any) -> Any:
    """Return a caller's value with tuples for iterators, which could be read only once."""
    if isinstance(value, Iterator):
        return tuple(map(kept, value))
    return type(value)(map(kept, value)) if type(value) in (list, tuple) else value


def settle_options(
    options: GenerationOptions | None, keywords: Mapping[str, Any], target: TargetModel
) -> GenerationOptions:
    """Return the options with what keywords override, and the model's own values for what neither says.

    Raises ValueError for a keyword that is no option, and for what does not fit the target or each other.
    """
    settled = override(GenerationOptions, options, keywords).with_defaults(
        target.own_defaults, target.named_sampling
    )
    settled.processing.require_vocabulary(target.vocab_size)
    settled.require_different_texts()
    return settled


def settle_batch(
    options: GenerationOptions | None,
    keywords: Mapping[str, Any],
    target: TargetModel,
    input_ids: Tensor,
    attention_mask: Rows | None,
) -> tuple[GenerationOptions, Prompts]:
    """Return the settled options and the prompts [B, L], each repeated num_return_sequences times."""
    settled = settle_options(options, keywords, target)
    ends = end_token_ids(target, settled.eos_token_id)
    prompts = Prompts.from_padded(target, input_ids, attention_mask, settled.max_new_tokens, ends)
    return settled, prompts.repeated(settled.num_return_sequences)
