"""Steps that survive what gradients may be: inf and nan, the ends of the range, a loss scale, rows that wake."""

import copy
import math

import pytest
import torch
from contract_table import bits, picture, same
from helpers import BACKENDS, NO_KERNEL, needs_kernel, parameters, random_steps
from torch.nn import Parameter

from adafactor import Adafactor
from adafactor.dialects import big_vision, optax, paper, timm
from adafactor.dialects.transformers import Adafactor as TransformersAdafactor

INF, NAN = math.inf, math.nan
SHAPES = [(6, 5), (9,), (3, 4, 7), (), (40, 3), (20, 17)]
CASES = {
    "torch": (Adafactor, {"lr": 0.01, "weight_decay": 0.1}),
    "transformers": (TransformersAdafactor, {"weight_decay": 0.1}),
    "momentum after": (TransformersAdafactor, {"beta1": 0.9, "rounding": "kahan"}),
    "momentum before": (big_vision.Adafactor, {"lr": 0.01, "min_dim_size_to_factor": 4, "rounding": "stochastic"}),
    "stacks": (optax.Adafactor, {"learning_rate": 0.01, "min_dim_size_to_factor": 2}),
}

backends = pytest.mark.parametrize("backend", BACKENDS)
cases = pytest.mark.parametrize("case", CASES)
CLASSES = [Adafactor, TransformersAdafactor, paper.Adafactor, timm.Adafactor, optax.Adafactor]
dialects = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__module__)


def optimizer_of(params, case, backend, **options):
    cls, own = CASES[case]
    return cls(params, **own, **BACKENDS[backend], **options)


def step(optimizer, params, grads):
    for p, g in zip(params, grads, strict=True):
        p.grad = None if g is None else g.to(p.dtype)
    optimizer.step()


def spoil(grads, i, value, at=-1):
    """The same gradients, but for one element of the i-th."""
    grads = [g.clone() for g in grads]
    grads[i].view(-1)[at] = value
    return grads


def without(seen, *names):
    return {key: value for key, value in seen.items() if not any(name in key for name in names)}


# A step that is called off


