"""Time optimizers side by side: in turn, in one process, on the same parameters, each step with cold caches."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from math import prod
from statistics import median
from typing import NamedTuple

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from .. import Adafactor

Shapes = list[tuple[int, ...]]

COLD = 64 << 20
"""Bytes that are read and written between steps: forward and backward passes leave little in the caches either."""

OURS, TORCH, TRANSFORMERS, ADAMW = "adafactor", "torch Adafactor", "transformers Adafactor", "torch AdamW fused"


class Timing(NamedTuple):
    """The medians of one optimizer, in seconds, and of the steps' ratios to ours of the same round."""

    seconds: float
    ratio: float
    steps: int


def gpt2() -> Shapes:
    """The 148 tensors of GPT-2 small, 124 million parameters."""
    block: Shapes = [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,), (768,), (768,)]
    block += [(768, 3072), (3072,), (3072, 768), (768,)]
    return [(50257, 768), (1024, 768), *block * 12, (768,), (768,)]


def read_shapes(text: str) -> Shapes:
    """What a user writes for shapes: 4096x4096, 200*64x64, 768, gpt2.

    >>> read_shapes("2*64x32"), read_shapes("768"), len(read_shapes("gpt2"))
    ([(64, 32), (64, 32)], [(768,)], 148)
    """
    if text == "gpt2":
        return gpt2()
    if not re.fullmatch(r"(\d+\*)?\d+(x\d+)*", text):
        raise ValueError(f"a shape should be like 4096x4096, 200*64x64, 768 or gpt2, got {text!r}")
    count, _, sizes = text.rpartition("*")
    shape = tuple(map(int, sizes.split("x")))
    if not prod(shape) or not int(count or 1):
        raise ValueError(f"a shape should have at least one element, got {text!r}")
    return [shape] * int(count or 1)


def parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> list[Parameter]:
    """Parameters with gradients, of the sizes that training has."""
    draw = torch.Generator().manual_seed(0)
    params = [Parameter((torch.randn(shape, generator=draw) * 0.02).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = (torch.randn(p.shape, generator=draw) * 1e-3).to(dtype)
    return params


def optimizers(params: Sequence[Parameter]) -> dict[str, Optimizer]:
    """Ours, and those that are installed, over the same parameters."""
    found: dict[str, Optimizer] = {
        OURS: Adafactor(params, lr=1e-4),
        TORCH: torch.optim.Adafactor(params, lr=1e-4),
        ADAMW: torch.optim.AdamW(params, lr=1e-6, fused=True),
    }
    if find_spec("transformers"):
        from transformers.optimization import Adafactor as Transformers

        found[TRANSFORMERS] = Transformers(params, lr=1e-4, relative_step=False)  # type: ignore[no-untyped-call]
    return found


def compare(
    steps: Mapping[str, Callable[[], object]], seconds: float = 10.0, fewest: int = 7, most: int = 100, cold: int = COLD
) -> dict[str, Timing]:
    """Take steps in turn for about so many seconds, at least the fewest rounds. Slow ones sit out most rounds.

    Args:
        steps: each optimizer's step; OURS is one of them.
        seconds: for all rounds together.
        fewest: rounds that everybody takes part in.
        most: rounds.
        cold: bytes that are read and written before each step; 0 leaves the caches warm.
    """
    others = torch.zeros(cold // 4)

    def timed(step: Callable[[], object]) -> float:
        others.add_(1)
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    warm: dict[str, float] = {}
    for name, step in steps.items():
        timed(step)
        warm[name] = timed(step)
    slow = {name for name, took in warm.items() if took > 5 * warm[OURS]}
    times: dict[str, list[float]] = {name: [] for name in steps}
    ratios: dict[str, list[float]] = {name: [] for name in steps}
    begun, rounds = time.perf_counter(), 0
    while rounds < fewest or (rounds < most and time.perf_counter() - begun < seconds):
        took = {name: timed(step) for name, step in steps.items() if name not in slow or rounds < fewest}
        for name, each in took.items():
            times[name].append(each)
            ratios[name].append(each / took[OURS])
        rounds += 1
    return {name: Timing(median(times[name]), median(ratios[name]), len(times[name])) for name in steps}
