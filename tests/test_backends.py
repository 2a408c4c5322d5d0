"""Every backend against the specification in float64: over shapes, dtypes and rules."""

import pytest
import torch
from helpers import parameters, random_steps, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from adafactor import Adafactor
from adafactor.backends import choose, cpu
from adafactor.dialects.transformers import Adafactor as TransformersAdafactor

RULES = [
    (Adafactor, {"lr": 0.05}),
    (Adafactor, {"lr": 0.05, "weight_decay": 0.1, "d": None, "maximize": True}),
    (Adafactor, {"lr": 0.05, "eps": (1e-2, 1e-2), "d": 0.5}),
    (TransformersAdafactor, {}),
    (TransformersAdafactor, {"beta1": 0.9, "weight_decay": 0.1}),
    (TransformersAdafactor, {"lr": 0.01, "relative_step": False, "scale_parameter": False, "beta1": 0.5}),
]
SHAPES = [(5, 8), (1, 9), (9, 1), (), (1,), (13,), (2, 3, 4), (64, 33), (3, 2, 2, 2)]


def test_what_is_chosen():
    """foreach=True asks for the path that costs memory; nobody else gets it. What is asked for, nothing replaces."""
    assert choose({"foreach": True, "fused": None}) == ("foreach", True)
    assert choose({"foreach": None, "fused": None}) == ("cpu", False)
    assert choose({"foreach": False, "fused": True}) == ("cpu", True)
    assert choose({"foreach": False, "fused": False}) == ("reference", True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("cls", "options"), RULES)
def test_against_float64(cls, options, foreach, dtype):
    start, steps = random_steps(SHAPES, 1)
    # Both start from values that the lower precision holds exactly, so only the arithmetic differs.
    start = [value.to(dtype) for value in start]
    steps = [[g.to(dtype) for g in grads] for grads in steps]
    mine, exact = parameters(start), parameters(start, torch.float64)
    trajectory(cls(mine, **options, foreach=foreach), mine, steps)
    trajectory(cls(exact, **_exact(cls, options), foreach=False), exact, steps)
    for p, truth, before in zip(mine, exact, start, strict=True):
        movement = float((truth.detach() - before.double()).abs().max())
        # Half a unit in the last place for the rounding of p, float32 roundings for the arithmetic.
        rounding = torch.finfo(dtype).eps / 2 * 1.01 + (2 * 2**-24 if dtype is torch.float32 else 0)
        tolerance = rounding * truth.detach().abs() + 1e-6 * movement + torch.finfo(dtype).smallest_normal
        assert ((p.detach().double() - truth.detach()).abs() <= tolerance).all()


def _exact(cls, options):
    """Torch's floor is the machine epsilon of the arithmetic, so a float64 twin has to be given it."""
    return {"eps": (torch.finfo(torch.float32).eps, 1e-3), **options} if cls is Adafactor else options


@settings(deadline=None, max_examples=60)
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=4).map(tuple), min_size=1, max_size=5),
    which=st.integers(0, len(RULES) - 1),
    seed=st.integers(0, 1000),
)
def test_foreach_is_the_loop_to_rounding(shapes, which, seed):
    cls, options = RULES[which]
    start, steps = random_steps(shapes, 3, seed)
    loop, batched = parameters(start), parameters(start)
    one = trajectory(cls(loop, **options, fused=False), loop, steps)
    other = trajectory(cls(batched, **options, foreach=True), batched, steps)
    for a, b in zip(one[-1], other[-1], strict=True):
        # Three steps of a few float32 roundings each.
        torch.testing.assert_close(a, b, rtol=4 * 2**-24, atol=1e-8)


def test_groups_may_differ_in_backend_dtype_and_options():
    """One optimizer, mixed groups: each parameter takes the step it takes alone."""
    shapes = [(4, 3), (5,), (2, 2), (6,)]
    start, steps = random_steps(shapes, 3)
    kinds = [
        {"foreach": True, "lr": 0.1},
        {"foreach": False, "weight_decay": 0.1},
        {"d": None, "lr": 0.0},
        {"foreach": True, "maximize": True},
    ]
    dtypes = [torch.float32, torch.float64, torch.float32, torch.bfloat16]
    together = [parameters([value], dtype)[0] for value, dtype in zip(start, dtypes, strict=True)]
    optimizer = Adafactor([{"params": [p], **kind} for p, kind in zip(together, kinds, strict=True)])
    path = trajectory(optimizer, together, steps)
    for i, (kind, dtype) in enumerate(zip(kinds, dtypes, strict=True)):
        alone = parameters([start[i]], dtype)
        expected = trajectory(Adafactor(alone, **kind), alone, [[grads[i]] for grads in steps])
        assert torch.equal(path[-1][i], expected[-1][0])


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("shape", [(6,), (3, 4)])
@pytest.mark.parametrize("size", [float("inf"), float("nan"), 1e25])
def test_a_statistic_that_is_not_finite_is_seen(shape, size, foreach):
    """1 / sqrt(inf) is 0: the parameter would stand still for ever, and nobody would know why."""
    for cls in (Adafactor, TransformersAdafactor):
        start, [[g]] = random_steps([shape], 1)
        params = parameters(start)
        optimizer = cls(params, foreach=foreach)
        bad = g.clone()
        bad.view(-1)[1] = size
        assert trajectory(optimizer, params, [[bad]])[-1][0].isnan().any()
        # The statistics are as bad when the parameter is restored.
        params[0].data.copy_(start[0])
        assert trajectory(optimizer, params, [[g]])[-1][0].isnan().any()


@pytest.mark.parametrize("foreach", [False, True])
def test_without_clipping_a_bad_element_of_a_vector_is_alone(foreach):
    """rms(u), which it would spoil, has no part in the step."""
    params = parameters([torch.ones(4)])
    g = torch.tensor([1.0, float("nan"), 1.0, 1.0])
    after = trajectory(Adafactor(params, d=None, foreach=foreach), params, [[g]])[-1][0]
    assert after.isnan().tolist() == [False, True, False, False]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    # In a matrix an eps1 of 1e-30 is the floor of mean(R) too, and makes these steps large by torch's own rule.
    ("shape", "eps1"),
    [((4,), 0.0), ((4,), 1e-45), ((4,), 1e-30), ((4, 4), 0.0), ((4, 4), 1e-45)],
)
@pytest.mark.parametrize("size", [1e-23, 1e-21, 1e-19, 1e-17])
def test_a_gradient_whose_square_underflows_moves_no_further_than_others(size, eps1, shape, foreach):
    """Without clipping nothing else holds back g / eps1."""
    params = parameters([torch.ones(shape)])
    trajectory(Adafactor(params, eps=(eps1, 1e-3), d=None, foreach=foreach), params, [[torch.full(shape, size)]])
    assert (params[0].detach() - 1).abs().max() <= 0.0101


def test_waves_do_not_change_the_result(monkeypatch):
    """How many tensors share a sweep is a matter of speed only."""
    start, steps = random_steps([(4, 3), (5,), (2, 2), (6, 6)], 3)
    results = []
    for wave in (1, 80, 8 << 20):
        monkeypatch.setattr(cpu, "WAVE", wave)
        params = parameters(start)
        results.append(trajectory(Adafactor(params), params, steps)[-1])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_number_of_threads_does_not_change_a_bit():
    """A run must be repeatable on another machine."""
    start, steps = random_steps([(300, 257), (70_001,), (3, 64, 64)], 2)
    results = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 7):
            torch.set_num_threads(count)
            params = parameters(start)
            results.append(trajectory(TransformersAdafactor(params, beta1=0.9), params, steps)[-1])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
