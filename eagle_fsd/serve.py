"""`python -m eagle_fsd.serve`: an HTTP server for clients of OpenAI's API, on one engine.

Ctrl-C and a termination signal let the answers under way finish. Exit codes: 0 after Ctrl-C, 130 after a
second one, which ends the answers at once, and 2 for a user's mistake (one line, no traceback).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_fsd.cli.arguments import check_early, generation_options
from eagle_fsd.cli.flags.model import add_adapt_flags, add_model_flags
from eagle_fsd.cli.flags.parser import add_generation_flags, add_verbose_flag, new_parser
from eagle_fsd.cli.flags.processing import with_bad_words
from eagle_fsd.cli.mistakes import UserError, raise_user_errors, report_mistake
from eagle_fsd.cli.ranks import join, leave, on_every_rank, show_memory
from eagle_fsd.cli.start import begin_early, load_model
from eagle_fsd.core.checks import INTERRUPTED, require_integer, require_number
from eagle_fsd.runtime.openvino.kept.head_start import HEAD_START
from eagle_fsd.serving.entry.loopback import is_loopback, own_names
from eagle_fsd.training.online.surfaces import check_adaptation, make_adapter, save_adapted

# torch takes seconds to import, and the extra may not be installed: --help needs neither.
if TYPE_CHECKING:
    from eagle_fsd.core.config import TreeConfig
    from eagle_fsd.decoding.options import GenerationOptions
    from eagle_fsd.engine import EagleFSD
    from eagle_fsd.serving.app import Settings

KEY_VARIABLE = "EAGLE_FSD_API_KEY"
NEEDED = ("fastapi", "uvicorn", "prometheus_client")

DESCRIPTION = """\
Serve a target model over HTTP to clients of OpenAI's API: chats, completions, streams. A request may say how
far its text may be from the target's own: threshold, divergence, rule, quality_budget. The flags of
acceptance and sampling are what a request gets that does not say."""

EPILOG = """\
example:
  python -m eagle_fsd.serve --port 8000
  curl http://127.0.0.1:8000/v1/chat/completions -H "content-type: application/json" \\
      -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "threshold": 0.3}'"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags."""
    parser = new_parser("serve", DESCRIPTION, EPILOG)
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
        "--max-body", type=int, default=2**20, metavar="BYTES", help="of one request (default: 1048576)"
    )
    group.add_argument(
        "--cache-tokens",
        type=int,
        metavar="N",
        help="tokens whose keys and values all texts may hold together, kept ones among them; texts wait for "
        "room (default: no limit)",
    )
    group.add_argument(
        "--prefix-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="tokens of ended texts that are kept, so that the next turn of a chat reads only what is new; 0 "
        "keeps none (default: 8192)",
    )
    group.add_argument(
        "--request-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="from a request to the end of its answer (default: 600)",
    )
    add_model_flags(parser)
    add_adapt_flags(parser)
    add_generation_flags(parser, of_one_text=False)
    parser.set_defaults(max_new_tokens=1024)
    add_verbose_flag(parser.add_argument_group("output"))
    return parser


