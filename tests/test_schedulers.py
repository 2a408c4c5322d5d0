"""Every scheduler of torch, GradScaler, and AdafactorSchedule: beside the peers with the same ones."""

import math

import pytest
import torch
from contract_table import (
    SCHEDULED,
    SCHEDULERS,
    STEPS,
    TRANSFORMERS,
    Case,
    Watch,
    all_cases,
    copies,
    external_cases,
    gradient_of,
    loss_of,
    parameters,
    picture,
    plain_cases,
    relative_cases,
    set_gradients,
    train,
    values,
)
from transformers.optimization import AdafactorSchedule as PeerSchedule

from adafactor.dialects.transformers import AdafactorSchedule, get_adafactor_schedule

# Schedulers


def test_every_scheduler_of_torch_is_in_the_table():
    """A scheduler that nobody tried is one that may write something into the groups that a step refuses."""
    assert set(torch.optim.lr_scheduler.__all__) - {"LRScheduler"} <= set(SCHEDULERS)


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("case", SCHEDULED, ids=str)
def test_a_scheduler_gives_the_peers_learning_rates_and_trajectory(case, name):
    """Schedules are half of a training recipe."""
    ours, theirs = parameters(), parameters()
    own, peer, watch = case.make(ours), case.make_peer(theirs), Watch(theirs)
    pairs = ((own, SCHEDULERS[name](own)), (peer, SCHEDULERS[name](peer)))
    lrs = ([], [])
    tensor = own.param_groups[0]["lr"]
    for step in range(STEPS):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        for (optimizer, scheduler), seen in zip(pairs, lrs, strict=True):
            seen.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            if name == "ReduceLROnPlateau":
                scheduler.step(1.0)
            else:
                scheduler.step()
        watch.look()
    assert lrs[0] == lrs[1]
    assert len(set(lrs[0])) > 1
    watch.check(ours)
    if isinstance(tensor, torch.Tensor):
        assert own.param_groups[0]["lr"] is tensor, "a tensor lr is changed in place, where compiled steps look for it"


