"""Files of raw rows, one JSON object a line: read back, and checked where a report is to rest on them.

Knows no model. A run that is killed can leave half a line at the end of its file. Readers pass over it; a
program that goes on with the file drops it first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from eagle_fsd.core.config import SamplingConfig, TreeConfig
from eagle_fsd.files.atomic import sole
from eagle_fsd.files.fingerprints import digest_json
from eagle_fsd.files.jsonl import read_jsonl

NUMBER = int | float | None
PROVENANCE: tuple[str, ...] = ("commit", "eagle_fsd", "python", "torch", "transformers", "device", "threads")
PROVENANCE += ("runtime", "command", "date")


@dataclass(frozen=True)
class Row:
    """One sample of one cell, as the runner wrote it.

    kl, tv: sums over the emitted tokens of KL(r || p) and TV(r, p), r the rule's distribution and p the
    target's; None where unknown or infinite. log_p: mean per token under the raw target. token_ids, fuzzy_at:
    the answer's tokens and the places of fuzzy accepts among them; None where the row does not say.
    weight_format: the dtype where the row does not say. new_tokens: a mean over draws in a row of expected
    steps. provenance: what the row has of PROVENANCE.
    """

    key: str
    task: str
    version: int | str
    sample: str
    seed: int
    rule: dict
    sampling: SamplingConfig
    tree: TreeConfig
    max_new_tokens: int
    dtype: str
    weight_format: str
    base_model: str
    ea_model: str | None
    draft_vocab_size: int | None
    finish_reason: str
    steps: int
    new_tokens: int | float
    fuzzy_accepts: int
    seconds: int | float
    batch_size: int
    kl: float | None
    tv: float | None
    log_p: int | float | None
    scores: dict
    token_ids: list[int] | None
    fuzzy_at: list[int] | None
    provenance: dict

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Row:
        """Read the row of a JSON object. Raises ValueError for a field that is missing or wrong."""
        for name, kind in KINDS.items():
            if name not in data:
                raise ValueError(f"has no {name!r}: a raw row needs it; make the row again")
            require(name, data[name], kind)
        law = data["law"] or {}
        for name, value in {"law kl": law.get("kl"), "law tv": law.get("tv"), **data["scores"]}.items():
            require(name, value, NUMBER | bool)
        if "name" not in data["rule"]:
            raise ValueError(f"rule is {data['rule']!r}: it needs a name; {{'name': 'lossless'}} is one")
        rule = dict(data["rule"])
        if rule["name"] == "fuzzy":
            for name, off in (("min_gain", 0.0), ("price", 0.0), ("cost", "tokens")):
                rule.setdefault(name, off)  # rows from before there was this field
        made = {name: data[name] for name in KINDS if name != "law"} | {"sample": str(data["sample"])}
        made["rule"], made["kl"], made["tv"] = rule, law.get("kl"), law.get("tv")
        for name, kind in (("sampling", SamplingConfig), ("tree", TreeConfig)):
            known = [one.name for one in fields(kind)]
            if not data[name].keys() <= set(known):
                raise ValueError(
                    f"{name} is {data[name]!r}: its fields are {', '.join(known)}; make it again"
                )
            made[name] = kind(**data[name])
        made["weight_format"] = data.get("weight_format", data["dtype"])
        require("weight_format", made["weight_format"], str)
        texts = {name: data.get(name) for name in ("token_ids", "fuzzy_at")}
        return cls(**made, **texts, provenance={name: data[name] for name in PROVENANCE if name in data})


NOT_NEEDED = ("kl", "tv", "weight_format", "token_ids", "fuzzy_at", "provenance")
# What the report reads of a row, and the JSON types that each may have. Rows may say more.
KINDS = {name: kind for name, kind in get_type_hints(Row).items() if name not in NOT_NEEDED}
KINDS |= {"sample": str | int, "sampling": dict, "tree": dict, "law": dict | None}


def require(name: str, value: Any, kind: Any) -> None:
    """Raise ValueError for a value of another type, for NaN, and for a count or time below 0."""
    wrong = not isinstance(value, kind) or (isinstance(value, bool) and kind != NUMBER | bool)
    if wrong or value != value or (kind in (int, int | float) and value < 0):
        words = f"{getattr(kind, '__name__', kind)}".replace("None", "null")
        raise ValueError(f"{name} is {value!r}: a raw row has {words}, not below 0 or NaN; make it again")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows of an earlier run, none where there is no file; see `read_jsonl`."""
    return [row for _, row in read_jsonl(path, torn=True)] if path.exists() else []


def sole_writer(output: Path) -> AbstractContextManager[None]:
    """Keep other runs out of a file of rows. Raises ValueError if one is at work on it."""
    return sole(output.with_name(f".{output.name}.lock"), output, "write each row twice")


def rows_of_answers(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Read the answers of an earlier run by key, sample and seed. Raises ValueError for other rows."""
    rows = {}
    for number, row in read_jsonl(path, torn=True) if path.exists() else ():
        try:
            rows[row["key"], row["sample"], row["seed"]] = row
        except KeyError as name:
            said = f"has no {name}: these are other rows; name another output"
            raise ValueError(f"{path}:{number}: {said}") from name
    return rows


def rules_of(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row for every rule of a row of expected steps: what the rule would have done in its text.

    What is known of the text alone is left out, since it is of another rule.
    """
    rows = []
    for each in data["expected"]:
        if not isinstance(each, dict) or set(each) != {"rule", "new_tokens", "law"}:
            raise ValueError(
                f"expected holds {each!r}: it must be rule, new_tokens and law; make the row again"
            )
        key = f"{data['key']}/{digest_json(each['rule'])}"
        rows.append({**data, **each, "key": key, "log_p": None, "scores": {}, "token_ids": None})
    return rows


def read_raw_rows(paths: Iterable[Path], expected: bool = False) -> dict[Path, list[Row]]:
    """Read the rows of each file, checked. Raises ValueError naming file and line of one that cannot stand.

    expected: rows of expected steps (eval/sweep.py --same-trees) may be among them, and give a row for every
    rule. Where they may not be, they are refused: they hold no text of any rule but lossless.
    Two rows of one cell, sample and seed are refused: which of them counts is not ours to choose.
    """
    rows: dict[Path, list[Row]] = {}
    places: dict[tuple[str, str, int], str] = {}
    for path in paths:
        if path in rows:
            raise ValueError(f"{path} is given twice: its rows would count twice; name it once")
        rows[path] = []
        for number, data in read_jsonl(path, torn=True):
            place = f"{path}:{number}"
            try:
                if "expected" in data and not expected:
                    raise ValueError(
                        "is a row of --same-trees, which says nothing of a rule's texts; eval/exchange.py "
                        "reads it"
                    )
                made = [Row.of(each) for each in (rules_of(data) if "expected" in data else [data])]
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from error
            for row in made:
                who = (row.key, row.sample, row.seed)
                if who in places:
                    raise ValueError(
                        f"{place}: is the cell, sample and seed of {places[who]} again; leave one of the two "
                        "out"
                    )
                places[who] = place
                rows[path].append(row)
    if not places:
        names = ", ".join(path.name for path in rows)
        raise ValueError(f"no rows in {names}: a report needs raw rows; run eval/sweep.py first")
    return rows


def tau_of(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the tokens per step of the answers of these rows together."""
    return float(sum(row["new_tokens"] for row in rows) / sum(row["steps"] for row in rows))
