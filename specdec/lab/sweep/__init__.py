"""Drafters and trees side by side on prompts: benchmarks, sweeps with a report, comparisons."""
