"""Speculation that knows its load: how deep to draft for the rows at hand, and which drafted nodes to verify.

A policy sees what is known before the target has answered: the number of rows, what earlier rounds accepted, and what
the drafter says of its own nodes. Engine, server and replay ask the same `Policy` (docs/adaptive.md).
"""

from specdec.adaptive.curve import Curve
from specdec.adaptive.estimators import ESTIMATORS, Calibrated, Confident, Estimator, Margin, Told
from specdec.adaptive.policy import Draft, Fixed, Outcome, Policy
from specdec.adaptive.rates import Ema, Rates
from specdec.adaptive.survival import Survival
from specdec.adaptive.table import Table

NAMES = ("fixed", "table", "ema", "survival")

__all__ = [
    "ESTIMATORS",
    "NAMES",
    "Calibrated",
    "Confident",
    "Curve",
    "Draft",
    "Ema",
    "Estimator",
    "Fixed",
    "Margin",
    "Outcome",
    "Policy",
    "Rates",
    "Survival",
    "Table",
    "Told",
]
