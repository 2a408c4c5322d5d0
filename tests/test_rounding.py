"""Weights in low precision that train: rounded stochastically or with a compensation, the same bits everywhere."""

import copy
import itertools
import warnings

import pytest
import torch
from contract_table import bits, picture, same
from helpers import BACKENDS, needs_kernel, parameters, random_steps
from torch.nn import Parameter

from adafactor import Adafactor, memory, rounding
from adafactor.backends import cpu, kernel, why
from adafactor.dialects import big_vision, optax, paper, timm
from adafactor.dialects.transformers import Adafactor as TransformersAdafactor
from adafactor.rounding import counter, key, pieces, random_bits, stochastic

LOW = [torch.bfloat16, torch.float16]
PLAIN = {"lr": 1e-4, "relative_step": False, "scale_parameter": False}

backends = pytest.mark.parametrize("backend", BACKENDS)
low = pytest.mark.parametrize("dtype", LOW, ids=str)
kinds = pytest.mark.parametrize("kind", ["stochastic", "kahan"])


# The draws


def test_the_draws_are_these():
    """A run of today is repeated bit for bit by every later version, on every machine."""
    at = counter(key(0, "weight"), (2, 3))
    assert random_bits(at, 1, (2, 3), torch.device("cpu")).tolist() == [
        [843856885, 3816536351, 1061529502],
        [543395935, 1945415723, 4071898481],
    ]
    beyond = rounding.Counter(key(1, "0"), (1 << 32) - 1, (1,))
    assert random_bits(beyond, 1000, (3,), torch.device("cpu")).tolist() == [484269834, 193440661, 1108533642]


def test_a_part_draws_what_it_draws_in_the_whole():
    """Shards, slices of a stack, pieces and tensors on the far side of 2^32 elements."""
    cpu_device = torch.device("cpu")
    for start in (0, (1 << 32) - 50, 5 << 32):
        whole = rounding.Counter(key(3, "w"), start, (20, 4, 1))
        expected = random_bits(whole, 7, (6, 5, 4), cpu_device)
        rows = rounding.Counter(whole.key, start + 2 * 20, whole.strides)
        assert torch.equal(random_bits(rows, 7, (3, 5, 4), cpu_device), expected[2:5])
        columns = rounding.Counter(whole.key, start + 1, whole.strides)
        assert torch.equal(random_bits(columns, 7, (6, 5, 2), cpu_device), expected[:, :, 1:3])
        plane = rounding.Counter(whole.key, start + 4, whole.strides[::2])
        assert torch.equal(random_bits(plane, 7, (6, 4), cpu_device), expected[:, 1])


@pytest.mark.parametrize("shape", [(7, 3, 5), (1, 105), (105,), (2, 1, 60), (3, 40, 1)])
def test_large_tensors_are_rounded_in_pieces(shape, monkeypatch):
    """The hash takes several times a tensor's memory; in pieces it draws the same."""
    monkeypatch.setattr(rounding, "PIECE", 8)
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    at = rounding.Counter(key(0, "w"), 11, counter(0, shape).strides)
    expected = random_bits(at, 1, shape, x.device)
    found = torch.empty_like(expected)
    for p, value, comp, place in pieces(found, x, None, at):
        assert p.numel() <= 8
        assert comp is None
        p.copy_(random_bits(place, 1, value.shape, x.device))
    assert torch.equal(found, expected)


def test_draws_are_even_and_unrelated():
    """Of neighbours, of steps and of parameters: else errors would add up instead of cancelling."""
    n = 1 << 20
    at, other = counter(key(0, "a"), (n,)), counter(key(0, "b"), (n,))
    device = torch.device("cpu")
    sets = [random_bits(at, 1, (n,), device), random_bits(at, 2, (n,), device), random_bits(other, 1, (n,), device)]
    sets += [random_bits(counter(key(1, "a"), (n,)), 1, (n,), device), sets[0].roll(1), sets[0].roll(1024)]
    for width, shift in ((16, 0), (13, 0), (16, 16)):
        for some in sets[:3]:
            counts = torch.bincount(some >> shift & ((1 << width) - 1), minlength=1 << width).double()
            mean = n / (1 << width)
            chi2 = float(((counts - mean) ** 2 / mean).sum())
            # Normally distributed about its degrees of freedom; 5 standard deviations.
            assert abs(chi2 - (1 << width)) < 5 * (2 * (1 << width)) ** 0.5
    uniform = torch.stack([(some & 0xFFFF).double() / 65536 - 0.5 for some in sets])
    correlation = torch.corrcoef(uniform)
    assert (correlation - torch.eye(len(sets))).abs().max() < 5 / n**0.5


