"""Between text and token ids: prompts in, streamed text out."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from io import StringIO
from numbers import Integral
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError

from specdec.cli.reading import check_length, lines_of, open_text, parse_json
from specdec.model.language_model import LanguageModel
from specdec.threads import Made, TimeLimit
from specdec.vocabulary import vocabulary_of

# Roles in OpenAI's messages and in ShareGPT's conversations -> OpenAI's name.
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
         "bing": "assistant", "bard": "assistant", "system": "system"}  # fmt: skip
SPEAKERS = ("system", "developer", "user", "assistant", "tool")
NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
TEMPLATE_SECONDS = 10
LIMIT = TimeLimit()
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]  # a text, the messages of a conversation, or token ids


def clean(text: str) -> str:
    """Replace surrogates, which no tokenizer takes, by U+FFFD: bytes that are not UTF-8, or half a pair in JSON."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def encode_chat(
    target: LanguageModel,
    messages: list[dict[str, Any]],
    tools: list | None = None,
    day: str | None = None,
    **variables,
) -> list[int]:
    """Return the ids of messages, up to the assistant's turn. `variables`: of the chat template."""
    try:
        text = render_chat(target.tokenizer, messages, tools, True, day, **variables)
    except TemplateError as error:
        raise ValueError(f"the target's chat template does not take this conversation: {error}") from None
    return target.tokenizer(text, add_special_tokens=False)["input_ids"]


def render_chat(
    tokenizer, messages: list[dict[str, Any]], tools: list | None = None, answer=False, day=None, **variables
) -> str:
    """Return a conversation as text, with `answer` up to the assistant's turn. Raises TemplateError or ValueError."""
    if day is not None:
        variables |= {"chat_template": dated(tokenizer.get_chat_template(tools=tools), day)}
    how = {"tools": tools, "add_generation_prompt": answer, "tokenize": False} | variables
    return run_template(tokenizer.apply_chat_template, messages, **how)


def run_template(render: Callable[..., Made], *given, **how) -> Made:
    """Return `render(...)`, which runs a chat template. Raises jinja2's TemplateError, else ValueError."""
    try:
        return LIMIT.run(TEMPLATE_SECONDS, render, *given, **how)
    except TimeoutError:
        what = f"the target's chat template takes more than {TEMPLATE_SECONDS} s for one conversation"
        raise ValueError(what) from None
    except (TemplateError, ValueError):
        raise
    except RecursionError:
        raise ValueError("the target's chat template calls itself without end") from None
    except Exception as error:  # the template is a program of somebody else's
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"the target's chat template fails on this conversation: {reason:.200}") from None


def writes_date(tokenizer) -> bool:
    """Return whether a chat template of the tokenizer writes today's date (Llama 3.2's does)."""
    return "strftime_now" in str(tokenizer.chat_template)


def dated(template: str, day: str) -> str:
    """Return a chat template that writes this day (YYYY-MM-DD) where it would write today's date."""
    return NOW.sub(lambda found: json.dumps(datetime.fromisoformat(day).strftime(found[2])), template)


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one or several prompts as a list, where a list of mappings or of numbers is one prompt."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], Mapping | Integral)):
        return [cast(Prompt, prompts)]
    several = cast(Sequence[Prompt], prompts)
    for prompt in several:
        if not isinstance(prompt, str | Sequence) or isinstance(prompt, bytes):
            raise ValueError(f"a prompt must be a text, a list of messages or a list of token ids, got {prompt!r:.60}")
    return list(several)


def encode_prompt(target: LanguageModel, prompt: Prompt, raw: bool = False) -> list[int]:
    """Return the ids of a prompt: a user's message if there is a chat template and not `raw`, else a plain text.

    Messages are a conversation, after which the assistant speaks. Ids stay as they are.
    """
    if not isinstance(prompt, str):
        return _encode_parts(target, prompt)
    if target.tokenizer is None:
        raise ValueError("the target has no tokenizer: give token ids as prompts")
    prompt = clean(prompt)
    if not prompt.strip():
        raise ValueError("the prompt is empty")
    if target.tokenizer.chat_template and not raw:
        return encode_chat(target, [{"role": "user", "content": prompt}])
    return target.tokenizer(prompt)["input_ids"]


