"""`adafactor train` in several processes: the run is the same, whoever shares it, and one of them speaks.

Real processes of torchrun and gloo, few and tiny; what one process can show is shown in this one.
"""

import ast
import csv
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from adafactor.cli import app
from adafactor.training import checkpoint
from adafactor.training.arrangement import Arrangement
from adafactor.training.config import Config
from adafactor.training.data import Text
from adafactor.training.errors import InputError, InterruptedRunError
from adafactor.training.run import Run
from adafactor.training.run import train as train_run

pytestmark = pytest.mark.skipif(os.name == "nt", reason="gloo under torchrun, and the signals of POSIX")

# Those that take sharded parameters.
OPTIMIZERS = ["adafactor"]

STEPS = 100
TINY = ["--batch", "4", "--width", "64", "--layers", "1", "--context", "16", "--threads", "1"]
# Sums in another order differ in float32's last bits, and the steps in between make more of it.
CLOSE = {"rel": 1e-3, "abs": 1e-5}


@pytest.fixture(autouse=True)
def _keep_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def adafactor(*arguments: str):
    return CliRunner().invoke(app, ["train", *arguments], prog_name="adafactor", catch_exceptions=False)


def torchrun(processes: int, *arguments: str, program: tuple[str, ...] = ("-m", "adafactor"), interrupt: bool = False):
    """Run a job to its end; with `interrupt`, which comes with Ctrl-C at step 30.

    torchrun ends its processes when it is terminated itself, so that none outlives a test that failed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    child = subprocess.Popen(
        [*command, *program, "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    seen = []
    try:
        if interrupt:
            for line in child.stderr:
                seen.append(line)
                if line.startswith("step 30/"):
                    break
            child.send_signal(signal.SIGINT)
        out, errors = child.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        child.terminate()
        try:
            child.communicate(timeout=60)
        finally:
            child.kill()
        raise
    return subprocess.CompletedProcess(command, child.returncode, out, "".join(seen) + errors)


def said(job: subprocess.CompletedProcess) -> list[str]:
    """The lines of the command itself, without torchrun's."""
    return [line for line in job.stderr.splitlines() if line.startswith(("adafactor: ", "step "))]


def losses(folder: Path) -> list[float]:
    """Everything measured of the model, in order."""
    with (folder / "metrics.csv").open(newline="") as file:
        return [
            float(row[name])
            for row in csv.DictReader(file)
            for name in ("step", "lr", "train_loss", "val_bits_per_byte")
            if row[name]
        ]


def write_text(folder: Path) -> str:
    path = folder / "text"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 60)
    return str(path)


@pytest.fixture(scope="module", params=OPTIMIZERS)
def arguments(request, tmp_path_factory) -> list[str]:
    text = write_text(tmp_path_factory.mktemp("text"))
    return [text, *TINY, "--steps", str(STEPS), "--optimizer", request.param]


@pytest.fixture(scope="module")
def whole(arguments, tmp_path_factory) -> Path:
    """The run of one process, never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert adafactor(*arguments, "--out", str(folder), "--quiet").exit_code == 0
    return folder


@pytest.fixture(scope="module")
def stopped(arguments, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """The run of two processes, stopped on its way."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    return folder, torchrun(2, *arguments, "--fsdp", "--out", str(folder), interrupt=True)


def test_ctrl_c_stops_all_at_one_step_and_one_of_them_speaks(stopped):
    """The signal reaches the processes at different steps: one that stopped alone would leave the other waiting."""
    folder, job = stopped
    training, *before, stopping = said(job)[:5]
    *rest, end = said(job)[5:]
    assert training.startswith("adafactor: training on 2,640 bytes in 1 file")
    assert [line.split(":")[0] for line in before] == ["step 10/100", "step 20/100", "step 30/100"]
    assert stopping == "adafactor: stopping after this step; again to stop at once"
    assert all(line.startswith("step ") for line in rest)
    _, _, state = checkpoint.load(folder)
    assert 30 <= state["step"] < STEPS
    again = f"adafactor train --resume {folder}"
    assert end == f"adafactor: stopped after step {state['step']}, saved in {folder}/checkpoint; to go on: {again}"
    assert job.stdout == ""
    assert {path.name for path in folder.iterdir()} == {"checkpoint", "metrics.csv"}


