"""Training objectives: Objective(drafter, features of a batch) -> (loss, metrics).

Metrics are means over positions, with one entry for each step of the unroll. The metric `counted` [] is the number of
positions in the first step's mean: the trainer weighs the batches of an optimiser step by it. `counts`
[metrics,steps] are such numbers for each entry of the other metrics; without them `counted` holds for all.

The teacher is the target, whose distribution p is learnt. The student is the drafter, whose distribution is q.
"""
