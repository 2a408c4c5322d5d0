"""Distributed checkpoints: saved by so many processes and loaded by others, as if training had never stopped."""

from __future__ import annotations

import pytest
import sharded
from processes import POOLS

RULES = {
    "torch": ("adafactor", {"weight_decay": 0.1}),
    "transformers": ("adafactor.dialects.transformers", {"beta1": 0.9, "weight_decay": 0.1}),
    "matrix": ("adafactor", {"factor": "matrix", "rounding": "kahan"}),
}
WORLDS = [(1, "whole"), (2, "fsdp"), (4, "fsdp"), (2, "tensor"), (4, "fsdp and tensor"), (4, "hsdp")]
rules = pytest.mark.parametrize("rule", RULES)


@pytest.fixture(scope="module")
def expected():
    """The parameters after six steps of whole tensors, for each rule."""
    return {rule: POOLS[1].run(sharded.uninterrupted, *asked)[0] for rule, asked in RULES.items()}


def assert_goes_on(results, expected):
    for found in results:
        for mine, theirs in zip(found, expected, strict=True):
            # As helpers.assert_same_path has it, of values and movements of about 1.
            assert float((mine - theirs).abs().max()) <= 3e-6


# One rule from all worlds; the others from some.
SOME = [WORLDS[1], WORLDS[4]]
SAVED = [(world, "transformers", False) for world in WORLDS]
SAVED += [(world, *asked) for world in SOME for asked in (("torch", False), ("matrix", False), ("transformers", True))]


@pytest.mark.parametrize(("saved", "rule", "flat"), SAVED)
def test_saved_in_one_world_and_loaded_in_others(saved, flat, rule, tmp_path, expected):
    """Who adds a machine, or loses one, has no other way to go on."""
    path = str(tmp_path / "checkpoint")
    size, how = saved
    POOLS[size].run(sharded.save, how, path, *RULES[rule], flat)
    for size, how in WORLDS:
        assert_goes_on(POOLS[size].run(sharded.resume, how, path, *RULES[rule], flat), expected[rule])


@rules
@pytest.mark.parametrize("by", ["all", "the first"])
def test_files_of_whole_tensors(by, rule, tmp_path, expected):
    """What people put on a hub: gathered from shards, and shared out again."""
    path = str(tmp_path / "whole.pt")
    POOLS[2].run(sharded.whole_state, "fsdp", *RULES[rule], path)
    for size, how in [(1, "whole"), (2, "tensor"), (4, "fsdp")]:
        assert_goes_on(POOLS[size].run(sharded.from_whole_state, how, *RULES[rule], path, by), expected[rule])


@rules
@pytest.mark.parametrize("to", ["fsdp", "tensor", "whole"])
def test_state_dicts_without_a_checkpoint_tool(to, rule, expected):
    """The optimizer's own two methods, between splits of the same processes."""
    assert_goes_on(POOLS[2].run(sharded.by_its_own, to, *RULES[rule]), expected[rule])


@rules
@pytest.mark.parametrize(("size", "how"), [(1, "whole"), (2, "fsdp"), (4, "fsdp and tensor")])
def test_asking_a_fresh_optimizer_for_its_state_changes_nothing(size, how, rule):
    """Tools prime an optimizer without state by a step of its own: with decay and relative steps it moves the model."""
    assert all(POOLS[size].run(sharded.primed, how, *RULES[rule]))


def test_step_counts_are_whole_numbers_everywhere(tmp_path):
    """A count that is off makes every later beta2 and step size another."""
    path = str(tmp_path / "checkpoint")
    POOLS[2].run(sharded.save, "fsdp", path, *RULES["torch"], False)
    assert POOLS[1].run(sharded.step_counts, path) == [{3.0}]
