"""A bill says what real processes keep and send: it is read off the exchanges that send it, and held to them here."""

from __future__ import annotations

from math import prod

import pytest
import sharded
import torch
from processes import POOLS

from adafactor.bill import Mesh, Message, bill
from adafactor.dialects import optax
from adafactor.memory import estimate
from adafactor.models import MODELS, Llama, Weight

TORCH, TRANSFORMERS = "adafactor.dialects.torch", "adafactor.dialects.transformers"


def test_a_line_by_hand():
    """A matrix of 6 x 4 and a vector of 5 on two processes: the first has 3 x 4 and 3 of them."""
    found = bill([Weight("a", (6, 4)), Weight("b", (5,))], Mesh(2))
    assert found.parameters == 4 * (12 + 3)
    assert found.state == {"R": 4 * 3, "C": 4 * 4, "V": 4 * 3, "m": 0, "compensation": 0, "step": 4 * 2}
    assert found.kept == 48
    assert found.adamw == 2 * 60 + 4 * 2
    # The sums of 4 columns; of each whether it has a gradient, and the sum of p^2; 4 flags. Then the sums of u^2.
    assert found.first == (Message(2, 4 * (4 + 2 * 2 + 4)),)
    assert found.second == (Message(2, 4 * 2),)
    assert found.sent == 48 + 8
    # The other process's 15 bfloat16 numbers, twice; and the gradients of those.
    assert (found.gathers, found.scatters, found.reduces) == (2 * 30, 30, 0)
    assert found.share == 56 / 90


def test_a_square_by_hand():
    """8 x 6 on two replicas, of rows over two processes and columns over two: each has 4 x 3."""
    found = bill([Weight("a", (8, 6), split=1)], Mesh(8, tensor_parallel=2, replicas=2), communication=torch.float32)
    assert found.parameters == 4 * 12
    assert (found.state["R"], found.state["C"]) == (4 * 4, 4 * 3)
    # For both groups 2 totals, 4 flags and the tensor's 2 numbers; the sums of columns go down, those of rows across.
    assert found.first == (Message(2, 4 * (8 + 3)), Message(2, 4 * (8 + 4)))
    assert found.second == (Message(4, 4),)
    assert (found.gathers, found.scatters, found.reduces) == (2 * 48, 48, 48)


def test_one_process_has_all_of_it_and_sends_nothing():
    shapes = [(6, 4), (5,), (3, 4, 5)]
    found = bill([Weight(str(shape), shape) for shape in shapes], factor="matrix")
    assert found.kept == estimate([torch.empty(shape, requires_grad=True) for shape in shapes], factor="matrix").bytes
    assert (found.first, found.second, found.sent, found.fsdp, found.share) == ((), (), 0, 0, None)


