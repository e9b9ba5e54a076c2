"""Errors: a status and {"error": {"message", "type", "param", "code"}}, or the form that Anthropic has."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal

from fastapi.responses import Response

from eagle_fsd.core.checks import format_value, one_line
from eagle_fsd.core.devices import ran_out_of_memory
from eagle_fsd.decoding.steps.failures import NonFiniteLogits, NothingAllowed

if TYPE_CHECKING:
    from starlette.types import Scope

# What programs are told of an error; docs/serve.md says when.
Code = Literal[
    "invalid_value", "missing_field", "unknown_field", "unsupported_field", "invalid_json", "invalid_http",
    "context_length_exceeded", "nothing_allowed", "invalid_api_key", "invalid_host", "model_not_found",
    "not_found", "method_not_allowed", "body_timeout", "body_too_large", "queue_full", "generation_failed",
    "internal_server_error", "closing", "worker_ended", "timeout",
]  # fmt: skip
INVALID, SERVER = "invalid_request_error", "server_error"
FAILED = "the server failed, and its log says how; send the request again"
LEAST_LIKENESS = 0.8  # of an unknown field to one that is meant: repeat_penalty has it to repetition_penalty
LENGTHS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
# What other requests and servers call a field, and the fields here that may be meant.
MEANT: dict[str, Sequence[str]] = {
    **dict.fromkeys((*LENGTHS, "max_new_tokens", "max_length", "n_predict", "num_predict"), LENGTHS),
    **dict.fromkeys(("grammar", "json_schema", "regex", "choice"), ("structured_outputs",)),
    **dict.fromkeys(("enable_thinking", "think", "thinking"), ("chat_template_kwargs",)),
    **dict.fromkeys(("response_format", "output_format"), ("text", "output_config", "response_format")),
    "stop_sequences": ("stop",),
    "stop": ("stop_sequences",),
    "parallel_tool_calls": ("tool_choice",),
}
# How pydantic calls an object of JSON.
OF_PYTHON = re.compile("a valid dictionary( or object to extract fields from)?")
# The openai client tries 408, 409, 429 and 5xx again, unless this header says that it would be in vain.
IN_VAIN = {"x-should-retry": "false"}
ANTHROPICS = "/v1/messages"  # this route and those below it have errors in Anthropic's form
UNTHREADED = "thread_unsupported_request"  # by this its client learns to send all turns itself
# Its types of errors, by their status; any other is one of the first two, by whose fault it is.
REFUSED, FAULT = "invalid_request_error", "api_error"
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def json_response(data: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return JSON in ASCII, which also half a character of a client's can be quoted in."""
    text = json.dumps(data, allow_nan=False)
    return Response(text, status, headers, "application/json")


class ApiError(Exception):
    """An error that a client sees. param: the field that is wrong. code: what went wrong, for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        code: Code,
        param: str | None = None,
        kind: str = INVALID,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.kind = status, code, param, kind
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """Return the body in Anthropic's form, whose client shows the code of `details` to programs."""
        kind = TYPES.get(self.status, FAULT if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else REFUSED)
        code = UNTHREADED if self.param == "thread" else self.code
        details = {"error_code": code, "param": self.param}
        error = {"type": kind, "message": str(self), "details": details}
        return {"type": "error", "error": error, "request_id": request_id}

    def response(self, scope: Scope) -> Response:
        """Return the answer to the request of this scope, in the form of its route."""
        body = self.body
        if scope["path"] == ANTHROPICS or scope["path"].startswith(f"{ANTHROPICS}/"):
            body = self.anthropic_body(scope["state"]["request_id"])
        return json_response(body, self.status, self.headers)

    def __reduce__(self) -> Any:
        return type(self), (self.status, str(self), self.code, self.param, self.kind, self.headers)


def wrong_value(message: str, param: str | None = None) -> ApiError:
    """Return the error of a field whose value is refused, for any reason that has no code of its own."""
    return ApiError(400, message, "invalid_value", param)


def format_json(value: object) -> str:
    """Return a value of a request as format_value does, but all except texts as JSON writes it."""
    if isinstance(value, str):
        return format_value(value)
    return one_line(json.dumps(value, ensure_ascii=False, default=repr), 60)


def unknown_key() -> ApiError:
    return ApiError(
        401,
        "the API key is missing or wrong: send the server's own as `Authorization: Bearer KEY`, or as "
        "`x-api-key: KEY`",
        code="invalid_api_key",
        kind="authentication_error",
        headers={"www-authenticate": "Bearer"},
    )


def unknown_host(name: str) -> ApiError:
    message = f"the host is {format_value(name)}: a server without a key answers this machine only; set a key"
    return ApiError(403, message, code="invalid_host", kind="permission_error")


def no_json(content_type: str) -> ApiError:
    said = format_value(content_type) if content_type else "missing"
    message = f"the content type is {said}: the body must be a JSON object, sent as application/json"
    return ApiError(400, message, code="invalid_json")


def too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes: shorten it, or start the server with --max-body"
    return ApiError(413, message, code="body_too_large")


def queue_full(waiting: int, seconds: int) -> ApiError:
    wait = "1 text waits" if waiting == 1 else f"{waiting} texts wait"
    return ApiError(
        429,
        f"the server is busy, and {wait} already: try again in {seconds} s",
        code="queue_full",
        kind="rate_limit_error",
        headers={"retry-after": str(seconds)},
    )


def timed_out(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"the answer took longer than {seconds:g} s: ask for fewer tokens, or start the server "
        "with a larger --request-timeout",
        code="timeout",
        kind=SERVER,
        headers=IN_VAIN,
    )


