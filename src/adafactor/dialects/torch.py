"""The Adafactor of ``torch.optim``: the class to put in its place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from .. import checks, layouts
from ..optimizer import BaseAdafactor
from ..rounding import Rounding
from ..rule import Rule


class Adafactor(BaseAdafactor):
    r"""Adafactor with the arguments, defaults, trajectory and state of :class:`torch.optim.Adafactor`.

    In the letters of :class:`adafactor.rule.Rule`, with n x m matrices in the last two dims::

        t     <- t + 1
        b      = t ^ beta2_decay
        rho    = min(lr, 1 / sqrt t)
        alpha  = rho max(eps2, rms(p))
        R     <- R + b (row means of g^2 - R)
        C     <- C + b (column means of g^2 - C)            fewer than two dims: V <- V + b (g^2 - V)
        V      = R C / max(mean(R), eps1)
        u      = g / max(sqrt V, eps1)
        p     <- p - weight_decay lr p - alpha u / max(1, rms(u) / d)

    Note:
        Unlike the paper's, eps1 is a floor and no part of the statistics, and lr caps the relative step size and scales
        the weight decay. Unlike torch's, statistics and arithmetic are float32 for bfloat16 and float16 parameters,
        eps1=None is the machine epsilon of that arithmetic whatever the parameter's dtype, and a d below 1 or None and
        an lr of inf (no cap) are taken. ``docs/deviations.md`` lists every difference.

    Args:
        params: tensors, (name, tensor) pairs, or dicts of them with options of their own.
        lr: the largest relative step size: a number or a one-element tensor; with inf, 1 / sqrt t alone. With 0 nothing
            moves.
        beta2_decay: the exponent of 1 - beta2_t, at most 0.
        eps: (eps1, eps2): the floor of the denominators, None for the machine epsilon; the smallest parameter scale.
        d: the clipping threshold of rms(u), above 0; None for no clipping.
        weight_decay: decoupled, times lr.
        foreach: True steps all tensors at once with ``torch._foreach_*``, at the price of
            temporaries of the parameters' size; None and False do not.
        maximize: whether to climb.
        factor: which dims are rows and columns: "last", the last two; "largest", the two largest; "matrix", the
            contiguous split of the dims that keeps the fewest numbers, with a full V where that is no larger.
        min_dim_size_to_factor: the fewest rows and columns that are factored.
        fused: None takes the compiled kernel for every tensor that it supports, and plain PyTorch for the others;
            True takes nothing but the kernel, and False nothing but plain PyTorch. See ``adafactor.backends.why``.
        rounding: how bfloat16 and float16 parameters are rounded. "nearest" loses steps of less than half a unit in the
            last place (0.2% of a bfloat16 weight). "stochastic" rounds up or down, with the probability that makes the
            mean right, and keeps nothing. "kahan" keeps what rounding takes off, in one more tensor of the parameter's
            size and dtype. Other dtypes are rounded to the nearest.
        seed: of the random bits of "stochastic" and "kahan", which are a hash of it, of the parameter's name or place,
            of the step and of the element. ``torch.manual_seed`` has no part in them.
        skip_nonfinite: True leaves all parameters and state as they were at a step at which a gradient is not finite,
            in any group that says so; "parameter" those alone whose gradients are not. A gradient is finite where its
            squares, and their sums over rows and over columns, are, in float32. ``skipped_steps`` counts,
            ``nonfinite_parameters()`` names them. False lets inf and nan through.
        max_row_boost: about the largest rms of u in a row (along the earlier of the two dims) of a factored tensor, at
            least 1; None is no limit. For embeddings and experts, whose rows take steps several times too large when
            they wake after idle steps.
        max_grad_norm: the largest norm of all gradients together, of all groups, above 0: a step with more takes them
            times max_grad_norm / norm, as ``torch.nn.utils.clip_grad_norm_`` before it would; the gradients themselves
            stay as they are. ``grad_norm`` is the norm. inf measures it and clips nothing; None does neither.

    Raises:
        ValueError: an argument or a parameter is out of its range; the message has the rule and the value.
        RuntimeError: fused=True, and there is no compiled kernel; a step, if it does not support one of the tensors.

    Source: ``torch/optim/_adafactor.py`` of PyTorch 2.13.

    >>> import torch
    >>> from adafactor import Adafactor
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = Adafactor(model.parameters(), lr=1e-2)
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> optimizer.step()
    """

    layout = layouts.TORCH

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float | None = 1.0,
        weight_decay: float = 0.0,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        factor: str = "last",
        min_dim_size_to_factor: int = 0,
        fused: bool | None = None,
        rounding: Rounding = "nearest",
        seed: int = 0,
        skip_nonfinite: bool | Literal["parameter"] = False,
        max_row_boost: float | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "beta2_decay": beta2_decay,
            "eps": eps,
            "d": d,
            "weight_decay": weight_decay,
            "foreach": foreach,
            "maximize": maximize,
            "factor": factor,
            "min_dim_size_to_factor": min_dim_size_to_factor,
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
        eps1, eps2 = checks.epsilons("eps", group["eps"], none=True)
        weight_decay = checks.at_least_zero("weight_decay", group["weight_decay"])
        return Rule(
            rho="capped",
            lr=checks.learning_rate("lr", group["lr"], finite=weight_decay > 0),
            scale=True,
            eps1=eps1,
            eps1_in="floor",
            eps2=eps2,
            tau=checks.decay_exponent("beta2_decay", group["beta2_decay"]),
            d=checks.threshold("d", group["d"]),
            beta1=None,
            weight_decay=weight_decay,
            decay_by="lr",
            maximize=checks.flag("maximize", group["maximize"]),
            **BaseAdafactor.common(group),
        )
