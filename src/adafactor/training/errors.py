"""The ways a training run ends early, each with a message of one line for the user."""

from pathlib import Path


class InputError(ValueError):
    """Something the user gave cannot be used; the message states the rule and the value. Nothing was written."""


class SaveError(RuntimeError):
    """A file of the run could not be written: a full disk, a folder gone. The file it would replace is untouched."""


class DivergedError(RuntimeError):
    """The loss is no longer finite; the last checkpoint written is from before."""


class InterruptedRunError(RuntimeError):
    """The run was asked to stop, and was saved between two steps.

    `checkpoint` is the file to resume from, `step` the number of steps it holds.
    """

    def __init__(self, checkpoint: Path, step: int) -> None:
        super().__init__(f"stopped after step {step}, saved in {checkpoint}")
        self.checkpoint = checkpoint
        self.step = step
