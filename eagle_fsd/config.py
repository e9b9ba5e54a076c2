"""Small frozen dataclasses: how to draft, how to sample, a head's shape. Each validates itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, ClassVar

HYBRID, PAPER = "hybrid", "paper"  # what comes first, the target's draw or the rule; see acceptance
CHILDREN = ("draft", "likeliest", "target")  # which child a fuzzy accept follows; see acceptance.Fuzzy
DEFAULT_ROPE_THETA = 10000.0
LEAST, MOST = 1e-30, 1e30  # beyond these a rotary base or a norm's epsilon yields no finite weights
LARGEST = 2**31 - 1  # of any size of a head: the product of two still fits into torch's 64 bits
CHECK = "check the head's config.json"  # the remedy of every bad size of a head


def require_integer(name: str, value: object, minimum: int, remedy: str, maximum: int | None = None) -> None:
    """Raise ValueError unless `value` is an integer (numpy's too, no bool) within [minimum, maximum]."""
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_integer or value < minimum or (maximum is not None and value > maximum):
        span = f"of at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
        raise ValueError(f"{name} is {shown(value)}: it must be an integer {span}; {remedy}")


def require_number(name: str, value: object, low: float, high: float, remedy: str) -> None:
    """Raise ValueError unless `value` is a real number within [low, high]; NaN is never within."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    try:
        inside = is_number and low <= float(value) <= high
    except OverflowError:  # an integer beyond all floats, as JSON may hold
        inside = False
    if not inside:
        span = f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"
        raise ValueError(f"{name} is {shown(value)}: it must be a number {span}; {remedy}")


def require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise ValueError unless `value` is one of the names."""
    if value not in choices:
        raise ValueError(f"{name} is {shown(value)}: it must be one of {', '.join(choices)}; choose one")


def shown(value: object) -> str:
    """A wrong value for an error line: a file may hold one of any length, which is cut."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def require_confidence(value: object) -> None:
    """Raise ValueError unless this can be a tree's min_confidence."""
    require_number("min_confidence", value, 0.0, 1.0, "0 always verifies the whole tree, 0.05 suits a CPU")


def require_guards(mode: object, max_consecutive: object, exact_prefix: object) -> None:
    """Raise ValueError unless these are what any acceptance rule may have."""
    require_choice("mode", mode, (HYBRID, PAPER))
    if max_consecutive is not None:
        require_integer("max_consecutive", max_consecutive, 0, "None turns the guard off")
    require_integer("exact_prefix", exact_prefix, 0, "0 turns the guard off")


@dataclass(frozen=True)
class TreeConfig:
    """The size of a draft tree (EAGLE-2, arXiv 2406.16858), written total_tokens/depth/top_k.

    total_tokens: nodes in one verify forward, root included; 1 is plain decoding.
    depth: most drafted tokens on a path (the paper's depth; EAGLE's code argument is one less).
    top_k: beam width while the tree grows, and the most children of a node.
    min_confidence: above 0 the other sizes are upper bounds, and a step's tree is as large as the head is
    sure: only nodes of at least this confidence are verified (EAGLE-2's: the product of the draft's
    probabilities along the path), and a level is drafted only below nodes of twice as much. Written as a
    fourth part, 16/8/4/0.05. It saves time where the host need not wait for the device, that is on a CPU.
    """

    FORM: ClassVar[str] = "total_tokens/depth/top_k[/min_confidence]"

    total_tokens: int = 16
    depth: int = 5
    top_k: int = 8
    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        require_integer(
            "total_tokens", self.total_tokens, 1, "1 turns drafting off, 16 suits a CPU, 60 a GPU"
        )
        require_integer("depth", self.depth, 1, "5 or 6 is usual")
        require_integer("top_k of the tree", self.top_k, 1, "8 or 10 is usual")
        require_confidence(self.min_confidence)
        if self.total_tokens > 1 + self.candidates:
            raise ValueError(
                f"total_tokens is {self.total_tokens}: a tree of depth {self.depth} and tree top_k "
                f"{self.top_k} has at most {1 + self.candidates} nodes; lower it, or raise depth or top_k"
            )

    @classmethod
    def parse(cls, text: str) -> TreeConfig:
        """The tree written in FORM, such as 16/5/8 or 16/8/4/0.05."""
        *sizes, confidence = text.split("/") if text.count("/") == 3 else [*text.split("/"), "0"]
        try:
            least = float(confidence)
        except ValueError:
            least = math.nan
        if len(sizes) != 3 or not all(size.isdecimal() for size in sizes) or math.isnan(least):
            raise ValueError(f"tree is {text!r}: it must be {cls.FORM}; 16/5/8 is one, 16/8/4/0.05 another")
        return cls(*map(int, sizes), least)

    @classmethod
    def within(cls, total_tokens: int, depth: int, top_k: int) -> TreeConfig:
        """The tree of at most so many nodes: fewer where depth and top_k do not give them."""
        return cls(min(total_tokens, cls(1, depth, top_k).candidates + 1), depth, top_k)

    @property
    def reach(self) -> int:
        """The depth that a tree of so many nodes can have: deeper levels would be drafted for nothing."""
        return min(self.depth, self.total_tokens - 1)

    @property
    def candidates(self) -> int:
        """Drafted tokens that compete for a place: top_k for the root and for every beam node."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def least_score(self) -> float:
        """The cumulative log-probability of a node of min_confidence."""
        return math.log(self.min_confidence) if self.min_confidence else -math.inf

    @property
    def least_parent(self) -> float:
        """That of a node below which a level is drafted: below less, at most one child has min_confidence.

        Twice, for it is fastest; one and three times were measured too (eval/SPEED.md).
        """
        return self.least_score + math.log(2)

    def __str__(self) -> str:
        sizes = f"{self.total_tokens}/{self.depth}/{self.top_k}"
        return f"{sizes}/{self.min_confidence:g}" if self.min_confidence else sizes


@dataclass(frozen=True)
class AutoTree:
    """A tree whose size is measured: the one with the most tokens per second, on this machine and head.

    depth, top_k, min_confidence: fixed where given; see TreeConfig.
    """

    depth: int | None = None
    top_k: int | None = None
    min_confidence: float | None = None

    def __post_init__(self) -> None:
        if self.depth is not None:
            require_integer("depth", self.depth, 1, "5 or 6 is usual")
        if self.top_k is not None:
            require_integer("top_k of the tree", self.top_k, 1, "8 or 10 is usual")
        if self.min_confidence is not None:
            require_confidence(self.min_confidence)


@dataclass(frozen=True)
class SamplingConfig:
    """How text is sampled, in Hugging Face's order and law: temperature, then top_k, then top_p.

    temperature: 0 is greedy. top_k: 0 keeps every token. top_p: 1 keeps every token.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        require_number(
            "temperature", self.temperature, 0.0, math.inf, "0 is greedy, 1 samples the model as it is"
        )
        if math.isinf(self.temperature):
            raise ValueError("temperature is inf: it must be finite; 1 samples the model as it is")
        require_integer("top_k", self.top_k, 0, "0 keeps every token")
        require_number("top_p", self.top_p, 0.0, 1.0, "1 keeps every token")
        if self.top_p == 0:
            raise ValueError(
                "top_p is 0: it must be above 0 and at most 1; use temperature 0 for greedy decoding"
            )

    @classmethod
    def parse(cls, text: str) -> SamplingConfig:
        """The law written as temperature[/top_k[/top_p]], such as 0.6/50/0.9."""
        parts = text.split("/")
        try:
            kinds = zip((float, int, float)[: len(parts)], parts, strict=True)
            return cls(*(kind(part) for kind, part in kinds))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"sampling is {text!r}: it must be temperature[/top_k[/top_p]], such as 0.6/50/0.9 ({error})"
            ) from error

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class AutoThreshold:
    """A fuzzy rule whose threshold is read from the head's calibration: the largest inside the budget.

    quality_budget: the most TV per token, see calibration. divergence, mode, child, min_gain: as in
    acceptance.Fuzzy.
    """

    quality_budget: float = 0.02
    divergence: str = "js"
    mode: str = HYBRID
    child: str = "draft"
    min_gain: float = 0.0

    def __post_init__(self) -> None:
        require_number(
            "quality_budget", self.quality_budget, 0.0, 1.0, "0.02 changes about one token in fifty"
        )
        require_choice("mode", self.mode, (HYBRID, PAPER))
        require_choice("child", self.child, CHILDREN)
        require_number("min_gain", self.min_gain, 0.0, math.inf, "0 turns the guard off")


