"""The flags of the server alone, with their help texts and their checks. Needs no torch."""

from __future__ import annotations

import argparse
import os
import re

from eagle_fsd.cli.flags.parser import add_prefix_flag, check_prefix_flag
from eagle_fsd.core.checks import require_integer, require_number

MOST_BYTES, MOST_WITH_IMAGES = 2**20, 20 * 2**20  # of a request; a photograph takes some millions
KEY_VARIABLE = "EAGLE_FSD_API_KEY"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+|null|\*")  # as browsers send it; null: a page from a file


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the address and of the limits."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"clients must send it; better put it into the environment as {KEY_VARIABLE}, since other users "
        "see the flags of a program (default: none, everybody may call)",
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="URL",
        help="let web pages from there call; may be given several times (default: none)",
    )
    group.add_argument(
        "--served-model-name", metavar="NAME", help="what clients call the model (default: its own name)"
    )
    group = parser.add_argument_group("limits")
    group.add_argument(
        "--max-rows", type=int, default=8, metavar="N", help="texts decoded side by side (default: 8)"
    )
    group.add_argument(
        "--max-queue",
        type=int,
        default=64,
        metavar="N",
        help="texts that may wait for a place; what is above gets the status 429 (default: 64)",
    )
    group.add_argument(
        "--max-prompt-tokens", type=int, metavar="N", help="of one prompt (default: what the target holds)"
    )
    group.add_argument(
        "--max-body",
        type=int,
        metavar="BYTES",
        help=f"of one request (default: {MOST_BYTES}, or {MOST_WITH_IMAGES} where the target reads images)",
    )
    group.add_argument(
        "--cache-tokens",
        type=int,
        metavar="N",
        help="tokens whose keys and values all texts may hold together, kept ones among them; texts wait for "
        "room (default: no limit)",
    )
    add_prefix_flag(group)
    group.add_argument(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="from a request to the end of its answer (default: 600)",
    )


def check_server_flags(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that are out of range, or that a request has in a server's place."""
    if args.seed is not None:
        raise ValueError(f"--seed is {args.seed}: every request names its own seed; drop the flag")
    for flag, form in (("--json-schema", args.json_schema), ("--regex", args.regex)):
        if form is not None:
            raise ValueError(f"{flag} is given: every request names its own response_format; drop the flag")
    if not args.host.strip():  # which an unset variable of a shell leaves
        raise ValueError(
            f"--host is {args.host!r}: it would mean all addresses; say 0.0.0.0 for that, or drop it"
        )
    require_integer("--port", args.port, 0, "8000 is usual", 65535)
    require_integer("--max-rows", args.max_rows, 1, "8 suits a CPU")
    require_integer("--max-queue", args.max_queue, 0, "0 lets none wait")
    if args.max_prompt_tokens is not None:
        require_integer("--max-prompt-tokens", args.max_prompt_tokens, 1, "drop it for the target's own")
    check_prefix_flag(args)
    if args.max_body is not None:
        require_integer("--max-body", args.max_body, 1024, f"{MOST_BYTES} is usual")
    require_number("--request-timeout", args.request_timeout, 0.1, 1e6, "600 is usual")
    if args.cache_tokens is not None:  # a request that sets no limit must fit
        remedy = "drop it for no limit, or lower --max-new-tokens"
        require_integer("--cache-tokens", args.cache_tokens, args.max_new_tokens + 1, remedy)
    for origin in args.cors_origin:
        if ORIGIN.fullmatch(origin) is None:
            raise ValueError(
                f"--cors-origin is {origin!r}: it must be the scheme and the host of pages, such as "
                "https://example.com, without a path, or *; correct it"
            )
    api_key(args)


def api_key(args: argparse.Namespace) -> str | None:
    """Return the key that clients must send; None lets everybody call.

    Raises ValueError for an empty key, which is what an unset variable of a shell leaves: it must not open
    the server. A key that no header can carry is refused too.
    """
    name, key = "--api-key", args.api_key
    if key is None:
        name, key = KEY_VARIABLE, os.environ.get(KEY_VARIABLE)
    if key is None or (key and key.isprintable() and key == key.strip()):
        return key
    if not key.strip():
        raise ValueError(f"{name} is {key!r}: a key must not be empty; set one, or drop it to let all call")
    raise ValueError(
        f"{name} has spaces around it, or characters that cannot be printed: no client can send it so; "
        "take them out"
    )
