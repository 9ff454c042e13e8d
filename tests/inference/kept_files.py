"""What tests of `--keep` read and write."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from bertsmith.inference.kept_columns import KeptColumns
from bertsmith.inference.row_writer import open_row_writer
from bertsmith.tasks.table import read_table

OUTPUTS = [".csv", ".tsv", ".jsonl", ".parquet"]


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of an output; cells of .csv and .tsv as texts."""
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]
    with path.open(encoding="utf-8", newline="") as file:
        quoting: Any = csv.QUOTE_MINIMAL if path.suffix == ".csv" else csv.QUOTE_NONE
        return list(csv.DictReader(file, delimiter=",\t"[path.suffix == ".tsv"], quoting=quoting))


def copy(source: Path, out: Path, names: list[str], at_once: int = 3) -> None:
    """The columns of `source`, beside the row's number, `at_once` rows at a time."""
    kept = KeptColumns(str(source), names, out, ["row"])
    rows = kept.follow(read_table(str(source), []), lambda row: f"{source}:{row.line}")
    with open_row_writer(out, kept.arrow_types()) as writer:
        waiting = 0
        for _ in rows:
            waiting += 1
            if waiting == at_once:
                writer.write(kept.beside([{"row": 0}] * waiting))
                waiting = 0
        writer.write(kept.beside([{"row": 0}] * waiting))
