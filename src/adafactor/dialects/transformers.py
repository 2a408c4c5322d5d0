"""The Adafactor of transformers (and towhee and fairseq), and its schedule: the classes to put in their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import ParamsT

from .. import checks, layouts
from ..optimizer import BaseAdafactor
from ..rounding import Rounding
from ..rule import Rule


class Adafactor(BaseAdafactor):
    r"""Adafactor with the arguments, defaults, trajectory and state of transformers' and towhee's ``Adafactor``.

    In the letters of :class:`adafactor.rule.Rule`, with n x m matrices in the last two dims::

        t     <- t + 1
        b      = t ^ decay_rate
        rho    = lr, or with relative_step min(1e-2, 1 / sqrt t), 1e-6 t for 1e-2 with warmup_init
        alpha  = rho max(eps2, rms(p))                      rho without scale_parameter
        R     <- R + b (row means of g^2 + eps1 - R)
        C     <- C + b (column means of g^2 + eps1 - C)     fewer than two dims: V <- V + b (g^2 + eps1 - V)
        V      = R C / mean(R)
        u      = alpha g / sqrt V / max(1, rms(g / sqrt V) / clip_threshold)
        u     <- m <- m + (1 - beta1) (u - m)               without beta1: u
        p     <- p - weight_decay alpha p - u

    Note:
        With relative_step, the lr of a group shows the step size rho, and setting it to anything but 0 has no effect.
        ``docs/deviations.md`` lists every difference from the systems matched.

    Args:
        params: tensors, (name, tensor) pairs, or dicts of them with options of their own.
        lr: the step size: a number or a one-element tensor. None with relative_step, which chooses it. With 0 nothing
            moves.
        eps: (eps1, eps2): what is added to g^2, and the smallest parameter scale.
        clip_threshold: the clipping threshold of rms(u), above 0; None for no clipping.
        decay_rate: the exponent of 1 - beta2_t, at most 0.
        beta1: the decay of the momentum, in [0, 1). None and 0 keep no buffer.
        weight_decay: decoupled, times alpha.
        scale_parameter: whether the step size is scaled by rms(p).
        relative_step: whether the step size comes from the step count in place of lr.
        warmup_init: whether the relative step size starts at 1e-6 and grows.
        factor, min_dim_size_to_factor, foreach, fused, rounding, seed, skip_nonfinite, max_row_boost,
            max_grad_norm: see :class:`adafactor.Adafactor`.

    Raises:
        ValueError: an argument or a parameter is out of its range, lr is given with relative_step, or warmup_init
            without; the message has the rule and the value.

    Source: ``transformers/optimization.py`` of transformers 5; towhee 1.1 and fairseq compute the same.

    >>> import torch
    >>> from adafactor.dialects.transformers import Adafactor
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = Adafactor(model.parameters(), lr=1e-3, relative_step=False, scale_parameter=False)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    """

    layout = layouts.TRANSFORMERS

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float | None = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        *,
        factor: str = "last",
        min_dim_size_to_factor: int = 0,
        foreach: bool | None = None,
        fused: bool | None = None,
        rounding: Rounding = "nearest",
        seed: int = 0,
        skip_nonfinite: bool | Literal["parameter"] = False,
        max_row_boost: float | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "warmup_init": warmup_init,
            "factor": factor,
            "min_dim_size_to_factor": min_dim_size_to_factor,
            "foreach": foreach,
            "fused": fused,
            "rounding": rounding,
            "seed": seed,
            "skip_nonfinite": skip_nonfinite,
            "max_row_boost": max_row_boost,
            "max_grad_norm": max_grad_norm,
        }
        _check_conflicts(lr, relative_step, warmup_init)
        super().__init__(params, defaults)

    def _request(self, group: dict[str, Any]) -> dict[str, Any]:
        if not self._is_copied(group):
            options = {**self.defaults, **group}
            _check_conflicts(group.get("lr"), options["relative_step"], options["warmup_init"])
        return group

    @staticmethod
    def rule(group: Mapping[str, Any]) -> Rule:
        """What a step of the group computes. Raises a ValueError that names the argument, its rule and its value."""
        eps1, eps2 = checks.epsilons("eps", group["eps"], none=False)
        relative = checks.flag("relative_step", group["relative_step"])
        warmup = checks.flag("warmup_init", group["warmup_init"])
        lr = group["lr"]
        if lr is None and not relative:
            raise ValueError("lr should be a number >= 0 with relative_step=False, got None")
        return Rule(
            rho=("warmup" if warmup else "relative") if relative else "constant",
            # None is what a relative group says until its first read-out.
            lr=1.0 if lr is None else checks.learning_rate("lr", lr),
            scale=checks.flag("scale_parameter", group["scale_parameter"]),
            eps1=eps1,
            eps1_in="statistics",
            eps2=eps2,
            tau=checks.decay_exponent("decay_rate", group["decay_rate"]),
            d=checks.threshold("clip_threshold", group["clip_threshold"]),
            beta1=checks.momentum("beta1", group["beta1"]),
            weight_decay=checks.at_least_zero("weight_decay", group["weight_decay"]),
            decay_by="alpha",
            **BaseAdafactor.common(group),
        )


def _check_conflicts(lr: Any, relative_step: Any, warmup_init: Any) -> None:
    relative_step = checks.flag("relative_step", relative_step)
    warmup_init = checks.flag("warmup_init", warmup_init)
    if lr is not None and relative_step:
        raise ValueError(f"lr should be None with relative_step=True, which chooses the step size, got {lr!r}")
    if warmup_init and not relative_step:
        raise ValueError(f"warmup_init should be False with relative_step=False, got {warmup_init!r}")


class AdafactorSchedule(LRScheduler):
    """Shows, as a scheduler's lr, the step sizes that a relative-step Adafactor chooses, for loops and loggers.

    Each value is the step size alpha of the group's first parameter that has stepped. It reads the optimizer and never
    writes to it.

    Args:
        optimizer: an Adafactor of this package.
        initial_lr: what is shown for a group before its first step.

    Source: transformers' class of this name.
    """

    optimizer: BaseAdafactor

    def __init__(self, optimizer: BaseAdafactor, initial_lr: float = 0.0) -> None:
        if not isinstance(optimizer, BaseAdafactor):
            raise TypeError(f"optimizer should be an Adafactor of this package, got {type(optimizer).__name__}")
        self.initial_lr = initial_lr
        foreign = [group for group in optimizer.param_groups if "initial_lr" not in group]
        super().__init__(optimizer)
        for group in foreign:
            # The base class notes it for schedulers that compute from it.
            del group["initial_lr"]

    def get_lr(self) -> list[float | Tensor]:
        """The step size of each group, initial_lr for those that have not stepped."""
        return [self.initial_lr if size is None else size for size in self.optimizer.step_sizes()]

    def step(self, epoch: int | None = None) -> None:
        """Read the step sizes anew. The epoch is counted and has no influence."""
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._last_lr = self.get_lr()


def get_adafactor_schedule(optimizer: BaseAdafactor, initial_lr: float = 0.0) -> AdafactorSchedule:
    """An :class:`AdafactorSchedule` of the optimizer, under the name that transformers gives the function."""
    return AdafactorSchedule(optimizer, initial_lr)
