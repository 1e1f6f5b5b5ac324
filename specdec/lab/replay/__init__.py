"""Replay: what any tree would have accepted, from one recording of what a drafter proposes along texts."""

from specdec.lab.replay.acceptance import Rule, likely, while_likely
from specdec.lab.replay.recorder import record
from specdec.lab.replay.superset import Superset

__all__ = ["Rule", "Superset", "likely", "record", "while_likely"]
