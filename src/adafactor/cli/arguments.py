"""The kinds of arguments: each reads its text, and where it refuses says what it must be and what it was."""

from pathlib import Path
from typing import Any

import typer


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"must be a whole number, got {text!r}") from None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"must be a number, got {text!r}") from None


def path(text: str) -> Path:
    """Read the name of a file or folder. The empty one, often an unset variable, would mean the current folder."""
    if not text:
        raise typer.BadParameter("must name a file or folder, got ''")
    return Path(text)


def whole(about: str) -> Any:
    """Declare an option that takes a whole number."""
    return typer.Option(parser=_whole, metavar="N", help=about)


def number(about: str) -> Any:
    """Declare an option that takes a number."""
    return typer.Option(parser=_number, metavar="X", help=about)


def place(about: str) -> Any:
    """Declare an option that takes the name of a file or folder."""
    return typer.Option(parser=path, metavar="PATH", help=about)


def flag(name: str, about: str, **how: Any) -> Any:
    """Declare an option that takes no value. (Without the empty metavar Typer would show one, <bool>.)"""
    return typer.Option(name, metavar="", help=about, **how)
