"""Bad input: refused wherever it comes from, with the rule and the value, and with nothing touched."""

import contextlib
import copy
import inspect
import re

import pytest
import torch
from contract_table import (
    ADD,
    CONSTRUCTOR,
    GROUP,
    LOAD,
    NAMES,
    REFUSED,
    STEP,
    TORCH,
    TRANSFORMERS,
    all_cases,
    all_dialects,
    parameters,
    picture,
    plain_cases,
    set_gradients,
    train,
    values,
)


@pytest.mark.parametrize(
    ("refused", "place"),
    [pytest.param(refused, place, id=f"{place}-{refused}") for refused in REFUSED for place in refused.places],
)
def test_a_bad_argument_is_refused_wherever_it_comes_from(refused, place):
    """With its name and value, before anything is touched: not as NaN in step 10,000."""
    cls, base, options = refused.dialect.own, refused.base, {refused.argument: refused.value}
    params = parameters()
    own = cls([{"params": params[:2]}, {"params": params[2:3]}], **copy.deepcopy(base))
    train(own, params[:3], range(2))
    set_gradients(params, 2)
    saved = copy.deepcopy(own.state_dict())
    saved["param_groups"][-1].update(options)
    if place == STEP:
        own.param_groups[-1].update(options)
    bring_in = {
        CONSTRUCTOR: lambda: cls(params, **{**base, **options}),
        GROUP: lambda: cls([{"params": params[:3]}, {"params": params[3:], **options}], **base),
        ADD: lambda: own.add_param_group({"params": params[3:], **options}),
        LOAD: lambda: own.load_state_dict(saved),
        STEP: own.step,
    }
    before = picture(own), values(params)
    with pytest.raises(refused.error, match=refused.match):
        bring_in[place]()
    assert (picture(own), values(params)) == before


@pytest.mark.parametrize(
    ("dialect", "options"),
    [
        (TORCH, {"lr": -1.0}),
        (TORCH, {"beta2_decay": 0.8}),
        (TORCH, {"weight_decay": -0.1}),
        (TRANSFORMERS, {"weight_decay": -0.1}),
        (TRANSFORMERS, {"decay_rate": 0.8}),
        (TRANSFORMERS, {"beta1": 1.0}),
    ],
    ids=lambda value: getattr(value, "name", value) if not isinstance(value, dict) else next(iter(value)),
)
def test_a_bad_default_is_refused_though_every_group_overrides_it(dialect, options):
    """torch refuses it too; else it waits for the first group that is added later without that option."""
    (argument, value) = next(iter(options.items()))
    healthy = {**dialect.external, "beta2_decay": -0.8, "decay_rate": -0.8, "weight_decay": 0.0, "beta1": None}
    known = inspect.signature(dialect.own).parameters
    group = {"params": parameters(), **{key: healthy[key] for key in healthy if key in known}}
    with pytest.raises(ValueError, match=rf"{argument}.*{re.escape(str(value))}"):
        dialect.own([group], **{**dialect.external, **options})


BAD_PARAMETERS = {
    "integer": (lambda: torch.zeros(3, dtype=torch.int64), "floating-point.*int64"),
    "bool": (lambda: torch.zeros(3, dtype=torch.bool), "floating-point.*bool"),
    "complex": (lambda: torch.zeros(3, dtype=torch.complex64, requires_grad=True), "real.*complex64.*view_as_real"),
    "sparse": (lambda: torch.eye(3).to_sparse().requires_grad_(), "dense.*sparse"),
}


@pytest.mark.parametrize("kind", BAD_PARAMETERS)
@all_dialects
def test_a_parameter_that_adafactor_is_not_defined_for_is_refused_with_its_place(dialect, kind):
    """When the optimizer is made, not when the first gradient arrives; by name, in a model of a thousand."""
    make, match = BAD_PARAMETERS[kind]
    params = parameters()
    before = values(params)
    with pytest.raises(ValueError, match=f"parameter 4 of group 0.*{match}"):
        dialect.own([*params, make()])
    with pytest.raises(ValueError, match=rf"\(odd\).*{match}"):
        dialect.own([*zip(NAMES, params, strict=True), ("odd", make())])
    assert values(params) == before
    own = dialect.own(params)
    train(own, params, range(2))
    seen = picture(own)
    with pytest.raises(ValueError, match=f"parameter 1 of group 1.*{match}"):
        own.add_param_group({"params": [torch.zeros(2), make()]})
    assert picture(own) == seen


def _sparse_last(params):
    params[-1].grad = torch.sparse_coo_tensor([[0, 2], [1, 1]], torch.ones(2), params[-1].shape, check_invariants=True)


def _reshaped_last(params):
    params[-1].data = params[-1].data.reshape(2, 6)
    params[-1].grad = torch.ones(2, 6)


def _flattened_last(params):
    params[-1].data = params[-1].data.reshape(-1)
    params[-1].grad = torch.ones(12)


BAD_STEPS = {
    "sparse_gradient": (_sparse_last, RuntimeError, r"(?s)\(last\).*sparse.*to_dense"),
    "changed_shape": (_reshaped_last, ValueError, r"\(last\).*shape.*\(2, 6\)"),
    "flattened": (_flattened_last, ValueError, r"\(last\).*shape.*\(12,\)"),
}


def _with_matrix_last():
    matrix, *others = parameters()
    return [*others, matrix]


@pytest.mark.parametrize("kind", BAD_STEPS)
@all_cases
def test_a_step_with_only_the_last_parameter_bad_touches_none(case, kind):
    """Half a step is a corrupt model that looks like a whole one."""
    spoil, error, match = BAD_STEPS[kind]
    params = _with_matrix_last()
    own = case.make(zip(("a", "b", "c", "last"), params, strict=True))
    train(own, params, range(2))
    set_gradients(params, 2)
    spoil(params)
    before = picture(own)
    with pytest.raises(error, match=match):
        own.step()
    assert picture(own) == before


@plain_cases
def test_training_goes_on_once_the_bad_gradient_is_mended_as_the_message_says(case):
    """The message promises that to_dense() helps."""
    ours, plain = _with_matrix_last(), _with_matrix_last()
    own, other = case.make(ours), case.make(plain)
    for params in (ours, plain):
        set_gradients(params, 0)
        _sparse_last(params)
    with pytest.raises(RuntimeError, match="to_dense"):
        own.step()
    for params in (ours, plain):
        params[-1].grad = params[-1].grad.to_dense()
    own.step()
    other.step()
    assert picture(own) == picture(other)


@plain_cases
def test_saving_does_not_forget_a_parameter_that_has_another_shape_for_a_while(case):
    """Sharding libraries flatten or empty parameters between steps; asking for a checkpoint must not reset them."""
    params = parameters()
    own = case.make(params)
    train(own, params, range(3))
    before, whole = picture(own), params[0].data
    params[0].data = whole.reshape(-1)
    with contextlib.suppress(ValueError):  # saying that the shape does not fit is fine too
        own.state_dict()
    params[0].data = whole
    assert picture(own) == before
