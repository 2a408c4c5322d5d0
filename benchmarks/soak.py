"""Random steps through every backend for as long as asked: the fuzz of tests/test_fuzz.py, with new cases every time.

    python benchmarks/soak.py [--minutes 10] [--seed N]

Ends with the number of cases that held, or with the smallest case that does not and the seed that finds it again.
Appends a line to benchmarks/results/soak-HARDWARE.csv.
"""

import argparse
import csv
import sys
import time
from pathlib import Path

import torch
from common import RESULTS, hardware
from hypothesis import HealthCheck, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fuzz import BACKENDS, Case, cases, check

ROUND = 500
"""Cases that are drawn from one seed."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    if not 0 < arguments.minutes < float("inf"):
        parser.error(f"--minutes must be above 0, got {arguments.minutes}")
    start, end, count = time.monotonic(), time.monotonic() + 60 * arguments.minutes, 0
    current = arguments.seed
    while time.monotonic() < end:

        @seed(current)
        @settings(deadline=None, max_examples=ROUND, database=None, suppress_health_check=list(HealthCheck))
        @given(cases())
        def run(case: Case) -> None:
            nonlocal count
            if time.monotonic() < end:
                check(case)
                count += 1

        try:
            run()
        except Exception:
            print(f"found by --seed {current}", file=sys.stderr)
            raise
        print(f"seed {current}: {count} cases so far, all held", file=sys.stderr)
        current += 1
    minutes = round((time.monotonic() - start) / 60, 1)
    path = RESULTS / f"soak-{hardware()}.csv"
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        if is_new:
            table.writerow(["torch", "backends", "first seed", "minutes", "cases"])
        table.writerow([torch.__version__, ", ".join(sorted(BACKENDS)), arguments.seed, minutes, count])
    print(f"{count} cases in {minutes} minutes, all held")


if __name__ == "__main__":
    main()
