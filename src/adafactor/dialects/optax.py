"""The Adafactor of optax, which is T5X's: lr times the parameter's scale, the two largest dims factored."""

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
from ..shapes import MODES, Factoring


class Adafactor(BaseAdafactor):
    r"""Adafactor with the arguments, defaults and trajectory of ``optax.adafactor``.

    In the letters of :class:`adafactor.rule.Rule`::

        b      = max(t - decay_offset, 1) ^ -decay_rate
        alpha  = learning_rate max(1e-3, rms(p))            learning_rate without multiply_by_parameter_scale
        R, C  <- averages of g^2 + eps over the two largest dims; V = R C / mean(R)
        u      = alpha g / sqrt V / max(1, rms(g / sqrt V) / clipping_threshold)
        u     <- m <- m + (1 - momentum) (u - m)            without momentum: u
        p     <- p - weight_decay_rate p - u

    Note:
        The weight decay is not multiplied by the learning rate. The learning rate is the group's ``lr`` for PyTorch's
        schedulers, where optax takes a callable. For t <= decay_offset optax gives nan; here beta2 stays 0 until then.

    Args:
        params: tensors, (name, tensor) pairs, or dicts of them with options of their own.
        learning_rate: a number or a one-element tensor; None is 1. Groups keep it as ``lr``.
        min_dim_size_to_factor: the fewest rows and columns that are factored.
        decay_rate: the exponent of beta2's schedule, at least 0.
        decay_offset: steps before beta2's schedule begins.
        multiply_by_parameter_scale: whether the step size is scaled by rms(p).
        clipping_threshold: the clipping threshold of rms(u), above 0; None for no clipping.
        momentum: the decay of the momentum, in [0, 1). None and 0 keep no buffer.
        dtype_momentum: what the momentum is kept in.
        weight_decay_rate: decoupled, times 1; None is 0.
        eps: what is added to g^2.
        factored: False keeps a full V.
        batch_dims: T5X's batch dims: leading dims over which parameters are stacks (of layers, say); each slice has a
            scale and clipping of its own.
        factor, foreach, fused, rounding, seed, skip_nonfinite, max_row_boost, max_grad_norm: see
            :class:`adafactor.Adafactor`.

    Raises:
        ValueError: an argument or a parameter is out of its range; the message has the rule and the value.

    Source: ``optax/_src/alias.py`` and ``factorized.py`` of optax 0.2.8; ``batch_dims`` from T5X's ``adafactor.py``.
    """

    layout = layouts.OPTAX

    def __init__(
        self,
        params: ParamsT,
        learning_rate: float | Tensor | None = None,
        min_dim_size_to_factor: int = 128,
        decay_rate: float = 0.8,
        decay_offset: int = 0,
        multiply_by_parameter_scale: bool = True,
        clipping_threshold: float | None = 1.0,
        momentum: float | None = None,
        dtype_momentum: torch.dtype = torch.float32,
        weight_decay_rate: float | None = None,
        eps: float = 1e-30,
        factored: bool = True,
        *,
        batch_dims: int = 0,
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
            "lr": 1.0 if learning_rate is None else learning_rate,
            "min_dim_size_to_factor": min_dim_size_to_factor,
            "decay_rate": decay_rate,
            "decay_offset": decay_offset,
            "multiply_by_parameter_scale": multiply_by_parameter_scale,
            "clipping_threshold": clipping_threshold,
            "momentum": momentum,
            "dtype_momentum": dtype_momentum,
            "weight_decay_rate": weight_decay_rate,
            "eps": eps,
            "factored": factored,
            "batch_dims": batch_dims,
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

    def _request(self, group: dict[str, Any]) -> dict[str, Any]:
        if "learning_rate" in group:
            lr = group.pop("learning_rate")
            group["lr"] = 1.0 if lr is None else lr
        return group

    @staticmethod
    def factoring(group: Mapping[str, Any]) -> Factoring:
        """Which shapes are factored, and over which dims. Raises a ValueError like ``rule``."""
        mode = checks.choice("factor", group.get("factor", "largest"), MODES)
        return Factoring(
            mode if checks.flag("factored", group["factored"]) else "none",
            checks.count("min_dim_size_to_factor", group["min_dim_size_to_factor"]),
            checks.count("batch_dims", group.get("batch_dims", 0)),
        )

    @staticmethod
    def rule(group: Mapping[str, Any]) -> Rule:
        """What a step of the group computes. Raises a ValueError that names the argument, its rule and its value."""
        decay = group["weight_decay_rate"]
        return Rule(
            rho="constant",
            lr=checks.learning_rate("learning_rate", group["lr"]),
            scale=checks.flag("multiply_by_parameter_scale", group["multiply_by_parameter_scale"]),
            eps1=checks.at_least_zero("eps", group["eps"]),
            eps1_in="statistics",
            eps2=1e-3,
            tau=-checks.at_least_zero("decay_rate", group["decay_rate"]),
            offset=checks.count("decay_offset", group["decay_offset"]),
            d=checks.threshold("clipping_threshold", group["clipping_threshold"]),
            beta1=checks.momentum("momentum", group["momentum"]),
            momentum_dtype=checks.float_dtype("dtype_momentum", group["dtype_momentum"]),
            weight_decay=0.0 if decay is None else checks.at_least_zero("weight_decay_rate", decay),
            decay_by="one",
            **BaseAdafactor.common(group),
        )