def test_two_processes_have_the_curve_of_one(stopped, whole):
    folder, _ = stopped
    ours = losses(folder)
    assert len(ours) > 30
    assert ours == pytest.approx(losses(whole)[: len(ours)], **CLOSE)


def test_one_process_goes_on_where_two_stopped(stopped, whole, tmp_path):
    folder = shutil.copytree(stopped[0], tmp_path / "run")
    result = adafactor("--resume", str(folder), "--quiet")
    assert (result.exit_code, result.stderr) == (0, "")
    assert losses(folder) == pytest.approx(losses(whole), **CLOSE)
    assert {path.name for path in folder.iterdir()} == {"checkpoint.pt", "metrics.csv", "curve.png"}
    ours, theirs = (checkpoint.load(each)[2]["model"] for each in (folder, whole))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-2, atol=1e-3)


def test_tensor_parallel_processes_go_on_where_sharded_ones_stopped(stopped, whole, tmp_path):
    """And the result is one line, with the numbers of the whole job."""
    folder = shutil.copytree(stopped[0], tmp_path / "run")
    job = torchrun(2, "--resume", str(folder), "--tensor-parallel", "2", "--json", "--quiet")
    assert job.returncode == 0
    assert said(job) == []
    assert losses(folder) == pytest.approx(losses(whole), **CLOSE)
    assert job.stdout.count("\n") == 1
    ours = json.loads(job.stdout)
    theirs = json.loads(adafactor("--resume", str(whole), "--json").stdout)
    assert ours["processes"] == 2
    assert ours["checkpoint"] == str(folder / "checkpoint")
    for name in ("steps", "parameters", "parameter_bytes", "text_bytes", "optimizer"):
        assert ours[name] == theirs[name]
    assert ours["adamw_state_bytes"] < theirs["adamw_state_bytes"]


def test_four_processes_split_both_ways_go_on_where_one_stopped(arguments, whole, tmp_path):
    """And the sample, for which all of them are needed."""
    folder = tmp_path / "run"

    def stop(run: Run) -> None:
        if run.step == 90:
            raise KeyboardInterrupt

    text, optimizer = arguments[0], arguments[-1]
    config = Config(files=(text,), steps=STEPS, batch=4, width=64, layers=1, context=16, optimizer=optimizer, threads=1)
    checkpoint.prepare(folder)
    with pytest.raises(InterruptedRunError):
        train_run(Run(config, Text.load(config.files, config.context)), folder, stop)
    job = torchrun(4, "--resume", str(folder), "--fsdp", "--tensor-parallel", "2")
    assert job.returncode == 0
    assert losses(folder) == pytest.approx(losses(whole), **CLOSE)
    assert [line.split(":")[0] for line in said(job)] == ["adafactor", "step 100/100"]
    assert job.stdout.count("The model writes:") == 1
    assert "in the first of 4 processes" in " ".join(job.stdout.split())
    assert {path.name for path in folder.iterdir()} == {"checkpoint", "metrics.csv", "curve.png"}


def test_a_refusal_is_said_once(tmp_path):
    """Every process meets it; and the first to leave must not have the one that speaks ended."""
    out = tmp_path / "run"
    job = torchrun(2, write_text(tmp_path), *TINY, "--batch", "3", "--fsdp", "--out", str(out))
    assert job.returncode != 0
    assert said(job) == ["adafactor: --batch must be a multiple of 2, one share for each process, got 3"]
    assert "exitcode  : 2 " in job.stderr
    assert not out.exists()