@backends
@cases
@pytest.mark.parametrize("value", [INF, -INF, NAN], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_that_is_skipped_had_never_been(case, backend, value, dtype):
    """All parameters and all state, to the last bit; and the next one is the next one."""
    start, steps = random_steps(SHAPES, 4)
    params, twins = parameters(start, dtype), parameters(start, dtype)
    guarded = optimizer_of(params, case, backend, skip_nonfinite=True)
    plain = optimizer_of(twins, case, backend)
    for t, grads in enumerate(steps):
        step(guarded, params, grads)
        step(plain, twins, grads)
        before = picture(guarded)
        for i in range(len(SHAPES)):
            step(guarded, params, spoil(grads, i, value, at=t % 2 - 1))
            assert picture(guarded) == before
            assert guarded.nonfinite_parameters() == [f"parameter {i} of group 0"]
        assert without(before, "skip_nonfinite") == without(picture(plain), "skip_nonfinite")
        assert int(guarded.skipped_steps) == len(SHAPES) * (t + 1)
    assert int(plain.skipped_steps) == 0


@backends
@pytest.mark.parametrize(
    "shape", [(200_003,), (300, 700), (5000, 40), (40, 5000), (2, 9000), (3, 70_000), (60, 50, 7, 3)]
)
@pytest.mark.parametrize("where", [0.0, 0.3, 0.52, 0.77, 0.999])
def test_none_is_overlooked(shape, where, backend):
    """However a tensor is cut up: one nan that slips through is enough."""
    p = Parameter(torch.ones(shape))
    optimizer = Adafactor([p], skip_nonfinite=True, factor="last" if len(shape) < 4 else "matrix", **BACKENDS[backend])
    for value in (NAN, -INF, 1e30):
        p.grad = torch.ones(shape)
        p.grad.view(-1)[int(where * p.numel())] = value
        optimizer.step()
    assert int(optimizer.skipped_steps) == 3
    assert torch.equal(p, torch.ones(shape))


@backends
@cases
def test_the_first_step_may_be_skipped(case, backend):
    """A GradScaler's usually is: statistics still start with the first gradients that count."""
    start, [grads] = random_steps(SHAPES, 1)
    params, twins = parameters(start), parameters(start)
    guarded, plain = optimizer_of(params, case, backend, skip_nonfinite=True), optimizer_of(twins, case, backend)
    step(guarded, params, spoil(grads, 2, NAN))
    step(guarded, params, grads)
    step(plain, twins, grads)
    assert without(picture(guarded), "skip_nonfinite") == without(picture(plain), "skip_nonfinite")


@backends
@cases
def test_parameter_by_parameter(case, backend):
    """The others take the step they take alone."""
    start, steps = random_steps(SHAPES, 5)
    params = parameters(start, torch.bfloat16)
    optimizer = optimizer_of(params, case, backend, skip_nonfinite="parameter")
    named = [Parameter(p.detach().clone()) for p in params]
    # By itself each draws by its place, which has to be the same.
    singles = [
        optimizer_of([Parameter(torch.zeros(()).bfloat16()) for _ in range(i)] + [p], case, backend)
        for i, p in enumerate(named)
    ]
    for t, grads in enumerate(steps):
        bad = {t % len(SHAPES), (3 * t + 1) % len(SHAPES)}
        spoilt = grads
        for i in bad:
            spoilt = spoil(spoilt, i, NAN)
        step(optimizer, params, spoilt)
        assert optimizer.nonfinite_parameters() == [f"parameter {i} of group 0" for i in sorted(bad)]
        for i, (p, g) in enumerate(zip(named, grads, strict=True)):
            if i not in bad:
                p.grad = g.bfloat16()
                singles[i].step()
    assert same(params, named)
    for i, (p, twin) in enumerate(zip(params, named, strict=True)):
        assert bits(dict(optimizer.state[p])) == bits(dict(singles[i].state[twin]))
    assert int(optimizer.skipped_steps) == len(steps)


@backends
@pytest.mark.parametrize("how", [True, "parameter"])
def test_of_a_stack_all_slices_stay(backend, how):
    """They share a parameter and a step count."""
    start, [grads] = random_steps([(4, 6, 5), (3, 6), (7, 2, 8, 9)], 1)
    params = parameters(start)
    options = {"learning_rate": 0.01, "min_dim_size_to_factor": 2, "batch_dims": 1}
    optimizer = optax.Adafactor(params, **options, skip_nonfinite=how, **BACKENDS[backend])
    before = picture(optimizer)
    step(optimizer, params, spoil(grads, 0, INF))
    after = picture(optimizer)
    changed = {key for key in before if before[key] != after[key]}
    assert not {key for key in changed if "0.0" in key}
    assert bool(changed) == (how == "parameter")
    assert optimizer.nonfinite_parameters() == ["parameter 0 of group 0"]


@backends
def test_groups_that_do_not_ask_go_on(backend):
    """The guard is a group's: of the others, nothing is looked at."""
    start, [grads] = random_steps([(6, 5), (4, 3), (9,)], 1)
    params = parameters(start)
    groups = [{"params": params[:1], "skip_nonfinite": True}, {"params": params[1:2]}, {"params": params[2:]}]
    groups[2]["skip_nonfinite"] = True
    optimizer = Adafactor(groups, **BACKENDS[backend])
    step(optimizer, params, spoil(grads, 0, INF))
    assert [torch.equal(p, before) for p, before in zip(params, start, strict=True)] == [True, False, True]
    step(optimizer, params, spoil(grads, 1, INF))
    assert not torch.equal(params[0], start[0])
    assert params[1].isnan().any()


@backends
def test_the_guard_may_be_changed_between_steps(backend):
    start, [grads] = random_steps([(6, 5)], 1)
    params = parameters(start)
    optimizer = Adafactor(params, **BACKENDS[backend])
    step(optimizer, params, grads)
    moved = params[0].detach().clone()
    optimizer.param_groups[0]["skip_nonfinite"] = True
    step(optimizer, params, spoil(grads, 0, NAN))
    assert torch.equal(params[0], moved)
    optimizer.param_groups[0]["skip_nonfinite"] = False
    step(optimizer, params, spoil(grads, 0, NAN))
    assert params[0].isnan().any()


@backends
@pytest.mark.parametrize("how", [True, "parameter"])
def test_relative_steps_and_what_they_show_do_not_count_it(backend, how):
    params = [Parameter(torch.ones(3, 3))]
    optimizer = TransformersAdafactor(params, warmup_init=True, skip_nonfinite=how, **BACKENDS[backend])
    shown = []
    for value in (1.0, NAN, 1.0, INF, 1.0):
        step(optimizer, params, [torch.full((3, 3), value)])
        shown.append(optimizer.param_groups[0]["lr"])
    assert shown == pytest.approx([1e-6, 1e-6, 2e-6, 2e-6, 3e-6], rel=1e-6)
    assert float(optimizer.state[params[0]]["step"]) == 3


@backends
def test_empty_frozen_and_late_parameters(backend):
    params = [Parameter(torch.ones(shape)) for shape in ((0, 3), (4, 3), (2,), (5,))]
    params[2].requires_grad_(False)
    optimizer = Adafactor(params, skip_nonfinite=True, **BACKENDS[backend])
    step(optimizer, params, [torch.ones(0, 3), torch.full((4, 3), NAN), None, None])
    assert [float(optimizer.state[p]["step"]) for p in params[:2]] == [0, 0]
    step(optimizer, params, [torch.ones(0, 3), torch.ones(4, 3), None, None])
    step(optimizer, params, [torch.ones(0, 3), torch.ones(4, 3), None, torch.full((5,), INF)])
    assert [float(optimizer.state[params[i]]["step"]) for i in (0, 1, 3)] == [1, 1, 0]
    assert optimizer.nonfinite_parameters() == ["parameter 3 of group 0"]
    for p in params:
        p.grad = None
    optimizer.step()
    assert optimizer.nonfinite_parameters() == []
    assert int(optimizer.skipped_steps) == 2


def test_names_and_gradients_that_nobody_has_looked_at():
    """Without the guard, and before a step: of the gradients that are there."""
    model = torch.nn.Linear(3, 2)
    for options in ({}, {"skip_nonfinite": True}):
        optimizer = Adafactor(model.named_parameters(), **options)
        assert optimizer.nonfinite_parameters() == []
        model.weight.grad = torch.full((2, 3), NAN)
        model.bias.grad = torch.ones(2)
        assert optimizer.nonfinite_parameters() == ["weight"]
        model.zero_grad()
    stacked = optax.Adafactor([Parameter(torch.ones(2, 3, 4))], batch_dims=1, min_dim_size_to_factor=2)
    p = stacked.param_groups[0]["params"][0]
    p.grad = torch.ones(2, 3, 4)
    assert stacked.nonfinite_parameters() == []
    p.grad[1, 2, 3] = INF
    assert stacked.nonfinite_parameters() == ["parameter 0 of group 0"]


def test_the_count_is_no_live_tensor():
    """A user who compares it before and after a step must see a difference; and nothing can be assigned to it."""
    params = [Parameter(torch.ones(3))]
    optimizer = Adafactor(params, skip_nonfinite=True)
    before = optimizer.skipped_steps
    step(optimizer, params, [torch.full((3,), NAN)])
    assert int(optimizer.skipped_steps) == int(before) + 1
    with pytest.raises(AttributeError):
        optimizer.skipped_steps = 0


def test_a_copy_counts_on():
    params = [Parameter(torch.ones(3))]
    optimizer = Adafactor(params, skip_nonfinite=True)
    step(optimizer, params, [torch.full((3,), NAN)])
    twin = copy.deepcopy(optimizer)
    step(twin, twin.param_groups[0]["params"], [torch.full((3,), NAN)])
    assert (int(optimizer.skipped_steps), int(twin.skipped_steps)) == (1, 2)


def test_a_closures_loss_is_returned():
    """Whether or not the step is taken."""
    params = [Parameter(torch.ones(3))]
    optimizer = Adafactor(params, skip_nonfinite=True)

    def closure():
        params[0].grad = torch.full((3,), NAN)
        return 2.5

    assert optimizer.step(closure) == 2.5
    assert torch.equal(params[0], torch.ones(3))


@pytest.mark.parametrize("how", [True, "parameter"])
def test_no_host_reads(how):
    """On an accelerator every read would wait. Tensors on the meta device have no values to read."""
    for kind in ("nearest", "stochastic", "kahan"):
        params = [Parameter(torch.ones(shape, device="meta", dtype=torch.bfloat16)) for shape in SHAPES]
        for cls, options in CASES.values():
            optimizer = cls(params, **{**options, "rounding": kind}, skip_nonfinite=how)
            for _ in range(2):
                for p in params:
                    p.grad = torch.ones_like(p)
                optimizer.step()
            assert int(optimizer.skipped_steps) == 0
            assert all(optimizer.state[p]["step"].is_meta for p in params)


@pytest.mark.parametrize("how", [True, "parameter"])
@pytest.mark.parametrize("turn", [1, -1])
def test_tensors_without_values_have_no_say(how, turn):
    """A model that is half on the meta device, and one that leaves it between two steps."""
    real, meta = Parameter(torch.ones(4, 4)), Parameter(torch.ones(4, 4, device="meta"))
    optimizer = Adafactor([real, meta][::turn], skip_nonfinite=how)
    for value in (1.0, NAN):
        real.grad, meta.grad = torch.full((4, 4), value), torch.ones_like(meta)
        optimizer.step()
    assert float(optimizer.state[real]["step"]) == 1
    assert int(optimizer.skipped_steps) == 1
    alone = Adafactor([meta], skip_nonfinite=how)
    alone.step()
    alone.param_groups[0]["params"][0] = real
    alone.step()
    assert int(alone.skipped_steps) == 1


@backends
@pytest.mark.parametrize("how", [True, "parameter"])
def test_what_is_shown_is_of_the_last_step_taken(backend, how):
    """step_sizes(), AdafactorSchedule and the RMS that transformers saves."""
    p, q = Parameter(torch.ones(4, 4)), Parameter(torch.ones(2, 4, 4))
    optimizer = TransformersAdafactor([p, q], lr=0.1, relative_step=False, skip_nonfinite=how, **BACKENDS[backend])
    step(optimizer, [p, q], [torch.ones(4, 4), torch.ones(2, 4, 4)])
    shown, saved = optimizer.step_sizes(), bits(optimizer.state_dict()["state"])
    assert shown == pytest.approx([0.1])
    step(optimizer, [p, q], [torch.full((4, 4), NAN), torch.full((2, 4, 4), NAN)])
    assert optimizer.step_sizes() == shown
    assert bits(optimizer.state_dict()["state"]) == saved
    step(optimizer, [p, q], [torch.ones(4, 4), torch.ones(2, 4, 4)])
    assert optimizer.step_sizes() == pytest.approx([0.09])


def test_an_optimizer_pickled_before_there_was_a_count():
    optimizer = Adafactor([Parameter(torch.ones(3))])
    old = {key: value for key, value in optimizer.__getstate__().items() if key != "_skipped"}
    restored = Adafactor.__new__(Adafactor)
    restored.__setstate__(old)
    assert int(copy.deepcopy(restored).skipped_steps) == 0


def test_inference_mode_from_beginning_to_end():
    """An evaluation script that also trains, or builds its optimizer there."""
    with torch.inference_mode():
        p = Parameter(torch.ones(3))
        optimizer = Adafactor([p], skip_nonfinite=True)
    q = Parameter(torch.ones(3))
    other = Adafactor([q], skip_nonfinite=True)
    for value in (1.0, NAN):
        q.grad = torch.full((3,), value)
        with torch.inference_mode():
            other.step()
    assert int(other.skipped_steps) == 1
    optimizer.param_groups[0]["params"] = [q]
    optimizer.step()
    assert int(optimizer.skipped_steps) == 1


def test_what_the_last_step_did_not_see_is_no_culprit():
    p, q = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    optimizer = Adafactor([p, q], skip_nonfinite=True)
    p.grad = torch.ones(3)
    optimizer.step()
    q.grad = torch.full((3,), NAN)
    assert optimizer.nonfinite_parameters() == []
    optimizer.step()
    assert optimizer.nonfinite_parameters() == ["parameter 1 of group 0"]


def test_sparse_gradients_are_refused_here_too():
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="should be dense"):
        Adafactor(embedding.parameters()).nonfinite_parameters()


