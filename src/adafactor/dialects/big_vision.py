"""The Adafactor of big_vision, as timm's AdafactorBigVision: no parameter scale, momentum before lr in bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from .. import checks, layouts
from ..optimizer import BaseAdafactor
from ..rounding import Rounding
from ..rule import Rule


class Adafactor(BaseAdafactor):
    r"""Adafactor with the arguments, defaults, trajectory and state of timm's ``AdafactorBigVision``.

    In the letters of :class:`adafactor.rule.Rule`::

        b      = max(max(t - decay_offset, 1) ^ -decay_rate, 1 - beta2_cap)
        R, C  <- averages of g^2 + eps over the two largest dims; V = R C / mean(R)
        u      = g / sqrt V / max(1, rms(g / sqrt V) / clipping_threshold)
        u     <- m <- m + (1 - momentum) (u - m)            u and m rounded to momentum_dtype; without momentum: u
        p     <- p - weight_decay lr p - lr u               weight_decay alone with unscaled_wd

    Note:
        timm's ``caution`` and ``corrected_weight_decay`` are left out: they are other algorithms.

    Args:
        params: tensors, (name, tensor) pairs, or dicts of them with options of their own.
        lr: the step size: a number or a one-element tensor. With 0 nothing moves.
        min_dim_size_to_factor: the fewest rows and columns that are factored; big_vision itself has 32.
        decay_rate: the exponent of beta2's schedule, at least 0.
        decay_offset: steps before beta2's schedule begins.
        beta2_cap: the largest beta2, in [0, 1].
        momentum: the decay of the momentum, in [0, 1). None and 0 keep no buffer.
        momentum_dtype: what the momentum is kept in: a dtype or its name.
        eps: what is added to g^2; None is 1e-30.
        weight_decay: decoupled, times lr.
        clipping_threshold: the clipping threshold of rms(u), above 0; None for no clipping.
        unscaled_wd: whether the weight decay is times 1 in place of lr, as in big_vision itself.
        factor, foreach, fused, rounding, seed, skip_nonfinite, max_row_boost, max_grad_norm: see
            :class:`adafactor.Adafactor`.

    Raises:
        ValueError: an argument or a parameter is out of its range; the message has the rule and the value.

    Source: ``timm/optim/adafactor_bv.py`` of timm 1.0.31; big_vision's ``optax.py`` for the algorithm.
    """

    layout = layouts.BIG_VISION

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        min_dim_size_to_factor: int = 16,
        decay_rate: float = 0.8,
        decay_offset: int = 0,
        beta2_cap: float = 0.999,
        momentum: float | None = 0.9,
        momentum_dtype: str | torch.dtype = torch.bfloat16,
        eps: float | None = None,
        weight_decay: float = 0.0,
        clipping_threshold: float | None = None,
        unscaled_wd: bool = False,
        *,
        factor: str = "largest",
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
            "min_dim_size_to_factor": min_dim_size_to_factor,
            "decay_rate": decay_rate,
            "decay_offset": decay_offset,
            "beta2_cap": beta2_cap,
            "momentum": momentum,
            "momentum_dtype": momentum_dtype,
            "eps": eps,
            "weight_decay": weight_decay,
            "clipping_threshold": clipping_threshold,
            "unscaled_wd": unscaled_wd,
            "factor": factor,
            "foreach": foreach,
            "fused": fused,
            "rounding": rounding,
            "seed": seed,
            "skip_nonfinite": skip_nonfinite,
            "max_row_boost": max_row_boost,
            "max_grad_norm": max_grad_norm,
        }
        super().__init__(params, defaults)

    @staticmethod
    def rule(group: Mapping[str, Any]) -> Rule:
        """What a step of the group computes. Raises a ValueError that names the argument, its rule and its value."""
        checks.absent(group, "caution", "corrected_weight_decay")
        return Rule(
            rho="constant",
            lr=checks.learning_rate("lr", group["lr"]),
            scale=False,
            eps1=1e-30 if group["eps"] is None else checks.at_least_zero("eps", group["eps"]),
            eps1_in="statistics",
            eps2=0.0,
            tau=-checks.at_least_zero("decay_rate", group["decay_rate"]),
            offset=checks.count("decay_offset", group["decay_offset"]),
            cap=checks.fraction("beta2_cap", group["beta2_cap"]),
            d=checks.threshold("clipping_threshold", group["clipping_threshold"]),
            beta1=checks.momentum("momentum", group["momentum"]),
            momentum="before",
            momentum_dtype=checks.float_dtype("momentum_dtype", group["momentum_dtype"]),
            weight_decay=checks.at_least_zero("weight_decay", group["weight_decay"]),
            decay_by="one" if checks.flag("unscaled_wd", group["unscaled_wd"]) else "lr",
            **BaseAdafactor.common(group),
        )
