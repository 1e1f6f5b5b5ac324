"""The processes that a launcher such as torchrun has started: their numbers, agreement between them, and output.

Processes that share one target compute the same thing. So only number 0 prints and writes, and only the first process
that meets an error reports it.
"""

import argparse
import atexit
import os
import sys
from contextlib import suppress
from datetime import timedelta

GONE = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")  # of errors when another process ends


def world() -> int:
    """Return the number of processes; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def rank() -> int:
    """Return the number of this process, from 0."""
    return int(os.environ.get("RANK") or 0)


def leave() -> None:
    """Close the connections between processes. Their threads can abort a process that ends while they run."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


if world() > 1:
    atexit.register(leave)


def silence() -> None:
    """Print nothing from now on, unless this process is number 0. Errors are still printed (`cli.errors`)."""
    if rank():
        sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (to the end of the process)


def share_output(args: argparse.Namespace, *outputs: str) -> None:
    """Let process 0 print and write alone: the others are silent, and write none of `outputs`, flags of a command.

    Raises ValueError if several processes were started without --tp-plan.
    """
    if world() == 1:
        return
    if args.tp_plan is None:
        raise ValueError(
            f"{world()} processes were started: give --tp-plan auto to share the target among them, or start one"
        )
    if rank():
        for name in outputs:
            setattr(args, name, None)
    silence()


def largest(values: list[int]) -> list[int]:
    """Return the largest of all processes' values, place by place; every process must call this."""
    import torch
    from torch import distributed

    shared = torch.tensor(values, device="cuda" if distributed.get_backend() == "nccl" else "cpu")
    distributed.all_reduce(shared, distributed.ReduceOp.MAX)
    return shared.tolist()


def first_to_end() -> bool:
    """Return whether no other process has reported yet why all of them end.

    A process alone is the first. So is every process under a launcher without torchrun's store.
    """
    if world() == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    with suppress(Exception):  # the store may be gone with the machine that held it
        from torch.distributed import TCPStore

        place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(*place, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
        return store.add(f"specdec/ended/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", 1) == 1
    return True
