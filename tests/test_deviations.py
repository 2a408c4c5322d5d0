"""Where the peers crash, give nan, are silently wrong or lose precision: what they do, and what is done here.

Each test is a row of docs/deviations.md. If a peer is mended, its half fails, and the row can go.
"""

import re
import warnings
from pathlib import Path

import pytest
import torch
from helpers import parameters, random_steps, trajectory
from torch.nn import Parameter
from transformers.optimization import Adafactor as Transformers
from transformers.optimization import AdafactorSchedule as TransformersSchedule

from adafactor import Adafactor
from adafactor.dialects import towhee
from adafactor.dialects.transformers import Adafactor as OursT
from adafactor.dialects.transformers import AdafactorSchedule

Torch = torch.optim.Adafactor


def one_step(cls, start, g, dtype=torch.float32, **options):
    """The parameter after a step, as float64."""
    params = parameters([start], dtype)
    return trajectory(cls(params, **options), params, [[g]])[0][0].double()


def finite(p):
    return bool(torch.isfinite(p).all())


# torch.optim.Adafactor


@pytest.mark.parametrize("eps1", [0.0, 1e-45, 1e-30, 1e-20, None])
@pytest.mark.parametrize("shape", [(4, 6), (6,)])
def test_zero_row(shape, eps1):
    """An embedding row without a gradient is the normal case."""
    start, [[g]] = random_steps([shape], 1)
    g[0] = 0
    after = one_step(Adafactor, start[0], g, eps=(eps1, 1e-3))
    assert finite(after)
    assert torch.equal(after[0], start[0][0].double())
    assert not torch.equal(after[1], start[0][1].double())
    # 1e-20 squared is 0 in float32 like the others, but CPUs keep it as a denormal number.
    if eps1 in (0.0, 1e-45, 1e-30):
        assert not finite(one_step(Torch, start[0], g, eps=(eps1, 1e-3)))


@pytest.mark.parametrize("shape", [(4, 6), (6,), ()])
def test_zero_gradient(shape):
    """A layer that is skipped for one batch must not be lost."""
    start, _ = random_steps([shape], 1)
    zero = torch.zeros(shape)
    for eps1 in (0.0, 1e-30, None):
        assert torch.equal(one_step(Adafactor, start[0], zero, eps=(eps1, 1e-3)), start[0].double())
    assert torch.equal(one_step(OursT, start[0], zero, eps=(0.0, 1e-3)), start[0].double())
    assert not finite(one_step(Torch, start[0], zero, eps=(1e-30, 1e-3)))
    assert not finite(one_step(Transformers, start[0], zero, eps=(0.0, 1e-3)))


def test_eps_is_resolved_per_parameter():
    """The order of the parameters of a group must not matter."""
    start, [grads] = random_steps([(4, 6), (4, 6)], 1)
    # Small enough that the floor matters: bfloat16's is 0.0078, float32's 1.2e-7.
    grads = [1e-6 * g for g in grads]

    def last_first_swapped(cls):
        results = []
        for order in ((0, 1), (1, 0)):
            pair = parameters(start)
            pair[0] = Parameter(pair[0].detach().bfloat16())
            params = [pair[i] for i in order]
            trajectory(cls(params), params, [[grads[i] for i in order]])
            results.append([p.detach().clone() for p in pair])
        return all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    assert last_first_swapped(Adafactor)
    assert not last_first_swapped(Torch)


@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_takes_the_float32_step(dtype, size):
    """Gradients of a fine-tuned model in bfloat16 are this small: with torch it all but stands still."""
    start, [[g]] = random_steps([(8, 16)], 1)
    start, g = start[0].to(dtype), (size * g / g.abs().max()).to(dtype)
    truth = one_step(Adafactor, start.float(), g.float(), lr=0.1)
    mine = one_step(Adafactor, start, g, dtype, lr=0.1)
    assert torch.equal(mine, truth.to(dtype).double())
    peers = one_step(Torch, start, g, dtype, lr=0.1)
    moved = (truth - start.double()).norm()
    assert (peers - start.double()).norm() < 0.5 * moved or not finite(peers)


