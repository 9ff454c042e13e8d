"""Writing that is complete or absent: files and folders are written beside their place, synced, then renamed.

A reader never sees half a file, a kill leaves only a `.partial-…` neighbour (removed by the next writer), and a full
disk is one sentence instead of a traceback.
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from bertsmith.errors import UserError

PARTIAL = ".partial-"


@contextlib.contextmanager
def disk_errors(path: Path | str) -> Iterator[None]:
    """Turn the operating system's refusals to write (full disk, no permission, read-only) into a UserError.

    Libraries written in Rust (safetensors, tokenizers) raise exceptions of their own that end in `(os error 28)`: their
    number counts as well.
    """
    try:
        yield
    except Exception as error:
        number = error.errno if isinstance(error, OSError) else None
        if number is None and (written := re.search(r"\(os error (\d+)\)", str(error))):
            number = int(written[1])
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UserError(f"{path}: the disk is full; free some space and run the same command again") from error
        if number in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(f"{path}: no permission to write here; choose another --out") from error
        if number in (errno.ENOTDIR, errno.EEXIST):
            raise UserError(f"{path}: a file stands where a folder is needed; choose another --out") from error
        raise


def sync(path: Path) -> None:
    """fsync a file or a folder, so that what was written survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_partials(path: Path) -> None:
    """Remove what killed writers of `path` left beside it."""
    for leftover in path.parent.glob(f".{path.name}{PARTIAL}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to; on success it becomes `path` in one rename, on any error it is removed."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_partials(path)
        partial = path.with_name(f".{path.name}{PARTIAL}{os.getpid()}")
        try:
            yield partial
            sync(partial)
            os.replace(partial, path)
            sync(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; on success it becomes `path` (replacing it), on any error it is removed."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_partials(path)
        partial = path.with_name(f".{path.name}{PARTIAL}{os.getpid()}")
        try:
            partial.mkdir()
            yield partial
            for file in partial.rglob("*"):
                sync(file)
            sync(partial)
            if path.exists():
                # rename(2) cannot replace a folder that is not empty: step the old one aside first
                aside = path.with_name(f".{path.name}{PARTIAL}old-{os.getpid()}")
                os.rename(path, aside)
                os.rename(partial, path)
                shutil.rmtree(aside, ignore_errors=True)
            else:
                os.rename(partial, path)
            sync(path.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8 with `\\n` line ends, whatever the locale, complete or not at all."""
    with atomic_file(path) as partial:
        partial.write_bytes(text.encode("utf-8"))


def sha256_of_files(paths: Iterable[Path]) -> str:
    """One sha256 over the names and contents of `paths`, in name order."""
    digest = hashlib.sha256()
    for path in sorted(paths, key=lambda p: p.name):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        digest.update(path.name.encode("utf-8") + b"\0" + content)
    return digest.hexdigest()
