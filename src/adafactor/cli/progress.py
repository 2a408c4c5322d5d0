"""What is shown while a run trains, all of it on stderr: a live bar on a terminal, plain lines elsewhere."""

import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..training.optimizers import state_bytes
from ..training.run import Run

STOPPING = "stopping after this step; again to stop at once"


class View(NamedTuple):
    """What shows a run: `step` is called after each step, `stopping` by the handler of a first Ctrl-C."""

    step: Callable[[], None]
    stopping: Callable[[], None]


def size(count: int) -> str:
    """Write a number of bytes for people: 999 B, 13.2 kB, 6.8 MB, 1.2 TB."""
    if count < 1000:
        return f"{count} B"
    units = ("kB", "MB", "GB", "TB")
    power = next((i for i in range(1, len(units)) if count < 1000 ** (i + 1)), len(units))
    return f"{count / 1000**power:.1f} {units[power - 1]}"


def status(run: Run) -> str:
    """Say where a run stands, in 80 columns: losses, bytes a second, the optimizer's share of the time, its state."""
    row = run.rows[-1]
    parts = []
    if row.train_loss is not None:
        parts.append(f"loss {row.train_loss / math.log(2):.3f}")
    validated = [row.val_bits_per_byte for row in run.rows if row.val_bits_per_byte is not None]
    parts.append(f"val {validated[-1]:.3f} bits/byte")
    if row.tokens_per_second is not None and row.optimizer_share is not None:
        parts.append(f"{row.tokens_per_second:,.0f} tokens/s")
        parts.append(f"optimizer {row.optimizer_share:.1%}, state {size(state_bytes(run.optimizer))}")
    return ", ".join(parts)


@contextmanager
def lines(run: Run) -> Iterator[View]:
    """Show one plain line at each evaluation."""

    def step() -> None:
        if run.evaluates:
            print(f"step {run.step}/{run.config.steps}: {status(run)}", file=sys.stderr, flush=True)

    def stopping() -> None:
        # Straight to the descriptor: the signal may have come in the middle of a print, which cannot be entered twice.
        with suppress(OSError):
            os.write(2, f"adafactor: {STOPPING}\n".encode())

    yield View(step, stopping)


class Bar(Progress):
    """A progress bar with the run's status on the line below."""

    def __init__(self, run: Run, console: Console) -> None:
        self.status = ""
        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:.0f}%"),
            TimeRemainingColumn(compact=True),
        )
        super().__init__(*columns, console=console, transient=True, expand=True)
        self.task = self.add_task("", total=run.config.steps, completed=run.step)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the bar and the line."""
        yield from super().get_renderables()
        yield Text(self.status, no_wrap=True, overflow="ellipsis")


@contextmanager
def bar(run: Run, console: Console) -> Iterator[View]:
    """Show a live bar on a terminal; its numbers are renewed with each row of the metrics."""
    with Bar(run, console) as progress:

        def step() -> None:
            progress.status = status(run) if run.rows else ""
            progress.update(progress.task, completed=run.step)

        def stopping() -> None:
            progress.status = STOPPING

        yield View(step, stopping)


@contextmanager
def nothing() -> Iterator[View]:
    """Show nothing."""
    yield View(lambda: None, lambda: None)
