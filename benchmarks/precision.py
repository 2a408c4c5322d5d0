"""Low precision and rare gradients: how far weights move, where training ends, what waking rows do, what it costs.

    python benchmarks/precision.py           # everything; about half an hour, most of it the demo in bfloat16
    python benchmarks/precision.py moved rows    # some of it

Writes moved-, squares-, demo-, rows- and rounding-HARDWARE.csv to benchmarks/results.
"""

import csv
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from common import RESULTS, hardware
from torch.nn import Parameter

from adafactor import Adafactor
from adafactor.cli import timing
from adafactor.dialects.transformers import Adafactor as TransformersAdafactor
from adafactor.training.data import read, standard_library

ROUNDINGS = ("nearest", "stochastic", "kahan")
LOW = (torch.bfloat16, torch.float16)
ABSOLUTE = {"relative_step": False, "scale_parameter": False}


def _moved(dtype, rounding, lr, gradient, weight_decay):
    """How far 4,096 weights of 1 move in 500 steps, with what a compensation holds."""
    p = Parameter(torch.ones(64, 64, dtype=dtype))
    optimizer = TransformersAdafactor([p], lr=lr, **ABSOLUTE, rounding=rounding, weight_decay=weight_decay)
    for _ in range(500):
        p.grad = torch.full_like(p, gradient)
        optimizer.step()
    held = optimizer.state[p].get("compensation", torch.zeros(()))
    return float((1 - p.detach().double() - held.double()).mean())


def moved():
    """Weights of 1, 500 steps of lr in one direction, or of weight decay: the share of float32's movement."""
    for dtype in LOW:
        for what, gradient, decay in (("gradient", 1.0, 0.0), ("weight decay of 1", 0.0, 1.0)):
            for lr in (1e-3, 1e-4, 1e-5, 1e-6):
                exact = _moved(torch.float32, "nearest", lr, gradient, decay)
                shares = [_moved(dtype, rounding, lr, gradient, decay) / exact for rounding in ROUNDINGS]
                yield str(dtype).removeprefix("torch."), what, lr, *(round(share, 4) for share in shares)


def squares():
    """A linear model of 512 weights under noise, 600 steps, an lr of 0.02 that falls to 0: the loss, in float64."""
    draw = torch.Generator().manual_seed(0)
    X = torch.randn(256, 32, generator=draw)
    Y = X @ torch.randn(32, 16, generator=draw) + 0.5 * torch.randn(256, 16, generator=draw)
    for dtype, roundings in ((torch.float32, ("nearest",)), (torch.bfloat16, ROUNDINGS)):
        for rounding in roundings:
            W = Parameter(torch.zeros(32, 16, dtype=dtype))
            optimizer = TransformersAdafactor([W], lr=0.02, **ABSOLUTE, rounding=rounding)
            for t in range(600):
                optimizer.param_groups[0]["lr"] = 0.02 * (1 - t / 600)
                optimizer.zero_grad()
                ((X.to(dtype) @ W - Y.to(dtype)) ** 2).mean().backward()
                optimizer.step()
            loss = float(((X.double() @ W.detach().double() - Y.double()) ** 2).mean())
            yield str(dtype).removeprefix("torch."), rounding, round(loss, 5)


def demo():
    """The demo with weights, activations and gradients in bfloat16: 300 steps of a quarter of its batch, on 600 kB.

    Processors without bfloat16 arithmetic take 15 times as long for its products as for float32's.
    """
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        text.write_bytes(b"".join(map(read, standard_library()))[:600_000])
        for dtype, roundings in (("float32", ("nearest",)), ("bfloat16", ROUNDINGS)):
            for rounding in roundings:
                command = [sys.executable, "-m", "adafactor", "train", str(text), "--json", "--quiet", "--steps", "300"]
                command += ["--batch", "4", "--threads", "2", "--dtype", dtype, "-O", f"rounding={rounding}"]
                command += ["--out", f"{folder}/{dtype}-{rounding}"]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                result = json.loads(output)
                yield dtype, rounding, round(result["val_bits_per_byte"], 4), result["state_bytes"]


def rows():
    """An embedding, one row of which has a gradient every so many steps: the rms of u in that row, over the others'."""
    for every in (1, 10, 50, 200):
        found = []
        for boost in (None, 4.0, 2.0, 1.0):
            draw = torch.Generator().manual_seed(0)
            p = Parameter(torch.zeros(100, 64))
            options = {"clip_threshold": None, "max_row_boost": boost}
            optimizer = TransformersAdafactor([p], lr=1.0, **ABSOLUTE, **options)
            ratios = []
            for t in range(1, 1001):
                g = torch.randn(p.shape, generator=draw)
                wakes = t % every == 0
                g[7] *= wakes
                p.data.zero_()
                p.grad = g
                optimizer.step()
                if wakes and t > 500:
                    rms = p.detach().square().mean(1).sqrt()
                    ratios.append(float(rms[7] / rms[8:].mean()))
            found.append(sum(ratios) / len(ratios))
        yield every, *(round(ratio, 2) for ratio in found)


def cost():
    """A step's time by rounding and guard, over that of rounding to the nearest without it (medians of rounds)."""
    for name, shapes, how in (
        ("one 4096x4096", [(4096, 4096)], {}),
        ("GPT-2 small", timing.gpt2(), {}),
        ("one 4096x4096, plain PyTorch", [(4096, 4096)], {"fused": False}),
    ):
        params = timing.parameters(shapes, torch.bfloat16)
        kinds = {timing.OURS: {}}
        kinds |= {rounding: {"rounding": rounding} for rounding in ROUNDINGS[1:]}
        kinds |= {"skip_nonfinite=True": {"skip_nonfinite": True}}
        kinds |= {
            "skip_nonfinite='parameter'": {"skip_nonfinite": "parameter"},
            "max_row_boost": {"max_row_boost": 4.0},
        }
        steps = {kind: Adafactor(params, lr=1e-4, **options, **how).step for kind, options in kinds.items()}
        for kind, (seconds, ratio, count) in timing.compare(steps, seconds=40).items():
            yield name, "nearest" if kind == timing.OURS else kind, round(seconds * 1e3, 2), round(ratio, 3), count


TABLES = {
    "moved": (moved, ("dtype", "by", "lr", *ROUNDINGS)),
    "squares": (squares, ("dtype", "rounding", "loss")),
    "demo": (demo, ("dtype", "rounding", "val_bits_per_byte", "state_bytes")),
    "rows": (rows, ("a gradient every", "no limit", "max_row_boost=4", "max_row_boost=2", "max_row_boost=1")),
    "rounding": (cost, ("workload", "kind", "ms", "over nearest", "steps")),
}


def main():
    for name in sys.argv[1:] or TABLES:
        lines, header = TABLES[name]
        with (RESULTS / f"{name}-{hardware()}.csv").open("w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(header)
            print(*header, sep=", ")
            for row in lines():
                table.writerow(row)
                file.flush()
                print(*row, sep=", ")


if __name__ == "__main__":
    main()
