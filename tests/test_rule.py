"""The numbers of a step, worked by hand: if they are off, every dialect trains at another speed than it says."""

import math

import numpy as np
import pytest
import torch

from adafactor import checks
from adafactor.rule import Rule, numbers

CPU = torch.device("cpu")


def rule(**changes):
    fields = {
        "rho": "capped",
        "lr": 0.5,
        "scale": True,
        "eps1": None,
        "eps1_in": "floor",
        "eps2": 1e-3,
        "tau": -0.8,
        "d": 1.0,
        "beta1": None,
        "weight_decay": 0.0,
        "decay_by": "lr",
    }
    return Rule(**{**fields, **changes})


def table(*rules, t, dtype=torch.float64):
    return numbers(rules, torch.arange(len(rules)), torch.tensor(t, dtype=torch.float32), dtype, CPU)


@pytest.mark.parametrize(
    ("kind", "t", "rho"),
    [
        ("constant", 9, 0.5),
        ("capped", 1, 0.5),
        ("capped", 16, 0.25),
        ("relative", 4, 1e-2),
        ("relative", 40_000, 0.005),
        ("warmup", 7, 7e-6),
        ("warmup", 40_000, 0.005),
    ],
)
def test_the_step_size_follows_its_schedule(kind, t, rho):
    assert rule(rho=kind).step_size(t) == pytest.approx(rho, rel=1e-15)
    assert table(rule(rho=kind), t=[t]).rho.item() == pytest.approx(rho, rel=1e-15)


def test_before_the_first_step_the_step_size_is_the_one_to_come():
    assert rule(rho="warmup").step_size(0) == 1e-6


def test_beta2_is_0_at_the_first_step_and_grows():
    """At t = 1 the statistics are the gradient's alone: what was there before, zeros, must not count."""
    b = table(rule(), rule(), rule(tau=-1.0), rule(tau=0.0), t=[1, 32, 4, 9]).b
    assert b.tolist() == pytest.approx([1.0, 2**-4, 0.25, 1.0], rel=1e-15)


def test_each_tensor_has_the_numbers_of_its_own_rule_and_step():
    """Groups share a batch: no option may leak from one to another."""
    first = rule(eps1=1e-3, d=None, weight_decay=0.1, beta1=0.9)
    second = rule(lr=0.25, eps1=1e-5, eps2=0.5, d=2.0, weight_decay=0.2, beta1=0.5, maximize=True)
    n = table(first, second, first, t=[1, 1, 100])
    assert n.rho.tolist() == pytest.approx([0.5, 0.25, 0.1])
    assert n.floor.tolist() == [1e-3, 1e-5, 1e-3]
    assert n.cap.tolist() == pytest.approx([1e3, 1e5, 1e3])
    assert n.added.tolist() == [0, 0, 0]
    assert n.eps2.tolist() == [1e-3, 0.5, 1e-3]
    assert n.d.tolist() == [math.inf, 2.0, math.inf]
    assert n.decay.tolist() == pytest.approx([0.05, 0.05, 0.05])
    assert n.keep1.tolist() == pytest.approx([0.1, 0.5, 0.1])
    assert n.sign.tolist() == [1, -1, 1]
    assert n.still is None


def test_eps1_goes_into_the_statistics_or_is_the_floor():
    n = table(rule(eps1=1e-6, eps1_in="statistics"), t=[1], dtype=torch.float32)
    assert n.added.item() == pytest.approx(1e-6)
    assert n.floor.item() == torch.finfo(torch.float32).tiny
    assert n.cap.item() == pytest.approx(torch.finfo(torch.float32).tiny ** -0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eps1_none_is_the_machine_epsilon_of_the_arithmetic(dtype):
    assert table(rule(), t=[1], dtype=dtype).floor.item() == torch.finfo(dtype).eps


@pytest.mark.parametrize("eps1", [0.0, 1e-45, 1e-40])
def test_the_largest_inverse_root_is_finite_for_any_eps(eps1):
    """Else a zero gradient over a zero statistic is 0 * inf = nan, and the parameter is gone."""
    n = table(rule(eps1=eps1), t=[1], dtype=torch.float32)
    assert torch.isfinite(n.cap).all()
    assert n.floor.item() > 0


def test_a_tensor_lr_gives_the_numbers_of_the_same_float():
    """A tensor lr is how schedules reach a captured graph; the step must not depend on how lr is passed."""
    for kind in ("capped", "constant"):
        by_tensor = table(rule(rho=kind, lr=torch.tensor(0.125), weight_decay=0.1), t=[100])
        by_float = table(rule(rho=kind, lr=0.125, weight_decay=0.1), t=[100])
        assert by_tensor.rho.tolist() == by_float.rho.tolist()
        assert by_tensor.decay.tolist() == by_float.decay.tolist()
        assert by_tensor.still is not None
        assert by_tensor.still.tolist() == [False]
    assert table(rule(lr=torch.tensor(0.0)), t=[1]).still.tolist() == [True]


def test_lr_0_is_marked_for_its_own_tensors_only():
    assert table(rule(lr=0.0), rule(), t=[1, 1]).still.tolist() == [True, False]


@pytest.mark.parametrize("landed", [-5.6e-18, -0.0, 0.0])
def test_a_schedule_that_lands_beside_0_means_0(landed):
    """LinearLR from 0.1 to 0 over 4 steps ends on -5.6e-18; a run must not die of it at its last step."""
    assert checks.learning_rate("lr", landed) == 0.0


def test_numpy_numbers_are_numbers():
    assert checks.learning_rate("lr", np.float32(0.5)) == 0.5
    with pytest.raises(ValueError, match=r"d should be > 0 or None, got np\.int64\(0\)"):
        checks.threshold("d", np.int64(0))