def test_every_bit_of_every_input_matters():
    """A seed, a step, a name or an index that differs in one bit gives other draws: half of their bits are others."""
    device = torch.device("cpu")
    base = random_bits(rounding.Counter(0, 0, (1,)), 1, (4096,), device)
    others = [random_bits(rounding.Counter(1 << i, 0, (1,)), 1, (4096,), device) for i in range(64)]
    others += [random_bits(rounding.Counter(0, 0, (1,)), 1 ^ 1 << i, (4096,), device) for i in range(24)]
    others += [random_bits(rounding.Counter(0, 1 << i, (1,)), 1, (4096,), device) for i in range(12, 48)]
    for other in others:
        changed = base ^ other
        for bit in range(32):
            assert 0.4 < float((changed >> bit & 1).double().mean()) < 0.6


# Rounding


def _grid(dtype):
    """Values of all sizes, with what may go wrong: neighbours' middles, the smallest and the largest numbers."""
    tiny, small = torch.finfo(dtype).tiny, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    middle = 1 + torch.finfo(dtype).eps / 2
    values = [1.0, middle, 1.001, 0.3, 5e-5, tiny, tiny * 1.3, small * 0.5, small * 0.001, small * 2.25, 1000.77, 6e4]
    values += [torch.finfo(dtype).max, 0.0]
    return torch.tensor([*values, *(-value for value in values)], dtype=torch.float32)


@low
def test_stochastic_rounding_has_the_right_mean(dtype):
    """A bias of a thousandth of a unit, over ten thousand steps, would be ten units."""
    x, n = _grid(dtype), 400_000
    x = x.expand(n, -1)
    found = stochastic(x, random_bits(counter(key(0, "w"), x.shape), 1, x.shape, x.device), dtype).double()
    # The neighbours of x in dtype, from its own conversion to the nearest.
    near = x[0].to(dtype)
    step = torch.where(near.double() < x[0].double(), float("inf"), float("-inf")).to(dtype)
    far = torch.nextafter(near, step) if dtype is torch.float16 else _next_bfloat16(near, step)
    exact = near.double() == x[0].double()
    far = torch.where(exact, near, far)
    assert ((found == near.double()) | (found == far.double())).all()
    error = (found - x.double()).mean(0)
    spread = (far.double() - near.double()).abs()
    # Of a binomial distribution the spread is at most half; 5 standard deviations.
    assert (error.abs() <= 5 * 0.5 * spread / n**0.5).all()
    assert (found[:, exact] == x[:, exact].double()).all()


def _next_bfloat16(x, towards):
    """nextafter, which torch lacks for bfloat16 on some builds."""
    raw = x.view(torch.int16)
    up = (towards > x) == (x >= 0)
    moved = torch.where(up, raw + 1, raw - 1).to(torch.int16).view(torch.bfloat16)
    return torch.where(x == 0, torch.full_like(x, 2.0**-133) * towards.sign(), moved)


