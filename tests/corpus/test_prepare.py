"""Preparation: same bytes for any worker count, every document accounted for, complete or absent."""

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_texts import WORDS, folder_bytes, make_documents, run_prepare, save_tokenizer, write_jsonl, write_long_corpus

from bertsmith.corpus.chunk_builder import ChunkBuilder, cut_text
from bertsmith.corpus.duplicates import SeenDocuments, hash_document
from bertsmith.corpus.prepare import prepare_corpus
from bertsmith.corpus.shards import open_corpus
from bertsmith.errors import UserError
from bertsmith.text.documents import ReadOptions
from bertsmith.text.sentences import split_sentences
from bertsmith.text.tokenizer import load_tokenizer
from watching import living_processes, needs_proc, wait_until

Documents = list[list[list[int]]]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def read_split(folder: Path, split: str) -> Documents:
    documents = []
    for shard in open_corpus(folder).split(split).shards:  # type: ignore[arg-type]
        for d in range(shard.document_count):
            documents.append([shard.tokens[a:b].tolist() for a, b in pairwise(shard.sentence_offsets_of(d))])
    return documents


def tokenize(texts: list[str], folder: Path) -> Documents:
    tokenizer = load_tokenizer(folder)
    return [tokenizer.encode_ids(split_sentences(text, "en")) for text in texts]


def test_stores_what_sentences_and_tokenizer_give(tokenizer_folder: Path, tmp_path: Path) -> None:
    texts = make_documents(60)
    source = write_jsonl(tmp_path / "texts.jsonl", texts)
    out = tmp_path / "corpus"
    summary = prepare_corpus(
        [source], tokenizer_folder, out, workers=1, held_out=0, chunk_characters=500, shard_tokens=800
    )
    expected = tokenize(texts, tokenizer_folder)
    assert len(open_corpus(out).split("train").shards) > 2
    assert read_split(out, "train") == expected
    assert summary["documents"] == summary["documents_read"] == 60
    assert summary["sentences"] == sum(map(len, expected))
    assert summary["tokens"] == sum(len(s) for d in expected for s in d) == summary["train_tokens"]
    assert summary["characters"] == sum(map(len, texts))
    assert summary["held_out_tokens"] == 0
    assert summary["sentences_per_document"] == pytest.approx(summary["sentences"] / 60, abs=1e-3)
    assert load_tokenizer(open_corpus(out).tokenizer).fingerprint == open_corpus(out).tokenizer_fingerprint


def test_report_is_the_summary_without_what_varies(tokenizer_folder: Path, tmp_path: Path) -> None:
    summary = prepare_corpus(
        [write_jsonl(tmp_path / "t.jsonl", make_documents(20))], tokenizer_folder, tmp_path / "c", workers=1
    )
    varying = {"seconds", "peak_memory_mb", "megabytes_per_second", "workers", "resumed_shards", "chunks_tokenized"}
    assert {key: value for key, value in summary.items() if key not in varying} == open_corpus(tmp_path / "c").report
    assert varying <= summary.keys()
    assert summary["peak_memory_mb"] > 20
    assert len(summary["sha256"]) == 64


