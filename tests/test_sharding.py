"""Sharded parameters take the steps of whole ones, with two messages a step: on gloo, with 2 and 4 processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import sharded
from helpers import BACKENDS
from processes import POOLS

TORCH, TRANSFORMERS = "adafactor", "adafactor.dialects.transformers"
OPTAX, BIG_VISION = "adafactor.dialects.optax", "adafactor.dialects.big_vision"
# The kernel for what it supports: some of these dims do not lie as matrices.
ASKED = {name: {"fused": None} if name == "kernel" else options for name, options in BACKENDS.items()}
both = pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "foreach"])

RULES = {
    "torch": (TORCH, {}),
    "torch, decay, clipped": (TORCH, {"weight_decay": 0.1, "max_grad_norm": 0.5}),
    "transformers": (TRANSFORMERS, {}),
    "transformers, momentum, decay": (TRANSFORMERS, {"beta1": 0.9, "weight_decay": 0.01}),
    "matrix": (TORCH, {"factor": "matrix"}),
    "matrix, momentum": (TRANSFORMERS, {"factor": "matrix", "beta1": 0.9, "max_row_boost": 2.0}),
    "largest": (TORCH, {"factor": "largest", "weight_decay": 0.1}),
    "stacks": (OPTAX, {"batch_dims": 1, "min_dim_size_to_factor": 2, "momentum": 0.9}),
    "big_vision": (BIG_VISION, {"min_dim_size_to_factor": 2, "momentum_dtype": "float32"}),
    "guarded": (TORCH, {"skip_nonfinite": True}),
    "guarded one by one": (TORCH, {"skip_nonfinite": "parameter"}),
}


def worst(results):
    """The largest difference of each case over all processes, in parts of what the order of float32 sums may make."""
    return [max(each) for each in zip(*(result["off"] for result in results), strict=True)]


# Of those whose sums differ between shards in another way.
ON_FOUR = [
    "torch, decay, clipped",
    "transformers, momentum, decay",
    "matrix",
    "largest",
    "stacks",
    "guarded one by one",
]


@both
@pytest.mark.parametrize(("size", "rule"), [*((2, rule) for rule in RULES), *((4, rule) for rule in ON_FOUR)])
def test_on_a_line_of_processes(rule, size, backend):
    """A shard that is alone with its numbers moves by half of what it should: no loss curve says so."""
    dialect, options = RULES[rule]
    cases = sharded.on_a_line(size)
    results = POOLS[size].run(sharded.alike, dialect, options | ASKED[backend], cases)
    for case, error in zip(cases, worst(results), strict=True):
        assert error <= 1, case
    for result in results:
        assert [len(sent) for sent in result["sent"][1:]] == [2] * 3


@both
@pytest.mark.parametrize("rule", RULES)
def test_on_a_square_of_processes(rule, backend):
    """Rows over one side and columns over the other: mean(R) is nobody's own then."""
    dialect, options = RULES[rule]
    results = POOLS[4].run(sharded.alike, dialect, options | ASKED[backend], sharded.ON_A_SQUARE)
    for case, error in zip(sharded.ON_A_SQUARE, worst(results), strict=True):
        assert error <= 1, case
    for result in results:
        assert [len(sent) for sent in result["sent"][1:]] == [4] * 3


@both
def test_a_line_is_two_messages_however_many_parameters(backend):
    """One for each parameter would be a thousand in a row; what they hold is the sums of columns and 4 numbers each."""
    for result in POOLS[2].run(sharded.many, 3):
        # Of (6, 4): 4 sums of columns, whether there is a gradient, and the sum of p^2; flags; then the sum of u^2.
        assert result == [4 * (4 + 3 + 3 * 2 + 4), 4 * 3]
    for result in POOLS[2].run(sharded.many, 300):
        assert result == [4 * (100 * (4 + 3 + 3 * 2) + 4), 4 * 300]


