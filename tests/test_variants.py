"""What the dialects beyond torch's and transformers' have of their own."""

import pytest
import torch
from helpers import parameters, random_steps, trajectory
from torch.nn import Parameter

from adafactor.dialects import big_vision, optax, paper, timm, transformers
from adafactor.dialects import torch as torch_dialect

SHAPES = [(20, 30), (5,), (), (18, 17, 3, 3)]
ALL = [torch_dialect, transformers, paper, optax, big_vision, timm]


def end(cls, start, steps, **options):
    params = parameters(start)
    return trajectory(cls(params, **options), params, steps)[-1]


def close(first, second):
    """A few float32 roundings: the same numbers in another order."""
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("foreach", [False, True])
def test_the_paper_is_transformers_defaults(foreach):
    """They implement the same algorithm where their arguments agree."""
    start, steps = random_steps(SHAPES, 6)
    for options in ({}, {"warmup_init": True}, {"beta1": 0.9, "weight_decay": 0.1}):
        mine = end(paper.Adafactor, start, steps, foreach=foreach, **options)
        close(mine, end(transformers.Adafactor, start, steps, foreach=foreach, **options))


def test_optax_without_small_dims_is_transformers_with_an_lr():
    start, steps = random_steps([(20, 30), (5,)], 6)
    mine = end(optax.Adafactor, start, steps, learning_rate=0.01, min_dim_size_to_factor=0)
    close(mine, end(transformers.Adafactor, start, steps, lr=0.01, relative_step=False))


def test_optax_learns_at_lr_1_by_default():
    start, steps = random_steps([(3,)], 1)
    close(end(optax.Adafactor, start, steps), end(optax.Adafactor, start, steps, learning_rate=1.0))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("momentum", [None, 0.9])
@pytest.mark.parametrize("batch_dims", [1, 2])
def test_each_slice_of_a_stack_steps_as_if_alone(batch_dims, momentum, foreach):
    """Layers that are stacked for a scan train as they would apart: scale and clipping are each layer's own."""
    start, steps = random_steps([(2, 3, 20, 30), (2, 3, 7), (2, 3)], 4)
    options = {"learning_rate": 0.1, "min_dim_size_to_factor": 8, "momentum": momentum, "foreach": foreach}
    stacked = end(optax.Adafactor, start, steps, batch_dims=batch_dims, weight_decay_rate=0.01, **options)

    def flat(tensors):
        return [part for tensor in tensors for part in tensor.flatten(0, batch_dims - 1).unbind(0)]

    apart = end(optax.Adafactor, flat(start), [flat(g) for g in steps], weight_decay_rate=0.01, **options)
    close(flat(stacked), apart)
    together = end(optax.Adafactor, start, steps, weight_decay_rate=0.01, **options)
    assert not torch.allclose(stacked[0], together[0], rtol=1e-3)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("cls", [optax.Adafactor, big_vision.Adafactor])
def test_momentum_is_kept_in_its_dtype(cls, foreach):
    """bfloat16 halves what momentum costs; the steps are those of a float32 buffer to its rounding."""
    name = {optax.Adafactor: "dtype_momentum", big_vision.Adafactor: "momentum_dtype"}[cls]
    start, steps = random_steps(SHAPES, 6)
    ends = {}
    for dtype in (torch.float32, torch.bfloat16):
        params = parameters(start)
        optimizer = cls(params, **{name: dtype}, momentum=0.9, foreach=foreach)
        optimizer.param_groups[0]["lr"] = 0.01
        ends[dtype] = trajectory(optimizer, params, steps)[-1]
        assert optimizer.state[params[0]][cls.layout.momentum].dtype == dtype
        # and in what is loaded.
        other = cls(parameters(start), **{name: dtype}, momentum=0.9)
        other.load_state_dict(optimizer.state_dict())
        resumed = [entry[cls.layout.momentum].dtype for entry in other.state_dict()["state"].values()]
        assert set(resumed) == {dtype}
    for a, b, before in zip(ends[torch.float32], ends[torch.bfloat16], start, strict=True):
        # Each of six averages is off by at most half a unit of 8 bits, relative to the movement.
        torch.testing.assert_close(a, b, rtol=0, atol=6 * 2**-8 * float((a - before).abs().max()))
        assert not torch.equal(a, b)


def test_big_visions_momentum_is_of_the_update_and_not_of_the_step():
    """Its lr acts at once: after lr falls, the old, larger steps are not still on their way."""
    p = Parameter(torch.zeros(1))
    optimizer = big_vision.Adafactor([p], lr=1.0, momentum=0.5, momentum_dtype="float32")
    trajectory(optimizer, [p], [[torch.ones(1)]])
    assert p.item() == pytest.approx(-0.5)
    optimizer.param_groups[0]["lr"] = 1e-3
    trajectory(optimizer, [p], [[torch.ones(1)]])
    assert p.item() == pytest.approx(-0.5 - 0.75e-3)


