"""Folders, globs and URLs → the files to read."""

import gzip
import os
import socket
from pathlib import Path

import fsspec
import pytest
from made_files import read_texts, write

from bertsmith.errors import UserError
from bertsmith.text.readers import ReadReport, expand_inputs, input_size


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as users have them: text in subfolders, and what gathers around it."""
    root = tmp_path / "corpus"
    for name, data in {
        "b.txt": b"b",
        "a.txt": b"a",
        "sub/c.jsonl.gz": gzip.compress(b'{"text": "c"}'),
        "sub/deep/no_suffix": "中".encode(),
        "latin.txt": "déjà vu à la carte".encode("latin-1"),
        "wide.txt": "Всеобщая декларация".encode("utf-16-le") * 9,
        ".hidden.txt": b"x",
        ".git/config": b"x",
        "__MACOSX/a.txt": b"x",
        "photo.jpg": b"x",
        "photo": b"\x89PNG\r\n\x1a\n" + bytes(100),
        "weights": bytes(range(256)) * 20,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


TEXTS = ["a.txt", "b.txt", "latin.txt", "sub/c.jsonl.gz", "sub/deep/no_suffix", "wide.txt"]


def test_folders_are_walked_and_what_is_left_out_is_counted(folder: Path) -> None:
    report = ReadReport()
    files = expand_inputs([str(folder)], report)
    assert files == [f"{folder}/{name}" for name in TEXTS]
    assert report.skipped == {
        "hidden file": 1,
        "hidden folder": 2,
        "not text (.jpg)": 1,
        "not text (a PNG image)": 1,
        "not text (binary data)": 1,
    }
    assert f"{folder}/photo.jpg: not text (.jpg)" in report.skipped_places
    assert input_size(files) == sum(os.path.getsize(file) for file in files)


def test_globs_and_files_are_taken_as_named(folder: Path) -> None:
    assert expand_inputs([f"{folder}/*.txt"]) == [f"{folder}/{n}" for n in TEXTS if n.endswith(".txt")]
    assert expand_inputs([f"{folder}/**/*.gz"]) == [f"{folder}/sub/c.jsonl.gz"]
    assert expand_inputs([f"{folder}/s*"]) == [f"{folder}/sub/c.jsonl.gz", f"{folder}/sub/deep/no_suffix"]
    assert expand_inputs([f"{folder}/photo.jpg"]) == [f"{folder}/photo.jpg"]  # reading it tells what it is
    strange = write(folder / "a[1]*.txt", "x")
    assert expand_inputs([str(strange)]) == [str(strange)]


def test_the_order_of_inputs_and_naming_twice_change_nothing(folder: Path) -> None:
    once = expand_inputs([str(folder)])
    report = ReadReport()
    (folder / "link.txt").symlink_to(folder / "b.txt")
    (folder / "sub" / "loop").symlink_to(folder)
    assert expand_inputs([str(folder / "b.txt"), f"{folder}/*.txt", str(folder)], report) == once
    assert report.skipped["the same file under another name"] == 2
    assert report.skipped["the same folder under another name"] == 1


def test_linked_folders_are_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to(folder)
    assert len(expand_inputs([str(tmp_path / "data")])) == len(TEXTS)


def test_inputs_that_give_nothing_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (folder / "broken").symlink_to(tmp_path / "nowhere")
    for name, reason in [
        (str(tmp_path / "nowhere"), "no such file or folder"),
        (str(tmp_path / "*.nothing"), "nothing matches"),
        (str(tmp_path / "empty"), "no text file in it"),
        (str(folder / ".git"), None),
        (str(tmp_path / "pipe"), "no regular file"),
        (str(folder / "broken"), "no regular file"),
    ]:
        if reason is None:
            assert expand_inputs([name]) == [f"{name}/config"]  # named outright
            continue
        with pytest.raises(UserError, match=reason) as caught:
            expand_inputs([name])
        assert str(caught.value).startswith(name)
    with pytest.raises(UserError, match="no input"):
        expand_inputs([])
    only_images = tmp_path / "images"
    only_images.mkdir()
    write(only_images / "x.png", b"x")
    with pytest.raises(UserError, match=r"left out: 1 × not text \(\.png\)"):
        expand_inputs([str(only_images)])


def test_urls_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_network(*args: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    memory = fsspec.filesystem("memory")
    for name, data in {
        "/readers/a.txt": b"one",
        "/readers/sub/b.jsonl.gz": gzip.compress(b'{"text": "two"}\n'),
        "/readers/sub/.hidden": b"x",
        "/readers/x.png": b"x",
    }.items():
        memory.pipe(name, data)
    report = ReadReport()
    files = expand_inputs(["memory://readers"], report)
    assert [f.removeprefix("memory://").lstrip("/") for f in files] == ["readers/a.txt", "readers/sub/b.jsonl.gz"]
    assert report.skipped == {"hidden file": 1, "not text (.png)": 1}
    assert [text for file in files for text in read_texts(file)] == ["one", "two"]
    assert input_size(files) == 3 + memory.size("/readers/sub/b.jsonl.gz")
    assert expand_inputs(["memory://readers/*.txt"]) == files[:1]
    assert expand_inputs([files[1]]) == files[1:]
    with pytest.raises(UserError, match="no such file or folder"):
        expand_inputs(["memory://nowhere/x.txt"])
    with pytest.raises(UserError, match="nothing matches"):
        expand_inputs(["memory://readers/*.nothing"])
    with pytest.raises(UserError, match="no such file"):
        read_texts("memory://nowhere/x.txt")
    path = write(tmp_path / "local.txt", "three")
    assert read_texts(f"file://{path}") == ["three"]
    with pytest.raises(UserError, match=r"klingon://x: cannot be opened"):
        expand_inputs(["klingon://x"])


def test_a_remote_file_systems_own_errors_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    class RemoteError(Exception):
        pass

    class Broken:
        def read(self, size: int) -> bytes:
            raise RemoteError("the token expired")

        def close(self) -> None:
            pass

    memory = fsspec.filesystem("memory")
    memory.pipe("/broken/x.txt", b"x")
    monkeypatch.setattr(type(memory), "open", lambda *args, **kwargs: Broken())
    with pytest.raises(UserError, match=r"memory://broken/x\.txt: reading failed: the token expired"):
        read_texts("memory://broken/x.txt")

    def refuse(*args: object, **kwargs: object) -> None:
        raise RemoteError("denied")

    monkeypatch.setattr(type(memory), "open", refuse)
    with pytest.raises(UserError, match=r"memory://broken/x\.txt: cannot be read: RemoteError: denied"):
        read_texts("memory://broken/x.txt")
    monkeypatch.setattr(type(memory), "size", refuse)
    monkeypatch.setattr(type(memory), "isfile", refuse)
    with pytest.raises(UserError, match="denied"):
        input_size(["memory://broken/x.txt"])
    with pytest.raises(UserError, match="cannot be listed: RemoteError: denied"):
        expand_inputs(["memory://broken/x.txt"])
