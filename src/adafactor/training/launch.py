"""How this process was started: alone, or by torchrun as one of several. Torchrun's variables say so; no torch."""

import os


def by_torchrun() -> bool:
    """Whether torchrun started this process, be it as the only one.

    RANK and WORLD_SIZE alone are not taken for it: cluster jobs set them for whole machines.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def _number(name: str, alone: int) -> int:
    return int(os.environ.get(name, alone)) if by_torchrun() else alone


def processes() -> int:
    """Return how many processes the job has, on all machines."""
    return _number("WORLD_SIZE", 1)


def processes_here() -> int:
    """Return how many of them are on this machine."""
    return _number("LOCAL_WORLD_SIZE", 1)


def rank_here() -> int:
    """Return this process's place among those on this machine, from 0."""
    return _number("LOCAL_RANK", 0)


def is_first() -> bool:
    """Whether this process is the job's first, the one that speaks for all."""
    return _number("RANK", 0) == 0
