"""Seeded faults for files: values, JSON texts, bytes and safetensors that are wrong in many ways."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Mapping
from typing import Any

NUMBERS: tuple[Any, ...] = (
    *(0, -0.0, 1, -1, 2, 3, 0.5, -7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**18),
    *(10**30, 10**300, 10**400, -(10**400), 1e-320, 1e308, float("inf"), float("-inf"), float("nan")),
)
TEXTS: tuple[Any, ...] = (
    *("", " ", "0", "1e9", "NaN", "null", "../../etc/passwd", "/", "a\nb\rc", "\x00", "\u202e\ud7ff"),
    *("\U0001f525", "%s%n{0}", "x" * 100_000, "llama", "gpt2", "mamba", "auto", "silu", "gelu", "EAGLE3"),
)
ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"": ""},
    {"a": {"b": [1, {}]}},
    [1, "2", 3.0],
)


def nested(depth: int, kind: str) -> Any:
    """Return lists nested `depth` deep, or objects."""
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "list" else {"rope_type": value}
    return value


def odd_value(draw: random.Random) -> Any:
    """Return a JSON value that a field hardly expects."""
    kind = draw.randrange(8)
    if kind < 3:
        return draw.choice(NUMBERS)
    if kind < 5:
        return draw.choice(TEXTS)
    if kind < 7:
        return copy.deepcopy(draw.choice(ODD))
    return nested(draw.choice((3, 50, 400)), draw.choice(("list", "object")))


def places_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every field and element inside a JSON value, down to six levels."""
    if len(path) == 6:
        return []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in items for found in ((*path, key), *places_of(inner, (*path, key)))]


def spoil_value(draw: random.Random, value: Any, extra: Mapping[str, Any]) -> Any:
    """Return the JSON object with one to three faults: fields changed, lost, renamed, added or moved."""
    value = copy.deepcopy(value)
    if draw.random() < 0.03:
        return odd_value(draw)
    for _ in range(draw.choice((1, 1, 2, 3))):
        places = places_of(value)
        if not places:
            break
        *path, key = draw.choice(places)
        holder = value
        for step in path:
            holder = holder[step]
        fault = draw.randrange(10)
        if fault < 5:
            holder[key] = odd_value(draw)
        elif fault == 5:
            del holder[key]
        elif fault == 6 and isinstance(holder, dict):
            holder[draw.choice((str(key) + " ", str(key).upper(), "x", ""))] = holder.pop(key)
        elif fault == 7 and isinstance(holder, dict):
            name = draw.choice([*extra, "x", "auto_map"])
            holder[name] = draw.choice((extra.get(name), odd_value(draw)))
        elif fault == 8:
            holder[key] = [holder[key]] if draw.random() < 0.5 else str(holder[key])
        else:
            holder[key] = draw.choice((holder[key], odd_value(draw)))
    return value


def spoil_text(draw: random.Random, text: str) -> bytes:
    """Return the JSON text as broken bytes: cut, doubled, in another encoding, or empty."""
    data = text.encode()
    faults: list[Callable[[], bytes]] = [
        lambda: b"",
        lambda: data[: draw.randrange(len(data))],
        lambda: b"\xef\xbb\xbf" + data,
        lambda: text.encode("utf-16"),
        lambda: data[: len(data) // 2] + bytes([draw.randrange(128, 256)]) * 3 + data[len(data) // 2 :],
        lambda: data + data,
        lambda: data.replace(b":", b"=", 1),
        lambda: data.replace(b"{", b'{"hidden_size": 1, "hidden_size": -3, "version": 1, ', 1),
        lambda: b"[" * draw.choice((10, 5_000, 200_000)),
        lambda: b'{"a":' * draw.choice((10, 5_000, 100_000)) + b"1",
        lambda: b'{"rope_scaling": ' + b"[" * 900 + b"]" * 900 + b"}",
        lambda: b"9" * draw.choice((10, 5_000)),
        lambda: b"\x00" * draw.choice((1, 4096)),
        lambda: draw.randbytes(draw.choice((1, 100, 5000))),
        lambda: spoil_bytes(draw, data),
    ]
    return draw.choice(faults)()


def spoil_bytes(draw: random.Random, data: bytes) -> bytes:
    """Return the bytes with a few of them changed, lost or doubled."""
    made = bytearray(data)
    for _ in range(draw.choice((1, 2, 8))):
        at = draw.randrange(len(made))
        fault = draw.randrange(4)
        if fault < 2:
            made[at] = draw.randrange(256)
        elif fault == 2 and len(made) > 9:
            del made[at : at + draw.choice((1, 8, 64))]
        else:
            made[at:at] = made[at : at + draw.choice((1, 8, 64))]
        if not made:
            break
    return bytes(made)


DTYPES = (
    *("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "U16", "U32", "U64", "C64"),
    *("F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "Q4", "", None, 3),
)


def spoil_safetensors(draw: random.Random, data: bytes) -> bytes:
    """Return a safetensors file that is cut, or has wrong names, dtypes, shapes, offsets or header length."""
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    fault = draw.randrange(12)
    if fault == 0:
        return data[: draw.choice((0, 1, 7, 8, 9, 8 + length // 2, 8 + length, len(data) - 1))]
    if fault == 1:
        claim = draw.choice((0, 1, length - 1, length + 1, len(data), 2**20, 2**31, 2**32, 2**63, 2**64 - 1))
        return struct.pack("<Q", claim) + data[8:]
    if fault == 2:
        return spoil_bytes(draw, data[: 8 + length]) + body
    if fault == 3:
        return data + b"\x00" * draw.choice((1, 8, 4096))
    names = [name for name in header if name != "__metadata__"]
    name = draw.choice(names)
    entry = header[name]
    size = draw.choice((0, 1, -1, 2**31, 2**40, 2**62, 2**63, 2**64, 10**30, 1.5, "4", None))
    if fault == 4:
        entry["shape"] = [size for _ in range(draw.choice((0, 1, 2, 8, 300)))]
    elif fault == 5:
        entry["shape"] = draw.choice((entry["shape"][::-1], [1, *entry["shape"]], [], {}, None, "x"))
    elif fault == 6:
        entry["dtype"] = draw.choice(DTYPES)
    elif fault == 7:
        start, end = entry["data_offsets"]
        entry["data_offsets"] = draw.choice(
            ([end, start], [0, end], [start, end + 4], [start, size], [size, end], [start], [], None, [0, 0])
        )
    elif fault == 8:
        header[draw.choice(("", "x" * 10_000, "a\nb", "fc.bias", "d2t", "layers.1.x", "é"))] = header.pop(
            name
        )
    elif fault == 9:
        del header[name]
    elif fault == 10:
        spoilt = spoil_value(draw, header, {"__metadata__": {"format": "pt"}})
        header = spoilt
    else:  # a dtype and a shape that fit the bytes, but of another tensor
        start, end = entry["data_offsets"]
        dtype, width = draw.choice(
            (("I8", 1), ("F16", 2), ("I32", 4), ("F64", 8), ("BOOL", 1), ("F8_E5M2", 1))
        )
        entry |= {"dtype": dtype, "shape": [(end - start) // width]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body