@low
def test_what_needs_no_rounding_is_kept(dtype):
    """Every number of the dtype, inf and nan too, whatever the draw."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    for most in (0, 0xFFFFFFFF):
        found = stochastic(every.float(), torch.full(every.shape, most, dtype=torch.int64), dtype)
        torch.testing.assert_close(found, every, rtol=0, atol=0, equal_nan=True)
        number = ~every.isnan()
        assert torch.equal(found.view(torch.int16)[number], every.view(torch.int16)[number])


@low
def test_overflow_is_infinite(dtype):
    """As in rounding to the nearest, which gives inf for what lies beyond the largest number by half a unit."""
    largest = torch.finfo(dtype).max
    x = torch.tensor([largest * 1.003, -largest * 1.003, 3.3e38 if dtype is torch.float16 else 3.4e38])
    assert stochastic(x, torch.full((3,), 0xFFFFFFFF), dtype).tolist() == [float("inf"), -float("inf"), float("inf")]


# Weights that move


def distance(backend, dtype, kind, steps, gradient, **options):
    """How far weights of 1 move, as a share of what float32 moves; of the compensated sum, where there is one."""
    moved = []
    for of, rounding_kind in ((dtype, kind), (torch.float32, "nearest")):
        p = Parameter(torch.ones(64, 64, dtype=of))
        optimizer = TransformersAdafactor([p], **{**PLAIN, **options}, rounding=rounding_kind, **BACKENDS[backend])
        for _ in range(steps):
            p.grad = torch.full_like(p, gradient)
            optimizer.step()
        compensation = optimizer.state[p].get("compensation")
        total = p.detach().double() + (0 if compensation is None else compensation.double())
        moved.append(float((1 - total).mean()))
    return moved[0] / moved[1]


@backends
@low
@pytest.mark.parametrize(("kind", "least", "most"), [("stochastic", 0.95, 1.05), ("kahan", 0.99, 1.01)])
def test_small_steps_add_up(backend, dtype, kind, least, most):
    """500 steps of 1e-4, each far below what the nearest number would show: see the test of nearest below."""
    assert least <= distance(backend, dtype, kind, 500, 1.0) <= most
    # Weight decay alone, of 1e-4 a step.
    assert least <= distance(backend, dtype, kind, 500, 0.0, weight_decay=1.0) <= most


@backends
def test_to_the_nearest_they_are_lost(backend):
    """Which is why there are the others."""
    assert distance(backend, torch.bfloat16, "nearest", 100, 1.0) == 0


@backends
@pytest.mark.parametrize(("kind", "least", "most"), [("stochastic", 0.5, 1.5), ("kahan", 0.98, 1.02)])
def test_tiny_steps_add_up(backend, kind, least, most):
    """Steps of 1e-6 are below half a unit in the last place of a compensation to the nearest, too."""
    assert least <= distance(backend, torch.bfloat16, kind, 1000, 1.0, lr=1e-6) <= most


@backends
def test_the_compensation_is_what_p_lacks(backend):
    """p + compensation is float32's run, to a few roundings to 16 bits; p is the nearest number to it."""
    start, steps = random_steps([(30, 40), (7,)], 40)
    start = [p.bfloat16().float() for p in start]
    steps = [[g.bfloat16().float() for g in grads] for grads in steps]
    low, wide = parameters(start, torch.bfloat16), parameters(start)
    ours = TransformersAdafactor(low, **PLAIN, rounding="kahan", **BACKENDS[backend])
    truth = TransformersAdafactor(wide, **PLAIN, **BACKENDS[backend])
    for grads in steps:
        for optimizer, params in ((ours, low), (truth, wide)):
            for p, g in zip(params, grads, strict=True):
                p.grad = g.to(p.dtype)
            optimizer.step()
    for p, exact, before in zip(low, wide, start, strict=True):
        rest = ours.state[p]["compensation"]
        assert rest.dtype is torch.bfloat16
        movement = float((exact.detach() - before).abs().max())
        total = p.detach().double() + rest.double()
        assert (total - exact.detach().double()).abs().max() <= 2e-3 * movement + 2.0**-14 * float(before.abs().max())
        assert (rest.float().abs() <= 2.0**-8 * p.detach().float().abs()).all()


