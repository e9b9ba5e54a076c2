"""The shape of an EAGLE-1/2 head, as EAGLE's config.json describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eagle_fsd.core.checks import format_value, plain_numbers, require_integer, require_number

DEFAULT_ROPE_THETA = 10000.0
LEAST, MOST = 1e-30, 1e30  # a rotary base or a norm's epsilon outside these gives numbers that are not finite
LARGEST = 2**31 - 1  # of any size of a head: the product of two sizes still fits into torch's 64 bits
CHECK = "check the head's config.json"  # the remedy in every error about a head's size


@dataclass(frozen=True)
class HeadConfig:
    """The shape of an EAGLE-1/2 draft head: one Llama decoder layer behind `fc`, as in EAGLE's config.json.

    fc_bias: whether `fc` adds a bias. New heads have none: vLLM's `fc` has none either, see `to_dict`.
    qkv_bias: whether q, k and v have biases, as in heads for Qwen2.
    trained_positions: the longest text it was trained on; None if unknown. draft_vocab_size: the number of
    the target's tokens that it drafts; None for all. draft_text_tokens: how many tokens beside these it
    drafts that a text itself has had; see text_tokens. EAGLE's own files have none of these fields. Loaders
    that do not know them draft over the whole vocabulary.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = DEFAULT_ROPE_THETA
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    fc_bias: bool = False
    qkv_bias: bool = False
    trained_positions: int | None = None
    draft_vocab_size: int | None = None
    draft_text_tokens: int | None = None

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        for name in (*sizes, "vocab_size", "max_position_embeddings"):
            require_integer(name, getattr(self, name), 1, CHECK, LARGEST)
        for name in ("rms_norm_eps", "rope_theta"):
            require_number(name, getattr(self, name), LEAST, MOST, CHECK)
        if self.trained_positions is not None:
            require_integer("trained_positions", self.trained_positions, 1, CHECK, LARGEST)
        if self.draft_vocab_size is not None:
            require_integer("draft_vocab_size", self.draft_vocab_size, 1, CHECK, LARGEST)
        if self.draft_text_tokens is not None:
            require_integer("draft_text_tokens", self.draft_text_tokens, 0, CHECK, LARGEST)
        require_consistent(
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            self.vocab_size,
            self.draft_vocab_size,
        )
        if self.hidden_act != "silu":
            raise ValueError(
                f"hidden_act is {format_value(self.hidden_act)}: EAGLE heads use 'silu'; {CHECK}"
            )
        plain_numbers(self)

    @property
    def longest_trained(self) -> int:
        """The longest text that it was trained on, or that it has positions for where that is unknown."""
        return self.trained_positions or self.max_position_embeddings

    @property
    def drafted_tokens(self) -> int:
        """How many of the target's tokens the head drafts."""
        return self.draft_vocab_size or self.vocab_size

    @classmethod
    def for_target(cls, config: Any, hidden_size: int, vocab_size: int) -> HeadConfig:
        """Return the shape of a new head: that of the target's layers, from its Hugging Face config.

        It has EAGLE's rotary base, 10000, and no bias of `fc`: all loaders agree on these. Raises ValueError
        for a shape that no head has.
        """
        heads = config.num_attention_heads
        try:
            return cls(
                hidden_size=hidden_size,
                intermediate_size=getattr(config, "intermediate_size", None) or 4 * hidden_size,  # GPT-2's
                num_attention_heads=heads,
                num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
                head_dim=getattr(config, "head_dim", None) or hidden_size // heads,
                vocab_size=vocab_size,
                rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
            )
        except ValueError as error:  # there is no config.json of a head yet
            wrong = str(error).removesuffix(f"; {CHECK}")
            raise ValueError(
                f"{wrong}; a new head has the shape of the target's layers: choose another target"
            ) from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, fc_bias: bool, qkv_bias: bool) -> HeadConfig:
        """Read EAGLE's config.json. Biases come from the checkpoint's keys, since the flags are unreliable.

        Raises ValueError for a missing field, more than one layer, or a rotary scaling that the head does not
        compute.
        """
        required = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        for name in required:
            if name not in data:
                raise ValueError(
                    f"config.json has no {name!r}: an EAGLE head's config needs {', '.join(required)}"
                )
        layers = data.get("num_hidden_layers", 1)
        if layers != 1:
            raise ValueError(
                f"num_hidden_layers is {format_value(layers)}: an EAGLE-1/2 head has 1; this is another "
                "model's config"
            )
        rope = rotary_fields(data)
        if rope["rope_type"] != "default":
            raise ValueError(
                f"rope scaling is {format_value(rope['rope_type'])}: draft heads here use plain rotary "
                "positions ('default'); choose another head"
            )
        heads = data["num_attention_heads"]
        for name in ("num_attention_heads", "hidden_size"):
            require_integer(name, data[name], 1, CHECK, LARGEST)
        return cls(
            hidden_size=data["hidden_size"],
            intermediate_size=data["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=data.get("num_key_value_heads") or heads,
            head_dim=data.get("head_dim") or data["hidden_size"] // heads,
            vocab_size=data["vocab_size"],
            rms_norm_eps=data.get("rms_norm_eps", 1e-6),
            rope_theta=rope["rope_theta"],
            max_position_embeddings=data.get("max_position_embeddings", 2048),
            hidden_act=data.get("hidden_act", "silu"),
            fc_bias=fc_bias,
            qkv_bias=qkv_bias,
            trained_positions=data.get("trained_positions"),
            draft_vocab_size=data.get("draft_vocab_size"),
            draft_text_tokens=data.get("draft_text_tokens"),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the config.json that EAGLE, vLLM and SGLang read, with flags that match the keys.

        `bias` is EAGLE's flag for the bias of `fc`; EAGLE reads a missing flag as true. vLLM and SGLang build
        the layer with their Llama. If `bias` or `attention_bias` is true, its attention has biases, also for
        o, and those that the file lacks stay uninitialised. No head has a bias for o, so `attention_bias` is
        always false. `qkv_bias` is EAGLE's and vLLM's flag for q, k and v alone. A head whose `fc` has a bias
        is written with `bias: true` all the same, since EAGLE's own code drops the bias otherwise. Such a
        head works only with EAGLE and this package, until training.folding has removed the bias.
        """
        names = ("trained_positions", "draft_vocab_size", "draft_text_tokens")
        notes = {name: getattr(self, name) for name in names}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": self.hidden_act,
            "bias": self.fc_bias,
            "attention_bias": False,
            "qkv_bias": self.qkv_bias,
            "tie_word_embeddings": False,
            **{name: value for name, value in notes.items() if value is not None},
        }


def rotary_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a head's config.json says of its rotary positions, rope_theta and rope_type in any case.

    Raises ValueError for angles that no head here has: of parts of a head, or of several kinds of layers.
    """
    named = data.get("rope_parameters") or data.get("rope_scaling") or {}
    if not isinstance(named, Mapping):
        raise ValueError(f"rope parameters are {format_value(named)}: they must be an object; {CHECK}")
    if kinds := [kind for kind, value in named.items() if isinstance(value, Mapping)]:
        raise ValueError(
            f"rope parameters are those of {format_value(kinds[0])}: draft heads here have one kind of "
            "rotary positions in all layers; choose another head"
        )
    if data.get("partial_rotary_factor", named.get("partial_rotary_factor")) not in (None, 1.0):
        raise ValueError(
            "partial_rotary_factor is not 1: draft heads here rotate whole heads; choose another"
        )
    theta = data.get("rope_theta")
    usual = {"rope_theta": DEFAULT_ROPE_THETA, "rope_type": named.get("type", "default")}
    return {**usual, **named, **({} if theta is None else {"rope_theta": theta})}


def require_consistent(
    heads: int, kv_heads: int, head_dim: int, vocab_size: int, draft_vocab_size: int | None
) -> None:
    """Raise ValueError unless a head's sizes fit each other; see HeadConfig."""
    if draft_vocab_size is not None and draft_vocab_size > vocab_size:
        raise ValueError(
            f"draft_vocab_size is {draft_vocab_size}: it must be at most the vocab_size "
            f"({vocab_size}); {CHECK}"
        )
    if heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads is {kv_heads}: it must divide num_attention_heads ({heads}); {CHECK}"
        )
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim}: rotary positions need it even; {CHECK}")