def test_statistics_are_float32():
    """In the parameter's precision they are too coarse to follow (bfloat16), or 0 (float16)."""
    g = torch.full((4, 6), 3e-5)
    for dtype in (torch.bfloat16, torch.float16):
        p = parameters([torch.ones(4, 6)], dtype)
        optimizer = Adafactor(p)
        trajectory(optimizer, p, [[g]])
        expected = float(g[0, 0].to(dtype).float() ** 2)
        for name in ("row_var", "col_var"):
            statistic = optimizer.state_dict()["state"][0][name]
            assert statistic.dtype is torch.float32
            torch.testing.assert_close(statistic, torch.full_like(statistic, expected))
    p = parameters([torch.ones(4, 6)], torch.float16)
    optimizer = Torch(p)
    trajectory(optimizer, p, [[g]])
    assert not optimizer.state_dict()["state"][0]["row_var"].any()


@pytest.mark.parametrize(
    ("peer", "ours", "name"), [(Torch, Adafactor, "row_var"), (Transformers, OursT, "exp_avg_sq_row")]
)
def test_loading_keeps_the_precision_of_statistics(peer, ours, name):
    """A resumed run must be the run that was stopped; float16 turns small statistics into 0."""
    p = parameters([torch.ones(4, 6)], torch.float16)
    source = ours(p)
    trajectory(source, p, [[torch.full((4, 6), 3e-5)]])
    saved = source.state_dict()
    mine = ours(parameters([torch.ones(4, 6)], torch.float16))
    mine.load_state_dict(saved)
    assert torch.equal(mine.state_dict()["state"][0][name], saved["state"][0][name])
    theirs = peer(parameters([torch.ones(4, 6)], torch.float16))
    theirs.load_state_dict(saved)
    assert not theirs.state_dict()["state"][0][name].any()


def test_loading_copies():
    """Two optimizers that share statistics corrupt each other."""
    start, steps = random_steps([(4, 6)], 1)

    def shares(cls):
        p = parameters(start)
        source, target = cls(p), cls(parameters(start))
        trajectory(source, p, steps)
        target.load_state_dict(source.state_dict())
        name = "row_var" if cls in (Torch, Adafactor) else "exp_avg_sq_row"
        mine, theirs = (o.state_dict()["state"][0][name] for o in (source, target))
        return mine.data_ptr() == theirs.data_ptr()

    assert not shares(Adafactor)
    assert not shares(OursT)
    assert shares(Torch)
    assert shares(Transformers)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
def test_empty_parameters(shape):
    """A head without classes, an adapter of rank 0: nothing to do, and no reason to stop."""
    start, steps = random_steps([shape, (3,)], 2)
    for cls in (Adafactor, OursT):
        for foreach in (False, True):
            params = parameters(start)
            optimizer = cls(params, foreach=foreach)
            trajectory(optimizer, params, steps)
            saved = optimizer.state_dict()["state"][0]
            assert saved["step"] == 2
            assert all(finite(value) for value in saved.values() if isinstance(value, torch.Tensor))
    params = parameters(start)
    with pytest.raises(ZeroDivisionError):
        trajectory(Torch(params), params, steps)
    params = parameters(start)
    optimizer = Transformers(params)
    trajectory(optimizer, params, steps)
    assert not finite(optimizer.state_dict()["state"][0]["RMS"])


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_single_elements(shape):
    """Scalars (a temperature, a gate) train like anything else, in every precision."""
    for cls in (Adafactor, OursT):
        for dtype in (torch.float32, torch.float16):
            after = one_step(cls, torch.ones(shape), torch.full(shape, 1e-6), dtype)
            assert finite(after)
            assert after.item() < 1
    # 1e-6 over a floor of float16's epsilon, 1e-3, is a step a thousand times too small.
    assert one_step(Torch, torch.ones(shape), torch.full(shape, 1e-6), torch.float16).item() == 1


