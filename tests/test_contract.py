"""What every torch.optim optimizer promises, for both dialects, from contract_table.py: steps and groups.

Wherever the real peer can do the same thing, it does it side by side. Peers agree within 2e-6 of the total movement
(the order of float32 sums) plus 6 * 2^-24 * max |p| (twelve roundings of the parameter, half a unit each).
"""

import copy
import inspect
import math
import pickle

import pytest
import torch
from contract_table import (
    CASES,
    NAMES,
    STEPS,
    TORCH,
    TRANSFORMERS,
    Case,
    Watch,
    all_cases,
    all_dialects,
    bits,
    external_cases,
    loss_of,
    lr_of,
    parameters,
    picture,
    plain_cases,
    relative_cases,
    rho,
    same,
    set_gradients,
    train,
    values,
)
from torch.utils._python_dispatch import TorchDispatchMode

import adafactor.dialects.towhee

# Trajectories and signatures


@all_dialects
def test_every_argument_of_the_peer_is_taken_under_its_name_place_and_default(dialect):
    """Else replacing the import line changes what a call means."""
    own, peer = (list(inspect.signature(cls).parameters.values()) for cls in (dialect.own, dialect.peer))
    positional = [p for p in peer if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [(p.name, p.default) for p in own[: len(positional)]] == [(p.name, p.default) for p in positional]
    assert {(p.name, p.default) for p in peer} <= {(p.name, p.default) for p in own}


def test_the_towhee_dialect_is_transformers():
    """Towhee's class is the same algorithm; two classes would drift apart."""
    assert adafactor.dialects.towhee.Adafactor is TRANSFORMERS.own


@pytest.mark.parametrize("case", [*CASES, Case("uncapped", TORCH, {"lr": math.inf})], ids=str)
def test_twelve_steps_agree_with_the_peer(case):
    """A user who replaces the import must get the run that he had."""
    ours, theirs = parameters(), parameters()
    own, peer, watch = case.make(ours), case.make_peer(theirs), Watch(theirs)
    for step in range(STEPS):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        own.step()
        peer.step()
        watch.look()
    assert all(moved > 0 for moved in watch.moved)
    watch.check(ours)


# step and its closure


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@all_cases
def test_a_closure_runs_once_with_gradients_and_its_loss_is_returned(case, grad, keyword):
    """Lightning hands its backward pass to step as a closure, inside no_grad."""
    ours, plain = parameters(), parameters()
    own = case.make(ours)
    calls = []

    def closure():
        own.zero_grad()
        loss = loss_of(ours, 0)
        loss.backward()
        calls.append((torch.is_grad_enabled(), loss))
        return loss

    with torch.set_grad_enabled(grad):
        returned = own.step(closure=closure) if keyword else own.step(closure)
        assert torch.is_grad_enabled() is grad
    assert [enabled for enabled, _ in calls] == [True]
    assert returned is calls[0][1]
    assert not any(p.grad_fn for p in ours)
    train(case.make(plain), plain, range(1))
    assert same(ours, plain)


@plain_cases
def test_step_without_a_closure_returns_none(case):
    """What a loop logs as its loss."""
    params = parameters()
    own = case.make(params)
    set_gradients(params, 0)
    assert own.step() is None
    assert own.step(None) is None
    assert own.step(closure=None) is None


@plain_cases
def test_an_error_in_the_closure_changes_nothing(case):
    """A batch that runs out of memory is skipped by many a loop, which then goes on."""
    params = parameters()
    own = case.make(params)
    train(own, params, range(2))
    before = picture(own)

    def closure():
        raise KeyError("batch")

    with pytest.raises(KeyError, match="batch"):
        own.step(closure)
    assert picture(own) == before


# Gradients: none, zero, late


@pytest.mark.parametrize("set_to_none", [True, False])
@all_cases
def test_zero_grad(case, set_to_none):
    """None skips a parameter, zeros are a step: loops that accumulate gradients depend on which one it is."""
    params = parameters()
    own = case.make(params)
    train(own, params, range(1))
    before = picture(own)
    own.zero_grad(set_to_none=set_to_none)
    if set_to_none:
        assert all(p.grad is None for p in params)
    else:
        assert all(p.grad is not None and not p.grad.any() for p in params)
    assert picture(own) == before
    own.step()
    steps = {int(own.state[p]["step"]) for p in params}
    assert steps == ({1} if set_to_none else {2})
    assert (picture(own) == before) is set_to_none


@all_cases
def test_zero_grad_sets_to_none_unless_told_otherwise(case):
    """Memory: gradients are the largest thing that a step leaves behind."""
    params = parameters()
    own = case.make(params)
    set_gradients(params, 0)
    own.zero_grad()
    assert all(p.grad is None for p in params)


@all_cases
def test_a_parameter_without_a_gradient_is_skipped_and_catches_up_on_its_own_count(case):
    """Rarely used experts and unfrozen layers: they neither decay nor age while they have no gradient."""
    ours, theirs = parameters(), parameters()
    ours[1].requires_grad_(False)
    own, peer, watch = case.make(ours), case.make_peer(theirs), Watch(theirs)
    for step in range(STEPS):
        if step == 6:
            ours[1].requires_grad_(True)
        for params in (ours, theirs):
            set_gradients(params, step)
            params[0].grad = None if step % 3 == 1 else params[0].grad
            params[1].grad = None if step < 6 else params[1].grad
            params[2].grad = None if step < 4 else params[2].grad
        skipped = [p for p in ours if p.grad is None]
        before = [(bits(p), bits(own.state.get(p, {}))) for p in skipped]
        own.step()
        assert [(bits(p), bits(own.state.get(p, {}))) for p in skipped] == before
        peer.step()
        watch.look()
    assert [int(own.state[p]["step"]) for p in ours] == [8, 6, 8, 12]
    watch.check(ours)


# Parameters and groups


def _as_tensors(params):
    return params


def _as_generator(params):
    return (p for p in params)


def _as_named(params):
    return zip(NAMES, params, strict=True)


def _as_dicts(params):
    return [{"params": params[:2]}, {"params": (p for p in params[2:3])}, {"params": params[3]}]


def _as_named_dicts(params):
    named = list(zip(NAMES, params, strict=True))
    return [{"params": named[:1]}, {"params": iter(named[1:])}]


def _with_an_empty_group(params):
    return [{"params": []}, {"params": params}]


@pytest.mark.parametrize(
    "form", [_as_tensors, _as_generator, _as_named, _as_dicts, _as_named_dicts, _with_an_empty_group]
)
@plain_cases
def test_every_form_of_parameters_is_the_same_training(case, form):
    """How a training script lists its parameters must not matter."""
    plain, ours = parameters(), parameters()
    train(case.make(plain), plain, range(3))
    own = case.make(form(ours))
    train(own, ours, range(3))
    assert same(ours, plain)
    names = [name for group in own.param_groups for name in group.get("param_names", [])]
    assert names == (list(NAMES) if "named" in form.__name__ else [])
    saved = own.state_dict()
    assert [name for group in saved["param_groups"] for name in group.get("param_names", [])] == names
    assert sorted(saved["state"]) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda p: p[0], TypeError, "iterable of Tensors or dicts"),
        (lambda p: [], ValueError, "empty"),
        (lambda p: iter(()), ValueError, "empty"),
        (lambda p: [{"params": set(p)}], TypeError, "ordered|set"),
        (lambda p: ["weight"], TypeError, "Tensors"),
        (lambda p: [("a", p[0]), p[1]], ValueError, "names"),
        (lambda p: [p[0] * 2], ValueError, "leaf"),
        (lambda p: [{"params": p}, {"params": p[:1]}], ValueError, "more than one"),
        (lambda p: [{"params": p[:1]}, {"params": [("b", p[1])]}], ValueError, "names"),
    ],
    ids=["tensor", "list", "iterator", "set_in_dict", "text", "mixed", "non_leaf", "twice", "mixed_groups"],
)
@all_dialects
def test_what_are_no_parameters_is_refused(dialect, make, error, match):
    """A set has another order in the next run: a resumed run would mix up its statistics. The rest are slips."""
    params = parameters()
    before = values(params)
    with pytest.raises(error, match=match):
        dialect.own(make(params))
    assert values(params) == before


