"""Files and folders are complete or absent: after errors, kills, full disks, and beside other writers."""

import errno
import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bertsmith import storage
from bertsmith.errors import UserError
from bertsmith.storage import (
    PARTIAL,
    atomic_file,
    atomic_folder,
    check_out,
    disk_errors,
    sha256_of_files,
    why_refused,
    write_text,
)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def write_folder(path: Path, version: str, files: int = 3) -> None:
    with atomic_folder(path) as folder:
        for number in range(files):
            (folder / f"{number}.txt").write_text(version, encoding="utf-8")


def read_folder(path: Path) -> list[str]:
    return [(path / name).read_text(encoding="utf-8") for name in names(path)]


def fail_after_writing(path: Path, error: type[BaseException]) -> None:
    path.write_bytes(b"half")
    raise error


# --- whole or not at all


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.txt"
    with atomic_file(path) as partial:
        partial.write_bytes(b"one")
        assert not path.exists()
        assert partial.parent == path.parent
    assert path.read_bytes() == b"one"
    assert names(path.parent) == ["x.txt"]


def test_an_error_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    write_text(path, "old é\n")
    with pytest.raises(ZeroDivisionError), atomic_file(path) as partial:
        fail_after_writing(partial, ZeroDivisionError)
    assert path.read_bytes() == "old é\n".encode()
    assert names(tmp_path) == ["x.txt"]