@pytest.mark.parametrize("start", [0.05, 1e-3, 1.0])
@external_cases
def test_a_schedule_that_ends_at_a_rounding_error_below_zero_ends_at_zero(case, start):
    """LinearLR down to 0 arrives at -5e-18 and less; the last steps of a run must neither raise nor climb."""
    params = parameters()
    own = case.make(params, lr=start, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(own, start_factor=0.1, end_factor=0.0, total_iters=4)
    for step in range(4):
        before = values(params)
        train(own, params, range(step, step + 1))
        assert values(params) != before
        scheduler.step()
    for lr in (own.param_groups[0]["lr"], -5e-18):
        assert abs(lr) < 1e-15
        own.param_groups[0]["lr"] = lr
        before = values(params)
        train(own, params, range(4, 6))
        assert values(params) == before


# GradScaler


def _scaled_step(own, params, scaler, step, *, overflow=False, max_norm=None):
    own.zero_grad()
    scaler.scale(loss_of(params, step)).backward()
    if overflow:
        params[-1].grad.fill_(math.inf)
    if max_norm is not None:
        scaler.unscale_(own)
        torch.nn.utils.clip_grad_norm_(params, max_norm)
    scaler.step(own)
    scaler.update()


@pytest.mark.parametrize("overflow_at", [0, 2])
@all_cases
def test_a_step_that_the_grad_scaler_skips_never_happened(case, overflow_at):
    """Mixed precision skips its first steps as a rule. Scales are powers of two, so the rest is exact."""
    ours, plain = parameters(), parameters()
    own, other = case.make(ours), case.make(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(5):
        if step == overflow_at:
            before = picture(own)
            _scaled_step(own, ours, scaler, step, overflow=True)
            assert picture(own) == before
            assert scaler.get_scale() == 2.0**9
            continue
        _scaled_step(own, ours, scaler, step)
        train(other, plain, range(step, step + 1))
    assert picture(own) == picture(other)


@plain_cases
def test_gradients_can_be_unscaled_and_clipped_before_the_step(case):
    """The documented order for clipping under a GradScaler."""
    ours, plain = parameters(), parameters()
    own, other = case.make(ours), case.make(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        _scaled_step(own, ours, scaler, step, max_norm=0.5)
        set_gradients(plain, step)
        torch.nn.utils.clip_grad_norm_(plain, 0.5)
        other.step()
    assert picture(own) == picture(other)


# AdafactorSchedule


@relative_cases
def test_the_schedule_shows_what_transformers_own_shows(case):
    """Training loops log it. Both are float32 roots of sums of squares: 1e-6."""
    ours, theirs = parameters(), parameters()
    own, peer = case.make(ours), case.make_peer(theirs)
    schedule, expected = AdafactorSchedule(own, initial_lr=0.5), PeerSchedule(peer, initial_lr=0.5)
    assert schedule.get_last_lr() == expected.get_last_lr() == [0.5]
    for step in range(STEPS):
        train(own, ours, range(step, step + 1))
        train(peer, theirs, range(step, step + 1))
        schedule.step()
        shown = schedule.get_last_lr()
        assert shown == schedule.get_lr() == pytest.approx([float(lr) for lr in expected.get_lr()], rel=1e-6)
        assert all(type(lr) is float for lr in shown)


@all_cases
def test_the_schedule_writes_nothing(case):
    """It is a display: transformers' own overwrites the lr, which under an external lr compounds to nothing."""
    ours, plain = parameters(), parameters()
    own, other = case.make(ours), case.make(plain)
    before = picture(own)
    schedule = get_adafactor_schedule(own)
    assert isinstance(schedule, AdafactorSchedule)
    assert picture(own) == before
    for step in range(4):
        train(own, ours, range(step, step + 1))
        train(other, plain, range(step, step + 1))
        schedule.step()
    assert picture(own) == picture(other)
    assert schedule.last_epoch == 4


@pytest.mark.parametrize("initial", [0.0, 0.25])
@plain_cases
def test_the_schedule_shows_the_initial_lr_before_the_first_step(case, initial):
    """transformers' own raises KeyError here once gradients are there; one value for each group."""
    params = parameters()
    own = case.make([{"params": params[:2]}, {"params": params[2:]}])
    set_gradients(params, 0)
    schedule = get_adafactor_schedule(own, initial)
    assert schedule.get_last_lr() == schedule.get_lr() == [initial, initial]
    schedule.step()
    assert schedule.get_last_lr() == [initial, initial]


@relative_cases
def test_the_schedule_has_one_value_for_each_group_also_with_frozen_parameters(case):
    """transformers' own leaves such groups out, so that values move to the wrong group. Each as if it were alone."""
    params = parameters()
    params[0].requires_grad_(False)
    constant = params[0].detach().clone()
    own = case.make([{"params": params[:1]}, {"params": [constant, params[1]]}, {"params": params[2:]}])
    schedule = get_adafactor_schedule(own, 0.75)
    alone = {}
    for index in (1, 2):
        copied = copies(params[index : index + 1])
        peer = case.make_peer(copied)
        alone[index] = (copied, peer, PeerSchedule(peer))
    for step in range(3):
        for index, p in enumerate(params[1:], start=1):
            p.grad = gradient_of(step, index, p)
        own.step()
        schedule.step()
        expected = [0.75]
        for index, (copied, peer, theirs) in alone.items():
            copied[0].grad = gradient_of(step, index, copied[0])
            peer.step()
            expected.append(float(theirs.get_lr()[0]))
        assert schedule.get_last_lr() == pytest.approx(expected, rel=1e-6)


@plain_cases
def test_the_schedule_survives_a_skipped_first_step(case):
    """A GradScaler skips it as a rule; transformers' own then raises KeyError: 'step'."""
    params = parameters()
    own = case.make(params)
    schedule, scaler = get_adafactor_schedule(own, 0.5), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    _scaled_step(own, params, scaler, 0, overflow=True)
    schedule.step()
    assert schedule.get_last_lr() == [0.5]
    _scaled_step(own, params, scaler, 1)
    schedule.step()
    assert 0 < schedule.get_last_lr()[0] < 0.5


@relative_cases
def test_the_schedule_goes_on_after_a_resume(case):
    """A resumed run must not log a gap, nor another value."""
    params = parameters()
    own = case.make(params)
    train(own, params, range(3))
    others = copies(params)
    other = case.make(others)
    other.load_state_dict(own.state_dict())
    assert get_adafactor_schedule(other).get_last_lr() == get_adafactor_schedule(own).get_last_lr() != [0.0]


def test_the_schedule_shows_0_for_a_frozen_group():
    """What is shown is the step that is taken."""
    case = Case("default", TRANSFORMERS)
    params = parameters()
    own = case.make(params)
    schedule = get_adafactor_schedule(own)
    train(own, params, range(2))
    own.param_groups[0]["lr"] = 0.0
    schedule.step()
    assert schedule.get_last_lr() == [0.0]


def test_the_schedule_refuses_other_optimizers():
    """Only an Adafactor of this package can say its step sizes."""
    with pytest.raises(TypeError, match=r"optimizer.*SGD"):
        AdafactorSchedule(torch.optim.SGD(parameters()))
