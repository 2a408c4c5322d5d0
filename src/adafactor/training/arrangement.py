"""How the processes of a job share a model and its batch, and what cannot be shared so."""

import dataclasses

from .config import Config
from .errors import InputError
from .model import HEAD_WIDTH


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """Where a run takes place, which decides nothing of its result: `data` groups of `tensor` processes each.

    Each group takes its share of the windows of a batch. The processes of a group split the heads and the perceptron of
    every block between them. With `fsdp` the groups also split every parameter. Raises InputError where the processes
    do not come out even.
    """

    processes: int = 1
    fsdp: bool = False
    tensor: int = 1

    def __post_init__(self) -> None:
        if self.tensor < 1:
            raise InputError(f"--tensor-parallel must be at least 1, got {self.tensor}")
        if self.processes % self.tensor:
            raise InputError(
                f"--tensor-parallel {self.tensor} needs a multiple of {self.tensor} processes, got {self.processes}: "
                f"start it with torchrun --nproc-per-node {self.tensor} -m adafactor train ..."
            )
        if self.data > 1 and not self.fsdp:
            raise InputError(
                f"{self.processes} processes need --fsdp, or --tensor-parallel {self.processes}, to share the model"
            )

    @property
    def data(self) -> int:
        """Groups of processes, each with its own share of the batch."""
        return self.processes // self.tensor

    @property
    def alone(self) -> bool:
        """Whether one process has everything whole."""
        return self.processes == 1 and not self.fsdp

    def check(self, config: Config) -> None:
        """Raise InputError where a run of this configuration cannot be split evenly."""
        if config.batch % self.data:
            raise InputError(
                f"--batch must be a multiple of {self.data}, one share for each "
                f"{'process' if self.tensor == 1 else f'{self.tensor} processes'}, got {config.batch}"
            )
        heads = config.width // HEAD_WIDTH
        if heads % self.tensor:
            raise InputError(
                f"--tensor-parallel must divide the {heads} attention head{'s' * (heads != 1)} of --width "
                f"{config.width}, got {self.tensor}"
            )