@pytest.mark.parametrize("d", [0.25, None])
def test_clipping_below_1_and_off(d):
    """The peers of the same algorithm take both."""
    start, [[g]] = random_steps([(4, 6)], 1)
    g[0, 0] = 100
    after = one_step(Adafactor, start[0], g, d=d)
    change = (start[0].double() - after) / start[0].double().square().mean().sqrt() / 1e-2
    rms = change.square().mean().sqrt().item()
    assert rms == pytest.approx(d, rel=1e-4) if d else rms > 1.01
    with pytest.raises((ValueError, TypeError)):
        Torch(parameters(start), d=d)
    if d is None:
        torch.testing.assert_close(one_step(OursT, start[0], g, clip_threshold=None), after, rtol=1e-5, atol=1e-7)
        with pytest.raises(TypeError):
            one_step(Transformers, start[0], g, clip_threshold=None)


def test_lr_0_moves_nothing():
    """Checkpoint tools prime optimizers with lr = 0, people freeze groups with it."""
    start, steps = random_steps([(4, 6)], 3)
    bad = torch.full((4, 6), float("nan"))
    assert torch.equal(one_step(Adafactor, start[0], bad, lr=0.0, weight_decay=0.1), start[0].double())
    assert not finite(one_step(Torch, start[0], bad, lr=0.0, weight_decay=0.1))

    def movement_after_freezing(cls):
        params = parameters(start)
        optimizer = cls(params, lr=0.1, relative_step=False, beta1=0.9, weight_decay=0.1)
        trajectory(optimizer, params, steps)
        before = params[0].detach().clone()
        optimizer.param_groups[0]["lr"] = 0.0
        trajectory(optimizer, params, steps)
        return (params[0].detach() - before).abs().max().item()

    assert movement_after_freezing(OursT) == 0
    assert movement_after_freezing(Transformers) > 1e-3


def test_norms_of_large_tensors():
    """A large layer steps by a scale that is off by 1e-4 at 4 million elements, by 5e-3 at 67 million."""
    start = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).view(2048, 2048)
    g = torch.ones(2048, 2048)
    truth = one_step(Adafactor, start, g, torch.float64, lr=0.1) - start
    error = {}
    for cls in (Adafactor, Torch):
        error[cls] = float((one_step(cls, start, g, lr=0.1) - start - truth).mean().abs() / truth.mean().abs())
    assert error[Adafactor] < 1e-6
    assert error[Torch] > 1e-5


def test_options_of_groups_are_checked():
    """A typo in one group of many must not wait for step 10,000."""
    for bad in ({"d": -1.0}, {"weight_decay": -0.1}, {"lr": float("nan")}):
        group = {"params": [Parameter(torch.ones(2))], **bad}
        with pytest.raises(ValueError, match=re.escape(str(next(iter(bad.values()))))):
            Adafactor([dict(group)])
        Torch([dict(group)])


def test_a_refused_step_touches_nothing():
    """Whoever catches the error has the model and the optimizer as they were."""

    def untouched(cls):
        params = parameters([torch.ones(3, 2), torch.ones(3, 2)])
        optimizer = cls([{"params": [params[0]]}, {"params": [params[1]]}])
        params[0].grad = torch.ones(3, 2)
        params[1].grad = torch.ones(3, 2).to_sparse()
        with pytest.raises(RuntimeError, match=r"sparse|dense"):
            optimizer.step()
        return torch.equal(params[0].detach(), torch.ones(3, 2))

    assert untouched(Adafactor)
    assert untouched(OursT)
    assert not untouched(Torch)
    assert not untouched(Transformers)


def test_a_parameter_passed_twice_takes_one_step():
    """Tied weights listed by hand would train at twice their step size."""

    def steps_taken(cls):
        p = Parameter(torch.ones(3))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = cls([p, p])
        p.grad = torch.ones(3)
        optimizer.step()
        return [int(saved["step"]) for saved in optimizer.state_dict()["state"].values()]

    assert [steps_taken(cls) for cls in (Adafactor, OursT, Torch, Transformers)] == [[1], [1], [2], [2]]


# transformers and towhee


