"""A run's folder and its checkpoint: written whole or not at all, read back without running any code from the file."""

import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .config import Config
from .errors import InputError, SaveError

NAME = "checkpoint.pt"
KEYS = {"config", "fingerprint", "torch", "model", "optimizer", "scheduler", "step", "rows"}
KEYS |= {"since_row", "total", "evaluation_seconds"}


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Put what `write` writes in a temporary file next to `path`, then rename it: readers see the old file or the new.

    Raises SaveError where the disk refuses. `write` itself fills memory only: torch.save turns a full disk into a
    RuntimeError that nobody could tell from a fault of its own.
    """
    content = io.BytesIO()
    write(content)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with temporary.open("wb") as file:
                file.write(content.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise SaveError(f"cannot write to {path.parent}: {error.strerror} (what was saved before is whole)") from error


def prepare(folder: Path, resumed: Path | None = None) -> None:
    """Make sure that a run can be saved in `folder`, creating it if need be.

    Raises InputError where it cannot be written to, or holds the checkpoint of another run than the `resumed` one.
    """
    path = folder / NAME
    try:
        if path.exists() and not (resumed is not None and path.samefile(resumed)):
            raise InputError(f"{folder} already holds a run: choose another --out, or go on with --resume {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"cannot write to the folder {folder}: {error.strerror}") from error


def load(path: Path) -> tuple[Path, Config, dict[str, Any]]:
    """Read a checkpoint, given as its file or its run's folder; return the file's path, the settings, the state.

    Raises InputError where it is missing or is not such a checkpoint.
    """
    file = path
    try:
        if path.is_dir():
            file = path / NAME
        state = torch.load(file, weights_only=True)
    except OSError as error:
        raise InputError(f"cannot read the checkpoint {file}: {error.strerror}") from error
    except Exception as error:  # a broken file fails in many ways inside torch.load, none worth telling apart
        raise InputError(f"{file} is not a checkpoint of adafactor train") from error
    if not isinstance(state, dict) or not state.keys() >= KEYS:
        raise InputError(f"{file} is not a checkpoint of adafactor train")
    try:
        config = Config(**state["config"])
    except TypeError as error:
        raise InputError(f"{file} is of another version of adafactor train: {error}") from error
    return file, config, state
