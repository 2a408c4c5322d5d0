"""How a command ends early: one line on stderr and an exit status."""

import errno
import os
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from ..training import launch

# Typer's base of all usage errors has no public name: it is click's in older versions, Typer's own in newer ones.
UsageError: Any = typer.BadParameter.__base__


def say(message: str) -> None:
    """Print one line for the user on stderr. Of several processes under torchrun, the first speaks for all."""
    if launch.is_first():
        print(f"adafactor: {message}", file=sys.stderr, flush=True)


def leave(message: str, status: int = 2) -> typer.Exit:
    """Say why on one line; return the exception that ends the command with `status`, in all processes if in one.

    All but the first leave with 0: at the first other status torchrun would end the rest, and the first may not have
    spoken yet.
    """
    say(" ".join(message.split()))
    return typer.Exit(status if launch.is_first() else 0)


def out_of_memory(error: Exception) -> bool:
    """Whether Python or one of PyTorch's allocators, which raise RuntimeErrors, found no memory."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("can't allocate memory", "CUDA out of memory")
    )


class OneLineGroup(TyperGroup):
    """Commands whose every complaint is one line: Typer's about their usage, and the system's about their output."""

    def main(self, *arguments: Any, **settings: Any) -> NoReturn:
        """Run the command line and exit."""
        try:
            status = super().main(*arguments, **{**settings, "standalone_mode": False})
            sys.stdout.flush()
        except UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":  # the help has been shown
                sys.exit(error.exit_code)
            command = error.ctx.command_path if error.ctx else "adafactor"
            say(" ".join(f"{error.format_message().rstrip('.')} (see {command} --help)".split()))
            status = error.exit_code if launch.is_first() else 0  # as in leave
        except OSError as error:
            if error.filename is not None:
                raise
            # Files are dealt with where they are used: what is left is an output stream. Python flushes it once more
            # on its way out, which must not fail again.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if error.errno != errno.EPIPE:  # a reader that has had enough, as in `| head -1`, wants to hear no more
                say(f"cannot write to standard output: {error.strerror or 'it is closed'}")
            status = 1
        sys.exit(status)
