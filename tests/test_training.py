"""The demonstration's model, text and loop: what a user of `adafactor train` relies on, below the command line."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from adafactor.training import checkpoint, optimizers
from adafactor.training.config import Config
from adafactor.training.data import Text, batch, read, standard_library, validation_windows
from adafactor.training.errors import DivergedError, InputError, InterruptedRunError, SaveError
from adafactor.training.metrics import Row
from adafactor.training.model import Transformer, generate, parameter_count
from adafactor.training.run import Run, train

TIMINGS = {"tokens_per_second", "optimizer_share", "seconds"}


@pytest.fixture(autouse=True)
def _keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "text"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 60)
    return str(path)


def tiny(file: str, **changes) -> Config:
    settings = {"files": (file,), "steps": 10, "batch": 4, "width": 32, "layers": 1, "context": 16, "threads": 1}
    return Config(**{**settings, **changes})


def start(config: Config) -> Run:
    return Run(config, Text.load(config.files, config.context))


def stop_after(step: int):
    def on_step(run: Run) -> None:
        if run.step == step:
            raise KeyboardInterrupt

    return on_step


def measured(rows: list[Row]) -> list[dict]:
    return [{key: value for key, value in dataclasses.asdict(row).items() if key not in TIMINGS} for row in rows]


def test_the_model_cannot_see_the_byte_it_predicts():
    """Else bits per byte would be fiction."""
    torch.manual_seed(0)
    model = Transformer(width=32, layers=2, context=16)
    text = torch.randint(0, 256, (2, 16))
    changed = text.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.equal(before[:, 9:], after[:, 9:])


def test_position_matters_to_the_model():
    """Without positions it could not tell "ab" from "ba"."""
    torch.manual_seed(0)
    model = Transformer(width=32, layers=1, context=16)
    one, two = model(torch.tensor([[1, 2, 3]]))[0, -1], model(torch.tensor([[2, 1, 3]]))[0, -1]
    assert not torch.allclose(one, two, atol=1e-6)


def test_generating_twice_gives_the_same_bytes_past_the_context():
    torch.manual_seed(0)
    model = Transformer(width=32, layers=1, context=8)
    sample = generate(model, b"ab", 20)
    assert sample == generate(model, b"ab", 20)
    assert sample.startswith(b"ab")
    assert len(sample) == 22
    assert sample != generate(model, b"ab", 20, seed=1)


def test_the_default_text_is_there_and_validation_is_held_out():
    """A validation byte that was trained on would flatter every result."""
    text = Text.load((), context=128)
    whole = b"".join(read(path) for path in standard_library())
    assert text.size == len(whole) > 1_000_000
    assert bytes(text.train[:500]) == whole[:500]
    assert bytes(text.validation) == whole[len(text.train) :]
    assert text.files == len(standard_library())


def test_a_batch_depends_on_seed_and_step_alone():
    """A resumed run must see the bytes it would have seen."""
    data = torch.arange(256, dtype=torch.uint8)
    first = batch(data, context=8, size=4, seed=1, step=7)
    batch(data, context=8, size=4, seed=1, step=8)
    assert torch.equal(first, batch(data, context=8, size=4, seed=1, step=7))
    assert not torch.equal(first, batch(data, context=8, size=4, seed=1, step=8))
    assert not torch.equal(first, batch(data, context=8, size=4, seed=2, step=7))
    assert first.shape == (4, 9)
    assert (first.diff(dim=1) == 1).all()


@pytest.mark.parametrize("length", [9, 10, 17, 100, 255])
def test_validation_windows_count_no_byte_twice(length: int):
    data = torch.arange(length, dtype=torch.uint8)
    cut = validation_windows(data, context=8)
    predicted = cut[:, 1:].flatten().tolist()
    assert len(set(predicted)) == len(predicted)
    assert len(cut) == (length - 1) // 8


def test_the_schedule_reaches_the_peak_and_ends_low():
    config = Config(steps=1000)
    assert config.schedule(0) == pytest.approx(1 / 30)
    assert config.schedule(29) > 0.99
    assert 0 < config.schedule(999) < 1e-4
    assert Config(steps=1).schedule(0) == 1


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw"])
def test_it_learns_a_repeating_text(file: str, tmp_path: Path, optimizer: str):
    """From 8 bits per byte, all a uniform guess can do, to below 2 in seconds."""
    run = start(tiny(file, steps=80, batch=8, optimizer=optimizer, lr=0.05 if optimizer == "adafactor" else 0.01))
    train(run, tmp_path)
    assert run.rows[0].val_bits_per_byte == pytest.approx(8, abs=0.15)
    assert run.rows[-1].val_bits_per_byte < 2


@pytest.mark.parametrize("rounding", ["stochastic", "kahan"])
def test_it_learns_in_bfloat16(file: str, tmp_path: Path, rounding: str):
    """Weights, activations and gradients: half the memory."""
    run = start(tiny(file, steps=80, batch=8, lr=0.05, dtype="bfloat16", options=(f"rounding={rounding}",)))
    assert {p.dtype for p in run.model.parameters()} == {torch.bfloat16}
    train(run, tmp_path)
    assert run.rows[-1].val_bits_per_byte < 2


IN_BFLOAT16 = {"dtype": "bfloat16", "options": ("rounding=stochastic", "seed=3")}


@pytest.mark.parametrize(
    "changes",
    [*({"optimizer": name} for name in optimizers.CHOICES), IN_BFLOAT16],
    ids=lambda value: str([*value.values()]),
)
def test_a_resumed_run_is_the_run_never_stopped(file: str, tmp_path: Path, changes: dict):
    """Bit for bit: parameters, optimizer state, metrics; stopped in the middle of an interval between two rows."""
    config = tiny(file, steps=70, **changes)
    assert config.row_every == 2
    whole = start(config)
    train(whole, tmp_path)

    stopped = start(config)
    with pytest.raises(InterruptedRunError) as caught:
        train(stopped, tmp_path, stop_after(15))
    assert caught.value.step == 15
    _, saved, state = checkpoint.load(caught.value.checkpoint)
    resumed = Run.resume(state, saved, Text.load(saved.files, saved.context))
    train(resumed, tmp_path)

    assert saved == config
    assert measured(resumed.rows) == measured(whole.rows)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    ours, theirs = resumed.optimizer.state_dict(), whole.optimizer.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    torch.testing.assert_close(ours["state"], theirs["state"], rtol=0, atol=0)


def test_a_changed_text_cannot_be_resumed_on(file: str, tmp_path: Path):
    """The result would be of neither text."""
    run = start(tiny(file))
    path = run.save(tmp_path)
    Path(file).write_bytes(Path(file).read_bytes().replace(b"fox", b"cat"))
    _, config, state = checkpoint.load(path)
    with pytest.raises(InputError, match="the text has changed"):
        Run.resume(state, config, Text.load(config.files, config.context))


def test_divergence_stops_the_run_and_keeps_the_last_good_checkpoint(file: str, tmp_path: Path):
    run = start(tiny(file, optimizer="adamw", lr=1e30))
    with pytest.raises(DivergedError, match=r"the loss is (nan|inf) after step \d+: try a lower --lr"):
        train(run, tmp_path)
    _, _, state = checkpoint.load(tmp_path)
    assert all(tensor.isfinite().all() for tensor in state["model"].values())


@pytest.mark.parametrize("broken", ["os.fsync", "pathlib.Path.replace", "pathlib.Path.open"])
def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch):
    """A full disk must not cost the checkpoint that was already there."""
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"old")

    def fail(*arguments) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(broken, fail)
        with pytest.raises(
            SaveError, match=r"cannot write to .*: No space left on device \(what was saved before is wh"
        ):
            checkpoint.write_atomically(path, lambda file: torch.save({"a": torch.zeros(9)}, file))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_metrics_are_never_ahead_of_the_checkpoint(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A disk that fills up between the two files must not leave rows of steps that are lost."""
    run = start(tiny(file))
    run.begin()
    run.save(tmp_path)
    run.advance()
    write = checkpoint.write_atomically

    def full_after_one(path: Path, content) -> None:
        monkeypatch.setattr(checkpoint, "write_atomically", fail)
        write(path, content)

    def fail(path: Path, content) -> None:
        raise SaveError("full")

    monkeypatch.setattr(checkpoint, "write_atomically", full_after_one)
    with pytest.raises(SaveError):
        run.save(tmp_path)
    rows = len((tmp_path / "metrics.csv").read_text().splitlines()) - 1
    assert rows <= len(checkpoint.load(tmp_path)[2]["rows"]) == 2


