"""Replicas of the server under Ray Serve, behind one address.

    pip install "eagle-fsd[ray]"
    serve run eagle_fsd.integrations.ray_serve:app replicas=2 flags="--weight-format packed"

Each replica is a process with a model of its own. Ray sends a request to one that has little to do, and
starts another one where one has died. Only the requests on that one are lost; a client that asks again
reaches another. The header `x-replica` of an answer says who gave it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray import serve

from eagle_fsd.cli.arguments import generation_options
from eagle_fsd.cli.flags.server import api_key
from eagle_fsd.cli.mistakes import raise_user_errors
from eagle_fsd.core.checks import require_integer
from eagle_fsd.serve import build_parser, check_arguments, load, require_packages
from eagle_fsd.serving.entry.request_ids import HEADER

if TYPE_CHECKING:
    from ray.serve import Application
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# What a replica serves, in its own process: what is defined in a function is copied there, and this is not.
SERVED: list[Any] = []
ARGUMENTS = ("replicas", "flags", "cpus")


class NamesReplica:
    """ASGI middleware that says in a header which replica answered.

    The request's id is left to Ray's proxy, which says the same one itself.
    """

    def __init__(self, app: ASGIApp, name: str) -> None:
        self.app, self.header = app, (b"x-replica", name.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [one for one in message.get("headers", ()) if one[0] != HEADER.encode()]
                message = {**message, "headers": [*kept, self.header]}
            await send(message)

        await self.app(scope, receive, named)


def app(arguments: Mapping[str, str | int]) -> Application:
    """Build the application for `serve run`, or for a config file of Ray's, whose numbers are numbers.

    Raises ValueError for arguments that cannot be.

    replicas: how many (default: 2). flags: of `python -m eagle_fsd.serve`; the address is Ray's own. cpus:
    that Ray reserves for each replica (default: 1).
    """
    if unknown := sorted(set(arguments) - set(ARGUMENTS)):
        raise ValueError(f"{unknown[0]} is no argument: they are {', '.join(ARGUMENTS)}; leave it out")
    words = shlex.split(str(arguments.get("flags", "")))
    replicas = require_whole("replicas", arguments.get("replicas", "2"))
    cpus = require_whole("cpus", arguments.get("cpus", "1"))
    with raise_user_errors():
        require_packages()
        parser = build_parser()
        args = parser.parse_args(words)
        check_arguments(args)  # now, and not in every replica for the first time
        generation_options(args)
        if args.tp_plan is not None:
            raise ValueError(
                f"--tp-plan is {args.tp_plan} in a replica: each is one process; leave it out, or serve with "
                "torchrun"
            )
        for name in ("host", "port"):
            if (value := getattr(args, name)) != parser.get_default(name):
                raise ValueError(f"--{name} is {value}: the address is Ray's own; tell `serve` of it instead")
        if args.adapt_save is not None and replicas > 1:
            raise ValueError(
                f"--adapt-save with {replicas} replicas: they would all write there; use one, or leave it out"
            )

    key = api_key(args)  # a replica's own environment may lack the variable that says it

    def make_app() -> Any:
        """Load the model in a replica."""
        from eagle_fsd.integrations.ray_serve import SERVED
        from eagle_fsd.serving.app import create_app

        args = build_parser().parse_args(words)
        args.api_key = key
        served = create_app(*load(args, generation_options(args)))
        SERVED.append(served.state.service)
        served.add_middleware(NamesReplica, name=serve.get_replica_context().replica_id.unique_id)
        return served

    @serve.deployment(
        name="eagle_fsd",
        num_replicas=replicas,
        ray_actor_options={"num_cpus": cpus},
        max_ongoing_requests=args.max_rows + args.max_queue,
    )
    @serve.ingress(make_app)
    class Replica:
        """One server. Ray asks it whether it is well."""

        async def check_health(self) -> None:
            from eagle_fsd.integrations.ray_serve import SERVED

            if not all(service.worker.alive for service in SERVED):
                raise RuntimeError("the worker has ended: this replica must be started again")

    return Replica.bind()


def require_whole(name: str, given: str | int) -> int:
    """Return a number of at least 1. Raises ValueError for anything else."""
    number = int(given) if isinstance(given, str) and given.isdecimal() else given
    require_integer(name, number, 1, "2 is usual")
    return int(number)
