"""The demo with several optimizers, one after the other: validation loss, state and the optimizer's share of the time.

    python benchmarks/train.py [--steps 800] [--threads 2] [OPTIMIZER ...]

Writes benchmarks/results/train-HARDWARE.csv. The shares of time are within one run each, so that they can be compared;
the seconds are not comparable between machines or with other work on the same one.
"""

import argparse
import csv
import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path

COLUMNS = ["optimizer", "steps", "val_bits_per_byte", "state_bytes", "parameter_bytes", "optimizer_share", "seconds"]


def hardware() -> str:
    """The processor's name and the number of threads it has, as a file name."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else []
    name = names[0] if names else platform.processor() or platform.machine()
    return re.sub(r"\W+", "-", f"{name} x{len(names) or 1}").strip("-").lower()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("optimizers", nargs="*", default=["adafactor", "torch", "towhee", "adamw"])
    parser.add_argument("--steps", default="800")
    parser.add_argument("--threads", default="2")
    arguments = parser.parse_args()
    path = Path(__file__).parent / "results" / f"train-{hardware()}.csv"
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file, tempfile.TemporaryDirectory() as folder:
        table = csv.DictWriter(file, COLUMNS, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        for optimizer in arguments.optimizers:
            command = [sys.executable, "-m", "adafactor", "train", "--json", "--quiet", "--optimizer", optimizer]
            command += ["--steps", arguments.steps, "--threads", arguments.threads, "--out", f"{folder}/{optimizer}"]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            result = json.loads(output)
            table.writerow({**result, "optimizer": optimizer})
            file.flush()
            print(output, end="")


if __name__ == "__main__":
    main()
