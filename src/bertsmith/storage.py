"""Writing that is complete or absent: files and folders are written beside their place, synced, then renamed.

A reader never sees half a file, a kill leaves only a `.partial-…` neighbour (removed by the next writer), and a full
disk is one sentence instead of a traceback.
"""

import contextlib
import errno
import glob
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bertsmith.errors import UserError

PARTIAL = ".partial-"
_ASIDE = "old-"


def why_refused(error: BaseException) -> str | None:
    """What the operating system's refusal to write means for the user; None when `error` is no such refusal.

    Libraries written in Rust (safetensors, tokenizers) raise exceptions of their own that end in `(os error 28)`, Arrow
    raises an OSError with the number in its text only: their numbers count as well.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (written := re.search(r"(?:\(os error |\[errno )(\d+)[)\]]", str(error), re.IGNORECASE)):
        number = int(written[1])
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full; free some space and run the same command again"
    if number == errno.EFBIG:
        return "this file system or your limits (ulimit -f) allow no file as large; choose another place"
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "no permission to write here; choose another --out"
    if number in (errno.ENOTDIR, errno.EEXIST):
        return "a file stands where a folder is needed; choose another --out"
    if number == errno.EIO:
        return "the disk reports an input/output error; check it"
    if number == errno.ENAMETOOLONG:
        return "the name is too long for this file system; choose a shorter one"
    return None


@contextlib.contextmanager
def disk_errors(path: Path | str) -> Iterator[None]:
    """Turn the operating system's refusals to write (full disk, no permission, read-only) into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if reason := why_refused(error):
            raise UserError(f"{path}: {reason}") from error
        raise


def check_out(path: Path, folder: bool) -> None:
    """Raise UserError if no file, or no folder if `folder`, could be made at `path`: told before work, not after it."""
    with disk_errors(path):
        _refuse_other_kind(path, folder)
        with contextlib.suppress(FileNotFoundError):
            os.lstat(path)  # raises for a name that is too long or goes through a file
        place = path
        while not os.path.lexists(place) and place != place.parent:
            place = place.parent
        home = place if place.is_dir() else place.parent
        if not os.access(home, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(home))
        _try_file(path, home / _partial_name(path))


def _refuse_other_kind(path: Path, folder: bool) -> None:
    """A folder must not take the place of somebody's file, nor a file that of a folder, a pipe or a device."""
    if folder and path.exists() and not path.is_dir():
        raise UserError(f"{path}: a file stands where a folder is needed; choose another name")
    if not folder and path.is_dir():
        raise UserError(f"{path}: a folder stands where a file is needed; choose another name")
    if not folder and path.exists() and not path.is_file():
        raise UserError(f"{path}: is a pipe or a device, and no file can take its place; choose another name")


def _try_file(path: Path, partial: Path) -> None:
    """Raise UserError, naming `path`, where no file can be made as `partial`: /proc and its like say so only then."""
    try:
        partial.touch()
        partial.unlink()
    except OSError as error:
        if why_refused(error):
            raise  # disk_errors has a sentence for it
        raise UserError(f"{path}: no file can be made here ({error.strerror}); choose another place") from error


def _partial_name(path: Path) -> str:
    return f".{path.name}{PARTIAL}{os.getpid()}"


def sync(path: Path) -> None:
    """fsync a file or a folder, so that what was written survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network and FUSE file systems have no fsync
            raise
    finally:
        os.close(descriptor)


def remove_partials(path: Path, spare: Path | None = None) -> None:
    """Remove what killed writers of `path` left beside it; what a running one is writing, and `spare`, is left alone.

    A writer that was killed between stepping an old folder aside and putting the new one there left the old one whole:
    it is put back.
    """
    for leftover in _leftovers(path):
        rest = leftover.name.partition(PARTIAL)[2]
        if leftover == spare:
            continue
        if rest.startswith(_ASIDE) and not os.path.lexists(path):
            os.rename(leftover, path)
        elif leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def _leftovers(path: Path) -> Iterator[Path]:
    for leftover in list(path.parent.glob(f"{glob.escape(f'.{path.name}{PARTIAL}')}*")):
        if not _is_running(leftover.name.partition(PARTIAL)[2].removeprefix(_ASIDE)):
            yield leftover


def _is_running(process: str) -> bool:
    """Whether another process with this id is there."""
    if not process.isascii() or not process.isdigit() or int(process) == os.getpid():
        return False
    try:
        os.kill(int(process), 0)
    except PermissionError:
        return True  # somebody else's
    except (OSError, OverflowError):
        return False
    return True


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to; on success it becomes `path` in one rename, on any error it is removed."""
    with disk_errors(path):
        _refuse_other_kind(path, folder=False)
        named = path
        path, partial = _beside(path)
        _try_file(named, partial)
        try:
            yield partial
            sync(partial)
            os.replace(partial, path)
            sync(path.parent)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def atomic_folder(
    path: Path,
    adopt: Callable[[Path], bool] = lambda leftover: False,
    keep: Callable[[Path], bool] = lambda partial: False,
) -> Iterator[Path]:
    """Yield an empty folder to fill; on success it becomes `path` (replacing it), on any error it is removed.

    Where half a result is worth something: on an error the folder stays, hidden beside `path`, if `keep(folder)`; and a
    folder that an earlier writer left there is gone on with if `adopt(folder)`, and yielded as it is.
    """
    with disk_errors(path):
        named = path
        _refuse_other_kind(path, folder=True)
        path, partial = _beside(path, adopt)
        # rename(2) cannot replace a folder that is not empty: the old one steps aside first
        aside = path.with_name(f".{path.name}{PARTIAL}{_ASIDE}{os.getpid()}")
        try:
            try:
                partial.mkdir(exist_ok=True)  # an adopted one is there
            except FileNotFoundError:  # in /proc and its like
                raise UserError(f"{named}: no folder can be made here; choose another --out") from None
            yield partial
            for file in partial.rglob("*"):
                sync(file)
            sync(partial)
            if path.exists():
                os.rename(path, aside)
            os.rename(partial, path)
            shutil.rmtree(aside, ignore_errors=True)
            sync(path.parent)
        except BaseException as error:
            if not keep(partial):
                shutil.rmtree(partial, ignore_errors=True)
            if aside.exists() and not path.exists():
                os.rename(aside, path)
            if isinstance(error, UserError) and str(partial) in str(error):
                raise UserError(str(error).replace(str(partial), str(named))) from error
            raise


def _beside(path: Path, adopt: Callable[[Path], bool] = lambda leftover: False) -> tuple[Path, Path]:
    """Where `path` really is (a link stays a link), and the name it is written under first; its parent is made."""
    path = Path(os.path.realpath(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError:  # in /proc and its like
        raise UserError(f"{path.parent}: no folder can be made here; choose another --out") from None
    partial = path.with_name(_partial_name(path))
    adopted = next((leftover for leftover in _leftovers(path) if leftover.is_dir() and adopt(leftover)), None)
    remove_partials(path, spare=adopted)
    if adopted:
        os.rename(adopted, partial)
    return path, partial


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
