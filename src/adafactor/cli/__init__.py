"""The command line: one module a command."""

from typing import Annotated

import typer

from .. import __version__
from .arguments import flag
from .bench import bench
from .doctor import doctor
from .errors import OneLineGroup
from .memory import memory
from .train import train

app = typer.Typer(cls=OneLineGroup, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(train)
app.command()(bench)
app.command()(memory)
app.command()(doctor)


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit


@app.callback()
def adafactor(
    version: Annotated[
        bool, flag("--version", "Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Adafactor for PyTorch."""
