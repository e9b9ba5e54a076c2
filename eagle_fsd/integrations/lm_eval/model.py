"""EleutherAI's lm-evaluation-harness on eagle_fsd: the model "eagle_fsd" for its generative tasks.

lm-eval finds a model by its name in a registry that importing this module adds to; it knows no entry points,
so `command` imports this and hands over to its command line. lm-eval is an extra.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from tqdm import tqdm

from eagle_fsd.acceptance.rule_names import describe
from eagle_fsd.core.stats import GenerationStats
from eagle_fsd.engine import EagleFSD
from eagle_fsd.integrations.lm_eval.requests import Ask, answers, ending_of, seeds, settings_of, text_of
from eagle_fsd.text.chat import require_tokenizer

try:
    import lm_eval.models  # noqa: F401  # first, or ours would be the only model in the registry
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import simple_parse_args_string
except ImportError as error:
    raise ImportError(
        f"lm-eval is not installed ({error}): the harness needs it; pip install 'eagle-fsd[harness]'"
    ) from error

logger = logging.getLogger(__name__)

NAME = "eagle_fsd"
LM_EVALS_DEVICE = "cuda:0"  # what its command line asks for where nobody named a device


@register_model(NAME)
class EagleLM(LM):
    """lm-eval's view of an EagleFSD, under one rule and one tree; it answers `generate_until` requests.

    arguments: see settings_of. engine: one that is there already, whatever models the arguments name. stats:
    the sum over all answers so far. answers: how many; capped: of these, how many ran into their length.
    """

    def __init__(self, engine: EagleFSD | None = None, **arguments: Any) -> None:
        super().__init__()
        settings = settings_of(arguments)
        self.engine = EagleFSD.from_pretrained(**settings.models) if engine is None else engine
        self.tokenizer = require_tokenizer(self.engine.tokenizer)
        self.settings = settings
        self.batch_size = settings.batch_size
        self.stats = GenerationStats()
        self.answers = 0
        self.capped = 0

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> EagleLM:
        """Build the model; `--model_args` take precedence over lm-eval's own flags."""
        flags = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if arg_dict.get("device_map") is not None:
            flags.pop("device", None)
        if flags.get("device") == LM_EVALS_DEVICE and not torch.cuda.is_available():
            logger.info("there is no %s: using the CPU", flags.pop("device"))
        return cls(**{**flags, **arg_dict})

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> EagleLM:
        """Build the model from `name=value,name=value`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    # -- what lm-eval asks about the model --

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def tokenizer_name(self) -> str:
        """A part of file names, under which lm-eval keeps requests."""
        return self.engine.base_model.replace("/", "__")

    @property
    def max_length(self) -> int:
        return self.engine.target.max_positions

    def get_model_info(self) -> dict[str, Any]:
        """Return what lm-eval writes beside its results: models, rule, tree, and what it came to."""
        names = ("base_model", "ea_model", "draft_vocab_size")
        models = {name: getattr(self.engine, name) for name in names}
        return {
            **models | {"dtype": str(self.engine.dtype).removeprefix("torch.")},
            "rule": describe(self.settings.rule),
            "tree": str(self.settings.tree),
            "seed": self.settings.seed,
            **{"answers": self.answers, "capped": self.capped, "stats": self.stats.to_dict()},
        }

    # -- chat templates --

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Write a chat as the text to answer; without a generation prompt its last turn goes on."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the tokenizer's own template, None where none is asked for. Others are refused."""
        if chat_template is False or chat_template is None:
            return None
        if chat_template is not True or self.tokenizer.chat_template is None:
            raise ValueError(
                f"chat template {chat_template!r} is not there: give --apply_chat_template alone for the "
                "tokenizer's own, or leave it out where the tokenizer has none"
            )
        return self.tokenizer.get_chat_template()

    # -- requests --

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answer (context, gen_kwargs), in the requests' order.

        Each is what its request alone gives, whatever the batch size: its draws depend on nothing else.
        """
        asked = [request.args for request in requests]
        asks = self._asks(asked)
        texts = [""] * len(asks)
        settings = self.settings
        with tqdm(total=len(asks), desc="generate_until", unit="answer", disable=disable_tqdm) as bar:
            for places, stream in answers(self.engine, asks, settings.rule, settings.tree, self.batch_size):
                for found in stream:
                    if found.failure is not None:
                        raise found.failure
                    place = places[found.number]
                    texts[place] = text_of(self.engine, found.new_tokens, asks[place].ending.until)
                    self.cache_hook.add_partial("generate_until", asked[place], texts[place])
                    self.answers += 1
                    self.capped += found.stats.finish_reason == "length"
                    bar.update()
                self.stats = GenerationStats.total([self.stats, stream.total])
        logger.info(
            f"{settings.rule}, tree {settings.tree}: {self.answers} answers, {self.stats.new_tokens} tokens, "
            f"tau {self.stats.tau:.2f}, {self.stats.tokens_per_second:.1f} tokens/s, "
            f"{self.stats.fuzzy_accepts} fuzzy accepts, {self.capped} answers cut at their length"
        )
        return texts

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> NoReturn:
        """Refuse: a score of given text is the target's alone, and would say nothing of a rule."""
        tasks = ", ".join(sorted({str(request.task_name) for request in requests}))
        raise NotImplementedError(
            f"{tasks or 'the task'} scores given text, which no acceptance rule changes: {NAME} answers "
            "generative tasks (output_type generate_until: gsm8k, ifeval, humaneval ...); choose one, or "
            "--model hf for the target's own score"
        )

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> NoReturn:
        """Refuse like `loglikelihood`."""
        self.loglikelihood(requests)

    def _asks(self, asked: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Ask]:
        """Read all requests before the first is answered. Raises ValueError for what cannot be answered."""
        asks, cut = [], 0
        for (context, gen_kwargs), seed in zip(asked, seeds(self.settings.seed, asked), strict=True):
            ending = ending_of(gen_kwargs, self.settings.max_gen_toks)
            room = self.max_length - ending.max_new_tokens
            if room < 1:
                raise ValueError(
                    f"max_gen_toks is {ending.max_new_tokens}: the target has {self.max_length} positions, "
                    "and the prompt needs some; lower it (--gen_kwargs max_gen_toks=N)"
                )
            prompt = self._encode(context)
            cut += len(prompt) > room
            asks.append(Ask(tuple(prompt[-room:]), ending, seed))
        if cut:
            logger.warning("%d prompts leave too little room for an answer: cut on the left", cut)
        return asks

    def _encode(self, text: str) -> list[int]:
        """Encode a text; one that begins with the first token itself, as most chats do, gets no second."""
        first = self.tokenizer.bos_token
        ids = self.tokenizer(text, add_special_tokens=not (first and text.startswith(first)))["input_ids"]
        known = self.tokenizer.bos_token_id  # an empty text needs something to follow
        return list(ids) or [self.engine.pad_token_id if known is None else known]