def test_any_worker_count_hash_seed_and_locale_give_the_same_bytes(tokenizer_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "texts"
    source.mkdir()
    write_jsonl(source / "a.jsonl", make_documents(200))
    with open(write_jsonl(source / "é♡.jsonl", [*make_documents(200, seed=1), "é 中 ♡. The river."]), "ab") as file:
        file.write(b'not JSON\n{"text": "the \xff river"}\n')
    running = []
    for workers, environment in (
        (1, {"PYTHONHASHSEED": "1"}),
        (2, {"PYTHONHASHSEED": "2"}),
        (4, {"PYTHONHASHSEED": "3", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    ):
        arguments = {
            "inputs": [str(source)],
            "tokenizer": str(tokenizer_folder),
            "out": str(tmp_path / f"corpus-{workers}"),
            "workers": workers,
            "held_out": 0.1,
            "chunk_characters": 2000,
            "shard_tokens": 3000,
        }
        running.append(run_prepare(arguments, environment))
    summaries = []
    for process in running:
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
        summaries.append(json.loads(output))
    assert len({summary["sha256"] for summary in summaries}) == 1
    first, *others = (folder_bytes(tmp_path / f"corpus-{workers}") for workers in (1, 2, 4))
    assert "train-00001.arrow" in first
    assert "held-out-00000.arrow" in first
    assert "é♡.jsonl:202".encode() in first["report.json"]
    assert all(other == first for other in others)


def test_first_of_equal_documents_is_kept(tokenizer_folder: Path, tmp_path: Path) -> None:
    texts = make_documents(10)
    source = write_jsonl(tmp_path / "a.jsonl", [*texts, texts[3], texts[7] + "\n", texts[3]])
    kept = prepare_corpus([source], tokenizer_folder, tmp_path / "one", workers=1, held_out=0)
    assert kept["duplicates_dropped"] == 3
    assert kept["documents"] == 10
    assert kept["documents_read"] == 13
    assert read_split(tmp_path / "one", "train") == tokenize(texts, tokenizer_folder)
    everything = prepare_corpus([source], tokenizer_folder, tmp_path / "all", workers=1, held_out=0, dedup=False)
    assert everything["duplicates_dropped"] == 0
    assert everything["documents"] == 13
    # across files too, in input order
    second = write_jsonl(tmp_path / "b.jsonl", texts)
    both = prepare_corpus([source, second], tokenizer_folder, tmp_path / "two", workers=1, held_out=0)
    assert both["duplicates_dropped"] == 13
    assert both["sha256"] == kept["sha256"]
    assert any("13 of 23 documents were duplicates" in warning for warning in both["warnings"])


def test_held_out_is_a_function_of_the_text(tokenizer_folder: Path, tmp_path: Path) -> None:
    texts = make_documents(300)
    chosen = {text for text in texts[1:] if int.from_bytes(hash_document(text)[:8], "big") < 0.2 * 2**64}
    assert 35 < len(chosen) < 90
    for name, order in (("forward", texts), ("backward", [texts[0], *texts[:0:-1]])):
        source = write_jsonl(tmp_path / f"{name}.jsonl", order)
        summary = prepare_corpus([source], tokenizer_folder, tmp_path / name, workers=1, held_out=0.2)
        assert read_split(tmp_path / name, "held-out") == tokenize([t for t in order if t in chosen], tokenizer_folder)
        stored = read_split(tmp_path / name, "train")
        assert sorted(stored) == sorted(tokenize([t for t in order if t not in chosen], tokenizer_folder))
        assert summary["held_out_documents"] == len(chosen)
        assert summary["train_documents"] == 300 - len(chosen)
        assert not summary["warnings"]


@pytest.mark.parametrize(
    ("count", "held_out", "documents"),
    [(2, 1e-9, 1), (3, 1e-9, 1), (4, 1e-9, 2), (50, 1e-9, 2), (2, 0.999999, 1), (9, 0.999999, 8)],
)
def test_small_corpora_get_both_splits(
    tokenizer_folder: Path, tmp_path: Path, count: int, held_out: float, documents: int
) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", make_documents(count))
    summary = prepare_corpus([source], tokenizer_folder, tmp_path / "c", workers=1, held_out=held_out)
    assert summary["held_out_documents"] == documents
    assert summary["train_documents"] == count - documents
    if held_out < 0.5:
        assert any(f"of only {count} documents" in warning for warning in summary["warnings"])
        smallest = sorted(make_documents(count), key=hash_document)[:documents]
        assert sorted(read_split(tmp_path / "c", "held-out")) == sorted(tokenize(smallest, tokenizer_folder))


@pytest.mark.parametrize("chunk_characters", [1 << 20, 400])
def test_of_a_single_document_the_end_is_held_out(
    tokenizer_folder: Path, tmp_path: Path, chunk_characters: int
) -> None:
    text = "\n".join(make_documents(40))
    (tmp_path / "book.txt").write_text(text, encoding="utf-8")
    summary = prepare_corpus(
        [str(tmp_path / "book.txt")],
        tokenizer_folder,
        tmp_path / "c",
        workers=1,
        chunk_characters=chunk_characters,
    )
    (train,), (held_out,) = read_split(tmp_path / "c", "train"), read_split(tmp_path / "c", "held-out")
    assert train + held_out == tokenize([text], tokenizer_folder)[0]
    assert 0 < len(held_out) < len(train)
    assert (summary["documents"], summary["documents_cut"]) == (1, 1)
    assert any("the end of the last one is held out" in warning for warning in summary["warnings"])


def test_nothing_held_out_on_request(tokenizer_folder: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", make_documents(1))
    prepare_corpus([source], tokenizer_folder, tmp_path / "c", workers=1, held_out=0)
    assert open_corpus(tmp_path / "c").split("held-out").shards == []
    source = write_jsonl(tmp_path / "one.jsonl", ["a tree."])
    summary = prepare_corpus([source], tokenizer_folder, tmp_path / "d", workers=1)
    assert any("nothing could be held out" in warning for warning in summary["warnings"])


def test_an_end_without_tokens_is_no_held_out_document(tokenizer_folder: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", ["The river. Birds sing.\n" + "\x01" * 15])
    summary = prepare_corpus([source], tokenizer_folder, tmp_path / "c", workers=1)
    assert (summary["documents"], summary["documents_cut"], summary["held_out_documents"]) == (1, 0, 0)
    assert summary["skipped"] == {}
    assert any("nothing could be held out" in warning for warning in summary["warnings"])


def test_one_enormous_document_stays_one(tokenizer_folder: Path, tmp_path: Path) -> None:
    """One line, hundreds of chunks: stored as one document with the sentences it has when read in one go."""
    generator = np.random.default_rng(5)
    words = [w for w in WORDS if len(w) > 1]  # "a." would look like an initial
    sentences = [" ".join(generator.choice(words, generator.integers(3, 20))).capitalize() + "." for _ in range(6000)]
    text = " ".join(sentences)
    source = write_jsonl(tmp_path / "t.jsonl", [text, "The river. Birds sing."])
    out = tmp_path / "c"
    summary = prepare_corpus(
        [source], tokenizer_folder, out, workers=1, held_out=0, chunk_characters=1000, shard_tokens=1 << 20
    )
    assert summary["documents"] == 2
    assert summary["documents_cut"] == 0
    stored = read_split(out, "train")
    assert stored == tokenize([text, "The river. Birds sing."], tokenizer_folder)
    assert len(stored[0]) == 6000
    # smaller shards than the document: it is cut between files, and the cuts are counted
    cut = prepare_corpus(
        [source], tokenizer_folder, tmp_path / "d", workers=1, held_out=0, chunk_characters=1000, shard_tokens=9000
    )
    assert cut["documents"] == 2
    assert cut["documents_cut"] > 5
    assert cut["train_documents"] == 2 + cut["documents_cut"]
    assert [s for d in read_split(tmp_path / "d", "train") for s in d] == [s for d in stored for s in d]


def test_long_sentences_are_not_cut_to_a_model_length(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Lines of 2,000 and 5,000 words: nothing is dropped, whatever the sentence splitter does with them."""
    texts = ["grows " * 1500, "tree " * 5000, *make_documents(5)]
    source = write_jsonl(tmp_path / "t.jsonl", texts)
    prepare_corpus([source], tokenizer_folder, tmp_path / "c", workers=1, held_out=0)
    stored = read_split(tmp_path / "c", "train")
    assert stored == tokenize(texts, tokenizer_folder)
    assert open_corpus(tmp_path / "c").split("train").longest_sentence >= 1500
    assert sum(map(len, stored[1])) == 5000


def test_what_the_tokenizer_cannot_keep_is_counted(tokenizer_folder: Path, tmp_path: Path) -> None:
    texts = ["\x01\x02\n\x03", "A tree.\n\x01\nBirds sing.", f"The {'x' * 101} sing.", "♡ tree ♡"]
    summary = prepare_corpus(
        [write_jsonl(tmp_path / "t.jsonl", texts)], tokenizer_folder, tmp_path / "c", workers=1, held_out=0
    )
    assert read_split(tmp_path / "c", "train") == [
        [sentence for sentence in document if sentence] for document in tokenize(texts[1:], tokenizer_folder)
    ]
    assert summary["skipped"]["document without tokens"] == 1
    assert summary["documents"] == 3
    assert summary["empty_sentences"] >= 2
    assert summary["unknown_tokens"] == 3
    assert summary["long_words"] == 1
    assert summary["unknown_rate"] == pytest.approx(3 / summary["tokens"], abs=1e-6)
    assert any("are [UNK] (1 words are too long" in warning for warning in summary["warnings"])
    assert any("1 × document without tokens" in warning for warning in summary["warnings"])


@settings(max_examples=25)
@given(
    texts=st.lists(st.text(st.sampled_from("abc .\n中\x01♡é"), min_size=1, max_size=60), min_size=1, max_size=12),
    chunk_characters=st.sampled_from([3, 10, 1000]),
)
def test_every_token_is_stored(
    tokenizer_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[str],
    chunk_characters: int,
) -> None:
    """However documents are cut into chunks, tokens in = tokens stored (a word is cut only if nothing else can be)."""
    folder = tmp_path_factory.mktemp("property")
    source = write_jsonl(folder / "t.jsonl", texts)
    arguments = {"workers": 1, "dedup": False, "held_out": 0.0, "chunk_characters": chunk_characters}
    kept = [text for text in texts if text.strip()]
    expected = tokenize(kept, tokenizer_folder)
    full = sum(any(document) for document in expected)
    if not full:
        with pytest.raises(UserError, match="no text to train on"):
            prepare_corpus([source], tokenizer_folder, folder / "c", **arguments)  # type: ignore[arg-type]
        return
    summary = prepare_corpus([source], tokenizer_folder, folder / "c", **arguments)  # type: ignore[arg-type]
    stored = read_split(folder / "c", "train")
    assert summary["tokens"] == sum(len(s) for d in stored for s in d) == open_corpus(folder / "c").token_counts.sum()
    assert summary["documents"] == full == len(stored) - summary["documents_cut"]
    assert summary["documents_read"] == full + summary["skipped"].get("document without tokens", 0)
    if chunk_characters == 1000:
        assert summary["tokens"] == sum(len(s) for d in expected for s in d)


@given(st.text(st.sampled_from("ab .!\n。"), max_size=200), st.integers(1, 40))
def test_cut_text_loses_nothing(text: str, limit: int) -> None:
    parts = list(cut_text(text, limit, "en"))
    assert "".join(parts) == text
    assert all(len(part) <= limit for part in parts)
    for part in parts[:-1]:
        assert len(part) > limit // 2 or limit == 1
        if "\n" in part[limit // 2 :]:
            assert part.endswith("\n")


def test_cut_text_prefers_lines_then_sentences_then_blanks() -> None:
    assert list(cut_text("Aaaa bb\nCc. Dd", 12, "en")) == ["Aaaa bb\n", "Cc. Dd"]
    assert list(cut_text("One tree grows. Two birds sing here", 24, "en")) == [
        "One tree grows. ",
        "Two birds sing here",
    ]
    assert list(cut_text("aaaa bb cc dd", 9, "en")) == ["aaaa bb ", "cc dd"]
    assert list(cut_text("一二三。四五六", 6, "zh")) == ["一二三。", "四五六"]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), max_size=30), st.sampled_from([0.0, 0.3]))
def test_chunks_hold_every_document_once(documents: list[tuple[int, int]], held_out: float) -> None:
    texts = [f"{number:04d}" + " ab" * length for number, (_, length) in enumerate(documents)]
    builder = ChunkBuilder(held_out, chunk_characters=20, language="en")
    chunks = [chunk for text in texts for chunk in builder.add(text, hash_document(text))]
    chunks.extend(builder.finish())
    rebuilt: dict[str, list[str]] = {"train": [], "held-out": []}
    for chunk in chunks:
        assert chunk.texts
        assert sum(map(len, chunk.texts)) <= 20
        parts = list(chunk.texts)
        if chunk.continues:
            rebuilt[chunk.split][-1] += parts.pop(0)
        rebuilt[chunk.split].extend(parts)
    stored = rebuilt["train"] + rebuilt["held-out"]
    if builder.cut_documents:
        assert rebuilt["train"].pop() + rebuilt["held-out"].pop() in texts
        assert len(stored) == len(texts) + 1
    else:
        assert sorted(stored) == texts
    assert len(texts) == sum(builder.documents.values())
    if held_out == 0:
        assert not rebuilt["held-out"]
    elif len(texts) > 1:
        assert rebuilt["train"]
        assert rebuilt["held-out"]


@given(st.lists(st.binary(min_size=16, max_size=16) | st.sampled_from([bytes(16), b"\1" + bytes(15)]), max_size=300))
def test_seen_documents_is_a_set(keys: list[bytes]) -> None:
    seen = SeenDocuments(slots=1)
    known: set[bytes] = set()
    for key in keys:
        assert seen.add(key) is (key not in known)
        known.add(key)
    assert len(seen) == len(known)


def test_blank_lines_between_all_sentences_are_noticed(tokenizer_folder: Path, tmp_path: Path) -> None:
    """(a) of a common misreading of Google's layout: every sentence its own document, so no true next sentence."""
    lines = [line for text in make_documents(20) for line in text.split("\n")]
    (tmp_path / "t.txt").write_text("\n\n".join(lines), encoding="utf-8")
    options = ReadOptions(documents="blank-line")
    summary = prepare_corpus(
        [str(tmp_path / "t.txt")],
        tokenizer_folder,
        tmp_path / "c",
        workers=1,
        read_options=options,
    )
    (warning,) = [warning for warning in summary["warnings"] if "single sentence" in warning]
    assert f"{summary['documents']:,} documents, mean 1.0 sentences: every one has a single sentence" in warning
    assert "--documents file" in warning


def test_rows_of_single_sentences_are_not_told_of_blank_lines(tokenizer_folder: Path, tmp_path: Path) -> None:
    rows = [line for text in make_documents(20) for line in text.split("\n")]
    texts = write_jsonl(tmp_path / "t.jsonl", rows)
    summary = prepare_corpus([texts], tokenizer_folder, tmp_path / "c", workers=1)
    (warning,) = [warning for warning in summary["warnings"] if "single sentence" in warning]
    assert "put all sentences of a document into one row or file; or pre-train with --objective mlm" in warning
    assert "blank" not in warning
    assert "--documents" not in warning


def test_no_blank_line_at_all_is_noticed(tokenizer_folder: Path, tmp_path: Path) -> None:
    """(b) of the same: everything one document, so every negative comes from the same one."""
    (tmp_path / "t.txt").write_text("\n".join(make_documents(20)), encoding="utf-8")
    summary = prepare_corpus([str(tmp_path / "t.txt")], tokenizer_folder, tmp_path / "c", workers=1)
    assert any(warning.startswith("1 document, mean") for warning in summary["warnings"])
    assert any("--documents blank-line" in warning for warning in summary["warnings"])


def test_repeated_lines_are_noticed(tokenizer_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [text + "\nThe old river sings." * 20 for text in make_documents(30)]
    summary = prepare_corpus(
        [write_jsonl(tmp_path / "t.jsonl", texts)], tokenizer_folder, tmp_path / "c", workers=1, held_out=0
    )
    assert summary["repeated_sentences"] >= 20 * 30 - 1
    assert any("of the sentences repeat" in warning for warning in summary["warnings"])
    printed = capsys.readouterr()
    assert "of the sentences repeat" in printed.err
    assert "30 documents, mean" in printed.err
    assert printed.out == ""


def test_invalid_bytes_are_reported(tokenizer_folder: Path, tmp_path: Path) -> None:
    data = b"".join(b"A tree grows. Number %d.\n\n" % n for n in range(50)) + b"the \xff river.\n"
    (tmp_path / "t.txt").write_bytes(data)
    options = ReadOptions(documents="blank-line")
    summary = prepare_corpus(
        [str(tmp_path / "t.txt")], tokenizer_folder, tmp_path / "c", workers=1, read_options=options
    )
    assert summary["invalid_bytes"] == 1
    assert any(f"the first at {tmp_path / 't.txt'}:101:" in warning for warning in summary["warnings"])


@pytest.mark.parametrize("content", ["", " \n\n", "\x01"])
def test_no_text_is_an_error_not_an_empty_corpus(tokenizer_folder: Path, tmp_path: Path, content: str) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", [content])
    with pytest.raises(UserError, match=r"no text to train on in .*t\.jsonl"):
        prepare_corpus([source], tokenizer_folder, tmp_path / "c", workers=1)
    assert [file.name for file in tmp_path.iterdir()] == ["t.jsonl"]


def test_mistakes_are_refused_before_any_work(tokenizer_folder: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", make_documents(3))
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.txt").write_text("three years of work", encoding="utf-8")
    cases: list[tuple[str, dict[str, Any]]] = [
        ("exists already", {"out": full}),
        ("exists already", {"out": source}),
        ("--held-out 1", {"held_out": 1.0}),
        ("--held-out -0.1", {"held_out": -0.1}),
        ("--workers 0", {"workers": 0}),
        ("nowhere", {"inputs": [str(tmp_path / "nowhere.jsonl")]}),
        ("no-tokenizer", {"tokenizer": tmp_path / "no-tokenizer"}),
        ("klingon", {"language": "klingon"}),
    ]
    for message, changed in cases:
        arguments: dict[str, Any] = {
            "inputs": [source],
            "tokenizer": tokenizer_folder,
            "out": tmp_path / "c",
            "workers": 1,
        }
        with pytest.raises(UserError, match=message):
            prepare_corpus(**(arguments | changed))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["full", "t.jsonl"]
    assert (full / "thesis.txt").exists()


def test_an_empty_folder_may_be_filled(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    prepare_corpus([write_jsonl(tmp_path / "t.jsonl", make_documents(5))], tokenizer_folder, tmp_path / "c", workers=1)
    assert open_corpus(tmp_path / "c").report["documents"] == 5


def wait_for_children(process: subprocess.Popen[bytes], count: int) -> list[int]:
    """Process ids of the spawned workers (not of multiprocessing's resource tracker), once all are there."""

    def workers() -> list[int]:
        processes = living_processes().items()
        found = [pid for pid, one in processes if one.parent == process.pid and "spawn_main" in one.command]
        return found if len(found) == count else []

    return wait_until(workers, f"{count} workers", process=process)


@needs_proc
@pytest.mark.parametrize("way", ["kill a worker", "Ctrl-C"])
def test_a_run_cut_short_leaves_nothing_behind(tokenizer_folder: Path, tmp_path: Path, way: str) -> None:
    (tmp_path / "out").mkdir()
    arguments = {
        "inputs": [write_long_corpus(tmp_path / "long.jsonl", 25)],
        "tokenizer": str(tokenizer_folder),
        "out": str(tmp_path / "out" / "corpus"),
        "workers": 2,
        "chunk_characters": 100_000,
    }
    process = run_prepare(arguments)
    workers = wait_for_children(process, 2)
    if way == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)
    else:
        os.kill(workers[0], signal.SIGKILL)
    output, errors = process.communicate(timeout=60)
    assert output == b""
    if way == "Ctrl-C":
        assert errors.decode().rstrip().endswith("KeyboardInterrupt")
        assert process.returncode == -signal.SIGINT
    else:
        assert b"worker processes was killed" in errors
        assert b"Traceback" not in errors
        assert process.returncode == 1
    assert list((tmp_path / "out").iterdir()) == []
    assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


@needs_proc
def test_a_full_disk_is_one_sentence(tokenizer_folder: Path, tmp_path: Path) -> None:
    source = write_long_corpus(tmp_path / "long.jsonl", 2)
    script = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "from bertsmith.corpus.prepare import prepare_corpus\n"
        "from bertsmith.errors import UserError\n"
        "try:\n"
        f"    prepare_corpus([{source!r}], {str(tokenizer_folder)!r}, {str(tmp_path / 'out' / 'c')!r}, workers=1)\n"
        "except UserError as error:\n"
        "    sys.exit(str(error))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60)
    assert b"allow no file as large" in done.stderr
    assert b"Traceback" not in done.stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_memory_does_not_grow_with_the_corpus(tokenizer_folder: Path, tmp_path: Path) -> None:
    peaks = {}
    for megabytes in (2, 12):
        arguments = {
            "inputs": [write_long_corpus(tmp_path / f"{megabytes}.jsonl", megabytes)],
            "tokenizer": str(tokenizer_folder),
            "out": str(tmp_path / f"corpus-{megabytes}"),
            "workers": 1,
            "chunk_characters": 100_000,
            "shard_tokens": 100_000,
        }
        output, errors = run_prepare(arguments).communicate(timeout=120)
        summary = json.loads(output or errors.decode())
        assert summary["bytes"] > 0.9e6 * megabytes
        peaks[megabytes] = summary["peak_memory_mb"]
    assert peaks[12] < peaks[2] + 12
    assert peaks[12] < 300


@pytest.mark.shared_data
def test_chinese_text_with_googles_vocabulary(shared_data: Path, tmp_path: Path) -> None:
    source = str(shared_data / "corpora" / "zh_wiki-00.jsonl.gz")
    vocabulary = shared_data / "vocabs" / "bert-base-chinese"
    summary = prepare_corpus([source], vocabulary, tmp_path / "c", workers=2, language="zh")
    again = prepare_corpus([source], vocabulary, tmp_path / "d", workers=1, language="zh")
    assert summary["sha256"] == again["sha256"]
    assert folder_bytes(tmp_path / "c") == folder_bytes(tmp_path / "d")
    assert summary["unknown_rate"] < 0.01
    assert summary["sentences_per_document"] > 3
    assert summary["tokens_per_sentence"] < 80
