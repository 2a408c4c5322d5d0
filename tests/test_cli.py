"""The command line, as a user meets it."""

import csv
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from adafactor import __main__, __version__
from adafactor.backends import kernel
from adafactor.cli import app, progress, report
from adafactor.cli.report import printable
from adafactor.cli.signals import StopSignals
from adafactor.training.metrics import Row
from adafactor.training.run import Run

TINY = ["--batch", "4", "--width", "32", "--layers", "1", "--context", "16", "--threads", "1"]
posix = pytest.mark.skipif(os.name == "nt", reason="signals and shells of POSIX")
TIMINGS = {"tokens_per_second", "optimizer_share", "seconds"}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Run in an empty folder, SIGINT not ignored even where the suite's is; give PyTorch its threads back."""
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.chdir(tmp_path)
    Path("text").write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 60)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    signal.signal(signal.SIGINT, interrupt)


def adafactor(*arguments: str):
    return CliRunner().invoke(app, list(arguments), prog_name="adafactor", catch_exceptions=False)


def train(*arguments: str, steps: int = 10):
    return adafactor("train", "text", *TINY, "--steps", str(steps), *arguments)


def process(*arguments: str, **how) -> subprocess.Popen:
    command = [sys.executable, "-m", "adafactor", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)


def shell(script: str) -> subprocess.CompletedProcess:
    """Run a shell script in which `$train ... $tiny` is a short run."""
    tiny = " ".join([*TINY, "--steps", "10"])
    values = {"train": f"{sys.executable} -m adafactor train text", "tiny": tiny, "python": sys.executable}
    return subprocess.run(["bash", "-c", script], env={**os.environ, **values}, capture_output=True, text=True)


def rows(folder: str) -> list[dict[str, str]]:
    with open(Path(folder) / "metrics.csv", newline="") as file:
        return [{key: value for key, value in row.items() if key not in TIMINGS} for row in csv.DictReader(file)]


def parameters(folder: str) -> dict[str, torch.Tensor]:
    return torch.load(Path(folder) / "checkpoint.pt", weights_only=True)["model"]


def test_json_is_the_only_line_on_stdout():
    """Scripts read it with `tail -n 1` or whole; both must work."""
    result = train("--out", "run", "--json")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    summary = json.loads(result.stdout)
    assert summary["steps"] == 10
    assert summary["start_bits_per_byte"] == pytest.approx(8, abs=0.15)
    assert summary["val_bits_per_byte"] < summary["start_bits_per_byte"]
    assert 0 < summary["state_bytes"] < summary["parameter_bytes"] / 10 < summary["adamw_state_bytes"] / 10
    assert Path(summary["checkpoint"]).is_file()


def test_quiet_is_quiet():
    result = train("--out", "run", "--quiet")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")