SPLITS = {
    "fsdp": (2, Mesh(2)),
    "offload": (2, Mesh(2)),
    "tensor": (2, Mesh(2, tensor_parallel=2)),
    "fsdp over 4": (4, Mesh(4)),
    "hsdp": (4, Mesh(4, replicas=2)),
    "fsdp and tensor": (4, Mesh(4, tensor_parallel=2)),
}
RULES = {
    "torch": (TORCH, {}, "float32"),
    "torch, bfloat16, guarded, clipped": (
        TORCH,
        {"skip_nonfinite": True, "max_grad_norm": 0.5, "rounding": "kahan"},
        "bfloat16",
    ),
    "transformers, momentum": (TRANSFORMERS, {"beta1": 0.9, "factor": "matrix"}, "float32"),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("how", SPLITS)
def test_it_is_what_real_processes_keep_and_send(how, rule):
    """Somebody rents a cluster by these numbers."""
    size, mesh = SPLITS[how]
    dialect, options, dtype = RULES[rule]
    kind = getattr(torch, dtype)
    places = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    weights = [
        Weight(name, tuple(p.shape), places.get(name.partition(".")[2].partition(".")[2]))
        for name, p in sharded.Model().named_parameters()
    ]
    most = 0
    for rank, real in enumerate(POOLS[size].run(sharded.cost, how.removesuffix(" over 4"), dialect, options, dtype)):
        found = bill(weights, mesh, dialect.rpartition(".")[2], dtype=kind, communication=kind, rank=rank, **options)
        assert found.parameters == real["parameters"]
        assert found.kept == real["state"]
        assert found.adamw == real["adamw"]
        assert [message.bytes for message in (*found.first, *found.second)] == real["sent"]
        assert [found.gathers, found.scatters, found.reduces] == real["fsdp"]
        most = most or found.kept
        assert found.kept <= most


def test_a_square_is_what_is_really_sent():
    """Where the second round is one all-reduce over both sides, too."""
    shapes = [(9, 7), (4, 5, 6), (3, 3)]
    cases = [sharded.Case(shape, (2, 2), (sharded.S[0], sharded.S[1])) for shape in shapes]
    weights = [Weight(str(shape), shape, split=1) for shape in shapes]
    for rank, result in enumerate(POOLS[4].run(sharded.alike, TORCH, {}, cases)):
        found = bill(weights, Mesh(4, tensor_parallel=2), rank=rank)
        assert [message.bytes for message in (*found.first, *found.second)] == result["sent"][-1]


def test_the_models_are_the_published_ones():
    """Their numbers of parameters, and their tensors as transformers makes them from a configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    counts = {name: sum(prod(weight.shape) for weight in model.weights) for name, model in MODELS.items()}
    assert counts == {"llama-2-7b": 6738415616, "llama-2-70b": 68976648192, "llama-3.1-405b": 405853388800}
    model = Llama(layers=2, hidden=64, intermediate=96, heads=8, kv_heads=2, vocabulary=100)
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=100,
    )
    with torch.device("meta"):
        theirs = {name: tuple(p.shape) for name, p in LlamaForCausalLM(config).named_parameters()}
    assert {weight.name: weight.shape for weight in model.weights} == theirs


def test_a_large_model_by_hand():
    """Llama 2 7B: a number for each column of each matrix, 2 for each tensor, 4 flags; then one for each tensor."""
    found = bill(MODELS["llama-2-7b"].weights, Mesh(64))
    columns = 32 * (6 * 4096 + 11008) + 2 * 4096
    rows = 32 * (5 * 4096 + 2 * 11008) + 2 * 32000
    tensors = 32 * 9 + 3
    assert found.first == (Message(64, 4 * (columns + 2 * tensors + 4)),)
    assert found.second == (Message(64, 4 * tensors),)
    assert found.kept == 4 * (columns + (rows + 65 * 4096) // 64 + tensors)
    assert found.adamw == 2 * 4 * 6738415616 // 64 + 4 * tensors
    assert found.fsdp == 3 * 63 * 2 * 6738415616 // 64


@pytest.mark.parametrize(
    ("weight", "mesh", "options", "message"),
    [
        (
            {},
            {"ranks": 12, "tensor_parallel": 2, "replicas": 4},
            {},
            "multiple of tensor_parallel x replicas = 8, got 12",
        ),
        ({}, {"ranks": 0}, {}, "ranks should be a whole number >= 1, got 0"),
        ({}, {"tensor_parallel": 1.5}, {}, "tensor_parallel should be a whole number >= 1, got 1.5"),
        ({}, {"ranks": 2}, {"rank": 2}, "rank should be one of the 2 ranks, from 0, got 2"),
        ({"split": 0, "heads": 2}, {"ranks": 4, "tensor_parallel": 4}, {}, "divide the 2 heads of w, got 4"),
        ({"shape": ()}, {"ranks": 2}, {}, r"w should have a dim that FSDP2 can share out, got a shape of \(\)"),
        ({}, {}, {"factor": "rows"}, "factor should be one of last, largest, matrix, got 'rows'"),
        ({}, {}, {"dialect": "adam"}, "dialect should be one of .*got 'adam'"),
    ],
)
def test_what_cannot_be_meant_is_refused(weight, mesh, options, message):
    with pytest.raises(ValueError, match=message):
        bill([Weight(**{"name": "w", "shape": (8, 6), **weight})], Mesh(**mesh), **options)


def test_a_class_will_do_for_a_dialect():
    weights = [Weight("a", (256, 256))]
    assert bill(weights, Mesh(2), optax.Adafactor) == bill(weights, Mesh(2), "optax")
