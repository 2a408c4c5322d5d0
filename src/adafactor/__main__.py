"""The command line, `adafactor` or `python -m adafactor`: its packages come with the extra `adafactor[cli]`."""

import sys
from importlib.util import find_spec


def main() -> None:
    """Run the command line; where its packages are missing, say how to get them and exit with 2."""
    if any(find_spec(package) is None for package in ("typer", "rich", "matplotlib")):
        print('adafactor\'s commands need the cli extra: pip install "adafactor[cli]"', file=sys.stderr)
        sys.exit(2)
    from .cli import app

    app(prog_name="adafactor")


if __name__ == "__main__":
    main()