def least_squares(dtype, kind, backend, steps=300):
    """The loss of a linear model after training, in float64."""
    draw = torch.Generator().manual_seed(0)
    X = torch.randn(256, 32, generator=draw)
    Y = X @ torch.randn(32, 16, generator=draw) + 0.5 * torch.randn(256, 16, generator=draw)
    W = Parameter(torch.zeros(32, 16, dtype=dtype))
    optimizer = TransformersAdafactor(
        [W], lr=0.02, relative_step=False, scale_parameter=False, rounding=kind, **backend
    )
    for t in range(steps):
        optimizer.param_groups[0]["lr"] = 0.02 * (1 - t / steps)
        loss = ((X.to(dtype) @ W - Y.to(dtype)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = W.detach().double()
    return float(((X.double() @ total - Y.double()) ** 2).mean())


@backends
def test_least_squares_in_bfloat16(backend):
    """Within 2% of float32's loss."""
    exact = least_squares(torch.float32, "nearest", BACKENDS[backend])
    for kind in ("stochastic", "kahan"):
        assert least_squares(torch.bfloat16, kind, BACKENDS[backend]) <= 1.02 * exact


@backends
@kinds
def test_lr_0_moves_nothing(backend, kind):
    """Nor does it round: a compensation of half a unit would."""
    start, steps = random_steps([(6, 5), (9,)], 6)
    params = parameters(start, torch.bfloat16)
    optimizer = TransformersAdafactor(
        params, lr=0.01, relative_step=False, beta1=0.9, rounding=kind, **BACKENDS[backend]
    )
    for t, grads in enumerate(steps):
        optimizer.param_groups[0]["lr"] = 0.01 if t < 3 else 0.0
        before = [p.detach().clone() for p in params]
        kept = [bits(optimizer.state[p].get("compensation")) for p in params]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.bfloat16()
        optimizer.step()
        assert same(before, params) == (t >= 3)
        assert (kept == [bits(optimizer.state[p].get("compensation")) for p in params]) == (t >= 3 or kind != "kahan")


@backends
@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_in_higher_precision_it_is_moot(backend, kind, dtype):
    """One setting for a model of mixed dtypes: float32 parameters neither draw nor keep anything."""
    start, steps = random_steps([(6, 5), (9,)], 4)
    results = []
    for chosen in ("nearest", kind):
        params = parameters(start, dtype)
        optimizer = Adafactor(params, rounding=chosen, **BACKENDS[backend])
        for grads in steps:
            for p, g in zip(params, grads, strict=True):
                p.grad = g.to(dtype)
            optimizer.step()
        results.append(params)
        assert not any("compensation" in state for state in optimizer.state.values())
    assert same(*results)


CLASSES = {
    "torch": (Adafactor, {"lr": 0.01, "weight_decay": 0.1}),
    "transformers": (TransformersAdafactor, {"beta1": 0.9, "weight_decay": 0.1}),
    "paper": (paper.Adafactor, {}),
    "optax": (optax.Adafactor, {"learning_rate": 0.01, "min_dim_size_to_factor": 4, "weight_decay_rate": 1e-3}),
    "big_vision": (big_vision.Adafactor, {"lr": 0.01, "min_dim_size_to_factor": 4}),
    "timm": (timm.Adafactor, {"min_dim_size_to_factor": 4}),
}


@pytest.mark.parametrize("dialect", CLASSES)
@kinds
def test_every_dialect_on_every_backend(dialect, kind):
    """The draws are the same, so that only where float32 sums differ by rounding may a number go the other way."""
    cls, options = CLASSES[dialect]
    start, steps = random_steps([(40, 30), (300,), (3, 8, 9), (), (5, 1)], 5)
    results = {}
    for backend, how in BACKENDS.items():
        params = parameters(start, torch.bfloat16)
        optimizer = cls(params, **options, rounding=kind, **how)
        for grads in steps:
            for p, g in zip(params, grads, strict=True):
                p.grad = g.bfloat16()
            optimizer.step()
        results[backend] = torch.cat([p.detach().flatten() for p in params])
        if kind == "kahan":
            assert all(optimizer.state[p]["compensation"].abs().sum() > 0 for p in params if p.numel() > 1)
    plain = results.pop("plain")
    for found in results.values():
        assert float((found != plain).double().mean()) < 0.005
        assert ((found.double() - plain.double()).abs() <= 0.02 * plain.double().abs() + 1e-6).all()


# The same bits from the kernel: weight decay alone, which both compute exactly


def layouts(values):
    """The same values, lying in memory in other orders."""
    yield values
    if values.dim() == 4:
        yield values.to(memory_format=torch.channels_last)
    if values.dim() >= 2:
        yield values.transpose(0, -1).contiguous().transpose(0, -1)
        yield values.transpose(-1, -2).contiguous().transpose(-1, -2)


def decayed(values, kind, fused, steps=3, **options):
    """Parameters after steps of decay alone, and their compensations; gradients of 0."""
    params = [Parameter(value.clone()) for value in values]
    settings = {"weight_decay_rate": 2.0**-10, "min_dim_size_to_factor": 2, **options}
    optimizer = optax.Adafactor(params, rounding=kind, **settings, fused=fused)
    if fused:
        assert {taken.backend for taken in why(optimizer)} == {"cpu"}
    for _ in range(steps):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    return params, [optimizer.state[p].get("compensation") for p in params]


@needs_kernel
@low
@kinds
@pytest.mark.parametrize("options", [{}, {"batch_dims": 1}, {"factored": False}, {"momentum": 0.9}], ids=str)
def test_the_kernel_draws_the_same_bits(dtype, kind, options):
    """Whatever the shape and the order in memory; so a run may move between machines and backends."""
    draw = torch.Generator().manual_seed(0)
    for shape in [(5,), (1,), (17, 3), (3, 700), (64, 64), (4, 6, 5), (2, 40, 3, 3), (300, 17), (1, 2, 2, 1, 3)]:
        if len(shape) < 2 and options.get("batch_dims"):
            continue
        values = (torch.randn(shape, generator=draw) * 10 ** torch.empty(shape).uniform_(-7, 3, generator=draw)).to(
            dtype
        )
        values.view(-1)[0] = 6e-8
        first, _ = decayed([values], kind, False, **options)
        for other in layouts(values):
            optimizer = optax.Adafactor([Parameter(other)], min_dim_size_to_factor=2, **options)
            if why(optimizer)[0].reason:
                # In some orders, of three dims and more and of slices, rows and columns are no matrices.
                assert len(shape) > 2 or "batch_dims" in options
                continue
            mine, rest = decayed([other], kind, True, **options)
            plain, plain_rest = decayed([other], kind, False, **options)
            assert mine[0].stride() == other.stride()
            assert same(mine, plain), (shape, other.stride())
            assert bits(rest) == bits(plain_rest)
            # The order in memory is none of the draws' business.
            assert bits(mine[0].contiguous()) == bits(first[0])


@backends
@kinds
@pytest.mark.parametrize(("shape", "batch_dims"), [((4, 6, 50), 1), ((2, 3, 6, 5), 2)])
def test_slices_of_a_stack_draw_as_in_the_whole(shape, batch_dims, backend, kind):
    """A stack of layers is one parameter: slices that drew the same bits would err the same way."""
    values = torch.linspace(0.5, 1.5, torch.Size(shape).numel()).reshape(shape).bfloat16()
    results = []
    for dims in (0, batch_dims):
        p = Parameter(values.clone())
        options = {"weight_decay_rate": 2.0**-10, "min_dim_size_to_factor": 2, "batch_dims": dims}
        optimizer = optax.Adafactor([p], rounding=kind, **options, **BACKENDS[backend])
        for _ in range(3):
            p.grad = torch.zeros_like(p)
            optimizer.step()
        results.append([p])
    assert same(*results)


@needs_kernel
@low
@kinds
def test_inf_and_nan_are_kept_by_the_kernel_too(dtype, kind):
    values = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, 1.0, torch.finfo(dtype).max] * 20).to(dtype)
    for fused in (True, False):
        # inf - inf / 1024 is nan already, so without decay; and without a scale, which would be nan.
        options = {"weight_decay_rate": 0.0, "multiply_by_parameter_scale": False}
        params, rest = decayed([values], kind, fused, **options)
        assert bits(params[0].nan_to_num(7.0)) == bits(values.nan_to_num(7.0))
        if kind == "kahan":
            assert rest[0].count_nonzero() == 0


