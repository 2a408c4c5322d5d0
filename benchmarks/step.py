"""The time of a step: ours, torch's, transformers' and AdamW's side by side; each sweep beside its physical floor.

    python benchmarks/step.py            # a quarter of an hour; needs 16 GB of memory for the largest size
    python benchmarks/step.py --small    # a minute, without the largest sizes

Writes step-HARDWARE.csv, sweeps-HARDWARE.csv, sizes-HARDWARE.csv and step-HARDWARE.png to benchmarks/results.
"""

import csv
import ctypes
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median

import torch
from common import RESULTS, hardware
from matplotlib.figure import Figure

from adafactor import Adafactor
from adafactor.backends import cpu, kernel
from adafactor.cli import timing

SMALL_TENSORS = [(64, 64)] * 200 + [(64,)] * 200
WARM = "the same, warm caches"
WORKLOADS = {
    "one 4096x4096": ([(4096, 4096)], torch.float32),
    "one 4096x4096, bfloat16": ([(4096, 4096)], torch.bfloat16),
    "GPT-2 small": (timing.gpt2(), torch.float32),
    "GPT-2 small, bfloat16": (timing.gpt2(), torch.bfloat16),
    "200 (64, 64) and 200 (64,)": (SMALL_TENSORS, torch.float32),
    WARM: (SMALL_TENSORS, torch.float32),
    "convolutions 512x512x3x3": ([(512, 512, 3, 3)] * 4, torch.float32),
}
SIDES = [512, 1024, 2048, 4096, 8192, 16384, 22528]


def workloads(names):
    """Rows: workload, optimizer, ms, ratio to ours (the median of the ratios of each round), steps."""
    for name in names:
        shapes, dtype = WORKLOADS[name]
        params = timing.parameters(shapes, dtype)
        steps = {key: optimizer.step for key, optimizer in timing.optimizers(params).items()}
        if "convolutions" in name:
            steps["adafactor, factor=matrix"] = Adafactor(params, lr=1e-4, factor="matrix").step
        for key, (seconds, ratio, count) in timing.compare(
            steps, seconds=20, cold=0 if name == WARM else timing.COLD
        ).items():
            yield name, key, round(seconds * 1e3, 3), round(ratio, 3), count


def sizes(sides):
    """Rows: MB of float32 parameters, ours in ms and in GB of parameters a second, AdamW's in ms."""
    for side in sides:
        params = timing.parameters([(side, side)], torch.float32)
        steps = {timing.OURS: Adafactor(params, lr=1e-4).step}
        steps[timing.ADAMW] = torch.optim.AdamW(params, lr=1e-6, fused=True).step
        results = timing.compare(steps, seconds=10)
        gigabytes, ours, theirs = side * side * 4 / 1e9, results[timing.OURS], results[timing.ADAMW]
        yield (
            round(gigabytes * 1e3),
            round(ours.seconds * 1e3, 3),
            round(gigabytes / ours.seconds, 2),
            round(theirs.seconds * 1e3, 3),
        )


def ceilings(side=4096, rounds=25):
    """Rows: sweep, ms, the floor: reading g and p (sweep 1), g (sweep 2), or g and p and writing p (sweep 3)."""
    floor = _compiled_floor()
    parallel_for = ctypes.cast(kernel.torch_library().torch_parallel_for, ctypes.c_void_p)
    (p,) = timing.parameters([(side, side)], torch.float32)
    g, other = p.grad, torch.zeros(side, side)
    optimizer = Adafactor([p], lr=1e-4)
    optimizer.step()
    cold, sums = torch.zeros(timing.COLD // 4), torch.zeros(256)
    times: dict[str, list[float]] = {}

    def timed(name, call):
        start = time.perf_counter()
        result = call()
        times.setdefault(name, []).append(time.perf_counter() - start)
        return result

    sweeps = {name: getattr(cpu, name) for name in ("observe", "average", "measure", "apply")}
    for name, sweep in sweeps.items():
        setattr(cpu, name, lambda *arguments, name=name, sweep=sweep: timed(name, lambda: sweep(*arguments)))
    for _ in range(rounds):
        for name, second, update in (("read g and p", p.data, 0), ("read g, update p", other, 1)):
            cold.add_(1)
            addresses = [ctypes.c_void_p(x.data_ptr()) for x in (g, second)]
            counts = [ctypes.c_int64(x) for x in (side * side, torch.get_num_threads())]
            call = partial(floor, parallel_for, *addresses, *counts, ctypes.c_void_p(sums.data_ptr()))
            timed(name, partial(call, ctypes.c_int64(update)))
        cold.add_(1)
        optimizer.step()
    for name, sweep in sweeps.items():
        setattr(cpu, name, sweep)
    medians = {name: median(each) for name, each in times.items()}
    read, update = medians["read g and p"], medians["read g, update p"]
    for name, least in (("observe", read), ("average", 0.0), ("measure", read / 2), ("apply", update)):
        yield name, round(medians[name] * 1e3, 3), round(least * 1e3, 3), round(least / medians[name], 3)


def _compiled_floor():
    folder = Path(tempfile.mkdtemp())
    source, library = Path(__file__).parent / "ceiling.cpp", folder / "ceiling.so"
    flags = ["-std=c++17", "-O3", "-march=native", "-Wno-psabi", "-shared", "-fPIC"]
    subprocess.run(["c++", *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library)).sweep


def write(name, header, rows):
    path = RESULTS / f"{name}-{hardware()}.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for row in rows:
            print(*row, sep=", ", flush=True)
            writer.writerow(row)


def draw(path):
    """Each optimizer's time over ours, a group of bars for each workload."""
    with (RESULTS / f"step-{hardware()}.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = list(dict.fromkeys(row["workload"] for row in rows))
    figure = Figure(figsize=(9, 5), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    for i, optimizer in enumerate((timing.ADAMW, timing.TORCH, timing.TRANSFORMERS)):
        ratios = [
            float(row["times ours"])
            for name in names
            for row in rows
            if (row["workload"], row["optimizer"]) == (name, optimizer)
        ]
        bars = axes.barh([j + 0.26 * i for j in range(len(names))], ratios, height=0.24, label=optimizer)
        axes.bar_label(bars, fmt="%.2f", padding=2, fontsize=8)
    axes.axvline(1, color="black", linewidth=1)
    axes.set(
        xscale="log", xlabel=f"time of a step over this library's ({hardware()}, {torch.get_num_threads()} threads)"
    )
    axes.set_yticks([j + 0.26 for j in range(len(names))], names)
    axes.invert_yaxis()
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main():
    small = "--small" in sys.argv[1:]
    RESULTS.mkdir(exist_ok=True)
    write("step", ("workload", "optimizer", "ms", "times ours", "steps"), workloads(WORKLOADS))
    draw(RESULTS / f"step-{hardware()}.png")
    write("sweeps", ("sweep", "ms", "floor ms", "share of the floor's speed"), ceilings())
    write("sizes", ("MB of parameters", "ms", "GB a second", "AdamW ms"), sizes(SIDES[: 5 if small else None]))


if __name__ == "__main__":
    main()
