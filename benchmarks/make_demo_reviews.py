"""Makes the demo's fine-tuning files in src/bertsmith/demo_reviews from the Sentence Polarity Dataset v1.0.

Reads tasks/sentence_polarity/sentence_polarity.zip of the folder given (or BERTSMITH_SHARED_DATA), draws a part of its
sentences by a fixed key, and writes train.tsv.gz and dev.tsv.gz. The same bytes come out every time:
`python benchmarks/make_demo_reviews.py DATA --check` compares with what ships.
"""

import argparse
import gzip
import os
import sys
import zipfile
from pathlib import Path

from bertsmith.corpus.random_bits import derive_key, permutation

DEMO_REVIEWS = Path(__file__).resolve().parents[1] / "src" / "bertsmith" / "demo_reviews"
ROWS = {"train": 3000, "dev": 1000}


def make_files(archive: Path) -> dict[str, bytes]:
    """File name → its bytes: `text`, `label` columns, half of each file positive."""
    with zipfile.ZipFile(archive) as file:
        sentences = {
            label: file.read(f"sentence_polarity/rt-polarity.{label[:3]}").decode("cp1252").splitlines()
            for label in ("negative", "positive")
        }
    files, first = {}, 0
    orders = {label: permutation(derive_key("demo reviews", label), len(rows)) for label, rows in sentences.items()}
    for name, count in ROWS.items():
        rows = []
        for place in range(first, first + count // 2):
            rows += [f"{rows_of[orders[label][place]].strip()}\t{label}" for label, rows_of in sentences.items()]
        first += count // 2
        text = "text\tlabel\n" + "".join(f"{row}\n" for row in rows)
        files[f"{name}.tsv.gz"] = gzip.compress(text.encode("utf-8"), 9, mtime=0)
    return files


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", nargs="?", default=os.environ.get("BERTSMITH_SHARED_DATA"), type=Path)
    parser.add_argument("--check", action="store_true", help="compare with what ships, write nothing")
    args = parser.parse_args()
    if args.data is None:
        parser.error("name the folder of the data, or set BERTSMITH_SHARED_DATA")
    wrong = 0
    for name, content in make_files(args.data / "tasks" / "sentence_polarity" / "sentence_polarity.zip").items():
        path = DEMO_REVIEWS / name
        if not args.check:
            path.write_bytes(content)
        elif gzip.decompress(path.read_bytes()) != gzip.decompress(content):
            print(f"{path}: is not what {Path(__file__).name} makes", file=sys.stderr)
            wrong += 1
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