# What finite means: |g|^2 and its sums over rows and over columns, in float32


BORDERS = [
    # A square, the sum over a row of 64, and the sum over a column of 50, that leave float32.
    ((7,), 1.8e19, 1.9e19),
    ((50, 64), 2.2e18, 2.4e18),
    ((64, 4), 2.2e18, 2.4e18),
    ((1, 1), 1.8e19, 1.9e19),
]


@backends
@pytest.mark.parametrize(("shape", "inside", "outside"), BORDERS, ids=str)
@pytest.mark.parametrize("cls", [Adafactor, TransformersAdafactor])
def test_what_leaves_float32_counts_as_not_finite(cls, shape, inside, outside, backend):
    """On one backend as on the others: never a step of 0 in silence."""
    for size, is_finite in ((inside, True), (outside, False)):
        p = Parameter(torch.ones(shape))
        optimizer = cls([p], skip_nonfinite=True, **BACKENDS[backend])
        step(optimizer, [p], [torch.full(shape, size)])
        assert (float(p.detach().max()) < 1) == is_finite
        assert p.isfinite().all()
        assert bool(optimizer.nonfinite_parameters()) != is_finite
        assert int(optimizer.skipped_steps) == (not is_finite)
        # Without the guard it is loud.
        q = Parameter(torch.ones(shape))
        loud = cls([q], **BACKENDS[backend])
        step(loud, [q], [torch.full(shape, size)])
        assert bool(q.isfinite().all()) == is_finite
        assert bool(loud.nonfinite_parameters()) != is_finite


