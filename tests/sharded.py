"""What the processes of ``test_sharding.py`` do: a sharded optimizer beside one on whole tensors, step by step."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from helpers import random_steps
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import Parameter

R = Replicate()
S = tuple(Shard(dim) for dim in range(4))


class Case(NamedTuple):
    """A shape, a mesh and the placements on it."""

    shape: tuple[int, ...]
    mesh: tuple[int, ...]
    placements: tuple[Any, ...]


def on_a_line(size: int) -> list[Case]:
    """Every way in which a dim can be shared out over a line of processes, uneven and too short ones among them."""
    shards = {
        0: [(8, 6), (7, 4), (5, 2), (1001, 2), (3, 5), (1, 5), (17,), (1,), (5, 4, 6), (8, 4, 3, 3), (300, 70)],
        1: [(6, 8), (6, 9), (6, 3), (5, 1), (5, 4, 6), (8, 4, 3, 3), (300, 70)],
        2: [(5, 4, 6), (3, 2, 5), (8, 4, 3, 3)],
    }
    return [Case(shape, (size,), (S[dim],)) for dim, shapes in shards.items() for shape in shapes]


ON_A_SQUARE = [
    Case(shape, (2, 2), placements)
    for placements in ((S[0], S[1]), (S[1], S[0]), (S[0], S[0]), (S[1], S[1]), (R, S[0]), (R, S[1]), (S[0], R), (R, R))
    for shape in ((9, 7), (7, 5), (1, 3), (130, 90))
] + [
    Case((4, 5, 6), (2, 2), placements)
    for placements in ((S[0], S[1]), (S[0], S[2]), (S[1], S[2]), (S[2], S[1]), (S[0], S[0]), (R, S[1]))
]


@lru_cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def optimizer_of(dialect: str) -> Any:
    return importlib.import_module(dialect).Adafactor


@contextmanager
def collectives():
    """Count what is sent; anything but an all-reduce is refused."""
    sent: list[int] = []
    kept = {
        name: getattr(dist, name) for name in dir(dist) if name.startswith(("all_", "reduce", "broadcast", "gather"))
    }

    def all_reduce(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(x.nbytes)
        return kept["all_reduce"](x, *args, **kwargs)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a step sent something else than an all-reduce")

    for name in kept:
        setattr(dist, name, all_reduce if name == "all_reduce" else refuse)
    try:
        yield sent
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def off(mine: Tensor, theirs: Tensor, whole: Tensor, start: Tensor) -> float:
    """The largest difference of a shard, in parts of what is allowed: see helpers.assert_same_path."""
    if mine.numel() == 0:
        return 0.0
    movement, largest = float((whole.double() - start.double()).abs().max()), float(whole.abs().max())
    return float((mine.double() - theirs.double()).abs().max()) / (2e-6 * movement + 6 * 2**-24 * largest)


def alike(
    dialect: str,
    options: dict[str, Any],
    cases: Sequence[Case],
    dtype: str = "float32",
    steps: int = 4,
) -> dict[str, Any]:
    """Steps of sharded parameters beside those of whole ones: how far they are off, and what each step has sent."""
    low = getattr(torch, dtype)
    start, grads = random_steps([case.shape for case in cases], steps)
    start = [x.to(low) for x in start]
    whole = [Parameter(x.clone()) for x in start]
    shards = [
        Parameter(distribute_tensor(x.clone(), mesh_of(case.mesh), case.placements))
        for x, case in zip(start, cases, strict=True)
    ]
    one, many = optimizer_of(dialect)(whole, **options), optimizer_of(dialect)(shards, **options)
    sent = []
    for step in grads:
        for p, q, g, case in zip(whole, shards, step, cases, strict=True):
            p.grad = g.to(low)
            q.grad = distribute_tensor(g.to(low), mesh_of(case.mesh), case.placements)
        one.step()
        with collectives() as bytes_:
            many.step()
        sent.append(bytes_)
    offs = []
    for p, q, x, case in zip(whole, shards, start, cases, strict=True):
        want = distribute_tensor(p.detach(), mesh_of(case.mesh), case.placements).to_local()
        offs.append(off(q.detach().to_local(), want, p.detach(), x))
        assert_state_lies_right(many, q, case)
    return {"off": offs, "sent": sent, "norm": None if many.grad_norm is None else float(many.grad_norm)}


def assert_state_lies_right(optimizer: Any, p: Any, case: Case) -> None:
    """Where checkpoints look for it: each tensor of the state a DTensor of whole shape and of the parameter's mesh."""
    for name, value in optimizer.state[p].items():
        if name == "step":
            continue
        assert isinstance(value, DTensor), name
        assert value.device_mesh == p.device_mesh
        again = distribute_tensor(torch.zeros(value.shape), p.device_mesh, value.placements)
        assert again.to_local().shape == value.to_local().shape, (name, case)
        assert not any(each.is_partial() for each in value.placements)


