"""`adafactor doctor`: what this installation takes a step with, and why."""

import os
import platform

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch.nn import Parameter

from .. import Adafactor, __version__, backends
from ..backends import kernel
from .errors import leave

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def doctor() -> None:
    """Show versions, threads, the kernel, and what takes a step for each dtype; exit with 1 if it is not the kernel."""
    forced = os.environ.get(backends.VARIABLE)
    try:
        taken = {dtype: backends.why(Adafactor([_parameter(dtype)]))[0] for dtype in DTYPES}
    except (ValueError, RuntimeError) as error:
        raise leave(str(error)) from None
    missing = kernel.missing()
    rows = {
        "adafactor": __version__,
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        "compiled kernel": f"none: {missing}" if missing else str(kernel.LIBRARY),
    }
    if not missing:
        *others, best = kernel.instruction_sets()
        rows["instruction set"] = f"{best} (also here: {', '.join(others)})" if others else best
    if forced:
        rows[backends.VARIABLE] = forced
    well = True
    for dtype, (_, backend, reason) in taken.items():
        off = _error(dtype)
        right = off <= 2 * torch.finfo(dtype).eps
        well = well and right and backend == "cpu"
        result = "right" if right else f"WRONG by {off:.1e}"
        why = f" ({reason})" if reason else ""
        rows[f"a {str(dtype).removeprefix('torch.')} step"] = f"by {backend}{why}, and {result}"
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    Console().print(table)
    raise typer.Exit(0 if well else 1)


def _parameter(dtype: torch.dtype) -> Parameter:
    p = Parameter(torch.linspace(-1, 1, 48 * 40).view(48, 40).to(dtype))
    p.grad = torch.linspace(1, 3, 48 * 40).sin().view(48, 40).to(dtype)
    return p


def _error(dtype: torch.dtype) -> float:
    """How far a step is from the one of plain PyTorch in float64."""
    p = _parameter(dtype)
    assert p.grad is not None
    exact = Parameter(p.detach().double().clone())
    exact.grad = p.grad.double().clone()
    Adafactor([p], lr=0.1, eps=(1e-7, 1e-3)).step()
    forced = os.environ.pop(backends.VARIABLE, None)
    try:
        Adafactor([exact], lr=0.1, eps=(1e-7, 1e-3), fused=False).step()
    finally:
        if forced:
            os.environ[backends.VARIABLE] = forced
    return float((p.detach().double() - exact.detach()).abs().max())
