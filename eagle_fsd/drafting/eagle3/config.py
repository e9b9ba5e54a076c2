"""The shape of an EAGLE-3 head, and the ways in which its config.json can be read.

Two kinds of files describe such heads. In one, config.json has a Llama's fields and a few more. In the other,
that of the speculators library, the layer's fields are in `transformer_layer_config`. Both name the layers of
the target by two conventions, which nothing in a file tells apart; see `tap_readings`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_fsd.core.checks import format_value, require_choice, require_integer, require_number
from eagle_fsd.drafting.eagle3.rope import Rope
from eagle_fsd.drafting.eagle_config import CHECK, LARGEST, LEAST, MOST, require_consistent

NESTED = "transformer_layer_config"  # of the speculators library
TYPE = "speculators_model_type"
IDS = "eagle_aux_hidden_state_layer_ids"
SLIDING = "sliding_attention"
REQUIRED = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
USUAL_TAPS = 3
REMEDY = "name the taps (head_taps, --head-taps)"


@dataclass(frozen=True)
class Reading:
    """One way to read an ambiguous config: the taps, and whether the carried state is the normed one."""

    taps: tuple[int, ...]
    norm_output: bool = False

    def __str__(self) -> str:
        taps = ",".join(map(str, self.taps)) or "none"
        return f"taps {taps}, norm_output {str(self.norm_output).lower()}"


@dataclass(frozen=True)
class Structure:
    """What a head's tensors say of its shape. They are right where a config's flags are not.

    fc_inputs: the numbers of the target that its `fc` reads; None if it has none.
    draft_vocab_size: the rows of its lm_head; None if it has none and uses the target's. layers: its decoder
    layers. embeddings: whether it brings its own. fc_norm, norm_before_fc: whether it has these norms.
    """

    fc_inputs: int | None
    draft_vocab_size: int | None
    layers: int = 1
    embeddings: bool = False
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False


@dataclass(frozen=True)
class Eagle3Config:
    """The shape of an EAGLE-3 head.

    hidden_size: its width d. target_size: the target's width. taps: the residual streams of the target that
    it reads, by number: tap i is what enters layer i, counted from 0, which is the output of layer i - 1.
    Empty: it reads the state after the target's last norm. vocab_size: the target's.
    draft_vocab_size: the tokens that it drafts. windows: the sliding window of each layer, 0 for none.
    norm_before_residual: the residual is the normed state. norm_before_fc: one norm over all taps. fc_norm: a
    norm for each tap. norm_output: the state that is carried on is the normed one ("EAGLE-3.1"). logit_scale:
    a factor of the draft's logits. lm_head, embeddings: whether it has its own; else the target's are used.
    trained_positions: the longest text it was trained on; None if unknown.
    """

    hidden_size: int
    target_size: int
    taps: tuple[int, ...]
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    windows: tuple[int, ...] = (0,)
    rms_norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    logit_scale: float = 1.0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc: bool = True
    fc_bias: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    lm_head: bool = True
    embeddings: bool = False
    trained_positions: int | None = None

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "target_size", "intermediate_size", "num_attention_heads")
        for name in (*sizes, "num_key_value_heads", "head_dim", "vocab_size", "draft_vocab_size"):
            require_integer(name, getattr(self, name), 1, CHECK, LARGEST)
        require_integer("max_position_embeddings", self.max_position_embeddings, 1, CHECK, LARGEST)
        if self.trained_positions is not None:
            require_integer("trained_positions", self.trained_positions, 1, CHECK, LARGEST)
        require_number("rms_norm_eps", self.rms_norm_eps, LEAST, MOST, CHECK)
        require_number("logit_scale", self.logit_scale, LEAST, MOST, CHECK)
        require_choice("hidden_act", self.hidden_act, ("silu",))
        for window in self.windows:
            require_integer("sliding_window", window, 0, CHECK, LARGEST)
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be true or false; {CHECK}")
        require_consistent(
            self.num_attention_heads,
            self.num_key_value_heads,
            self.head_dim,
            self.vocab_size,
            self.draft_vocab_size,
        )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(f"norm_before_fc and fc_norm are both true: one of them must be false; {CHECK}")
        if not self.fc and self.fc_inputs != self.hidden_size:
            raise ValueError(
                f"the head has no fc and reads {self.fc_inputs} numbers: without it, these must be its "
                f"hidden_size ({self.hidden_size}); {CHECK}"
            )
        if self.hidden_size != self.target_size and not (self.embeddings and self.lm_head):
            missing = "lm_head" if self.embeddings else "embed_tokens"
            raise ValueError(
                f"the head is {self.hidden_size} wide, its target {self.target_size}, and it has no "
                f"{missing}: a head of another width must bring its own; choose a whole file"
            )

    @property
    def fc_inputs(self) -> int:
        """The width of what the head reads of the target."""
        return max(len(self.taps), 1) * self.target_size

    @property
    def longest_trained(self) -> int:
        """The longest text that it was trained on, or that it has positions for where that is unknown."""
        return self.trained_positions or self.max_position_embeddings

    @property
    def drafted_tokens(self) -> int:
        """How many of the target's tokens the head drafts."""
        return self.draft_vocab_size

    @property
    def reading(self) -> Reading:
        return Reading(self.taps, self.norm_output)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], found: Structure, reading: Reading) -> Eagle3Config:
        """Read a config.json, in one of its readings. Raises ValueError for what is missing or not built."""
        layer = layer_fields(data)
        for name in REQUIRED:
            if name not in layer:
                raise ValueError(
                    f"config.json has no {name!r}: an EAGLE-3 head's config needs {', '.join(REQUIRED)}"
                )
        for name in ("hidden_size", "num_attention_heads"):
            require_integer(name, layer[name], 1, CHECK, LARGEST)
        heads, speculators = layer["num_attention_heads"], TYPE in data
        return cls(
            hidden_size=layer["hidden_size"],
            target_size=data.get("target_hidden_size") or layer["hidden_size"],
            taps=reading.taps,
            intermediate_size=layer["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=layer.get("num_key_value_heads") or heads,
            head_dim=layer.get("head_dim") or layer["hidden_size"] // heads,
            vocab_size=layer["vocab_size"],
            draft_vocab_size=found.draft_vocab_size or layer["vocab_size"],
            windows=sliding_windows(layer, found.layers),
            rms_norm_eps=layer.get("rms_norm_eps", 1e-6),
            rope=Rope.from_dict(layer),
            max_position_embeddings=layer.get("max_position_embeddings", 2048),
            hidden_act=layer.get("hidden_act", "silu"),
            logit_scale=data.get("logit_scale") or 1.0,
            norm_before_residual=flag(data, "norm_before_residual", speculators),
            norm_before_fc=flag(data, "norm_before_fc", found.norm_before_fc),
            fc_norm=flag(data, "fc_norm", found.fc_norm),
            norm_output=reading.norm_output,
            fc=found.fc_inputs is not None,
            fc_bias=found.fc_bias,
            qkv_bias=found.qkv_bias,
            o_bias=found.o_bias,
            qk_norm=found.qk_norm,
            lm_head=found.draft_vocab_size is not None,
            embeddings=found.embeddings,
            trained_positions=data.get("trained_positions"),
        )


def layer_fields(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a head's decoder layer: speculators nests them, the others do not."""
    nested = data.get(NESTED)
    if nested is None:
        return data
    if not isinstance(nested, Mapping):
        raise ValueError(f"{NESTED} is {format_value(nested)}: it must be an object; {CHECK}")
    return nested


def flag(data: Mapping[str, Any], name: str, usual: bool) -> bool:
    """Return a flag of a config; `usual` where it is absent or null."""
    value = data.get(name)
    return usual if value is None else value


def sliding_windows(layer: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the sliding window of each layer, 0 for none; speculators trains heads with one."""
    kinds, window = layer.get("layer_types"), layer.get("sliding_window") or 0
    if kinds is None:
        used = layer.get("use_sliding_window", layer.get("model_type") not in ("llama", "qwen2", "qwen3"))
        return (window if used else 0,) * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(
            f"layer_types is {format_value(kinds)}: it must name each of the {layers} layers; {CHECK}"
        )
    for kind in kinds:
        require_choice("layer_types", kind, (SLIDING, "full_attention"))
    if SLIDING in kinds:
        require_integer("sliding_window", window, 1, CHECK, LARGEST)
    return tuple(window if kind == SLIDING else 0 for kind in kinds)


def possible_readings(
    data: Mapping[str, Any],
    fc_inputs: int | None,
    target_size: int,
    target_layers: int,
    taps: Sequence[int] | None = None,
    norm_output: bool | None = None,
) -> list[Reading]:
    """Return the ways in which a config can be read, the likeliest first; one if it is clear.

    fc_inputs: see Structure. taps, norm_output: named by the user. Raises ValueError if no reading fits a
    target of this width and this many layers.
    """
    count = count_taps(data, fc_inputs, target_size)
    tap_choices = [tuple(taps)] if taps is not None else tap_readings(data, count, target_layers)
    for choice in tap_choices:
        if len(choice) != count:
            raise ValueError(
                f"the taps are {list(choice)}: by the width of its fc the head reads {count} of them; "
                f"{REMEDY}"
            )
    fit = [choice for choice in tap_choices if all(1 <= tap <= target_layers for tap in choice)]
    if not fit:
        raise ValueError(
            f"the taps are {list(tap_choices[0])}: they must be between 1 and the target's number of layers "
            f"({target_layers}); {REMEDY}"
        )
    carried = [norm_output] if norm_output is not None else norm_output_readings(data)
    return [Reading(choice, normed) for choice in fit for normed in carried]


def count_taps(data: Mapping[str, Any], fc_inputs: int | None, target_size: int) -> int:
    """Return how many states of the target a head concatenates; 0: it reads the one after the last norm."""
    if flag(eagle_fields(data), "use_aux_hidden_state", True) is False:
        return 0
    if fc_inputs is None:
        raise ValueError(f"it has no fc.weight: a head that reads layers of its target must; {CHECK}")
    if fc_inputs % target_size:
        raise ValueError(
            f"the head's fc reads {fc_inputs} numbers: that must be a multiple of the target's hidden_size "
            f"({target_size}); choose the head that was trained for this target"
        )
    return fc_inputs // target_size


def tap_readings(data: Mapping[str, Any], count: int, target_layers: int) -> list[tuple[int, ...]]:
    """Return what the numbers in a config may mean, the likeliest first.

    Some files number taps as Eagle3Config does, and others the layers whose outputs they are, which is one
    less. Converters copy the numbers unchanged, so the place in a file does not tell. A first number of 1
    suggests outputs, since the first tap is usually 2; without numbers the taps are the usual ones.
    """
    if not count:
        return [()]
    named = eagle_fields(data).get(IDS)
    top = named is None
    named = data.get(IDS) if top else named
    if named is None:
        if count != USUAL_TAPS:
            raise ValueError(
                f"config.json names no taps and the head reads {count}: only {USUAL_TAPS} have usual places; "
                f"{REMEDY}"
            )
        return [usual_taps(target_layers)]
    if not isinstance(named, list) or any(isinstance(tap, bool) or not isinstance(tap, int) for tap in named):
        raise ValueError(f"{IDS} is {format_value(named)}: it must be a list of integers; {CHECK}")
    as_taps, as_outputs = tuple(named), tuple(tap + 1 for tap in named)
    if not top and data.get(IDS) == list(as_outputs):  # a file with both says which is which
        return [as_outputs]
    likely_outputs = bool(named) and named[0] < (1 if top else 2)
    return [as_outputs, as_taps] if likely_outputs else [as_taps, as_outputs]


def usual_taps(target_layers: int) -> tuple[int, ...]:
    """Return the taps of a head whose files name none, low, middle and high, for this many layers."""
    return (2, target_layers // 2, target_layers - 3)


def norm_output_readings(data: Mapping[str, Any]) -> list[bool]:
    """Return what norm_output may mean: some trainers wrote true for heads that carry the plain state."""
    value = flag(data, "norm_output", False)
    return [value, not value] if value is True and TYPE not in data else [value]


def eagle_fields(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the object `eagle_config` of a config; empty if it has none."""
    found = data.get("eagle_config") or {}
    return found if isinstance(found, Mapping) else {}
