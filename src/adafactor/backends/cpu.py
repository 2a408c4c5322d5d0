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
_TENSOR = ("p", "g", "R", "C", "V", "moment", "comp", "rows", "cols", "totals")
"""The C++ struct Tensor."""
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
    found = strides.matrices(plan, p.stride())
    if found is None:
        where = f"shape {plan.shape} and strides {p.stride()}"
        if not plan.factored:
            return f"its elements do not lie one behind the other in memory, with {where}"
        return f"its rows {plan.rows} and columns {plan.cols} do not lie as matrices in memory, with {where}"
    beside = {"gradient": g, "momentum": item.m, "variance": item.V, "row factor": item.R, "column factor": item.C}
    for name, y in {**beside, "compensation": item.comp}.items():
        if y is not None and not strides.is_dense(y.shape, y.stride(), found.order):
            return f"its {name} has strides {y.stride()}, and it has {p.stride()}"
    if plan.of is not None and not p.is_contiguous():
        # All processes have to leave their sums in one order.
        return f"it is a shard that is not contiguous, with strides {p.stride()}"
    if item.at is not None and len(strides.lines(plan.shape, item.at.strides, found.order)) > kernel.RANK:
        return f"its elements lie in memory in an order of more than {kernel.RANK} dims, with strides {p.stride()}"
    return None


class _Table:
    """What the kernel is told of a batch, and remembers from step to step."""

    def __init__(self, batch: Batch) -> None:
        columns, form = batch.columns, batch.form
        shapes, addresses, counters = array("q"), array("Q"), array("Q")
        for item in batch.items:
            lies = strides.matrices(item.plan, item.p.stride())
            assert lies is not None
            moment = 0 if item.m is None else TYPES[item.m.dtype]
            types = (TYPES[item.p.dtype], TYPES[item.g.dtype], moment)
            limited = item.plan.leads_with_rows != lies.swapped
            whole = item.plan.whole
            sizes = (whole.m, whole.n) if lies.swapped else (whole.n, whole.m)
            shapes.extend((lies.batch, lies.n, lies.m, item.plan.factored, lies.swapped, limited, *types))
            shapes.extend((*sizes, whole.numel, item.plan.speaks))
            factors, sums = (item.R, item.C), (item.r, item.c)
            if lies.swapped:
                factors, sums = factors[::-1], sums[::-1]
            tensors = (item.p, item.g, *factors, item.V, item.m, item.comp, *sums, item.totals)
            addresses.extend(map(_address, tensors))
            if form.rounding != "nearest":
                counters.extend(_counter(item, lies.order))
        # They are to live as long as the call that points to them.
        self.shapes, self.addresses, self.counters = shapes, addresses, counters
        self.call = kernel.Call(
            k=len(columns.p),
            wide=batch.dtype is torch.float64,
            momentum=_MOMENTUM[form.momentum],
            decay=_DECAY[form.decay],
            p2=_address(batch.p2),
            bad=_address(batch.bad),
            g2=_address(batch.g2),
            shapes=shapes.buffer_info()[0],
            tensors=addresses.buffer_info()[0],
            counters=counters.buffer_info()[0] if counters else 0,
        )
        self.pointer = ctypes.byref(self.call)
        self.size = kernel.library().adafactor_scratch(self.pointer)
        if self.size < 0:
            raise MemoryError("the compiled kernel found no memory for its list of tensors")
        self.of_factors = any(plan.factored for plan in columns.plans)


def _counter(item: Item, order: Sequence[int]) -> list[int]:
    """An item's place among the draws, as the C++ struct Counter."""
    if item.at is None:
        return [0] * (3 + 2 * kernel.RANK)
    lines = strides.lines(item.plan.shape, item.at.strides, order)
    sizes, steps = zip(*lines, *[(0, 0)] * (kernel.RANK - len(lines)), strict=True)
    return [item.at.key, item.at.start, len(lines), *sizes, *steps]


def count(steps: Sequence[Tensor]) -> Tensor:
    """[k] the step counts with this step. Writes nothing."""
    t = torch.empty(len(steps), dtype=torch.float32, device="cpu")
    addresses = array("Q", map(Tensor.data_ptr, steps))
    kernel.library().adafactor_count(len(steps), addresses.buffer_info()[0], t.data_ptr())
    return t


def keep(steps: Sequence[Tensor], t: Tensor) -> None:
    """Write step counts, [k]."""
    addresses = array("Q", map(Tensor.data_ptr, steps))
    kernel.library().adafactor_keep(len(steps), addresses.buffer_info()[0], t.data_ptr())


def observe(batch: Batch) -> Tensor:
    """Row and column sums of |g|^2 of all factored tensors in one vector; fills in p2, bad and g2. Writes no state."""
    table = batch.memo.get("table")
    if table is None:
        table = batch.memo["table"] = _Table(batch)
    table.addresses[1 :: len(_TENSOR)] = array("Q", map(Tensor.data_ptr, batch.columns.g))
    sums = torch.empty(table.size, dtype=batch.dtype, device="cpu")
    call, (numbers, still, _) = table.call, batch.numbers
    call.threads = torch.get_num_threads()
    call.numbers, call.stride, call.still = numbers.data_ptr(), numbers.stride(0), _address(still)
    call.scratch = sums.data_ptr()
    _run(kernel.library().adafactor_observe, table)
    return sums


def average(batch: Batch, sums: Tensor) -> None:
    """Take the first sweep's sums into R and C, and leave their inverse roots where the sums were."""
    batch.kept = sums
    table = batch.memo["table"]
    table.call.hold = _address(batch.hold)
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
    """Take the step off the parameters that are not on hold."""
    # Before p is written: it refuses what may not be.
    torch.autograd.graph.increment_version(batch.columns.p)
    table = batch.memo["table"]
    table.call.u2 = u2.data_ptr()
    _run(kernel.library().adafactor_apply, table)


def _run(sweep: Callable[..., int], table: _Table) -> None:
    status = sweep(table.pointer)
    if status == 1:
        raise MemoryError("the compiled kernel found no memory for its list of tiles")
    if status:
        raise RuntimeError("torch's threads failed in the middle of a sweep of the compiled kernel")


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