@both
def test_rows_that_do_not_divide_cost_no_more(backend):
    """Uneven shards are where DTensor gathers whole matrices."""
    for shape in ((8, 6), (7, 6), (1001, 6), (1, 6)):
        cases = [sharded.Case(shape, (4,), (sharded.S[0],))]
        for result in POOLS[4].run(sharded.alike, TORCH, ASKED[backend], cases):
            assert result["sent"][-1] == [4 * (6 + 2 + 4), 4]


@both
@pytest.mark.parametrize(
    ("placements", "messages"),
    [
        ((sharded.S[0], sharded.S[1]), 3),
        ((sharded.S[0], sharded.S[0]), 2),
        ((sharded.R, sharded.S[0]), 2),
        ((sharded.R, sharded.R), 0),
    ],
)
def test_a_square_is_at_most_three_messages(placements, messages, backend):
    """Rows over one side and columns over the other; all rows over both; replicas take no part."""
    cases = [sharded.Case(shape, (2, 2), placements) for shape in ((9, 7), (4, 5, 6), (3, 3))]
    for result in POOLS[4].run(sharded.alike, TORCH, ASKED[backend], cases):
        assert [len(sent) for sent in result["sent"][1:]] == [messages] * 3


SPLITS = {
    2: {"fsdp": 2, "offload": 2, "tensor": 2},
    4: {"fsdp": 2, "hsdp": 2, "fsdp and tensor": 4},
}


@both
@pytest.mark.parametrize(("size", "how"), [(size, how) for size, some in SPLITS.items() for how in some])
def test_models_that_pytorch_shards(size, how, backend):
    """FSDP2, with units and without even rows; tensor parallel; both; replicas; on CPUs with offload."""
    for dialect, options in (RULES["torch, decay, clipped"], RULES["transformers, momentum, decay"], RULES["matrix"]):
        sent = []
        for layers in (2, 4):
            results = POOLS[size].run(sharded.as_whole, dialect, options | ASKED[backend], how, layers)
            assert max(worst(results)) <= 1
            sent.append([len(each) for each in results[0]["sent"][1:]])
        # Twice the layers are no more messages.
        assert sent == [[SPLITS[size][how]] * 4] * 2


@both
@pytest.mark.parametrize(("size", "how"), [(2, "fsdp"), (4, "fsdp"), (4, "fsdp and tensor")])
def test_bits_of_stochastic_rounding_do_not_depend_on_the_world(size, how, backend):
    """They are those of whole tensors: a draw by place in a shard would not be."""
    options = {"rounding": "stochastic", "lr": 1e-2} | ASKED[backend]
    results = POOLS[size].run(sharded.as_whole, TORCH, options, how, 2, "bfloat16")
    alone = POOLS[1].run(sharded.as_whole, TORCH, options, "whole", 2, "bfloat16")
    for mine, theirs in zip(results[0]["parameters"], alone[0]["parameters"], strict=True):
        # Sums in another order may let a number fall on the other side of its draw, once in thousands.
        assert (mine != theirs).sum() <= 1


@both
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replicas_stay_the_same_bit_by_bit(dtype, backend):
    """What differs between replicas grows, and nobody looks."""
    options = {"rounding": "stochastic", "beta1": 0.9} | ASKED[backend]
    results = POOLS[4].run(sharded.replicas, dtype, options)
    for mine, theirs in ((0, 2), (1, 3)):
        for p, q in zip(results[mine], results[theirs], strict=True):
            assert p.equal(q)


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@pytest.mark.parametrize("how", ["lr", "factor", "placement"])
def test_one_process_refuses_a_step_and_nobody_hangs(how, first):
    """The others wait for what it would have sent: they are told, and nothing has changed anywhere."""
    results = POOLS[2].run(sharded.one_refuses, how, first, timeout=40)
    (mine, *_), (theirs, *_) = results
    assert "refused by no process, got one that has" in mine
    assert theirs.startswith("ValueError: ")
    for _, changed, steps in results:
        assert not changed
        assert steps == 1 + (not first)


