"""Which web pages of other origins may call, and what they may read of an answer besides its body."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from starlette.middleware.cors import CORSMiddleware

from eagle_fsd.serving.entry.request_ids import HEADERS

if TYPE_CHECKING:
    from fastapi import FastAPI

READ_BY_CLIENTS = (*HEADERS, "retry-after", "x-should-retry")  # which a browser hides unless they are named
# Older releases of Starlette do not ask whether a page of the internet may call a private address; newer ones
# refuse it unless this is set.
PRIVATE = "allow_private_network"


def let_pages_call(app: FastAPI, origins: Sequence[str]) -> None:
    options: dict[str, Any] = {"allow_origins": list(origins), "expose_headers": READ_BY_CLIENTS}
    if PRIVATE in inspect.signature(CORSMiddleware).parameters:
        options[PRIVATE] = True  # the origin was named by who runs the server
    app.add_middleware(CORSMiddleware, allow_methods=["*"], allow_headers=["*"], **options)
