"""What a run is: every number and name that decides its result, checked once."""

import dataclasses
import math
from typing import Any

import torch

from .errors import InputError
from .model import HEAD_WIDTH


def _at_least(option: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{option} must be at least {least}, got {value}")


@dataclasses.dataclass(frozen=True)
class Config:
    """The run's settings; the same settings, text, thread count and PyTorch give the same run, bit for bit.

    files: what to train on; none means the Python standard library. lr: None means the optimizer's default.
    options: further optimizer arguments, as texts NAME=VALUE. Raises InputError for a number out of range.
    """

    files: tuple[str, ...] = ()
    steps: int = 800
    batch: int = 16
    width: int = 128
    layers: int = 4
    context: int = 128
    optimizer: str = "adafactor"
    lr: float | None = None
    options: tuple[str, ...] = ()
    seed: int = 0
    threads: int = dataclasses.field(default_factory=torch.get_num_threads)

    def __post_init__(self) -> None:
        _at_least("--steps", self.steps, 1)
        _at_least("--batch", self.batch, 1)
        _at_least("--layers", self.layers, 1)
        _at_least("--context", self.context, 2)
        _at_least("--threads", self.threads, 1)
        if self.width < 1 or self.width % HEAD_WIDTH:
            raise InputError(f"--width must be a multiple of {HEAD_WIDTH} (an attention head), got {self.width}")
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr >= 0):
            raise InputError(f"--lr must be a finite number >= 0, got {self.lr}")
        if not 0 <= self.seed < 2**32:
            raise InputError(f"--seed must be from 0 to {2**32 - 1}, got {self.seed}")

    @property
    def row_every(self) -> int:
        """Steps between two rows of the metrics: about 50 rows a run."""
        return math.ceil(self.steps / 50)

    @property
    def evaluate_every(self) -> int:
        """Steps between two evaluations, each followed by a checkpoint: every fifth row."""
        return 5 * self.row_every

    @property
    def warmup(self) -> int:
        """Steps of linear warm-up."""
        return min(30, max(1, self.steps // 10))

    def schedule(self, step: int) -> float:
        """Return the share of the peak learning rate that step 0, 1, ... uses: linear warm-up times a cosine to 0."""
        return min((step + 1) / self.warmup, 1.0) * (1 + math.cos(math.pi * step / self.steps)) / 2

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain values."""
        return dataclasses.asdict(self)
