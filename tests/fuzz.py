"""Random steps through every backend: what test_fuzz.py runs for seconds and benchmarks/soak.py for as long as asked.

The backends have to agree with each other and to keep their promises, for whatever shapes, dtypes, orders in memory,
rules and gradients: zeros, denormal numbers, huge ones, inf and nan among them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import helpers
import torch
from contract_table import picture
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from adafactor import Adafactor
from adafactor.dialects import big_vision, optax, paper, timm
from adafactor.dialects.transformers import Adafactor as TransformersAdafactor

# fused=None: not every order in memory suits the kernel.
BACKENDS: dict[str, Any] = {
    name: how if name != "kernel" else {"fused": None} for name, how in helpers.BACKENDS.items()
}
MANUAL = {"lr": 0.01, "relative_step": False}
RULES: list[tuple[Any, dict[str, Any]]] = [
    (Adafactor, {"lr": 0.02}),
    (Adafactor, {"lr": 0.02, "weight_decay": 0.1, "d": None, "maximize": True, "eps": (0.0, 1e-3)}),
    (Adafactor, {"lr": 0.02, "eps": (1e-2, 1e-2), "d": 0.5, "factor": "matrix"}),
    (Adafactor, {"lr": 0.0, "weight_decay": 0.1}),
    (TransformersAdafactor, {}),
    (TransformersAdafactor, {"beta1": 0.9, "weight_decay": 0.1}),
    (TransformersAdafactor, {**MANUAL, "scale_parameter": False, "beta1": 0.5, "clip_threshold": None}),
    (TransformersAdafactor, {**MANUAL, "eps": (0.0, 0.0), "weight_decay": 0.01}),
    (paper.Adafactor, {"warmup_init": True}),
    (optax.Adafactor, {"learning_rate": 0.01, "min_dim_size_to_factor": 2, "weight_decay_rate": 0.01}),
    (optax.Adafactor, {"learning_rate": 0.01, "min_dim_size_to_factor": 2, "batch_dims": 1}),
    (big_vision.Adafactor, {"lr": 0.01, "min_dim_size_to_factor": 3}),
    (timm.Adafactor, {"min_dim_size_to_factor": 2}),
]
KINDS = ["normal", "rows", "zeros", "denormal", "tiny", "huge", "mixed", "inf", "nan", "overflow", "none"]
BAD = {"inf", "nan", "overflow"}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@dataclass(frozen=True)
class Case:
    """One run: shapes and dtypes of parameters, the kinds of their gradients step by step, and the optimizer."""

    rule: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    grad_dtypes: tuple[torch.dtype, ...]
    orders: tuple[int, ...]
    kinds: tuple[tuple[str, ...], ...]
    rounding: str
    skip: bool | str
    boost: float | None
    scale: float | None
    seed: int


def shapes() -> st.SearchStrategy[tuple[int, ...]]:
    return st.one_of(
        st.lists(st.integers(0, 7), max_size=4).map(tuple),
        st.tuples(st.integers(1, 80), st.integers(1, 80)),
        st.tuples(st.sampled_from([1, 2, 63, 257, 600]), st.sampled_from([1, 3, 15, 16, 17, 255, 257])),
        st.tuples(st.integers(1, 3000)),
        st.tuples(st.integers(1, 4), st.integers(1, 20), st.integers(1, 20)),
        st.tuples(st.just(2), st.integers(4090, 4100)),
    )


@st.composite
def cases(draw: Any) -> Case:
    """Cases, with the likely trouble made likely."""
    count = draw(st.integers(1, 4))

    def each(strategy: Any) -> tuple[Any, ...]:
        return tuple(draw(strategy) for _ in range(count))

    mostly_good = st.one_of(st.sampled_from(KINDS[:7]), st.sampled_from(KINDS))
    return Case(
        rule=draw(st.integers(0, len(RULES) - 1)),
        shapes=each(shapes()),
        dtypes=each(st.sampled_from(DTYPES)),
        grad_dtypes=each(st.sampled_from(DTYPES)),
        orders=each(st.integers(0, 2)),
        kinds=tuple(each(mostly_good) for _ in range(draw(st.integers(1, 3)))),
        rounding=draw(st.sampled_from(["nearest", "stochastic", "kahan"])),
        skip=draw(st.sampled_from([False, True, "parameter"])),
        boost=draw(st.sampled_from([None, None, 1.0, 3.0])),
        scale=draw(st.sampled_from([None, None, 2.0**10, 3.0])),
        seed=draw(st.integers(0, 2**20)),
    )


def gradient(kind: str, shape: tuple[int, ...], dtype: torch.dtype, draw: torch.Generator) -> Tensor | None:
    """A gradient of a kind: each is finite in the sense of the optimizer but for those of BAD, which are not."""
    if kind == "none":
        return None
    g = torch.randn(shape, generator=draw, dtype=torch.float64)
    if kind == "rows" and g.dim() > 0:
        g = g * (torch.rand(shape[:1], generator=draw) < 0.5).reshape([-1] + [1] * (len(shape) - 1))
    if kind == "zeros":
        g = g * 0
    if kind == "denormal":
        g = g * torch.finfo(dtype).tiny * 0.1
    if kind == "tiny":
        g = g * 1e-25
    if kind == "huge":
        g = g.clamp(-3, 3) * (1e3 if dtype is torch.float16 else 1e16)
    if kind == "mixed":
        g = g.clamp(-3, 3) * 10 ** torch.empty(shape, dtype=torch.float64).uniform_(-8, 3, generator=draw)
    g = g.to(dtype)
    if kind in BAD and g.numel() > 0:
        most = torch.finfo(dtype).max if dtype is torch.float64 else 3e38
        bad = {"inf": math.inf, "nan": math.nan, "overflow": most}[kind]
        g.view(-1)[int(torch.randint(g.numel(), (1,), generator=draw))] = bad
    return g


def ordered(x: Tensor, order: int) -> Tensor:
    """The same values in another order of memory: 1 is the reverse, 2 has the last two dims swapped."""
    if x.dim() < 2 or order == 0:
        return x
    if order == 1:
        return x.permute(*range(x.dim() - 1, -1, -1)).contiguous().permute(*range(x.dim() - 1, -1, -1))
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def run(case: Case, backend: str) -> tuple[list[Tensor], list[Tensor], Any]:
    """The values before and after, and the optimizer; what one backend promises is checked on the way."""
    draw = torch.Generator().manual_seed(case.seed)
    cls, options = RULES[case.rule]
    params = []
    for shape, dtype, order in zip(case.shapes, case.dtypes, case.orders, strict=True):
        value = torch.randn(shape, generator=draw, dtype=torch.float64) * 0.1
        params.append(Parameter(ordered(value.to(dtype), order)))
    start = [p.detach().clone() for p in params]
    optimizer = cls(
        params,
        **options,
        rounding=case.rounding,
        seed=case.seed,
        skip_nonfinite=case.skip,
        max_row_boost=case.boost,
        **BACKENDS[backend],
    )
    skipped = 0
    poisoned = False
    for kinds in case.kinds:
        bad = []
        for i, (p, kind, of_g) in enumerate(zip(params, kinds, case.grad_dtypes, strict=True)):
            # A larger one than the gradient's dtype can hold is inf.
            g = gradient(kind, tuple(p.shape), of_g, draw)
            p.grad_dtype = None
            p.grad = None if g is None else ordered(g, case.orders[i])
            if kind in BAD and p.numel() > 0:
                wide = torch.float64 if p.dtype is torch.float64 else torch.float32
                scaled = g.to(wide) * (1 if case.scale is None else 1 / case.scale)
                if not scaled.square().isfinite().all():
                    bad.append(i)
        if case.scale is not None:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(case.scale), torch.tensor(0.0)
        before = picture(optimizer)
        optimizer.step()
        after = picture(optimizer)
        if case.skip:
            skipped += bool(bad)
            assert optimizer.nonfinite_parameters() == [f"parameter {i} of group 0" for i in bad]
            stay = [i for i, p in enumerate(params) if p.grad is not None] if case.skip is True and bad else bad
            for i in stay:
                own = [key for key in before if f" 0.{i}" in key]
                assert all(before[key] == after[key] for key in own), "a step that is skipped leaves no trace"
        poisoned = poisoned or (bool(bad) and not case.skip)
        if not poisoned:
            assert all(p.isfinite().all() for p in params), "finite gradients make finite steps"
            for state in optimizer.state.values():
                assert all(value.isfinite().all() for value in state.values()), "and finite state"
    assert int(optimizer.skipped_steps) == skipped
    return start, params, optimizer


def check(case: Case) -> None:
    """Every backend keeps its promises, and agrees with the others to rounding."""
    runs = {backend: run(case, backend) for backend in BACKENDS}
    start, plain, truth = runs.pop("plain")
    for backend, (_, params, optimizer) in runs.items():
        for i, (p, q, before) in enumerate(zip(params, plain, start, strict=True)):
            mine, theirs = p.detach().double(), q.detach().double()
            where = f"{backend}, parameter {i}"
            steps = float(optimizer.state[p]["step"]) if optimizer.state[p] else 0.0
            assert steps == (float(truth.state[q]["step"]) if truth.state[q] else 0.0), where
            assert torch.equal(mine.isfinite(), theirs.isfinite()), where
            if not mine.isfinite().all():
                continue
            movement = float((theirs - before.double()).abs().max()) if p.numel() else 0.0
            # Each step may round the other way once, where float32 sums differ by rounding.
            units = len(case.kinds) * (1.01 if p.dtype in (torch.bfloat16, torch.float16) else 4)
            unit = torch.finfo(p.dtype).eps * theirs.abs() + torch.finfo(p.dtype).tiny * torch.finfo(p.dtype).eps
            own, other = optimizer.state[p], truth.state[q]
            # Momentum in lower precision may be rounded the other way too.
            names = own.keys() - {"step", "compensation"}
            rounded = {name for name in names if own[name].dtype in (torch.bfloat16, torch.float16)}
            wide = p.dtype is torch.float64
            close = 1e-12 if wide else 1e-5
            relative = 2.0**-7 if rounded else close
            assert ((mine - theirs).abs() <= relative * movement + units * unit).all(), where
            assert own.keys() == other.keys(), where
            if case.scale is not None and any(kinds[i] == "denormal" for kinds in case.kinds):
                # Unscaled before or after the rest, a denormal number has lost other bits.
                continue
            for name in names:
                relative = len(case.kinds) * (2.0**-7 if name in rounded else close)
                a, b = own[name].double(), other[name].double()
                largest = max(b[b.isfinite()].abs().flatten().tolist(), default=0.0)
                assert torch.equal(a.isfinite(), b.isfinite()), f"{name} of {where}"
                same = (a - b).abs() <= relative * b.abs() + 1e-5 * largest
                assert (same | ~b.isfinite()).all(), f"{name} of {where}"