class Layer(nn.Module):
    """What a unit of FSDP2 is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 14), nn.Linear(14, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))


class Model(nn.Module):
    """Some linear layers, of which the first is uneven, with norms and an embedding with fewer rows than processes."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.few = nn.Embedding(3, 6)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(6, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.few(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def split_by_tensor(model: Model, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def split(model: Model, how: str) -> Model:
    """Shard a model: "fsdp", "hsdp", "tensor", "fsdp and tensor", "offload" or "whole"."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    size = dist.get_world_size()
    if how == "tensor":
        split_by_tensor(model, mesh_of((size,)))
    elif how != "whole":
        options: dict[str, Any] = {"mesh": mesh_of((size,))}
        if how == "hsdp":
            options["mesh"] = mesh_of((2, 2))
        elif how == "fsdp and tensor":
            split_by_tensor(model, mesh_of((2, 2))["tp"])
            options["mesh"] = mesh_of((2, 2))["dp"]
        elif how == "offload":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
    return model


def whole_of(x: Tensor) -> Tensor:
    """A whole tensor from its shards, put together by where each one says it lies: not by torch's full_tensor()."""
    from adafactor import sharding

    if not isinstance(x, DTensor):
        return x.detach().clone()
    shards = sharding.find(x)
    if shards is None:
        return x.to_local().detach().clone()
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (shards.starts, x.to_local().detach()))
    found = torch.full(x.shape, torch.nan, dtype=x.dtype)
    for starts, part in told:
        found[tuple(slice(start, start + size) for start, size in zip(starts, part.shape, strict=True))] = part
    return found


def backward(model: nn.Module, t: int) -> None:
    """Gradients of one batch, the same in all processes, so that their mean is that of one."""
    draw = torch.Generator().manual_seed(t)
    x = torch.randint(3, (4, 7), generator=draw)
    target = torch.randint(5, (4 * 7,), generator=draw)
    nn.functional.cross_entropy(model(x).flatten(0, 1).float(), target).backward()


def as_whole(dialect: str, options: dict[str, Any], how: str, layers: int = 2, dtype: str = "float32", steps: int = 5):
    """A model trained in a split beside one that is whole, on the same batches."""
    one, many = Model(layers).to(getattr(torch, dtype)), split(Model(layers).to(getattr(torch, dtype)), how)
    start = [p.detach().clone() for p in one.parameters()]
    first, second = (optimizer_of(dialect)(model.named_parameters(), **options) for model in (one, many))
    sent = []
    for t in range(steps):
        # The gradients of a split model are sums in another order: it gets those of the whole one.
        backward(many, t)
        backward(one, t)
        for p, q in zip(one.parameters(), many.parameters(), strict=True):
            copy_whole(q.grad, p.grad)
        first.step()
        with collectives() as bytes_:
            second.step()
        sent.append(bytes_)
        for model in (one, many):
            model.zero_grad()
    offs = [
        off(whole_of(q), p.detach(), p.detach(), x)
        for p, q, x in zip(one.parameters(), many.parameters(), start, strict=True)
    ]
    return {"off": offs, "sent": sent, "parameters": [whole_of(q) for q in many.parameters()]}


