"""Settings as small frozen dataclasses: draft tree, sampling, threshold. Each validates itself."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from eagle_fsd.core.checks import format_value, plain_numbers, require_choice, require_integer, require_number

HYBRID, PAPER = "hybrid", "paper"  # which comes first, the target's draw or the rule; see acceptance
SWAP = "swap"  # the target's draw, but a plan may take a worthier child; see acceptance/planned.py
MODES = (HYBRID, PAPER, SWAP)
FIRST_FAILURE = "first-failure"  # the rule alone decides, and a step ends where it follows no child
WIDEST = 64  # nodes of the largest tree that is measured; see autotune/step_costs.py
WARM = 0.75  # the least temperature at which a draft is told the noise of the draws
# The highest temperature: all tokens are equally likely long before it, and one beyond float32 is infinite
# there, so that the logit -inf of a token that is ruled out would become NaN.
HOTTEST = 1e10
CHILDREN = ("draft", "likeliest", "target")  # which child a fuzzy accept follows; see acceptance.Fuzzy
COSTS = ("tokens", "kl", "divergence")  # what the price of a plan is paid for; see acceptance/planned.py
DIVERGENCE_NAMES: tuple[str, ...] = ("reverse_kl", "forward_kl", "js", "tv", "ag")
DIVERGENCE_NAMES += tuple(f"{name}_top10" for name in DIVERGENCE_NAMES)  # see acceptance/divergence.py


def require_confidence(value: object) -> None:
    """Raise ValueError unless `value` is a valid min_confidence of a tree."""
    require_number("min_confidence", value, 0.0, 1.0, "0 always verifies the whole tree, 0.05 suits a CPU")


def require_bound(value: object) -> None:
    """Raise ValueError unless `value` is a threshold of a fuzzy rule."""
    require_number("threshold", value, 0.0, math.inf, "0 is lossless, inf always follows the draft")


@dataclass(frozen=True)
class TreeConfig:
    """The size of a draft tree (EAGLE-2, arXiv 2406.16858), written total_tokens/depth/top_k.

    total_tokens: nodes in one verify forward, root included; 1 is plain decoding.
    depth: the most drafted tokens on a path (the paper's depth; EAGLE's code argument is one less).
    top_k: the beam width while the tree grows, and the most children of a node.
    min_confidence: above 0, depth is an upper bound, and a tree is deeper where the head is surer: a level is
    drafted only below nodes with twice this confidence (as in EAGLE-2, the product of the draft's
    probabilities along the path). On torch's CPU runtime total_tokens is an upper bound too: only nodes that
    have this confidence are verified. OpenVINO and GPUs verify trees of one size, filled with the next best
    nodes. It is written as a fourth part: 16/8/4/0.05. It saves time only on a CPU, where the host can read
    the confidences without waiting. Raises ValueError for values out of range, and for more nodes than depth
    and top_k can give.
    """

    FORM: ClassVar[str] = "total_tokens/depth/top_k[/min_confidence]"

    total_tokens: int = 16
    depth: int = 5
    top_k: int = 8
    min_confidence: float = 0.0

    def __post_init__(self) -> None:
        require_integer("total_tokens", self.total_tokens, 1, "1 drafts nothing, 16 suits a CPU, 60 a GPU")
        require_integer("depth", self.depth, 1, "5 or 6 is usual")
        require_integer("top_k of the tree", self.top_k, 1, "8 or 10 is usual")
        require_confidence(self.min_confidence)
        if self.total_tokens > 1 + self.candidates:
            raise ValueError(
                f"total_tokens is {self.total_tokens}: a tree of depth {self.depth} and tree top_k "
                f"{self.top_k} has at most {1 + self.candidates} nodes; lower it, or raise the tree's depth "
                "or top_k"
            )
        plain_numbers(self)

    @classmethod
    def parse(cls, text: str) -> TreeConfig:
        """Parse a tree written in FORM, such as 16/5/8 or 16/8/4/0.05."""
        *sizes, confidence = text.split("/") if text.count("/") == 3 else [*text.split("/"), "0"]
        try:
            least = float(confidence)
        except ValueError:
            least = math.nan
        if len(sizes) != 3 or not all(size.isdecimal() for size in sizes) or math.isnan(least):
            raise ValueError(f"tree is {text!r}: it must be {cls.FORM}; 16/5/8 is one, 16/8/4/0.05 another")
        total_tokens, depth, top_k = map(int, sizes)
        return cls(total_tokens, depth, top_k, least)

    @classmethod
    def within(cls, total_tokens: int, depth: int, top_k: int) -> TreeConfig:
        """Return a config with at most `total_tokens` nodes, capped at what depth and top_k can produce."""
        return cls(min(total_tokens, cls(1, depth, top_k).candidates + 1), depth, top_k)

    def for_many(self, rows: int) -> dict[int, TreeConfig]:
        """Return the trees of 2 to `rows` texts that are decoded together on a CPU.

        They are named by the number of texts from which on they are taken. This is the best tree for a text
        alone: with more nodes a forward takes longer than they are worth. So the trees of several texts have
        about as many nodes together. Numbers of texts share a tree up to a power of two, since a graph is
        compiled for every size that comes often.
        """
        found, size = {}, 2
        while size < 2 * rows:
            nodes = max(1, round(self.total_tokens / size))
            depth, top_k = min(self.depth, max(1, nodes // 2)), min(self.top_k, max(1, nodes - 1))
            tree = TreeConfig.within(nodes, depth, top_k)
            found[size // 2 + 1] = replace(tree, min_confidence=self.min_confidence)
            size *= 2
        return found

    def holds(self, other: TreeConfig) -> bool:
        """Whether another size has no more nodes, levels and children, so that it fits in this one."""
        mine, its = ((one.total_tokens, one.reach, one.top_k) for one in (self, other))
        return other.total_tokens == 1 or all(size <= most for size, most in zip(its, mine, strict=True))

    @property
    def reach(self) -> int:
        """The depth that a tree of total_tokens nodes can reach; deeper levels would be wasted work."""
        return min(self.depth, self.total_tokens - 1)

    @property
    def candidates(self) -> int:
        """The number of drafted tokens that compete for a place: top_k for the root and every beam node."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def min_score(self) -> float:
        """min_confidence as a score, that is as a cumulative log-probability."""
        return math.log(self.min_confidence) if self.min_confidence else -math.inf

    @property
    def unpruned(self) -> TreeConfig:
        """This size without min_confidence: a tree has all its nodes."""
        return replace(self, min_confidence=0.0)

    @property
    def min_parent_score(self) -> float:
        """The lowest score of a node below which a level is drafted: twice min_confidence.

        Below a node with less, at most one child can reach min_confidence. A factor of two was measured to
        be faster than one or three (eval/SPEED.md).
        """
        return self.min_score + math.log(2)

    def __str__(self) -> str:
        sizes = f"{self.total_tokens}/{self.depth}/{self.top_k}"
        return f"{sizes}/{self.min_confidence:g}" if self.min_confidence else sizes


