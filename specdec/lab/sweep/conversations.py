"""The conversations that a target has on a benchmark's questions."""

from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.engine.engine import Engine, Result
from specdec.lab.sweep.benchmarks import Question
from specdec.model.target import Target
from specdec.structs import Sampling
from specdec.text import encode_chat

TURN_BREAK = "\n\n"  # between an answer and the next turn where there is no chat template


@dataclass(eq=False)
class Dialogue:
    """One question while it is answered, in the target's chat template, or raw: turns and answers as one text."""

    target: Target
    question: Question
    raw: bool
    template: dict  # further variables of the chat template
    number: int  # of the question
    messages: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # raw: the text so far

    def ask(self) -> list[int]:
        """The ids of a prompt that ends with the next turn and holds everything before."""
        turn, first = self.question.turns[self.asked], not self.messages
        new = [{"role": "system", "content": self.question.system}] if first and self.question.system else []
        new.append({"role": "user", "content": turn})
        self.messages += new
        if not self.raw:
            return encode_chat(self.target, self.messages, **self.template)
        text = ("" if first else TURN_BREAK) + TURN_BREAK.join(message["content"] for message in new)
        self.ids = self.ids + self.target.tokenizer(text, add_special_tokens=first)["input_ids"]
        return self.ids

    def hear(self, tokens: list[int]) -> None:
        """Take in the target's answer. tokens: with its end-of-text token."""
        if self.raw:
            self.ids = self.ids + [t for t in tokens if t not in self.target.eos]
        text = self.target.tokenizer.decode(tokens, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": text})

    @property
    def asked(self) -> int:
        return sum(m["role"] == "user" for m in self.messages)

    @property
    def over(self) -> bool:
        return self.asked == len(self.question.turns)


def template_settings(target: Target, raw: bool, thinking: bool | None) -> tuple[bool, dict]:
    """(raw, variables of the chat template), for prompts that are raw where there is no template.

    Raises ValueError if the template has no switch for thinking and one is asked for."""
    template = target.tokenizer.chat_template
    raw = raw or not template
    if thinking is None:
        return raw, {}
    if raw or "enable_thinking" not in str(template):
        why = "the prompts are raw" if raw else "the target's chat template has no switch enable_thinking"
        raise ValueError(f"thinking was set, but {why}: leave thinking=null")
    return raw, {"enable_thinking": thinking}


def converse(
    engine: Engine,
    questions: list[Question],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    batch_size: int = 1,
    raw: bool = False,
    template: dict | None = None,
    name: Callable[[list[str], list[str | None]], None] = lambda ids, categories: None,
    observer: Callable | None = None,
    progress: Callable[[], None] = lambda: None,
) -> tuple[list[Result], int]:
    """Hold every conversation: a turn's prompt holds the turns before it with the target's own answers.

    `batch_size` questions are decoded together, turn by turn. A conversation ends early where its next prompt and
    max_new_tokens do not fit into the target's context. name: told before each call of the engine which questions it
    decodes (`Recorder.name`). Conversation number i has the seed (seed, i). progress: called after each batch.

    Returns the engine's results in order, and the number of turns that were left out.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    results, left_out = [], 0
    for first in range(0, len(questions), batch_size):
        batch = enumerate(questions[first : first + batch_size], first)
        dialogues = [Dialogue(engine.target, question, raw, template or {}, number) for number, question in batch]
        while dialogues:
            prompts = [(d, d.ask()) for d in dialogues]
            fitting = [(d, ids) for d, ids in prompts if len(ids) + max_new_tokens <= engine.target.config.context]
            dialogues = [d for d, _ in fitting]
            left_out += sum(1 + len(d.question.turns) - d.asked for d, _ in prompts if d not in dialogues)
            if not fitting:
                break
            name([d.question.id for d in dialogues], [d.question.category for d in dialogues])
            how = {"max_new_tokens": max_new_tokens, "sampling": sampling, "observer": observer}
            result = engine.generate([ids for _, ids in fitting], seed=[(seed, d.number) for d in dialogues], **how)
            results.append(result)
            for dialogue, row in zip(dialogues, result.rows, strict=True):
                dialogue.hear(row.tokens)
            dialogues = [d for d in dialogues if not d.over]
        progress()
    return results, left_out
