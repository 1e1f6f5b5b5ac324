"""Adaptive policies that no user would want."""

import numpy as np

from specdec.engine.adaptive import Policy


class Restless(Policy):
    """Every depth and every width in turn, plain rounds among them."""

    def __init__(self, steps: int):
        self.depths, self.rounds, self.outcomes = [steps, 0, 0, 0, 1, min(2, steps), 0], 0, []

    def plan(self, rows):
        self.rounds += 1
        return self.depths[self.rounds % len(self.depths)]

    def looks(self):
        return True

    def keep(self, draft):
        width = min([1, 2, 4, 99][self.rounds % 4], draft.nodes)
        scores = (draft.ancestors * draft.edges[:, None]).sum(-1)
        return np.sort(np.argsort(-scores, 1, kind="stable")[:, :width], 1)

    def learn(self, outcome):
        self.outcomes.append(outcome)


class Depths(Restless):
    """Every depth in turn, and each draft is verified whole."""

    cuts = False

    def looks(self):
        return False