@pytest.mark.parametrize(("unscaled", "kept"), [(False, 1 - 0.01 * 0.1), (True, 0.9)])
def test_big_visions_weight_decay(unscaled, kept):
    p = Parameter(torch.full((1,), 2.0))
    optimizer = big_vision.Adafactor([p], lr=0.01, weight_decay=0.1, unscaled_wd=unscaled, momentum=None)
    trajectory(optimizer, [p], [[torch.zeros(1)]])
    assert p.item() == pytest.approx(2 * kept)


def test_beta2_is_capped_and_its_schedule_offset():
    """A decay that nears 1 stops adapting; a fine-tuning run starts its schedule anew."""
    b = []
    for options in ({"beta2_cap": 0.5}, {"decay_offset": 3}, {"beta2_cap": 1.0}):
        p = Parameter(torch.ones(1))
        optimizer = big_vision.Adafactor([p], lr=0.0, **options)
        values = []
        for t in range(1, 6):
            before = optimizer.state[p]["exp_avg_sq"].item()
            trajectory(optimizer, [p], [[torch.full((1,), float(t))]])
            values.append((optimizer.state[p]["exp_avg_sq"].item() - before) / (t * t - before))
        b.append(values)
    free = [t**-0.8 for t in range(1, 6)]
    assert b[0] == pytest.approx([max(value, 0.5) for value in free], rel=1e-5)
    assert b[1] == pytest.approx([1, 1, 1, 1, 2**-0.8], rel=1e-5)
    assert b[2] == pytest.approx(free, rel=1e-5)


def test_timm_takes_relative_steps_without_an_lr_and_plain_ones_with():
    start, steps = random_steps([(20, 30), (5,)], 6)
    close(end(timm.Adafactor, start, steps), end(transformers.Adafactor, start, steps))
    plain = end(transformers.Adafactor, start, steps, lr=0.01, relative_step=False, scale_parameter=False)
    close(end(timm.Adafactor, start, steps, lr=0.01), plain)
    # Also group by group.
    params = parameters(start)
    optimizer = timm.Adafactor([{"params": params[:1]}, {"params": params[1:], "lr": 0.01}])
    mixed = trajectory(optimizer, params, steps)[-1]
    close(mixed, [end(transformers.Adafactor, start, steps)[0], plain[1]])
    with pytest.raises(ValueError, match="warmup_init should be False with an lr, got True"):
        timm.Adafactor(params, lr=0.1, warmup_init=True)


def test_groups_take_the_constructors_arguments():
    """Under the names that the constructor has, also where a group keeps them under others."""
    p, q = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    group = optax.Adafactor([{"params": [p], "learning_rate": 0.5}]).param_groups[0]
    assert (group["lr"], "learning_rate" in group) == (0.5, False)
    groups = timm.Adafactor([{"params": [p], "betas": (0.9, 0.99)}, {"params": [q], "lr": None}], lr=0.1).param_groups
    assert (groups[0]["beta1"], groups[0]["relative_step"], groups[0]["lr"]) == (0.9, False, 0.1)
    assert (groups[1]["beta1"], groups[1]["relative_step"], groups[1]["lr"]) == (None, True, 0.01)
    with pytest.raises(ValueError, match=r"a group should have no lr, since the step size is relative, got 0\.5"):
        paper.Adafactor([{"params": [p], "lr": 0.5}])
    copied = paper.Adafactor([p]).param_groups[0]
    assert paper.Adafactor([{**copied, "params": [q]}]).param_groups[0]["lr"] == 0.01
    with pytest.raises(ValueError, match="lr should be None with relative_step=True"):
        timm.Adafactor([{"params": [p], "lr": 0.5, "relative_step": True}])
    refused = {"params": [q], "lr": 0.5, "eps": -1.0}
    with pytest.raises(ValueError, match="eps should be"):
        timm.Adafactor([p]).add_param_group(refused)
    assert refused.keys() == {"params", "lr", "eps"}


@pytest.mark.parametrize(
    ("cls", "name"),
    [(timm.Adafactor, "caution"), *((big_vision.Adafactor, n) for n in ("caution", "corrected_weight_decay"))],
)
def test_a_file_of_another_algorithm_is_refused(cls, name):
    """timm's extensions travel in its files: without them the run would go on as another."""
    p = Parameter(torch.ones(2))
    saved = cls([p]).state_dict()
    saved["param_groups"][0][name] = True
    with pytest.raises(ValueError, match=f"{name} should be False, since it is an algorithm of its own, got True"):
        cls([p]).load_state_dict(saved)


