"""`adafactor train`: the command's arguments, and the order of events."""

import dataclasses
import json
import shlex
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ..training import checkpoint, launch
from ..training.arrangement import Arrangement
from ..training.config import DTYPES, Config, default_threads
from ..training.data import Text
from ..training.errors import DivergedError, InputError, InterruptedRunError, SaveError
from ..training.optimizers import CHOICES, try_out
from ..training.run import Run
from ..training.run import train as train_run
from ..training.world import World
from . import progress, report
from .arguments import flag, number, path, place, whole
from .errors import leave, out_of_memory, say
from .signals import StopSignals

WITH_RESUME = {"resume", "threads", "fsdp", "tensor_parallel", "out", "json_", "quiet"}
OPTIMIZERS = "; ".join(f"{name}: {choice.about}" for name, choice in CHOICES.items())
RATES = ", ".join(f"{choice.lr:g} for {name}" for name, choice in CHOICES.items() if not choice.relative)


def train(
    context_: typer.Context,
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            parser=path,
            metavar="FILES",
            help="Text to learn, any bytes, joined in this order. Without: Python's standard library.",
        ),
    ] = None,
    steps: Annotated[int, whole("Training steps.")] = Config.steps,
    batch: Annotated[int, whole("Windows of text a step.")] = Config.batch,
    width: Annotated[int, whole("Width of the model, a multiple of 32.")] = Config.width,
    layers: Annotated[int, whole("Transformer blocks.")] = Config.layers,
    context: Annotated[int, whole("Bytes the model sees at once.")] = Config.context,
    optimizer: Annotated[str, typer.Option(metavar="NAME", help=OPTIMIZERS)] = Config.optimizer,
    lr: Annotated[
        float | None, number(f"Peak learning rate. Without: {RATES}; the others take relative steps.")
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-O", metavar="NAME=VALUE", help="An argument of the optimizer; repeatable."),
    ] = None,
    seed: Annotated[int, whole("Of the model's start and the order of the text.")] = Config.seed,
    dtype: Annotated[
        str,
        typer.Option(metavar="NAME", help=f"Of the weights and of what is computed with them: {', '.join(DTYPES)}."),
    ] = Config.dtype,
    threads: Annotated[int | None, whole("CPU threads of each process. Without: PyTorch's choice.")] = None,
    fsdp: Annotated[bool, flag("--fsdp", "Split the parameters and the batch between the processes (FSDP2).")] = False,
    tensor_parallel: Annotated[
        int, whole("Split heads and perceptrons between groups of N processes; with --fsdp, the rest between groups.")
    ] = 1,
    out: Annotated[Path | None, place("Folder for the run's files. Without: runs/OPTIMIZER-DATE-TIME.")] = None,
    resume: Annotated[Path | None, place("Go on with an interrupted run, given its folder or its checkpoint.")] = None,
    json_: Annotated[bool, flag("--json", "Print the result as one line of JSON.")] = False,
    quiet: Annotated[bool, flag("--quiet", "Show no progress, table or sample.")] = False,
) -> None:
    """Train a small byte-level transformer and see the optimizer at work.

    The last tenth of the text is held out for validation.
    The run's folder gets checkpoint.pt, metrics.csv and curve.png.
    Ctrl-C saves; --resume then goes on as if never stopped, to the same numbers.
    With torchrun --nproc-per-node N -m adafactor train, --fsdp or --tensor-parallel N, several processes share the run.
    Resuming may share it otherwise.
    """
    stop = StopSignals()
    try:
        arrangement = Arrangement(launch.processes(), fsdp, tensor_parallel)
        if resume is None:
            config = Config(
                files=absolute(files or ()),
                steps=steps,
                batch=batch,
                width=width,
                layers=layers,
                context=context,
                optimizer=optimizer,
                lr=lr,
                options=tuple(option or ()),
                seed=seed,
                dtype=dtype,
                **({} if threads is None else {"threads": threads}),
            )
            arrangement.check(config)
        else:
            refuse_changes(context_)
        with open_world(arrangement) as world:
            run, folder = start(config, out, world) if resume is None else go_on(resume, threads, out, world)
            with stop:
                work(run, folder, stop, quiet=quiet)
                stop.at_once = True  # all is saved
                with world.together():
                    if world.is_first:
                        report.draw_curve(run, folder / "curve.png")
                if json_ and world.is_first:
                    print(json.dumps(run.summary(folder)))
                elif not json_ and not quiet:
                    report.show(run, folder, Console())
    except InputError as error:
        raise leave(str(error)) from None
    except SaveError as error:
        raise leave(str(error), 1) from None
    except DivergedError as error:
        raise leave(f"{error} (saved before: {folder / run.world.checkpoint_name})", 1) from None
    except InterruptedRunError as error:
        again = f"adafactor train --resume {shlex.quote(str(folder))}"
        raise leave(f"{error}; to go on: {again}", stop.status) from None
    except KeyboardInterrupt:
        if not launch.is_first():
            raise typer.Exit(stop.status) from None
        saved = f"the whole run is saved in {folder}" if stop.at_once else "nothing saved since the last checkpoint"
        raise leave(f"stopped at once, {saved}", stop.status) from None
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise leave("out of memory: try a smaller --width, --layers, --batch or --context") from None


