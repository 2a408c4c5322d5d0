"""The rows of metrics.csv."""

import csv
import dataclasses
import io
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured up to and including `step`, since the row before; None where there is nothing to say.

    train_loss: mean nats per byte. val_bits_per_byte: bits per byte on the validation windows. lr: as the last step
    used it. optimizer_share: of the time of the steps. seconds: in steps and evaluations, since the run began.
    """

    step: int
    lr: float | None
    train_loss: float | None
    val_bits_per_byte: float | None
    tokens_per_second: float | None
    optimizer_share: float | None
    seconds: float


COLUMNS = tuple(field.name for field in dataclasses.fields(Row))


def to_csv(rows: Sequence[Row]) -> str:
    """Write the rows as CSV, a header first; None becomes an empty cell, a float all its digits."""
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow(COLUMNS)
    table.writerows(dataclasses.astuple(row) for row in rows)
    return out.getvalue()
