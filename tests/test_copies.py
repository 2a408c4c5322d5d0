"""Copies, pickles, files and state dicts: a run that is stopped and resumed is the run."""

import copy
import inspect
import math
import pickle
import re

import pytest
import torch
from contract_table import (
    NAMES,
    all_cases,
    all_dialects,
    bits,
    copies,
    parameters,
    picture,
    plain_cases,
    through_a_file,
    train,
)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@all_cases
def test_a_copied_optimizer_goes_on_as_the_original(case, how):
    """Meta-learning copies optimizers, multiprocessing pickles them."""
    params = parameters()
    own = case.make(params)
    train(own, params, range(3))
    if how == "deepcopy":
        other, others = copy.deepcopy((own, params))
    else:
        other, others = pickle.loads(pickle.dumps((own, params)))
    assert picture(other) == picture(own)
    assert bits(other.state_dict()) == bits(own.state_dict())
    before = picture(own)
    train(other, others, range(3, 6))
    assert picture(own) == before
    train(own, params, range(3, 6))
    assert picture(other) == picture(own)
    assert bits(other.state_dict()) == bits(own.state_dict())


@pytest.mark.parametrize("how", ["positional", "keyword", "file"])
@all_cases
def test_a_resumed_run_is_the_uninterrupted_one(case, how, tmp_path):
    """To the last bit: else resuming is a change of the experiment. Files load without trusting their code."""
    params = parameters()
    own = case.make(params)
    train(own, params, range(3))
    saved, others = own.state_dict(), copies(params)
    if how == "file":
        saved = through_a_file(saved, tmp_path / "optimizer.pt")
        assert bits(saved) == bits(own.state_dict())
    other = case.make(others)
    if how == "keyword":
        assert other.load_state_dict(state_dict=saved) is None
    else:
        other.load_state_dict(saved)
    assert picture(other) == picture(own)
    assert bits(other.state_dict()) == bits(own.state_dict())
    train(own, params, range(3, 6))
    train(other, others, range(3, 6))
    assert picture(other) == picture(own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@plain_cases
def test_a_resumed_run_is_the_uninterrupted_one_in_every_precision(case, dtype, tmp_path):
    """Loading in the base class would round float32 statistics to the parameter's dtype."""
    params = parameters(dtype)
    own = case.make(params)
    train(own, params, range(3))
    others = copies(params)
    other = case.make(others)
    other.load_state_dict(through_a_file(own.state_dict(), tmp_path / "optimizer.pt"))
    train(own, params, range(3, 6))
    train(other, others, range(3, 6))
    assert picture(other) == picture(own)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _tensors(entry)


@all_cases
def test_loading_copies(case):
    """Two optimizers that share statistics corrupt each other; and a loaded dict may be averaged, or loaded again."""
    params, others = parameters(), parameters()
    own, other = case.make(params), case.make(others)
    train(own, params, range(3))
    saved = own.state_dict()
    other.load_state_dict(saved)
    kept = bits(saved)
    train(other, others, range(3, 6))
    assert bits(saved) == kept
    loaded = picture(other)
    other.load_state_dict(saved)
    assert picture(other) != loaded
    loaded = picture(other)
    for tensor in _tensors(saved):
        tensor.add_(1)
    saved["param_groups"][0]["weight_decay"] = 9.0
    assert picture(other) == loaded


@plain_cases
def test_what_a_user_keeps_in_the_state_survives(case, tmp_path):
    """Averages and masks live there, in dtypes of their own."""
    params, others = parameters(), parameters()
    own, other = case.make(params), case.make(others)
    train(own, params, range(1))
    own.state[params[0]]["mask"] = torch.tensor([True, False])
    own.state[params[1]]["average"] = torch.tensor([0.1], dtype=torch.float64)
    other.load_state_dict(through_a_file(own.state_dict(), tmp_path / "optimizer.pt"))
    assert bits(other.state[others[0]]["mask"]) == bits(torch.tensor([True, False]))
    assert bits(other.state[others[1]]["average"]) == bits(torch.tensor([0.1], dtype=torch.float64))


@plain_cases
def test_saved_names_replace_those_of_the_optimizer_and_missing_ones_do_not(case):
    """As documented for load_state_dict."""
    params = parameters()
    own = case.make(zip(NAMES, params, strict=True))
    train(own, params, range(1))
    saved = own.state_dict()
    saved["param_groups"][0]["param_names"] = list("wxyz")
    own.load_state_dict(saved)
    assert own.param_groups[0]["param_names"] == list("wxyz")
    del saved["param_groups"][0]["param_names"]
    own.load_state_dict(saved)
    assert own.param_groups[0]["param_names"] == list("wxyz")


@pytest.mark.parametrize(
    "break_it",
    [
        lambda saved: saved["param_groups"].append({**saved["param_groups"][0], "params": []}),
        lambda saved: saved["param_groups"][0]["params"].pop(),
        lambda saved: saved["state"][0].pop("step"),
        lambda saved: saved["state"][3].update(step=math.nan),
        lambda saved: saved["state"][3].update(step=-1),
        lambda saved: saved["state"].update({0: saved["state"][1]}),
        lambda saved: saved["state"].update({3: saved["state"][0]}),
        lambda saved: saved["state"][1].update({key: torch.zeros(9) for key in saved["state"][1] if key != "step"}),
    ],
    ids=[
        "more_groups",
        "fewer_parameters",
        "no_step",
        "nan_step",
        "negative_step",
        "not_factored",
        "factored",
        "shape",
    ],
)
@plain_cases
def test_a_state_that_does_not_fit_is_refused_and_nothing_loaded(case, break_it):
    """The wrong file must fail when it is loaded, not diverge thousands of steps later."""
    params, others = parameters(), parameters()
    own, other = case.make(params), case.make(others)
    train(own, params, range(3))
    train(other, others, range(5, 6))
    saved = copy.deepcopy(own.state_dict())
    break_it(saved)
    before = picture(other)
    with pytest.raises(ValueError, match="should"):
        other.load_state_dict(saved)
    assert picture(other) == before
    train(other, others, range(6, 7))


@all_dialects
def test_how_a_step_is_computed_is_never_taken_from_a_file(dialect):
    """A checkpoint from a machine with a kernel has to run on one without; and foreach is this run's choice."""
    params = parameters()
    own = dialect.own(params, foreach=True)
    saved = own.state_dict()
    saved["param_groups"][0].update(foreach="x", fused=True)
    own.load_state_dict(saved)
    assert own.param_groups[0]["foreach"] is True
    assert own.param_groups[0]["fused"] is None


@all_cases
def test_repr_names_the_class_and_every_option_of_every_group(case):
    """What people print to see whether their options have arrived."""
    params = parameters()
    own = case.make([{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.125}])
    shown = repr(own)
    assert re.match(r"Adafactor\b", shown)
    assert shown.count("Parameter Group") == 2
    for name in inspect.signature(case.dialect.own).parameters.keys() - {"params"}:
        found = re.findall(rf"^ +{name}: (.*)$", shown, re.MULTILINE)
        assert found == [f"{group[name]}" for group in own.param_groups]
