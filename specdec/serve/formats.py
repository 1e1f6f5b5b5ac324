"""Structured output: the fields of a request that say what form its text must have, as a grammar."""

from typing import Any

from specdec.model.target import Target
from specdec.sampling.grammar import Grammar
from specdec.sampling.json_grammar import grammars_of
from specdec.schema import shown
from specdec.serve.protocol import Ask, Refusal

FORM = ("type", "json_schema")  # of `response_format`
SCHEMA = ("name", "description", "schema", "strict")  # of its `json_schema`
KINDS = ("json", "json_object", "regex")  # of `structured_outputs`, of which one is given


def grammar_of(ask: Ask, target: Target) -> Grammar | None:
    """What all texts of a request must be; None for any. `Refusal` for what is no form, or is not built."""
    wanted = [read for read in (_of_response(ask.response_format), _of_vllm(ask.structured_outputs)) if read]
    if not wanted:
        return None
    if len(wanted) > 1:
        raise Refusal("structured_outputs contradicts response_format", "structured_outputs")
    ((field, kind, value),) = wanted
    if ask.ignore_eos:
        raise Refusal(f"ignore_eos contradicts {field}: a text ends where its form is complete", "ignore_eos")
    try:
        grammars = grammars_of(target)  # the first takes a second
        return grammars.regex(value) if kind == "regex" else grammars.json(value)
    except ValueError as error:
        raise Refusal(str(error), field) from None


def _of_response(given: dict | None) -> tuple[str, str, Any] | None:
    """OpenAI's `response_format` -> (field, kind, value)."""
    field = "response_format"
    if given is None:
        return None
    _check_names(given, FORM, field)
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise Refusal(f"response_format.type must be text, json_object or json_schema, got {shown(kind)}", field)
    if kind != "json_schema":
        return None if kind == "text" else (field, "json", None)
    told = given.get("json_schema")
    if not isinstance(told, dict) or told.get("schema") is None:
        raise Refusal("response_format.json_schema must be an object with a schema", field)
    _check_names(told, SCHEMA, "response_format.json_schema")
    return field, "json", told["schema"]


def _of_vllm(given: dict | None) -> tuple[str, str, Any] | None:
    """vLLM's `structured_outputs` -> (field, kind, value)."""
    field = "structured_outputs"
    if given is None:
        return None
    _check_names(given, KINDS, field)
    found = {kind: value for kind, value in given.items() if value is not None and value is not False}
    if len(found) != 1:
        raise Refusal(f"structured_outputs must have one of {', '.join(KINDS)}, got {shown(sorted(found))}", field)
    ((kind, value),) = found.items()
    if kind == "regex" and not isinstance(value, str):
        raise Refusal(f"structured_outputs.regex must be a text, got {shown(value)}", field)
    return (field, "json", None) if kind == "json_object" else (field, kind, value)


def _check_names(given: dict, known: tuple[str, ...], where: str) -> None:
    for name in given:
        if name not in known:
            raise Refusal(f"{where} has no {shown(name)}", where.partition(".")[0], code="unsupported_parameter")
