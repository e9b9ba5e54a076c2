"""The HTTP server: it says where it answers, and ends on a signal, in time or at once."""

from __future__ import annotations

import asyncio
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from eagle_fsd.core.process.streams import tell
from eagle_fsd.serving.delivery import GRACE
from eagle_fsd.serving.entry.gate import HttpProtocol

SHUTDOWN_SECONDS = 30  # answers under way may take this long after a signal
TICK = 0.05  # seconds: a signal's handler may not touch the loop, so this looks for what it noted


class Server(uvicorn.Server):
    """Serves an application of `create_app` until a signal comes.

    Answers under way then have SHUTDOWN_SECONDS, or end with a second Ctrl-C: their clients get an error.
    What comes at the end of the application is done in any case. hurried: whether there was a second Ctrl-C.
    """

    def __init__(self, app: FastAPI, url: str, verbose: bool = False) -> None:
        level = "info" if verbose else "warning"
        # RequestIds logs the requests, with their ids.
        config = uvicorn.Config(
            app, http=HttpProtocol, log_level=level, server_header=False, access_log=False
        )
        super().__init__(config)
        self.service, self.url, self.hurried = app.state.service, url, False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        name, tree = self.service.settings.name, self.service.tree
        size = tree.size if tree.pause is None else f"{tree.size} till another is measured"
        where = f"answers at {self.url}/v1, with a page at {self.url}/"
        tell(f"{name} (tree {size}) {where}; Ctrl-C ends it")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal. Only the first one is uvicorn's, which would break off all tasks at a second one."""
        if self.should_exit:
            self.hurried = self.hurried or sig == signal.SIGINT
            return
        super().handle_exit(sig, frame)  # before the line: who answers it at once sends a second signal
        rest = f"answers under way have {SHUTDOWN_SECONDS} seconds; another Ctrl-C ends them now"
        tell(f"{self.service.settings.name} ends: {rest}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.ensure_future(self._end_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_answers(self) -> None:
        """End the answers under way once their time is up, then drop clients that still read nothing."""
        await self._close_idle(SHUTDOWN_SECONDS, unless_hurried=True)
        self.service.worker.end()
        await self._close_idle(GRACE)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def _close_idle(self, seconds: float, unless_hurried: bool = False) -> None:
        """Close connections as their answers end, for some seconds; uvicorn would keep them for another."""
        clock = asyncio.get_running_loop().time
        end = clock() + seconds
        while clock() < end and not (unless_hurried and self.hurried):
            await asyncio.sleep(TICK)
            for connection in list(self.server_state.connections):
                if not connection.transport.is_closing():
                    connection.shutdown()
