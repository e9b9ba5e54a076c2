"""Real servers of the tiny engine on free ports."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from eagle_fsd import EagleFSD, TreeConfig
from eagle_fsd.serving.app import create_app
from eagle_fsd.serving.choices import Defaults
from eagle_fsd.serving.server import Server
from eagle_fsd.serving.service import Settings
from support.schema_engine import writes
from support.tiny_engine import NAME, TREE, tiny_engine


def settings(**fields: Any) -> Settings:
    return Settings(**{"name": NAME, "tree": TREE, **fields})


def writing(text: str) -> Settings:
    """Return the settings of a server whose model writes this text. No draft is right: a tree is small."""
    return settings(tree=TreeConfig(2, 1, 1), defaults=Defaults(processing=writes(text)))


@contextlib.contextmanager
def running(configured: Settings, model: EagleFSD | None = None) -> Iterator[tuple[str, Any]]:
    """Run a server on a free port, and yield its URL and its service."""
    with socket.create_server(("127.0.0.1", 0)) as place:
        url = f"http://127.0.0.1:{place.getsockname()[1]}"
        server = Server(create_app(model or tiny_engine(), configured), url)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [place]}, daemon=True)
        thread.start()
        until(lambda: server.started)
        try:
            yield url, server.service
        finally:
            server.should_exit = server.hurried = True
            thread.join()


def until(condition: Any, seconds: float = 30.0) -> None:
    """Wait until something is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)
