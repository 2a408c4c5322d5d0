"""The bytes that are promised are the bytes that are kept, and "matrix" never keeps more than anything else."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import Parameter

from adafactor.dialects import big_vision, optax, paper, timm, transformers
from adafactor.dialects import torch as torch_dialect
from adafactor.memory import estimate
from adafactor.shapes import MODES, Factoring

DIALECTS = {
    "torch": (torch_dialect.Adafactor, {}),
    "transformers": (transformers.Adafactor, {"beta1": 0.9}),
    "towhee": (transformers.Adafactor, {}),
    "paper": (paper.Adafactor, {"beta1": 0.5}),
    "optax": (optax.Adafactor, {"momentum": 0.9, "batch_dims": 1, "min_dim_size_to_factor": 4}),
    "big_vision": (big_vision.Adafactor, {}),
    "timm": (timm.Adafactor, {"min_dim_size_to_factor": 2}),
}


def model():
    return nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 4, 1, bias=False), nn.Linear(20, 30), nn.LayerNorm(30))


@pytest.mark.parametrize("factor", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", DIALECTS)
def test_the_estimate_is_what_is_allocated(name, dtype, factor):
    """Somebody rents a card by this number."""
    cls, options = DIALECTS[name]
    net = model().to(dtype)
    net[2].bias.requires_grad_(False)
    promised = estimate(net, dialect=name, factor=factor, **options)
    optimizer = cls(net.parameters(), factor=factor, **options)
    for p in net.parameters():
        p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()
    kept = sum(value.nbytes for own in optimizer.state.values() for value in own.values())
    assert promised.bytes == kept
    assert promised.parameters == sum(p.nbytes for p in net.parameters() if p.requires_grad)


def test_it_says_where_factors_cost_more_than_they_save():
    """A 1x1 convolution factored over its last two dims keeps twice its own size."""
    found = estimate(model())
    assert [entry.name for entry in found.oversized] == ["1.weight"]
    assert "1.weight (4, 16, 1, 1): its factors take 512 bytes, a full V 256" in str(found)
    assert estimate(model(), factor="matrix").oversized == ()


def test_what_an_optimizer_takes_can_be_estimated():
    params = [Parameter(torch.ones(6, 4)), Parameter(torch.ones(3))]
    whole = estimate(params).bytes
    assert whole == 4 * (10 + 1) + 4 * (3 + 1)
    assert estimate([("a", params[0]), ("b", params[1])]).bytes == whole
    assert estimate([{"params": params[:1]}, {"params": params[1]}]).bytes == whole
    assert estimate([{"params": params, "factor": "matrix"}], dialect=transformers.Adafactor).bytes == whole
    with pytest.raises(ValueError, match=r"dialect should be one of big_vision, .*got 'adam'"):
        estimate(params, dialect="adam")
    with pytest.raises(ValueError, match="factor should be one of last, largest, matrix, got 'rows'"):
        estimate(params, factor="rows")


def test_what_is_listed_twice_is_kept_once_and_a_single_tensor_is_refused():
    p = Parameter(torch.ones(6, 4))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        assert estimate([p, p]).bytes == estimate([p]).bytes
    with pytest.raises(TypeError, match="should be a module or an iterable of parameters, got a single tensor"):
        estimate(p)


SHAPES = st.lists(st.integers(0, 40), max_size=5).map(tuple)


@given(SHAPES, st.integers(0, 20), st.integers(0, 2))
def test_matrix_keeps_the_fewest_numbers(shape, min_dim, batch_dims):
    """Whoever asks for it must not have to check layer by layer."""
    kept = {mode: Factoring(mode, min_dim, batch_dims).plan(shape).kept for mode in (*MODES, "timm", "none")}
    assert kept["matrix"] == min(kept.values())
    assert kept["none"] == prod(shape)


@given(SHAPES, st.sampled_from([*MODES, "timm"]), st.integers(0, 20), st.integers(0, 2))
def test_every_plan_is_a_matrix_of_its_shape(shape, mode, min_dim, batch_dims):
    """R times C has to have the tensor's shape, and its rows and columns its elements."""
    plan = Factoring(mode, min_dim, batch_dims).plan(shape)
    assert plan.slices == min(batch_dims, len(shape))
    if not plan.factored:
        return
    used = (*plan.rows, *plan.cols)
    assert len(set(used)) == len(used)
    assert min(used) >= plan.slices
    assert min(plan.n, plan.m) >= min_dim
    assert plan.n * plan.m * prod(size for i, size in enumerate(shape) if i not in used) == prod(shape)
    assert all(max(r, c) == s or 0 in (r, c, s) for r, c, s in zip(plan.row_shape, plan.col_shape, shape, strict=True))


@pytest.mark.parametrize(
    ("factoring", "shape", "rows", "cols"),
    [
        (Factoring("largest"), (3, 3, 64, 32), (3,), (2,)),
        (Factoring("largest"), (5, 5, 5), (1,), (2,)),
        (Factoring("largest", 128), (127, 500), (), ()),
        (Factoring("matrix"), (512, 512, 3, 3), (0,), (1, 2, 3)),
        (Factoring("matrix"), (4, 4, 4, 4), (0, 1), (2, 3)),
        (Factoring("matrix"), (2, 2), (), ()),
        (Factoring("matrix"), (1, 9), (), ()),
        (Factoring("matrix", 8), (4, 100, 4), (), ()),
        (Factoring("matrix", 4), (4, 100, 4), (0,), (1, 2)),
        (Factoring("timm", 16), (17, 17, 3, 3), (0,), (1,)),
        (Factoring("timm", 16), (3, 16, 17, 17), (2,), (3,)),
        (Factoring("timm", 16), (16, 17), (), ()),
        (Factoring("last"), (8, 1), (0,), (1,)),
        (Factoring("last", 2), (8, 1), (), ()),
        (Factoring("none"), (8, 8), (), ()),
        (Factoring("largest", 0, 1), (90, 4, 5), (1,), (2,)),
    ],
)
def test_plans_by_hand(factoring, shape, rows, cols):
    plan = factoring.plan(shape)
    assert (plan.rows, plan.cols) == (rows, cols)