@all_cases
def test_an_added_group_trains_as_in_the_peer_with_defaults_filled(case):
    """Layers that are unfrozen during training, with options of their own and the rest from the constructor."""
    ours, theirs = parameters(), parameters()
    options = {"weight_decay": 0.3, "eps": (1e-20, 5e-3)}
    own, peer, watch = case.make(ours[:2]), case.make_peer(theirs[:2]), Watch(theirs)
    for step in range(STEPS):
        if step == 3:
            own.add_param_group({"params": ours[2], **options})
            peer.add_param_group({"params": theirs[2], **options})
            own.add_param_group({"params": iter(ours[3:])})
            peer.add_param_group({"params": iter(theirs[3:])})
        set_gradients(ours, step)
        set_gradients(theirs, step)
        own.step()
        peer.step()
        watch.look()
    watch.check(ours)
    first, second, third = own.param_groups
    assert first.keys() == second.keys() == third.keys()
    assert {key: second[key] for key in options} == options
    for key in first.keys() - {"params", "lr"}:
        assert third[key] == first[key] == own.defaults[key]
    assert len(own.state_dict()["param_groups"]) == 3


@plain_cases
def test_names_are_kept_through_added_groups(case):
    """Tools that reshard or export a checkpoint find statistics by these names."""
    params = parameters()
    own = case.make(list(zip(NAMES, params, strict=True))[:2])
    own.add_param_group({"params": [("late", params[2])]})
    assert [group["param_names"] for group in own.param_groups] == [["matrix", "vector"], ["late"]]
    with pytest.raises(ValueError, match="names"):
        own.add_param_group({"params": [params[3]]})
    assert [group["param_names"] for group in own.param_groups] == [["matrix", "vector"], ["late"]]


