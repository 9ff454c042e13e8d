"""The whole way on text that ships with the package: vocabulary, shards, pre-training, filling masks, fine-tuning.

The same functions as the commands call, at a size that two cores manage in a few minutes, offline.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from bertsmith.demo_reviews import demo_review_path
from bertsmith.demo_text import demo_text_paths
from bertsmith.errors import UserError
from bertsmith.progress import say
from bertsmith.storage import write_text

VOCABULARY_SIZE = 8000
# documents are chapters and few: enough of them are held out for NSP to draw random segments from
HELD_OUT = 0.06
SENTENCES = (
    "She opened the [MASK] and looked out of the window.",
    "The horse was very [MASK], and he did not want to go.",
    "“I do not [MASK] what you mean,” said Holmes.",
)
STAGES = ("vocab", "corpus", "run", "sentiment")
# a small model learns faster than the paper's large ones
FINETUNE_RATE = 3e-4
# holds the stages' summaries; that it is there says that a demo made the folder, and a demo may clear it
MARK = "demo.json"


def run_demo(out: Path, minutes: float, seed: int = 0) -> dict[str, Any]:
    """Run every stage into `out` (what an earlier demo left there is replaced); returns the stages' summaries.

    Raises UserError, before anything is removed or made, when `out` holds anything but an earlier demo's folders, and
    for settings that make no sense.
    """
    from bertsmith.corpus.prepare import prepare_corpus
    from bertsmith.inference.fill import fill_masks
    from bertsmith.options import load_recipe, load_settings
    from bertsmith.tasks.runs import finetune
    from bertsmith.tasks.settings import FinetuneSettings
    from bertsmith.text.vocabulary import build_vocabulary
    from bertsmith.training.loop import pretrain
    from bertsmith.training.settings import PretrainSettings

    vocab, corpus, run, sentiment = (out / stage for stage in STAGES)
    overrides = [("data", str(corpus)), ("minutes", str(minutes)), ("seed", str(seed))]
    settings = load_settings(PretrainSettings, load_recipe("demo"), overrides)
    _ = settings.budget  # refuses an endless one
    clear(out)
    write_text(out / MARK, "{}\n")
    texts = demo_text_paths()

    say(f"1/5 vocabulary: bertsmith vocab TEXT --out {vocab} --size {VOCABULARY_SIZE}")
    summaries = {"vocab": build_vocabulary(texts, vocab, size=VOCABULARY_SIZE)}
    say(f"2/5 shards: bertsmith prepare TEXT --tokenizer {vocab} --out {corpus} --held-out {HELD_OUT}")
    summaries["prepare"] = prepare_corpus(texts, vocab, corpus, held_out=HELD_OUT)
    say(f"3/5 pre-training: bertsmith pretrain --data {corpus} --out {run} --recipe demo --minutes {minutes:g}")
    summaries["pretrain"] = pretrain(settings, run)
    say(f"4/5 filling masks: bertsmith fill {run / 'model'} TEXT")
    summaries["fill"] = fill_masks(run / "model", SENTENCES)
    say(
        f"5/5 fine-tuning: bertsmith finetune classify --model {run / 'model'} --train TRAIN --dev DEV "
        f"--out {sentiment} --learning-rate {FINETUNE_RATE:g}"
    )
    tuning = FinetuneSettings(
        task="classify",
        model=str(run / "model"),
        train=demo_review_path("train"),
        dev=demo_review_path("dev"),
        learning_rate=FINETUNE_RATE,
        seed=seed,
    )
    summaries["finetune"] = finetune(tuning, sentiment)
    write_text(out / MARK, json.dumps(summaries, indent=1, ensure_ascii=True) + "\n")
    return summaries


def clear(out: Path) -> None:
    """Remove an earlier demo's folders from `out`, also what one that was killed left half-written.

    Raises UserError, and removes nothing, when there is anything else, or no MARK says that a demo made them.
    """
    if out.exists() and not out.is_dir():
        raise UserError(f"{out}: a file stands where a folder is needed; choose another --out")
    entries = {entry.name: entry for entry in out.iterdir()} if out.is_dir() else {}
    strangers = sorted(
        name
        for name, entry in entries.items()
        if name != MARK
        and (name.lstrip(".").partition(".")[0] not in STAGES or entry.is_symlink() or not entry.is_dir())
    )
    if strangers or (entries and MARK not in entries):
        what = ", ".join(strangers[:3]) if strangers else f"there is no {MARK}"
        raise UserError(f"{out}: holds something else than an earlier demo ({what}); choose another --out")
    for name, entry in entries.items():
        if name != MARK:
            shutil.rmtree(entry, ignore_errors=True)
