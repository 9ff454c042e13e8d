"""A preparation that was stopped goes on after its last finished shard, and ends with the bytes of an unbroken one."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from made_texts import (
    RECORDS,
    folder_bytes,
    make_documents,
    run_prepare,
    save_tokenizer,
    write_jsonl,
    write_long_corpus,
)

from bertsmith.corpus import output as output_module
from bertsmith.corpus import prepare as prepare_module
from bertsmith.corpus.prepare import prepare_corpus
from bertsmith.corpus.shards import INDEX, open_corpus
from bertsmith.corpus.tokenize import tokenize_chunk
from bertsmith.errors import UserError
from bertsmith.object_storage import RemoteFolder
from watching import found_in, wait_until

SMALL = {"workers": 1, "held_out": 0.2, "chunk_characters": 600, "shard_tokens": 700}


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "texts.jsonl", [*make_documents(120), "\n".join(make_documents(40, seed=9))])


@pytest.fixture
def memory() -> Iterator[Any]:
    """fsspec's object storage in this process, emptied afterwards."""
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def stop_at(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokenizing the chunk of this number (from 0) is interrupted, once."""
    done = 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal done
        done += 1
        if done == number + 1:
            raise KeyboardInterrupt
        return tokenize_chunk(*arguments, **options)

    monkeypatch.setattr(prepare_module, "tokenize_chunk", interrupted)


def remote_bytes(system: Any, folder: str) -> dict[str, bytes]:
    return {path[len(folder) + 1 :]: system.cat_file(path) for path in sorted(system.find(folder))}


@pytest.mark.parametrize("place", ["here", "object storage"])
def test_stopped_anywhere_it_ends_with_the_same_bytes(
    place: str, source: str, tokenizer_folder: Path, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepare_corpus([source], tokenizer_folder, tmp_path / "whole", **SMALL)
    expected = folder_bytes(tmp_path / "whole")
    chunks, shards = whole["chunks_tokenized"], len(open_corpus(tmp_path / "whole").shards)
    assert shards > 5
    assert whole["documents_cut"] > 0, "a document goes over a shard's end"
    resumed = []
    for stop in sorted({*range(0, chunks, 3), chunks - 1}):
        out = str(tmp_path / f"c{stop}") if place == "here" else f"memory://bucket/c{stop}"
        stop_at(stop, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            prepare_corpus([source], tokenizer_folder, out, **SMALL)
        monkeypatch.undo()
        with pytest.raises(UserError, match=r"does not exist|corpus\.json is missing"):
            open_corpus(out)
        summary = prepare_corpus([source], tokenizer_folder, out, **SMALL)
        found = folder_bytes(Path(out)) if place == "here" else remote_bytes(memory, f"/bucket/c{stop}")
        assert found == expected
        assert summary["chunks_tokenized"] + stop >= chunks
        resumed.append(summary["resumed_shards"])
        if summary["resumed_shards"]:
            assert summary["chunks_tokenized"] < chunks
        left_out = {"seconds", "megabytes_per_second", "peak_memory_mb", "resumed_shards", "chunks_tokenized"}
        assert {k: v for k, v in summary.items() if k not in left_out} == {
            k: v for k, v in whole.items() if k not in left_out
        }
    assert resumed[0] == 0
    assert resumed == sorted(resumed)
    assert resumed[-1] >= shards - 2
    assert not list(tmp_path.glob(".*")), "nothing is left behind"


def test_a_run_killed_again_and_again_comes_to_its_end(
    tokenizer_folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    arguments = {
        "inputs": [write_long_corpus(tmp_path / "long.jsonl", 8)],
        "tokenizer": str(tokenizer_folder),
        "out": str(tmp_path / "out" / "corpus"),
        "workers": 2,
        "chunk_characters": 100_000,
        "shard_tokens": 200_000,
    }
    records = 0
    for way in (signal.SIGKILL, signal.SIGINT):
        process = run_prepare(arguments)
        before = records
        wait_until(lambda: len(found_in(tmp_path / "out", RECORDS)) > before, "a finished shard", process=process)  # noqa: B023
        os.killpg(process.pid, way)
        errors = process.communicate(timeout=60)[1].decode()
        records = len(found_in(tmp_path / "out", RECORDS))
        assert records > before
        if way == signal.SIGINT:
            assert f"going on after {before} finished shard" in errors
            assert f"{records} finished shards are kept in {tmp_path / 'out'}" in errors
    last, errors = run_prepare(arguments | {"workers": 1}).communicate(timeout=100)
    summary = json.loads(last or errors.decode())
    assert summary["resumed_shards"] == records
    whole = prepare_corpus(**(arguments | {"out": tmp_path / "whole", "workers": 1}))
    assert summary["chunks_tokenized"] < whole["chunks_tokenized"]
    assert folder_bytes(tmp_path / "out" / "corpus") == folder_bytes(tmp_path / "whole")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["corpus"]


def change_option(source: str, leftover: Path, options: dict[str, Any]) -> None:
    options["held_out"] = 0.3


def change_time(source: str, leftover: Path, options: dict[str, Any]) -> None:
    os.utime(source, (1, 1))


def cut_first_shard(source: str, leftover: Path, options: dict[str, Any]) -> None:
    shard = leftover / "train-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")


def damage_record(source: str, leftover: Path, options: dict[str, Any]) -> None:
    (leftover / "unfinished" / "train-00000.json").write_text('{"shard": {', encoding="ascii")


@pytest.mark.parametrize("change", [change_option, change_time, cut_first_shard, damage_record])
def test_what_cannot_be_relied_on_is_done_again(
    change: Callable[[str, Path, dict[str, Any]], None],
    source: str,
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = dict(SMALL)
    stop_at(20, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus([source], tokenizer_folder, tmp_path / "c", **options)
    monkeypatch.undo()
    (leftover,) = tmp_path.glob(".c.partial-*")
    assert (leftover / "train-00002.arrow").exists()
    change(source, leftover, options)
    summary = prepare_corpus([source], tokenizer_folder, tmp_path / "c", **options)
    held_out = sum(shard.entry.split == "held-out" for shard in open_corpus(tmp_path / "c").shards)
    assert summary["resumed_shards"] <= (0 if change in (change_option, change_time) else held_out)
    prepare_corpus([source], tokenizer_folder, tmp_path / "whole", **options)
    assert folder_bytes(tmp_path / "c") == folder_bytes(tmp_path / "whole")
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("place", ["here", "object storage"])
def test_a_text_that_changed_unseen_is_noticed(
    place: str, source: str, tokenizer_folder: Path, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "c") if place == "here" else "memory://bucket/c"
    stop_at(20, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus([source], tokenizer_folder, out, **SMALL)
    monkeypatch.undo()
    status = os.stat(source)
    Path(source).write_bytes(Path(source).read_bytes().replace(b"Number 3.", b"Number X."))
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(UserError, match=r"text is not what it was.*starts anew"):
        prepare_corpus([source], tokenizer_folder, out, **SMALL)
    assert not list(tmp_path.glob(".*"))
    assert not memory.find("/bucket")
    assert prepare_corpus([source], tokenizer_folder, out, **SMALL)["resumed_shards"] == 0


def test_on_object_storage_the_index_comes_last_and_nothing_else_is_touched(
    source: str, tokenizer_folder: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: list[str] = []
    upload = RemoteFolder.upload

    def recorded(self: RemoteFolder, file: Path, name: str) -> None:
        stored.append(name)
        upload(self, file, name)

    monkeypatch.setattr(RemoteFolder, "upload", recorded)
    memory.pipe_file("/bucket/neighbour", b"stays")
    prepare_corpus([source], tokenizer_folder, "memory://bucket/c", **SMALL)
    assert stored[-1] == INDEX
    assert stored.count(INDEX) == 1
    assert "report.json" in stored
    with pytest.raises(UserError, match="exists already"):
        prepare_corpus([source], tokenizer_folder, "memory://bucket/c", **SMALL)
    memory.pipe_file("/bucket/thesis/chapter.txt", b"three years of work")
    with pytest.raises(UserError, match="exists already"):
        prepare_corpus([source], tokenizer_folder, "memory://bucket/thesis", **SMALL)
    assert memory.cat_file("/bucket/thesis/chapter.txt") == b"three years of work"
    assert memory.cat_file("/bucket/neighbour") == b"stays"


def test_nothing_finished_leaves_nothing_on_object_storage(
    source: str, tokenizer_folder: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(0, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        prepare_corpus([source], tokenizer_folder, "memory://bucket/c", **SMALL)
    assert not memory.find("/bucket")


def test_settings_are_told_apart(source: str) -> None:
    settings = output_module.describe_settings([source], language="en")
    assert settings == output_module.describe_settings([source], language="en")
    assert settings != output_module.describe_settings([source], language="fr")
    assert settings != output_module.describe_settings([source, source], language="en")
    assert json.loads(settings)["versions"].keys() == {"bertsmith", "tokenizers", "sentencex"}
