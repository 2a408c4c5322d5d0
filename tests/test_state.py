"""State that lives beside parameters while people swap, move, freeze, share and checkpoint them."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from helpers import parameters, random_steps, trajectory
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Parameter
from transformers.optimization import Adafactor as PeerTransformers

from adafactor import Adafactor, reference, sweeps
from adafactor.dialects import big_vision, optax, paper, timm
from adafactor.dialects.transformers import Adafactor as TransformersAdafactor
from adafactor.optimizer import _refuse_capture
from adafactor.shapes import Factoring

DIALECTS = [Adafactor, TransformersAdafactor]
both = pytest.mark.parametrize("cls", DIALECTS)


def stepped(cls, *shapes, **options):
    start, steps = random_steps(shapes, 2)
    params = parameters(start)
    optimizer = cls(params, **options)
    trajectory(optimizer, params, steps)
    return params, optimizer


@both
def test_a_parameter_that_is_swapped_for_another_is_let_go(cls):
    """Sharding libraries swap the parameters before the first step: the old model must not stay in memory."""
    p = Parameter(torch.ones(3, 2))
    optimizer = cls([p])
    gone = weakref.ref(p)
    new = Parameter(torch.ones(3, 2))
    optimizer.param_groups[0]["params"][0] = new
    del p
    trajectory(optimizer, [new], [[torch.ones(3, 2)]])
    gc.collect()
    assert gone() is None
    assert list(optimizer.state) == [new]


@both
def test_state_that_is_moved_to_a_new_parameter_goes_on_and_lets_the_old_one_go(cls):
    """Programs that prune or split points move an optimizer's state by hand, thousands of times."""
    [p], optimizer = stepped(cls, (3, 2))
    gone = []
    for _ in range(3):
        gone.append(weakref.ref(p))
        own = optimizer.state.pop(p)
        p = Parameter(p.detach().clone())
        optimizer.param_groups[0]["params"][0] = p
        optimizer.state[p] = own
        trajectory(optimizer, [p], [[torch.ones(3, 2)]])
    gc.collect()
    assert [ref() is None for ref in gone] == [True] * 3
    assert next(iter(optimizer.state_dict()["state"].values()))["step"] == 5


@both
def test_saving_leaves_the_state_alone(cls):
    """A group that is taken out for a moment, or wrapped around a save, has its statistics when it is back."""
    start, steps = random_steps([(3, 2), (2,)], 1)
    params = parameters(start)
    optimizer = cls([{"params": [p]} for p in params])
    trajectory(optimizer, params, steps)
    group = optimizer.param_groups.pop()
    assert len(optimizer.state_dict()["state"]) == 1
    optimizer.param_groups.append(group)
    assert [int(entry["step"]) for entry in optimizer.state_dict()["state"].values()] == [1, 1]


@both
def test_state_dict_is_a_pure_read(cls):
    """Checkpoints are written from threads, and by hooks of other checkpoints."""
    _, optimizer = stepped(cls, (3, 2), (4,))
    errors, expected = [], optimizer.state_dict()["state"][0].keys()

    def work():
        for _ in range(50):
            try:
                assert optimizer.state_dict()["state"][0].keys() == expected
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    inner = []
    handle = optimizer.register_state_dict_pre_hook(
        lambda own: inner.append(own.state_dict()) if not inner and not inner.append(None) else None
    )
    assert optimizer.state_dict()["state"][0].keys() == expected
    handle.remove()


@both
@pytest.mark.parametrize("flatten", [False, True])
def test_torch_distributed_checkpoint(cls, flatten):
    """Its tools restore under the names that optimizer.state has, and prime a fresh optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3))
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def train(model, optimizer, seed):
        draw = torch.Generator().manual_seed(seed)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 4, generator=draw)).square().sum().backward()
            optimizer.step()

    optimizer = cls(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    get_optimizer_state_dict(model, optimizer, options=options)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    train(model, optimizer, 0)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    other = copy.deepcopy(model)
    other.zero_grad()
    resumed = cls(other.parameters())
    set_optimizer_state_dict(other, resumed, saved, options=options)
    train(model, optimizer, 1)
    train(other, resumed, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@both
def test_loading_under_inference_mode(cls):
    """An evaluation script that resumes inside inference_mode can still train afterwards."""
    params, optimizer = stepped(cls, (3, 2))
    saved = optimizer.state_dict()
    other = parameters([torch.ones(2, 2)])
    with torch.inference_mode():
        optimizer.load_state_dict(saved)
        late = cls(other)
    trajectory(optimizer, params, [[torch.ones(3, 2)]])
    trajectory(late, other, [[torch.ones(2, 2)]])


@both
def test_keys_that_users_put_into_the_state_before_it_is_made(cls):
    """An averaging tool that keeps its copy in the optimizer's state must not break saving or training."""
    p, frozen = Parameter(torch.ones(3, 2)), Parameter(torch.ones(2), requires_grad=False)
    optimizer = cls([p, frozen])
    optimizer.state[frozen]["average"] = torch.zeros(2)
    assert list(optimizer.state_dict()["state"][1]) == ["average"]
    for q in (p, frozen):
        q.requires_grad_(True)
        q.grad = torch.ones_like(q)
    optimizer.step()
    assert "average" in optimizer.state_dict()["state"][1]


