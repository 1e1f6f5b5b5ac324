"""Replay: what any tree would have accepted, from one recording of what a drafter proposes along texts."""

from specdec.lab.replay.rules import likely, while_likely
from specdec.recording import Recording
from specdec.trees.dynamic import Rule
from specdec.trees.record import answers_to, record

__all__ = ["Recording", "Rule", "answers_to", "likely", "record", "while_likely"]
