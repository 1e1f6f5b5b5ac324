"""From records to samples. Records that are bad, too long or without anything to learn are left out, and counted."""

import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date

from jinja2 import TemplateError
from omegaconf import DictConfig, ListConfig

from specdec.model.language_model import LanguageModel
from specdec.text import writes_date
from specdec.training.data.conversation import Conversation, Message
from specdec.training.data.render import Sample, check_tokenizer, render
from specdec.training.data.sources import Record, read_records

MOST = 256  # conversations that are held out where data.heldout is a share
SILENT = "conversations in which the assistant does not speak left out"


@dataclass
class Tally:
    """Counts what was left out or cut, and why."""

    bad: str = "error"  # what a bad record does: 'error' raises a ValueError that names it, 'skip' leaves it out
    counts: dict[str, int] = field(default_factory=dict)
    first_bad: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError unless `bad` is 'error' or 'skip'."""
        if self.bad not in ("error", "skip"):
            raise ValueError(f"bad must be 'error' or 'skip', got {self.bad!r}")

    def count(self, what: str, number: int = 1) -> None:
        """Add `number` to the count of `what`."""
        if number:
            self.counts[what] = self.counts.get(what, 0) + number

    @contextmanager
    def record(self, where: str) -> Iterator[None]:
        """Wraps the work on one record: a ValueError in it makes the record a bad one."""
        try:
            yield
        except ValueError as error:
            reason = f"{where}: {error}"
            if self.bad == "error":
                raise ValueError(
                    f"{reason} (--bad skip, or data.bad=skip in training, leaves such records out)"
                ) from None
            self.count("bad records left out")
            self.first_bad = self.first_bad or reason

    def report(self) -> None:
        """Print one line of counts on standard error, if there are any."""
        if self.counts:
            first = f" (the first: {self.first_bad})" if self.first_bad else ""
            print("data: " + ", ".join(f"{n} {what}" for what, n in self.counts.items()) + first, file=sys.stderr)


def read_messages(records: Iterable[Record], tokenizer, tally: Tally) -> Iterator[tuple[str, Conversation]]:
    """Yield the place of each good record, and its messages. Raises ValueError if the tokenizer cannot render them."""
    checked = False
    for record in records:
        messages = Conversation([])
        with tally.record(record.where):
            messages = record.messages()
        if not messages:
            continue
        if not checked and messages[0]["role"] != "text":
            check_tokenizer(tokenizer)
            checked = True
        yield record.where, messages


def read_samples(
    records: Iterable[Record],
    target: LanguageModel,
    *,
    max_length: int,
    too_long: str,
    tally: Tally,
    day: str | None = None,
) -> Iterator[Sample]:
    """Yield the samples of the records by the tokenizer and chat template of the target.

    too_long: treatment of samples of more than `max_length` tokens, 'cut' or 'drop'. day: the date that a chat template
    writes as today's. Raises ValueError if the tokenizer does not belong to the target.
    """
    if too_long not in ("cut", "drop"):
        raise ValueError(f"too_long must be 'cut' or 'drop', got {too_long!r}")
    for where, messages in read_messages(records, target.tokenizer, tally):
        samples: list[Sample] = []
        with tally.record(where):
            samples = _samples(target.tokenizer, messages, max_length, too_long, tally, day)
        for sample in samples:
            if sample.ids.max() >= target.vocab:
                raise ValueError(
                    f"{where}: the tokenizer gives token {sample.ids.max()}, but the target's vocabulary has "
                    f"{target.vocab} tokens only: the tokenizer does not belong to the target"
                )
            yield sample


def _samples(
    tokenizer, messages: list[Message], max_length: int, too_long: str, tally: Tally, day: str | None = None
) -> list[Sample]:
    """Render messages. What has nothing to learn is left out and counted."""
    try:
        rendered = render(tokenizer, messages, tally.count, day)
    except TemplateError:  # for example if the user must speak first
        tally.count("conversations that the chat template refuses left out")
        return []
    samples = []
    for sample in rendered:
        if len(sample.ids) > max_length and too_long == "drop":
            tally.count(f"conversations of more than {max_length} tokens left out")
            continue
        tally.count(f"conversations cut at {max_length} tokens", len(sample.ids) > max_length)
        sample = Sample(sample.ids[:max_length], sample.mask[:max_length])
        if sample.mask.any():
            samples.append(sample)
        else:
            tally.count(SILENT)
    tally.count(SILENT, not rendered)
    return samples


def load_samples(config: DictConfig, target: LanguageModel) -> list[Sample]:
    """The numbered samples that a configuration of conf/data describes: the same settings give the same samples."""
    if not config.path:
        raise ValueError(
            "no training data: give data.path=FILE (ShareGPT or OpenAI form; .json, .jsonl or .jsonl.xz), the name of "
            "a data set on the hub, or a preset as data=ultrachat"
        )
    if config.get("day") is None and target.tokenizer is not None and writes_date(target.tokenizer):
        config.day = date.today().isoformat()
        print(f"note: the chat template writes today's date: data.day={config.day} repeats it", file=sys.stderr)
    names = list(config.path) if isinstance(config.path, ListConfig) else [str(config.path)]
    source = {"split": config.split, "subset": config.subset, "streaming": config.streaming}
    tally = Tally(config.bad)
    found = read_samples(
        itertools.chain.from_iterable(read_records(name, **source) for name in names),
        target,
        max_length=min(config.max_length, target.config.context),
        too_long=config.too_long,
        tally=tally,
        day=config.get("day"),
    )
    samples = list(itertools.islice(found, config.limit))
    tally.report()
    if not samples:
        raise ValueError(
            "the data hold no conversation in which the assistant speaks; specdec data regenerate answers prompts"
        )
    for number, sample in enumerate(samples):
        sample.number = number
    return samples


def hold_out(samples: list[Sample], heldout: float) -> tuple[list[Sample], list[Sample]]:
    """Split the samples into training samples and held-out samples, which are the last ones.

    `heldout` is a number of samples, or a share below 1. A share holds out at least one sample and at most `MOST`.
    """
    if not 0 <= heldout < float("inf") or (heldout > 1 and heldout != int(heldout)):
        raise ValueError(f"data.heldout must be a number of conversations or a share below 1, got {heldout}")
    count = min(max(round(heldout * len(samples)), 1), MOST) if 0 < heldout < 1 else int(heldout)
    if len(samples) <= count:
        raise ValueError(
            f"the data hold {len(samples)} conversations, of which data.heldout={heldout} holds out {count}, and none "
            "is left to train on: give more data, or a smaller data.heldout, such as 0"
        )
    cut = len(samples) - count
    return samples[:cut], samples[cut:]
