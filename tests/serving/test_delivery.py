"""What stands between the worker's thread and a client's connection."""

from __future__ import annotations

import asyncio

import pytest

for needed in ("fastapi", "uvicorn", "prometheus_client"):
    pytest.importorskip(needed, reason='this needs an extra: pip install "eagle-fsd[serve]"')

from eagle_fsd.serving.delivery import Deadline, Feed
from eagle_fsd.serving.errors import ApiError
from eagle_fsd.serving.work.jobs import News
from eagle_fsd.text.streamed import Piece


@pytest.mark.parametrize("turns", range(6))
def test_a_reader_that_is_stopped_stops_even_as_news_come(turns: int) -> None:
    """It read on before, till its deadline, where the client left at the wrong moment."""

    async def stopped() -> bool:
        feed = Feed()
        reading = asyncio.ensure_future(feed.next(Deadline(60)))
        await asyncio.sleep(0.01)
        feed.teller(0)(News([Piece("a")]))
        for _ in range(turns):
            await asyncio.sleep(0)
        if reading.done():
            return True
        reading.cancel()
        await asyncio.wait({reading})
        return reading.cancelled()

    assert asyncio.run(stopped())


def test_news_come_in_order_or_not_in_time() -> None:
    async def read() -> list[str | None]:
        feed = Feed()
        for reason in ("stop", "length"):
            feed.teller(0)(News(finish_reason=reason))
        found = [(await feed.next(Deadline(60)))[1].finish_reason for _ in range(2)]
        with pytest.raises(ApiError, match=r"longer than 0\.01 s"):
            await feed.next(Deadline(0.01))
        return found

    assert asyncio.run(read()) == ["stop", "length"]
