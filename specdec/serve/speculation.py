"""What a request may say of its own speculation: none, or fewer levels of the server's tree."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from specdec.schema import check_value, ranged, shown
from specdec.serve.protocol import Refusal

NAME = "speculative"
FIRST, DEEPEST = 0, 1 << 20


@dataclass(frozen=True)
class Wish:
    """The field `speculative` of a request."""

    off: bool = False
    steps: int | None = ranged(FIRST, DEEPEST, None)
    draft: str | None = None
    tree: str | None = None
    topk: int | None = ranged(1, DEEPEST, None)
    num_draft_tokens: int | None = ranged(1, DEEPEST, None)


@dataclass(frozen=True)
class Speculation:
    """What a server has: the drafter's name and its largest tree; without a drafter the name is None."""

    draft: str | None = None
    tree: str = ""
    topk: int = 0
    steps: int = 0
    num_draft_tokens: int = 1

    def steps_of(self, asked: Mapping[str, Any] | None) -> int | None:
        """How many levels of the tree are to count for a request; None for all. `Refusal` for what this server does not
        have: all rows are drafted for together, by one drafter and in one tree."""
        if not asked:
            return None
        wish = _read(asked)
        if wish.off:
            if others := sorted(set(asked) - {"off"}):
                raise Refusal(f"{NAME}.off contradicts {NAME}.{others[0]}", NAME)
            return 0
        if wish.draft not in (None, self.draft):
            has = "decodes plainly" if self.draft is None else f"drafts with {self.draft!r}"
            raise Refusal(f"{NAME}.draft is {shown(wish.draft)}, but this server {has}", NAME)
        for name in ("tree", "topk"):
            if getattr(wish, name) not in (None, getattr(self, name)):
                raise self._other(name, getattr(wish, name))
        steps = wish.steps
        if wish.num_draft_tokens not in (None, self.num_draft_tokens):
            chain = wish.num_draft_tokens - 1
            if self.topk != 1 or steps not in (None, chain):
                raise self._other("num_draft_tokens", wish.num_draft_tokens)
            steps = chain
        if steps is not None and steps > self.steps:
            raise Refusal(f"{NAME}.steps is {steps}, but this server's tree has {self.steps} levels", NAME)
        return steps

    def _other(self, name: str, wanted: Any) -> Refusal:
        has = f"its tree is {self.tree}" if self.draft is not None else "it decodes plainly"
        return Refusal(
            f"{NAME}.{name} is {shown(wanted)}, which this server does not have: {has}, of which a request may "
            "take fewer steps",
            NAME,
        )


def _read(asked: Mapping[str, Any]) -> Wish:
    known = {f.name: f for f in fields(Wish)}
    for name, value in asked.items():
        if name not in known:
            raise Refusal(f"{NAME} has no {shown(name)}; it has {', '.join(known)}", NAME)
        try:
            check_value(known[name], value, f"{NAME}.{name}")
        except ValueError as error:
            raise Refusal(str(error), NAME) from None
    return Wish(**asked)
