"""`adafactor memory`: what a model costs each process, in memory and in what a step sends, before there are any."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import prod
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .. import checks
from ..bill import Bill, Mesh, bill
from ..models import MODELS, Weight
from ..training.errors import InputError
from ..training.optimizers import parse
from . import timing
from .arguments import flag, whole
from .errors import leave
from .progress import size
from .report import percent

KINDS = {"R": "R", "C": "C", "V": "V", "m": "momentum", "compensation": "compensation", "step": "step counts"}


def memory(
    shapes: Annotated[
        list[str] | None,
        typer.Argument(metavar="SHAPES", help="Of the tensors, like 4096x4096, 200*64x64, 768 or gpt2."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"{', '.join(MODELS)}. Without it and SHAPES: the first.")
    ] = None,
    ranks: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N", help="Processes, like 64 or 8,64,512; repeatable. Without: one, which has all of it."
        ),
    ] = None,
    tensor_parallel: Annotated[int, whole("Split layers between groups of N processes, and the rest by FSDP2.")] = 1,
    replicas: Annotated[int, whole("Keep N replicas of the model (HSDP), each shared out over the rest.")] = 1,
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="Of parameters and gradients: float32, bfloat16 or float16.")
    ] = "float32",
    communication: Annotated[
        str, typer.Option(metavar="NAME", help="What FSDP2 sends them in: float32, bfloat16 or float16.")
    ] = "bfloat16",
    dialect: Annotated[str, typer.Option(metavar="NAME", help="A module of adafactor.dialects.")] = "torch",
    factor: Annotated[
        str | None, typer.Option(metavar="NAME", help="last, largest or matrix. Without: the dialect's own.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-O", metavar="NAME=VALUE", help="An argument of the optimizer; repeatable."),
    ] = None,
    json_: Annotated[bool, flag("--json", "Print the numbers of bytes as JSON.")] = False,
) -> None:
    """Show what each process keeps and what a step sends, beside AdamW's state and FSDP2's own traffic.

    Where tensors do not come out even, it is that of the first process, which has the most.
    """
    try:
        name, weights = read(shapes, model)
        if shapes and tensor_parallel != 1:
            raise ValueError(f"--tensor-parallel should be 1 with SHAPES, which say no split, got {tensor_parallel}")
        meshes = [Mesh(count, tensor_parallel, replicas) for count in read_ranks(ranks or ["1"])]
        kept = checks.float_dtype("--dtype", dtype)
        sent = checks.float_dtype("--communication", communication)
        options = parse([*(option or ()), *([] if factor is None else [f"factor={factor}"])])
        bills = [bill(weights, mesh, dialect, dtype=kept, communication=sent, **options) for mesh in meshes]
    except (InputError, TypeError, ValueError) as error:
        raise leave(str(error)) from None
    count = sum(prod(weight.shape) for weight in weights)
    if json_:
        facts = {"model": name, "parameters": count, "dtype": dtype, "communication": communication}
        print(json.dumps(facts | {"bills": [as_json(*each) for each in zip(meshes, bills, strict=True)]}))
        return
    console = Console()
    tensors = f"{len(weights)} tensors, {count:,} {dtype} parameters"
    console.print(f"{name}: {tensors}. What each process keeps and sends in a step, at most:", highlight=False)
    table = Table()
    table.add_column("processes")
    for mesh in meshes:
        table.add_column(f"{mesh.ranks:,}", justify="right")
    columns = [rows(each, shared=max(mesh.ranks for mesh in meshes) > 1) for each in bills]
    for what in columns[0]:
        table.add_row(what, *(column[what] for column in columns))
    console.print(table)


def read(shapes: Sequence[str] | None, model: str | None) -> tuple[str, list[Weight]]:
    """Find what a user names: a model, or shapes."""
    if not shapes:
        name = checks.choice("--model", next(iter(MODELS)) if model is None else model, list(MODELS))
        return name, MODELS[name].weights
    if model is not None:
        raise ValueError(f"--model should be left out where SHAPES are given, got {model!r}")
    found = [shape for text in shapes for shape in timing.read_shapes(text)]
    return " ".join(shapes), [Weight("x".join(map(str, shape)), shape) for shape in found]


def read_ranks(texts: Sequence[str]) -> list[int]:
    """Read numbers of processes.

    >>> read_ranks(["8", "64,512"])
    [8, 64, 512]
    """
    try:
        return [int(each) for text in texts for each in text.split(",")]
    except ValueError:
        raise ValueError(f"--ranks should be whole numbers like 64 or 8,64,512, got {','.join(texts)!r}") from None


def rows(found: Bill, *, shared: bool) -> dict[str, str]:
    """Write a bill for people, line by line; without `shared`, what one process keeps. The lines are the model's."""
    lines = {
        "parameters": size(found.parameters),
        "gradients": size(found.parameters),
        "AdamW's state": size(found.adamw),
        "Adafactor's state": size(found.kept),
    }
    lines |= {f"  {KINDS[kind]}": size(count) for kind, count in found.state.items() if count}
    if shared:
        for name, messages in (("round 1", found.first), ("round 2", found.second)):
            lines |= {
                f"{name}, all-reduces": str(len(messages)),
                f"{name}, bytes": size(sum(message.bytes for message in messages)),
            }
        lines |= {
            "sent by the step": size(found.sent),
            "sent by FSDP2": size(found.fsdp),
            "  gathering, twice": size(found.gathers),
            "  reducing": size(found.scatters),
        }
        if found.reduces:
            lines["  between replicas"] = size(found.reduces)
        lines["step / FSDP2"] = "-" if found.share is None else percent(found.share)
    return lines


def as_json(mesh: Mesh, found: Bill) -> dict[str, Any]:
    """Write a bill for scripts, in bytes."""
    return {
        **asdict(mesh),
        "parameters": found.parameters,
        "gradients": found.parameters,
        "adamw_state": found.adamw,
        "state": found.kept,
        "state_by_kind": dict(found.state),
        "round_1": [message._asdict() for message in found.first],
        "round_2": [message._asdict() for message in found.second],
        "sent": found.sent,
        "fsdp_sent": found.fsdp,
        "fsdp_gathers": found.gathers,
        "fsdp_scatters": found.scatters,
        "fsdp_reduces": found.reduces,
        "share": found.share,
    }