@pytest.mark.parametrize("options", [{"fused": False}, {}, {"max_grad_norm": 1.0}, {"skip_nonfinite": True}], ids=str)
@pytest.mark.parametrize("ranks", [[0], [1], [0, 1]], ids=str)
def test_a_gradient_is_missing(ranks, options):
    """On some processes it is zeros there; on all of them the parameter and its step count stay as they are."""
    for same, steps in POOLS[2].run(sharded.some_are_missing, ranks, timeout=40, **options):
        assert same == [True, True]
        assert steps == ([0, 3] if ranks == [0, 1] else [3, 3])


@pytest.mark.parametrize(("skip", "stayed"), [(True, [True, True]), ("parameter", [True, False])])
def test_what_is_not_finite_on_one_process_is_skipped_on_all(skip, stayed):
    """Half a step would leave shards of two models."""
    for found in POOLS[2].run(sharded.one_is_not_finite, skip, timeout=40):
        assert found == (stayed, 1, ["parameter 0 of group 0"])


@pytest.mark.parametrize(
    "options", [({"factor": "largest"}, {}), ({"lr": 0.1}, {"lr": 0.2}), ({"d": 2.0}, {}), ({"seed": 1}, {})]
)
def test_processes_that_mean_different_things(options):
    """Their messages would not fit each other: an error, or wrong numbers, or none of them comes back."""
    for told in POOLS[2].run(sharded.different_options, options, timeout=40):
        assert "the same shapes, placements, order and options on all processes" in told


def test_refusals_say_what_to_use():
    """FSDP1's and DeepSpeed's flat pieces take steps that are wrong by 70%, in silence."""
    for told in POOLS[2].run(sharded.refusals, timeout=60):
        assert "parameter 0 of group 0 should be placed by Shard and Replicate, got P" in told["partial"]
        assert "should be placed as it is" in told["partial gradient"]
        for flag in (True, False):
            assert "a flat piece of an FSDP1 unit: use FSDP2" in told[f"FSDP1 {flag}"]
        assert "a flat partition (DeepSpeed's ZeRO)" in told["flat"]


def test_parameters_that_are_put_in_others_places_are_followed():
    """accelerate makes the optimizer first and shards the model then."""
    for offs, more in POOLS[2].run(sharded.swapped):
        assert max(offs) <= 1
        assert more == 0


def test_an_optimizer_of_a_model_that_was_sharded_later_says_so():
    """Its parameters never get a gradient again: training goes on without it."""
    for told in POOLS[2].run(sharded.stale):
        assert len(told) == 1
        assert "make the optimizer after that" in told[0]


@pytest.mark.parametrize("how", ["ddp", "zero"])
def test_ddp_and_zero_redundancy(how):
    """Whole parameters: nothing is sent, and all is exact."""
    for offs in POOLS[2].run(sharded.by_torch, how):
        assert max(offs) <= 1


@pytest.mark.parametrize(("size", "how"), [(1, "whole"), (2, "fsdp"), (4, "fsdp and tensor"), (4, "hsdp")])
@pytest.mark.parametrize("largest", [0.1, 1e3])
def test_clipping_by_the_norm_of_all_gradients(size, how, largest):
    """As clip_grad_norm_ and a step, without going over all gradients twice more."""
    for offs, norms in POOLS[size].run(sharded.clipped, how, largest):
        assert max(offs) <= 1
        for mine, theirs in norms:
            assert mine == pytest.approx(theirs, rel=1e-6)


def test_a_sharded_step_reads_nothing_back_from_the_device():
    """On an accelerator each read waits for all work before it."""
    script = Path(__file__).parent / "shards_without_values.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "nobody has read anything\n", done.stderr


ALONE = "parameters and options of a sharded optimizer should change on all processes at the same step"
REFUSED = "the step should be refused by no process, got one that has"


@pytest.mark.parametrize("how", ["decay", "frozen"])
def test_one_process_alone_changes_something(how):
    """It would send what the others do not wait for: a crash in gloo, a hang or mixed numbers elsewhere."""
    (first, after), (mine, then) = POOLS[2].run(sharded.one_alone_changes, how, timeout=40)
    assert REFUSED in first
    assert ALONE in mine
    assert (after, then) == ("nothing", "nothing")