@pytest.mark.parametrize("module", [transformers, timm, torch_dialect])
def test_factors_cannot_be_changed_under_a_run(module):
    """In a cube the statistics of any two dims look alike."""
    start, steps = random_steps([(20, 20, 20)], 1)
    params = parameters(start)
    optimizer = module.Adafactor(params, factor="last")
    trajectory(optimizer, params, steps)
    before = params[0].detach().clone()
    optimizer.param_groups[0]["factor"] = "matrix"
    with pytest.raises(ValueError, match="should keep the shape and the factors"):
        trajectory(optimizer, params, steps)
    assert torch.equal(params[0].detach(), before)
    optimizer.param_groups[0]["factor"] = "largest"  # the same two, of equals
    trajectory(optimizer, params, steps)


@pytest.mark.parametrize("module", ALL)
@pytest.mark.parametrize("factor", ["last", "largest", "matrix"])
def test_factor_is_an_argument_of_every_dialect_and_of_every_group(module, factor):
    start, steps = random_steps([(20, 18, 3, 3)], 3)
    params = parameters([*start, *start])
    options = {"min_dim_size_to_factor": 2}
    groups = [{"params": params[:1]}, {"params": params[1:], "factor": factor}]
    optimizer = module.Adafactor(groups, factor="matrix", **options)
    path = trajectory(optimizer, params, [[g, g] for [g] in steps])[-1]
    alone = end(module.Adafactor, start, steps, factor=factor, **options)
    assert torch.equal(path[1], alone[0])
    matrix = end(module.Adafactor, start, steps, factor="matrix", **options)
    assert torch.equal(path[0], matrix[0])
    assert (factor == "matrix") == torch.equal(path[0], path[1])


@pytest.mark.parametrize("source", ALL)
@pytest.mark.parametrize("target", ALL)
def test_state_moves_between_all_dialects_where_they_factor_alike(source, target):
    """A run may change its dialect in the middle, and keeps its statistics."""
    start, steps = random_steps([(20, 30), (5,)], 3)
    options = {"factor": "last", "min_dim_size_to_factor": 0}
    params = parameters(start)
    first = source.Adafactor(params, **options)
    trajectory(first, params, steps)
    second = target.Adafactor(parameters(start), **options)
    if source is target:
        second.load_state_dict(first.state_dict())
    else:
        with pytest.warns(UserWarning, match="keep their own hyper-parameters"):
            second.load_state_dict(first.state_dict())
    for p, q in zip(params, second.param_groups[0]["params"], strict=True):
        for mine, theirs in zip(first.layout.names[:3], second.layout.names[:3], strict=True):
            assert (mine in first.state[p]) == (theirs in second.state[q])
            if mine in first.state[p]:
                assert torch.equal(first.state[p][mine].flatten(), second.state[q][theirs].flatten())
        assert int(second.state[q]["step"]) == 3


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (optax.Adafactor, {"learning_rate": -1.0}, "learning_rate should be .*got -1.0"),
        (optax.Adafactor, {"decay_rate": -0.8}, "decay_rate should be a finite number >= 0, got -0.8"),
        (optax.Adafactor, {"decay_offset": -1}, "decay_offset should be a whole number >= 0, got -1"),
        (optax.Adafactor, {"decay_offset": 0.5}, "decay_offset should be a whole number >= 0, got 0.5"),
        (optax.Adafactor, {"momentum": 1.0}, "momentum should be in .*got 1.0"),
        (
            optax.Adafactor,
            {"dtype_momentum": torch.int32},
            "dtype_momentum should be one of .*got torch.int32",
        ),
        (optax.Adafactor, {"weight_decay_rate": -0.1}, "weight_decay_rate should be .*got -0.1"),
        (optax.Adafactor, {"factored": "no"}, "factored should be True or False, got 'no'"),
        (optax.Adafactor, {"batch_dims": -1}, "batch_dims should be a whole number >= 0, got -1"),
        (optax.Adafactor, {"min_dim_size_to_factor": None}, "min_dim_size_to_factor should be .*got None"),
        (big_vision.Adafactor, {"beta2_cap": 1.5}, r"beta2_cap should be in \[0, 1\], got 1.5"),
        (big_vision.Adafactor, {"momentum_dtype": "float8"}, "momentum_dtype should be one of .*got 'float8'"),
        (big_vision.Adafactor, {"eps": -1.0}, "eps should be .*got -1.0"),
        (big_vision.Adafactor, {"clipping_threshold": 0}, "clipping_threshold should be > 0 or None, got 0"),
        (timm.Adafactor, {"betas": 0.9}, "betas should be a pair of numbers or None, got 0.9"),
        (timm.Adafactor, {"betas": (1.5, 0.9)}, "beta1 should be in .*got 1.5"),
        (timm.Adafactor, {"eps_scale": -1.0}, "eps_scale should be .*got -1.0"),
        (paper.Adafactor, {"eps": 1e-30}, r"eps should be a pair \(epsilon1, epsilon2\), got 1e-30"),
        (paper.Adafactor, {"factor": "timm"}, "factor should be one of last, largest, matrix, got 'timm'"),
    ],
)
def test_bad_arguments(cls, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        cls([Parameter(torch.ones(2))], **options)
    assert "\n" not in str(caught.value)
