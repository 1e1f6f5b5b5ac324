"""Verification: which drafted tokens are emitted. One file per rule; lossy rules say so in their `lossless`."""

from dataclasses import fields

from specdec.types import Verifier
from specdec.verify.block import BlockVerification
from specdec.verify.match import SampleAndMatch, sample_and_match
from specdec.verify.rejection import MultiRoundRejection
from specdec.verify.thresholds import TwoThresholds
from specdec.verify.typical import TypicalAcceptance

VERIFIERS = {
    "match": SampleAndMatch,
    "rejection": MultiRoundRejection,
    "block": BlockVerification,
    "typical": TypicalAcceptance,
    "sglang": TwoThresholds,
}


def make_verifier(name: str = "match", **settings: float) -> Verifier:
    """A verifier by its name in `VERIFIERS`; ValueError for a name or a setting that does not exist."""
    if name not in VERIFIERS:
        raise ValueError(f"there is no verifier {name!r}: choose one of {', '.join(VERIFIERS)}")
    known = [f.name for f in fields(VERIFIERS[name])]
    for setting in settings:
        if setting not in known:
            has = f"has {' and '.join(known)}" if known else "has no settings"
            raise ValueError(f"the verifier {name!r} {has}, and no {setting!r}")
    return VERIFIERS[name](**settings)


__all__ = [
    "VERIFIERS",
    "BlockVerification",
    "MultiRoundRejection",
    "SampleAndMatch",
    "TwoThresholds",
    "TypicalAcceptance",
    "make_verifier",
    "sample_and_match",
]
