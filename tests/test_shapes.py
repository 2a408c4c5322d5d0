"""Which dims are factored, and the shapes of what is kept: a state of another shape could not be exchanged."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adafactor.shapes import Factoring

plan = Factoring().plan


@given(st.lists(st.integers(0, 9), max_size=5).map(tuple))
def test_r_times_c_has_the_tensors_shape(shape):
    p = plan(shape)
    assert p.factored == (len(shape) >= 2)
    if p.factored:
        assert (
            tuple(max(r, c) if 0 not in (r, c) else 0 for r, c in zip(p.row_shape, p.col_shape, strict=True)) == shape
        )
        assert p.n * p.m * prod(shape[:-2]) == prod(shape)


@pytest.mark.parametrize(
    ("shape", "row_shape", "col_shape", "n", "m"),
    [
        ((4, 7), (4, 1), (1, 7), 4, 7),
        ((1, 7), (1, 1), (1, 7), 1, 7),
        ((6, 5, 3, 2), (6, 5, 3, 1), (6, 5, 1, 2), 3, 2),
        ((0, 5), (0, 1), (1, 5), 0, 5),
    ],
)
def test_the_last_two_dims_are_factored(shape, row_shape, col_shape, n, m):
    p = plan(shape)
    assert (p.row_shape, p.col_shape, p.n, p.m) == (row_shape, col_shape, n, m)


@pytest.mark.parametrize("shape", [(), (1,), (8,)])
def test_vectors_and_scalars_are_not_factored(shape):
    p = plan(shape)
    assert not p.factored
    assert (p.rows, p.cols) == ((), ())
