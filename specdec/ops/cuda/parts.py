"""Into how many parts a kernel cuts its work, so that it fills a GPU once. This file is no kernel by itself."""

import functools

import torch


@functools.cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device: 132 on an H100, and 1 on the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def part_count(pieces: int, fit: int, *most: int) -> int:
    """Return the number of parts of a piece: the largest power of two that exceeds none of `most`, and 1 at least.

    All parts of `pieces` pieces are no more than the `fit` programs that a device runs at once: those beyond would wait
    for a second wave.
    """
    return 1 << max(min(fit // max(pieces, 1), *most), 1).bit_length() - 1