def test_the_size_limit_counts_the_parameters_there_are():
    """Else it would refuse models that fit, or let through those that do not."""
    model = Transformer(width=64, layers=3, context=8)
    assert parameter_count(64, 3) == sum(parameter.numel() for parameter in model.parameters())


def test_a_sample_ends_when_its_time_is_up():
    """A wide model on a slow machine would keep a finished user waiting."""
    assert generate(Transformer(width=32, layers=1, context=8), b"ab", 10**9, seconds=0.05).startswith(b"ab")


@pytest.mark.parametrize("error", [RecursionError("too deep"), type("OtherError", (RuntimeError,), {})("other")])
def test_only_the_constructor_s_own_words_are_refusals(error: Exception, monkeypatch: pytest.MonkeyPatch):
    """A user told to mend an option that was right looks in the wrong place."""

    def fail(*arguments, **more) -> None:
        raise error

    monkeypatch.setattr(torch.optim.AdamW, "__init__", fail)
    with pytest.raises(type(error)):
        optimizers.build("adamw", [torch.nn.Parameter(torch.zeros(2, 2))], None, ())


@pytest.mark.parametrize("options", [("capturable=True",), ("differentiable=True",)])
def test_options_that_fail_at_the_first_step_are_refused_before_it(options: tuple[str, ...]):
    build("adamw", options=options)  # the constructor lets them pass
    with pytest.raises(InputError, match="optimizer adamw refuses its options: "):
        optimizers.try_out("adamw", None, options)


