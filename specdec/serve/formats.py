"""Structured output: the fields of a request that set the form of its text, as a grammar."""

from specdec.model.target import Target
from specdec.sampling.grammar import Grammar
from specdec.sampling.json_grammar import grammars_of
from specdec.serve.protocol import Ask
from specdec.serve.refusal import Refusal


def grammar_of(ask: Ask, target: Target) -> Grammar | None:
    """The grammar of all texts of a request; None for any text. `Refusal` for a form that is not implemented."""
    wanted = []
    if ask.response_format is not None and ask.response_format.type != "text":
        schema = ask.response_format.json_schema if ask.response_format.type == "json_schema" else None
        wanted.append(("response_format", "json", schema and schema.value))
    if ask.structured_outputs is not None:
        wanted += [("structured_outputs", *given) for given in ask.structured_outputs.given.items()]
    if not wanted:
        return None
    if len(wanted) > 1:
        raise Refusal("structured_outputs contradicts response_format", "structured_outputs")
    ((field, kind, value),) = wanted
    if ask.ignore_eos:
        raise Refusal(f"ignore_eos contradicts {field}: a text ends where its form is complete", "ignore_eos")
    try:
        grammars = grammars_of(target)  # the first takes a second
        return grammars.regex(value) if kind == "regex" else grammars.json(None if kind == "json_object" else value)
    except ValueError as error:
        raise Refusal(str(error), field) from None
