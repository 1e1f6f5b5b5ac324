"""The training loop: steps, processes, optimisers, log, checkpoints, evaluation, and what a run takes of a machine."""