@pytest.mark.parametrize("refuser", [True, False])
def test_all_processes_add_a_group(refuser):
    """They make sure once that they mean the same, also where one refuses that very step."""
    mine, theirs = POOLS[2].run(sharded.all_change, refuser, timeout=40)
    if refuser:
        assert "lr should be" in mine[0][0]
        assert REFUSED in theirs[0][0]
    for said, steps in (mine, theirs):
        assert said[1:] == ["nothing"]
        assert steps == ([2, 2, 1] if refuser else [3, 3, 2])


def test_shards_that_are_frozen():
    """Whole adapters of a sharded model: who refuses a step must not wait for processes that wait for nobody."""
    mine, theirs = POOLS[2].run(sharded.frozen_and_refused, timeout=40)
    assert REFUSED in mine[1]
    assert "lr should be" in theirs[1]
    for said in (mine, theirs):
        assert [said[0], *said[2:]] == ["nothing"] * 3


def test_a_stale_gradient_of_a_frozen_shard_is_nobodys():
    """Whether a shard takes part may not depend on what one process has left lying about."""
    for said in POOLS[2].run(sharded.stale_gradient_of_a_frozen_one, timeout=40):
        assert said == ["nothing", "nothing"]


def test_a_shard_that_is_empty_in_both_dims():
    """Which group sums go over may not depend on what is here."""
    cases = [sharded.Case((1, 1), (2, 2), (sharded.S[0], sharded.S[1]))]
    results = POOLS[4].run(sharded.alike, TORCH, {}, cases, timeout=40)
    assert max(worst(results)) <= 1
    assert {len(sent) for result in results for sent in result["sent"][1:]} == {3}


def test_parameters_that_are_put_on_another_mesh():
    """Sums over the processes of the old one would be wrong, in silence."""
    assert max(POOLS[4].run(sharded.swapped_meshes)) <= 1


def test_inference_mode():
    """What the first step makes has to serve all others."""
    for said in POOLS[2].run(sharded.in_inference_mode, timeout=40):
        assert said == ["nothing"] * 3


def test_a_refused_step_makes_no_state():
    """What one process has dropped, and another one not, is two states."""
    assert POOLS[2].run(sharded.refusal_leaves_the_state_of_others, "lr", timeout=40) == [True, True]


@pytest.mark.parametrize("options", [{}, {"skip_nonfinite": True}, {"max_grad_norm": 1.0}], ids=str)
def test_nothing_is_masked_where_all_is_well(options):
    """A mask costs plain PyTorch copies of all it may have to keep."""
    for held in POOLS[2].run(sharded.nothing_is_masked, options):
        assert held
        assert not any(held)


@pytest.mark.parametrize("how", ["lr", "factor"])
def test_a_refusal_where_nobody_waits_to_hear_of_it(how):
    """On accelerators the others go on into the second round: it has to be there, and the step left out."""
    (mine, same, skipped), (theirs, others, _) = POOLS[2].run(sharded.where_nobody_reads, how, timeout=40)
    assert mine == "nothing"
    assert "should be" in theirs
    assert all(same)
    assert all(others)
    assert skipped == 1


def test_one_process_may_look_at_the_state_alone():
    """A log line on the first process must not wait for the others."""
    assert POOLS[2].run(sharded.state_dicts_alone, timeout=40) == ["done", "not asked"]


def test_flat_partitions_are_refused_after_a_load_too():
    assert "a flat partition (DeepSpeed's ZeRO)" in sharded.flat_after_a_load()


@pytest.mark.parametrize(
    "options", [{}, {"fused": False}, {"skip_nonfinite": "parameter", "max_grad_norm": 1.0}], ids=str
)
def test_parameters_without_elements(options):
    """An empty head, or a vocabulary of 0 in a test: whole ones are stepped too."""
    for offs in POOLS[2].run(sharded.without_elements, options, timeout=40):
        assert max(offs) <= 1
