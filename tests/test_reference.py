"""The specification itself: a step worked by hand, and what must not change when the problem is turned or scaled."""

import math

import pytest
import torch
from helpers import parameters, random_steps, trajectory

from adafactor import Adafactor
from adafactor.dialects.transformers import Adafactor as TransformersAdafactor
from adafactor.reference import norm


def test_a_2x2_matrix_by_hand():
    """Two steps of torch's rule, every number written out."""
    p = parameters([torch.tensor([[3.0, -1.0], [1.0, 1.0]], dtype=torch.float64)])
    optimizer = Adafactor(p, lr=0.5, weight_decay=0.2, d=1.0, eps=(0.0, 1e-3))
    first = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    trajectory(optimizer, p, [[first]])
    state = optimizer.state_dict()["state"][0]
    # t = 1, b = 1: means of squares over the columns and the rows.
    assert state["row_var"].tolist() == [[2.5], [12.5]]
    assert state["col_var"].tolist() == [[5.0, 10.0]]
    # V = R C / 7.5, u = g / sqrt V; rms(p) = sqrt 3, rho = min(.5, 1).
    u = first / (torch.tensor([[2.5], [12.5]]).double() * torch.tensor([[5.0, 10.0]]).double() / 7.5).sqrt()
    clip = max(1.0, math.sqrt(float(u.square().sum()) / 4))
    start = torch.tensor([[3.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
    expected = start * (1 - 0.5 * 0.2) - 0.5 * math.sqrt(3) * u / clip
    torch.testing.assert_close(p[0].detach(), expected, rtol=1e-14, atol=1e-15)
    # t = 2, b = 2^-.8
    trajectory(optimizer, p, [[torch.zeros(2, 2).double()]])
    b = 2**-0.8
    state = optimizer.state_dict()["state"][0]
    assert state["row_var"].flatten().tolist() == pytest.approx([2.5 * (1 - b), 12.5 * (1 - b)], rel=1e-14)
    torch.testing.assert_close(p[0].detach(), expected * 0.9, rtol=1e-14, atol=1e-15)


def test_momentum_by_hand():
    """transformers' momentum averages the step itself, lr included, and starts from 0 without correction."""
    p = parameters([torch.tensor([2.0, 2.0], dtype=torch.float64)])
    optimizer = TransformersAdafactor(
        p, lr=0.1, relative_step=False, scale_parameter=False, beta1=0.75, eps=(0.0, 1e-3), weight_decay=0.5
    )
    g = torch.tensor([1.0, -1.0], dtype=torch.float64)
    trajectory(optimizer, p, [[g]])
    # u = sign(g), m = .25 * .1 * u, lambda = .5 * .1
    assert p[0].tolist() == pytest.approx([2 - 0.1 - 0.025, 2 - 0.1 + 0.025], rel=1e-14)


PATHS = [
    (Adafactor, {"eps": (0.0, 1e-3), "lr": 0.05}),
    (TransformersAdafactor, {"eps": (0.0, 1e-3), "beta1": 0.9, "weight_decay": 0.1}),
]


def path(cls, options, start, steps):
    params = parameters(start, torch.float64)
    return torch.stack([after[0] for after in trajectory(cls(params, **options), params, steps)])


@pytest.mark.parametrize(("cls", "options"), PATHS)
@pytest.mark.parametrize("shape", [(6, 9), (12,), (3, 4, 5)])
class TestSymmetries:
    def test_the_scale_of_the_gradients_does_not_matter(self, cls, options, shape):
        """The promise of adaptive step sizes: a loss times 1000 trains the same."""
        start, steps = random_steps([shape], 5)
        scaled = [[1000 * g.double() for g in grads] for grads in steps]
        plain = [[g.double() for g in grads] for grads in steps]
        torch.testing.assert_close(
            path(cls, options, start, scaled), path(cls, options, start, plain), rtol=1e-12, atol=1e-13
        )

    def test_permuted_rows_and_columns_stay_permuted(self, cls, options, shape):
        """A vocabulary in another order trains the same embedding."""
        start, steps = random_steps([shape], 5)
        order = torch.randperm(shape[-1], generator=torch.Generator().manual_seed(1))
        turned = path(cls, options, [start[0][..., order]], [[g[..., order] for g in grads] for grads in steps])
        torch.testing.assert_close(turned, path(cls, options, start, steps)[..., order], rtol=1e-12, atol=1e-13)

    def test_a_transposed_matrix_stays_transposed(self, cls, options, shape):
        """Rows and columns are names: nn.Linear and a Conv1D of the same weights train the same."""
        start, steps = random_steps([shape], 5)
        turned = path(
            cls,
            options,
            [start[0].mT if len(shape) > 1 else start[0].flip(0)],
            [[g.mT if len(shape) > 1 else g.flip(0) for g in grads] for grads in steps],
        )
        plain = path(cls, options, start, steps)
        plain = plain.mT if len(shape) > 1 else plain.flip(1)
        torch.testing.assert_close(turned, plain, rtol=1e-12, atol=1e-13)


def test_a_stack_of_matrices_is_factored_matrix_by_matrix():
    """But its scale and its clipping are the whole tensor's: experts in one tensor share them."""
    start, steps = random_steps([(3, 4, 5)], 1)
    params = parameters(start, torch.float64)
    optimizer = Adafactor(params, d=None, lr=1.0, eps=(0.0, 0.0))
    trajectory(optimizer, params, steps)
    moved = (start[0].double() - params[0].detach()) / start[0].double().square().mean().sqrt()
    for expert, g in zip(moved, steps[0][0].double(), strict=True):
        rows, cols = g.square().mean(1, keepdim=True), g.square().mean(0, keepdim=True)
        torch.testing.assert_close(expert, g / (rows * cols / rows.mean()).sqrt(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("shape", [(2, 4090), (3, 8000), (4_000_000,), (1000, 1000)])
def test_norms_of_equal_numbers(shape):
    """The second step after idle ones has them. Summed one after the other, along strides, they are off by 2e-5."""
    for x in (torch.full(shape, 1.3199999), torch.full(shape[::-1], 1.3199999).permute(*range(len(shape) - 1, -1, -1))):
        exact = float(x[(0,) * x.dim()].double()) * x.numel() ** 0.5
        assert float(norm(x)) == pytest.approx(exact, rel=1e-6)
