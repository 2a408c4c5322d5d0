"""The command line, `adafactor` or `python -m adafactor`: its packages come with the extra `adafactor[cli]`."""

import os
import signal
import sys
from importlib.util import find_spec
from types import FrameType

from .training import launch


def _stop(number: int, frame: FrameType | None) -> None:
    """End the process in its first seconds, which go into imports: those would swallow or disguise an exception."""
    if launch.is_first():
        os.write(2, b"adafactor: stopped before the run began\n")
    os._exit(128 + number)


def main() -> None:
    """Run the command line; where its packages are missing, say how to get them and exit with 2."""
    if any(find_spec(package) is None for package in ("typer", "rich", "matplotlib")):
        print('adafactor\'s commands need the cli extra: pip install "adafactor[cli]"', file=sys.stderr)
        sys.exit(2)
    # A stream closed by the caller is None in Python: what is printed would be lost in silence, and the next file
    # opened would get its descriptor. Opened for reading, it refuses what is written to it.
    if sys.stdout is None:
        sys.stdout = open(os.devnull)  # noqa: SIM115 - for as long as the process lives
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # by nohup, or a shell for its background jobs
    if not ignored:
        signal.signal(signal.SIGINT, _stop)
    try:
        from .cli import app

        app(prog_name="adafactor")
    finally:
        if not ignored:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the command is over: nothing is left to say


if __name__ == "__main__":
    main()
