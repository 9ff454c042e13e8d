"""How fast batches are made: `python benchmarks/batches.py CORPUS [--seconds 3]`, a folder that `prepare` wrote.

Prints one JSON object. For each objective at 128 and 512 tokens (16,384 tokens a batch): tokens a second of one process
that plans, builds and masks (nothing else; the requirement is 1 M at 512), mean tokens a sequence, the share of random
(swapped) pairs, the tokens cut, and the time from nothing to the first batch at the start and at a late position.
"""

import argparse
import json
import resource
import time
from pathlib import Path
from typing import Any

from bertsmith.corpus.batches import BatchCounts, BatchStream, StreamPosition
from bertsmith.corpus.examples import OBJECTIVES, Objective
from bertsmith.corpus.masking import UNITS, MaskingOptions, TokenizerInfo
from bertsmith.corpus.shards import CorpusSplit, open_corpus
from bertsmith.text.tokenizer import load_tokenizer

TOKENS_A_BATCH = 16_384


def measure(
    split: CorpusSplit,
    tokenizer: TokenizerInfo,
    objective: Objective,
    length: int,
    masking: MaskingOptions,
    seconds: float,
) -> dict[str, Any]:
    """Figures of one process that makes batches for about `seconds`."""
    begun = time.perf_counter()
    stream = BatchStream(split, tokenizer, objective, length, TOKENS_A_BATCH // length, masking=masking)
    next(stream.batches())
    start_seconds = time.perf_counter() - begun

    late = StreamPosition(1000, stream.corpus.windows - 1, 17)
    begun = time.perf_counter()
    next(stream.batches(late))
    late_seconds = time.perf_counter() - begun

    counts = BatchCounts()
    batches = stream.batches()
    begun, begun_cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < seconds:
        counts.add(next(batches))
    wall, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
    figures: dict[str, Any] = {
        "tokens_per_second": round(counts.tokens / wall),
        "tokens_per_cpu_second": round(counts.tokens / cpu),
        "mean_length": round(counts.tokens / counts.examples, 1),
        "masked_share": round(counts.masked / counts.tokens, 4),
        "tokens_cut_share": round(counts.tokens_cut / counts.tokens, 4),
        "seconds_to_first_batch": round(start_seconds, 3),
        "seconds_to_first_batch_late": round(late_seconds, 3),
    }
    if objective != "mlm":
        figures["label_1_share"] = round(counts.label_1 / counts.examples, 4)
    return figures


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("corpus", type=Path, help="a folder that `bertsmith prepare` wrote")
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each measurement")
    arguments = parser.parse_args()

    corpus = open_corpus(arguments.corpus)
    split, tokenizer = corpus.split("train"), TokenizerInfo.of(load_tokenizer(corpus.tokenizer))
    results: dict[str, Any] = {"corpus_tokens": split.tokens, "corpus_documents": split.documents}
    for objective in OBJECTIVES:
        for length in (128, 512):
            key = f"{objective} {length}"
            results[key] = measure(split, tokenizer, objective, length, MaskingOptions(), arguments.seconds)
    for unit in UNITS[1:]:
        masking = MaskingOptions(unit=unit)
        results[f"mlm 512 {unit}"] = measure(split, tokenizer, "mlm", 512, masking, arguments.seconds)
    results["peak_memory_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
