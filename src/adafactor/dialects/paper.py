"""The Adafactor of the paper: a step size from the step count and the parameter's scale alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch.optim.optimizer import ParamsT

from .. import checks, layouts
from ..optimizer import BaseAdafactor
from ..rounding import Rounding
from ..rule import Rule


class Adafactor(BaseAdafactor):
    r"""Algorithms 4 to 6 of the paper, with the values it proposes; there is no learning rate to choose.

    In the letters of :class:`adafactor.rule.Rule`::

        b      = t ^ decay_rate
        alpha  = min(1e-2, 1 / sqrt t) max(eps2, rms(p))        1e-6 t for 1e-2 with warmup_init
        R, C  <- averages of g^2 + eps1; V = R C / mean(R)
        p     <- p - weight_decay alpha p - alpha u / max(1, rms(u) / d),  u = g / sqrt V

    Note:
        ``warmup_init`` is section 8's, for models that diverge without a warm-up. ``beta1`` (momentum of the step, not
        corrected for its start) and ``weight_decay`` (decoupled) are extensions. The lr of a group shows the relative
        step size; setting it to anything but 0, which freezes the group, has no effect.

    Args:
        params: tensors, (name, tensor) pairs, or dicts of them with options of their own.
        eps: (eps1, eps2): what is added to g^2, and the smallest parameter scale.
        d: the clipping threshold of rms(u), above 0; None for no clipping.
        decay_rate: the exponent of 1 - beta2_t, at most 0.
        warmup_init: whether the relative step size starts at 1e-6 and grows.
        beta1: the decay of the momentum, in [0, 1). None and 0 keep no buffer.
        weight_decay: decoupled, times alpha.
        factor, min_dim_size_to_factor, foreach, fused, rounding, seed, skip_nonfinite, max_row_boost,
            max_grad_norm: see :class:`adafactor.Adafactor`.

    Raises:
        ValueError: an argument or a parameter is out of its range; the message has the rule and the value.

    Source: Shazeer and Stern 2018, arXiv:1804.04235.
    """

    layout = layouts.PAPER

    def __init__(
        self,
        params: ParamsT,
        eps: tuple[float, float] = (1e-30, 1e-3),
        d: float | None = 1.0,
        decay_rate: float = -0.8,
        warmup_init: bool = False,
        beta1: float | None = None,
        weight_decay: float = 0.0,
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
            "lr": None,
            "eps": eps,
            "d": d,
            "decay_rate": decay_rate,
            "warmup_init": warmup_init,
            "beta1": beta1,
            "weight_decay": weight_decay,
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
        super().__init__(params, defaults)

    def _request(self, group: dict[str, Any]) -> dict[str, Any]:
        if group.get("lr") is not None and not self._is_copied(group):
            raise ValueError(f"a group should have no lr, since the step size is relative, got {group['lr']!r}")
        return group

    @staticmethod
    def rule(group: Mapping[str, Any]) -> Rule:
        """What a step of the group computes. Raises a ValueError that names the argument, its rule and its value."""
        eps1, eps2 = checks.epsilons("eps", group["eps"], none=False)
        return Rule(
            rho="warmup" if checks.flag("warmup_init", group["warmup_init"]) else "relative",
            # None is what a relative group says until its first read-out.
            lr=1.0 if group["lr"] is None else checks.learning_rate("lr", group["lr"]),
            scale=True,
            eps1=eps1,
            eps1_in="statistics",
            eps2=eps2,
            tau=checks.decay_exponent("decay_rate", group["decay_rate"]),
            d=checks.threshold("d", group["d"]),
            beta1=checks.momentum("beta1", group["beta1"]),
            weight_decay=checks.at_least_zero("weight_decay", group["weight_decay"]),
            decay_by="alpha",
            **BaseAdafactor.common(group),
        )