@needs_kernel
@kinds
def test_the_kernel_draws_the_same_for_any_threads_and_instruction_set(kind):
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=draw).bfloat16() for shape in [(300, 517), (70_001,), (2000, 5)]]
    expected = decayed(values, kind, False)[0]
    threads = torch.get_num_threads()
    names = kernel.instruction_sets()
    try:
        for count, choice in itertools.product((1, 2, 7), range(len(names))):
            torch.set_num_threads(count)
            kernel.library().adafactor_choose(choice)
            assert same(decayed(values, kind, True)[0], expected), (count, names[choice])
    finally:
        torch.set_num_threads(threads)
        kernel.library().adafactor_choose(len(names) - 1)


@needs_kernel
@pytest.mark.parametrize("start", [(1 << 32) - 40, (3 << 32) - 1, 5 << 33])
def test_the_kernel_counts_in_64_bits(start, monkeypatch):
    """A tensor of more than 2^32 elements, or the part of one that lies beyond."""
    own = rounding.counter
    monkeypatch.setattr(rounding, "counter", lambda key, shape: own(key, shape)._replace(start=start))
    values = torch.linspace(0.5, 1.5, 120).reshape(8, 15).bfloat16()
    for other in layouts(values):
        assert same(decayed([other], "stochastic", True)[0], decayed([other], "stochastic", False)[0])


