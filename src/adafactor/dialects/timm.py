"""The Adafactor of timm: relative steps without an lr, a plain lr with one, and its own choice of dims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from .. import checks, layouts
from ..optimizer import BaseAdafactor
from ..rounding import Rounding
from ..rule import Rule
from ..shapes import MODES, Factoring


class Adafactor(BaseAdafactor):
    r"""Adafactor with the arguments, defaults, trajectory and state of timm's ``Adafactor``.

    In the letters of :class:`adafactor.rule.Rule`::

        b      = t ^ decay_rate
        alpha  = lr, or without lr min(1e-2, 1 / sqrt t) max(eps_scale, rms(p)), 1e-6 t for 1e-2 with warmup_init
        R, C  <- averages of g^2 + eps; V = R C / mean(R)
        u      = alpha g / sqrt V / max(1, rms(g / sqrt V) / clip_threshold)
        u     <- m <- m + (1 - betas[0]) (u - m)            without betas: u
        p     <- p - weight_decay alpha p - u

    Factored are dims 0 and 1 of three dims and more where both are larger than min_dim_size_to_factor (a convolution's
    channels), else the last two where they are, else nothing.

    Note:
        Without lr, the lr of a group shows the relative step size, and setting it to anything but 0 has no effect.
        timm's ``caution`` is left out: it is another algorithm.

    Args:
        params: tensors, (name, tensor) pairs, or dicts of them with options of their own.
        lr: the step size: a number or a one-element tensor; None for relative steps. With 0 nothing moves.
        eps: what is added to g^2.
        eps_scale: the smallest parameter scale.
        clip_threshold: the clipping threshold of rms(u), above 0; None for no clipping.
        decay_rate: the exponent of 1 - beta2_t, at most 0.
        betas: the first is the decay of the momentum, in [0, 1). None and a first of 0 keep no buffer.
        weight_decay: decoupled, times alpha.
        scale_parameter: whether relative steps are scaled by rms(p).
        warmup_init: whether the relative step size starts at 1e-6 and grows.
        min_dim_size_to_factor: both dims have to be larger than this to be factored.
        factor: None is timm's choice of dims; else see :class:`adafactor.Adafactor`.
        foreach, fused, rounding, seed, skip_nonfinite, max_row_boost, max_grad_norm: see :class:`adafactor.Adafactor`.

    Raises:
        ValueError: an argument or a parameter is out of its range, or warmup_init is given with lr; the message has
            the rule and the value.

    Source: ``timm/optim/adafactor.py`` of timm 1.0.31.
    """

    layout = layouts.TIMM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor | None = None,
        eps: float = 1e-30,
        eps_scale: float = 1e-3,
        clip_threshold: float | None = 1.0,
        decay_rate: float = -0.8,
        betas: tuple[float, float] | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        warmup_init: bool = False,
        min_dim_size_to_factor: int = 16,
        *,
        factor: str | None = None,
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
            "eps_scale": eps_scale,
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": _beta1(betas),
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "relative_step": lr is None,
            "warmup_init": warmup_init,
            "min_dim_size_to_factor": min_dim_size_to_factor,
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
        if "betas" in group:
            group["beta1"] = _beta1(group.pop("betas"))
        if not self._is_copied(group) and "lr" in group:
            # A group with an lr of its own takes that in place of relative steps, one with None the reverse.
            if group["lr"] is not None and group.get("relative_step"):
                raise ValueError(f"lr should be None with relative_step=True, got {group['lr']!r}")
            group.setdefault("relative_step", group["lr"] is None)
        return group

    @staticmethod
    def factoring(group: Mapping[str, Any]) -> Factoring:
        """Which shapes are factored, and over which dims. Raises a ValueError like ``rule``."""
        mode = group.get("factor")
        return Factoring(
            "timm" if mode is None else checks.choice("factor", mode, MODES),
            checks.count("min_dim_size_to_factor", group["min_dim_size_to_factor"]),
        )

    @staticmethod
    def rule(group: Mapping[str, Any]) -> Rule:
        """What a step of the group computes. Raises a ValueError that names the argument, its rule and its value."""
        checks.absent(group, "caution")
        relative = checks.flag("relative_step", group["relative_step"])
        warmup = checks.flag("warmup_init", group["warmup_init"])
        lr = group["lr"]
        if lr is None and not relative:
            raise ValueError("lr should be a number >= 0 with relative_step=False, got None")
        if warmup and not relative:
            raise ValueError("warmup_init should be False with an lr, got True")
        return Rule(
            rho=("warmup" if warmup else "relative") if relative else "constant",
            lr=1.0 if lr is None else checks.learning_rate("lr", lr),
            scale=checks.flag("scale_parameter", group["scale_parameter"]) and relative,
            eps1=checks.at_least_zero("eps", group["eps"]),
            eps1_in="statistics",
            eps2=checks.at_least_zero("eps_scale", group["eps_scale"]),
            tau=checks.decay_exponent("decay_rate", group["decay_rate"]),
            d=checks.threshold("clip_threshold", group["clip_threshold"]),
            beta1=checks.momentum("beta1", group["beta1"]),
            weight_decay=checks.at_least_zero("weight_decay", group["weight_decay"]),
            decay_by="alpha",
            **BaseAdafactor.common(group),
        )


def _beta1(betas: Any) -> Any:
    if betas is not None and (not isinstance(betas, Sequence) or isinstance(betas, str) or not betas):
        raise ValueError(f"betas should be a pair of numbers or None, got {betas!r}")
    return None if betas is None else betas[0]
