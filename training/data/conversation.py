"""Records of data sets -> conversations in OpenAI's form. What cannot be used is refused by its name."""

import json
from collections.abc import Iterable
from typing import Any

from specdec.schema import shown
from specdec.text import ROLES, clean

Message = dict[str, Any]
SPEAKERS = ROLES | {"tool": "tool", "observation": "tool", "developer": "developer", "function_call": "assistant"}
# What a chat template may read of a turn besides its content
CARRIED = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "tool_call_id", "name")
LOSS = ("weight", "train", "loss", "mask")  # names of OpenAI, Axolotl, ms-swift; none of these has 'mask'
UNUSED = ("images", "image", "videos", "video", "audios", "audio", "functions", "documents", "refusal")


class Conversation(list[Message]):
    """The messages of one record, at least one, and the tools that it offers. A plain text has one of role 'text'.

    A message has `role` and `content`, the fields of `CARRIED` in the record, `weight` (0: an answer without training
    tokens), and for an answer of `specdec data regenerate` `tokens` and `finish_reason`.
    """

    def __init__(self, messages: Iterable[Message], tools: list | None = None):
        """Copy the messages, and store the tools that the conversation offers."""
        super().__init__(messages)
        self.tools = tools


def conversation_of(row: dict) -> Conversation:
    """Read a record in one of the four forms of `sources.read_records`. Raises ValueError without saying where."""
    for name in UNUSED:
        if row.get(name):
            raise ValueError(f"the field {name!r} of a record is not supported: remove it, or leave the record out")
    if "conversations" in row or "messages" in row:
        turns = row.get("conversations") or row.get("messages")
        if not isinstance(turns, list) or not turns:
            raise ValueError("the conversation is empty")
        return _talk(row, [_message(turn) for turn in turns])
    if isinstance(row.get("text"), str):
        extra = next((name for name in ("system", "system_prompt", "tools") if row.get(name)), None)
        if extra is not None:
            raise ValueError(f"a plain 'text' has no place for the field {extra!r}: give 'messages'")
        return Conversation([{"role": "text", "content": clean(row["text"])} | _said(row)])
    prompt = row.get("turns") or row.get("prompt")
    first = prompt[0] if isinstance(prompt, list) and prompt else prompt
    if isinstance(first, str):
        return _talk(row, [{"role": "user", "content": clean(first)}])
    if isinstance(prompt, list) and isinstance(first, dict):  # preference data: the messages up to the answer
        return _talk(row, [_message(turn) for turn in prompt])
    raise ValueError("none of 'conversations' (ShareGPT), 'messages' (OpenAI), 'text', 'turns' and 'prompt'")


def _talk(row: dict, messages: list[Message]) -> Conversation:
    """Return the messages after the record's system prompt, with the record's tools."""
    system, tools = row.get("system") or row.get("system_prompt"), row.get("tools")
    if system and not isinstance(system, str):
        raise ValueError(f"the field 'system' must be a text, got {shown(system)}")
    if system and messages[0]["role"] in ("system", "developer"):
        raise ValueError("the record has a field 'system' and a turn by the system: keep one of them")
    if isinstance(tools, str) and tools.strip():
        tools = _json(tools, "tools")
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"the field 'tools' must be a list of objects, got {shown(tools)}")
    first = [{"role": "system", "content": clean(system)}] if system else []
    return Conversation([*first, *messages], tools or None)


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"the field {name!r} is a text that is no JSON: {shown(text)}") from None


def _message(turn: dict) -> Message:
    if not isinstance(turn, dict):
        raise ValueError(f"a turn is not an object: {shown(turn)}")
    role = turn.get("from", turn.get("role"))
    if not isinstance(role, str) or role not in SPEAKERS:
        raise ValueError(f"a turn by {shown(role)}; known are {', '.join(SPEAKERS)}")
    given = turn.get("value", turn.get("content"))
    if given is None and not any(turn.get(name) for name in CARRIED):  # calls of tools have no content
        raise ValueError(f"a turn by {role!r} has neither 'value' nor 'content'")
    for name in UNUSED:
        if turn.get(name):
            raise ValueError(f"the field {name!r} of a turn is not supported: remove it, or leave the record out")
    content = _content(given)
    message: Message = {"role": SPEAKERS[role], "content": content}
    if role == "function_call":  # LLaMA-Factory's form: the value is the call
        if not isinstance(content, str):
            raise ValueError("the value of a function_call must be a text, the call in JSON")
        call = _json(content, "function_call")
        calls = [{"type": "function", "function": c} for c in (call if isinstance(call, list) else [call])]
        message = {"role": "assistant", "content": "", "tool_calls": calls}
    message |= {name: turn[name] for name in CARRIED if turn.get(name)}
    return message | _weight(turn, message["role"]) | (_said(turn) if message["role"] == "assistant" else {})


def _content(content: Any) -> str | list:
    if isinstance(content, str | None):
        return clean(content or "")
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        other = next((part for part in content if part.get("type") != "text"), None)
        if other is not None:
            raise ValueError(f"a content part of type {shown(other.get('type'))} is not supported; only 'text' is")
        if all(isinstance(part.get("text"), str) for part in content):
            parts = [{"type": "text", "text": clean(part["text"])} for part in content]
            return parts[0]["text"] if len(parts) == 1 else parts
    raise ValueError(f"a turn's content must be text or a list of text parts, got {shown(content)}")


def _weight(turn: dict, role: str) -> dict[str, int]:
    """Return the weight of an answer's loss, 0 or 1, if the turn gives one."""
    given = {name: turn[name] for name in LOSS if turn.get(name) is not None}
    for name, value in given.items():
        if value not in (0, 1):
            raise ValueError(f"the field {name!r} of a turn must be 0, 1, true or false, got {shown(value)}")
        if name == "mask":
            raise ValueError("the field 'mask' of a turn is not supported: say 'weight': 0 or 1")
        if value and role != "assistant" and name != "weight":
            raise ValueError(f"the field {name!r} is true in a turn by {role!r}: only answers can be learnt")
    return {"weight": int(min(given.values()))} if given and role == "assistant" else {}


def _said(turn: dict) -> Message:
    """Return the fields that `specdec data regenerate` has added to an answer."""
    tokens, reason = turn.get("tokens"), turn.get("finish_reason")
    if tokens is not None and not (isinstance(tokens, list) and all(type(token) is int for token in tokens)):
        raise ValueError(f"the field 'tokens' of an answer must be a list of token ids, got {shown(tokens)}")
    return ({"tokens": tokens} if tokens else {}) | ({"finish_reason": reason} if isinstance(reason, str) else {})
