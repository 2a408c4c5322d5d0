"""What a run is: every number and name that decides its result, checked once."""

import dataclasses
import math
import os
from typing import Any

import torch

from . import launch
from .errors import InputError
from .model import HEAD_WIDTH, parameter_count

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# What an ordinary machine's memory holds. Past these, Linux would promise the memory all the same and kill the process
# once it is used, with no word to the user.
MOST_PARAMETERS = 250_000_000
MOST_BATCH_BYTES = 2**20


def default_threads() -> int:
    """Return PyTorch's choice of CPU threads, split between the processes that share the machine.

    OMP_NUM_THREADS, which torchrun sets to 1 where nobody else has, is a choice for each process already.
    """
    threads = torch.get_num_threads()
    return threads if "OMP_NUM_THREADS" in os.environ else max(1, threads // launch.processes_here())


def _within(option: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InputError(f"{option} must be from {least} to {most}, got {value}")


@dataclasses.dataclass(frozen=True)
class Config:
    """The run's settings; the same settings, text, thread count and PyTorch give the same run, bit for bit.

    files: what to train on; none means the Python standard library. lr: None means the optimizer's default.
    options: further optimizer arguments, as texts NAME=VALUE. dtype: of the weights and of what is computed with them.
    Raises InputError for a number out of range and for an unknown name.
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
    dtype: str = "float32"
    threads: int = dataclasses.field(default_factory=default_threads)

    def __post_init__(self) -> None:
        _within("--steps", self.steps, 1, 10**9)
        _within("--batch", self.batch, 1, MOST_BATCH_BYTES // 2)
        _within("--layers", self.layers, 1, 1000)
        _within("--context", self.context, 2, MOST_BATCH_BYTES)
        _within("--threads", self.threads, 1, 1024)
        if self.width < 1 or self.width % HEAD_WIDTH:
            raise InputError(f"--width must be a multiple of {HEAD_WIDTH} (an attention head), got {self.width}")
        parameters = parameter_count(self.width, self.layers)
        if parameters > MOST_PARAMETERS:
            raise InputError(
                f"--width {self.width} and --layers {self.layers} must make at most {MOST_PARAMETERS:,} parameters, "
                f"got {parameters:,}"
            )
        if self.batch * self.context > MOST_BATCH_BYTES:
            raise InputError(
                f"--batch {self.batch} times --context {self.context} must be at most {MOST_BATCH_BYTES:,} bytes, "
                f"got {self.batch * self.context:,}"
            )
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr >= 0):
            raise InputError(f"--lr must be a finite number >= 0, got {self.lr}")
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
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
