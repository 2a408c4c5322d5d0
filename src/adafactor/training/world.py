"""What a run asks of the processes it takes place in. `World` is one process, which has everything whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import checkpoint
from .arrangement import Arrangement
from .model import Transformer

T = TypeVar("T")


class World:
    """One process: nothing to split, to add up or to agree on. `parallel.Parallel` overrides all of it.

    Every method is called by all processes of a job at the same point of the run. `checkpoint_name`: of the checkpoint
    in a run's folder. `is_sharded`: whether the model is split, if only over this process.
    """

    arrangement = Arrangement()
    is_first = True
    is_sharded = False
    checkpoint_name = checkpoint.NAME

    def __enter__(self) -> "World":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def place(self, model: Transformer) -> None:
        """Put the model, the same on all processes, where it is trained, and split it between them."""

    def split(self, whole: Tensor) -> Tensor:
        """Return a tensor split by rows as parameters are, from one that is the same on all processes."""
        return whole

    def share(self, windows: Tensor) -> Tensor:
        """Return the rows that this process computes with: all of them, on every one, where they cannot be split."""
        return windows

    def mean(self, x: float) -> float:
        """Return the mean of the processes' x."""
        return x

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""
        return flag

    def first(self, value: T) -> T:
        """Return the first process's value."""
        return value

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise on all processes the InputError or SaveError that any of them raises inside: nobody waits for it."""
        yield

    def wait(self) -> None:
        """Wait until the device has done what it was asked to, before a clock is read."""

    def save(self, folder: Path, model: Transformer, optimizer: Optimizer, values: dict[str, Any]) -> Path:
        """Write the checkpoint of a run in `folder`, whole or not at all (SaveError); return its path."""
        path = folder / self.checkpoint_name
        state = {**values, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoint.write_atomically(path, lambda file: torch.save(state, file))
        checkpoint.leave_only(path)
        return path

    def load(self, state: dict[str, Any], model: Transformer, optimizer: Optimizer) -> None:
        """Take parameters and optimizer state from what `checkpoint.load` returned, whichever way it was written."""
        if "model" in state:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        else:
            from . import shards  # brings torch.distributed, which one process needs for nothing else

            shards.load(state, model, optimizer)
