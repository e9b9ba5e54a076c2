"""From the worker's thread to a client: news as they come, until the last one or until the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi.responses import StreamingResponse

from eagle_fsd.serving.answers.answer import Answer
from eagle_fsd.serving.errors import ApiError, timed_out
from eagle_fsd.serving.work.jobs import News

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")
GRACE = 5.0  # seconds for the end of an answer to reach a client after its time is up


class ClientGone(Exception):
    """The client closed its connection before it had its answer."""


class Deadline:
    """A point in time, some seconds from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = asyncio.get_running_loop().time() + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - asyncio.get_running_loop().time())


class Feed:
    """The news of one request's texts, as (place, news). It is made on the loop that reads it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Queue[tuple[int, News]] = asyncio.Queue()

    def teller(self, place: int) -> Callable[[News], None]:
        """Return what the worker calls for the text at this place, in its own thread; it never waits."""

        def tell(news: News) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._news.put_nowait, (place, news))

        return tell

    async def next(self, deadline: Deadline) -> tuple[int, News]:
        """Return the next news. Raises ApiError if they are an error or too late."""
        # Not by asyncio.wait_for: up to Python 3.11 it forgets that it was cancelled if news come just then,
        # and whoever reads on for a client that has left waits for nothing until the deadline.
        getting = asyncio.ensure_future(self._news.get())
        try:
            await asyncio.wait({getting}, timeout=deadline.left)
            if not getting.done():
                raise timed_out(deadline.seconds)
        finally:
            getting.cancel()
        place, news = getting.result()
        if news.error is not None:
            raise news.error
        return place, news


async def collect(answer: Answer, feed: Feed, deadline: Deadline) -> None:
    """Take in all news of an answer."""
    while not answer.done:
        answer.take(*await feed.next(deadline))


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the work's result. Raises ClientGone, and stops the work, if the client leaves before."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnect(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        await stop(working, leaving)


async def events(
    answer: Answer, first: tuple[int, News], feed: Feed, deadline: Deadline
) -> AsyncIterator[bytes]:
    """Yield an answer as server-sent events. first: the first news, which decided that there is a stream."""
    yield answer.begin()
    place, news = first
    try:
        while True:
            answer.take(place, news)
            yield await written(answer, partial(answer.tell, place, news))
            if answer.done:
                break
            place, news = await feed.next(deadline)
    except ApiError as error:
        yield answer.end(error)
    else:
        yield await written(answer, answer.end)


async def written(answer: Answer, write: Callable[[], bytes]) -> bytes:
    """Return events of an answer. The last ones may repeat all log-probabilities, and leave the loop free."""
    return await asyncio.to_thread(write) if answer.done and answer.tables is not None else write()


class EventStream(StreamingResponse):
    """Server-sent events. Sending ends with the client's connection, or a little after the deadline.

    close: called at the end, however it comes.
    """

    media_type = "text/event-stream"

    def __init__(self, content: AsyncIterator[bytes], deadline: Deadline, close: Callable[[], None]) -> None:
        super().__init__(content, headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        self.deadline, self.close = deadline, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        leaving = asyncio.ensure_future(disconnect(receive))
        try:
            await asyncio.wait(
                {sending, leaving}, timeout=self.deadline.left + GRACE, return_when=asyncio.FIRST_COMPLETED
            )
            if sending.done():
                with contextlib.suppress(OSError):  # the connection broke
                    sending.result()
        finally:
            self.close()
            await stop(sending, leaving)


async def disconnect(receive: Receive) -> None:
    """Wait until the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def stop(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait for their ends, whatever these are."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
