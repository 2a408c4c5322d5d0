"""A training run: the model, the optimizer and the step count that belong together, and the loop that moves them."""

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from . import checkpoint, optimizers
from .config import DTYPES, Config
from .data import Text, batch, validation_windows
from .errors import DivergedError, InputError, InterruptedRunError
from .metrics import Row, to_csv
from .model import Transformer
from .world import World


@dataclasses.dataclass
class Sums:
    """Sums over steps: of their losses (nats per byte), their seconds, and the seconds in the optimizer."""

    steps: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    optimizer_seconds: float = 0.0

    def add(self, loss: float, seconds: float, optimizer_seconds: float) -> None:
        """Count one step."""
        self.steps += 1
        self.loss += loss
        self.seconds += seconds
        self.optimizer_seconds += optimizer_seconds


class Run:
    """A run that stands between two steps: `step` of them are done.

    Sets PyTorch's thread count and seed to the configuration's. All processes of `world` make it and call its methods
    together. Raises InputError where the optimizer refuses its options, and where the world cannot split the work.
    """

    def __init__(self, config: Config, text: Text, world: World | None = None) -> None:
        self.world = world or World()
        self.world.arrangement.check(config)
        if self.world.any(text.fingerprint != self.world.first(text.fingerprint)):
            raise InputError("the text is not the same for all processes")
        torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.config = config
        self.text = text
        self.model = Transformer(config.width, config.layers, config.context).to(DTYPES[config.dtype])
        self.world.place(self.model)
        self.optimizer = optimizers.build(config.optimizer, self.model.parameters(), config.lr, config.options)
        self.scheduler = None
        if not optimizers.sets_own_steps(self.optimizer):
            self.scheduler = LambdaLR(self.optimizer, config.schedule)
        self.validation = validation_windows(text.validation, config.context)
        self.step = 0
        self.rows: list[Row] = []
        self.since_row = Sums()
        self.total = Sums()
        self.evaluation_seconds = 0.0

    @classmethod
    def resume(cls, state: dict[str, Any], config: Config, text: Text, world: World | None = None) -> "Run":
        """Continue from what `checkpoint.load` returned. Raises InputError if `text` is not the one trained on."""
        with (world or World()).together():
            if text.fingerprint != state["fingerprint"]:
                raise InputError("the text has changed since the checkpoint was written: this run cannot be resumed")
        run = cls(config, text, world)
        run.world.load(state, run.model, run.optimizer)
        if run.scheduler is not None:
            run.scheduler.load_state_dict(state["scheduler"])
        run.step = state["step"]
        run.rows = [Row(**row) for row in state["rows"]]
        run.since_row = Sums(**state["since_row"])
        run.total = Sums(**state["total"])
        run.evaluation_seconds = state["evaluation_seconds"]
        return run

    def values(self) -> dict[str, Any]:
        """Return all that a later process needs beside the model and the optimizer, as plain values."""
        return {
            "config": self.config.to_dict(),
            "fingerprint": self.text.fingerprint,
            "torch": str(torch.__version__),
            "processes": self.world.arrangement.processes,
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "step": self.step,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "since_row": dataclasses.asdict(self.since_row),
            "total": dataclasses.asdict(self.total),
            "evaluation_seconds": self.evaluation_seconds,
        }

    @property
    def seconds(self) -> float:
        """Time spent in steps and evaluations since the run began, stops not counted."""
        return self.total.seconds + self.evaluation_seconds

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.step == self.config.steps

    @property
    def evaluates(self) -> bool:
        """Whether the validation text is due after the step just done."""
        return self.finished or self.step % self.config.evaluate_every == 0

    def advance(self) -> None:
        """Take one step, and add a row to the metrics when one is due. Raises DivergedError on a non-finite loss."""
        began = time.perf_counter()
        config = self.config
        windows = batch(self.text.train, config.context, config.batch, config.seed, self.step)
        loss = self.model.loss(self.world.share(windows))
        mean = self.world.mean(loss.item())
        self._check(mean)
        loss.backward()  # type: ignore[no-untyped-call]
        self.world.wait()
        before = time.perf_counter()
        self.optimizer.step()
        self.world.wait()
        optimizer_seconds = time.perf_counter() - before
        self.optimizer.zero_grad()
        lr = float(self.optimizer.param_groups[0]["lr"])
        if self.scheduler is not None:
            self.scheduler.step()
        self.step += 1
        seconds = time.perf_counter() - began
        for sums in (self.since_row, self.total):
            sums.add(mean, seconds, optimizer_seconds)
        if self.evaluates or self.step % config.row_every == 0:
            self._record(lr)

    def _record(self, lr: float) -> None:
        bits = self.evaluate() if self.evaluates else None
        since = self.since_row
        self.rows.append(
            Row(
                step=self.step,
                lr=lr,
                train_loss=since.loss / since.steps,
                val_bits_per_byte=bits,
                tokens_per_second=self.tokens_per_second(since),
                optimizer_share=since.optimizer_seconds / since.seconds,
                seconds=self.seconds,
            )
        )
        self.since_row = Sums()

    def tokens_per_second(self, sums: Sums) -> float:
        """Return the bytes trained on per second of these steps."""
        return sums.steps * self.config.batch * self.config.context / sums.seconds

    @torch.no_grad()
    def evaluate(self) -> float:
        """Return the bits per byte the model needs for the validation windows: cross-entropy / ln 2."""
        began = time.perf_counter()
        nats = sum(self._loss(part) * len(part) for part in torch.split(self.validation, 32)) / len(self.validation)
        self.evaluation_seconds += time.perf_counter() - began
        self._check(nats)
        return nats / math.log(2)

    def _loss(self, windows: Tensor) -> float:
        return self.world.mean(self.model.loss(self.world.share(windows)).item())

    def _check(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise DivergedError(f"the loss is {loss} after step {self.step}: try a lower --lr")

    def begin(self) -> None:
        """Evaluate the untrained model: the first row of the metrics."""
        bits = self.evaluate()
        self.rows.append(Row(0, None, None, bits, None, None, self.seconds))

    def save(self, folder: Path) -> Path:
        """Write the checkpoint and metrics.csv, each whole or not at all (SaveError); return the checkpoint's path."""
        path = self.world.save(folder, self.model, self.optimizer, self.values())
        # After the checkpoint: if the disk fills up in between, the metrics must not be ahead of it.
        metrics = to_csv(self.rows).encode()
        with self.world.together():
            if self.world.is_first:
                checkpoint.write_atomically(folder / "metrics.csv", lambda file: file.write(metrics))
        return path

    def summary(self, folder: Path) -> dict[str, Any]:
        """Return the result of a finished run, as JSON has it; sizes in bytes, the rest as in the metrics.

        All numbers are of the whole job but state_bytes and adamw_state_bytes, which are of this process.
        """
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return {
            "optimizer": self.config.optimizer,
            "steps": self.step,
            "processes": self.world.arrangement.processes,
            "start_bits_per_byte": self.rows[0].val_bits_per_byte,
            "val_bits_per_byte": self.rows[-1].val_bits_per_byte,
            "parameters": sum(parameter.numel() for parameter in parameters),
            "parameter_bytes": sum(parameter.nbytes for parameter in parameters),
            "state_bytes": optimizers.state_bytes(self.optimizer),
            "adamw_state_bytes": optimizers.adamw_state_bytes(parameters),
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second(self.total),
            "optimizer_share": self.total.optimizer_seconds / self.total.seconds,
            "text_bytes": self.text.size,
            "checkpoint": str(folder / self.world.checkpoint_name),
        }


def train(run: Run, folder: Path, on_step: Callable[[Run], None] = lambda run: None) -> None:
    """Take the run's remaining steps, saving it in `folder` now, at each evaluation and at the end.

    on_step is called after every step. If it raises KeyboardInterrupt the run is saved and InterruptedRunError
    raised: between two steps parameters, optimizer and step count agree, in the middle of one they do not.
    """
    if not run.rows:
        run.begin()
    run.save(folder)
    while not run.finished:
        run.advance()
        if run.evaluates:
            run.save(folder)
        try:
            on_step(run)
        except KeyboardInterrupt:
            raise InterruptedRunError(run.save(folder), run.step) from None
