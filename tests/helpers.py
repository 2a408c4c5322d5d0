"""What several test files share: parameters with gradients, trajectories, and the tolerance that peers are held to."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from adafactor.backends import kernel

DATA = Path(__file__).parent / "data"

# In CI a kernel that does not build is a failure.
NO_KERNEL = kernel.missing() is not None and not os.environ.get("CI")
needs_kernel = pytest.mark.skipif(NO_KERNEL, reason=f"no kernel: {kernel.missing()}")

BACKENDS: dict[str, dict[str, bool]] = {
    **({} if NO_KERNEL else {"kernel": {"fused": True}}),
    "plain": {"fused": False},
    "foreach": {"foreach": True},
}
"""The arguments that ask for each backend."""


def parameters(values: Iterable[Tensor], dtype: torch.dtype | None = None) -> list[Parameter]:
    """Fresh parameters with copies of the values."""
    return [Parameter(value.detach().clone().to(dtype or value.dtype)) for value in values]


def trajectory(
    optimizer: torch.optim.Optimizer, params: Sequence[Parameter], steps: Sequence[Sequence[Tensor]]
) -> list[list[Tensor]]:
    """The parameters after each step; steps[t][i] is the gradient of params[i]."""
    path = []
    for grads in steps:
        for p, g in zip(params, grads, strict=True):
            p.grad = g.detach().clone().to(p.dtype)
        optimizer.step()
        path.append([p.detach().clone() for p in params])
    return path


def assert_same_path(ours: list[Tensor], peers: list[Tensor], start: Tensor, ties: int = 0) -> None:
    """2e-6 of the total movement for the order of float32 sums, and 6 float32 roundings of the parameter.

    So many elements of ties may be off by a bfloat16 rounding of the movement instead.
    """
    movement = max(float((theirs - start).abs().max()) for theirs in peers)
    for t, (mine, theirs) in enumerate(zip(ours, peers, strict=True), start=1):
        tolerance = 2e-6 * movement + 6 * 2**-24 * float(theirs.abs().max())
        errors = (mine - theirs).abs().flatten()
        assert int((errors > tolerance).sum()) <= ties, f"step {t}: off by {float(errors.max()):.3g} > {tolerance:.3g}"
        assert float(errors.max()) <= tolerance + (2**-8 * movement if ties else 0)


def random_steps(
    shapes: Sequence[tuple[int, ...]], count: int, seed: int = 0
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Starting values of about 0.1, and count gradients for each, with structure by rows and columns and over time."""
    draw = torch.Generator().manual_seed(seed)

    def gradient(shape: tuple[int, ...], t: int) -> Tensor:
        g = torch.randn(shape, generator=draw) * 10 ** (-t / count)
        for dim, size in enumerate(shape):
            scale = torch.exp(torch.randn(size, generator=draw))
            g = g * scale.reshape([-1 if i == dim else 1 for i in range(len(shape))])
        return g

    start = [0.1 * torch.randn(shape, generator=draw) for shape in shapes]
    return start, [[gradient(shape, t) for shape in shapes] for t in range(count)]
