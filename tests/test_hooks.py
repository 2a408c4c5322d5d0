"""The six kinds of hooks, and the profiler, for both dialects."""

import copy

import pytest
import torch
from contract_table import (
    all_dialects,
    bits,
    parameters,
    picture,
    plain_cases,
    set_gradients,
    train,
    values,
)

REGISTER = {
    "step_pre": "register_step_pre_hook",
    "step_post": "register_step_post_hook",
    "state_dict_pre": "register_state_dict_pre_hook",
    "state_dict_post": "register_state_dict_post_hook",
    "load_state_dict_pre": "register_load_state_dict_pre_hook",
    "load_state_dict_post": "register_load_state_dict_post_hook",
}


@pytest.mark.parametrize("where", REGISTER)
@plain_cases
def test_hooks_run_in_order_until_they_are_removed(case, where):
    """Loggers, averagers and sharding libraries hang on these; some must be the first."""
    params = parameters()
    own = case.make(params)
    train(own, params, range(1))
    saved = copy.deepcopy(own.state_dict())
    calls = []

    def note(name):
        def hook(optimizer, *_):
            assert optimizer is own
            calls.append(name)

        return hook

    register = getattr(own, REGISTER[where])
    prepend = {} if where.startswith("step") else {"prepend": True}
    register(note("a"))
    removed = register(note("b"))
    register(note("c"), **prepend)
    everything = {"step": own.step, "state_dict": own.state_dict, "load": lambda: own.load_state_dict(saved)}

    def run():
        calls.clear()
        for call in everything.values():
            call()
        return "".join(calls)

    assert run() == ("cab" if prepend else "abc")
    removed.remove()
    assert run() == ("ca" if prepend else "ac")


@plain_cases
def test_a_step_pre_hook_can_replace_the_closure_and_a_post_hook_sees_the_result(case):
    """Documented: new (args, kwargs) take the place of those that step was called with."""
    params = parameters()
    own = case.make(params)
    start, seen = values(params), []

    def pre(optimizer, args, kwargs):
        seen.append((args, dict(kwargs), values(params)))
        return (args, {"closure": lambda: 2.0})

    def post(optimizer, args, kwargs):
        seen.append((args, dict(kwargs), values(params)))

    own.register_step_pre_hook(pre)
    own.register_step_post_hook(post)
    set_gradients(params, 0)
    first = lambda: 1.0  # noqa: E731
    assert own.step(closure=first) == 2.0
    (args, kwargs, before), (_, kwargs_after, after) = seen
    assert args == (own,)
    assert kwargs == {"closure": first}
    assert kwargs_after["closure"]() == 2.0
    assert before == start
    assert after == values(params) != start


@plain_cases
def test_state_dict_hooks_see_and_change_what_is_saved(case):
    """A pre-hook may prepare the optimizer; a post-hook has to find the names that this dialect's files have."""
    params = parameters()
    own = case.make(params)
    train(own, params, range(2))
    momentum = {"exp_avg"} if case.options.get("beta1") else set()
    seen = []

    def pre(optimizer):
        optimizer.param_groups[0]["note"] = "from the pre-hook"

    def post(optimizer, saved):
        seen.append(set(saved["state"][0]))
        saved["added"] = True

    def replace(optimizer, saved):
        return {**saved, "replaced": True}

    own.register_state_dict_pre_hook(pre)
    own.register_state_dict_post_hook(post, prepend=True)
    own.register_state_dict_post_hook(replace)
    saved = own.state_dict()
    assert seen == [case.dialect.saved | momentum]
    assert set(saved["state"][0]) == seen[0]
    assert saved["added"]
    assert saved["replaced"]
    assert saved["param_groups"][0]["note"] == "from the pre-hook"


@pytest.mark.parametrize("replace", [True, False], ids=["return", "in_place"])
@plain_cases
def test_load_hooks_change_what_is_loaded_and_see_it(case, replace):
    """The documented way to load a file whose parameters have other names or another order."""
    params, others = parameters(), parameters()
    source, target = case.make(params), case.make(others)
    train(source, params, range(3))
    saved = source.state_dict()
    seen = []

    def pre(optimizer, given):
        changed = {
            "param_groups": [{**group, "weight_decay": 0.25} for group in given["param_groups"]],
            "state": {key: {**entry, "step": 7} for key, entry in given["state"].items()},
        }
        if replace:
            return {**given, **changed}
        given.update(changed)
        return None

    def post(optimizer):
        seen.append(picture(optimizer))

    target.register_load_state_dict_pre_hook(pre)
    target.register_load_state_dict_post_hook(post, prepend=True)
    target.load_state_dict(saved)
    assert target.param_groups[0]["weight_decay"] == 0.25
    assert saved["param_groups"][0]["weight_decay"] == case.options.get("weight_decay", 0.0)
    assert seen == [picture(target)]
    assert int(saved["state"][0]["step"]) == 3
    expected = [{**source.state[p], "step": torch.tensor(7.0)} for p in params]
    assert [bits(target.state[p]) for p in others] == bits(expected)


@plain_cases
def test_hooks_left_by_saving_and_loading_are_the_users_alone(case):
    """Translation hangs on hooks of its own; left behind, they would translate the next checkpoint twice."""
    params = parameters()
    own = case.make(params)
    train(own, params, range(1))
    saved = copy.deepcopy(own.state_dict())
    own.load_state_dict(saved)
    broken = copy.deepcopy(saved)
    broken["param_groups"][0]["weight_decay"] = -1.0
    with pytest.raises(ValueError, match="weight_decay"):
        own.load_state_dict(broken)
    assert bits(own.state_dict()) == bits(saved)
    hooks = [value for key, value in vars(own).items() if key.endswith("_hooks")]
    assert len(hooks) == len(REGISTER)
    assert not any(hooks)


@all_dialects
def test_a_step_shows_in_a_profile(dialect):
    """How people find out what the optimizer costs; the class must be named as the one it stands in for."""
    params = parameters()
    own = dialect.own(params)
    set_gradients(params, 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        own.step()
        own.zero_grad()
    names = [event.name for event in profile.events()]
    assert names.count("Optimizer.step#Adafactor.step") == 1
    assert names.count("Optimizer.zero_grad#Adafactor.zero_grad") == 1
