"""The loader: one sequence of batches for any number of workers, errors instead of hangs, nothing left behind."""

import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from made_corpus import FIRST_ID, random_documents
from test_batches import all_rows, all_same, take

from bertsmith.corpus.batches import BatchCounts, BatchStream, StreamPosition
from bertsmith.corpus.loader import PrefetchingLoader
from bertsmith.corpus.masking import TokenizerInfo
from bertsmith.corpus.shards import open_corpus
from bertsmith.corpus.writer import write_corpus
from bertsmith.errors import UserError
from bertsmith.text.tokenizer import SPECIAL_TOKENS, BertTokenizer
from watching import living_processes, wait_until

TOKENIZER = BertTokenizer([*SPECIAL_TOKENS, *(f"[unused{i}]" for i in range(5)), *(f"w{i}" for i in range(390))])


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real corpus folder in several shards: worker processes map its files."""
    generator = np.random.default_rng(0)
    documents = [
        [generator.integers(FIRST_ID, TOKENIZER.vocab_size, n).tolist() for n in document]
        for document in random_documents(80, sentences=12)
    ]
    folder = tmp_path_factory.mktemp("loader") / "corpus"
    write_corpus(folder, TOKENIZER, {"train": documents, "held-out": documents[:5]}, shard_tokens=3000)
    assert len(open_corpus(folder).split("train").shards) > 2
    return folder


@pytest.fixture(scope="module")
def stream(corpus_folder: Path) -> BatchStream:
    split = open_corpus(corpus_folder).split("train")
    return BatchStream(split, TokenizerInfo.of(TOKENIZER), "mlm+nsp", 64, 8, block_tokens=300, window_blocks=5)


def no_workers_left() -> bool:
    return not multiprocessing.active_children() and not [t for t in threading.enumerate() if t.name == "batches"]


@pytest.mark.parametrize("workers", [0, 2, 4])
def test_the_sequence_is_the_same_for_any_number_of_workers(stream: BatchStream, workers: int) -> None:
    position = take(stream.batches(), 3)[-1].position
    expected = list(stream.batches(position, epochs=2))
    with PrefetchingLoader(stream, position, workers=workers, epochs=2) as loader:
        found = list(loader)
        assert all_same(found, expected)
        assert loader.counts.examples == sum(map(len, expected))
        assert next(loader, None) is None
    assert no_workers_left()


def test_same_multiset_of_examples_for_workers_and_ranks(stream: BatchStream) -> None:
    expected = all_rows(stream.batches(epochs=1))
    for workers, world_size in ((0, 2), (2, 2)):
        found: Counter[tuple[int, ...]] = Counter()
        steps = set()
        for rank in range(world_size):
            with PrefetchingLoader(stream, None, workers, rank=rank, world_size=world_size, epochs=1) as loader:
                batches = list(loader)
            found.update(all_rows(batches))
            steps.add(len(batches))
        assert dict(found) == expected
        assert len(steps) == 1


def test_resuming_gives_the_same_with_other_workers(stream: BatchStream) -> None:
    unbroken = take(stream.batches(), 20)
    with PrefetchingLoader(stream, workers=2, prefetch=1) as loader:
        first = take(loader, 6)
    counts = loader.counts
    with PrefetchingLoader(stream, first[-1].position, workers=0, counts=counts) as loader:
        second = take(loader, 6)
    assert all_same(first + second, unbroken[:12])
    assert counts.examples == 12 * 8, "counting goes on where it stopped"


@pytest.mark.parametrize("workers", [0, 2])
def test_leaving_early_leaves_nothing_behind(stream: BatchStream, workers: int) -> None:
    with PrefetchingLoader(stream, workers=workers) as loader:
        take(loader, 2)
    assert no_workers_left()
    loader.close()
    assert list(loader) == []
    with pytest.raises(ZeroDivisionError):
        fail_while_loading(stream, workers)
    assert no_workers_left()


def fail_while_loading(stream: BatchStream, workers: int) -> None:
    with PrefetchingLoader(stream, workers=workers) as loader:
        take(loader, 1)
        raise ZeroDivisionError


def test_prefetching_is_bounded(stream: BatchStream) -> None:
    with PrefetchingLoader(stream, prefetch=3) as loader:
        time.sleep(0.5)
        assert loader._ready.qsize() == 3
        assert loader.counts == BatchCounts()


def test_a_dead_worker_is_an_error(stream: BatchStream) -> None:
    with PrefetchingLoader(stream, workers=2, prefetch=1) as loader:
        take(loader, 2)
        victim = loader._workers[1].pid
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(UserError, match=rf"batch worker 1 \(process {victim}\) was killed \(exit code -9\)"):
            take(loader, 50)
        assert time.monotonic() - started < 10
    assert no_workers_left()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_users_mistake_in_a_worker_is_a_users_mistake_here(stream: BatchStream, workers: int) -> None:
    with (
        PrefetchingLoader(stream, StreamPosition(0, 999, 0), workers=workers) as loader,
        pytest.raises(UserError, match="window 999"),
    ):
        next(loader)
    assert no_workers_left()


class BrokenStream(BatchStream):
    """A stream with a fault in it."""

    def _build(self, *_: object) -> object:  # type: ignore[override]
        raise KeyError("a fault")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fault_in_a_worker_is_raised_here(corpus_folder: Path, workers: int) -> None:
    broken = BrokenStream(open_corpus(corpus_folder).split("train"), TokenizerInfo.of(TOKENIZER))
    with (
        PrefetchingLoader(broken, workers=workers) as loader,
        pytest.raises((RuntimeError, KeyError), match="a fault"),
    ):
        next(loader)
    assert no_workers_left()


def test_wrong_numbers_are_refused(stream: BatchStream) -> None:
    with pytest.raises(UserError, match="workers -1"):
        PrefetchingLoader(stream, workers=-1)
    with pytest.raises(UserError, match="prefetch 0"):
        PrefetchingLoader(stream, prefetch=0)


PARENT = """
import os, sys
from bertsmith.corpus.batches import BatchStream
from bertsmith.corpus.loader import PrefetchingLoader
from bertsmith.corpus.masking import TokenizerInfo
from bertsmith.corpus.shards import open_corpus
from bertsmith.text.tokenizer import load_tokenizer

