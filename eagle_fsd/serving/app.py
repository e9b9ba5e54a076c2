"""The application: which route does what."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from eagle_fsd.serving.delivery import ClientGone
from eagle_fsd.serving.entry.cors import let_pages_call
from eagle_fsd.serving.entry.gate import Gate
from eagle_fsd.serving.entry.json_body import JsonRoute
from eagle_fsd.serving.entry.request_ids import HEADERS, RequestIds
from eagle_fsd.serving.errors import (
    ANTHROPICS,
    FAILED,
    SERVER,
    ApiError,
    json_response,
    of_status,
    of_validation,
)
from eagle_fsd.serving.requests.anthropic import MessagesRequest
from eagle_fsd.serving.requests.completions import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from eagle_fsd.serving.requests.responses import ResponsesRequest
from eagle_fsd.serving.requests.unsupported import Unsupported
from eagle_fsd.serving.service import Service, Settings
from eagle_fsd.version import __version__

if TYPE_CHECKING:
    from starlette.types import Scope

    from eagle_fsd.engine import EagleFSD

logger = logging.getLogger(__name__)
OPEN_PATHS, BELOW_PAGE = ("/health", "/"), "/page/"  # these and the page's files need no API key
PAGE = Path(__file__).with_name("page")
PAGE_FILES = {"index.html": "text/html", "style.css": "text/css", "script.js": "text/javascript"}
PAGE_HEADERS = {  # the page loads nothing from elsewhere, and no other page may frame it
    "content-security-policy": "default-src 'self'; img-src data:; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
CLIENT_GONE = 499  # nobody reads it; it is counted


def create_app(model: EagleFSD, settings: Settings) -> FastAPI:
    """Return the application that serves this engine. The worker starts and ends with its lifespan."""
    service = Service(model, settings)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        await asyncio.to_thread(service.worker.close)
        if settings.at_end is not None:
            await asyncio.to_thread(settings.at_end)

    app = FastAPI(
        title="eagle_fsd",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        # Without this FastAPI tells of its own, 422.
        responses={"4XX": {"description": "An error in OpenAI's or Anthropic's form"}},
    )
    app.state.service = service
    app.router.route_class = JsonRoute
    add_routes(app, service)
    add_page(app)
    add_heads(app)
    add_error_handlers(app)
    app.add_middleware(
        Gate,
        key=settings.key,
        hosts=settings.hosts,
        max_body=settings.limits.max_body,
        is_open=lambda path: path in OPEN_PATHS or path.startswith(BELOW_PAGE),
        answered=lambda scope, status: service.metrics.answered(route_of(app, scope), status),
    )
    if settings.cors_origins:
        let_pages_call(app, settings.cors_origins)
    app.add_middleware(RequestIds)  # around all others, whose answers have an id too
    return app


def route_of(app: FastAPI, scope: Scope) -> str:
    """Return the path of the route that a request is for, as the route has it; "other" if there is none."""
    found = (
        route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] != Match.NONE
    )
    return next((route.path for route in found), "other")


def add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await service.answer(body, request)

    @app.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        return await service.answer(body, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.answer(body, request)

    @app.post(ANTHROPICS)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        return await service.answer(body, request)

    @app.post(f"{ANTHROPICS}/count_tokens")
    async def count_tokens(body: MessagesRequest) -> dict[str, Any]:
        return await service.count(body)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = service.card
        of_anthropic = {"first_id": card["id"], "last_id": card["id"], "has_more": False}
        return {"object": "list", "data": [card], **of_anthropic}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        if not name:  # a slash at the end, which this route would have in place of a redirection
            return await models()
        service.require_model(name)
        return service.card

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        return await service.tokenize(body)

    @app.post("/detokenize")
    def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        return service.detokenize(body)

    @app.get("/health")
    async def health() -> Response:
        if not service.worker.alive:
            message = "the worker has ended: start the server again"
            raise ApiError(503, message, "worker_ended", kind=SERVER)
        return json_response({"status": "ok"})

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(service.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")


def add_page(app: FastAPI) -> None:
    """Add the page at /, a chat that shows how every token came, from the package's own files."""

    @app.get("/", include_in_schema=False)
    def index() -> Response:
        return page_file("index.html")

    @app.get(BELOW_PAGE + "{name}", include_in_schema=False)
    def page_file(name: str) -> Response:
        if name not in PAGE_FILES:
            raise HTTPException(404, "Not Found")
        return FileResponse(PAGE / name, media_type=PAGE_FILES[name], headers=PAGE_HEADERS)


def add_heads(app: FastAPI) -> None:
    """Let what can be read be asked for without its body, as load balancers do; the web server drops it."""
    for route in list(app.routes):
        if isinstance(route, APIRoute) and route.methods == {"GET"}:
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


def fields_of(request: Request) -> Collection[str]:
    """Return the fields that the body of a request may have."""
    body = get_type_hints(request.scope["endpoint"]).get("body")
    return [] if body is None else [field.alias or name for name, field in body.model_fields.items()]


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def known(request: Request, error: ApiError) -> Response:
        return error.response(request.scope)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return of_validation(error.errors(), fields_of(request)).response(request.scope)

    @app.exception_handler(Unsupported)
    async def unsupported(request: Request, error: Unsupported) -> Response:
        return ApiError(400, str(error), "unsupported_field", error.name).response(request.scope)

    @app.exception_handler(ClientGone)
    async def gone(_request: Request, _error: ClientGone) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, ApiError):  # of JsonRequest
            return error.__cause__.response(request.scope)
        routes = [route.path for route in app.routes if isinstance(route, Route)]
        path = request.url.path
        refused = of_status(error.status_code, request.method, path, error.headers, routes)
        return refused.response(request.scope)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, _error: Exception) -> Response:
        # This answer is made around RequestIds. The web server logs the traceback; see of_failure.
        name = request.state.request_id
        logger.error("%s failed, by what nothing foresaw", name)
        headers = dict.fromkeys(HEADERS, name)
        failed = ApiError(500, FAILED, "internal_server_error", kind=SERVER, headers=headers)
        return failed.response(request.scope)
