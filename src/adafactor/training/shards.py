"""Checkpoints of a model that is split between processes, by torch.distributed.checkpoint (DCP).

Only tensors go through it. What is a plain value is returned to the caller, and nothing that is read can run code.
"""

import io
import os
import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as read_shards
from torch.distributed.checkpoint.state_dict_saver import save as write_shards
from torch.optim import Optimizer

from .checkpoint import write_through
from .errors import InputError, SaveError

# All that the index of a checkpoint is made of.
INDEX = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.TensorStorageMetadata,
        metadata.TensorProperties,
        metadata.ChunkStorageMetadata,
        metadata.StorageMeta,
        metadata._MEM_FORMAT_ENCODING,
        filesystem._StorageInfo,
        torch.Size,
        torch.serialization._get_layout,
    )
}


class IndexReader(pickle.Unpickler):
    """Reads DCP's index, a pickle, and refuses what is no part of one: a pickle can name any function and call it."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of that name, or one of torch's dtypes."""
        if (module, name) in INDEX:
            return INDEX[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint")


class Reader(FileSystemReader):
    """Reads shards. An index without entries of bytes, the other kind beside tensors, leads to no pickle."""

    def read_metadata(self, *arguments: Any, **more: Any) -> metadata.Metadata:
        """Read the index."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            found = IndexReader(file).load()
        assert isinstance(found, metadata.Metadata)
        found.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return found


class Kept(io.BytesIO):
    """A file in memory that can still be read once it is closed."""

    def close(self) -> None:
        """Do nothing."""


class Files(FileSystem):
    """DCP's file system, with files written in one go: torch.save makes a RuntimeError of a disk's error."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """Open a file of the checkpoint to write."""
        assert mode == "wb"
        content = Kept()
        yield content
        write_through(Path(path), content)


class Writer(FileSystemWriter):
    """Writes shards into a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)  # Files does that
        self.fs = Files()

    def storage_meta(self) -> metadata.StorageMeta:
        """Say nothing of the folder, which is about to be renamed."""
        return metadata.StorageMeta(save_id=self.save_id)


def save(folder: Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Write the tensors of a model and its optimizer, every process its own; all of them call this.

    Returns what is no tensor: lr, of each group (all else of groups follows from the settings that built it), and
    numbers, by parameter and name. Raises SaveError on all processes where any of them cannot write.
    """
    parameters = get_model_state_dict(model)  # first: it also puts away what FSDP2 keeps whole after an evaluation
    # An optimizer without state gets some from get_optimizer_state_dict, by a step that counts as one.
    state = get_optimizer_state_dict(model, optimizer)["state"] if optimizer.state else {}
    by_name: dict[str, dict[str, Any]] = state  # type: ignore[assignment]
    tensors: dict[str, Any] = {"model": parameters, "optimizer": _of_kind(by_name, tensors=True)}
    try:
        write_shards(tensors, storage_writer=Writer(folder), no_dist=not dist.is_initialized())
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, OSError):
                raise SaveError(
                    f"cannot write to {folder.parent}: {failure.strerror} (what was saved before is whole)"
                ) from error
        raise
    return {"lr": [group["lr"] for group in optimizer.param_groups], "numbers": _of_kind(by_name, tensors=False)}


def load(state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Read a checkpoint into a model and its optimizer, however they are split, and however those saved were.

    state: what `save` returned, and the folder. Raises InputError where it is broken, or of another model.
    """
    # Before the first step an optimizer may have no state to restore.
    found = get_optimizer_state_dict(model, optimizer) if state["numbers"] else {"state": {}, "param_groups": []}
    by_name: dict[str, dict[str, Any]] = found["state"]  # type: ignore[assignment]
    tensors: dict[str, Any] = {"model": get_model_state_dict(model), "optimizer": _of_kind(by_name, tensors=True)}
    folder = state["folder"]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which one process means to be
            read_shards(tensors, storage_reader=Reader(folder), no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise InputError(f"{folder} is not a checkpoint of adafactor train, or is not whole") from error
    set_model_state_dict(model, tensors["model"])
    if by_name:
        for name, own in tensors["optimizer"].items():
            by_name[name] = {**own, **state["numbers"].get(name, {})}
        for group, lr in zip(found["param_groups"], state["lr"], strict=True):
            group["lr"] = lr  # type: ignore[index]
        set_optimizer_state_dict(model, optimizer, found)


def distribute(state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> None:
    """Take each process's part of the state dicts of a whole model and its optimizer, which every process has."""
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, state["model"], options=options)
    whole = state["optimizer"]
    if not whole["state"]:
        return
    names = [name for name, _ in model.named_parameters()]
    by_name: dict[str, Any] = {
        "state": {names[index]: own for index, own in whole["state"].items()},
        "param_groups": [
            {**group, "params": [names[index] for index in group["params"]]} for group in whole["param_groups"]
        ],
    }
    set_optimizer_state_dict(model, optimizer, by_name, options=options)
    for group, saved in zip(optimizer.param_groups, whole["param_groups"], strict=True):
        # On its way through there a tuple becomes a list.
        group.update({name: value for name, value in saved.items() if name != "params"})


def _of_kind(state: dict[str, dict[str, Any]], *, tensors: bool) -> dict[str, dict[str, Any]]:
    """Keep of each parameter's state what is a tensor, or what is none."""
    return {
        parameter: {name: value for name, value in own.items() if isinstance(value, Tensor) == tensors}
        for parameter, own in state.items()
    }
