"""max_grad_norm: clipping by the norm of all gradients together, within the step."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import BACKENDS, assert_same_path, parameters, random_steps, trajectory

from adafactor import Adafactor
from adafactor.dialects import big_vision, optax
from adafactor.dialects.transformers import Adafactor as TransformersAdafactor

SHAPES = [(7, 5), (300, 70), (4,), (3, 4, 5), (), (0, 3), (1200,)]
backends = pytest.mark.parametrize("backend", BACKENDS)


def clipped_beforehand(cls, start, steps, largest, **options):
    """The path with clip_grad_norm_ before each step, and its norms."""
    params = parameters(start)
    optimizer = cls(params, **options)
    path, norms = [], []
    for grads in steps:
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone().to(p.dtype)
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, largest)))
        optimizer.step()
        path.append([p.detach().clone() for p in params])
    return path, norms


@backends
@pytest.mark.parametrize("largest", [1e-3, 50.0, 1e6])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Adafactor, {}),
        (TransformersAdafactor, {"beta1": 0.9, "weight_decay": 0.1}),
        # eps1 in the statistics, far above the clipped gradients.
        (TransformersAdafactor, {"eps": (1e-3, 1e-3)}),
        (optax.Adafactor, {"batch_dims": 1, "min_dim_size_to_factor": 2}),
        (big_vision.Adafactor, {"min_dim_size_to_factor": 2, "momentum_dtype": "float32"}),
    ],
)
def test_it_is_clip_grad_norm_and_a_step(cls, options, largest, backend):
    start, steps = random_steps(SHAPES, 6)
    theirs, norms = clipped_beforehand(cls, start, steps, largest, **options, **ASKED[backend])
    params = parameters(start)
    optimizer = cls(params, max_grad_norm=largest, **options, **ASKED[backend])
    for t, grads in enumerate(steps):
        trajectory(optimizer, params, [grads])
        assert float(optimizer.grad_norm) == pytest.approx(norms[t], rel=1e-6)
        for i, p in enumerate(params):
            # The gradients are the caller's.
            assert p.grad.equal(grads[i])
            if p.numel():
                assert_same_path([p.detach()], [theirs[t][i]], start[i])


# The kernel for what it supports.
ASKED = {name: {"fused": None} if name == "kernel" else options for name, options in BACKENDS.items()}


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_low_precision_the_norm_is_not(dtype, backend):
    """clip_grad_norm_ has three digits there, and overflows in float16 where the norm is above 65504."""
    start, [grads] = random_steps(SHAPES, 1)
    grads = [(100 * g).clamp(-6e4, 6e4).to(dtype) for g in grads]
    params = parameters(start, dtype)
    optimizer = Adafactor(params, max_grad_norm=1.0, **ASKED[backend])
    trajectory(optimizer, params, [grads])
    exact = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    assert float(optimizer.grad_norm) == pytest.approx(exact, rel=1e-6)
    assert all(p.isfinite().all() for p in params)


@backends
def test_inf_measures_and_clips_nothing(backend):
    start, steps = random_steps(SHAPES, 3)
    [plain, measured] = [parameters(start) for _ in range(2)]
    trajectory(Adafactor(plain, **ASKED[backend]), plain, steps)
    optimizer = Adafactor(measured, max_grad_norm=math.inf, **ASKED[backend])
    assert optimizer.grad_norm is None
    trajectory(optimizer, measured, steps)
    for p, q in zip(plain, measured, strict=True):
        assert p.equal(q)
    assert float(optimizer.grad_norm) == pytest.approx(
        float(torch.cat([g.flatten() for g in steps[-1]]).norm()), rel=1e-6
    )


@backends
def test_it_is_of_all_groups_and_dtypes_together(backend):
    """A norm for each group would turn the direction of the whole step."""
    start, steps = random_steps([(6, 4), (5, 3), (9,)], 3)
    theirs, norms = clipped_beforehand(Adafactor, start, steps, 0.1, **ASKED[backend])
    params = parameters(start)
    params[2] = torch.nn.Parameter(start[2].double())
    groups = [{"params": params[:1]}, {"params": params[1:], "weight_decay": 1e-9}]
    optimizer = Adafactor(groups, max_grad_norm=0.1, **ASKED[backend])
    path = trajectory(optimizer, params, steps)
    assert float(optimizer.grad_norm) == pytest.approx(norms[-1], rel=1e-6)
    for i, p in enumerate(path[-1]):
        assert_same_path([p.float()], [theirs[-1][i]], start[i])


@backends
def test_a_parameter_that_is_skipped_is_not_in_the_norm(backend):
    """One nan in one parameter would else stop or spoil all others."""
    start, [grads, *_] = random_steps([(6, 4), (5, 3)], 1)
    grads[0][2, 1] = math.nan
    params = parameters(start)
    optimizer = Adafactor(params, max_grad_norm=0.1, skip_nonfinite="parameter", **ASKED[backend])
    [[first, second]] = trajectory(optimizer, params, [grads])
    assert first.equal(start[0])
    assert second.isfinite().all()
    assert not second.equal(start[1])
    assert float(optimizer.grad_norm) == pytest.approx(float(grads[1].norm()), rel=1e-6)


@backends
def test_under_a_gradscaler_it_is_of_the_unscaled_gradients(backend):
    """Else the scale would decide how much is clipped."""
    start, steps = random_steps([(6, 4), (9,)], 4)
    theirs, norms = clipped_beforehand(Adafactor, start, steps, 0.5, **ASKED[backend])
    params = parameters(start)
    optimizer = Adafactor(params, max_grad_norm=0.5, **ASKED[backend])
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0**10), torch.tensor(0.0)
    path = trajectory(optimizer, params, [[g * 2.0**10 for g in grads] for grads in steps])
    assert float(optimizer.grad_norm) == pytest.approx(norms[-1], rel=1e-6)
    for i, p in enumerate(path[-1]):
        assert_same_path([p], [theirs[-1][i]], start[i])


def test_groups_that_disagree_are_refused():
    [p, q] = parameters([torch.ones(3), torch.ones(2)])
    optimizer = Adafactor([{"params": [p]}, {"params": [q], "max_grad_norm": 2.0}], max_grad_norm=1.0)
    p.grad, q.grad = torch.ones(3), torch.ones(2)
    with pytest.raises(ValueError, match=r"max_grad_norm should be the same in all groups.* got 1\.0, 2\.0"):
        optimizer.step()
    assert p.equal(torch.ones(3))
