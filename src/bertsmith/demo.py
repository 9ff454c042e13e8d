"""The whole way on text that ships with the package: vocabulary, token shards, pre-training, filling masks.

The same functions as the commands call, at a size that two cores manage in a few minutes, offline.
"""

import shutil
from pathlib import Path
from typing import Any

from bertsmith.demo_text import demo_text_paths
from bertsmith.errors import UserError
from bertsmith.progress import say

VOCABULARY_SIZE = 8000
# documents are chapters and few: enough of them are held out for NSP to draw random segments from
HELD_OUT = 0.06
SENTENCES = (
    "She opened the [MASK] and looked out of the window.",
    "The horse was very [MASK], and he did not want to go.",
    "“I do not [MASK] what you mean,” said Holmes.",
)
STAGES = ("vocab", "corpus", "run")


def run_demo(out: Path, minutes: float) -> dict[str, Any]:
    """Run every stage into `out` (what an earlier demo left there is replaced); returns the stages' summaries.

    Raises UserError when `out` holds anything but an earlier demo's folders.
    """
    from bertsmith.corpus.prepare import prepare_corpus
    from bertsmith.inference.fill import fill_masks
    from bertsmith.options import load_recipe
    from bertsmith.text.vocabulary import build_vocabulary
    from bertsmith.training.loop import pretrain
    from bertsmith.training.setup import run_settings

    if out.is_file() or (out.is_dir() and {entry.name for entry in out.iterdir()} - set(STAGES)):
        raise UserError(f"{out}: holds something else than an earlier demo; choose another --out")
    for stage in STAGES:
        shutil.rmtree(out / stage, ignore_errors=True)
    vocab, corpus, run = (out / stage for stage in STAGES)
    texts = demo_text_paths()

    say(f"1/4 vocabulary: bertsmith vocab TEXT --out {vocab} --size {VOCABULARY_SIZE}")
    summaries = {"vocab": build_vocabulary(texts, vocab, size=VOCABULARY_SIZE)}
    say(f"2/4 shards: bertsmith prepare TEXT --tokenizer {vocab} --out {corpus} --held-out {HELD_OUT}")
    summaries["prepare"] = prepare_corpus(texts, vocab, corpus, held_out=HELD_OUT)
    say(f"3/4 pre-training: bertsmith pretrain --data {corpus} --out {run} --recipe demo --minutes {minutes:g}")
    overrides = [("data", str(corpus)), ("minutes", str(minutes))]
    summaries["pretrain"] = result = pretrain(run_settings(run, load_recipe("demo"), overrides), run)
    say(f"4/4 filling masks: bertsmith fill {run / 'model'} TEXT")
    summaries["fill"] = fill_masks(run / "model", SENTENCES)
    for text in summaries["fill"]["texts"]:
        say(f"  {text['text']}  →  {', '.join(guess['token'] for guess in text['masks'][0])}")
    say(
        f"held-out MLM loss {result['eval_mlm_loss']:.2f} (unigram entropy {result['unigram_entropy']:.2f}, "
        f"ln V {result['ln_vocab']:.2f}), next-sentence accuracy {result['eval_nsp_accuracy']:.1%}; "
        f"curve in {run / 'loss.png'}"
    )
    return summaries