def require_packages() -> None:
    """Raise UserError unless the packages of the extra are installed."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise UserError(
            f'the server needs {" and ".join(missing).replace("_", "-")}: run pip install "eagle-fsd[serve]"'
        )


def check_arguments(args: argparse.Namespace) -> GenerationOptions:
    """Return the options of a request that says nothing. Raises ValueError for flags out of range."""
    if args.seed is not None:
        raise ValueError(f"--seed is {args.seed}: every request names its own seed; drop the flag")
    for flag, form in (("--json-schema", args.json_schema), ("--regex", args.regex)):
        if form is not None:
            raise ValueError(f"{flag} is given: every request names its own response_format; drop the flag")
    require_integer("--port", args.port, 0, "8000 is usual", 65535)
    require_integer("--max-rows", args.max_rows, 1, "8 suits a CPU")
    require_integer("--max-queue", args.max_queue, 0, "0 lets none wait")
    if args.max_prompt_tokens is not None:
        require_integer("--max-prompt-tokens", args.max_prompt_tokens, 1, "drop it for the target's own")
    require_integer("--prefix-tokens", args.prefix_tokens, 0, "0 keeps no text")
    require_integer("--max-body", args.max_body, 1024, "1048576 is usual")
    require_number("--request-timeout", args.request_timeout, 0.1, 1e6, "600 is usual")
    check_adaptation(args)
    api_key(args)
    options = generation_options(args)
    if args.cache_tokens is not None:  # a request that sets no limit must fit
        remedy = "drop it for no limit, or lower --max-new-tokens"
        require_integer("--cache-tokens", args.cache_tokens, options.max_new_tokens + 1, remedy)
    return options


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


def settle_tree(model: EagleFSD, options: GenerationOptions) -> TreeConfig:
    """Return the tree of every text, measured if it is auto, and run a few steps with it."""
    from eagle_fsd.text.chat import encode, require_tokenizer

    require_tokenizer(model.tokenizer)
    with model.stream(encode(model.tokenizer, "Hello", raw=True), options=options) as stream:
        for _ in zip(range(2), stream, strict=False):
            pass
    model.free_memory()
    return stream.tree


def make_settings(
    args: argparse.Namespace, model: EagleFSD, options: GenerationOptions, bound: str | None = None
) -> Settings:
    """Return how the model is served. bound: the address that the server has, if it is known already."""
    from eagle_fsd.acceptance.accept import Lossless
    from eagle_fsd.hub.resolve import shown_name
    from eagle_fsd.serving.app import Settings
    from eagle_fsd.serving.choices import Defaults, Limits

    key = api_key(args)
    tree = settle_tree(model, options)
    adapter = make_adapter(args, model)
    return Settings(
        name=args.served_model_name or Path(shown_name(model.base_model)).name,
        tree=tree,
        crowded=tree.for_many(args.max_rows) if model.device.type == "cpu" else {},
        limits=Limits(
            max_rows=args.max_rows,
            max_queue=args.max_queue,
            max_prompt_tokens=args.max_prompt_tokens,
            max_body=args.max_body,
            request_timeout=args.request_timeout,
            cache_tokens=args.cache_tokens,
            prefix_tokens=args.prefix_tokens,
        ),
        defaults=Defaults(
            options.sampling,
            options.rule or Lossless(),
            options.max_new_tokens,
            options.processing,
            options.stops,
        ),
        key=key,
        hosts=own_names(bound or args.host, args.host) if key is None else (),
        cors_origins=args.cors_origin,
        learner=adapter,
        at_end=partial(save_adapted, args, adapter),
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there.

    It listens at once, since two sockets may be bound to one port as long as neither does. Clients that come
    before the model is loaded wait.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen()
    except OSError as error:
        found.close()
        raise UserError(
            f"{host} port {port} cannot be listened at ({error.strerror}): choose another --host or --port"
        ) from error
    found.set_inheritable(True)
    return found


def address_of(place: socket.socket) -> tuple[str, int]:
    """Return the address and the port that a socket is bound to, however they were asked for."""
    host, port = place.getsockname()[:2]
    return host, port


def run(args: argparse.Namespace) -> int:
    """Check the arguments, load the model, serve until a signal comes, and return the exit code."""
    require_packages()
    with raise_user_errors():
        check_early(args)
        begin_early(args)
        options = check_arguments(args)
        ranks = join(args, "serve")
    leads = ranks is None or ranks.leads
    # Before the model is loaded, which takes long.
    with listen(args.host, args.port) if leads else contextlib.nullcontext() as place:
        model, settings = load(args, options, None if place is None else address_of(place)[0])
        if ranks is not None:
            memory = model.memory()
            if args.verbose:
                sys.stderr.write(show_memory(memory) + "\n")
            if model.head_folder is not None:
                model.identity()  # by all ranks: later, a request that asks for it reaches rank 0 alone
        if place is not None:
            return serve(model, settings, place, args.verbose)
        follow_rank_0(model, settings)
    return 0


def load(
    args: argparse.Namespace, options: GenerationOptions, bound: str | None = None
) -> tuple[EagleFSD, Settings]:
    """Load the model that the flags name, and settle how it is served. options: of `check_arguments`."""
    with raise_user_errors():
        model = load_model(args)
        options = with_bad_words(options, args, model).with_defaults(
            model.target.own_defaults, model.target.named_sampling
        )
        settings = make_settings(args, model, options, bound)
        HEAD_START.end(complete=True)
        return model, settings


def follow_rank_0(model: EagleFSD, settings: Settings) -> None:
    """Do on this rank what the server on rank 0 does, until it ends."""
    from eagle_fsd.decoding.on_ranks.following import follow
    from eagle_fsd.serving.work.worker import new_scheduler
    from eagle_fsd.text.stop_strings import make_stopper

    # Rank 0 has the signal too, lets answers under way finish, and tells when to end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    follow(
        model.target.ranks,
        lambda: new_scheduler(model, settings.tree, settings.limits, settings.crowded),
        lambda stopping: make_stopper(model.tokenizer, *stopping),
    )


def serve(model: EagleFSD, settings: Settings, place: socket.socket, verbose: bool = False) -> int:
    """Serve on a socket until a signal comes, and return the exit code."""
    from eagle_fsd.serving.app import create_app
    from eagle_fsd.serving.server import Server

    host, port = address_of(place)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if settings.key is None and not is_loopback(host):
        sys.stderr.write(f"warning: whoever reaches {host} may call: set {KEY_VARIABLE}\n")

    server = Server(create_app(model, settings), url, verbose)
    try:
        with contextlib.suppress(KeyboardInterrupt):  # of Ctrl-C, once all is done
            server.run(sockets=[place])
    finally:  # a termination signal ends the process inside
        if model.target.ranks.several and server.service.worker.alive:
            sys.stderr.write("error: a step still waits for other ranks, which are lost\n")
            leave(1)
    return INTERRUPTED if server.hurried else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run, and return the exit code."""
    return on_every_rank(program, argv)


def program(argv: Sequence[str] | None = None) -> int:
    """Do what `main` does, on one rank."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        return run(args)
    except UserError as error:
        return report_mistake(parser.prog, error, args.verbose)
    except FloatingPointError as error:  # logits that are not finite
        return report_mistake(parser.prog, error)
    except KeyboardInterrupt:
        return 0
    finally:
        HEAD_START.end()


if __name__ == "__main__":
    sys.exit(main())
