"""One task fine-tuned once with the transformers Trainer: what `bertsmith finetune` is compared with.

    python benchmarks/finetune_trainer.py mrpc --model DIR --train FILE --dev FILE --setting best --seed 0

Files in the task's own format in, one JSON line out: metrics on dev, seconds of `trainer.train()` alone, examples and
real tokens trained on. Needs transformers and accelerate.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from finetune_tasks import TASKS, write_part

SETTINGS = ("defaults", "best")


def choose_settings(setting: str, device: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """The TrainingArguments that a setting adds to the hyper-parameters, and the FLOP/s they were chosen by.

    `defaults`: none. `best`: batches of like lengths, and bfloat16 where this machine multiplies it faster than
    float32, as `--precision auto` measures it for ours; nothing logged or looked at in between. The optimizer is fused
    and attention is PyTorch's own in both: those are the defaults by now (transformers 5).
    """
    if setting == "defaults":
        return {}, {}
    from bertsmith.hardware import PRECISIONS, measure_matmul

    rates = {name: measure_matmul(device, dtype) for name, dtype in PRECISIONS.items()}
    arguments = {
        "train_sampling_strategy": "group_by_length",
        "bf16": rates["bf16"] > rates["fp32"],
        "optim": "adamw_torch_fused",
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
    }
    return arguments, rates


def predict(model: Any, collate: Any, features: list[dict[str, Any]], batch_size: int) -> list[Any]:
    """Logits a feature, padding cut off: (classes,), (tokens, tags) or (tokens, 2); in fp32, in the order given.

    Not `Trainer.predict`: grouped by length, it returns them in the order in which it batched them.
    """
    import torch

    order = sorted(range(len(features)), key=lambda i: len(features[i]["input_ids"]))
    found: list[Any] = [None] * len(features)
    model.eval()
    with torch.inference_mode():
        for begin in range(0, len(order), batch_size):
            rows = order[begin : begin + batch_size]
            inputs = ("input_ids", "token_type_ids", "attention_mask")
            batch = collate([{name: features[row][name] for name in inputs} for row in rows])
            output = model(**{name: tensor.to(model.device) for name, tensor in batch.items()})
            logits = output.logits if "logits" in output else torch.stack([output.start_logits, output.end_logits], -1)
            for row, scores in zip(rows, logits.float().cpu().numpy(), strict=True):
                found[row] = scores[: len(features[row]["input_ids"])] if scores.ndim == 2 else scores
    return found


def run(
    task: str,
    model: str,
    train: Path,
    dev: Path,
    setting: str = "best",
    seed: int = 0,
    epochs: float = 3,
    batch_size: int = 32,
    learning_rate: float = 5e-5,
    max_length: int = 128,
    max_steps: int = -1,
) -> dict[str, Any]:
    """Fine-tune and measure once; what the JSON line holds. With `max_steps`, nothing is measured on dev."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.set_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    added, rates = choose_settings(setting, device)
    about, tokenizer = TASKS[task], transformers.AutoTokenizer.from_pretrained(model)
    rows = about.read(train)
    features = about.features(tokenizer, rows, max_length, training=True)
    # Trainer would train in whatever type the weights are stored in
    built = about.model(model, rows, dtype=torch.float32, attn_implementation="sdpa")
    kind = transformers.DataCollatorForTokenClassification if task == "ner" else transformers.DataCollatorWithPadding
    collate = kind(tokenizer)
    counts = {"sequences": 0, "tokens": 0, "padded_tokens": 0}

    class CountingTrainer(transformers.Trainer):
        """Trainer that counts what its steps are given."""

        def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
            counts["sequences"] += len(inputs["input_ids"])
            counts["tokens"] += int(inputs["attention_mask"].sum())
            counts["padded_tokens"] += inputs["attention_mask"].numel()
            return super().training_step(model, inputs, num_items_in_batch)

    with tempfile.TemporaryDirectory(prefix="finetune-trainer-") as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            max_steps=max_steps,
            per_device_train_batch_size=batch_size,
            learning_rate=learning_rate,
            lr_scheduler_type="linear",
            warmup_steps=0.1,
            weight_decay=0.01,
            adam_epsilon=1e-6,  # Google's, and ours
            seed=seed,
            use_cpu=device.type == "cpu",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=device.type != "cpu",
            **added,
        )
        trainer = CountingTrainer(built, arguments, collate, features, processing_class=tokenizer)
        begun = time.perf_counter()
        trainer.train()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
    result = {"task": task, "setting": setting, "seed": seed, "dev": None, "train_seconds": seconds}
    # windows of one question are one example
    result["examples_per_second"] = counts["sequences"] * len(rows) / len(features) / seconds
    result |= {"steps": trainer.state.global_step, **counts, "tokens_per_second": counts["tokens"] / seconds}
    result |= {"settings": added, "threads": torch.get_num_threads(), "device": device.type}
    result["matmul_gflops"] = {name: rate / 1e9 for name, rate in rates.items()}
    result["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    if max_steps < 0:
        rows = about.read(dev)
        features = about.features(tokenizer, rows, max_length, training=False)
        logits = predict(built, transformers.DataCollatorWithPadding(tokenizer), features, 64)
        result["dev"] = about.measure(rows, features, logits, built.config.id2label)
    return result


def main() -> None:
    """Read the command line, print the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--model", required=True, help="Hugging Face folder of an encoder")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--dev", type=Path, required=True)
    parser.add_argument("--setting", choices=SETTINGS, default="best")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--max-steps", type=int, default=-1, help="stop there and measure nothing: for timing")
    parser.add_argument("--train-rows", type=int, help="train on a fixed part of so many rows")
    parser.add_argument("--part", type=Path, help="where that part is written, for others to train on the same rows")
    options = vars(parser.parse_args())
    rows, part = options.pop("train_rows"), options.pop("part")
    if (rows is None) != (part is None):
        parser.error("--train-rows and --part go together")
    if rows is not None:
        write_part(options["task"], options["train"], rows, part)
        options["train"] = part
    os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported
    with contextlib.redirect_stdout(sys.stderr):  # Trainer prints its own summary
        result = run(**options)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