def test_three_dims_and_more():
    """Convolutions and stacks of experts. (towhee is not installed here: what it does was read in its source.)"""
    shapes = [(3, 4, 5), (4, 3, 2, 2), (2, 2, 2, 2, 3)]
    start, steps = random_steps(shapes, 5)
    mine, theirs = parameters(start), parameters(start)
    path = trajectory(towhee.Adafactor(mine), mine, steps)[-1]
    peers = trajectory(Transformers(theirs), theirs, steps)[-1]
    for a, b in zip(path, peers, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("outside", [torch.enable_grad, torch.no_grad])
def test_closures_may_call_backward(outside):
    """Lightning's automatic optimization does nothing else."""

    def loss_of(cls):
        p = Parameter(torch.ones(3))
        optimizer = cls([p])

        def closure():
            optimizer.zero_grad()
            loss = (p * p).sum()
            loss.backward()
            return loss

        with outside():
            loss = optimizer.step(closure)
        assert loss.item() == 3
        assert float(p.detach().max()) < 1

    loss_of(OursT)
    loss_of(Adafactor)
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss_of(Transformers)


def test_beta1_0_keeps_no_buffer():
    """No momentum must cost no memory, and what is saved must load in transformers and go on."""
    start, steps = random_steps([(4, 6)], 2)
    params, theirs = parameters(start), parameters(start)
    optimizer, peer = OursT(params, beta1=0.0), Transformers(theirs, beta1=0.0)
    trajectory(optimizer, params, steps)
    trajectory(peer, theirs, steps)
    saved = optimizer.state_dict()
    assert "exp_avg" not in saved["state"][0]
    assert saved["param_groups"][0]["beta1"] is None
    assert peer.state_dict()["state"][0]["exp_avg"].numel() == 24
    torch.testing.assert_close(params[0], theirs[0], rtol=1e-6, atol=1e-8)
    peer.load_state_dict(saved)
    trajectory(peer, theirs, steps)


@pytest.mark.parametrize(
    "bad",
    [
        {"lr": -1.0, "relative_step": False},
        {"beta1": 2.0},
        {"decay_rate": 0.8},
        {"eps": (-1.0, 1e-3)},
        {"clip_threshold": 0.0},
        {"weight_decay": -0.1},
        {"lr": None, "relative_step": False},
    ],
)
def test_validation(bad):
    """Refused at once, with the rule and the value."""
    value = bad["lr"] if "lr" in bad else next(iter(bad.values()))
    value = value[0] if isinstance(value, tuple) else value
    with pytest.raises(ValueError, match=f"got {re.escape(repr(value))}"):
        OursT(parameters([torch.ones(2)]), **bad)
    Transformers(parameters([torch.ones(2)]), **bad)


def test_a_groups_lr_under_relative_steps():
    """A learning rate that is ignored in silence costs a day of training."""
    group = {"params": parameters([torch.ones(2)]), "lr": 0.1}
    Transformers([dict(group)])
    with pytest.raises(ValueError, match="lr should be None with relative_step=True"):
        OursT([dict(group)])
    params = parameters([torch.ones(2)])
    optimizer = OursT(params)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.warns(UserWarning, match="has no effect"):
        trajectory(optimizer, params, [[torch.ones(2)]])
    assert optimizer.param_groups[0]["lr"] == 1e-2


def test_schedulers_over_relative_steps():
    """A training loop that makes a scheduler whatever the optimizer."""

    def lr_after(cls):
        params = parameters([torch.ones(2)])
        optimizer = cls(params)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        trajectory(optimizer, params, [[torch.ones(2)]])
        scheduler.step()
        return optimizer.param_groups[0]["lr"]

    assert lr_after(OursT) == 1e-2
    with pytest.raises(TypeError):
        lr_after(Transformers)


def test_the_schedule_before_the_first_step_and_with_frozen_parameters():
    """Loggers ask before the first step, and adapters freeze the first parameter."""

    def lrs(optimizer_class, schedule_class):
        frozen, free, other = (Parameter(torch.ones(4), requires_grad=i > 0) for i in range(3))
        optimizer = optimizer_class([{"params": [frozen, free]}, {"params": [other], "warmup_init": True}])
        schedule = schedule_class(optimizer, initial_lr=0.25)
        before = schedule.get_last_lr()
        for p in (free, other):
            p.grad = torch.ones(4)
        schedule.get_lr()
        optimizer.step()
        schedule.step()
        return before, schedule.get_last_lr()

    assert lrs(OursT, AdafactorSchedule) == ([0.25, 0.25], [0.01, 1e-6])
    with pytest.raises(KeyError):
        lrs(Transformers, TransformersSchedule)


def test_rms_is_saved_as_a_float():
    """A 0-d tensor there breaks the checkpoints of ZeRO and FSDP1."""
    for cls, kind in ((OursT, float), (Transformers, torch.Tensor)):
        params = parameters([torch.ones(4)])
        optimizer = cls(params)
        trajectory(optimizer, params, [[torch.ones(4)]])
        rms = optimizer.state_dict()["state"][0]["RMS"]
        assert isinstance(rms, kind)
        assert float(rms) == 1


def test_complex_parameters():
    """g^2 for |g|^2 gives complex statistics and steps in wrong directions."""
    p = Parameter(torch.ones(2, dtype=torch.complex64))
    for cls in (Adafactor, OursT):
        with pytest.raises(ValueError, match=r"torch\.complex64: optimize torch\.view_as_real"):
            cls([p])
    p.grad = torch.full((2,), 1j)
    Transformers([p], lr=0.1, relative_step=False, scale_parameter=False).step()
    real = Parameter(torch.view_as_real(torch.ones(2, dtype=torch.complex64)))
    OursT([real])


def test_every_deviation_is_documented():
    """The table is what a user reads before changing the import."""
    text = (Path(__file__).parents[1] / "docs" / "deviations.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", text))
    here = {name for name in globals() if name.startswith("test_")} - {"test_every_deviation_is_documented"}
    assert named == here


