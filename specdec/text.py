"""Between text and token ids: prompts in, streamed text out."""

import json
from pathlib import Path

from specdec.model import Target


def clean(text: str) -> str:
    """Bytes of the command line that are not UTF-8 arrive as surrogates, which no tokenizer takes: make them U+FFFD."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def encode_chat(target: Target, messages: list[dict[str, str]]) -> list[int]:
    """Messages -> ids with the chat template of the target, up to where the assistant speaks."""
    text = target.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return target.tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_prompt(target: Target, prompt: str, raw: bool = False) -> list[int]:
    """A prompt -> ids: as a user's message where the tokenizer has a chat template, as plain text if not or if raw."""
    prompt = clean(prompt)
    if not prompt.strip():
        raise ValueError("the prompt is empty; write something after --prompt")
    if target.tokenizer.chat_template and not raw:
        return encode_chat(target, [{"role": "user", "content": prompt}])
    return target.tokenizer(prompt)["input_ids"]


def read_prompts(path: Path) -> list[str]:
    """One prompt a line; or JSON lines with `prompt`, or with `turns`, of which the first is taken."""
    if not path.is_file():
        raise ValueError(f"no such prompt file: {path}")
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
    if not lines:
        raise ValueError(f"{path} holds no prompt")
    if path.suffix not in (".jsonl", ".json"):
        return lines
    return [_prompt_of(line, f"{path} line {number}") for number, line in enumerate(lines, 1)]


def _prompt_of(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    prompt = row.get("prompt") or (row.get("turns") or [None])[0] if isinstance(row, dict) else None
    if not isinstance(prompt, str):
        raise ValueError(f"{where} has neither 'prompt' nor 'turns'")
    return prompt


class TextStream:
    """Token ids -> text as it becomes final: a character whose bytes are not all there yet is held back."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = 0  # ids whose text has been given out
        self.context = 0  # where decoding starts: some tokenizers need the token before to place a space

    def feed(self, ids: list[int]) -> str:
        self.ids += ids
        before = self._decode(self.ids[self.context : self.shown])
        now = self._decode(self.ids[self.context :])
        if len(now) <= len(before) or now.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self.context, self.shown = self.shown, len(self.ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)