def test_a_refusal_without_words_is_named(monkeypatch: pytest.MonkeyPatch):
    """An empty message after a colon tells nothing."""

    def fail(*arguments) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.optim.AdamW, "step", fail)
    with pytest.raises(InputError, match="optimizer adamw refuses its options: AssertionError"):
        optimizers.try_out("adamw", None, ())


@pytest.mark.parametrize("name", list(optimizers.CHOICES))
def test_what_works_is_not_refused(name: str):
    optimizers.try_out(name, None, ())
    if optimizers.CHOICES[name].lr_name is not None:
        optimizers.try_out(name, 0.01, ())


def test_an_lr_where_there_is_none_is_refused():
    with pytest.raises(InputError, match=r"optimizer paper takes no --lr, got 0\.01"):
        build("paper", 0.01)


def test_the_adamw_figure_is_what_adamw_keeps(file: str, tmp_path: Path):
    """The comparison in the table is measured here once, and computed ever after."""
    run = start(tiny(file, steps=1, optimizer="adamw"))
    train(run, tmp_path)
    assert optimizers.state_bytes(run.optimizer) == optimizers.adamw_state_bytes(run.model.parameters())


def build(name: str, lr: float | None = None, options: tuple[str, ...] = ()) -> torch.optim.Optimizer:
    return optimizers.build(name, [torch.nn.Parameter(torch.zeros(2, 2))], lr, options)


@pytest.mark.parametrize("name", ["towhee", "transformers"])
def test_relative_steps_last_until_a_learning_rate_is_given(name: str):
    """A scheduler on top of relative steps would do nothing, and --lr without it less than asked."""
    assert optimizers.sets_own_steps(build(name))
    given = build(name, lr=0.01)
    assert not optimizers.sets_own_steps(given)
    assert given.param_groups[0]["lr"] == 0.01
    turned_off = build(name, options=("relative_step=False",))
    assert turned_off.param_groups[0]["lr"] == optimizers.CHOICES[name].lr


def test_options_reach_the_optimizer_as_python_values():
    group = build("adafactor", options=("weight_decay=0.1", "eps=(None, 1e-2)")).param_groups[0]
    assert group["weight_decay"] == 0.1
    assert group["eps"] == (None, 1e-2)
    assert optimizers.parse(["rounding=stochastic", "a=None"]) == {"rounding": "stochastic", "a": None}


def test_metrics_have_a_row_for_each_interval(file: str, tmp_path: Path):
    run = start(tiny(file, steps=12))
    train(run, tmp_path)
    assert [row.step for row in run.rows] == list(range(13))
    assert [row.step for row in run.rows if row.val_bits_per_byte is not None] == [0, 5, 10, 12]
    assert all(math.isfinite(row.train_loss) for row in run.rows[1:])
    assert (tmp_path / "metrics.csv").read_text().count("\n") == 14