def copy_whole(target: Any, source: Tensor) -> None:
    """Copy a whole tensor into one that is sharded as the model's parameters are."""
    from adafactor import sharding

    with torch.no_grad():
        shards = sharding.find(target)
        if shards is not None:
            source = source[tuple(slice(i, i + n) for i, n in zip(shards.starts, shards.shape, strict=True))]
        sharding.local(target).copy_(source)


def without_elements(options: dict[str, Any]) -> list[float]:
    """Shards of parameters that have no elements at all, beside others."""
    shapes = [(0, 4), (8, 6), (1, 0, 3), (0,), (7,)]
    params, optimizer = simple(shapes, **options)
    whole = [Parameter(x) for x in random_steps(shapes, 1)[0]]
    start = [p.detach().clone() for p in whole]
    other = optimizer_of("adafactor")(whole, **options)
    for t in range(3):
        give(params, t)
        for p, q in zip(params, whole, strict=True):
            q.grad = whole_of(p.grad) if p.numel() else torch.zeros(p.shape)
        optimizer.step()
        other.step()
    return [
        off(whole_of(p), q.detach(), q.detach(), x)
        for p, q, x in zip(params, whole, start, strict=True)
        if q.numel() > 0
    ]


def replicas(dtype: str, options: dict[str, Any]) -> list[Tensor]:
    """What is here of an HSDP model after 20 steps."""
    model = split(Model().to(getattr(torch, dtype)), "hsdp")
    optimizer = optimizer_of("adafactor.dialects.transformers")(model.named_parameters(), **options)
    for t in range(20):
        backward(model, t)
        optimizer.step()
        optimizer.zero_grad()
    return [p.to_local().detach().clone() for p in model.parameters()]


# One process alone


def simple(shapes=((6, 4), (5,)), placements=(S[0],), **options: Any) -> tuple[list[Any], Any]:
    """Sharded parameters and their optimizer."""
    mesh = mesh_of((dist.get_world_size(),))
    start, _ = random_steps(shapes, 1)
    params = [Parameter(distribute_tensor(x, mesh, placements)) for x in start]
    return params, optimizer_of("adafactor")(params, **options)


def give(params: Sequence[Any], t: int) -> None:
    _, grads = random_steps([tuple(p.shape) for p in params], 1, seed=t)
    for p, g in zip(params, grads[0], strict=True):
        p.grad = distribute_tensor(g, p.device_mesh, p.placements)


def states(optimizer: Any) -> list[Tensor]:
    """Everything that a step writes, as it is here."""
    held = [x for own in optimizer.state.values() for x in own.values()]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    return [(x.to_local() if isinstance(x, DTensor) else x).detach().clone() for x in (*params, *held)]


def spoiling(how: str) -> Callable[..., None]:
    """What makes one process refuse a step."""

    def lr(optimizer: Any, params: Any) -> None:
        optimizer.param_groups[0]["lr"] = -1.0

    def placement(optimizer: Any, params: Any) -> None:
        params[0].grad = DTensor.from_local(torch.zeros(params[0].shape), params[0].device_mesh, [R], run_check=False)

    def factor(optimizer: Any, params: Any) -> None:
        optimizer.param_groups[0]["factor"] = "none of these"

    return {"lr": lr, "placement": placement, "factor": factor}[how]


def one_refuses(how: str, first: bool) -> tuple[str, bool, int]:
    """One process refuses a step. Returns what each process is told, whether anything changed, and the steps after."""
    params, optimizer = simple()
    if not first:
        give(params, 0)
        optimizer.step()
    give(params, 1)
    before = states(optimizer)
    kept = [p.grad for p in params]
    group = dict(optimizer.param_groups[0])
    if dist.get_rank() == 1:
        spoiling(how)(optimizer, params)
    told = "nothing"
    try:
        optimizer.step()
    except (ValueError, RuntimeError) as error:
        told = f"{type(error).__name__}: {error}"
    changed = not all(torch.equal(a, b) for a, b in zip(before, states(optimizer), strict=True))
    # And it goes on.
    optimizer.param_groups[0].update(group)
    for p, g in zip(params, kept, strict=True):
        p.grad = g
    optimizer.step()
    return told, changed, int(optimizer.state[params[0]]["step"])