@backends
@pytest.mark.parametrize("shape", [(6, 5), (9,), (), (20, 17), (70, 3)])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 300.0), (torch.float16, 3e-8), (torch.float32, 1e15), (torch.float32, 1e-25)],
    ids=str,
)
@dialects
def test_the_ends_of_the_range(cls, dtype, size, shape, backend):
    """Finite, and in the right direction. From 0, since a step for 1e-25 is far below what a weight of 1 shows."""
    p = Parameter(torch.zeros(shape, dtype=dtype))
    options = {"learning_rate": 1.0} if cls is optax.Adafactor else {"lr": 1.0} if cls is Adafactor else {}
    optimizer = cls([p], **options, **BACKENDS[backend], skip_nonfinite=True, rounding="stochastic")
    sign = torch.ones(shape)
    sign.view(-1)[::2] = -1
    for _ in range(20 if dtype is torch.float16 else 1):
        step(optimizer, [p], [sign * size])
    assert p.isfinite().all()
    assert (p.detach().float() * sign <= 0).all()
    assert (p.detach() * sign < 0).any()
    assert int(optimizer.skipped_steps) == 0


# The loss scale


@backends
@pytest.mark.parametrize("shape", [(32, 24), (50,)])
@pytest.mark.parametrize(
    ("cls", "options", "scales"),
    [
        # eps1 = 1e-30 in the statistics: it shows in g^2 of 1e-30 upwards, gradients of 1e-15.
        (TransformersAdafactor, {}, [1e-6, 1e-4, 1e-2, 1e2, 1e4]),
        (TransformersAdafactor, {"lr": 0.01, "relative_step": False, "scale_parameter": False}, [1e-6, 1e4]),
        (optax.Adafactor, {"learning_rate": 0.01, "min_dim_size_to_factor": 8}, [1e-6, 1e4]),
        (paper.Adafactor, {}, [1e-6, 1e4]),
        (timm.Adafactor, {}, [1e-6, 1e4]),
        (big_vision.Adafactor, {"lr": 0.01}, [1e-6, 1e4]),
        # A floor of 1.2e-7 under sqrt V; and in a matrix under mean(R), which gradients of 1e-3 are above.
        (Adafactor, {"lr": 0.01}, [1e-2, 1e-1, 1e2, 1e4]),
    ],
    ids=lambda value: getattr(value, "__module__", None),
)
def test_the_step_does_not_depend_on_the_loss_scale(cls, options, scales, shape, backend):
    """In bfloat16 torch's steps are thousands of times too small for small gradients: one knob less."""
    start, steps = random_steps([shape], 3)
    grads = [g / g.abs().max() * 3 for (g,) in steps]
    if cls is Adafactor:
        # What torch's floor is compared with: elements far below the rest would be under it.
        grads = [g.sign() * (1 + g.abs()) for g in grads]
    paths = []
    for scale in (1.0, *scales):
        params = parameters(start, torch.bfloat16)
        optimizer = cls(params, **options, rounding="stochastic", **BACKENDS[backend])
        for g in grads:
            params[0].grad_dtype = None
            params[0].grad = g * scale
            optimizer.step()
        paths.append(params[0].detach().clone())
    for path in paths[1:]:
        # The same step to float32 rounding; so a number in some hundred may be rounded the other way.
        assert float((path != paths[0]).double().mean()) <= 0.01
        torch.testing.assert_close(path, paths[0], rtol=2.0**-7, atol=1e-5)


