"""Several processes as one run's world: who they are, how they split the batch, and what they tell each other."""

import atexit
import gc
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import Optimizer

from . import checkpoint, launch, sharding, shards
from .arrangement import Arrangement
from .errors import DivergedError, InputError, InterruptedRunError, SaveError
from .model import Transformer
from .world import World

T = TypeVar("T")


class Parallel(World):
    """The processes that torchrun started, or this one alone; made, used and left by all of them at once.

    Each has a GPU of its own where every machine has as many as processes (NCCL), and else the CPU (gloo). What is said
    between them outside the model is a few numbers on the CPU.
    """

    checkpoint_name = checkpoint.FOLDER
    is_sharded = True

    def __init__(self, arrangement: Arrangement) -> None:
        self.arrangement = arrangement
        on_gpus = torch.cuda.device_count() >= launch.processes_here()
        self.device = torch.device("cuda", launch.rank_here()) if on_gpus else torch.device("cpu")
        if on_gpus:
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
        if launch.by_torchrun():
            dist.init_process_group(backend)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(backend, store=store, rank=0, world_size=1)
        # gloo's threads must end before the interpreter, or the process aborts; cycles in the model keep them alive.
        atexit.register(gc.collect)
        self.is_first = dist.get_rank() == 0
        shape = (arrangement.data, arrangement.tensor)
        self.mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("data", "tensor"))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the connections, unless for an error that the others may not share: they could wait for ever."""
        if error is None or isinstance(error, (InputError, SaveError, DivergedError, InterruptedRunError)):
            dist.destroy_process_group()

    def place(self, model: Transformer) -> None:
        """Move the model to the device, then split it."""
        sharding.shard(model.to(self.device), self.mesh["data"], self.mesh["tensor"], fsdp=self.arrangement.fsdp)

    def split(self, whole: Tensor) -> Tensor:
        """Return a DTensor, its rows split between the groups."""
        return distribute_tensor(whole.to(self.device), self.mesh, [Shard(0), Replicate()])

    def share(self, windows: Tensor) -> Tensor:
        """Return this process's rows, on its device: a block of them, or all where they do not come out even."""
        parts = self.arrangement.data
        if len(windows) % parts == 0:
            windows = windows.chunk(parts)[self.mesh.get_local_rank("data")]
        return windows.to(self.device)

    def mean(self, x: float) -> float:
        """Return the mean of the processes' x, the same bits on all."""
        total = torch.tensor(x, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item() / self.arrangement.processes

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any process."""
        return self.mean(flag) > 0

    def first(self, value: T) -> T:
        """Return the first process's value, a plain Python one."""
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raise on all processes the InputError or SaveError that any of them raises inside."""
        own = None
        try:
            yield
        except (InputError, SaveError) as error:
            own = error
        errors: list[Exception | None] = [None] * self.arrangement.processes
        dist.all_gather_object(errors, own)
        for met in errors:
            if met is not None:
                raise met from own

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def save(self, folder: Path, model: Transformer, optimizer: Optimizer, values: dict[str, Any]) -> Path:
        """Write every process's part, then put the whole in its place; raises SaveError on all or none."""
        path = folder / self.checkpoint_name
        fresh = path.with_name(f".{path.name}.new")
        try:
            with self.together():
                if self.is_first:
                    checkpoint.clear(fresh)
            with self.together():
                values = values | shards.save(fresh, model, optimizer)
            with self.together():
                if self.is_first:
                    checkpoint.put_in_place(fresh, path, values)
                    checkpoint.leave_only(path)
        finally:
            if self.is_first:
                shutil.rmtree(fresh, ignore_errors=True)  # what could not be completed
        return path

    def load(self, state: dict[str, Any], model: Transformer, optimizer: Optimizer) -> None:
        """Take this process's part of parameters and optimizer state."""
        with self.together():
            if "model" in state:
                shards.distribute(state, model, optimizer)
            else:
                shards.load(state, model, optimizer)