def some_are_missing(ranks: Sequence[int], **options: Any) -> tuple[list[bool], list[int]]:
    """The first parameter has no gradient on some processes: beside one that has zeros there, or does not move."""
    params, optimizer = simple(**options)
    others, other = simple(**options)
    everywhere = len(ranks) == dist.get_world_size()
    if everywhere:
        other = optimizer_of("adafactor")(others[1:], **options)
    for t in range(3):
        give(params, t)
        give(others, t)
        if dist.get_rank() in ranks:
            params[0].grad = None
            others[0].grad.to_local().zero_()
        optimizer.step()
        other.step()
    same = [torch.equal(p.to_local(), q.to_local()) for p, q in zip(params, others, strict=True)]
    return same, [int(optimizer.state[p]["step"]) for p in params]


def one_is_not_finite(skip: bool | str) -> tuple[list[bool], int, list[str]]:
    """A nan in one process's shard of the first parameter. Returns which parameters stayed, and what is told."""
    params, optimizer = simple(skip_nonfinite=skip)
    give(params, 0)
    optimizer.step()
    give(params, 1)
    if dist.get_rank() == 1:
        params[0].grad.to_local().view(-1)[0] = torch.nan
    before = [p.to_local().detach().clone() for p in params]
    optimizer.step()
    stayed = [torch.equal(p.to_local(), x) for p, x in zip(params, before, strict=True)]
    return stayed, int(optimizer.skipped_steps), optimizer.nonfinite_parameters()


def different_options(options: Sequence[dict[str, Any]]) -> str:
    """Each process has options of its own."""
    params, optimizer = simple(((6, 4, 5),), **options[dist.get_rank()])
    give(params, 0)
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def message(function: Callable[[], Any]) -> str:
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return f"{error}"
    return "nothing"


def refusals() -> dict[str, str]:
    """What is told of parameters and gradients that no step can be taken for."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import Partial

    adafactor = optimizer_of("adafactor")
    mesh = mesh_of((dist.get_world_size(),))
    found = {}
    partial = Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Partial()], run_check=False))
    found["partial"] = message(lambda: adafactor([partial]))
    params, optimizer = simple()
    give(params, 0)
    params[0].grad = DTensor.from_local(torch.ones(6, 4), mesh, [Partial()], run_check=False)
    found["partial gradient"] = message(optimizer.step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for flag in (True, False):
            model = FullyShardedDataParallel(
                nn.Sequential(nn.Linear(5, 7)), use_orig_params=flag, device_id=torch.device("cpu")
            )
            found[f"FSDP1 {flag}"] = message(lambda model=model: adafactor(model.parameters()))
    # As DeepSpeed's ZeRO does it.
    params = [Parameter(torch.ones(4, 4)), Parameter(torch.ones(4))]
    optimizer = adafactor(params)
    flat = Parameter(torch.ones(10))
    flat.grad = torch.ones(10)
    optimizer.param_groups[0]["params"] = [flat]
    found["flat"] = message(optimizer.step)
    return found


def swapped() -> tuple[list[float], int]:
    """A model is sharded after its optimizer was made, and its parameters are put in the old ones' places."""
    one, many = Model(), Model()
    first = optimizer_of("adafactor")(one.parameters())
    second = optimizer_of("adafactor")(many.parameters())
    names = {p: name for name, p in many.named_parameters()}
    order = [[names[p] for p in group["params"]] for group in second.param_groups]
    split(many, "fsdp")
    found = dict(many.named_parameters())
    for group, known in zip(second.param_groups, order, strict=True):
        group["params"] = [found[name] for name in known]
    start = [p.detach().clone() for p in one.parameters()]
    for t in range(3):
        backward(many, t)
        backward(one, t)
        for p, q in zip(one.parameters(), many.parameters(), strict=True):
            copy_whole(q.grad, p.grad)
        first.step()
        second.step()
    offs = [
        off(whole_of(q), p.detach(), p.detach(), x)
        for p, q, x in zip(one.parameters(), many.parameters(), start, strict=True)
    ]
    return offs, len(second.state) - len(first.state)