FULL = """
import os
from adafactor.__main__ import main
from adafactor.training import shards

write = shards.write_through
saved = []


def fail(path, content):
    saved.append(path)
    if len(saved) == 2:
        raise OSError(28, "No space left on device")
    write(path, content)


if os.environ["RANK"] == "1":
    shards.write_through = fail
main()
"""


def test_a_full_disk_of_one_process_ends_all_and_keeps_the_checkpoint(tmp_path):
    """Half of a new checkpoint and half of an old one would be none."""
    program, folder = tmp_path / "full.py", tmp_path / "run"
    program.write_text(FULL)
    arguments = (write_text(tmp_path), *TINY, "--optimizer", "adamw", "--fsdp", "--out", str(folder), "--steps", "9")
    job = torchrun(2, *arguments, "--quiet", program=(str(program),))
    assert job.returncode != 0
    assert said(job) == [
        f"adafactor: cannot write to {folder}: No space left on device (what was saved before is whole)"
    ]
    assert {path.name for path in folder.iterdir()} == {"checkpoint", "metrics.csv"}
    assert checkpoint.load(folder)[2]["step"] == 0
    assert adafactor("--resume", str(folder), "--quiet").exit_code == 0


@pytest.mark.parametrize(
    ("processes", "fsdp", "tensor", "message"),
    [
        (2, False, 1, "2 processes need --fsdp, or --tensor-parallel 2, to share the model"),
        (4, False, 2, "4 processes need --fsdp, or --tensor-parallel 4, to share the model"),
        (1, True, 2, "--tensor-parallel 2 needs a multiple of 2 processes, got 1: start it with torchrun --nproc"),
        (3, True, 2, "--tensor-parallel 2 needs a multiple of 2 processes, got 3"),
        (2, True, 0, "--tensor-parallel must be at least 1, got 0"),
        (4, True, 1, "--batch must be a multiple of 4, one share for each process, got 2"),
        (8, True, 2, "--batch must be a multiple of 4, one share for each 2 processes, got 2"),
        (4, False, 4, "--tensor-parallel must divide the 2 attention heads of --width 64, got 4"),
    ],
)
def test_what_does_not_come_out_even_is_refused(processes: int, fsdp: bool, tensor: int, message: str):
    """Silently dropped windows, or a process without heads, would be another run."""
    with pytest.raises(InputError) as caught:
        Arrangement(processes, fsdp, tensor).check(Config(batch=2, width=64))
    assert str(caught.value).startswith(message)


@pytest.fixture
def alone(tmp_path) -> Path:
    """A run of FSDP's with one process, in this one: it keeps the checkpoint that several would."""
    folder = tmp_path / "run"
    arguments = (write_text(tmp_path), *TINY, "--steps", "10", "--optimizer", "adamw", "--out", str(folder))
    result = adafactor(*arguments, "--fsdp", "--quiet")
    assert (result.exit_code, result.output) == (0, "")
    return folder


def refused(folder: Path) -> str:
    result = adafactor("--resume", str(folder), "--quiet")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_a_process_alone_may_use_fsdp(alone, tmp_path):
    """To find out what is wrong, without torchrun; its curve is the plain one."""
    plain = tmp_path / "plain"
    arguments = (str(tmp_path / "text"), *TINY, "--steps", "10", "--optimizer", "adamw", "--out", str(plain))
    assert adafactor(*arguments, "--quiet").exit_code == 0
    assert losses(alone) == pytest.approx(losses(plain), **CLOSE)
    assert {path.name for path in alone.iterdir()} == {"checkpoint", "metrics.csv", "curve.png"}
    _, config, state = checkpoint.load(alone / "checkpoint")
    assert config == checkpoint.load(plain)[1]
    assert state["step"] == 10


def test_divergence_under_fsdp_is_one_clear_line(tmp_path):
    folder = tmp_path / "run"
    arguments = (write_text(tmp_path), *TINY, "--optimizer", "adamw", "--lr", "1e30", "--out", str(folder))
    result = adafactor(*arguments, "--fsdp", "--quiet")
    assert result.exit_code == 1
    assert f"try a lower --lr (saved before: {folder}/checkpoint)" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("place", ["run", "run/checkpoint"])
