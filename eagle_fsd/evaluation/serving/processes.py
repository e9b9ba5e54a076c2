"""Servers as processes of their own: started, waited for, weighed and ended."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from eagle_fsd.evaluation.serving.client import Client

START_SECONDS = 600.0  # a first start may convert weights
END_SECONDS = 60.0
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Server:
    """A server that answers. command: what started it."""

    command: Sequence[str]
    client: Client
    process: subprocess.Popen[bytes]

    def resident(self) -> int:
        """Return the bytes of memory that it and what it started hold; 0 once it has ended."""
        held = 0
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.process.pid)
            for one in (first, *first.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):  # it has just ended
                    held += one.memory_info().rss
        return held


@contextmanager
def started(
    command: Sequence[str], port: int, ready: str, log: Path, environment: Mapping[str, str] | None = None
) -> Iterator[Server]:
    """Start a server, wait until a GET of `ready` succeeds, and end it afterwards.

    log: gets what it prints. Raises ValueError with its last line if it ends before.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as printed:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
    server = Server(command, Client(f"http://{HOST}:{port}"), process)
    try:
        wait_until_ready(server, ready, log)
        yield server
    finally:
        end(process)


def wait_until_ready(server: Server, path: str, log: Path) -> None:
    limit = time.monotonic() + START_SECONDS
    while True:
        try:
            if server.client.get(path).status == 200:
                return
        except OSError:
            pass
        if server.process.poll() is not None or time.monotonic() > limit:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = lines[-1] if lines else "it printed nothing"
            raise ValueError(
                f"the server did not start ({last}): see {log}, or run {' '.join(server.command)}"
            )
        time.sleep(0.2)


def end(process: subprocess.Popen[bytes]) -> float:
    """Ask a process to end, and force it to if it does not. Return the seconds that it took."""
    start = time.monotonic()
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return time.monotonic() - start


def free_port() -> int:
    """Return a port that nobody listens at now."""
    with socket.socket() as place:
        place.bind((HOST, 0))
        return int(place.getsockname()[1])


@dataclass
class Scale:
    """Weighs a server again and again while it is used. samples: (seconds since the start, bytes)."""

    server: Server
    every: float = 1.0
    samples: list[tuple[float, int]] = field(default_factory=list)

    def __enter__(self) -> Scale:
        self._start, self._stop = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="scale", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self.samples.append((time.monotonic() - self._start, self.server.resident()))
            if self._stop.wait(self.every):
                return

    def between(self, begin: float, finish: float) -> float:
        """Return the least of the samples in a part of the time; begin and finish are shares of it.

        A request may take memory for seconds, and what leaks is there all the time. Of a part that has no
        sample, it is the last one before the part.
        """
        end = self.samples[-1][0]
        inside = [size for seconds, size in self.samples if begin * end <= seconds <= finish * end]
        before = [size for seconds, size in self.samples if seconds < begin * end]
        return min(inside or before[-1:] or [self.samples[0][1]])
