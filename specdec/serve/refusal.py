"""Why a request is not served: one sentence, in the form of OpenAI's errors."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from specdec.cli.reading import mistake, place_in_words
from specdec.schema import shown


class Refusal(ValueError):
    """A rejected request, with the JSON of OpenAI's errors for it."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None):
        """param: the field that is wrong. status: of HTTP. code: a short name of the error for programs."""
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    def body(self) -> dict:
        """Return the JSON of the response."""
        kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class Fault(ValueError):
    """A mistake within a field. The message follows the field's name and `path`, the place within the field."""

    def __init__(self, message: str, *path: str | int):
        """path: the place of the mistake within the field, as keys and indices."""
        super().__init__(message)
        self.path = path


class Unsupported(Fault):
    """A part of a field that is not known, or not implemented. The message follows the field's name."""


def refusal_of(kind: type[BaseModel], given: Mapping[str, Any], error: Mapping[str, Any]) -> Refusal:
    """Return one mistake that pydantic found in `given` as a `Refusal`. kind: the model that `given` was read as."""
    reason = error.get("ctx", {}).get("error")
    if isinstance(reason, Refusal):
        return reason
    field, words = error["loc"][0], kind.model_fields[error["loc"][0]].description
    where = place_in_words((*error["loc"], *getattr(reason, "path", ())))
    if isinstance(reason, Unsupported):
        return Refusal(mistake(error), where, code="unsupported_parameter")
    if reason is not None:
        return Refusal(f"{where} {reason}", where)
    if not words or error["type"] in ("missing", "too_short"):
        return Refusal(mistake(error), where)
    return Refusal(f"{field} must be {words}, got {shown(given[field])}", field)
