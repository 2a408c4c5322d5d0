"""factor="matrix" against "last" on a small convolutional network: scikit-learn's digits, five seeds.

    pip install scikit-learn
    python benchmarks/factoring.py [--seeds 5] [--steps 300] [--threads 2]

Writes benchmarks/results/factoring-HARDWARE.csv: validation loss and bytes of optimizer state.
"""

import argparse
import csv
import statistics

import torch
from common import RESULTS, hardware
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from adafactor.dialects.transformers import Adafactor

CHANNELS = 96
MODES = ("last", "matrix")


def run(mode: str, seed: int, steps: int) -> tuple[float, int, int]:
    """Validation loss, bytes of state of the inner 3x3 convolutions, bytes of state in all."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, validation = order[:1400], order[1400:]
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, CHANNELS, 3, padding=1), nn.ReLU(),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(CHANNELS, 10),
    )  # fmt: skip
    options = {"relative_step": False, "scale_parameter": False, "factor": mode}
    optimizer = Adafactor(model.parameters(), lr=1e-3, **options)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = train[torch.randint(len(train), (64,), generator=draw)]
        optimizer.zero_grad()
        cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        loss = cross_entropy(model(images[validation]), labels[validation]).item()

    def kept(params: list) -> int:
        return sum(x.nbytes for p in params for name, x in optimizer.state[p].items() if name != "step")

    return loss, kept([model[2].weight, model[5].weight]), kept(list(model.parameters()))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [(mode, seed, *run(mode, seed, arguments.steps)) for seed in range(arguments.seeds) for mode in MODES]
    with (RESULTS / f"factoring-{hardware()}.csv").open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["factor", "seed", "validation_loss", "state_bytes_of_3x3_convolutions", "state_bytes"])
        table.writerows(rows)
    for mode in MODES:
        losses = [row[2] for row in rows if row[0] == mode]
        size = next(row[3] for row in rows if row[0] == mode)
        print(f"{mode}: {statistics.mean(losses):.4f} +- {statistics.stdev(losses):.4f}, {size:,} bytes")
    pairs = [a[2] - b[2] for a, b in zip(rows[1::2], rows[::2], strict=True)]
    print(f"matrix - last by seed: {statistics.mean(pairs):+.4f} +- {statistics.stdev(pairs):.4f}")


if __name__ == "__main__":
    main()
