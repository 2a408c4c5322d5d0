"""State that moves between systems: whoever changes the import in the middle of a run goes on with it."""

import copy

import pytest
import torch
import transformers.optimization
from helpers import assert_same_path, parameters, random_steps, trajectory
from torch.nn import Parameter

from adafactor import Adafactor
from adafactor.dialects import optax, timm
from adafactor.dialects.transformers import Adafactor as OursT

Torch = torch.optim.Adafactor
Transformers = transformers.optimization.Adafactor
SHAPES = [(5, 8), (7,), (), (2, 3, 4), (1, 6)]

TRANSFERS = [
    (Torch, Adafactor, {}),
    (Adafactor, Torch, {}),
    (Torch, Adafactor, {"lr": 0.1, "weight_decay": 0.1, "maximize": True, "foreach": True}),
    (Adafactor, Torch, {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    (Transformers, OursT, {}),
    (OursT, Transformers, {}),
    (Transformers, OursT, {"beta1": 0.9, "weight_decay": 0.1}),
    (OursT, Transformers, {"beta1": 0.9, "weight_decay": 0.1}),
    (OursT, Transformers, {"lr": 0.01, "relative_step": False, "scale_parameter": False}),
    (OursT, Transformers, {"warmup_init": True}),
]


@pytest.mark.parametrize("taken", [0, 4])
@pytest.mark.parametrize(("source", "target", "options"), TRANSFERS)
def test_a_run_goes_on_in_the_other_system(source, target, options, taken):
    """Some steps in one, the rest in the other: the same as eight in the first. Also with what is saved before any."""
    start, steps = random_steps(SHAPES, 8)
    whole, halves = parameters(start), parameters(start)
    truth = trajectory(source(whole, **options), whole, steps)
    first = source(halves, **options)
    trajectory(first, halves, steps[:taken])
    second = target(halves)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    path = trajectory(second, halves, steps[taken:])
    for i, value in enumerate(start):
        assert_same_path([after[i] for after in path], [after[i] for after in truth[taken:]], value)


@pytest.mark.parametrize(("source", "target"), [(Torch, Adafactor), (Transformers, OursT)])
def test_the_same_keys_shapes_and_types(source, target):
    """Tools that look into checkpoints find what they know."""
    start, steps = random_steps(SHAPES, 2)
    saved = []
    for cls in (source, target):
        params = parameters(start)
        optimizer = cls(params, **({"beta1": 0.9} if cls in (Transformers, OursT) else {}))
        trajectory(optimizer, params, steps)
        saved.append(optimizer.state_dict())
    theirs, mine = saved
    assert mine["state"].keys() == theirs["state"].keys()
    for key, entry in theirs["state"].items():
        assert mine["state"][key].keys() == entry.keys()
        for name, value in entry.items():
            own = mine["state"][key][name]
            if name == "RMS":
                assert own == pytest.approx(float(value), rel=1e-6)
            elif isinstance(value, torch.Tensor):
                assert (own.shape, own.dtype) == (value.shape, value.dtype)
                torch.testing.assert_close(own, value, rtol=1e-5, atol=1e-9)
            else:
                assert (type(own), own) == (type(value), value)
    for mine_group, their_group in zip(mine["param_groups"], theirs["param_groups"], strict=True):
        assert mine_group.keys() >= their_group.keys()


@pytest.mark.parametrize(("source", "target"), [(Torch, OursT), (Transformers, Adafactor), (OursT, Adafactor)])
def test_another_dialects_state_is_taken_and_its_hyper_parameters_are_not(source, target):
    """lr means something else there: taken over, it would change the run by orders of magnitude."""
    start, steps = random_steps(SHAPES, 3)
    params = parameters(start)
    first = source(params)
    trajectory(first, params, steps)
    second = target(parameters(start))
    own = copy.deepcopy(second.param_groups[0])
    with pytest.warns(UserWarning, match="keep their own hyper-parameters"):
        second.load_state_dict(first.state_dict())
    assert {k: v for k, v in second.param_groups[0].items() if k != "params"} == {
        k: v for k, v in own.items() if k != "params"
    }
    third = target(parameters(start))
    with pytest.warns(UserWarning, match="keep their own"):
        third.load_state_dict(first.state_dict())
    names = {"row_var": "exp_avg_sq_row", "col_var": "exp_avg_sq_col", "variance": "exp_avg_sq"}
    if target is Adafactor:
        names = {name: key for key, name in names.items()}
    for key, entry in first.state_dict()["state"].items():
        for name, value in entry.items():
            if name in names:
                assert torch.equal(second.state_dict()["state"][key][names[name]].flatten(), value.flatten())


BARE = [
    (OursT, [(4, 3)], {}),
    (OursT, [(5,)], {"beta1": 0.9}),
    (timm.Adafactor, [(20, 20, 30)], {}),
    (optax.Adafactor, [(200, 200)], {}),
    (Adafactor, [(4, 3)], {}),
]


@pytest.mark.parametrize(("cls", "shapes", "options"), BARE)
def test_groups_without_options_are_read_as_the_optimizers_own(cls, shapes, options):
    """Tools that save nothing but ids and state; names that several systems share."""
    start, steps = random_steps(shapes, 1)
    params = parameters(start)
    source = cls(params, **options)
    trajectory(source, params, steps)
    saved = source.state_dict()
    saved["param_groups"] = [{"params": group["params"]} for group in saved["param_groups"]]
    target = cls(parameters(start), **options)
    target.load_state_dict(saved)
    assert int(target.state_dict()["state"][0]["step"]) == 1


@pytest.mark.parametrize(
    ("key", "value"), [("factor", "bogus"), ("factor", ["x"]), ("min_dim_size_to_factor", "a"), ("batch_dims", -1)]
)
def test_a_bad_factoring_in_a_file_is_refused(key, value):
    state_dict = saved()
    state_dict["param_groups"][0][key] = value
    assert_refused(Adafactor, state_dict, key)


def test_a_stack_is_not_taken_for_a_whole():
    """Its statistics are alike, its clipping is not."""
    params = parameters([torch.ones(2, 4)])
    source = optax.Adafactor(params, batch_dims=1)
    trajectory(source, params, [[torch.ones(2, 4)]])
    with pytest.raises(ValueError, match="and 0 batch dims"):
        optax.Adafactor(params).load_state_dict(source.state_dict())


def test_momentum_that_the_new_dialect_has_no_use_for_is_dropped():
    """It is as large as the parameter."""
    params = parameters([torch.ones(3)])
    source = OursT(params, beta1=0.9)
    trajectory(source, params, [[torch.ones(3)]])
    target = Adafactor(params)
    with pytest.warns(UserWarning, match="keep their own"):
        target.load_state_dict(source.state_dict())
    assert sorted(target.state[params[0]]) == ["step", "variance"]


def test_the_saved_rms_is_that_of_the_last_step():
    """Also where the step no longer measures it."""
    params = parameters([torch.ones(3)])
    source = OursT(params, lr=0.5, relative_step=False)
    trajectory(source, params, [[torch.ones(3)]])
    target = OursT(params, lr=0.5, relative_step=False, scale_parameter=False)
    target.load_state_dict(source.state_dict())
    target.param_groups[0]["scale_parameter"] = False
    trajectory(target, params, [[torch.ones(3)], [torch.ones(3)]])
    rms = target.state_dict()["state"][0]["RMS"]
    assert rms == pytest.approx(float(params[0].detach().square().mean().sqrt()))


def test_engine_arguments_stay_and_missing_keys_are_filled():
    """An old file must not switch this machine's way of computing, nor break on options it never knew."""
    params = parameters([torch.ones(3)])
    saved = Adafactor(params, lr=0.5, foreach=True).state_dict()
    del saved["param_groups"][0]["maximize"]
    saved["param_groups"][0]["mine"] = "kept"
    optimizer = Adafactor(params, foreach=False, maximize=True)
    optimizer.load_state_dict(saved)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["foreach"], group["maximize"], group["mine"]) == (0.5, False, True, "kept")


def test_parameters_without_saved_state_start_anew():
    """A layer that never had a gradient in the saved run has no entry in the peers' files."""
    start, steps = random_steps([(4, 3), (5,)], 2)
    theirs = parameters(start)
    peer = Torch(theirs)
    theirs[0].grad = steps[0][0]
    peer.step()
    params = parameters(start)
    optimizer = Adafactor(params)
    trajectory(optimizer, params, steps)
    optimizer.load_state_dict(peer.state_dict())
    entries = optimizer.state_dict()["state"]
    assert [float(entries[i]["step"]) for i in range(2)] == [1, 0]
    assert not entries[1]["variance"].any()


def test_what_users_put_into_the_state_is_carried():
    """torch's base class does, so tools rely on it."""
    params = parameters([torch.ones(3)])
    optimizer = OursT(params)
    optimizer.state[params[0]]["note"] = "mine"
    optimizer.state[params[0]]["mask"] = torch.tensor([True, False, True])
    other = OursT(parameters([torch.ones(3)]))
    other.load_state_dict(optimizer.state_dict())
    entry = other.state_dict()["state"][0]
    assert entry["note"] == "mine"
    assert entry["mask"].tolist() == [True, False, True]


def saved(**changes):
    params = parameters([torch.ones(4, 3), torch.ones(5)])
    optimizer = Adafactor(params)
    trajectory(optimizer, params, [[torch.ones(4, 3), torch.ones(5)]])
    state_dict = copy.deepcopy(optimizer.state_dict())
    for path, value in changes.items():
        *parents, last = [int(part) if part.isdigit() else part for part in path.split("__")]
        place = state_dict
        for part in parents:
            place = place[part]
        if value is None:
            del place[last]
        else:
            place[last] = value
    return state_dict


def foreign(cls):
    params = [Parameter(torch.ones(4, 3)), Parameter(torch.ones(5))]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = cls(params, lr=0.1)
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize(
    ("state_dict", "message"),
    [
        (saved(state__0__row_var=torch.ones(3, 1)), r"row_var of parameter 0 .*shape \(4, 1\), got \(3, 1\)"),
        (saved(state__0__row_var=None), r"should hold col_var, row_var .*got col_var, step"),
        (saved(state__1__variance=torch.ones(4)), r"variance of parameter 1 .*\(5,\), got \(4,\)"),
        (saved(state__1__variance="x"), r"variance of parameter 1 should be a dense real tensor .*got 'x'"),
        (saved(state__0__step=-1), r"step of parameter 0 should be a number >= 0 and below 2\^32, got -1"),
        (saved(state__0__step=None), r"step of parameter 0 should be a number >= 0 and below 2\^32, got None"),
        (saved(param_groups__0__params=[0]), r"groups of \[2\] parameters like the optimizer, got \[1\]"),
        (saved(param_groups=[]), r"groups of \[2\] parameters like the optimizer, got \[\]"),
        (saved(state=None), "state dict should hold state and param_groups, got param_groups"),
        (foreign(torch.optim.AdamW), "one of the layouts torch, .*, got group keys .*'betas'"),
        (foreign(torch.optim.SGD), "one of the layouts torch, .*, got group keys .*'momentum'"),
    ],
)
@pytest.mark.filterwarnings("ignore:loading the state")
@pytest.mark.parametrize("cls", [Adafactor, OursT])
def test_a_refused_state_dict_changes_nothing(cls, state_dict, message):
    """A wrong file is said to be wrong, in one sentence, and the run in memory is still there."""
    assert_refused(cls, state_dict, message)


@pytest.mark.parametrize(
    ("state_dict", "message"),
    [
        (saved(param_groups__0__lr=-1.0), "lr should be .*got -1.0"),
        (saved(param_groups__0__d=0.0), "d should be > 0 or None, got 0.0"),
    ],
)
def test_bad_options_in_a_state_dict_are_refused(state_dict, message):
    assert_refused(Adafactor, state_dict, message)


def assert_refused(cls, state_dict, message):
    params = parameters([torch.ones(4, 3), torch.ones(5)])
    optimizer = cls(params)
    trajectory(optimizer, params, [[torch.ones(4, 3), torch.ones(5)]])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message) as caught:
        optimizer.load_state_dict(state_dict)
    assert "\n" not in str(caught.value)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, entry in before["state"].items():
        for name, value in entry.items():
            same = torch.equal if isinstance(value, torch.Tensor) else (lambda a, b: a == b)
            assert same(after["state"][key][name], value)