def stale() -> list[str]:
    """A model is sharded after its optimizer was made, and nobody tells the optimizer."""
    model = Model()
    optimizer = optimizer_of("adafactor")(model.parameters())
    split(model, "fsdp")
    backward(model, 0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    return [str(each.message) for each in told]


def by_torch(how: str, steps: int = 4) -> list[float]:
    """DDP, or a ZeroRedundancyOptimizer: beside one process."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    one, many = Model(), Model()
    start = [p.detach().clone() for p in one.parameters()]
    first = optimizer_of("adafactor")(one.parameters())
    parallel = DistributedDataParallel(many)
    if how == "ddp":
        second: Any = optimizer_of("adafactor")(many.parameters())
    else:
        second = ZeroRedundancyOptimizer(many.parameters(), optimizer_of("adafactor"))
    for t in range(steps):
        backward(parallel, t)
        backward(one, t)
        for p, q in zip(one.parameters(), many.parameters(), strict=True):
            q.grad.copy_(p.grad)
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    return [
        off(q.detach(), p.detach(), p.detach(), x)
        for p, q, x in zip(one.parameters(), many.parameters(), start, strict=True)
    ]


def clipped(how: str, largest: float) -> tuple[list[float], list[tuple[float, float]]]:
    """max_grad_norm beside clip_grad_norm_ and a step of whole parameters."""
    one, many = Model(), split(Model(), how)
    start = [p.detach().clone() for p in one.parameters()]
    first = optimizer_of("adafactor")(one.parameters())
    second = optimizer_of("adafactor")(many.parameters(), max_grad_norm=largest)
    norms = []
    for t in range(4):
        backward(many, t)
        backward(one, t)
        for p, q in zip(one.parameters(), many.parameters(), strict=True):
            copy_whole(q.grad, p.grad)
        total = nn.utils.clip_grad_norm_(one.parameters(), largest)
        first.step()
        second.step()
        norms.append((float(second.grad_norm), float(total)))
    offs = [
        off(whole_of(q), p.detach(), p.detach(), x)
        for p, q, x in zip(one.parameters(), many.parameters(), start, strict=True)
    ]
    return offs, norms


def many(count: int) -> list[int]:
    """The bytes of each all-reduce of a step of so many parameters."""
    params, optimizer = simple([(6, 4), (5, 3), (7,)] * (count // 3))
    for t in range(2):
        give(params, t)
        with collectives() as sent:
            optimizer.step()
    return sent


# Checkpoints


def feed(model: nn.Module, t: int) -> None:
    """The same gradients whatever the world."""
    params = list(model.parameters())
    _, grads = random_steps([tuple(p.shape) for p in params], 1, seed=t)
    for p, g in zip(params, grads[0], strict=True):
        p.grad = torch.zeros_like(p)
        copy_whole(p.grad, g.to(p.dtype))


def another(how: str, dialect: str, options: dict[str, Any], start: str = "values") -> tuple[nn.Module, Any]:
    """A model in a split and its optimizer; with other values unless they are asked for."""
    model = Model()
    if start == "others":
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(7.0)
    split(model, how)
    return model, optimizer_of(dialect)(model.named_parameters(), **options)


def advance(model: nn.Module, optimizer: Any, steps: range) -> list[Tensor]:
    for t in steps:
        feed(model, t)
        optimizer.step()
        optimizer.zero_grad()
    return [whole_of(p) for p in model.parameters()]


def uninterrupted(dialect: str, options: dict[str, Any]) -> list[Tensor]:
    return advance(*another("whole", dialect, options), range(6))


def save(how: str, path: str, dialect: str, options: dict[str, Any], flat: bool) -> None:
    """Three steps, and a distributed checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model, optimizer = another(how, dialect, options)
    advance(model, optimizer, range(3))
    values, state = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    dcp.save({"model": values, "optimizer": state}, checkpoint_id=path)


def resume(how: str, path: str, dialect: str, options: dict[str, Any], flat: bool) -> list[Tensor]:
    """Three steps more in another world."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

    model, optimizer = another(how, dialect, options, "others")
    asked = StateDictOptions(flatten_optimizer_state_dict=flat)
    values, state = get_state_dict(model, optimizer, options=asked)
    dcp.load({"model": values, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=values, optim_state_dict=state, options=asked)
    return advance(model, optimizer, range(3, 6))


def whole_state(how: str, dialect: str, options: dict[str, Any], path: str) -> None:
    """Three steps, and a file of whole tensors, written by the first process."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model, optimizer = another(how, dialect, options)
    advance(model, optimizer, range(3))
    asked = StateDictOptions(full_state_dict=True, cpu_offload=True)
    values, state = get_state_dict(model, optimizer, options=asked)
    if dist.get_rank() == 0:
        torch.save({"model": values, "optimizer": state}, path)
    dist.barrier()


def from_whole_state(how: str, dialect: str, options: dict[str, Any], path: str, by: str) -> list[Tensor]:
    """Three steps more from such a file."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    model, optimizer = another(how, dialect, options, "others")
    broadcast = by == "the first"
    saved = {"model": {}, "optimizer": {}}
    if dist.get_rank() == 0 or not broadcast:
        saved = torch.load(path, weights_only=True)
    asked = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
    set_model_state_dict(model, saved["model"], options=asked)
    set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=asked)
    return advance(model, optimizer, range(3, 6))


def by_its_own(to: str, dialect: str, options: dict[str, Any]) -> list[Tensor]:
    """The optimizer's own state_dict() of shards, loaded by load_state_dict() of another split."""
    model, optimizer = another("fsdp", dialect, options)
    values = advance(model, optimizer, range(3))
    other, second = another(to, dialect, options, "others")
    for p, x in zip(other.parameters(), values, strict=True):
        copy_whole(p, x)
    second.load_state_dict(optimizer.state_dict())
    return advance(other, second, range(3, 6))


def primed(how: str, dialect: str, options: dict[str, Any]) -> bool:
    """Whether asking for the state of a fresh optimizer leaves everything as it is."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model, optimizer = another(how, dialect, options)
    before = states(optimizer)
    get_optimizer_state_dict(model, optimizer)
    return all(torch.equal(a, b) for a, b in zip(before, states(optimizer), strict=True))


def step_counts(path: str) -> set[float]:
    """All step counts of a checkpoint."""
    import torch.distributed.checkpoint as dcp

    names = [name for name in dcp.FileSystemReader(path).read_metadata().state_dict_metadata if name.endswith(".step")]
    found = {name: torch.zeros(()) for name in names}
    dcp.load(found, checkpoint_id=path)
    return {float(step) for step in found.values()}


# What it costs


@contextmanager
def traffic():
    """Count what FSDP2 sends: to gather, to reduce and scatter, and to reduce, as each process sends it in a ring."""
    kinds = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
    sent = dict.fromkeys(kinds, 0.0)
    # What works on one tensor has other names from one version of torch to the next.
    kept = {name: getattr(dist, name) for name in dir(dist) if name.endswith(("_into_tensor", "_tensor", "_single"))}
    kept["all_reduce"] = dist.all_reduce

    def counting(name: str) -> Callable[..., Any]:
        kind = next((kind for kind in kinds if name.startswith(kind)), None)

        def collective(*args: Any, group: Any, **kwargs: Any) -> Any:
            whole = max(x.nbytes for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
            sent[kind] += kinds[kind] * whole * (group.size() - 1) / group.size()
            return kept[name](*args, group=group, **kwargs)

        return collective if kind else kept[name]

    for name in kept:
        setattr(dist, name, counting(name))
    try:
        yield sent
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


def cost(how: str, dialect: str, options: dict[str, Any], dtype: str) -> dict[str, Any]:
    """What a model costs this process, as it is measured: what it keeps, and what a step and FSDP2 send."""
    model = split(Model().to(getattr(torch, dtype)), how)
    if hasattr(model, "set_reshard_after_forward"):
        model.set_reshard_after_forward(True)
    adafactor = optimizer_of(dialect)(model.named_parameters(), **options)
    adamw = torch.optim.AdamW(model.parameters())
    for t in range(2):
        with traffic() as fsdp:
            backward(model, t)
        with collectives() as sent:
            adafactor.step()
        adamw.step()
        model.zero_grad()
    found = {"sent": sent, "fsdp": list(fsdp.values()), "parameters": kept_of(model.parameters())}
    for name, optimizer in (("adamw", adamw), ("state", adafactor)):
        found[name] = kept_of(value for own in optimizer.state.values() for value in own.values())
    return found


def kept_of(tensors: Iterable[Any]) -> int:
    """The bytes of what is here of tensors."""
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)


# Changes between steps


def one_alone_changes(how: str) -> tuple[str, str]:
    """One process has other options, or frees a frozen parameter, after the first step. Then all go on as before."""
    params, optimizer = simple()
    give(params, 0)
    optimizer.step()
    mine = dist.get_rank() == 1
    if how == "decay":
        optimizer.param_groups[0]["weight_decay"] = 0.1 if mine else 0.0
    else:
        params[0].requires_grad_(not mine)
    give(params, 1)
    first = message(optimizer.step)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    params[0].requires_grad_(True)
    give(params, 2)
    return first, message(optimizer.step)


def all_change(refuser: bool) -> tuple[list[str], list[int]]:
    """A group is added everywhere; in that step one process refuses, or none. Then all go on."""
    params, optimizer = simple()
    give(params, 0)
    optimizer.step()
    more, _ = simple(((3, 8),))
    optimizer.add_param_group({"params": more})
    give([*params, *more], 1)
    if refuser and dist.get_rank() == 0:
        optimizer.param_groups[0]["lr"] = -1.0
    said = [message(optimizer.step)]
    optimizer.param_groups[0]["lr"] = 1e-2
    give([*params, *more], 2)
    said.append(message(optimizer.step))
    return said, [int(optimizer.state[p]["step"]) for p in (*params, *more)]


def frozen_and_refused() -> list[str]:
    """Sharded parameters are all frozen, and a whole one is trained: as adapters are, by some."""
    shards, _ = simple()
    whole = Parameter(torch.ones(3))
    for p in shards:
        p.requires_grad_(False)
    optimizer = optimizer_of("adafactor")([*shards, whole])
    said = []
    for t in range(3):
        whole.grad = torch.ones(3)
        optimizer.param_groups[0]["lr"] = -1.0 if t == 1 and dist.get_rank() == 1 else 1e-2
        said.append(message(optimizer.step))
    # And are trained then.
    for p in shards:
        p.requires_grad_(True)
    give(shards, 0)
    said.append(message(optimizer.step))
    return said


def stale_gradient_of_a_frozen_one() -> list[str]:
    """One process has not cleared the gradient of a parameter that is frozen on all."""
    params, optimizer = simple()
    give(params, 0)
    optimizer.step()
    params[0].requires_grad_(False)
    if dist.get_rank() == 1:
        params[0].grad = None
    give(params[1:], 1)
    return [message(optimizer.step), message(optimizer.step)]


def swapped_meshes() -> float:
    """Parameters are put in others' places that lie over other processes."""
    start, grads = random_steps([(8, 6)], 2)
    meshes = [DeviceMesh("cpu", [[0, 1], [2, 3]]), DeviceMesh("cpu", [[0, 2], [1, 3]])]
    whole = Parameter(start[0].clone())
    one = optimizer_of("adafactor")([whole])
    shards = [Parameter(distribute_tensor(start[0].clone(), mesh, [R, S[0]])) for mesh in meshes]
    many = optimizer_of("adafactor")([shards[0]])
    for t, [g] in enumerate(grads):
        if t == 1:
            # The second has the values of the first, and a fresh state; so has the whole one.
            shards[1] = Parameter(distribute_tensor(whole.detach().clone(), meshes[1], [R, S[0]]))
            many.param_groups[0]["params"] = [shards[1]]
            one = optimizer_of("adafactor")([whole])
        whole.grad = g.clone()
        shards[t].grad = distribute_tensor(g.clone(), meshes[t], [R, S[0]])
        one.step()
        many.step()
    return off(whole_of(shards[1]), whole.detach(), whole.detach(), start[0])


def in_inference_mode() -> list[str]:
    """The first step is taken in inference mode, and others are not."""
    params, optimizer = simple()
    said = []
    for mode in (True, False, True):
        give(params, 0)
        with torch.inference_mode(mode):
            said.append(message(optimizer.step))
    return said


def refusal_leaves_the_state_of_others(how: str) -> bool:
    """All processes change the rounding, which drops a compensation, and one refuses that step."""
    mesh = mesh_of((dist.get_world_size(),))
    p = Parameter(distribute_tensor(torch.ones(6, 4, dtype=torch.bfloat16), mesh, [S[0]]))
    optimizer = optimizer_of("adafactor")([p], rounding="kahan")
    p.grad = distribute_tensor(torch.ones(6, 4, dtype=torch.bfloat16), mesh, [S[0]])
    optimizer.step()
    optimizer.param_groups[0]["rounding"] = "nearest"
    if dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = -1.0
    assert message(optimizer.step) != "nothing"
    return "compensation" in optimizer.state[p]


def nothing_is_masked(options: dict[str, Any]) -> list[bool]:
    """Whether the sweeps of a step in which all is well are told that something may have to stay as it is."""
    from adafactor import sweeps

    held = []
    second = sweeps.second

    def watched(batch: Any, backend: Any) -> Any:
        held.append(batch.hold is not None)
        return second(batch, backend)

    params, optimizer = simple(**options)
    sweeps.second = watched
    try:
        for t in range(2):
            give(params, t)
            optimizer.step()
    finally:
        sweeps.second = second
    return held


def where_nobody_reads(how: str) -> tuple[str, list[bool], int]:
    """As on an accelerator: nobody reads the flags, so that the others go on, and leave the step out."""
    from adafactor.exchange import Exchange

    kept = Exchange.is_read
    Exchange.is_read = property(lambda exchange: False)
    try:
        params, optimizer = simple()
        give(params, 0)
        optimizer.step()
        give(params, 1)
        before = states(optimizer)
        if dist.get_rank() == 1:
            spoiling(how)(optimizer, params)
        said = message(optimizer.step)
        same = [torch.equal(a, b) for a, b in zip(before, states(optimizer), strict=True)]
        optimizer.param_groups[0].update(lr=1e-2, factor="last")
        give(params, 2)
        assert message(optimizer.step) == "nothing"
    finally:
        Exchange.is_read = kept
    return said, same, int(optimizer.skipped_steps)


def state_dicts_alone() -> str:
    """One process alone asks for the state and the step sizes."""
    model, optimizer = another(
        "fsdp", "adafactor.dialects.transformers", {"scale_parameter": False, "lr": 1e-2, "relative_step": False}
    )
    advance(model, optimizer, range(1))
    if dist.get_rank() == 0:
        optimizer.state_dict()
        optimizer.step_sizes()
        return "done"
    return "not asked"


def flat_after_a_load() -> str:
    """A flat partition in place of parameters whose optimizer has loaded a state."""
    params = [Parameter(torch.ones(4, 4)), Parameter(torch.ones(4))]
    optimizer = optimizer_of("adafactor")(params)
    optimizer.load_state_dict(optimizer.state_dict())
    flat = Parameter(torch.ones(10))
    flat.grad = torch.ones(10)
    optimizer.param_groups[0]["params"] = [flat]
    return message(optimizer.step)