def absolute(files: Iterable[Path]) -> tuple[str, ...]:
    """Name the files so that a run can be resumed from elsewhere."""
    try:
        return tuple(str(file.absolute()) for file in files)
    except OSError as error:  # the shell's current folder was deleted
        raise InputError(f"cannot find the current folder: {error.strerror}") from error


def open_world(arrangement: Arrangement) -> World:
    """Join the processes that share the run."""
    if arrangement.alone:
        return World()
    from ..training.parallel import Parallel  # brings torch.distributed, which one process has no use for

    return Parallel(arrangement)


def start(config: Config, out: Path | None, world: World) -> tuple[Run, Path]:
    """Set a new run up; the folder comes last, so that a refused run leaves none behind."""
    with world.together():
        try_out(config.optimizer, config.lr, config.options, DTYPES[config.dtype], world.split)
        text = Text.load(config.files, config.context)
    run = Run(config, text, world)
    folder = out or Path("runs") / f"{config.optimizer}-{world.first(datetime.now()):%Y%m%d-%H%M%S}"
    with world.together():
        checkpoint.prepare(folder)
    return run, folder


def go_on(resume: Path, threads: int | None, out: Path | None, world: World) -> tuple[Run, Path]:
    """Set a run up from its checkpoint."""
    with world.together():
        file, config, state = checkpoint.load(resume)
        text = Text.load(config.files, config.context)
    if threads is None and state.get("processes", 1) != world.arrangement.processes:
        threads = min(config.threads, default_threads())  # each may have fewer cores now
    if threads is not None:
        config = dataclasses.replace(config, threads=threads)
    if state["torch"] != torch.__version__:
        say(f"the checkpoint is from PyTorch {state['torch']}, this is {torch.__version__}: the last bits may differ")
    run = Run.resume(state, config, text, world)
    folder = out or file.parent
    with world.together():
        checkpoint.prepare(folder, resumed=file)
    if run.finished:
        say(f"this run is finished: all {run.step} steps are done")
    return run, folder


def refuse_changes(context: typer.Context) -> None:
    """Raise InputError where an argument that belongs to the run itself comes together with --resume."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in WITH_RESUME and source is not None and source.name != "DEFAULT":
            what = "FILES" if name == "files" else f"--{name}"
            raise InputError(
                f"{what} cannot change a run that is resumed: only --threads, --fsdp, --tensor-parallel, --out, "
                "--json, --quiet can"
            )


def work(run: Run, folder: Path, stop: StopSignals, *, quiet: bool) -> None:
    """Train, showing what suits where stderr goes."""
    console = Console(stderr=True)
    if quiet or run.finished or not run.world.is_first:
        view = progress.nothing()
    else:
        count = run.world.arrangement.processes
        shared = f", shared by {count} process{'es' if count > 1 else ''}" if run.world.is_sharded else ""
        start = f" from step {run.step} on" if run.step else ""
        say(f"training{start} on {run.text}{shared}")
        view = progress.bar(run, console) if console.is_terminal else progress.lines(run)
    with view as shown:
        stop.announce = shown.stopping

        def after_step(run: Run) -> None:
            shown.step()
            if run.world.any(stop.received is not None):  # the same step for all
                raise KeyboardInterrupt

        train_run(run, folder, after_step)
