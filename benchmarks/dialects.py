"""Each dialect beside the implementation it matches and beside AdamW, on the demo's task: same model, seed and data.

    pip install timm optax jax          (what is missing is left out, and said so)
    python benchmarks/dialects.py [--steps 100] [--threads 2]

Writes benchmarks/results/dialects-HARDWARE.csv and .png: validation bits per byte. All have a constant lr after the
same warm-up, or the relative steps of their own. As training amplifies every rounding, the original runs once more from
weights that are off by one: what lies as close as that is the same.
"""

import argparse
import csv
import importlib
import importlib.util
import math
import sys
import types
from collections.abc import Callable, Iterable

import torch
from common import RESULTS, hardware
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import Parameter

from adafactor.dialects import big_vision, optax, timm, towhee
from adafactor.dialects import torch as torch_dialect
from adafactor.dialects import transformers as transformers_dialect
from adafactor.training.data import Text, batch, validation_windows
from adafactor.training.model import Transformer

WARMUP = 30
NUDGED = "original, off by a rounding"
EVERY = 20


def timm_class(module: str, name: str) -> Callable:
    """A class of timm's optimizer files, which need torch alone, while the package also imports torchvision."""
    if "timm" not in sys.modules:
        spec = importlib.util.find_spec("timm")
        if spec is None:
            raise ModuleNotFoundError("No module named 'timm'", name="timm")
        root = spec.submodule_search_locations[0]
        for package, path in (("timm", root), ("timm.optim", f"{root}/optim")):
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = [path]
    return getattr(importlib.import_module(f"timm.optim.{module}"), name)


class Optax:
    """optax.adafactor with the interface of a PyTorch optimizer."""

    def __init__(self, params: Iterable[Parameter], learning_rate: float) -> None:
        import jax
        import optax

        self.params = list(params)
        self.param_groups = [{"lr": learning_rate}]
        transform = optax.adafactor(learning_rate=1.0)
        values = [jax.numpy.asarray(p.detach().numpy()) for p in self.params]
        self.state = transform.init(values)
        self.update = jax.jit(transform.update)

    def step(self) -> None:
        import jax

        lr = self.param_groups[0]["lr"]
        values, grads = ([jax.numpy.asarray(x.detach().numpy()) for x in side] for side in (self.params, self._grads()))
        updates, self.state = self.update(grads, self.state, values)
        with torch.no_grad():
            for p, update in zip(self.params, updates, strict=True):
                # Without momentum and decay, the update at another lr is a multiple of the one at 1.
                p.add_(torch.from_numpy(jax.device_get(update).copy()), alpha=lr)

    def _grads(self) -> list[Tensor]:
        return [p.grad for p in self.params]

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None


def transformers_class() -> Callable:
    return importlib.import_module("transformers.optimization").Adafactor


ABSOLUTE = {"relative_step": False, "scale_parameter": False}
# dialect, its arguments, the original, its arguments, the peak lr (None: relative steps)
PAIRS = [
    ("torch", torch_dialect.Adafactor, {}, lambda: torch.optim.Adafactor, {}, 0.02),
    ("transformers, relative", transformers_dialect.Adafactor, {}, transformers_class, {}, None),
    ("towhee, lr", towhee.Adafactor, ABSOLUTE, transformers_class, ABSOLUTE, 1e-3),
    ("optax", optax.Adafactor, {}, lambda: importlib.import_module("optax") and Optax, {}, 0.02),
    ("timm", timm.Adafactor, {}, lambda: timm_class("adafactor", "Adafactor"), {}, 1e-3),
    ("big_vision", big_vision.Adafactor, {}, lambda: timm_class("adafactor_bv", "AdafactorBigVision"), {}, 1e-3),
]


def curve(
    make: Callable, options: dict, lr: float | None, text: Text, steps: int, *, nudged: bool = False
) -> list[tuple[int, float]]:
    """(step, validation bits per byte) of one run; with nudged=True from weights that are off by a rounding."""
    torch.manual_seed(0)
    model = Transformer(128, 4, 128)
    if nudged:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 2**-23)
    windows = validation_windows(text.validation, 128, 8192)
    name = "learning_rate" if make in (Optax, optax.Adafactor) else "lr"
    optimizer = make(list(model.parameters()), **options, **({} if lr is None else {name: lr}))
    points = []
    for step in range(steps + 1):
        if step % EVERY == 0:
            with torch.no_grad():
                points.append((step, model.loss(windows).item() / math.log(2)))
        if lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = lr * min((step + 1) / WARMUP, 1.0)
        optimizer.zero_grad()
        model.loss(batch(text.train, 128, 16, 0, step)).backward()
        optimizer.step()
    return points


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    text = Text.load([], 128)
    adamw = curve(torch.optim.AdamW, {}, 3e-3, text, arguments.steps)
    rows = [("adamw", "original", *point) for point in adamw]
    figure = Figure(figsize=(11, 6.5), layout="constrained")
    for place, (name, ours, options, original, their_options, lr) in enumerate(PAIRS, start=1):
        axes = figure.add_subplot(2, 3, place, title=name, xlabel="step", ylabel="validation bits per byte")
        axes.plot(*zip(*adamw, strict=True), color="tab:gray", label="AdamW")
        runs = [("adafactor", lambda cls=ours: cls, options)]
        runs += [(side, original, their_options) for side in ("original", NUDGED)]
        styles = (
            {"linewidth": 4, "alpha": 0.4},
            {"linewidth": 1.2, "linestyle": "--", "color": "black"},
            {"linewidth": 1.2, "linestyle": ":", "color": "tab:red"},
        )
        for (side, load, side_options), style in zip(runs, styles, strict=True):
            try:
                points = curve(load(), side_options, lr, text, arguments.steps, nudged=side == NUDGED)
            except ModuleNotFoundError as error:
                print(f"{name}: the {side} is left out, since {error.name} is not installed", flush=True)
                continue
            rows += [(name, side, *point) for point in points]
            axes.plot(*zip(*points, strict=True), label=side, **style)
            print(f"{name}, {side}: {points[-1][1]:.4f}", flush=True)
        axes.legend()
    path = RESULTS / f"dialects-{hardware()}.csv"
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["dialect", "implementation", "step", "val_bits_per_byte"])
        table.writerows(rows)
    figure.savefig(path.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
