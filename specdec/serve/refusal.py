"""Why a request is not served: one sentence, in the form of OpenAI's errors."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from specdec.cli.reading import mistake
from specdec.schema import shown


class Refusal(ValueError):
    """A request that is not served, and the JSON of OpenAI's errors for it."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict:
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Unsupported(ValueError):
    """A part of a field that is not known, or not implemented. The message follows the name of the field."""


def refusal_of(kind: type[BaseModel], given: Mapping[str, Any], error: Mapping[str, Any]) -> Refusal:
    """One mistake that pydantic has found in `given`, as a sentence. kind: what `given` should have been."""
    reason = error.get("ctx", {}).get("error")
    if isinstance(reason, Refusal):
        return reason
    field, words = error["loc"][0], kind.model_fields[error["loc"][0]].description
    if words and reason is None and error["type"] not in ("missing", "too_short"):
        message = f"{field} must be {words}, got {shown(given[field])}"
    else:
        message = mistake(error)
    return Refusal(message, field, code="unsupported_parameter" if isinstance(reason, Unsupported) else None)
