"""The host's time of a step of sharded parameters (FSDP2): ours and AdamW's side by side, and what is sent.

    python benchmarks/sharded.py                  # ten minutes; needs 8 GB of memory
    python benchmarks/sharded.py --processes 4
    python benchmarks/sharded.py --small          # half of it, without the larger models

Starts its own processes, one thread each, of one gloo group on this machine. Writes sharded-HARDWARE.csv to
benchmarks/results. What sharding costs is ours beside ours on the same shards as parameters that nobody else has.
"""

import argparse
import csv
import os
import tempfile
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing
from common import RESULTS, hardware
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Parameter

from adafactor import Adafactor
from adafactor.cli import timing

MODELS = {"small": [(3, 64), (30, 64), (300, 64)], "large": [(3, 512), (30, 512)]}
"""Layers and width. In the small ones a step is the host's work for each parameter, in the large ones memory's."""

ALONE = f"{timing.OURS}, shards as plain parameters"
SECONDS, FEWEST, MOST = 8, 20, 200
"""For all rounds of a model together, and how many rounds there are at least and at most."""

HEADER = ("processes", "layers", "width", "parameters", "optimizer", "ms", "times ours")
HEADER += ("first ms", "collectives", "bytes", "steps")


class Layer(nn.Module):
    """Seven matrices and two norms, as many of today's language models have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.o(nn.functional.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y)))
        y = self.between(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def with_gradients(layers: int, width: int) -> list[Parameter]:
    """The parameters of a model of which each layer and the root is sharded, after one backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, width), *(Layer(width) for _ in range(layers)), nn.RMSNorm(width))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model[1:-1]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.randint(256, (2, 8))).square().mean().backward()
    return list(model.parameters())


def alone(params: list[Parameter]) -> list[Parameter]:
    """What is here of sharded parameters, in the same memory, as parameters that nobody else has."""
    here = []
    for p in params:
        x = Parameter(p.detach().to_local())
        x.grad = p.grad.to_local()
        here.append(x)
    return here


def optimizers(params: list[Parameter]) -> dict[str, torch.optim.Optimizer]:
    here = alone(params)
    return {
        timing.OURS: Adafactor(params, lr=1e-4, fused=True),
        f"{timing.OURS}, plain PyTorch": Adafactor(params, lr=1e-4, fused=False),
        ALONE: Adafactor(here, lr=1e-4, fused=True),
        f"{ALONE}, plain PyTorch": Adafactor(here, lr=1e-4, fused=False),
        timing.ADAMW: torch.optim.AdamW(params, lr=1e-6, fused=True),
        "torch AdamW foreach": torch.optim.AdamW(params, lr=1e-6, foreach=True),
    }


def sent(step: Callable[[], object]) -> list[int]:
    """The bytes of each collective of a step, whoever asks gloo for it: everything here is float32."""
    with torch.profiler.profile(record_shapes=True) as profile:
        step()
    # profile.events() would make a tree of all operations first, which takes minutes.
    events = [event for event in profile.profiler.kineto_results.events() if event.name().startswith("gloo:")]
    return [sum(4 * prod(shape) for shape in event.shapes()) for event in events]


def compare(steps: dict[str, Callable[[], object]]) -> dict[str, tuple[timing.Timing, float]]:
    """Take steps in turn, each with cold caches, after all processes have come together; the slowest one's time counts.

    All processes have to take as many rounds, so their number follows from the warm-up of all of them.

    Returns:
        The medians of each, and the seconds of its first step.
    """
    others = torch.zeros(timing.COLD // 4)

    def timed() -> Tensor:
        took = []
        for step in steps.values():
            others.add_(1)
            dist.barrier()
            start = time.perf_counter()
            step()
            took.append(time.perf_counter() - start)
        slowest = torch.tensor(took, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return slowest

    first = timed().tolist()
    begun = time.perf_counter()
    timed()
    round_ = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(round_, op=dist.ReduceOp.MAX)
    rounds = [timed().tolist() for _ in range(min(max(int(SECONDS / round_), FEWEST), MOST))]
    times = dict(zip(steps, zip(*rounds, strict=True), strict=True))
    found = {}
    for (name, took), start in zip(times.items(), first, strict=True):
        ratios = [each / ours for each, ours in zip(took, times[timing.OURS], strict=True)]
        found[name] = timing.Timing(median(took), median(ratios), len(rounds)), start
    return found


def rows(layers: int, width: int):
    """A row of HEADER for each optimizer."""
    params = with_gradients(layers, width)
    steps = {name: optimizer.step for name, optimizer in optimizers(params).items()}
    for name, ((seconds, ratio, count), first) in compare(steps).items():
        bytes_ = sent(steps[name])
        times = (round(seconds * 1e3, 3), round(ratio, 3), round(first * 1e3, 1))
        yield dist.get_world_size(), layers, width, len(params), name, *times, len(bytes_), sum(bytes_), count


def work(rank: int, processes: int, store: str, models: list[tuple[int, int]]) -> None:
    """What each process does; the first one writes."""
    # The profiler would tell when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    path = RESULTS / f"sharded-{hardware()}.csv" if rank == 0 else Path(os.devnull)
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(HEADER)
        for model in models:
            for row in rows(*model):
                table.writerow(row)
                file.flush()
                if rank == 0:
                    print(*row, sep=", ", flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="without the larger models")
    options = parser.parse_args()
    models = MODELS["small"] if options.small else [*MODELS["small"], *MODELS["large"]]
    RESULTS.mkdir(exist_ok=True)
    print(*HEADER, sep=", ", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.processes, str(Path(folder) / "store"), models)
        torch.multiprocessing.spawn(work, arguments, nprocs=options.processes)


if __name__ == "__main__":
    main()
