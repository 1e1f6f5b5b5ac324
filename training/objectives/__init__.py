"""Training objectives, one file each: Objective(drafter, features of a batch) -> (loss, metrics)."""
