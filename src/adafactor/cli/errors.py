"""How a command ends early: one line on stderr and an exit status."""

import sys

import typer


def say(message: str) -> None:
    """Print one line for the user on stderr."""
    print(f"adafactor: {message}", file=sys.stderr, flush=True)


def leave(message: str, status: int = 2) -> typer.Exit:
    """Say why on one line; return the exception that ends the command with `status`."""
    say(" ".join(message.split()))
    return typer.Exit(status)