@needs_kernel
def test_an_order_of_too_many_dims_is_left_to_plain_pytorch():
    """More than the kernel's table has room for: refused in words, and right all the same."""
    shape = [2] * 10
    values = torch.linspace(0.5, 1.5, 1 << 10).reshape(shape).bfloat16()
    turned = values.permute(*range(9, -1, -1)).contiguous().permute(*range(9, -1, -1))
    params = [Parameter(turned.clone())]
    optimizer = optax.Adafactor(params, rounding="stochastic", factored=False, weight_decay_rate=2.0**-10)
    assert "an order of more than 8 dims" in why(optimizer)[0].reason
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    assert same(params, decayed([turned], "stochastic", False, steps=1, factored=False)[0])


# What tells parameters apart


def one_step(named, kind="stochastic", **options):
    optimizer = optax.Adafactor(named, rounding=kind, weight_decay_rate=2.0**-10, **options)
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()


def ones(count):
    return [Parameter(torch.ones(500).bfloat16()) for _ in range(count)]


def test_named_parameters_draw_by_their_names():
    """So that neither their order nor who else is there matters."""
    a, b = ones(2)
    one_step([("a", a), ("b", b)])
    (c,), (d, e) = ones(1), ones(2)
    one_step([("b", c)])
    one_step([{"params": [("b", d)]}, {"params": [("a", e)], "lr": 0.5}])
    assert same([b, b, a], [c, d, e])
    assert not same([a], [b])


def test_others_draw_by_their_place():
    """Over all groups, and whether or not the others have gradients."""
    a, b = ones(2)
    one_step([a, b])
    c, d = ones(2)
    one_step([{"params": [c]}, {"params": [d]}])
    assert same([a, b], [c, d])
    assert not same([a], [b])
    e, f = ones(2)
    optimizer = optax.Adafactor([e, f], rounding="stochastic", weight_decay_rate=2.0**-10)
    f.grad = torch.zeros_like(f)
    optimizer.step()
    assert same([f], [b])


@pytest.mark.parametrize("named", [False, True])
def test_what_tells_them_apart_is_looked_at_in_every_step(named):
    """One that is put before the others, or renamed, draws as in a run that is resumed then."""
    results = []
    for reload in (False, True):
        (p, frozen) = ones(2)
        frozen.requires_grad_(False)
        optimizer = optax.Adafactor([("a", p)] if named else [p], rounding="stochastic", weight_decay_rate=2.0**-10)
        for t in range(4):
            if t == 2:
                if named:
                    optimizer.param_groups[0]["param_names"][0] = "b"
                else:
                    optimizer.param_groups[0]["params"].insert(0, frozen)
                if reload:
                    optimizer.load_state_dict(optimizer.state_dict())
            p.grad = torch.zeros_like(p)
            optimizer.step()
        results.append([p])
    assert same(*results)