# GradScaler


def scaled_run(backend, dtype, scaler, *, steps=8, skip=(), amp=None, **options):
    """A little model under a GradScaler; in steps of skip the loss is inf."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 3)).to(dtype)
    X, Y = torch.randn(32, 12).to(dtype), torch.randn(32, 3).to(dtype)
    optimizer = TransformersAdafactor(model.parameters(), warmup_init=True, **options, **BACKENDS[backend])
    if amp is not None:
        assert optimizer._step_supports_amp_scaling is amp
    shown = []
    for t in range(steps):
        optimizer.zero_grad()
        loss = ((model(X) - Y) ** 2).float().mean()
        loss = loss * INF if t in skip else loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        shown.append(optimizer.param_groups[0]["lr"])
    return model, optimizer, shown


def scaler_of(scale, growth=2000):
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=growth)


@needs_kernel
@pytest.mark.parametrize("skip", [(), (0,), (2, 3)])
def test_a_grad_scaler_leaves_it_to_the_fused_step(skip):
    """Scaled by powers of 2, what it computes is what an unscaled run computes, to the last bit; steps that are skipped
    count nothing, and schedules go on."""
    ordinary, first, shown = scaled_run("plain", torch.float32, scaler_of(2.0**14), skip=skip, amp=False)
    fused, second, also = scaled_run("kernel", torch.float32, scaler_of(2.0**14, growth=3), skip=skip, amp=True)
    assert shown == also
    for p, q in zip(ordinary.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-9)
        assert first.state[p]["step"] == second.state[q]["step"] == 8 - len(skip)
    assert int(second.skipped_steps) == len(skip)
    assert int(first.skipped_steps) == 0
    unscaled, _, _ = scaled_run("kernel", torch.float32, torch.amp.GradScaler("cpu", enabled=False))
    if not skip:
        assert same(list(unscaled.parameters()), list(fused.parameters()))


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan"])
def test_a_grad_scaler_over_pure_low_precision(dtype, rounding):
    """float16 gradients, which unscale_ refuses, and would round."""
    scaled, optimizer, _ = scaled_run("kernel", dtype, scaler_of(2.0**8), skip=(0,), rounding=rounding)
    assert all(p.isfinite().all() for p in scaled.parameters())
    assert {float(state["step"]) for state in optimizer.state.values()} == {7.0}
    assert not hasattr(optimizer, "found_inf")


@needs_kernel
def test_unscaled_by_the_user_first():
    """The documented order for clipping: the scaler then gives no scale, only whether there was an inf."""
    start, [grads] = random_steps([(6, 5), (9,)], 1)
    params, twins = parameters(start), parameters(start)
    optimizer, plain = Adafactor(params, fused=True), Adafactor(twins, fused=True)
    scaler = scaler_of(2.0**10)
    loss = sum((p * g).sum() for p, g in zip(params, grads, strict=True))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    step(plain, twins, grads)
    assert same(params, twins)


@backends
def test_amp_and_the_guard_together(backend):
    """found_inf holds all groups; the guard its own."""
    start, [grads] = random_steps([(6, 5), (9,)], 1)
    for how in (False, True, "parameter"):
        params = parameters(start)
        groups = [{"params": params[:1], "skip_nonfinite": how}, {"params": params[1:]}]
        optimizer = Adafactor(groups, **BACKENDS[backend])
        before = picture(optimizer)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(1.0)
        step(optimizer, params, grads)
        assert picture(optimizer) == before
        assert int(optimizer.skipped_steps) == 1
        optimizer.found_inf = torch.tensor(0.0)
        step(optimizer, params, [g * 4 for g in grads])
        twins = parameters(start)
        plain = Adafactor(twins, **BACKENDS[backend])
        step(plain, twins, grads)
        assert same(params, twins)


@backends
def test_the_scale_takes_part_in_what_is_finite(backend):
    """A gradient whose square overflows only while it is scaled is fine."""
    start, _ = random_steps([(6, 5), (9,)], 1)
    params = parameters(start)
    optimizer = Adafactor(params, skip_nonfinite=True, **BACKENDS[backend])
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0**16), torch.tensor(0.0)
    step(optimizer, params, [torch.full((6, 5), 1e21), torch.full((9,), 1e21)])
    assert int(optimizer.skipped_steps) == 0
    assert all(float(optimizer.state[p]["step"]) == 1 for p in params)
    assert optimizer.nonfinite_parameters() == []


def test_amp_only_where_all_groups_ask_for_it():
    """Hosts that clip gradients refuse an optimizer that unscales by itself."""
    p, q = Parameter(torch.ones(3)), Parameter(torch.ones(3))
    assert not Adafactor([p])._step_supports_amp_scaling
    if not NO_KERNEL:
        assert Adafactor([p], fused=True)._step_supports_amp_scaling
        assert not Adafactor([{"params": [p], "fused": True}, {"params": [q]}])._step_supports_amp_scaling


# Rows that wake


UNCLIPPED = {
    "torch": (Adafactor, {"lr": 1.0, "d": None}),
    "transformers": (TransformersAdafactor, {"lr": 1.0, "relative_step": False, "clip_threshold": None}),
    "paper": (paper.Adafactor, {"d": None}),
    "optax": (optax.Adafactor, {"clipping_threshold": None, "min_dim_size_to_factor": 2}),
    "big_vision": (big_vision.Adafactor, {"momentum": None, "min_dim_size_to_factor": 2}),
    "timm": (timm.Adafactor, {"lr": 1.0, "clip_threshold": None, "min_dim_size_to_factor": 2}),
    "matrix": (Adafactor, {"lr": 1.0, "d": None, "factor": "matrix"}),
}


def waking(backend, boost, shape=(50, 16), idle=200, dialect="transformers"):
    """The rms of the step, in a row that has had no gradient for long, over that of the others."""
    draw = torch.Generator().manual_seed(0)
    p = Parameter(torch.zeros(shape))
    cls, options = UNCLIPPED[dialect]
    optimizer = cls([p], **options, max_row_boost=boost, **BACKENDS[backend])
    for t in range(1, idle + 2):
        g = torch.randn(shape, generator=draw)
        g[..., 7, :] *= t == 1 or t > idle
        p.data.zero_()
        p.grad = g
        optimizer.step()
    rms = p.detach().square().mean(-1).sqrt()
    others = float(torch.cat([rms[..., :7], rms[..., 8:]], -1).mean())
    return float(rms[..., 7].mean()) / others, others


@backends
@pytest.mark.parametrize("dialect", UNCLIPPED)
@pytest.mark.parametrize("shape", [(50, 16), (16, 50)])
def test_a_row_that_wakes_is_held_back(backend, dialect, shape):
    """Without a limit it takes steps of 1 / sqrt(1 - beta2); whichever dim is the larger one."""
    free, others = waking(backend, None, shape, dialect=dialect)
    limited, still = waking(backend, 2.0, shape, dialect=dialect)
    assert free > 5
    assert limited == pytest.approx(2.0, rel=0.15)
    assert still == pytest.approx(others, rel=0.02)
    assert waking(backend, 100.0, shape, dialect=dialect) == (free, others)


@backends
def test_experts_that_wake_are_held_back(backend):
    """A whole matrix of a stack: its rows and its columns have decayed."""
    draw = torch.Generator().manual_seed(0)
    rms = {}
    for boost in (None, 2.0):
        p = Parameter(torch.zeros(4, 12, 10))
        options = {"lr": 1.0, "relative_step": False, "scale_parameter": False, "clip_threshold": None}
        optimizer = TransformersAdafactor([p], **options, max_row_boost=boost, **BACKENDS[backend])
        for t in range(1, 202):
            g = torch.randn(p.shape, generator=draw)
            g[1] *= t == 1 or t == 201
            p.data.zero_()
            p.grad = g
            optimizer.step()
        rms[boost] = float(p.detach()[1].square().mean().sqrt())
    assert rms[None] > 5
    assert rms[2.0] == pytest.approx(2.0, rel=0.1)


@needs_kernel
@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
@pytest.mark.parametrize("mode", ["last", "largest"])
def test_rows_are_rows_in_any_order_of_memory(shape, mode):
    """A transposed embedding's rows are columns in memory."""
    start, steps = random_steps([shape], 6)
    results = []
    for fused in (True, False):
        p = Parameter(start[0].t().contiguous().t())
        optimizer = TransformersAdafactor([p], max_row_boost=1.0, fused=fused, factor=mode)
        for (g,) in steps:
            p.grad = g.clone().t().contiguous().t()
            optimizer.step()
        results.append(p.detach())
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-8)
