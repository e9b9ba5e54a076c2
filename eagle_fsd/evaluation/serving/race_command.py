"""Race this package's server against llama.cpp's and transformers', on one .gguf file and the same prompts.

    python eval/serving_speed.py --prompts data/prompts_*.jsonl --limit 4 --output runs/serving \\
        --llama-python llama/bin/python -- --weight-format packed --total-tokens 8

What stands behind -- are flags of `python -m eagle_fsd.serve`, --total-tokens among them. The servers run as
processes of their own, all at once, and are asked in turn: A B C A B C for each number of clients, so that a
slow hour meets all of them.
Clients ask for greedy streams of at most --max-new-tokens, each the next prompt as soon as it has its answer.
Answers end where the model ends them; their tokens are counted by one tokenizer, that of our server. Rows are
kept: the same command goes on where it was stopped. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from eagle_fsd.core.checks import require_choice, require_integer
from eagle_fsd.evaluation.cli import add_prompts, all_prompts, check_sizes, parsed, plain_parser, say
from eagle_fsd.evaluation.measure.llama_cpp import gguf_file
from eagle_fsd.evaluation.plots import require_matplotlib
from eagle_fsd.evaluation.rows import read_rows, sole_writer
from eagle_fsd.evaluation.serving.peers import (
    CONTINUOUS,
    LLAMA,
    OURS,
    TRANSFORMERS,
    Peer,
    peers,
    require_peer,
    stock_folder,
    unpack,
)
from eagle_fsd.evaluation.serving.processes import Server, free_port, started
from eagle_fsd.evaluation.serving.race import heat, row_of
from eagle_fsd.evaluation.serving.race_report import plot, same_texts, table
from eagle_fsd.files.fingerprints import differences, digest_json
from eagle_fsd.files.jsonl import append_row, drop_torn_line
from eagle_fsd.files.provenance import provenance
from eagle_fsd.hub.resolve import DEFAULT_TARGET

SERVERS = (OURS, LLAMA, TRANSFORMERS)


def main(argv: Sequence[str] | None = None) -> None:
    parser = plain_parser(__doc__)
    add = parser.add_argument
    add("--base-model", default=DEFAULT_TARGET, help="a .gguf file (default: the default target's)")
    add_prompts(parser)
    add("--clients", type=int, nargs="+", default=[1, 2, 4, 8], help="default: 1 2 4 8")
    add("--turns", type=int, default=2, help="of every server; default: %(default)s")
    names = f"of {', '.join([*SERVERS, CONTINUOUS])}; default: {' '.join(SERVERS)}"
    add("--servers", nargs="+", default=list(SERVERS), help=names)
    add("--llama-python", metavar="PATH", help="the Python that has llama-cpp-python[server]; default: this")
    add("--transformers-python", metavar="PATH", help="the Python that has transformers[serving]")
    written = "folder of rows.jsonl, table.md, serving_speed.png and logs"
    add("--output", type=Path, required=True, help=written)
    add("flags", nargs="*", metavar="-- FLAGS", help="flags of our server")
    with parsed(parser, argv) as arguments:
        check(arguments)
        file = gguf_file(arguments.base_model)
        stock_model = stock_folder(arguments.output, file)
        pythons = (arguments.llama_python, arguments.transformers_python)
        chosen = choose(peers(file, stock_model, arguments.flags, *pythons), arguments.servers)
        prompts = all_prompts(arguments)
        rows_file = arguments.output / "rows.jsonl"
        setting = setting_of(arguments, prompts)
        with ExitStack() as stack:
            stack.enter_context(sole_writer(rows_file))
            rows = kept_rows(rows_file, setting)
            if {TRANSFORMERS, CONTINUOUS} & set(chosen):
                unpack(file, stock_model)
            servers = start(chosen, arguments.output, stack)
            for row in race(arguments, chosen, servers, prompts, rows):
                rows.append({**row, **setting, **provenance()})
                append_row(rows_file, rows[-1])
        say(write(arguments.output, rows))


def check(arguments: argparse.Namespace) -> None:
    """Raise ValueError for what cannot be raced."""
    check_sizes(arguments)
    require_integer("turns", arguments.turns, 1, "leave it out for the default")
    for clients in arguments.clients:
        require_integer("clients", clients, 1, "1 2 4 8 are usual")
    if not any(flag.partition("=")[0] in ("--total-tokens", "--total-token") for flag in arguments.flags):
        raise ValueError(
            f"the flags of our server are {arguments.flags}: without --total-tokens it would measure its "
            "tree while others are asked; add -- --total-tokens 8"
        )
    require_matplotlib()


def choose(known: Mapping[str, Peer], names: Sequence[str]) -> dict[str, Peer]:
    """Return the servers of these names, ours among them, since it counts the tokens."""
    for name in names:
        require_choice("servers", name, list(known))
    if OURS not in names:
        raise ValueError(f"servers is {' '.join(names)}: {OURS} counts the tokens of all; add it")
    for name in names:
        require_peer(name, known[name])
    return {name: known[name] for name in names}


def setting_of(arguments: argparse.Namespace, prompts: Sequence[str]) -> dict[str, Any]:
    """Return what all rows of a race share. asked: a digest of the prompts."""
    return {
        "max_new_tokens": arguments.max_new_tokens,
        "prompts": len(prompts),
        "asked": digest_json(list(prompts)),
        "flags": arguments.flags,
        "base_model": arguments.base_model,
    }


def kept_rows(file: Path, setting: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a run that was stopped. Raises ValueError if they are of another setting."""
    drop_torn_line(file)
    rows = read_rows(file)
    for row in rows:
        if changed := differences({name: row.get(name) for name in setting}, setting):
            raise ValueError(f"{file} has rows of another race ({changed}): name another --output")
    return rows


def start(chosen: Mapping[str, Peer], folder: Path, stack: ExitStack) -> dict[str, Server]:
    """Start the servers one after the other."""
    servers = {}
    for name, peer in chosen.items():
        port = free_port()
        server = started(peer.command(port), port, peer.ready, folder / f"{name}.log")
        servers[name] = stack.enter_context(server)
    return servers


def race(
    arguments: argparse.Namespace,
    chosen: Mapping[str, Peer],
    servers: Mapping[str, Server],
    prompts: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Yield the row of every heat that `rows` lacks."""
    done = {(row["clients"], row["turn"], row["server"]) for row in rows}
    counter = servers[OURS].client

    def count(text: str) -> int:
        reply = counter.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        return int(reply.data()["count"])

    new = arguments.max_new_tokens
    for clients in arguments.clients:
        for name, peer in chosen.items():  # what a server does once is not measured, such as compiling
            heat(servers[name].client, prompts[-clients:], clients, min(new, 16), peer.fields)
        for turn in range(arguments.turns):
            for name, peer in chosen.items():
                if (clients, turn, name) in done:
                    continue
                seconds, seen = heat(servers[name].client, prompts, clients, new, peer.fields)
                yield row_of(name, clients, turn, seconds, seen, count)


def write(folder: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """Write the table and the plot, and return the table with what else is to be known."""
    equal = ", ".join(f"{name} {share:.0%}" for name, share in same_texts(rows, OURS).items())
    about = f"{len(rows)} heats; median / 95th percentile."
    if equal:
        about += f" The same text as ours at the first asking: {equal} of the prompts."
    text = f"{table(rows, OURS)}\n\n{about}"
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")
    plot(rows, folder / "serving_speed.png")
    return text