def test_seeds_differ_and_repeat():
    (a,), (b,), (c,) = ones(1), ones(1), ones(1)
    one_step([a], seed=1)
    one_step([b], seed=2)
    one_step([c], seed=1)
    assert same([a], [c])
    assert not same([a], [b])


# Runs that are repeated, copied and resumed


def problem():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 4)).bfloat16()
    X, Y = torch.randn(64, 20).bfloat16(), torch.randn(64, 4).bfloat16()
    return model, lambda: ((model(X) - Y) ** 2).mean()


def run(model, loss, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


@backends
@kinds
@pytest.mark.parametrize("cls", [Adafactor, TransformersAdafactor])
def test_a_run_is_repeated_and_resumed_bit_for_bit(cls, backend, kind, tmp_path):
    """Copied or saved in the middle, and under deterministic algorithms. The seed is in the file."""
    options = {"rounding": kind, "seed": 5, **BACKENDS[backend]}
    model, loss = problem()
    optimizer = cls(model.parameters(), **options)
    run(model, loss, optimizer, 4)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "file")
    run(model, loss, optimizer, 4)
    expected = picture(optimizer)

    again, again_loss = problem()
    torch.use_deterministic_algorithms(True)
    try:
        again_optimizer = cls(again.parameters(), **options)
        run(again, again_loss, again_optimizer, 8)
    finally:
        torch.use_deterministic_algorithms(False)
    assert picture(again_optimizer) == expected

    resumed, resumed_loss = problem()
    weights, saved = torch.load(tmp_path / "file", weights_only=True)
    resumed.load_state_dict(weights)
    resumed_optimizer = cls(resumed.parameters(), **{**options, "seed": 0})
    resumed_optimizer.load_state_dict(saved)
    run(resumed, resumed_loss, resumed_optimizer, 4)
    assert picture(resumed_optimizer) == expected

    X_loss = _loss_of(twin)
    run(twin, X_loss, twin_optimizer, 4)
    assert picture(twin_optimizer) == expected


def _loss_of(model):
    """The problem's loss for another model."""
    _, own = problem()
    X, Y = own.__closure__[0].cell_contents, own.__closure__[1].cell_contents
    return lambda: ((model(X) - Y) ** 2).mean()


# The compensation in the state


def test_the_compensation_is_state():
    """Saved and loaded, in the parameter's dtype; one that a file lacks starts at 0; nobody else is given one."""
    p = Parameter(torch.ones(4, 6, dtype=torch.bfloat16))
    optimizer = TransformersAdafactor([p], rounding="kahan")
    kept = optimizer.state[p]["compensation"]
    assert (kept.dtype, kept.shape) == (torch.bfloat16, p.shape)
    p.grad = torch.ones_like(p)
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["state"][0]["compensation"].abs().sum() > 0

    other = TransformersAdafactor([Parameter(p.detach().clone())], rounding="nearest")
    with pytest.warns(UserWarning, match="compensation of parameter 0 is dropped"):
        other.load_state_dict(saved)
    assert "compensation" not in other.state_dict()["state"][0]
    back = TransformersAdafactor([Parameter(p.detach().clone())], rounding="kahan")
    back.load_state_dict(other.state_dict())
    assert back.state_dict()["state"][0]["compensation"].abs().sum() == 0
    back.load_state_dict(saved)
    assert bits(back.state_dict()["state"]) == bits(saved["state"])