def test_a_folder_appears_when_it_is_complete_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_folder(path, "one", files=5)
    write_folder(path, "two")
    assert read_folder(path) == ["two"] * 3
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_leaves_the_old_folder(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_folder(path, "old")
    with pytest.raises(error), atomic_folder(path) as folder:
        fail_after_writing(folder / "0.txt", error)
    assert read_folder(path) == ["old"] * 3
    assert names(tmp_path) == ["x"]


def test_an_interruption_between_the_two_renames_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    write_folder(path, "old")
    rename, calls = os.rename, []

    def interrupted_rename(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "rename", interrupted_rename)
    with pytest.raises(KeyboardInterrupt):
        write_folder(path, "new")
    assert read_folder(path) == ["old"] * 3
    assert names(tmp_path) == ["x"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    write_folder(tmp_path / "disk" / "model", "old")
    write_text(tmp_path / "disk" / "x.txt", "old")
    for name in ("model", "x.txt"):
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
    write_folder(tmp_path / "model", "new")
    write_text(tmp_path / "x.txt", "new")
    assert (tmp_path / "model").is_symlink()
    assert (tmp_path / "x.txt").is_symlink()
    assert read_folder(tmp_path / "disk" / "model") == ["new"] * 3
    assert (tmp_path / "disk" / "x.txt").read_text(encoding="utf-8") == "new"


# --- what killed writers leave


def dead_process() -> int:
    """The id of a process that is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_leftovers_of_dead_writers_are_removed(tmp_path: Path) -> None:
    dead = dead_process()
    (tmp_path / f".x{PARTIAL}{dead}").mkdir()
    (tmp_path / f".x{PARTIAL}{dead}" / "half").write_bytes(b"")
    (tmp_path / f".x{PARTIAL}words").mkdir()
    (tmp_path / f".y.txt{PARTIAL}{dead}").write_bytes(b"half")
    (tmp_path / f".xy{PARTIAL}{dead}").write_bytes(b"another's")
    write_folder(tmp_path / "x", "new")
    write_text(tmp_path / "y.txt", "new")
    assert names(tmp_path) == [f".xy{PARTIAL}{dead}", "x", "y.txt"]


def test_what_a_running_writer_is_at_is_left_alone(tmp_path: Path) -> None:
    running = tmp_path / f".x{PARTIAL}{os.getppid()}"
    running.mkdir()
    write_folder(tmp_path / "x", "new")
    assert running.is_dir()


def test_a_name_with_brackets_has_its_own_leftovers(tmp_path: Path) -> None:
    other = tmp_path / f".a{PARTIAL}{dead_process()}"
    other.mkdir()
    write_folder(tmp_path / "[ab]", "new")
    assert other.is_dir()


def test_a_folder_that_stepped_aside_before_a_kill_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_folder(path, "old")
    os.rename(path, tmp_path / f".x{PARTIAL}old-{dead_process()}")
    with pytest.raises(ZeroDivisionError), atomic_folder(path):
        raise ZeroDivisionError
    assert read_folder(path) == ["old"] * 3
    assert names(tmp_path) == ["x"]


WRITER = """
import sys
from pathlib import Path
from bertsmith.storage import atomic_file, atomic_folder
folder, file = Path(sys.argv[1]), Path(sys.argv[2])
print("ready", flush=True)
for version in range(10**9):
    with atomic_folder(folder) as partial:
        for number in range(20):
            (partial / f"{number}.bin").write_bytes(b"%d " % version * 5000)
    with atomic_file(file) as partial:
        partial.write_bytes(b"%d " % version * 200000)
"""


def test_a_kill_at_any_moment_leaves_something_whole(tmp_path: Path) -> None:
    chance = random.Random(0)
    folder, file = tmp_path / "folder", tmp_path / "file"
    write_folder(folder, "-1 " * 5000, files=20)
    write_text(file, "-1 " * 200000)
    for _ in range(12):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, folder, file], stdout=subprocess.PIPE)
        assert writer.stdout
        writer.stdout.readline()
        time.sleep(chance.uniform(0, 0.15))
        writer.kill()
        writer.wait()
        writer.stdout.close()
        storage.remove_partials(folder)
        storage.remove_partials(file)
        assert names(tmp_path) == ["file", "folder"]
        versions = set(read_folder(folder))
        assert len(versions) == 1
        assert len(names(folder)) == 20
        (version,) = versions
        assert len(version.split()) == 5000
        assert len(set(version.split())) == 1
        content = file.read_text(encoding="utf-8").split()
        assert len(content) == 200000
        assert len(set(content)) == 1


# --- what the operating system refuses


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "x"), "the disk is full"),
        (OSError(errno.EDQUOT, "x"), "the disk is full"),
        (OSError(errno.EFBIG, "x"), "allow no file as large"),
        (PermissionError(errno.EACCES, "x"), "no permission to write here"),
        (OSError(errno.EROFS, "x"), "no permission to write here"),
        (NotADirectoryError(errno.ENOTDIR, "x"), "a file stands where a folder is needed"),
        (FileExistsError(errno.EEXIST, "x"), "a file stands where a folder is needed"),
        (OSError(errno.ENAMETOOLONG, "x"), "the name is too long"),
        (OSError(errno.EIO, "x"), "input/output error"),
        # safetensors and tokenizers (Rust), Arrow (C++)
        (RuntimeError("I/O error: No space left on device (os error 28)"), "the disk is full"),
        (OSError("[Errno 28] Error writing bytes to file. Detail: [errno 28] No space left"), "the disk is full"),
    ],
)
def test_refusals_are_sentences(error: Exception, told: str) -> None:
    assert told in str(why_refused(error))
    with pytest.raises(UserError, match=r"^some/where: .*; |^some/where: "), disk_errors("some/where"):
        raise error


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "x"), ValueError("(os error x)"), KeyError("x")])
def test_other_errors_are_not_hidden(error: Exception) -> None:
    assert why_refused(error) is None
    with pytest.raises(type(error)), disk_errors("some/where"):
        raise error


def test_a_sentence_that_is_there_already_is_kept() -> None:
    with pytest.raises(UserError, match=r"^a\.txt: \(os error 28\) said by someone else$"), disk_errors("some/where"):
        raise UserError("a.txt: (os error 28) said by someone else")


def test_a_message_names_the_folder_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x"
    told = rf"^{path}/part: the disk is full"
    with pytest.raises(UserError, match=told), atomic_folder(path) as folder, disk_errors(folder / "part"):
        raise OSError(errno.ENOSPC, "x")


FULL_DISK = """
import sys
from pathlib import Path
from bertsmith.errors import UserError
from bertsmith.storage import atomic_file, atomic_folder
place = Path(sys.argv[1])
with atomic_folder(place / "old") as folder:
    (folder / "x").write_bytes(b"old")
for way in ("file", "folder"):
    try:
        if way == "file":
            with atomic_file(place / "new") as partial:
                partial.write_bytes(bytes(1 << 20))
        else:
            with atomic_folder(place / "old") as folder:
                (folder / "x").write_bytes(bytes(1 << 20))
    except UserError as error:
        print(error)
print(sorted(path.name for path in place.iterdir()), (place / "old" / "x").read_bytes())
"""


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    mount = f'mount -t tmpfs -o size=64k tmpfs {tmp_path} && exec "$@"'
    for namespace in ("-m", "-rm"):
        command = [str(unshare), namespace, "sh", "-c", mount, "sh"]
        if unshare and subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            break
    else:
        pytest.skip("no small file system can be mounted here")
    done = subprocess.run(
        [*command, sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True, check=True
    )
    file, folder, left = done.stdout.splitlines()
    assert file.startswith(f"{tmp_path}/new: the disk is full; free some space")
    assert folder.startswith(f"{tmp_path}/old: the disk is full; free some space")
    assert left == "['old'] b'old'"


def test_a_limit_on_file_sizes_loses_nothing(tmp_path: Path) -> None:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    command = [sys.executable, "-c", FULL_DISK, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=limit)
    file, folder, left = done.stdout.splitlines()
    assert "allow no file as large" in file
    assert "allow no file as large" in folder
    assert left == "['old'] b'old'"


# --- asking before the work


def test_check_out_accepts_what_can_be_made(tmp_path: Path) -> None:
    check_out(tmp_path / "new" / "deep", folder=True)
    check_out(tmp_path, folder=True)
    check_out(Path("relative"), folder=True)
    assert names(tmp_path) == []


def test_a_file_and_a_folder_never_take_each_others_place(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("precious")
    folder.mkdir()
    for refused in (
        lambda: check_out(file, folder=True),
        lambda: check_out(folder, folder=False),
        lambda: atomic_folder(file).__enter__(),
        lambda: atomic_file(folder).__enter__(),
    ):
        with pytest.raises(UserError, match=r"stands where a (file|folder) is needed"):
            refused()
    check_out(file, folder=False)
    check_out(folder, folder=True)
    assert file.read_text() == "precious"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["file", "folder"]


def test_a_file_takes_no_pipes_place(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link, Path(os.devnull)):
        with pytest.raises(UserError, match=f"^{path}: is a pipe or a device, and no file can take its place; choose"):
            check_out(path, folder=False)
        with pytest.raises(UserError, match="is a pipe or a device"):
            write_text(path, "x")
    assert pipe.is_fifo()
    assert Path(os.devnull).is_char_device()
    (tmp_path / "file").write_text("old")
    link.unlink()
    link.symlink_to(tmp_path / "file")
    check_out(link, folder=False)


@pytest.mark.parametrize(
    ("below", "told"), [("file/x", "a file stands"), ("file/x/y", "a file stands"), ("n" * 300, "too long")]
)
def test_check_out_refuses_what_cannot_be_made(below: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=told):
        check_out(tmp_path / below, folder=True)


def test_check_out_refuses_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def access(path: Path, mode: int) -> bool:
        asked.append(path)
        return False

    if os.geteuid() == 0:  # who may write everywhere
        monkeypatch.setattr(os, "access", access)
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UserError, match=r"new/deep: no permission to write here"):
            check_out(tmp_path / "new" / "deep", folder=True)
    finally:
        tmp_path.chmod(0o700)
    assert asked in ([], [tmp_path])


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_where_no_folder_can_be_made() -> None:
    told = "/proc/nowhere: no folder can be made here"
    with pytest.raises(UserError, match=told), atomic_folder(Path("/proc/nowhere/x")):
        pass


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_where_no_file_can_be_made() -> None:
    for make in (
        lambda: check_out(Path("/proc/x.npy"), folder=False),
        lambda: check_out(Path("/proc/new/x.npy"), folder=False),
        lambda: write_text(Path("/proc/x.npy"), "x"),
    ):
        with pytest.raises(UserError, match=r"^/proc/(new/)?x\.npy: (no file can be made here \(|no permission to)"):
            make()


# --- digests


def test_the_digest_is_of_names_and_contents_in_order_of_names(tmp_path: Path) -> None:
    for name, content in (("b", b"2"), ("é", b"3"), ("a", b"1")):
        (tmp_path / name).write_bytes(content)
    files = [tmp_path / "b", tmp_path / "é", tmp_path / "a"]
    expected = hashlib.sha256()
    for name, content in (("a", b"1"), ("b", b"2"), ("é", b"3")):
        expected.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
    assert sha256_of_files(files) == sha256_of_files(reversed(files)) == expected.hexdigest()
