"""Which speculation requests may choose: none, or fewer levels of the server's tree."""

from dataclasses import dataclass
from typing import Any

from specdec.engine.engine import Engine
from specdec.schema import shown
from specdec.serve.protocol import Wish
from specdec.serve.refusal import Refusal

NAME = "speculative"


@dataclass(frozen=True)
class Speculation:
    """The drafter's name and the largest tree of a server; without a drafter the name is None."""

    draft: str | None = None
    tree: str = ""
    topk: int = 0
    steps: int = 0
    num_draft_tokens: int = 1
    adaptive: str | None = None  # the policy that chooses how much of the tree each round drafts

    @classmethod
    def of(cls, engine: Engine, draft: str | None = None, tree: str | None = None) -> "Speculation":
        """What an engine drafts. draft, tree: the names that the server's command has for them."""
        if engine.policy is None:
            return cls()
        shape = engine.policy.topk, engine.policy.steps, engine.policy.num_draft_tokens
        adaptive = None if engine.adaptive is None else engine.adaptive.name
        return cls(draft or type(engine.drafter).__name__, tree or "/".join(map(str, shape)), *shape, adaptive)

    def steps_of(self, wish: Wish | None) -> int | None:
        """Return how many levels of the tree count for a request; None for all.

        Raises `Refusal` for other settings of this server, as all rows share one drafter and one tree.
        """
        if wish is None:
            return None
        if wish.off:
            if others := sorted(wish.model_fields_set - {"off", "report"}):
                raise Refusal(f"{NAME}.off contradicts {NAME}.{others[0]}", f"{NAME}.off")
            return 0
        if wish.draft not in (None, self.draft):
            has = "decodes plainly" if self.draft is None else f"drafts with {self.draft!r}"
            raise Refusal(f"{NAME}.draft is {shown(wish.draft)}, but this server {has}", f"{NAME}.draft")
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
            raise Refusal(f"{NAME}.steps is {steps}, but this server's tree has {self.steps} levels", f"{NAME}.steps")
        return steps

    def _other(self, name: str, wanted: Any) -> Refusal:
        has = f"its tree is {self.tree}" if self.draft is not None else "it decodes plainly"
        return Refusal(
            f"{NAME}.{name} is {shown(wanted)}, which this server does not have: {has}, of which a request may "
            "take fewer steps",
            f"{NAME}.{name}",
        )