if __name__ == "__main__":
    corpus = open_corpus(sys.argv[1])
    stream = BatchStream(corpus.split("train"), TokenizerInfo.of(load_tokenizer(corpus.tokenizer)))
    loader = PrefetchingLoader(stream, workers=2)
    next(loader)
    print(*(worker.pid for worker in loader._workers), "torch" in sys.modules, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_workers_end_with_a_parent_that_is_killed(corpus_folder: Path, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT, encoding="utf-8")
    parent = subprocess.run(
        [sys.executable, str(script), str(corpus_folder)], capture_output=True, text=True, timeout=60, check=False
    )
    *workers, torch_imported = parent.stdout.split()
    assert parent.returncode == -signal.SIGKILL, parent.stderr
    assert torch_imported == "False", "building batches needs no torch"
    wait_until(lambda: not {*map(int, workers)} & living_processes().keys(), "the end of the workers", seconds=20)


UNGUARDED = PARENT.replace('if __name__ == "__main__":', "if True:").replace(
    "os.kill(os.getpid(), 9)", "loader.close()"
)


@pytest.mark.parametrize("how", ["-", "-c", "script"])
def test_workers_start_whatever_the_main_program_is(corpus_folder: Path, tmp_path: Path, how: str) -> None:
    """From standard input, from -c, and from a script without `if __name__ == "__main__"`."""
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED, encoding="utf-8")
    options = {"-": ["-"], "-c": ["-c", UNGUARDED], "script": [str(script)]}[how]
    done = subprocess.run(
        [sys.executable, *options, str(corpus_folder)],
        input=UNGUARDED if how == "-" else None,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 3


def test_a_polite_end_sent_to_the_whole_group_is_the_parents_to_decide(stream: BatchStream) -> None:
    with PrefetchingLoader(stream, workers=2, prefetch=1) as loader:
        expected = take(stream.batches(), 12)
        found = take(loader, 2)
        for worker in loader._workers:
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGTERM)
            os.kill(worker.pid, signal.SIGINT)
        assert all_same(found + take(loader, 10), expected)
    assert no_workers_left()


def test_several_threads_may_read_one_stream(stream: BatchStream) -> None:
    expected_training = take(stream.batches(), 40)
    expected_evaluation = list(stream.evaluation_batches(100))
    with PrefetchingLoader(stream, prefetch=1) as loader:
        found = []
        for batch in itertools.islice(loader, 40):
            found.append(batch)
            if len(found) % 10 == 0:
                assert all_same(list(stream.evaluation_batches(100)), expected_evaluation)
    assert all_same(found, expected_training)
