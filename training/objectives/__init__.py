"""Training objectives: Objective(drafter, features of a batch) -> (loss, metrics).

Metrics are means over positions, with one entry per step; `counted` [] beside them is the number of positions behind
the first step's mean, by which the trainer weights a batch among those of a step.
"""