@dataclass(frozen=True)
class AutoTree:
    """Asks for the tree with the most tokens per second, measured on this machine with this head.

    depth, top_k, min_confidence: a given value is kept, None is measured too; see TreeConfig. later: texts do
    not wait for measurements. They have a usual tree till Settler.measure_postponed has made them. Raises
    ValueError for values out of range.
    """

    depth: int | None = None
    top_k: int | None = None
    min_confidence: float | None = None
    later: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.depth is not None:
            require_integer("depth", self.depth, 1, "5 or 6 is usual")
            if self.depth >= WIDEST:
                raise ValueError(
                    f"depth is {self.depth}: a measured tree has at most {WIDEST} nodes, the root among "
                    "them; lower depth, or give total_tokens"
                )
        if self.top_k is not None:
            require_integer("top_k of the tree", self.top_k, 1, "8 or 10 is usual")
        if self.min_confidence is not None:
            require_confidence(self.min_confidence)
        plain_numbers(self)


@dataclass(frozen=True)
class SamplingConfig:
    """How tokens are sampled, as Hugging Face does it: temperature, then top_k, then top_p, then min_p.

    temperature: 0 is greedy, and 1e10 the most. top_k: 0 keeps every token. top_p: 1 keeps every token.
    min_p: tokens with less than this share of the likeliest token's probability are dropped (arXiv
    2407.01082); 0 keeps every token. Raises ValueError for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        require_number(
            "temperature", self.temperature, 0.0, HOTTEST, "0 is greedy, 1 samples the model as it is"
        )
        require_integer("top_k", self.top_k, 0, "0 keeps every token")
        require_number("top_p", self.top_p, 0.0, 1.0, "1 keeps every token")
        if self.top_p == 0:
            raise ValueError(
                "top_p is 0: it must be above 0 and at most 1; use temperature 0 for greedy decoding"
            )
        require_number("min_p", self.min_p, 0.0, 1.0, "0 keeps every token")
        plain_numbers(self)

    @classmethod
    def parse(cls, text: str) -> SamplingConfig:
        """Parse a sampling written as temperature[/top_k[/top_p[/min_p]]], such as 0.6/50/0.9."""
        parts = text.split("/")
        try:
            kinds = zip((float, int, float, float)[: len(parts)], parts, strict=True)
            values: list[Any] = [kind(part) for kind, part in kinds]
            return cls(*values)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"sampling is {text!r}: it must be temperature[/top_k[/top_p[/min_p]]], such as 0.6/50/0.9 "
                f"({error})"
            ) from error

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def cuts(self) -> bool:
        """Whether tokens that the temperature leaves are cut off."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def warm(self) -> bool:
        """Whether a draft gains by knowing the noise that draws the tokens; see core/randomness/noise.py."""
        return self.temperature >= WARM

    def keeps_all_of(self, other: SamplingConfig) -> bool:
        """Return whether it is as warm as another sampling, and leaves every token that the other leaves.

        Greedy text is a kind of its own.
        """
        if self.greedy or other.greedy:
            return self.greedy and other.greedy
        mine, others = (one.top_k or math.inf for one in (self, other))
        warm = self.temperature >= other.temperature and self.min_p <= other.min_p
        return warm and mine >= others and self.top_p >= other.top_p