def test_a_run_of_several_is_never_overwritten_by_another(alone, place: str):
    result = adafactor(str(alone.parent / "text"), *TINY, "--out", str(alone))
    assert result.exit_code == 2
    assert "already holds a run" in result.stderr
    again = adafactor("--resume", str(alone.parent / place), "--quiet")
    assert (again.exit_code, again.stderr) == (0, "adafactor: this run is finished: all 10 steps are done\n")


def test_of_two_checkpoints_the_later_counts(alone, tmp_path):
    """A process killed between writing the one and removing the other leaves both."""
    text = str(tmp_path / "text")
    config = Config(files=(text,), steps=10, batch=4, width=64, layers=1, context=16, optimizer="adamw", threads=1)
    run = Run(config, Text.load(config.files, config.context))
    run.begin()
    plain = run.save(tmp_path)
    shutil.copy(plain, alone / "checkpoint.pt")
    assert checkpoint.load(alone)[0] == alone / "checkpoint"
    assert adafactor("--resume", str(alone), "--fsdp", "--quiet").exit_code == 0
    assert {path.name for path in alone.iterdir()} == {"checkpoint", "metrics.csv", "curve.png"}


def test_a_checkpoint_set_aside_is_found(alone):
    """A process killed between the two renames leaves it there."""
    (alone / "checkpoint").rename(alone / checkpoint.ASIDE)
    assert checkpoint.load(alone)[2]["step"] == 10
    assert adafactor("--resume", str(alone), "--fsdp", "--quiet").exit_code == 0
    assert {path.name for path in alone.iterdir()} == {"checkpoint", "metrics.csv", "curve.png"}


def test_a_failed_save_leaves_the_old_folder_and_no_litter(alone, monkeypatch: pytest.MonkeyPatch):
    def fail(path, content) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_through", fail)  # run.json, the last file of all
        result = adafactor("--resume", str(alone), "--fsdp", "--quiet")
    assert result.exit_code == 1
    assert "No space left on device (what was saved before is whole)" in result.stderr
    assert {path.name for path in alone.iterdir()} == {"checkpoint", "metrics.csv", "curve.png"}
    assert adafactor("--resume", str(alone), "--fsdp", "--quiet").exit_code == 0


@pytest.mark.parametrize("file", ["run.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("content", [None, b"", b"{}", b"cut off"])
def test_a_broken_folder_is_one_clear_line(alone, file: str, content: bytes | None):
    path = alone / "checkpoint" / file
    path.unlink() if content is None else path.write_bytes(content)
    assert "checkpoint" in refused(alone)


class Evil:
    """Runs a function when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_reading_a_folder_runs_no_code_from_it(alone, tmp_path):
    """A checkpoint from elsewhere is data."""
    (alone / "checkpoint" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "touched")))
    assert "is not a checkpoint of adafactor train" in refused(alone)
    assert not (tmp_path / "touched").exists()


def test_an_optimizer_that_takes_no_shards_is_refused_in_one_line(tmp_path):
    """At the first step it would fail with a traceback, in every process."""
    result = adafactor(write_text(tmp_path), *TINY, "--optimizer", "torch", "--fsdp", "--out", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert result.stderr.startswith("adafactor: optimizer torch takes no step of shards with these options: ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_one_process_loads_nothing_distributed():
    """What several processes need is a second of imports."""
    package = Path(checkpoint.__file__).parents[1]
    for path in [*package.glob("training/*.py"), *package.glob("cli/*.py")]:
        names = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{name.name}" for name in node.names}
        if path.stem not in ("parallel", "sharding", "shards"):
            words = {word for name in names for word in name.split(".")}
            assert not words & {"distributed", "parallel", "sharding", "shards"}, path
