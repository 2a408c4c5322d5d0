"""The text: read files as bytes, hold the last tenth out, cut windows."""

import hashlib
import os
import random
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .errors import InputError

HELD_OUT = 10  # one byte in so many, the last ones, is for validation


def standard_library() -> list[Path]:
    """Return the modules at the top level of the running Python's standard library, sorted: about 5 MB of real text."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise InputError(f"no Python source files in {folder}: name the files to train on")
    return files


def read(path: Path) -> bytes:
    """Return the bytes of a regular, non-empty file, or raise InputError saying why not."""
    try:
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is not a regular file: name the files to train on one by one")
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if not content:
        raise InputError(f"{path} is empty")
    return content


@dataclass(frozen=True)
class Text:
    """Files joined into one run of bytes, cut once into training and validation (its last tenth): no byte is in both.

    train, validation: uint8 [bytes]. fingerprint: SHA-256 over the names, sizes and contents.
    """

    source: str
    files: int
    train: Tensor
    validation: Tensor
    fingerprint: str

    @property
    def size(self) -> int:
        """Bytes, training and validation together."""
        return len(self.train) + len(self.validation)

    def __str__(self) -> str:
        return f"{self.size:,} bytes in {self.files} file{'s' * (self.files != 1)}: {self.source}"

    @classmethod
    def load(cls, files: Sequence[str], context: int) -> "Text":
        """Read `files`, or the standard library's where there are none.

        Raises InputError for a file that is missing, empty or unreadable, and where a tenth of the text is
        shorter than one window of context + 1 bytes.
        """
        paths = [Path(file) for file in files] or standard_library()
        contents = [read(path) for path in paths]
        digest = hashlib.sha256()
        for path, content in zip(paths, contents, strict=True):
            digest.update(os.fsencode(path) + b"\n%d\n" % len(content) + content)
        whole = bytearray().join(contents)
        needed = HELD_OUT * (context + 1)
        if len(whole) < needed:
            raise InputError(
                f"the text is too short: a context of {context} needs at least {needed} bytes, got {len(whole)}"
            )
        data = torch.frombuffer(whole, dtype=torch.uint8)
        cut = len(data) - len(data) // HELD_OUT
        source = "the files given" if files else f"the Python standard library in {paths[0].parent}"
        return cls(source, len(paths), data[:cut], data[cut:], digest.hexdigest())


def windows(data: Tensor, starts: Sequence[int], context: int) -> Tensor:
    """Cut the windows of context + 1 bytes that begin at `starts`: int64 [len(starts), context + 1]."""
    return torch.stack([data[start : start + context + 1] for start in starts]).long()


def batch(data: Tensor, context: int, size: int, seed: int, step: int) -> Tensor:
    """Draw the batch of one step: int64 [size, context + 1], a function of (seed, step) alone.

    A resumed run therefore needs no state to see the same data. (Python's generator, seeded by a text: torch's CPU
    generator looks at the low 32 bits of its seed only, too few to hold both numbers.)
    """
    draw = random.Random(f"{seed},{step}")
    return windows(data, [draw.randrange(len(data) - context) for _ in range(size)], context)


def validation_windows(data: Tensor, context: int, tokens: int = 32768) -> Tensor:
    """Spread windows evenly over `data`, about `tokens` predicted bytes in all: int64 [windows, context + 1].

    The same text and context give the same windows. Short data is covered once, without overlap.
    """
    count = max(1, min(tokens, len(data) - 1) // context)
    last = len(data) - context - 1
    return windows(data, [last * i // max(1, count - 1) for i in range(count)], context)
