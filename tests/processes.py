"""Processes that run a test's function together: started once, since that takes seconds; stopped where they hang."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

TIMEOUT = 120
"""Seconds that a function has."""


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    warnings.simplefilter("error")
    # Of torch's own import and of its checkpoints, not of ours.
    warnings.filterwarnings("ignore", module=r"torch\.")
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT)
    )
    while True:
        module, name, args, kwargs = pipe.recv()
        try:
            result = getattr(importlib.import_module(module), name)(*args, **kwargs)
            pipe.send((True, result))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Processes:
    """So many processes of one gloo group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[Any] = []
        self._pipes: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(rank, self.size, str(store), theirs), daemon=True)
            worker.start()
            self._workers.append(worker)
            self._pipes.append(ours)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, **kwargs: Any) -> list[Any]:
        """Call a module's function in all processes; returns what each returns.

        Raises:
            AssertionError: it has raised something in one of them, or not come back in time.
        """
        if not self._workers:
            self._start()
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, args, kwargs))
        results, failures = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout):
                failures.append(f"\nprocess {rank} hangs")
                # One that waits for it has nothing more to say.
                timeout = 0
                continue
            try:
                well, result = pipe.recv()
            except EOFError:
                well, result = False, "it is gone"
            (results if well else failures).append(result if well else f"\nprocess {rank}: {result}")
        if failures:
            # Some may be in other collectives than the others now.
            self.stop()
            raise AssertionError("".join(failures))
        return results

    def stop(self) -> None:
        """Stop them; the next call starts new ones."""
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._workers, self._pipes = [], []


POOLS = {size: Processes(size) for size in (1, 2, 4)}
"""What all test files share."""