def test_a_run_leaves_its_three_files_well_formed():
    assert train("--out", "run", "--quiet").exit_code == 0
    assert {path.name for path in Path("run").iterdir()} == {"checkpoint.pt", "metrics.csv", "curve.png"}
    assert Path("run/curve.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert [int(row["step"]) for row in rows("run")] == list(range(11))
    assert all(tensor.isfinite().all() for tensor in parameters("run").values())


def test_without_a_terminal_there_are_plain_lines():
    """Logs and pipes get one line at each evaluation, no escape codes; the table and the sample go to stdout."""
    result = train("--out", "run")
    lines = result.stderr.splitlines()
    assert lines[0].startswith("adafactor: training on 2,640 bytes in 1 file: the files given")
    assert [line.split(":")[0] for line in lines[1:]] == [f"step {step}/10" for step in (5, 10)]
    assert all(
        "bits/byte" in line and "tokens/s" in line and "optimizer" in line and "state" in line for line in lines[1:]
    )
    assert "\x1b" not in result.output
    for words in ("validation", "optimizer state", "AdamW would keep", "% of the parameters", "The model writes:"):
        assert words in result.stdout


def test_the_default_folder_is_named_after_the_optimizer():
    assert train("--optimizer", "towhee", "--quiet", steps=1).exit_code == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name.startswith("towhee-")


BAD = {
    "no steps": (["--steps", "0"], "--steps must be from 1 to 1000000000, got 0"),
    "no batch": (["--batch", "-3"], "--batch must be from 1 to 524288, got -3"),
    "no layers": (["--layers", "0"], "--layers must be from 1 to 1000, got 0"),
    "no context": (["--context", "1"], "--context must be from 2 to 1048576, got 1"),
    "no threads": (["--threads", "0"], "--threads must be from 1 to 1024, got 0"),
    "endless steps": (["--steps", str(10**10)], "--steps must be from 1 to 1000000000, got 10000000000"),
    "endless threads": (["--threads", "100000"], "--threads must be from 1 to 1024, got 100000"),
    "endless batch": (["--batch", "999999999999"], "--batch must be from 1 to 524288, got 999999999999"),
    "endless layers": (["--layers", str(10**9)], "--layers must be from 1 to 1000, got 1000000000"),
    "large batch": (["--batch", "65537"], "--batch 65537 times --context 16 must be at most 1,048,576 bytes, got 1,04"),
    "huge width": (["--width", "3200000"], "--width 3200000 and --layers 1 must make at most 250,000,000 parameters"),
    "no number": (["--steps", "x"], "Invalid value for '--steps': must be a whole number, got 'x'"),
    "no rate": (["--lr", "fast"], "Invalid value for '--lr': must be a number, got 'fast'"),
    "no value": (["--steps"], "--steps"),
    "no such flag": (["--bogus"], "No such option: --bogus"),
    "empty out": (["--out", ""], "Invalid value for '--out': must name a file or folder, got ''"),
    "empty file name": ([""], "Invalid value for 'FILES': must name a file or folder, got ''"),
    "empty resume": (["--resume", ""], "Invalid value for '--resume': must name a file or folder, got ''"),
    "odd width": (["--width", "50"], "--width must be a multiple of 32 (an attention head), got 50"),
    "negative lr": (["--lr", "-0.5"], "--lr must be a finite number >= 0, got -0.5"),
    "lr nan": (["--lr", "nan"], "--lr must be a finite number >= 0, got nan"),
    "negative seed": (["--seed", "-1"], "--seed must be from 0 to 4294967295, got -1"),
    "unknown dtype": (["--dtype", "float8"], "--dtype must be one of float32, bfloat16, got 'float8'"),
    "unknown optimizer": (["--optimizer", "sgd"], "--optimizer must be one of adafactor, towhee, transformers, paper"),
    "no option name": (["-O", "beta1"], "--option must be NAME=VALUE, got 'beta1'"),
    "unknown option": (["-O", "beta9=1"], "optimizer adafactor has no option 'beta9'; it has beta2_decay, eps, d"),
    "lr as an option": (["-O", "lr=1"], "the learning rate is given with --lr"),
    "refused option": (["--optimizer", "adamw", "-O", "eps=-1"], "optimizer adamw refuses its options: Invalid eps"),
    "refused type": (["--optimizer", "adamw", "-O", "betas=3"], "optimizer adamw refuses its options: "),
    "refused at the first step": (["--optimizer", "adamw", "-O", "capturable=True"], "refuses its options: If captur"),
    "option twice": (["-O", "d=1", "-O", "d=2"], "--option d is given twice: the second time as 'd=2'"),
    "missing file": (["missing"], "missing: No such file or directory"),
    "empty file": (["empty"], "empty is empty"),
    "a folder": (["folder"], "folder is not a regular file"),
    "too short": (["--context", "300"], "a context of 300 needs at least 3010 bytes, got 2640"),
    "file as folder": (["--out", "text"], "cannot write to the folder text: "),
    "out inside a file": (["--out", "text/run"], "cannot write to the folder text/run: Not a directory"),
    "no checkpoint": (["--resume", "folder"], "cannot read the checkpoint folder/checkpoint.pt: No such file"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_clear_line(case: str):
    """No traceback, the value and the rule, exit 2, and nothing half-written."""
    arguments, message = BAD[case]
    Path("empty").touch()
    Path("folder").mkdir()
    before = sorted(Path().rglob("*"))
    resume = "--resume" in arguments
    result = adafactor("train", *arguments) if resume else train("--out", "run", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("adafactor: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert sorted(Path().rglob("*")) == before


def test_an_unreadable_file_is_one_clear_line(monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    result = train("--out", "run")
    assert result.exit_code == 2
    assert "text: Permission denied" in result.stderr
    assert not Path("run").exists()


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04 cut off"])
def test_a_broken_checkpoint_is_one_clear_line(content: bytes):
    Path("checkpoint.pt").write_bytes(content)
    result = adafactor("train", "--resume", "checkpoint.pt")
    assert result.exit_code == 2
    assert result.stderr == "adafactor: checkpoint.pt is not a checkpoint of adafactor train\n"


def test_divergence_is_one_clear_line():
    result = train("--out", "run", "--quiet", "--optimizer", "adamw", "--lr", "1e30")
    assert result.exit_code == 1
    assert "try a lower --lr (saved before: run/checkpoint.pt)" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_run_is_never_overwritten_by_another():
    """Two runs into one folder: the second is refused, the first's checkpoint untouched."""
    assert train("--out", "run", "--quiet").exit_code == 0
    before = Path("run/checkpoint.pt").read_bytes()
    result = train("--out", "run", "--quiet", "--seed", "1")
    assert result.exit_code == 2
    assert "run already holds a run" in result.stderr
    assert Path("run/checkpoint.pt").read_bytes() == before


def test_a_finished_run_resumed_says_so_and_gives_the_same_result():
    first = train("--out", "run", "--json", "--quiet")
    again = adafactor("train", "--resume", "run", "--json")
    assert again.exit_code == 0
    assert "finished: all 10 steps are done" in again.stderr
    assert again.stdout == first.stdout


@pytest.mark.parametrize(
    "change", [["--steps", "20"], ["--lr", "1"], ["-O", "d=2"], ["--seed", "0"], ["--dtype", "bfloat16"], ["text"]]
)
def test_resuming_refuses_what_would_change_the_run(change: list[str]):
    """Ignoring it silently would be worse."""
    assert train("--out", "run", "--quiet").exit_code == 0
    result = adafactor("train", *change, "--resume", "run")
    assert result.exit_code == 2
    assert "cannot change a run that is resumed" in result.stderr


@posix
def test_ctrl_c_saves_and_resuming_ends_as_if_never_stopped():
    """The whole promise, with a real process and a real signal."""
    steps = 600
    child = process("train", "text", *TINY, "--steps", str(steps), "--out", "stopped")
    for line in child.stderr:
        if line.startswith("step "):  # the first evaluation: training has begun
            break
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "adafactor: stopping after this step; again to stop at once\n" in errors
    message = errors.splitlines()[-1]
    assert message.startswith("adafactor: stopped after step ")
    assert message.endswith("saved in stopped/checkpoint.pt; to go on: adafactor train --resume stopped")
    assert 0 < int(rows("stopped")[-1]["step"]) < steps

    assert adafactor("train", "--resume", "stopped", "--quiet").exit_code == 0
    assert train("--out", "whole", "--quiet", steps=steps).exit_code == 0
    assert rows("stopped") == rows("whole")
    whole = parameters("whole")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in parameters("stopped").items())


def test_a_resumed_run_can_go_elsewhere():
    assert train("--out", "run", "--quiet").exit_code == 0
    assert adafactor("train", "--resume", "run/checkpoint.pt", "--out", "copy", "--quiet").exit_code == 0
    assert {path.name for path in Path("copy").iterdir()} == {"checkpoint.pt", "metrics.csv", "curve.png"}


def test_a_checkpoint_under_another_name_does_not_replace_its_neighbour():
    assert train("--out", "run", "--quiet").exit_code == 0
    shutil.copy("run/checkpoint.pt", "run/older.pt")
    result = adafactor("train", "--resume", "run/older.pt", "--quiet")
    assert result.exit_code == 2
    assert "run already holds a run" in result.stderr


@posix
@pytest.mark.parametrize("module", ["typer", "matplotlib.figure", "torch._dynamo"])
def test_ctrl_c_before_the_run_is_one_line(module: str):
    """The first seconds go into imports, which would swallow a KeyboardInterrupt or blame something else for it."""
    code = f"""
import signal, sys
from adafactor import __main__

class Interrupt:
    def find_spec(name, *rest):
        if name == "{module}":
            signal.raise_signal(signal.SIGINT)

__main__.find_spec = lambda name: name  # else it would be main's look for the package that is interrupted
sys.meta_path.insert(0, Interrupt)
__main__.main()
"""
    child = subprocess.run([sys.executable, "-c", code, "train", "text", *TINY], capture_output=True, text=True)
    assert (child.returncode, child.stdout) == (130, "")
    assert child.stderr == "adafactor: stopped before the run began\n"


@pytest.mark.parametrize("number", StopSignals.SIGNALS)
def test_the_first_signal_asks_and_the_second_insists(number: int):
    """A first Ctrl-C must not cut a step in half; a second must not be ignored."""
    before = signal.getsignal(number)
    with StopSignals() as stop:
        signal.raise_signal(number)
        assert stop.received == number
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", StopSignals.SIGNALS)
def test_an_ignored_signal_stays_ignored(number: int):
    """A run under nohup must outlive its terminal."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(number)
            signal.raise_signal(number)
            assert stop.received is None
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", StopSignals.SIGNALS)
def test_a_second_signal_says_what_is_lost(number: int, monkeypatch: pytest.MonkeyPatch):
    """Whichever signal, and whatever the run is in the middle of."""

    def advance(run: Run) -> None:
        signal.raise_signal(number)
        signal.raise_signal(number)

    monkeypatch.setattr(Run, "advance", advance)
    result = train("--out", "run", "--quiet")
    assert result.exit_code == 128 + number
    assert result.stderr == "adafactor: stopped at once, nothing saved since the last checkpoint\n"


@pytest.mark.parametrize("number", StopSignals.SIGNALS)
def test_a_signal_after_the_last_step_loses_nothing(number: int, monkeypatch: pytest.MonkeyPatch):
    """Who stops the drawing of the curve must not be told that the run is lost."""
    monkeypatch.setattr(report, "draw_curve", lambda run, path: signal.raise_signal(number))
    result = train("--out", "run", "--quiet")
    assert result.exit_code == 128 + number
    assert result.stderr == "adafactor: stopped at once, the whole run is saved in run\n"
    assert int(rows("run")[-1]["step"]) == 10


@posix
def test_a_full_disk_is_one_clear_line():
    """No traceback, and metrics never ahead of the checkpoint. A limit on file sizes fails as a full disk does."""
    result = shell("ulimit -f 40; $train $tiny --out run --quiet")
    assert result.returncode == 1
    assert result.stderr == "adafactor: cannot write to run: File too large (what was saved before is whole)\n"
    assert list(Path("run").iterdir()) == []


@posix
@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        ("$train $tiny --out run --json >&-", 1, "adafactor: cannot write to standard output: it is closed\n"),
        ("$train $tiny --out run --quiet >&- 2>&-", 0, ""),
        ("$python -m adafactor --help | true; exit ${PIPESTATUS[0]}", 1, ""),
        ("$train $tiny --out run --json 2>/dev/null | true; exit ${PIPESTATUS[0]}", 1, ""),
        ("$train $tiny --out run 2>&1 | true; exit ${PIPESTATUS[0]}", 1, ""),
    ],
)
def test_a_closed_output_is_no_traceback(command: str, status: int, message: str):
    """And no word about the run's folder, which is whole; who piped into `head` wants no word at all."""
    result = shell(command)
    assert result.returncode == status
    assert result.stderr.endswith(message)
    assert "Traceback" not in result.stderr
    assert "Exception" not in result.stderr
    if "2>&1" not in command and "--out" in command:  # progress that nobody can see ends a run where it stands
        assert Path("run/checkpoint.pt").is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_standard_output_is_one_clear_line():
    """The run is whole, and the user is sent to the right place."""
    result = shell("$train $tiny --out run > /dev/full")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "adafactor: cannot write to standard output: No space left on device"
    assert "Traceback" not in result.stderr
    assert Path("run/curve.png").is_file()


@pytest.mark.parametrize("failure", [lambda *sizes: torch.empty(2**62, dtype=torch.uint8), lambda *sizes: bytes(2**62)])
def test_too_little_memory_is_one_clear_line(failure, monkeypatch: pytest.MonkeyPatch):
    """Sizes within the bounds can still be too much for a machine."""
    monkeypatch.setattr("adafactor.training.run.Transformer", failure)
    result = train("--out", "run")
    assert result.exit_code == 2
    assert result.stderr == "adafactor: out of memory: try a smaller --width, --layers, --batch or --context\n"
    assert not Path("run").exists()


def test_an_unknown_command_is_one_clear_line():
    result = adafactor("trian")
    assert result.exit_code == 2
    assert result.stderr.startswith("adafactor: No such command 'trian'")
    assert result.stderr.count("\n") == 1


def test_help_and_version_are_asked_for_and_no_error():
    for arguments, words in (["--help"], "train"), (["train", "--help"], "--resume"), (["--version"], __version__):
        result = adafactor(*arguments)
        assert (result.exit_code, result.stderr) == (0, "")
        assert words in result.stdout


def test_the_live_lines_fit_the_terminal():
    """A line that wraps makes a live display climb up the screen."""
    row = Row(10**6, 0.1, 9 * math.log(2), 9.123, 98_765.0, 0.5, 1e6)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    optimizer.state[optimizer.param_groups[0]["params"][0]] = {"kept": torch.empty(99_900_000 // 4, device="meta")}
    run = SimpleNamespace(rows=[row], step=10**6, config=SimpleNamespace(steps=10**6), optimizer=optimizer)
    assert len(progress.status(run)) <= 80
    for width in (40, 80):
        console = Console(file=io.StringIO(), width=width, force_terminal=True)
        live = progress.Bar(run, console)
        live.status = progress.status(run)
        assert [len(console.render_lines(part)) for part in live.get_renderables()] == [1, 1]


def test_the_live_bar_says_that_it_will_stop():
    """Else a user in the middle of a long step presses again, and loses it."""
    run = SimpleNamespace(rows=[], step=0, config=SimpleNamespace(steps=10))
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    with progress.bar(run, console) as view:
        view.stopping()
    assert progress.STOPPING in console.file.getvalue()


@pytest.mark.parametrize(
    ("share", "text"), [(2.0, "200%"), (2.0001, "200%"), (0.25, "25%"), (0.0123, "1.2%"), (0.000123, "0.012%")]
)
def test_shares_are_written_for_people(share: float, text: str):
    assert report.percent(share) == text


def test_the_sample_cannot_drive_the_terminal():
    """A model can write any byte; a terminal must not obey it."""
    assert printable(b"a\n\x1b[2Jb\r\x07\xff", "utf-8") == "a\n\\x1b[2Jb\\r\\x07\ufffd"
    assert printable("é\u202e".encode(), "ascii") == "\\xe9\\u202e"


def test_python_m_works():
    child = process("--version")
    out, errors = child.communicate(timeout=60)
    assert (child.returncode, out, errors) == (0, f"{__version__}\n", "")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """`pip install adafactor` brings no command line; the command says what to install."""
    monkeypatch.setattr(__main__, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as left:
        __main__.main()
    assert left.value.code == 2
    assert capsys.readouterr().err == 'adafactor\'s commands need the cli extra: pip install "adafactor[cli]"\n'


def test_the_doctor_says_what_takes_a_step(monkeypatch):
    """Whoever wonders why a step is slow gets the answer, and a script an exit status."""
    monkeypatch.setenv("COLUMNS", "200")
    well = adafactor("doctor")
    expected = "by reference (there is no compiled kernel: " if kernel.missing() else "by cpu, and right"
    assert all(f"{dtype} step" in well.stdout for dtype in ("float32", "bfloat16", "float16", "float64"))
    assert well.stdout.count(expected) == 4
    assert well.exit_code == (1 if kernel.missing() else 0)
    monkeypatch.setenv("ADAFACTOR_BACKEND", "reference")
    forced = adafactor("doctor")
    assert forced.exit_code == 1
    assert forced.stdout.count("by reference, and right") == 4
    assert os.environ["ADAFACTOR_BACKEND"] == "reference"


def test_the_doctor_refuses_an_unknown_backend(monkeypatch):
    monkeypatch.setenv("ADAFACTOR_BACKEND", "gpu")
    result = adafactor("doctor")
    assert result.exit_code == 2
    assert "should be one of reference, foreach, cpu, got 'gpu'" in result.stderr


def test_the_doctor_finds_a_kernel_that_computes_wrongly(monkeypatch):
    if kernel.missing():
        pytest.skip("there is no kernel")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("adafactor.backends.cpu.apply", lambda batch, u2: None)
    result = adafactor("doctor")
    assert result.exit_code == 1
    assert result.stdout.count("WRONG by") == 4


def test_bench_compares_on_the_users_shapes():
    result = adafactor("bench", "8x6", "2*5", "--seconds", "0.01", "--dtype", "bfloat16", "--threads", "1", "--json")
    found = json.loads(result.stdout)
    assert found["parameters"] == 58
    assert found["threads"] == 1
    assert {"adafactor", "torch Adafactor", "torch AdamW fused", "transformers Adafactor"} == set(found["optimizers"])
    for each in found["optimizers"].values():
        assert each["seconds"] > 0
        assert each["ratio"] > 0
        assert each["steps"] >= 7
    assert found["optimizers"]["adafactor"]["ratio"] == 1
    shown = adafactor("bench", "8x6", "--seconds", "0.01").stdout
    assert "48 float32 parameters" in shown
    assert "torch AdamW fused" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["8y6"], "a shape should be like 4096x4096, 200*64x64, 768 or gpt2, got '8y6'"),
        (["0x4"], "a shape should have at least one element, got '0x4'"),
        (["00*4"], "a shape should have at least one element, got '00*4'"),
        (["4", "--dtype", "float64"], "--dtype should be one of float32, float16, bfloat16, got 'float64'"),
        (["4", "--threads", "0"], "--threads should be at least 1, got 0"),
        (["4", "--seconds", "0"], "--seconds should be a finite number > 0, got 0.0"),
        (["4", "--seconds", "soon"], "must be a number, got 'soon'"),
    ],
)
def test_bench_refuses_in_one_line(arguments, message):
    result = adafactor("bench", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_memory_shows_what_each_process_keeps_and_sends(monkeypatch):
    """Before anybody rents them: in a table, or in bytes."""
    monkeypatch.setenv("COLUMNS", "200")
    shown = adafactor("memory", "--ranks", "8,64", "--ranks", "512").stdout
    assert shown.startswith("llama-2-7b: 291 tensors, 6,738,415,616 float32 parameters.")
    found = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in shown.splitlines() if "│" in line}
    assert [text.strip() for text in found["AdamW's state"]] == ["6.7 GB", "842.3 MB", "106.4 MB"]
    assert [text.strip() for text in found["round 1, all-reduces"]] == ["1"] * 3
    assert found["round 2, bytes"] == found["step counts"]
    arguments = "--ranks", "16", "--tensor-parallel", "2", "--replicas", "4", "-O", "max_grad_norm=1.0", "--json"
    (result,) = json.loads(adafactor("memory", "--model", "llama-2-70b", *arguments).stdout)["bills"]
    assert {result[name] for name in ("ranks", "tensor_parallel", "replicas")} == {16, 2, 4}
    assert [message["processes"] for message in result["round_1"]] == [2, 2]
    assert sum(result["state_by_kind"].values()) == result["state"] < result["adamw_state"] / 100
    assert result["share"] == result["sent"] / result["fsdp_sent"]
    assert result["fsdp_sent"] == result["fsdp_gathers"] + result["fsdp_scatters"] + result["fsdp_reduces"]
    assert "between replicas" in adafactor("memory", "--ranks", "16", "--replicas", "4").stdout


def test_memory_takes_the_users_shapes():
    """One process keeps all and sends nothing: no word about that."""
    shown = adafactor("memory", "8x6", "2*5").stdout
    assert shown.startswith("8x6 2*5: 3 tensors, 58 float32 parameters.")
    assert "232 B" in shown
    assert "round" not in shown
    (result,) = json.loads(adafactor("memory", "8x6", "--factor", "matrix", "--json").stdout)["bills"]
    assert result["state_by_kind"] == {"R": 32, "C": 24, "V": 0, "m": 0, "compensation": 0, "step": 4}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt-5"], "--model should be one of llama-2-7b, llama-2-70b, llama-3.1-405b, got 'gpt-5'"),
        (["8x6", "--model", "llama-2-7b"], "--model should be left out where SHAPES are given, got 'llama-2-7b'"),
        (["8y6"], "a shape should be like 4096x4096, 200*64x64, 768 or gpt2, got '8y6'"),
        (["--ranks", "8,few"], "--ranks should be whole numbers like 64 or 8,64,512, got '8,few'"),
        (["--ranks", "0"], "ranks should be a whole number >= 1, got 0"),
        (["--ranks", "12", "--replicas", "8"], "a multiple of tensor_parallel x replicas = 8, got 12"),
        (["--ranks", "64", "--tensor-parallel", "64"], "tensor_parallel should divide the 32 heads of model.layers.0"),
        (["8x6", "--ranks", "2", "--tensor-parallel", "2"], "--tensor-parallel should be 1 with SHAPES"),
        (["--dtype", "int8"], "--dtype should be one of float32, float16, bfloat16, got 'int8'"),
        (["--communication", "int8"], "--communication should be one of float32, float16, bfloat16, got 'int8'"),
        (["--dialect", "adam"], "dialect should be one of big_vision, optax, "),
        (["--factor", "rows"], "factor should be one of last, largest, matrix, got 'rows'"),
        (["-O", "momentum"], "--option must be NAME=VALUE, got 'momentum'"),
        (["-O", "momentum=0.9"], "unexpected keyword argument 'momentum'"),
    ],
)
def test_memory_refuses_in_one_line(arguments, message):
    result = adafactor("memory", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (13_200, "13.2 kB"),
        (6_800_000, "6.8 MB"),
        (10**9, "1.0 GB"),
        (3 * 10**15, "3000.0 TB"),
    ],
)
def test_bytes_are_written_for_people(count: int, text: str):
    assert progress.size(count) == text