def _encode_parts(target: LanguageModel, prompt: Sequence[Mapping[str, str]] | Sequence[int]) -> list[int]:
    """Return the ids of messages, or of token ids."""
    numbers = [int(part) for part in prompt if isinstance(part, Integral)]
    if len(numbers) == len(prompt):
        return numbers
    messages = []
    for part in prompt:
        message: dict[str, Any] = dict(part) if isinstance(part, Mapping) else {}
        if not all(isinstance(message.get(name), str) for name in ("role", "content")):
            wanted = "a prompt is a text, a list of messages with role and content, or token ids"
            raise ValueError(f"{wanted}, and not {part!r:.60}")
        messages.append(message)
    if target.tokenizer is None or not target.tokenizer.chat_template:
        raise ValueError("messages need a tokenizer with a chat template, and this target's has none: give a text")
    template = str(target.tokenizer.chat_template)
    for role in (message["role"] for message in messages):
        if role not in SPEAKERS and f"'{role}'" not in template and f'"{role}"' not in template:
            near = ROLES.get(role.lower()) or next(iter(get_close_matches(role, SPEAKERS)), None)
            meant = f"; did you mean {near!r}?" if near else ""
            raise ValueError(f"a message's role must be one of {', '.join(SPEAKERS)}, got {role!r}{meant}")
    return encode_chat(target, [message | {"content": clean(message["content"])} for message in messages])


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file with one a line, of JSON lines, or of a list in a .json file.

    Of JSON values: `prompt`, the first of `turns`, or the first user message of `messages` or `conversations`.
    """
    with open_text(path, "prompt") as file:
        text = file.read() if path.suffix == ".json" else ""
        if text.lstrip().startswith("["):
            rows = enumerate(parse_json(text, str(path)), 1)
            found = [_prompt_of(row, f"{path} row {number}") for number, row in rows]
        else:
            lines = enumerate(lines_of(StringIO(text) if text else file), 1)
            places = ((f"{path} line {number}", line) for number, line in lines if line.strip())
            found = [_prompt_of(_row(line, where, path.suffix), where) for where, line in places]
    if not found:
        raise ValueError(f"{path} holds no prompt")
    return found


def _row(line: str, where: str, suffix: str) -> object:
    """Return the content of a line: JSON, or the prompt itself."""
    check_length(line, where)
    return parse_json(line, where) if suffix in (".jsonl", ".json") else line.removesuffix("\n")


def _prompt_of(row: object, where: str) -> str:
    if isinstance(row, str):
        check_length(row, where)
        return row
    fields = row if isinstance(row, dict) else {}
    turns = fields.get("turns")
    prompt = fields.get("prompt") or (turns[0] if isinstance(turns, list) and turns else None)
    prompt = prompt or _first_asked(fields.get("messages") or fields.get("conversations"))
    if not isinstance(prompt, str):
        raise ValueError(f"{where} has no text 'prompt', no list 'turns' and no conversation 'messages'")
    check_length(prompt, where)
    return prompt


def _first_asked(messages: object) -> object:
    """Return the user's first message, in OpenAI's or in ShareGPT's words; None if there is none."""
    given = [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
    asked = (m for m in given if ROLES.get(str(m.get("role", m.get("from")))) == "user")
    return next((m.get("content", m.get("value")) for m in asked), None)


class TextStream:
    """Token ids -> text as it becomes final. The text ends before the first stop string; then `stopped` is true.

    Incomplete characters are held back, and so is text that may begin a stop string.
    """

    def __init__(self, tokenizer, stops: Sequence[str] = ()):
        """Begin without text."""
        self.tokenizer, self.stops = tokenizer, stops
        self.vocabulary: Any = vocabulary_of(tokenizer) if tokenizer is not None else None
        self.ids: list[int] = []
        self.start = 0  # decoding starts here, one chunk back: some tokenizers need the token before to place a space
        self.chunk = 0  # where the newest chunk that was given out whole ends
        self.given = 0  # characters of the text from `start` that have been given out
        self.held = ""  # final, but perhaps the beginning of a stop string
        self.stopped = False

    def feed(self, ids: list[int]) -> str:
        """Add ids, and return the text that they make final."""
        self.ids += ids
        end = self._settled()
        text = self._decode(end)
        final = text.rstrip("\N{REPLACEMENT CHARACTER}")
        new, self.given = final[self.given :], max(self.given, len(final))
        if final == text:
            # A tokenizer may strip the first space of what it decodes, so the text before must stay visible.
            chunk = self.tokenizer.decode(self.ids[self.chunk : end], skip_special_tokens=True)
            if chunk:
                self.start = self.chunk
            self.chunk, self.given = max(self.chunk, end), len(chunk or text)
        return self._until_stop(new)

    def end(self) -> str:
        """Return the text that was held back, because no ids follow."""
        return self._until_stop(self._decode(len(self.ids))[self.given :]) + self.held

    def holds_stop(self) -> bool:
        """Return whether the text would stop if nothing more came."""
        if self._settled() == len(self.ids):
            return False
        text = self.held + self._decode(len(self.ids))[self.given :]
        return len(cut_at_stop(text, self.stops)) < len(text)

    def _decode(self, end: int) -> str:
        return self.tokenizer.decode(self.ids[self.start : end], skip_special_tokens=True)

    def _settled(self) -> int:
        """Return the number of ids before a last run of byte tokens: a later byte may make all of it U+FFFD."""
        end = place = len(self.ids)
        while place > self.chunk:
            place -= 1
            if self.vocabulary.is_byte(self.ids[place]):
                end = place
            elif self.ids[place] not in self.vocabulary.special:
                break
        return end

    def _until_stop(self, new: str) -> str:
        if self.stopped:
            return ""
        if not self.stops:
            return new
        text = self.held + new
        cut = cut_at_stop(text, self.stops)
        self.stopped, self.held = len(cut) < len(text), ""
        if self.stopped:
            return cut
        most = min(len(text), max(map(len, self.stops)) - 1)
        length = next((n for n in range(most, 0, -1) if any(stop.startswith(text[-n:]) for stop in self.stops)), 0)
        self.held = text[len(text) - length :]
        return text[: len(text) - length]


class StopStrings:
    """Ends a row (`engine.sequence.Stop`) at the token that completes a string, which may begin within a token."""

    def __init__(self, tokenizer, stops: Sequence[str]):
        """Look for these strings."""
        self.stream = TextStream(tokenizer, stops)

    def add(self, token: int) -> bool:
        """Return whether this token completes a string."""
        self.stream.feed([token])
        return self.stream.stopped or self.stream.holds_stop()


def cut_at_stop(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop string in it."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def check_stops(stops: Sequence[str], tokenizer=True) -> None:
    """Raise ValueError for what is no stop string, and for any without a tokenizer."""
    if stops and tokenizer is None:
        raise ValueError("a stop string needs a target with a tokenizer")
    if any(not isinstance(stop, str) or not stop for stop in stops):
        raise ValueError(f"a stop string needs at least one character, got {list(stops)}")


def decode_row(tokenizer, tokens: list[int], stops: Sequence[str] = ()) -> str:
    """Return the text of tokens without special ones, up to the first stop string. Without a tokenizer: ''."""
    if tokenizer is None:
        return ""
    return cut_at_stop(tokenizer.decode(tokens, skip_special_tokens=True), stops)
