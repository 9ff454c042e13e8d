"""How fast this machine turns text into token shards, through the same function as `bertsmith prepare`."""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertsmith.corpus.prepare import prepare_corpus
from bertsmith.demo_text import demo_text_paths
from bertsmith.text.vocabulary import build_vocabulary
from bertsmith.workers import available_cores

# copies of the demo's text: enough that starting the workers does not count
_COPIES = 12


def benchmark_prepare(inputs: Sequence[str], workers: int | None = None) -> dict[str, Any]:
    """Prepare `inputs` (default: the demo's text, several times over) in a temporary folder; the JSON summary of
    `bertsmith bench prepare`.

    `utilization`: how much of the time of the cores that can be busy (one a worker, one more for this process, which
    reads and writes) was spent working.

    Raises UserError as `prepare` does.
    """
    with tempfile.TemporaryDirectory(prefix="bertsmith-bench-") as folder:
        texts = list(inputs)
        if not texts:
            for number in range(_COPIES):
                for path in demo_text_paths():
                    copy = Path(folder) / f"{number:02d}-{Path(path).name}"
                    copy.write_bytes(Path(path).read_bytes())
                    texts.append(str(copy))
        vocab = Path(folder) / "vocab"
        build_vocabulary(texts, vocab, workers=workers)
        before = _processor_seconds()
        summary = prepare_corpus(texts, vocab, Path(folder) / "corpus", workers=workers, dedup=bool(inputs))
        used = _processor_seconds() - before
    workers = int(summary["workers"])
    cores = 1 if workers == 1 else min(workers + 1, available_cores())
    keys = ("workers", "tokens", "bytes", "bytes_per_token", "seconds", "peak_memory_mb", "megabytes_per_second")
    return {key: summary[key] for key in keys} | {
        "tokens_per_second": summary["tokens"] / summary["seconds"],
        "utilization": used / (summary["seconds"] * cores),
    }


def _processor_seconds() -> float:
    """User and system time of this process and its finished children."""
    import resource

    return time.process_time() + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
