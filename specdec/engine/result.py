"""The result of `Engine.generate`."""

from dataclasses import dataclass

from specdec.engine.sequence import Sequence


@dataclass(repr=False)
class Result:
    """Sequences, with times in seconds."""

    rows: list[Sequence]
    seconds: float  # all of it
    prefill_seconds: float  # until the first token
    parts: dict[str, float]  # seconds in prefill, draft, verify, commit (or round, if replayed), host, output

    @property
    def decode_seconds(self) -> float:
        """Seconds from the first token to the last, except for the observer, capturing and compiling."""
        return self.seconds - self.prefill_seconds - sum(self.parts.get(part, 0.0) for part in ("output", "capture"))

    def __repr__(self) -> str:
        """Return counts: a row holds every token."""
        tokens = sum(len(row.tokens) for row in self.rows)
        return f"Result({len(self.rows)} rows, {tokens} tokens in {self.seconds:.2f} s)"
