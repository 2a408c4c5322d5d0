"""Random steps through every backend, for seconds; benchmarks/soak.py goes on for as long as asked."""

import torch
from fuzz import BAD, KINDS, Case, cases, check, gradient
from hypothesis import HealthCheck, given, settings


# The same cases every time: new ones are for benchmarks/soak.py.
@settings(
    derandomize=True,
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(cases())
def test_backends_agree_and_keep_their_promises(case: Case):
    check(case)


def test_the_kinds_are_what_they_are_called():
    """A fuzz of gradients that are never bad would find nothing."""
    draw = torch.Generator().manual_seed(0)
    for kind in KINDS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            g = gradient(kind, (30, 20), dtype, draw)
            if g is not None:
                wide = g if dtype is torch.float64 else g.float()
                assert bool(wide.square().sum(0).isfinite().all()) == (kind not in BAD), (kind, dtype)