class _Operations(TorchDispatchMode):
    """Counts the tensors that foreach operations are given."""

    def __init__(self):
        super().__init__()
        self.tensors = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith("aten::_foreach"):
            self.tensors += len(args[0])
        return func(*args, **(kwargs or {}))


@external_cases
def test_foreach_is_honoured_group_by_group_and_changes_no_result(case):
    """foreach is a trade of memory for speed that the user makes per group; it must be neither ignored nor felt."""
    counts, trajectories, peer = [], [], parameters()
    watch = Watch(peer)
    other = case.make_peer(peer, weight_decay=0.1)
    for step in range(STEPS):
        train(other, peer, range(step, step + 1))
        watch.look()
    for choice in ((False, False), (True, False), (True, True), (None, None)):
        params = parameters()
        groups = [
            {"params": params[:2], "foreach": choice[0]},
            {"params": params[2:], "foreach": choice[1]},
        ]
        own = case.make(groups, weight_decay=0.1)
        with _Operations() as operations:
            train(own, params, range(STEPS))
        counts.append(operations.tensors)
        trajectories.append(values(params))
        watch.check(params)
        assert tuple(group["foreach"] for group in own.param_groups) == choice
    assert counts[0] == counts[3] < counts[1] < counts[2]
    assert trajectories[0] == trajectories[3]


REFUSED_GROUPS = {
    "not_a_dict": (lambda p, old: [p], TypeError),
    "bad_option": (lambda p, old: {"params": [p], "weight_decay": -1.0}, ValueError),
    "integer": (lambda p, old: {"params": [p, torch.zeros(3, dtype=torch.int64)]}, ValueError),
    "names": (lambda p, old: {"params": [("name", p)]}, ValueError),
    "known": (lambda p, old: {"params": [p, old]}, ValueError),
    "set": (lambda p, old: {"params": {p}}, TypeError),
    "non_leaf": (lambda p, old: {"params": [p, p * 2]}, ValueError),
    "fused": (lambda p, old: {"params": [p], "fused": True, "foreach": True}, ValueError),
}


@pytest.mark.parametrize("name", REFUSED_GROUPS)
@plain_cases
def test_a_refused_group_leaves_the_optimizer_as_it_was(case, name):
    """In a notebook the error is seen and the cell run again: the optimizer has to be the one from before."""
    make, error = REFUSED_GROUPS[name]
    params = parameters()
    own = case.make(params[:3])
    train(own, params[:3], range(2))
    before, new = picture(own), bits(params[3])
    with pytest.raises(error):
        own.add_param_group(make(params[3], params[0]))
    assert picture(own) == before
    assert bits(params[3]) == new
    assert params[3] not in own.state
    own.add_param_group({"params": [params[3]]})
    train(own, params, range(2, 3))
    assert bits(params[3]) != new


@pytest.mark.parametrize("how", ["as_made", "loaded", "deepcopied", "pickled"])
@relative_cases
def test_a_group_copied_from_the_optimizer_can_be_added(case, how):
    """How layers are moved between groups; the copied lr is a read-out and no request for a manual lr."""
    params = parameters()
    own = case.make(params[:3])
    train(own, params[:3], range(2))
    if how == "loaded":
        own.load_state_dict(copy.deepcopy(own.state_dict()))
    elif how == "deepcopied":
        own = copy.deepcopy(own)
    elif how == "pickled":
        own = pickle.loads(pickle.dumps(own))
    own.add_param_group({**own.param_groups[0], "params": [params[3]]})
    assert lr_of(own) == pytest.approx([rho(case, 2), rho(case, 1)], rel=1e-14)


@relative_cases
def test_a_refused_group_given_again_with_a_manual_lr_is_still_refused(case):
    """The first refusal must not fill the caller's dict so that it passes for a group of an optimizer the next time."""
    params = parameters()
    own = case.make(params[:3])
    group = {"params": [params[3]], "weight_decay": -1.0}
    with pytest.raises(ValueError, match="weight_decay"):
        own.add_param_group(group)
    group.update(lr=0.5, weight_decay=0.0)
    with pytest.raises(ValueError, match=r"lr.*0\.5"):
        own.add_param_group(group)
    assert len(own.param_groups) == 1


@relative_cases
def test_a_frozen_group_stays_frozen_when_its_options_are_copied(case):
    """lr 0 is how a group is frozen: rebuilding an optimizer from its groups must not set the layers loose."""
    params = parameters()
    own = case.make(params)
    train(own, params, range(2))
    own.param_groups[0]["lr"] = 0.0
    rebuilt = case.make([dict(group) for group in own.param_groups])
    before = values(params)
    train(rebuilt, params, range(2, 4))
    assert values(params) == before
