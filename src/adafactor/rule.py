"""Rule: what one group's step computes; and the table of step numbers made from rules and step counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .rounding import Rounding

Skip = Literal["step", "parameter"]


@dataclass(frozen=True)
class Rule:
    r"""What a step computes, whatever the dialect. This is the algorithm::

        t      <- t + 1
        g      <- g min(1, max_grad_norm / (|all g| + 1e-6))     with max_grad_norm: the norm of all gradients together
        b      =  max(max(t - offset, 1) ^ tau, 1 - cap)         1 - beta2_t
        rho    =  lr | min(lr, 1/sqrt t) | min(1e-2, 1/sqrt t) | min(1e-6 t, 1/sqrt t)
        alpha  =  rho max(eps2, rms(p))                          rho alone without parameter scale
        R      <- R + b (mean over columns of |g|^2 + e - R)     e = eps1 in the statistics, else 0
        C      <- C + b (mean over rows    of |g|^2 + e - C)     without factors: V <- V + b (|g|^2 + e - V)
        V      =  R C / max(mean(C), f)                          f = eps1 as a floor, else 0; see max_row_boost
        u      =  g / max(sqrt V, f)                             0 where g = 0
        u      <- u / max(1, rms(u) / d)
        u      <- alpha u                                        momentum "after": u <- m <- m + (1 - beta1) (u - m)
                                                                 "before": so, of u rounded to m's dtype, then alpha u
        p      <- round(p - lambda p - u)                        lambda = weight_decay (lr | alpha | 1)

    rms(x) is the root of the mean of squares over the whole tensor; rms(p) is taken before p changes; mean(C) = mean(R)
    is over each matrix of a batch. With ``maximize``, -u. Where lr is 0, p stays as it is, whatever the rest says.
    Arithmetic and R, C, V are in float32, for float64 parameters in float64, and so is m unless momentum_dtype says
    otherwise; p is rounded once, at the end, as ``rounding.py`` has it.

    A gradient is finite where its |g|^2 and their sums over rows and over columns are, in the arithmetic's dtype.

    Source: Shazeer and Stern 2018 (arXiv:1804.04235), algorithms 4 to 6, as the existing implementations vary it.

    Attributes:
        rho: which of the four: "constant", "capped", "relative" or "warmup".
        lr: the caller's learning rate. For "relative" and "warmup" only 0 says anything.
        scale: whether alpha is scaled by the parameter.
        eps1: None is the machine epsilon of the dtype that the arithmetic runs in.
        eps1_in: whether eps1 is added into the statistics or is the floor of mean(C) and of sqrt V.
        eps2: the smallest parameter scale.
        tau: the exponent of 1 - beta2_t, at most 0.
        offset: steps before beta2's schedule begins.
        cap: the largest beta2.
        d: the clipping threshold of rms(u); None is no clipping.
        beta1: None is no momentum.
        momentum: whether m averages u after alpha or before it.
        momentum_dtype: what m is kept in; None is the arithmetic's.
        weight_decay: times lr, alpha or 1, see decay_by.
        decay_by: what weight_decay is multiplied by.
        maximize: whether to climb.
        rounding: how p is rounded where it is bfloat16 or float16: "nearest", "stochastic" or "kahan".
        max_row_boost: in V, the statistic of the earlier dim (R, as a rule) is at least this step's mean of |g|^2 + e,
            divided by the square of this: u of a row that had no gradient for long, whose R has decayed, has an rms of
            about this at most. None is no limit.
        max_grad_norm: the largest norm of all gradients together; None is no limit, inf is none and the norm is known.
        skip: what stays as it was, state and all, where a gradient is not finite: the "step", the "parameter" or
            nothing.
    """

    rho: Literal["constant", "capped", "relative", "warmup"]
    lr: float | Tensor
    scale: bool
    eps1: float | None
    eps1_in: Literal["floor", "statistics"]
    eps2: float
    tau: float
    d: float | None
    beta1: float | None
    weight_decay: float
    decay_by: Literal["lr", "alpha", "one"]
    maximize: bool = False
    offset: int = 0
    cap: float = 1.0
    momentum: Literal["after", "before"] = "after"
    momentum_dtype: torch.dtype | None = None
    rounding: Rounding = "nearest"
    max_row_boost: float | None = None
    max_grad_norm: float | None = None
    skip: Skip | None = None

    @property
    def relative(self) -> bool:
        """Whether the step size comes from the step count alone."""
        return self.rho in ("relative", "warmup")

    @property
    def form(self) -> Form:
        """The part of the rule that decides which operations run; tensors of one form share a batch."""
        momentum = None if self.beta1 is None else self.momentum
        decay = self.decay_by if self.weight_decay else None
        added = self.eps1_in == "statistics" and self.eps1 != 0
        return Form(
            self.rho, self.scale, added, momentum, decay, self.rounding, self.skip, self.max_grad_norm is not None
        )

    def step_size(self, t: float) -> float:
        """rho at step t, as a float. t below 1 counts as 1, the step to come. Reads lr where it is a tensor."""
        lr = torch.as_tensor(self.lr, dtype=torch.float64, device="cpu")
        return float(_rho(self.rho, lr, torch.tensor(max(t, 1.0), dtype=torch.float64, device="cpu")))


class Form(NamedTuple):
    """Which operations a step needs."""

    rho: str
    scale: bool
    added: bool
    momentum: Literal["after", "before"] | None
    decay: Literal["lr", "alpha", "one"] | None
    rounding: Rounding
    skip: Skip | None
    clips: bool


class Numbers(NamedTuple):
    """The table of step numbers: a row for each of ROWS, a column for each tensor, in the arithmetic's dtype.

    Letters as in Rule; ``added`` is e; ``floor`` is f, but never 0; ``cap`` is 1/f, the largest inverse root, but never
    more than that of the smallest normal number (a gradient whose square underflows has a u of at most about 1, and one
    of 0 has 0); ``decay`` is lambda, to be multiplied by alpha where the form says so; ``d`` is inf for no clipping;
    ``sign`` is -1 to climb; ``keep1`` is 1 - beta1; ``boost`` is max_row_boost, inf for no limit; ``unscale`` is what
    gradients are multiplied by first; ``shrink`` is what sums of |g|^2 of the first sweep are multiplied by after it.

    Attributes:
        table: [rows, k].
        still: [k] marks tensors whose lr is 0; None where the host knows that there are none.
        scaled: whether there may be an ``unscale`` other than 1.
    """

    table: Tensor
    still: Tensor | None
    scaled: bool

    def part(self, columns: slice) -> Numbers:
        """The numbers of some of the tensors."""
        return Numbers(self.table[:, columns], None if self.still is None else self.still[columns], self.scaled)

    def clip(self, factor: Tensor) -> None:
        """Multiply gradients by a scalar from now on, and the sums of their squares that have been taken."""
        self.table[_UNSCALE] *= factor
        self.table[_SHRINK] = factor.square()

    def __getattr__(self, name: str) -> Tensor:
        if name in ROWS:
            return self.table[ROWS.index(name)]
        raise AttributeError(name)


ROWS = ("b", "rho", "added", "floor", "cap", "eps2", "d", "decay", "keep1", "sign", "boost", "unscale", "shrink", "t")
"""The rows of the table of step numbers, which are attributes of it."""


def numbers(
    rules: Sequence[Rule],
    which: Tensor,
    t: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    unscale: Tensor | None = None,
) -> Numbers:
    """The step numbers of tensors under rules of one form.

    A few vector operations, in float64 and then rounded once to dtype; no accelerator is waited for.

    Args:
        rules: all of one form.
        which: [k] the index of each tensor's rule, on the CPU.
        t: [k] the step count of each, this step included, on the CPU or the device.
        dtype: what the arithmetic runs in.
        device: where the tensors are.
        unscale: a scalar that all gradients are multiplied by; None is 1.
    """
    kind, by_lr = rules[0].rho, rules[0].decay_by == "lr"
    # The user's default device may be another.
    columns = torch.tensor([_column(rule, dtype) for rule in rules], dtype=torch.float64, device="cpu")
    table = columns[which].t().contiguous()
    still: Tensor | None = None
    # MPS has no float64.
    wide = torch.float32 if device.type == "mps" else torch.float64
    has_tensors = any(isinstance(rule.lr, Tensor) for rule in rules)
    if has_tensors or t.device.type != "cpu":
        table, t = (x.to(device, wide, non_blocking=True) for x in (table, t))
    else:
        t = t.double()
    if has_tensors:
        each = [torch.as_tensor(rule.lr, dtype=wide, device=device).reshape(()) for rule in rules]
        lr = torch.stack(each)[which.to(device, non_blocking=True)]
        still = lr == 0
        table[_RHO] = lr
        if by_lr:
            table[_DECAY] = 1 - (1 - table[_DECAY] * lr).to(dtype).to(wide)
    elif any(rule.lr == 0 for rule in rules):
        still = (table[_RHO] == 0).to(device, non_blocking=True)
    tau, offset, least_b = table[len(ROWS) :]
    table[_T] = t
    table[_B] = (t - offset).clamp_(min=1).pow_(tau).maximum(least_b)
    if kind != "constant":
        table[_RHO] = _rho(kind, table[_RHO], t)
    table = table[: len(ROWS)].to(dtype).to(device, non_blocking=True)
    if unscale is not None:
        table[_UNSCALE] = unscale
    return Numbers(table, still, unscale is not None or rules[0].form.clips)


_B, _RHO, _DECAY, _UNSCALE, _SHRINK, _T = map(ROWS.index, ("b", "rho", "decay", "unscale", "shrink", "t"))


def _column(rule: Rule, dtype: torch.dtype) -> tuple[float, ...]:
    """What is known of ROWS without the step count, and tau, offset and the smallest b; rho is lr so far."""
    limits = torch.finfo(dtype)
    eps1 = limits.eps if rule.eps1 is None else rule.eps1
    floor = eps1 if rule.eps1_in == "floor" else 0.0
    lr = 0.0 if isinstance(rule.lr, Tensor) else rule.lr
    decay = rule.weight_decay
    if decay and rule.decay_by == "lr" and not isinstance(rule.lr, Tensor):
        # Rounded as torch rounds it, which multiplies by 1 - lambda: over many steps the difference adds up.
        decay = 1 - float(torch.tensor(1 - decay * lr, dtype=dtype, device="cpu"))
    return (
        0.0,
        lr,
        eps1 - floor,
        max(floor, limits.tiny),
        min(1 / floor if floor else inf, limits.tiny**-0.5),
        rule.eps2,
        inf if rule.d is None else rule.d,
        decay,
        1.0 if rule.beta1 is None else 1.0 - rule.beta1,
        -1.0 if rule.maximize else 1.0,
        inf if rule.max_row_boost is None else rule.max_row_boost,
        1.0,
        1.0,
        0.0,
        rule.tau,
        rule.offset,
        1.0 - rule.cap,
    )


def _rho(kind: str, lr: Tensor, t: Tensor) -> Tensor:
    if kind == "constant":
        return lr
    root = t.rsqrt()
    if kind == "capped":
        return torch.minimum(lr, root)
    return torch.clamp(root, max=1e-2) if kind == "relative" else torch.minimum(1e-6 * t, root)
