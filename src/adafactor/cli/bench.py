"""`adafactor bench`: the optimizers side by side on a user's own shapes."""

import json
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from .. import checks
from ..backends import why
from . import timing
from .arguments import flag, number, whole
from .errors import leave, out_of_memory
from .progress import size


def bench(
    shapes: Annotated[
        list[str] | None,
        typer.Argument(metavar="SHAPES", help="Of the tensors, like 4096x4096, 200*64x64, 768 or gpt2."),
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="NAME", help="float32, bfloat16 or float16.")] = "float32",
    threads: Annotated[int | None, whole("CPU threads. Without: PyTorch's choice.")] = None,
    seconds: Annotated[float, number("About how long to measure.")] = 10.0,
    json_: Annotated[bool, flag("--json", "Print the medians as JSON.")] = False,
) -> None:
    """Time a step of this library, of torch's and transformers' Adafactor and of AdamW, in turn, with cold caches."""
    try:
        tensors = [shape for text in shapes or ["4096x4096"] for shape in timing.read_shapes(text)]
        kind = checks.float_dtype("--dtype", dtype)
        if threads is not None and threads < 1:
            raise ValueError(f"--threads should be at least 1, got {threads}")
        if not 0 < seconds < float("inf"):
            raise ValueError(f"--seconds should be a finite number > 0, got {seconds}")
    except ValueError as error:
        raise leave(str(error)) from None
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        params = timing.parameters(tensors, kind)
        found = timing.optimizers(params)
        backends = {taken.backend for taken in why(found[timing.OURS])}  # type: ignore[arg-type]
        results = timing.compare({name: optimizer.step for name, optimizer in found.items()}, seconds)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise leave("not enough memory for these shapes and AdamW's state of twice their size", 1) from None
    count = sum(p.numel() for p in params)
    if json_:
        medians = {name: each._asdict() for name, each in results.items()}
        facts = {"parameters": count, "dtype": dtype, "threads": torch.get_num_threads(), "by": sorted(backends)}
        print(json.dumps(facts | {"optimizers": medians}))
        return
    title = f"{len(params)} tensors, {count:,} {dtype} parameters ({size(count * kind.itemsize)})"
    table = Table(title=f"{title}, {torch.get_num_threads()} threads, by {' and '.join(sorted(backends))}")
    for column in ("optimizer", "ms a step", "times ours", "steps"):
        table.add_column(column, justify="left" if column == "optimizer" else "right")
    for name, (median, ratio, steps) in sorted(results.items(), key=lambda each: each[1].seconds):
        table.add_row(name, f"{median * 1e3:.3g}", f"{ratio:.2f}", str(steps))
    Console().print(table)
