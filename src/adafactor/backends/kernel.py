"""The compiled kernel, csrc/adafactor.cpp, as ctypes sees it: where it is, whether it runs here, and how to call it."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

LIBRARY = Path(__file__).parent.parent / "_cpu.so"
"""What the install makes of csrc/adafactor.cpp where it finds a compiler."""

INTERFACE = 3
"""Of the library's functions and structs; one that was built for another is not called."""

RANK = 8
"""Dims in the C++ struct Counter."""

# Private names of torch, which a version may lack; then there is nothing to ask.
modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)
"""How many modes see PyTorch's operations, such as FakeTensorMode."""
is_zerotensor: Callable[[torch.Tensor], bool] = getattr(torch.Tensor, "_is_zerotensor", lambda x: False)
"""Whether a tensor is a lazy zero, which has no memory."""

_INDEX = ctypes.c_int64
_ADDRESS = ctypes.c_void_p


class Call(ctypes.Structure):
    """What one call works on: the C++ struct Batch."""

    _fields_ = (
        *((name, _INDEX) for name in ("k", "threads", "wide", "momentum", "decay")),
        *((name, _ADDRESS) for name in ("shapes", "tensors", "counters", "scratch", "numbers")),
        ("stride", _INDEX),
        *((name, _ADDRESS) for name in ("still", "hold", "bad", "p2", "g2", "u2")),
    )


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The kernel, with torch's threads.

    Raises:
        OSError: there is none, or it does not load, or torch lends no threads.
    """
    if not LIBRARY.exists():
        raise OSError(
            "it was not built when adafactor was installed; with a C++ compiler (GCC or Clang) installed, reinstall it"
        )
    kernel = ctypes.CDLL(str(LIBRARY))
    interface = getattr(kernel, "adafactor_interface", None)
    if interface is None or interface() != INTERFACE:
        raise OSError("it was built for another version of adafactor; reinstall it")
    try:
        parallel_for = torch_library().torch_parallel_for
    except AttributeError:
        raise OSError(f"torch {torch.__version__} does not export torch_parallel_for") from None
    kernel.adafactor_start.argtypes = [_ADDRESS]
    kernel.adafactor_isa.restype = ctypes.c_char_p
    kernel.adafactor_isa.argtypes = [_INDEX]
    kernel.adafactor_choose.argtypes = [_INDEX]
    kernel.adafactor_count.argtypes = kernel.adafactor_keep.argtypes = [_INDEX, _ADDRESS, _ADDRESS]
    kernel.adafactor_scratch.restype = _INDEX
    kernel.adafactor_start(ctypes.cast(parallel_for, _ADDRESS))
    return kernel


@lru_cache(maxsize=1)
def missing() -> str | None:
    """Why there is no kernel; None where there is one."""
    try:
        library()
    except OSError as error:
        return str(error)
    return None


def instruction_sets() -> list[str]:
    """The instruction sets that the kernel is compiled for and this machine has. The last one is used."""
    names: list[str] = []
    while (name := library().adafactor_isa(len(names))) is not None:
        names.append(name.decode())
    return names


def torch_library() -> ctypes.CDLL:
    """The library of torch that exports its C functions."""
    name = {"win32": "torch_cpu.dll", "darwin": "libtorch_cpu.dylib"}.get(sys.platform, "libtorch_cpu.so")
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
