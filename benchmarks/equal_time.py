"""Held-out MLM loss in equal time: `bertsmith pretrain` and transformers, the same rows, one after the other.

Both read the same corpus folder in the same order with the same masks (transformers is handed our batches, padded to
rows), train a model of the same size from scratch for the same minutes, MLM only, and are measured on the same held-out
rows and masks. transformers: BertForMaskedLM, SDPA, fused AdamW at 1e-3, dropout 0.1, warm-up over 10 % of the time and
linear decay, in the precision in which this machine takes its steps faster. Ours: a recipe.

    python benchmarks/equal_time.py CORPUS --minutes 6 --model mini --recipe laptop
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def train_ours(corpus: str, model: str, recipe: str, minutes: float, run: Path, extra: list[str]) -> dict:
    """The command as a user types it."""
    command = [sys.executable, "-m", "bertsmith", "pretrain", "--data", corpus, "--out", str(run), "--recipe", recipe]
    command += ["--model", model, "--objective", "mlm", "--minutes", str(minutes), "--json"]
    command += ["--eval.every", "0", "--eval.examples", "1024", "--log.examples", "0", *extra]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout)


def train_theirs(corpus: str, size: str, minutes: float, batch_size: int, learning_rate: float) -> dict:
    """transformers on our batches; returns what is compared."""
    import torch
    from torch.nn import functional as F
    from transformers import BertConfig, BertForMaskedLM

    from bertsmith.corpus.batches import BatchStream
    from bertsmith.corpus.loader import PrefetchingLoader
    from bertsmith.corpus.masking import TokenizerInfo
    from bertsmith.corpus.shards import open_corpus
    from bertsmith.model.config import BertConfig as OurConfig
    from bertsmith.text.tokenizer import load_tokenizer

    opened = open_corpus(corpus)
    info = TokenizerInfo.of(load_tokenizer(opened.tokenizer))
    stream = BatchStream(opened.split("train"), info, objective="mlm", batch_size=batch_size)
    held_out = BatchStream(opened.split("held-out"), info, objective="mlm", batch_size=64)
    torch.manual_seed(0)
    config = BertConfig(**OurConfig.of_size(size, opened.vocab_size).to_dict(), attn_implementation="sdpa")
    model = BertForMaskedLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.01, fused=True)

    def rows(batch) -> dict[str, torch.Tensor]:
        lengths = torch.from_numpy(batch.sequence_starts).diff()
        labels = torch.full((len(batch.token_ids),), -100)
        labels[batch.masked_positions] = torch.from_numpy(batch.masked_labels)
        there = torch.arange(int(lengths.max())) < lengths[:, None]
        padded = {"input_ids": torch.zeros(there.shape, dtype=torch.long), "labels": torch.full(there.shape, -100)}
        padded["input_ids"][there] = torch.from_numpy(batch.token_ids)
        padded["labels"][there] = labels
        return padded | {"attention_mask": there.long()}

    def step(batch, bf16: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(**rows(batch)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    with PrefetchingLoader(stream) as batches:
        first = next(batches)
        speeds = {}
        for bf16 in (False, True, False, True):  # the second round counts
            begun = time.monotonic()
            step(first, bf16)
            speeds[bf16] = time.monotonic() - begun
            model.zero_grad()
        bf16 = speeds[True] < speeds[False]
        tokens, started, budget = 0, time.monotonic(), 60 * minutes
        while (share := (time.monotonic() - started) / budget) < 1:
            batch = next(batches)
            step(batch, bf16)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * min(max(share, 0.001) / 0.1, (1 - share) / 0.9)
            optimizer.step()
            optimizer.zero_grad()
            tokens += len(batch.token_ids)
    model.eval()
    loss = correct = targets = 0
    with torch.inference_mode():
        for batch in held_out.evaluation_batches(1024):
            padded = rows(batch)
            labels = padded.pop("labels")
            logits = model(**padded).logits[labels >= 0]
            wanted = labels[labels >= 0]
            loss += F.cross_entropy(logits, wanted, reduction="sum").item()
            correct += int((logits.argmax(1) == wanted).sum())
            targets += len(wanted)
    return {
        "eval_mlm_loss": loss / targets,
        "eval_mlm_accuracy": correct / targets,
        "tokens": tokens,
        "tokens_per_second": tokens / budget,
        "precision": "bf16" if bf16 else "fp32",
        "batch_size": batch_size,
        "learning_rate": learning_rate,
    }


def main() -> None:
    """Train both and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    parser.add_argument("--model", default="mini")
    parser.add_argument("--recipe", default="laptop")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--batch-size", type=int, default=32, help="transformers: rows a step")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="transformers: peak")
    parser.add_argument("--only", choices=("ours", "transformers"))
    args, extra = parser.parse_known_args()
    result: dict = {"minutes": args.minutes, "model": args.model, "recipe": args.recipe}
    if args.only != "ours":
        result["transformers"] = train_theirs(
            args.corpus, args.model, args.minutes, args.batch_size, args.learning_rate
        )
        print(json.dumps(result["transformers"]), file=sys.stderr)
    if args.only != "transformers":
        folder = Path(tempfile.mkdtemp(prefix="bertsmith-equal-time-"))
        ours = train_ours(args.corpus, args.model, args.recipe, args.minutes, folder / "run", extra)
        shutil.rmtree(folder)
        keys = ("eval_mlm_loss", "eval_mlm_accuracy", "tokens", "tokens_per_second", "precision", "utilization")
        result["ours"] = {key: ours[key] for key in keys}
        result["unigram_entropy"] = ours["unigram_entropy"]
    if args.only is None:
        result["difference"] = result["transformers"]["eval_mlm_loss"] - result["ours"]["eval_mlm_loss"]
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
