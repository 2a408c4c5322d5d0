"""The demo with several optimizers, one after the other: validation loss, state and the optimizer's share of the time.

    python benchmarks/train.py [--steps 800] [--threads 2] [OPTIMIZER ...]

Writes benchmarks/results/train-HARDWARE.csv. The shares of time are within one run each, so that they can be compared;
the seconds are not comparable between machines or with other work on the same one.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile

from common import RESULTS, hardware

COLUMNS = ["optimizer", "steps", "val_bits_per_byte", "state_bytes", "parameter_bytes", "optimizer_share", "seconds"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("optimizers", nargs="*", default=["adafactor", "torch", "towhee", "adamw"])
    parser.add_argument("--steps", default="800")
    parser.add_argument("--threads", default="2")
    arguments = parser.parse_args()
    path = RESULTS / f"train-{hardware()}.csv"
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