# With an argument that the peers lack


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_small_steps_in_bfloat16(weight_decay):
    """Fine-tuning in bfloat16 with the peers moves nothing."""
    manual = {"lr": 1e-4, "relative_step": False, "scale_parameter": False, "weight_decay": weight_decay}
    g = torch.full((40, 40), 0.0 if weight_decay else 1.0)

    def moved(cls, dtype, **options):
        params = parameters([torch.ones(40, 40)], dtype)
        return float((1 - trajectory(cls(params, **options), params, [[g]] * 200)[-1][0].double()).mean())

    exact = moved(OursT, torch.float32, **manual)
    assert exact > 5e-3
    assert moved(Transformers, torch.bfloat16, **manual) == 0
    assert moved(Torch, torch.bfloat16, lr=1e-4, weight_decay=weight_decay) == 0
    assert moved(OursT, torch.bfloat16, **manual, rounding="stochastic") == pytest.approx(exact, rel=0.05)
    # p alone is the nearest bfloat16 to where float32 is.
    assert moved(OursT, torch.bfloat16, **manual, rounding="kahan") == pytest.approx(exact, abs=2**-9)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite(value):
    """Hours of training are lost to one bad batch."""
    start, [[good]] = random_steps([(4, 6)], 1)
    bad = good.clone()
    bad[1, 2] = value
    for peer, ours in ((Torch, Adafactor), (Transformers, OursT)):
        params = parameters(start)
        assert not finite(trajectory(peer(params), params, [[bad], [good], [good]])[-1][0])
        params, twins = parameters(start), parameters(start)
        optimizer = ours(params, skip_nonfinite=True)
        after = trajectory(optimizer, params, [[bad], [good], [good]])[-1][0]
        assert torch.equal(after, trajectory(ours(twins), twins, [[good], [good]])[-1][0])
        assert int(optimizer.skipped_steps) == 1


def test_a_row_that_wakes():
    """A rare word's embedding jumps whenever the word occurs."""
    draw = torch.Generator().manual_seed(0)
    grads = [torch.randn(40, 32, generator=draw) for _ in range(400)]
    for t, g in enumerate(grads, start=1):
        g[7] *= t % 50 == 0

    def jump(cls, **options):
        params = parameters([torch.ones(40, 32)])
        path = trajectory(cls(params, **options), params, [[g] for g in grads])
        last = (path[-1][0] - path[-2][0]).square().mean(1).sqrt()
        return float(last[7] / last[:7].mean())

    manual = {"lr": 1e-3, "relative_step": False, "scale_parameter": False}
    assert jump(Transformers, **manual) > 4
    assert jump(Torch) > 4
    assert jump(OursT, **manual, max_row_boost=2.0) < 2.2
    assert jump(Adafactor, max_row_boost=2.0) < 2.2