def of_value(error: ValueError, fields: Sequence[str] = ()) -> ApiError:
    """Return the error of a value that the engine refuses. Its text often begins with the field's name."""
    message = one_line(error)
    named = re.match(r"(\w+)", message)
    param = named[1] if named and named[1] in fields else None
    return wrong_value(message, param)


def of_validation(errors: Sequence[Mapping[str, Any]], fields: Collection[str]) -> ApiError:
    """Return the error of a body that is not a request, from pydantic's first complaint.

    fields: those that the request may have.
    Every member of a union complains. One that begins to read the value names the part of it that is wrong.
    """
    found, place = errors[0], place_of(errors[0])
    for error in errors[1:]:
        if len(within := place_of(error)) > len(place) and within[: len(place)] == place:
            found, place = error, within
            break
    param = ".".join(map(str, place))
    match found["type"]:
        case "json_invalid":
            reason = f"{found.get('ctx', {}).get('error', '')} at character {param}"
            return ApiError(400, f"the body is not JSON ({reason}): send one JSON object", "invalid_json")
        case "extra_forbidden":
            meant = meant_field(param, fields)
            remedy = f"write {meant} if that is meant, else leave it out" if meant else "leave it out"
            message = f"{param} is not a field of this request: {remedy}"
            return ApiError(400, message, "unknown_field", param)
        case "missing" if not param:
            return ApiError(400, "the body is empty: send a JSON object", "invalid_json")
        case "missing":
            return ApiError(400, f"{param} is missing: add it", "missing_field", param)
    reason = OF_PYTHON.sub("a JSON object", found["msg"].removeprefix("Value error, "))
    reason = reason.partition(" after validation, not ")[0]  # the value shows how many there are
    if not place and found["type"] == "value_error":
        return wrong_value(reason, reason.split()[0])
    if not place:
        return ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_json")
    if found["type"] == "value_error" and isinstance(place[-1], int):  # of a part as a whole
        return wrong_value(f"{param}: {reason}", f"{param}.{reason.split()[0]}")
    if found["type"] == "value_error" and reason.startswith(str(place[-1])):
        return wrong_value(reason, param)
    return wrong_value(f"{param} is {format_json(found.get('input'))}: {reason}", param)


def meant_field(name: str, fields: Collection[str]) -> str | None:
    """Return the field of a request that an unknown one may stand for; None if there is none."""
    near = get_close_matches(name, fields, 1, LEAST_LIKENESS)
    return next((one for one in (*MEANT.get(name, ()), *near) if one in fields), None)


def place_of(error: Mapping[str, Any]) -> list[str | int]:
    """Return where in a request pydantic complains: fields, and places in lists.

    The names of a union's members stand between them; they are not names of the request.
    """
    return [part for part in error["loc"] if part != "body" and not is_type_name(part)]


def is_type_name(part: object) -> bool:
    """Whether a part of pydantic's place is a member of a union, such as `str` or `list[int]`."""
    return isinstance(part, str) and bool(
        re.match(
            r"(str$|int$|float$|(list|dict|literal)\[|function-|constrained|(Named|Allowed)Tools?$|"
            r"(Text|Image|Item|ImageItem)Part$|(Message|Call|Result)Item$|"
            r"(Text|Image|ToolUse|ToolResult|Thinking)Block$)",
            part,
        )
    )


def of_status(
    status: int, method: str, path: str, headers: Mapping[str, str] | None, routes: Sequence[str]
) -> ApiError:
    """Return the error of a request that the routes refuse, mostly since there is none for it."""
    if status == HTTPStatus.NOT_FOUND:
        message = f"{one_line(path, 200)} is no route of this server: {remedy_of(path, routes)}"
        return ApiError(status, message, "not_found", headers=headers)
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        message = f"{method} is no method of {path}: send {(headers or {}).get('Allow', 'another one')}"
        return ApiError(status, message, "method_not_allowed", headers=headers)
    message = f"{method} {path}: {HTTPStatus(status).phrase}"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return ApiError(status, message, "internal_server_error", kind=SERVER, headers=headers)
    return ApiError(status, message, "invalid_http", headers=headers)


def remedy_of(path: str, routes: Sequence[str]) -> str:
    """Return what to do about a path that is no route: the base URL of a client may be wrong."""
    versioned = [route for route in routes if route.startswith("/v1/")]
    if (bare := path.removeprefix("/v1")) in routes and bare != "/":
        return f"{bare} is one; leave /v1 out"
    if ends := [route for route in versioned if path.endswith(route.removeprefix("/v1"))]:
        return f"{max(ends, key=len)} is one; end the client's base URL with /v1, right behind the port"
    if path.startswith(("/v1/responses/", "/v1/conversations", "/v1/chat/completions/")):
        return "no answer is stored; send all turns with each request"
    if path.startswith("/v1/"):
        return "it writes texts alone; ask another server, or see /openapi.json for what this one has"
    return "/openapi.json lists them, most are under /v1"


def of_failure(error: Exception) -> ApiError:
    """Return the error of a text that failed, by what its request asked for or through no fault of it.

    Of errors that are known it tells the reason. What else went wrong is for the log.
    """
    if isinstance(error, NothingAllowed):
        return ApiError(400, f"the text cannot be made: {one_line(error)}", code="nothing_allowed")
    reason = FAILED
    if isinstance(error, NonFiniteLogits) or ran_out_of_memory(error):
        reason = one_line(error)
    return ApiError(500, f"the text could not be made: {reason}", code="generation_failed", kind=SERVER)
