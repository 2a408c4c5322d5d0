"""What a finished run leaves behind: the table and the sample on stdout, the picture in its folder."""

import math
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..training.checkpoint import write_atomically
from ..training.model import generate
from ..training.run import Run
from .progress import size

SAMPLE_BYTES = 300
SAMPLE_SECONDS = 2.5  # a wide model writes fewer bytes, rather than keep a finished user waiting


def percent(share: float) -> str:
    """Write a share for people: 200%, 25%, 1.2%, 0.012%."""
    if share < 0.001:
        return f"{100 * share:.2g}%"
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"


def printable(content: bytes, encoding: str) -> str:
    r"""Decode bytes for a terminal of this encoding: what it cannot show, control characters above all, as \x1b."""
    text = content.decode(errors="replace")
    safe = "".join(
        character if character.isprintable() or character == "\n" else ascii(character)[1:-1] for character in text
    )
    return safe.encode(encoding, "backslashreplace").decode(encoding)


def draw_curve(run: Run, path: Path) -> None:
    """Draw training and validation loss, in bits per byte over steps, as a PNG."""
    figure = Figure(figsize=(7, 4.2), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    train = [(row.step, row.train_loss / math.log(2)) for row in run.rows if row.train_loss is not None]
    validation = [(row.step, row.val_bits_per_byte) for row in run.rows if row.val_bits_per_byte is not None]
    axes.plot(
        *zip(*train, strict=True),
        color="tab:blue",
        alpha=0.7,
        linewidth=1.3,
        label="training, mean since the last point",
    )
    axes.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", markersize=4, label="validation")
    step, bits = validation[-1]
    axes.annotate(f"{bits:.2f}", (step, bits), xytext=(0, 7), textcoords="offset points", ha="center")
    axes.set(
        xlabel="step", ylabel="bits per byte", title=f"{run.config.optimizer}, {run.config.steps} steps", ylim=(0, None)
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    write_atomically(path, lambda file: figure.savefig(file, format="png"))


def show(run: Run, folder: Path, console: Console) -> None:
    """Print the table of results and a sample of what the model writes; of several processes, the first prints."""
    if run.world.is_first:
        console.print(results(run, folder))
    sample = generate(run.model, b"\n", SAMPLE_BYTES, seconds=SAMPLE_SECONDS, agree=run.world.any)
    if run.world.is_first:
        console.print(Text("\nThe model writes:", style="bold"))
        console.print(Text(printable(sample, console.encoding)), soft_wrap=True)


def results(run: Run, folder: Path) -> Table:
    """Make the table of results."""
    result = run.summary(folder)
    parameter_bytes = result["parameter_bytes"]
    arrangement = run.world.arrangement
    where = "" if arrangement.alone else f", in the first of {arrangement.processes} processes"

    def state(count: int) -> str:
        return f"{size(count)} ({percent(count / parameter_bytes)} of the parameters{where})"

    table = Table(show_header=False, title=f"{run.config.optimizer}: {run.step} steps", title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in (
        ("text", str(run.text)),
        ("validation", f"{result['start_bits_per_byte']:.3f} -> {result['val_bits_per_byte']:.3f} bits per byte"),
        ("parameters", f"{result['parameters']:,} ({size(parameter_bytes)})"),
        ("optimizer state", state(result["state_bytes"])),
        ("AdamW would keep", state(result["adamw_state_bytes"])),
        ("time", f"{run.seconds:.0f} s at {result['tokens_per_second']:,.0f} tokens/s"),
        ("in the optimizer", f"{result['optimizer_share']:.1%} of the steps' time"),
        ("written", f"{run.world.checkpoint_name}, metrics.csv and curve.png in {folder}"),
    ):
        table.add_row(name, Text(value))
    return table