def test_momentum_that_is_switched_on_is_saved():
    """transformers looks for exp_avg wherever beta1 is a number."""
    params, optimizer = stepped(TransformersAdafactor, (3, 2))
    optimizer.param_groups[0]["beta1"] = 0.9
    peer = PeerTransformers(params, beta1=0.9)
    peer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    trajectory(peer, params, [[torch.ones(3, 2)]])


def test_groups_of_the_peer_can_be_appended_by_hand():
    """They lack the arguments that only this library has."""
    _, optimizer = stepped(TransformersAdafactor, (3, 2))
    p = Parameter(torch.ones(3))
    optimizer.param_groups.append(PeerTransformers([p], lr=0.1, relative_step=False).param_groups[0])
    p.grad = torch.ones(3)
    optimizer.step()
    assert p.detach().tolist() == pytest.approx([0.9] * 3)


@both
def test_the_state_follows_its_parameter(cls):
    """model.double() in the middle of a run."""
    [p], optimizer = stepped(cls, (3, 2))
    p.data = p.data.double()
    p.grad = torch.ones(3, 2, dtype=torch.float64)
    optimizer.step()
    dtypes = {value.dtype for value in optimizer.state[p].values() if value.dim() > 0}
    assert dtypes == {torch.float64}
    assert int(optimizer.state_dict()["state"][0]["step"]) == 3


@both
def test_lazy_modules(cls):
    """Their parameters have no shape yet when the optimizer is made."""
    model = torch.nn.LazyLinear(3)
    optimizer = cls(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert sorted(optimizer.state_dict()["state"]) == [0, 1]


META = torch.zeros((), device="meta")


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Adafactor, {}),
        (Adafactor, {"weight_decay": 0.1, "maximize": True}),
        (Adafactor, {"lr": META, "weight_decay": 0.1}),
        (TransformersAdafactor, {}),
        (TransformersAdafactor, {"lr": META, "relative_step": False, "beta1": 0.9}),
        (paper.Adafactor, {"beta1": 0.9, "weight_decay": 0.1}),
        (optax.Adafactor, {"batch_dims": 1, "min_dim_size_to_factor": 2, "momentum": 0.9, "weight_decay_rate": 0.1}),
        (optax.Adafactor, {"learning_rate": META, "dtype_momentum": torch.bfloat16, "momentum": 0.9}),
        (big_vision.Adafactor, {"weight_decay": 0.1}),
        (timm.Adafactor, {"betas": (0.9, 0.99)}),
    ],
)
def test_a_step_reads_nothing_back_from_the_device(cls, foreach, options):
    """On an accelerator each read waits for all work before it. Tensors without values raise where one is read."""
    params = [Parameter(torch.empty(shape, device="meta")) for shape in [(3, 2), (4,), (), (2, 3, 4)]]
    optimizer = cls(params, foreach=foreach, **options)
    for _ in range(2):
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer.step()
    assert {int(optimizer.state[p]["step"]) for p in params} == {2}


@both
def test_large_tensors_go_through_the_sweeps_one_by_one(cls, monkeypatch):
    """One wave of everything would need temporaries of the whole model's size."""
    sizes = []
    monkeypatch.setattr(reference, "WAVE", 800)

    def second(batch, backend, second=sweeps.second):
        sizes.append(len(batch.items))
        return second(batch, backend)

    monkeypatch.setattr(sweeps, "second", second)
    stepped(cls, (5, 5), (5, 5), (40, 5), (5, 5), (60,), fused=False)
    assert sizes[:3] == [2, 1, 2]


