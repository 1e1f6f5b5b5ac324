"""Measurements: what is compared, on which prompts, and how it is shown."""
