"""Verification: which drafted tokens are emitted. Lossy rules say so in their `lossless`.

conf/verifier/NAME.yaml registers a rule: its `_target_` is a frozen dataclass, whose fields are the rule's settings.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast

from specdec import own, registry
from specdec.schema import shown
from specdec.structs import Verifier
from specdec.verify.rules import BlockVerification, MultiRoundRejection, TwoThresholds, TypicalAcceptance
from specdec.verify.walk import Rule, SampleAndMatch, sample_and_match

VERIFIERS: dict[str, Any] = {name: registry.target("verifier", name) for name in registry.names("verifier")}


def make_verifier(name: str = "match", **settings: float) -> Verifier:
    """Return the verifier of this name in conf/verifier, with `settings` instead of the file's.

    Args:
        name: A name in conf/verifier, or your own class or function: FILE.py:NAME, or an entry point.
        **settings: Settings of the verifier, such as epsilon=0.09.

    Raises:
        ValueError: The name or a setting does not exist, or a value is out of range.
    """
    if not isinstance(name, str):
        raise ValueError(f"verifier must be a name such as match, got {shown(name)}")
    part = None if name in VERIFIERS else own.find("verifier", name)
    if part is not None:
        return cast(Any, own.make(name, part, cast(Any, Rule), **settings))
    known = {f.name: f for f in fields(registry.target("verifier", name))}
    if unknown := [setting for setting in settings if setting not in known]:
        has = f"has {' and '.join(known)}" if known else "has no settings"
        raise ValueError(f"the verifier {name!r} {has}, and no {unknown[0]!r}")
    return registry.make("verifier", name, **settings)


def in_words(verifier: Verifier) -> str:
    """Return the name and settings of a verifier for users: 'match', 'typical (epsilon 0.09, alpha 0.3)'."""
    name = next((name for name, rule in VERIFIERS.items() if rule is type(verifier)), type(verifier).__name__)
    stated: list = [(f.name, getattr(verifier, f.name)) for f in fields(verifier)] if is_dataclass(verifier) else []
    settings = ", ".join(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in stated)
    return f"{name} ({settings})" if settings else name


@dataclass(frozen=True)
class VerifierSettings:
    """Name and settings of a verifier, from command lines and settings files."""

    verifier: str | None = None
    verifier_args: str | None = None

    def make(self) -> Verifier:
        """Return the verifier. Raises ValueError for a name, a setting or a value that does not exist."""
        settings = {}
        for part in self.verifier_args.split(",") if self.verifier_args else ():
            name, _, number = part.partition("=")
            try:
                settings[name.strip()] = float(number)
            except ValueError:
                raise ValueError(f"--verifier-args takes name=number,name=number, and not {part!r}") from None
        return make_verifier(self.verifier or "match", **settings)


__all__ = [
    "VERIFIERS",
    "BlockVerification",
    "MultiRoundRejection",
    "Rule",
    "SampleAndMatch",
    "TwoThresholds",
    "TypicalAcceptance",
    "VerifierSettings",
    "in_words",
    "make_verifier",
    "sample_and_match",
]
