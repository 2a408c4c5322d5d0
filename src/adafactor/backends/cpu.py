"""The three sweeps of the compiled kernel, csrc/adafactor.cpp: a call each for all tensors of a wave.

It knows tensors by their addresses, so ``unsupported`` is strict about what it gets, and the caller sees to it that
everything but the gradients stays where it is while a batch's memo lives.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from ..sweeps import Batch, Item
from . import kernel, strides

WAVE = 24 << 20
"""Bytes of a wave, which stay in the last level of cache from sweep to sweep (see docs/performance.md)."""

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
_MOMENTUM = {None: 0, "after": 1, "before": 2}
_DECAY = {None: 0, "lr": 1, "one": 1, "alpha": 2}


def unsupported(item: Item) -> str | None:
    """Why the kernel cannot take an item, in words; None where it can. State that is not made yet is not looked at."""
    plan, p, g = item.plan, item.p, item.g
    if p.device.type != "cpu":
        return f"it is on {p.device}"
    if kernel.missing():
        return f"there is no compiled kernel: {kernel.missing()}"
    if torch.compiler.is_compiling():
        return "torch.compile is tracing the step"
    if kernel.modes():
        return "a dispatch mode is on, which has to see every operation"
    for name, x in (("it", p), ("its gradient", g)):
        if type(x) not in (Tensor, Parameter):
            return f"{name} has type {type(x).__name__}"
        if x.dtype not in TYPES:
            return f"{name} has dtype {x.dtype}"
        if x.is_neg() or kernel.is_zerotensor(x):
            return f"{name} is a lazy negation or zero, whose values are not in memory"
    if plan.numel == 0:
        return None
    found = strides.matrices(plan, p.stride())
    if found is None:
        where = f"shape {plan.shape} and strides {p.stride()}"
        if not plan.factored:
            return f"its elements do not lie one behind the other in memory, with {where}"
        return f"its rows {plan.rows} and columns {plan.cols} do not lie as matrices in memory, with {where}"
    beside = {"gradient": g, "momentum": item.m, "variance": item.V, "row factor": item.R, "column factor": item.C}
    for name, y in beside.items():
        if y is not None and not strides.is_dense(y.shape, y.stride(), found.order):
            return f"its {name} has strides {y.stride()}, and it has {p.stride()}"
    return None


class _Table:
    """What the kernel is told of a batch, and remembers from step to step."""

    def __init__(self, batch: Batch) -> None:
        columns, form = batch.columns, batch.form
        shapes, addresses = array("q"), array("Q")
        for item in batch.items:
            lies = strides.matrices(item.plan, item.p.stride())
            assert lies is not None
            moment = 0 if item.m is None else TYPES[item.m.dtype]
            types = (TYPES[item.p.dtype], TYPES[item.g.dtype], moment)
            shapes.extend((lies.batch, lies.n, lies.m, item.plan.factored, lies.swapped, *types))
            factors = (item.C, item.R) if lies.swapped else (item.R, item.C)
            addresses.extend(map(_address, (item.p, item.g, *factors, item.V, item.m)))
        self.shapes, self.addresses = shapes, addresses
        self.call = kernel.Call(
            k=len(columns.p),
            wide=batch.dtype is torch.float64,
            momentum=_MOMENTUM[form.momentum],
            decay=_DECAY[form.decay],
            p2=_address(batch.p2),
            shapes=shapes.buffer_info()[0],
            tensors=addresses.buffer_info()[0],
        )
        self.pointer = ctypes.byref(self.call)
        self.size = kernel.library().adafactor_scratch(self.pointer)
        if self.size < 0:
            raise MemoryError("the compiled kernel found no memory for its list of tensors")
        self.of_factors = any(plan.factored for plan in columns.plans)


def count(steps: Sequence[Tensor]) -> Tensor:
    """Add one to each step count. Returns them, [k] on the CPU."""
    t = torch.empty(len(steps), dtype=torch.float32, device="cpu")
    addresses = array("Q", map(Tensor.data_ptr, steps))
    kernel.library().adafactor_count(len(steps), addresses.buffer_info()[0], t.data_ptr())
    return t


def observe(batch: Batch) -> Tensor:
    """Row and column sums of |g|^2 of all factored tensors in one vector, and sums of p^2 into p2. Writes no state."""
    table = batch.memo.get("table")
    if table is None:
        table = batch.memo["table"] = _Table(batch)
    table.addresses[1::6] = array("Q", map(Tensor.data_ptr, batch.columns.g))
    sums = torch.empty(table.size, dtype=batch.dtype, device="cpu")
    call, (numbers, still) = table.call, batch.numbers
    call.threads = torch.get_num_threads()
    call.numbers, call.stride, call.still = numbers.data_ptr(), numbers.stride(0), _address(still)
    call.scratch = sums.data_ptr()
    _run(kernel.library().adafactor_observe, table)
    return sums


def average(batch: Batch, sums: Tensor) -> None:
    """Take the first sweep's sums into R and C, and leave their inverse roots where the sums were."""
    batch.kept = sums
    table = batch.memo["table"]
    if table.of_factors:
        _run(kernel.library().adafactor_average, table)


def measure(batch: Batch) -> Tensor:
    """[k] sums of u^2. Brings a full V up to date first."""
    table = batch.memo["table"]
    u2 = torch.empty(len(batch.columns.p), dtype=batch.dtype, device="cpu")
    table.call.u2 = u2.data_ptr()
    _run(kernel.library().adafactor_measure, table)
    return u2


def apply(batch: Batch, u2: Tensor) -> None:
    """Take the step off the parameters."""
    # Before p is written: it refuses what may not be.
    torch.autograd.graph.increment_version(batch.columns.p)
    _run(kernel.library().adafactor_apply, batch.memo["table"])


def _run(sweep: Callable[..., int], table: _Table) -> None:
    status = sweep(table.pointer)
    if status == 1:
        raise MemoryError("the compiled kernel found no memory for its list of tiles")
    if status:
        raise RuntimeError("torch's threads failed in the middle of a sweep of the compiled kernel")


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