def test_a_compensation_that_is_given_up_is_not_taken_up_again():
    """Between, p has moved without it: it would be added to something else."""
    p = Parameter(torch.ones(4, 6, dtype=torch.bfloat16))
    optimizer = TransformersAdafactor([p], **{**PLAIN, "lr": 1e-3}, rounding="kahan")
    for kind in ("kahan", "nearest", "kahan"):
        optimizer.param_groups[0]["rounding"] = kind
        p.grad = torch.ones_like(p)
        before = p.detach().clone()
        optimizer.step()
        assert ("compensation" in optimizer.state[p]) == (kind == "kahan")
    assert torch.equal(before, p)
    torch.testing.assert_close(optimizer.state[p]["compensation"].float(), torch.full((4, 6), -1e-3), rtol=0.01, atol=0)


@pytest.mark.parametrize("value", [torch.zeros(3), torch.zeros(4, 6, dtype=torch.int32), "none"])
def test_a_file_with_a_bad_compensation_is_refused(value):
    p = Parameter(torch.ones(4, 6, dtype=torch.bfloat16))
    optimizer = TransformersAdafactor([p], rounding="kahan")
    saved = optimizer.state_dict()
    saved["state"][0]["compensation"] = value
    before = picture(optimizer)
    with pytest.raises(ValueError, match=r"compensation of parameter 0 should be .* of shape \(4, 6\), got"):
        optimizer.load_state_dict(saved)
    assert picture(optimizer) == before


def test_files_with_a_compensation_are_known_by_the_rest():
    """A vector's state has few keys to be told by."""
    p = Parameter(torch.ones(6, dtype=torch.bfloat16))
    saved = TransformersAdafactor([p], rounding="kahan").state_dict()
    for group in saved["param_groups"]:
        for name in [name for name in group if name != "params"]:
            del group[name]
    TransformersAdafactor([p], rounding="kahan").load_state_dict(saved)


def test_the_estimate_counts_the_compensation():
    params = [Parameter(torch.ones(8, 6, dtype=torch.bfloat16)), Parameter(torch.ones(5))]
    optimizer = Adafactor(params, rounding="kahan")
    kept = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert memory.estimate(params, rounding="kahan").bytes == kept
    assert kept - memory.estimate(params).bytes == 2 * 48


@pytest.mark.parametrize(
    "options", [{"rounding": "stochastic"}, {"skip_nonfinite": True}, {"max_row_boost": 2.0}], ids=str
)
def test_a_load_says_what_it_does_not_take_over(options):
    """A run that goes on without what it was started with is another run."""
    [(name, value)] = options.items()
    saved = Adafactor([Parameter(torch.ones(3))], **options, seed=4).state_dict()
    for cls in (Adafactor, TransformersAdafactor):
        other = cls([Parameter(torch.ones(3))])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            other.load_state_dict(saved)
        assert any(f"the state was made with {name}={value!r}" in str(each.message) for each in caught)
        assert other.param_groups[0][name] != value
        assert other.param_groups[0]["seed"] == 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Adafactor([Parameter(torch.ones(3))], **options).load_state_dict(saved)
        # One's own choice, where the file has none, is no loss.
        other = Adafactor([Parameter(torch.ones(3))], **options)
        other.load_state_dict(Adafactor([Parameter(torch.ones(3))]).state_dict())
    assert other.param_groups[0][name] == value


# Refusals


def test_dtypes_that_are_rounded_in_one_way_only():
    p = Parameter(torch.ones(4).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"a dtype that rounding='stochastic' knows, got torch\.float8_e4m3fn"):
        Adafactor([p], rounding="stochastic")


@needs_kernel
def test_a_compensation_of_other_strides_is_seen():
    """Someone replaced it: the kernel would go along it in the wrong order."""
    p = Parameter(torch.ones(4, 6, dtype=torch.bfloat16))
    optimizer = Adafactor([p], rounding="kahan")
    optimizer.state[p]["compensation"] = torch.zeros(6, 4, dtype=torch.bfloat16).t()
    assert "its compensation has strides (1, 4)" in cpu.unsupported(_item_of(optimizer, p))


def _item_of(optimizer, p):
    from adafactor.batching import item

    group = optimizer.param_groups[0]
    plan = optimizer.factoring(group).plan(tuple(p.shape))
    return item(p, plan, optimizer.state[p], optimizer.rule(group).form, optimizer.layout)
