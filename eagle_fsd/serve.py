"""`python -m eagle_fsd.serve`: an HTTP server for clients of OpenAI's and Anthropic's APIs, on one engine.

Ctrl-C and a termination signal let the answers under way finish. Exit codes: 0 after Ctrl-C, 130 after a
second one, which ends the answers at once, and 2 for a user's mistake (one line, no traceback).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
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
from eagle_fsd.cli.flags.server import (
    KEY_VARIABLE,
    MOST_BYTES,
    MOST_WITH_IMAGES,
    add_server_flags,
    api_key,
    check_server_flags,
)
from eagle_fsd.cli.mistakes import UserError, raise_user_errors, report_mistake
from eagle_fsd.cli.ranks import join, leave, on_every_rank, show_memory
from eagle_fsd.cli.start import begin_early, end_program, load_model, measure_later
from eagle_fsd.core.process.signals import EXIT_INTERRUPTED
from eagle_fsd.core.process.streams import tell
from eagle_fsd.runtime.openvino.kept.head_start import HEAD_START
from eagle_fsd.serving.entry.loopback import is_loopback, own_names
from eagle_fsd.training.online.surfaces import check_adaptation, make_adapter, save_adapted

# torch takes seconds to import, and the extra may not be installed: --help needs neither.
if TYPE_CHECKING:
    from eagle_fsd.core.config import TreeConfig
    from eagle_fsd.decoding.options import GenerationOptions
    from eagle_fsd.engine import EagleFSD
    from eagle_fsd.serving.service import Settings

NEEDED = ("fastapi", "uvicorn", "prometheus_client")

DESCRIPTION = """\
Serve a target model over HTTP to clients of OpenAI's and Anthropic's APIs: chats, completions, streams. A
request may say how far its text may be from the target's own: threshold, divergence, rule, quality_budget.
The flags of acceptance and sampling are what a request gets that does not say."""

EPILOG = """\
example:
  python -m eagle_fsd.serve --port 8000
  curl http://127.0.0.1:8000/v1/chat/completions -H "content-type: application/json" \\
      -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "threshold": 0.3}'"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all flags."""
    parser = new_parser("serve", DESCRIPTION, EPILOG)
    add_server_flags(parser)
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


def check_arguments(args: argparse.Namespace) -> None:
    """Raise ValueError for flags that do not fit, as far as that shows without torch."""
    check_early(args)
    check_server_flags(args)
    check_adaptation(args)


def settle_tree(model: EagleFSD, options: GenerationOptions) -> TreeConfig:
    """Return the tree of every text, and run a few steps with it.

    One that is to be measured is so while nobody asks, or at once by several ranks, who must do it together.
    """
    from eagle_fsd.text.chat import encode, require_tokenizer

    require_tokenizer(model.tokenizer)
    if not model.target.ranks.several:
        options = measure_later(options)
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
    from eagle_fsd.serving.choices import Defaults, Limits
    from eagle_fsd.serving.service import Settings
    from eagle_fsd.target.media.reading import has_towers

    key = api_key(args)
    tree = settle_tree(model, options)
    sees = model.processor is not None and has_towers(model.target)
    adapter = make_adapter(args, model)
    return Settings(
        name=args.served_model_name or Path(shown_name(model.base_model)).name,
        tree=tree,
        measure_tree=model.settler.measure_postponed if model.settler.postpones else None,
        limits=Limits(
            max_rows=args.max_rows,
            max_queue=args.max_queue,
            max_prompt_tokens=args.max_prompt_tokens,
            max_body=args.max_body or (MOST_WITH_IMAGES if sees else MOST_BYTES),
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
    except (OSError, TypeError) as error:  # TypeError: no name of a host is written like this
        found.close()
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{host} port {port} cannot be listened at ({reason}): choose another --host or --port"
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
        check_arguments(args)  # threads that compile would be waited for at the end, even of a mistake
        begin_early(args)
        options = generation_options(args)
        ranks = join(args, "serve")
    leads = ranks is None or ranks.leads
    # Before the model is loaded, which takes long.
    with listen(args.host, args.port) if leads else contextlib.nullcontext() as place:
        model, settings = load(args, options, None if place is None else address_of(place)[0])
        if ranks is not None:
            memory = model.memory()
            if args.verbose:
                tell(show_memory(memory))
            if model.head_folder is not None:
                model.identity()  # by all ranks: later, a request that asks for it reaches rank 0 alone
        if place is not None:
            return serve(model, settings, place, args.verbose)
        follow_rank_0(model, settings)
    return 0


def load(
    args: argparse.Namespace, options: GenerationOptions, bound: str | None = None
) -> tuple[EagleFSD, Settings]:
    """Load the model that the flags name, and settle how it is served. options: of `generation_options`."""
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
    from eagle_fsd.serving.work.scheduling import new_scheduler
    from eagle_fsd.text.stop_strings import make_stopper

    # Rank 0 has the signal too, lets answers under way finish, and tells when to end.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    follow(
        model.target.ranks,
        lambda: new_scheduler(model, settings.tree, settings.limits),
        lambda stopping: make_stopper(model.tokenizer, *stopping),
    )


def serve(model: EagleFSD, settings: Settings, place: socket.socket, verbose: bool = False) -> int:
    """Serve on a socket until a signal comes, and return the exit code."""
    from eagle_fsd.serving.app import create_app
    from eagle_fsd.serving.server import Server

    host, port = address_of(place)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if settings.key is None and not is_loopback(host):
        tell(f"warning: whoever reaches {host} may call: set {KEY_VARIABLE}")

    server = Server(create_app(model, settings), url, verbose)
    try:
        with contextlib.suppress(KeyboardInterrupt):  # of Ctrl-C, once all is done
            server.run(sockets=[place])
    finally:  # a termination signal ends the process inside
        if model.target.ranks.several and server.service.worker.alive:
            tell("error: a step still waits for other ranks, which are lost")
            leave(1)
    return EXIT_INTERRUPTED if server.hurried else 0


@on_every_rank
def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run, and return the exit code."""
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
        end_program()


if __name__ == "__main__":
    sys.exit(main())
