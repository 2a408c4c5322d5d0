"""What lr = 0 does, and what the lr of a group with relative steps shows."""

import math
import warnings

import pytest
import torch
from contract_table import (
    DIALECTS,
    EXTERNAL,
    SCHEDULERS,
    STEPS,
    all_cases,
    bits,
    copies,
    lr_of,
    parameters,
    picture,
    plain_cases,
    relative_cases,
    rho,
    same,
    set_gradients,
    through_a_file,
    train,
    values,
)


def _freeze(own):
    for group in own.param_groups:
        lr = group["lr"]
        if isinstance(lr, torch.Tensor):
            lr.zero_()
        else:
            group["lr"] = 0.0


@pytest.mark.parametrize("gradient", [1.0, math.nan, math.inf])
@all_cases
def test_at_lr_0_nothing_moves(case, gradient):
    """Freezing by lr, and the dummy step by which checkpoint tools make state: decay and old momentum included."""
    params = parameters()
    own = case.make(params)
    train(own, params, range(2))
    _freeze(own)
    before = values(params)
    for _ in range(2):
        for p in params:
            p.grad = torch.full_like(p, gradient)
        own.step()
        assert values(params) == before
    assert lr_of(own) == [0.0]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("case", EXTERNAL, ids=str)
def test_at_lr_0_infinite_parameters_stay_too(case, foreach):
    """Masks with -inf are parameters in some models: 0 times infinity would make them nan."""
    params = [torch.nn.Parameter(torch.tensor([[-math.inf, 1.0], [math.inf, 2.0]]))]
    own = case.make(params, lr=0.0, weight_decay=0.1, foreach=foreach)
    before = values(params)
    train(own, params, range(2))
    assert values(params) == before


@pytest.mark.parametrize("case", EXTERNAL, ids=str)
def test_one_group_at_lr_0_does_not_hold_back_the_others(case):
    """Layer-wise freezing."""
    ours, plain = parameters(), parameters()
    own = case.make([{"params": ours[:2], "lr": 0.0}, {"params": ours[2:]}], weight_decay=0.1)
    other = case.make(plain, weight_decay=0.1)
    frozen = values(ours[:2])
    train(own, ours, range(4))
    train(other, plain, range(4))
    assert values(ours[:2]) == frozen
    assert same(ours[2:], plain[2:])


@relative_cases
def test_a_relative_lr_shows_rho_and_is_never_none(case):
    """Loggers read it, schedulers multiply it: None breaks both (relative tolerance: float64 roots may differ)."""
    params = parameters()
    own = case.make([{"params": params[:2]}, {"params": params[2:]}])
    for group in own.param_groups:
        assert type(group["lr"]) is float
        assert group["lr"] == pytest.approx(rho(case, 1), rel=1e-14)
    for step in range(4):
        set_gradients(params[:2], step)
        own.step()
        assert [type(group["lr"]) for group in own.param_groups] == [float, float]
        assert lr_of(own) == pytest.approx([rho(case, step + 1), rho(case, 1)], rel=1e-14)
    saved = own.state_dict()
    assert [group["lr"] for group in saved["param_groups"]] == lr_of(own)
    fresh = parameters()
    other = case.make([{"params": fresh[:2]}, {"params": fresh[2:]}])
    for group in saved["param_groups"]:
        group["lr"] = None  # as transformers saves it
    other.load_state_dict(saved)
    assert lr_of(other) == lr_of(own)


@relative_cases
def test_another_relative_lr_has_no_effect_and_is_said_so_once_at_the_users_line(case):
    """transformers ignores it in silence; people then tune a number that does nothing."""
    ours, plain = parameters(), parameters()
    own, other = case.make(ours), case.make(plain)
    train(own, ours, range(1))
    train(other, plain, range(1))
    own.param_groups[0]["lr"] = 0.125
    set_gradients(ours, 1)
    with pytest.warns(UserWarning, match=r"lr of parameter group 0.*0\.125.*no effect") as caught:
        own.step()
    assert [warning.filename for warning in caught] == [__file__]
    train(other, plain, range(1, 2))
    assert picture(own) == picture(other)
    own.param_groups[0]["lr"] = 0.25
    train(own, ours, range(2, 3))
    train(other, plain, range(2, 3))
    assert picture(own) == picture(other)


@plain_cases
def test_loading_another_systems_state_warns_at_the_users_line(case):
    """A warning that points into the library is one that nobody can find."""
    other = next(dialect for dialect in DIALECTS if dialect is not case.dialect)
    source, params = parameters(), parameters()
    theirs = other.own(source)
    train(theirs, source, range(2))
    own = case.make(params)
    with pytest.warns(UserWarning, match=other.name) as caught:
        own.load_state_dict(theirs.state_dict())
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("zero", [0.0, 0, -5e-18, torch.tensor(0.0)], ids=str)
@relative_cases
def test_a_relative_lr_of_0_freezes_until_it_is_set_again(case, zero, tmp_path):
    """The one thing that a group's lr can say under relative steps, also through a checkpoint; in silence."""
    params = parameters()
    own = case.make(params)
    train(own, params, range(2))
    own.param_groups[0]["lr"] = zero
    before = values(params)
    train(own, params, range(2, 4))
    assert values(params) == before
    assert float(own.param_groups[0]["lr"]) == pytest.approx(0.0, abs=1e-17)
    others = copies(params)
    other = case.make(others)
    other.load_state_dict(through_a_file(own.state_dict(), tmp_path / "optimizer.pt"))
    train(other, others, range(4, 6))
    assert values(others) == before
    train(own, params, range(4, 6))
    own.param_groups[0]["lr"] = rho(case, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether this float is rho to the last bit is beside the point
        train(own, params, range(6, 7))
    assert all(bits(p) != old for p, old in zip(params, before, strict=True))
    assert lr_of(own) == pytest.approx([rho(case, 7)], rel=1e-14)


@pytest.mark.parametrize("name", ["LambdaLR", "StepLR", "MultiStepLR", "ExponentialLR", "ChainedScheduler"])
@relative_cases
def test_a_scheduler_over_relative_steps_runs_and_one_warning_says_that_it_does_nothing(case, name):
    """Trainers make a scheduler whatever the optimizer; with transformers' own, lr=None is a TypeError here."""
    ours, plain = parameters(), parameters()
    own, other = case.make(ours), case.make(plain)
    scheduler = SCHEDULERS[name](own)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            train(own, ours, range(step, step + 1))
            scheduler.step()
    assert len([warning for warning in caught if "no effect" in str(warning.message)]) == 1
    train(other, plain, range(STEPS))
    assert same(ours, plain)


@relative_cases
def test_parameters_that_are_swapped_for_others_start_anew_in_silence(case):
    """Accelerators replace parameters in the groups after the optimizer is made: no change of lr by the user."""
    params, others = parameters(), parameters()
    own = case.make(params)
    train(own, params, range(3))
    own.param_groups[0]["params"] = others
    train(own, others, range(1))
    plain = parameters()
    train(case.make(plain), plain, range(1))
    assert same(others, plain)
