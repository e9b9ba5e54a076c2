"""Errors in OpenAI's form: a status and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.responses import Response

from eagle_fsd.core.checks import format_value, one_line
from eagle_fsd.decoding.failures import NothingAllowed

INVALID, SERVER = "invalid_request_error", "server_error"
# The openai client tries 408, 409, 429 and 5xx again, unless this header says that it would be in vain.
IN_VAIN = {"x-should-retry": "false"}


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
        param: str | None = None,
        code: str | None = None,
        kind: str = INVALID,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.kind = status, param, code, kind
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> Response:
        return json_response(self.body, self.status, self.headers)

    def __reduce__(self) -> Any:
        return type(self), (self.status, str(self), self.param, self.code, self.kind, self.headers)


def unknown_key() -> ApiError:
    return ApiError(
        401,
        "the API key is missing or wrong: send the server's own as `Authorization: Bearer KEY`",
        code="invalid_api_key",
        kind="authentication_error",
        headers={"www-authenticate": "Bearer"},
    )


def unknown_host(name: str) -> ApiError:
    message = f"the host is {format_value(name)}: a server without a key answers this machine only; set a key"
    return ApiError(403, message, code="invalid_host", kind="permission_error")


def too_large(limit: int) -> ApiError:
    message = f"the body is larger than {limit} bytes: shorten it, or start the server with --max-body"
    return ApiError(413, message, code="body_too_large")


def queue_full(waiting: int, seconds: int) -> ApiError:
    return ApiError(
        429,
        f"the server is busy, and {waiting} texts wait already: try again in {seconds} s",
        code="queue_full",
        kind="rate_limit_error",
        headers={"retry-after": str(seconds)},
    )


def timed_out(seconds: float) -> ApiError:
    return ApiError(
        504,
        f"the answer took longer than {seconds:g} s: ask for fewer tokens (max_tokens), or start the server "
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
    return ApiError(400, message, param)


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return the error of a body that is not a request, from pydantic's first complaint."""
    found = errors[0]
    # The names of a union's members stand between fields; they are not names of the request.
    place = [part for part in found["loc"] if part != "body" and not is_type_name(part)]
    param = ".".join(map(str, place))
    match found["type"]:
        case "json_invalid":
            reason = found.get("ctx", {}).get("error", "")
            return ApiError(
                400, f"the body is not JSON ({reason}): send one JSON object", code="invalid_json"
            )
        case "extra_forbidden":
            return ApiError(
                400, f"{param} is not a field of this request: leave it out", param, "unknown_field"
            )
        case "missing":
            what = f"{param} is missing: add it" if param else "the body is empty: send a JSON object"
            return ApiError(400, what, param or None, "missing_field")
    reason = found["msg"].removeprefix("Value error, ")
    if not place and found["type"] == "value_error":
        return ApiError(400, reason, reason.split()[0], "invalid_value")
    if not place:
        return ApiError(400, "the body must be a JSON object, sent as application/json", code="invalid_json")
    if found["type"] == "value_error" and isinstance(place[-1], int):  # of a part as a whole
        return ApiError(400, f"{param}: {reason}", f"{param}.{reason.split()[0]}", "invalid_value")
    if found["type"] == "value_error" and reason.startswith(str(place[-1])):
        return ApiError(400, reason, param, "invalid_value")
    return ApiError(400, f"{param} is {format_value(found.get('input'))}: {reason}", param, "invalid_value")


def is_type_name(part: object) -> bool:
    """Whether a part of pydantic's place is a member of a union, such as `str` or `list[int]`."""
    return isinstance(part, str) and bool(
        re.match(r"(str$|int$|float$|list\[|function-|constrained|literal\[|NamedTool$|\w+Part$)", part)
    )


def impossible_text(error: Exception) -> ApiError | None:
    """Return the error of a request that asked for what cannot be; None if it is no such error."""
    if not isinstance(error, NothingAllowed):
        return None
    return ApiError(400, f"the text cannot be made: {one_line(error)}", code="nothing_allowed")


def lost_text(reason: str) -> ApiError:
    return ApiError(500, f"the text could not be made: {reason}", code="generation_failed", kind=SERVER)