@dataclass(frozen=True)
class HeadConfig:
    """The shape of an EAGLE-1/2 draft head: one Llama decoder layer behind `fc`, as in EAGLE's config.json.

    fc_bias: whether `fc` adds a bias. New heads have none: vLLM's `fc` has none either, see `to_dict`.
    qkv_bias: whether q, k and v have biases, as in heads for Qwen2.
    trained_positions: the longest text it was trained on, where that is known; draft_vocab_size: how many of
    the target's tokens it drafts, None for all. Both are notes that EAGLE's files lack; loaders that do not
    know them draft over the whole vocabulary.
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
            if self.draft_vocab_size > self.vocab_size:
                raise ValueError(
                    f"draft_vocab_size is {self.draft_vocab_size}: it must be at most the vocab_size "
                    f"({self.vocab_size}); {CHECK}"
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads is {self.num_key_value_heads}: it must divide num_attention_heads "
                f"({self.num_attention_heads}); {CHECK}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: rotary positions need it even; {CHECK}")
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act is {shown(self.hidden_act)}: EAGLE heads use 'silu'; {CHECK}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, fc_bias: bool, qkv_bias: bool) -> HeadConfig:
        """Read EAGLE's config.json; biases come from the checkpoint's keys, for the flags are unreliable.

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
                f"num_hidden_layers is {shown(layers)}: an EAGLE-1/2 head has 1; this is another model's "
                "config"
            )
        rope = data.get("rope_parameters") or data.get("rope_scaling") or {}
        if not isinstance(rope, Mapping):
            raise ValueError(f"rope parameters are {shown(rope)}: they must be an object; {CHECK}")
        if data.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ValueError(
                "partial_rotary_factor is not 1: draft heads here rotate whole heads; choose another"
            )
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(
                f"rope scaling is {shown(kind)}: draft heads here use plain rotary positions ('default'); "
                "choose another head"
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
            rope_theta=data.get("rope_theta", rope.get("rope_theta", DEFAULT_ROPE_THETA)),
            max_position_embeddings=data.get("max_position_embeddings", 2048),
            hidden_act=data.get("hidden_act", "silu"),
            fc_bias=fc_bias,
            qkv_bias=qkv_bias,
            trained_positions=data.get("trained_positions"),
            draft_vocab_size=data.get("draft_vocab_size"),
        )

    def to_dict(self) -> dict[str, Any]:
        """The config.json that EAGLE, vLLM and SGLang read, with flags that match the keys.

        `bias` is EAGLE's word for the bias of `fc`, true where it is absent. vLLM and SGLang build the layer
        with their Llama, which makes biases for its attention, o's among them, where `bias` or
        `attention_bias` is true, and leaves those uninitialised that a file lacks. No head has one of o, so
        `attention_bias` is always false. `qkv_bias` is EAGLE's and vLLM's word for q, k and v alone. A head
        whose `fc` has a bias says `bias: true` all the same, for EAGLE's own code drops the bias otherwise:
        such a head is for EAGLE and for this package, until training.folding has removed the bias.
        """
        notes = {"trained_positions": self.trained_positions, "draft_vocab_size": self.draft_vocab_size}
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