class Kind(NamedTuple):
    """The form of a fuzzy rule that a threshold belongs to; the fields are those of acceptance.Fuzzy."""

    divergence: str = "js"
    mode: str = HYBRID
    child: str = "draft"
    min_gain: float = 0.0
    price: float = 0.0
    cost: str = "tokens"

    def __str__(self) -> str:
        words = [self.divergence, self.mode, self.child]
        words += [f"min_gain {self.min_gain:g}"] if self.min_gain else []
        words += [f"price {self.price:g} of {self.cost}"] if self.price else []
        return ", ".join(words)


@dataclass(frozen=True)
class AutoThreshold:
    """Asks for the fastest rule that the head's calibration puts inside a budget: fuzzy, or lossless.

    quality_budget: the largest mean TV per token, from 0 to 1; see acceptance/calibration.py. divergence,
    mode, child, min_gain, price, cost: as in acceptance.Fuzzy; without a mode, a price or a cost any that was
    calibrated will do, and a price of 0 asks for a rule that does not plan. Raises ValueError for values out
    of range.
    """

    quality_budget: float = 0.02
    divergence: str = "js"
    mode: str | None = None
    child: str = "draft"
    min_gain: float = 0.0
    price: float | None = None
    cost: str | None = None

    def __post_init__(self) -> None:
        require_number(
            "quality_budget", self.quality_budget, 0.0, 1.0, "0.02 changes about one token in fifty"
        )
        require_choice("divergence", self.divergence, DIVERGENCE_NAMES)
        if self.mode is not None:
            require_choice("mode", self.mode, MODES)
        if self.cost is not None:
            require_choice("cost", self.cost, COSTS)
        require_choice("child", self.child, CHILDREN)
        require_number("min_gain", self.min_gain, 0.0, math.inf, "0 turns the guard off")
        if self.price is not None:
            require_number("price", self.price, 0.0, math.inf, "leave it out for any that was calibrated")
        plain_numbers(self)

    @property
    def free(self) -> bool:
        """Whether any mode, price and cost will do."""
        return (self.mode, self.price, self.cost) == (None, None, None)

    def takes(self, kind: Kind) -> bool:
        """Return whether a rule of this kind is what it asks for."""
        fixed = (self.divergence, self.child, self.min_gain) == (kind.divergence, kind.child, kind.min_gain)
        free = ((self.mode, kind.mode), (self.price, kind.price), (self.cost, kind.cost))
        return fixed and all(mine in (None, its) for mine, its in free)

    def __str__(self) -> str:
        asked = Kind(self.divergence, self.mode or "any mode", self.child, self.min_gain, self.price or 0.0)
        words = str(asked._replace(cost=self.cost or "any cost"))
        if self.price == 0:
            return f"{words}, price 0"
        return words if self.price or self.cost is None else f"{words}, any price of {self.cost}"


FORMS = ("json_schema", "regex", "grammar")


@dataclass(frozen=True)
class Form:
    """What a text must look like: a JSON schema, a regular expression or a Lark grammar, as text."""

    kind: str
    source: str

    def __post_init__(self) -> None:
        require_choice("form", self.kind, FORMS)
        if not isinstance(self.source, str) or not self.source:
            raise ValueError(
                f"{self.kind} is {format_value(self.source)}: it must be a non-empty string; "
                "leave it out for any answer"
            )

    @classmethod
    def json_schema(cls, schema: object) -> Form:
        """Return the form of a JSON schema, an object or its JSON. Raises ValueError for anything else."""
        try:
            found = json.loads(schema) if isinstance(schema, str) else schema
            if isinstance(found, Mapping):
                return cls("json_schema", json.dumps(found, allow_nan=False))
            reason = ""
        except (TypeError, ValueError, RecursionError) as error:
            reason = f" ({error})"
        raise ValueError(
            f"json_schema is {format_value(schema)}: it must be a JSON object{reason}, such as "
            '{"type": "object"}; fix it'
        )


# The settings of the FSD paper's experiments (arXiv 2502.20704): five drafted tokens, one after the other.
FSD_PAPER_TREE = TreeConfig(6, 5, 1)
FSD_PAPER_SAMPLING = SamplingConfig(0.6, 50, 0.9)
