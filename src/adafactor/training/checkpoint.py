"""A run's folder and its checkpoint: written whole or not at all, read back without running any code from the file.

One process writes a file, `checkpoint.pt`; several write a folder, `checkpoint`: their shards, and `run.json`. Any
number of processes reads either.
"""

import io
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch

from .config import Config
from .errors import InputError, SaveError

NAME = "checkpoint.pt"
FOLDER = "checkpoint"
VALUES = "run.json"
ASIDE = f".{FOLDER}.old"  # where a folder is while the next one takes its place
KEYS = {"config", "fingerprint", "torch", "scheduler", "step", "rows"}
KEYS |= {"since_row", "total", "evaluation_seconds"}
TENSORS = {"model", "optimizer"}  # of a file
REST = {"lr", "numbers"}  # of a folder: what of the optimizer is no tensor


@contextmanager
def _saving(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SaveError(f"cannot write to {folder}: {error.strerror} (what was saved before is whole)") from error


def write_through(path: Path, content: io.BytesIO) -> None:
    """Write a file and wait until it is on the disk. Raises OSError."""
    with path.open("wb") as file:
        file.write(content.getbuffer())
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Put what `write` writes in a temporary file next to `path`, then rename it: readers see the old file or the new.

    Raises SaveError where the disk refuses. `write` itself fills memory only: torch.save turns a full disk into a
    RuntimeError that nobody could tell from a fault of its own.
    """
    content = io.BytesIO()
    write(content)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with _saving(path.parent):
        try:
            write_through(temporary, content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def clear(folder: Path) -> None:
    """Make an empty folder, whatever an earlier process left there. Raises SaveError where the disk refuses."""
    with _saving(folder.parent):
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir()


def put_in_place(fresh: Path, path: Path, values: dict[str, Any]) -> None:
    """Complete the folder `fresh` with the run's plain values, and give it the name `path`.

    Raises SaveError where the disk refuses. A folder cannot replace another in one go: in between the old one is at
    `ASIDE`, where `load` looks too.
    """
    aside = path.with_name(ASIDE)
    with _saving(path.parent):
        write_through(fresh / VALUES, io.BytesIO(json.dumps(values).encode()))
        if path.exists():
            _remove(aside)
            path.rename(aside)
        fresh.rename(path)
        _remove(aside)


def leave_only(path: Path) -> None:
    """Remove the run's other checkpoint beside `path`, of the other kind: it is older. Raises SaveError."""
    with _saving(path.parent):
        for other in _saved(path.parent):
            if other != path:
                _remove(other)


def _remove(path: Path) -> None:
    if path.is_dir():
        # Not half a checkpoint under a name that promises a whole one.
        path = path.rename(path.with_name(f".{FOLDER}.gone"))
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _saved(folder: Path) -> list[Path]:
    """The checkpoints in a run's folder: one, or two where a process was killed between writing and tidying up."""
    return [path for path in (folder / name for name in (NAME, FOLDER, ASIDE)) if path.exists()]


def prepare(folder: Path, resumed: Path | None = None) -> None:
    """Make sure that a run can be saved in `folder`, creating it if need be.

    Raises InputError where it cannot be written to, or holds the checkpoint of another run than the `resumed` one.
    """
    try:
        saved = _saved(folder)
        if saved and not (resumed is not None and any(path.samefile(resumed) for path in saved)):
            raise InputError(f"{folder} already holds a run: choose another --out, or go on with --resume {folder}")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"cannot write to the folder {folder}: {error.strerror}") from error


def load(path: Path) -> tuple[Path, Config, dict[str, Any]]:
    """Read a checkpoint, given as itself or as its run's folder; return its path, the settings, the state.

    The state of several processes has no tensors yet: it has `folder`, where they are. Raises InputError where the
    checkpoint is missing or is not one.
    """
    if path.is_dir() and not (path / VALUES).exists():
        found = _saved(path) or [path / NAME]
    else:
        found = [path]
    read = [(file, _read(file)) for file in found]
    file, state = max(read, key=lambda each: each[1]["step"])
    try:
        config = Config(**{name: _as_given(value) for name, value in state["config"].items()})
    except (TypeError, AttributeError) as error:
        raise InputError(f"{file} is of another version of adafactor train: {error}") from error
    return file, config, state


def _read(file: Path) -> dict[str, Any]:
    needed = KEYS | TENSORS
    try:
        if file.is_dir():
            state = json.loads((file / VALUES).read_bytes())
            needed = KEYS | REST
        else:
            state = torch.load(file, weights_only=True)
    except OSError as error:
        raise InputError(f"cannot read the checkpoint {file}: {error.strerror}") from error
    except Exception as error:  # a broken file fails in many ways inside torch.load, none worth telling apart
        raise InputError(f"{file} is not a checkpoint of adafactor train") from error
    if not isinstance(state, dict) or not state.keys() >= needed:
        raise InputError(f"{file} is not a checkpoint of adafactor train")
    return {**state, "folder": file} if file.is_dir() else state


def _as_given(value: Any) -> Any:
    """A setting as it was before JSON, which has no tuples."""
    return tuple(value) if isinstance(value, list) else value
