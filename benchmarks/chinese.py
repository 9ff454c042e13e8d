"""Chinese from raw text to tasks: vocabulary, shards and pre-training on Chinese text, then three kinds of task.

ChnSentiCorp (hotel reviews, one label), Weibo NER (a character a line, a digit after it) and CMRC 2018 (answers in a
context), each with the commands a user would type. `python benchmarks/chinese.py DATA --out FOLDER` writes table.md;
what stands in FOLDER already is not made again.
"""

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bertsmith.corpus.random_bits import derive_key, permutation

REVIEWS_DEV = 1000


def run(out: Path, *arguments: object) -> dict[str, Any]:
    """A bertsmith command; its JSON summary."""
    command = [sys.executable, "-m", "bertsmith", *map(str, arguments), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def split_reviews(source: Path, out: Path) -> tuple[Path, Path]:
    """ChnSentiCorp comes as one file: 1,000 rows of it, drawn at random, become dev."""
    with source.open(encoding="utf-8-sig", newline="") as file:
        header, *rows = list(csv.reader(file))
    rows = [row for row in rows if row[1].strip()]  # one review of 7,766 is empty
    order = permutation(derive_key("chnsenticorp"), len(rows))
    paths = out / "reviews_train.csv", out / "reviews_dev.csv"
    for path, numbers in zip(paths, (order[REVIEWS_DEV:], order[:REVIEWS_DEV]), strict=True):
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([header, *(rows[number] for number in numbers)])
    return paths


def take_paragraphs(source: Path, out: Path, most: int | None) -> Path:
    """The file itself, or one with its first `most` paragraphs."""
    if most is None:
        return source
    document = json.loads(source.read_text(encoding="utf-8"))
    paragraphs = [paragraph for article in document["data"] for paragraph in article["paragraphs"]][:most]
    path = out / source.name
    part = {"version": document["version"], "data": [{"title": "part", "paragraphs": paragraphs}]}
    path.write_text(json.dumps(part, ensure_ascii=False), encoding="utf-8")
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="folder of the data (corpora/, tasks/)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", default="12000", help="vocabulary entries")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--pretrain", default="--minutes 15", help="length of the pre-training")
    parser.add_argument("--finetune", default="--learning-rate 3e-4", help="settings of the fine-tunings")
    # 1,350 sentences: three epochs teach a small model that most characters are no name, and no more
    parser.add_argument("--finetune-ner", default="--learning-rate 2e-4 --epochs 15", help="the same for Weibo NER")
    parser.add_argument("--corpora", default="zh_wiki-00,zh_wiki_cmrc-00,zh_novels-00")
    parser.add_argument("--paragraphs", type=int, help="of CMRC's files to use (default: all)")
    args = parser.parse_args()
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    texts = [args.data / "corpora" / f"{name}.jsonl.gz" for name in args.corpora.split(",")]
    if not (out / "vocab").is_dir():
        run(out, "vocab", *texts, "--out", out / "vocab", "--size", args.size)
    if not (out / "corpus").is_dir():
        run(out, "prepare", *texts, "--tokenizer", out / "vocab", "--out", out / "corpus", "--language", "zh")
    if not (out / "run" / "model").is_dir():
        run(
            out,
            "pretrain",
            "--data",
            out / "corpus",
            "--out",
            out / "run",
            "--model",
            args.model,
            *args.pretrain.split(),
        )
    tasks = args.data / "tasks"
    train, dev = split_reviews(tasks / "chnsenticorp" / "ChnSentiCorp_htl_all.csv", out)
    weibo, cmrc = tasks / "weibo_ner" / "weiboNER_2nd_conll", tasks / "cmrc2018"
    questions = [take_paragraphs(cmrc / f"cmrc2018_{part}.json", out, args.paragraphs) for part in ("dev", "trial")]
    commands = {
        "ChnSentiCorp": ("classify", "--train", train, "--dev", dev, "--text-column", "review"),
        "Weibo NER": ("ner", "--train", f"{weibo}.train", "--dev", f"{weibo}.dev", "--ner.strip-digit", "true"),
        "CMRC 2018": ("squad1", "--train", questions[0], "--dev", questions[1]),
    }
    lines = [
        "| task | metric | from pre-training | from random weights | rows, cut or windowed |",
        "|---|---|---|---|---|",
    ]
    for name, (task, *files) in commands.items():
        found = {}
        for start in ("pretrained", "random"):
            folder = out / f"{task}-{start}"
            settings = (args.finetune_ner if task == "ner" else args.finetune).split()
            settings += ["--random-init", str(start == "random").lower()]
            found[start] = run(out, "finetune", task, "--model", out / "run", *files, "--out", folder, *settings)
        summary = found["pretrained"]
        report = summary["data_report"]["train"]
        # CMRC 2018: the official F1 knows words between spaces only
        for metric in (summary["metric"], "f1_characters"):
            if metric in summary["runs"][0]["dev"]:
                scores = " | ".join(f"{run['runs'][0]['dev'][metric]:.4g}" for run in found.values())
                lines.append(
                    f"| {name} | {metric} | {scores} | {report['rows']:,}, {report['truncated']:,} or "
                    f"{report['windowed']:,} |"
                )
    (out / "table.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