@both
@pytest.mark.parametrize("skip", [False, True, "parameter"])
def test_one_wave_at_a_time_has_temporaries(cls, skip, monkeypatch):
    """Those of all waves together would be as large as the model."""
    batches = []

    def second(batch, backend, second=sweeps.second):
        for other in batches:
            assert other is batch or not isinstance(other.kept, reference.Kept)
        batches.append(batch)
        return second(batch, backend)

    monkeypatch.setattr(reference, "WAVE", 80)
    monkeypatch.setattr(sweeps, "second", second)
    stepped(cls, (5, 5), (5, 5), (40, 5), (5, 5), fused=False, skip_nonfinite=skip)
    assert len(batches) >= 4


def test_a_captured_graph_is_refused(monkeypatch):
    """It would replay the step count of its capture for ever."""
    device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="outside of CUDA graph capture"):
        _refuse_capture([device])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    _refuse_capture([device])


def test_a_new_group_owes_nothing_to_a_dead_one():
    """Python gives a new dict the id of one that is gone: what was remembered of that one must not refuse this one."""
    [p], optimizer = stepped(Adafactor, (3, 4, 5))
    own = optimizer.state[p]
    optimizer.param_groups.clear()
    group = {"params": [p]}
    optimizer._factored[id(group)] = Factoring("matrix")
    optimizer.add_param_group(group)
    trajectory(optimizer, [p], [[torch.ones(3, 4, 5)]])
    assert optimizer.state[p] is own
    assert int(own["step"]) == 3


def test_the_saved_rms_of_a_large_parameter_is_right_where_no_step_measures_it():
    """In one go a float32 norm is off by 1e-4 at 4 million elements."""
    p = Parameter(torch.randn(2048, 2048, generator=torch.Generator().manual_seed(0)))
    optimizer = TransformersAdafactor([p], lr=1e-3, relative_step=False, scale_parameter=False)
    p.grad = torch.ones_like(p)
    optimizer.step()
    truth = float(p.detach().double().square().mean().sqrt())
    assert optimizer.state_dict()["state"][0]["RMS"] == pytest.approx(truth, rel=1e-6)


def test_the_capture_is_looked_for_before_anything_is_touched(monkeypatch):
    p = Parameter(torch.ones(2))
    optimizer = Adafactor([p])
    p.grad = torch.ones(2)

    def refuse(devices):
        raise RuntimeError("capturing")

    monkeypatch.setattr("adafactor.optimizer._refuse_capture", refuse)
    with pytest.raises(RuntimeError, match="capturing"):
        optimizer.step()
    assert p.detach().tolist() == [1, 1]
    assert optimizer.state_dict()["state"][0]["step"] == 0


@both
@pytest.mark.parametrize("moved", [lambda step: step.double(), lambda step: step.reshape(1), float, int])
def test_a_step_count_that_a_tool_has_changed(cls, moved):
    """Helpers cast or move every tensor of a state at once, and other versions keep an int."""
    [p], optimizer = stepped(cls, (3, 2))
    optimizer.state[p]["step"] = moved(optimizer.state[p]["step"])
    trajectory(optimizer, [p], [[torch.ones(3, 2)]])
    assert int(optimizer.state_dict()["state"][0]["step"]) == 3


@both
@pytest.mark.parametrize("shape", [(5, 3), (1, 3)])
def test_a_gradient_of_another_shape_is_refused_before_anything_moves(cls, shape):
    """A parameter resized under its gradient would be broadcast against it, or fail half way."""
    p, q = Parameter(torch.ones(3, 4)), Parameter(torch.ones(*shape))
    optimizer = cls([p, q])
    for each in (p, q):
        each.grad = torch.ones_like(each)
    q.data = torch.ones(4, 3)
    with pytest.raises(ValueError, match=r"gradient of parameter 1 .* shape \(4, 3\)"):
        optimizer.step()
    assert torch.equal(p.detach(), torch.ones(3, 4))
    assert [int(entry["step"]) for entry in optimizer.state_dict()["state"].values()] == [0, 0]


@pytest.mark.parametrize("factor", ["largest", "matrix"])
def test_factors_over_other_dims_are_refused_on_load(factor):
    """Taken for each other's, they would be silently wrong wherever sizes happen to agree."""
    start, steps = random_steps([(4, 4, 4)], 1)
    params = parameters(start)
    source = Adafactor(params, factor="last")
    trajectory(source, params, steps)
    target = Adafactor(parameters([torch.ones(4, 4, 4) if factor == "matrix" else torch.ones(9, 4, 4)]), factor=factor)
    with pytest.raises(ValueError, match="should be factored over rows"):
        target.load_state_dict(source.state_dict())
