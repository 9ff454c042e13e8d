"""What the user names (files, folders, globs, fsspec URLs) → the sorted list of files to read.

In a folder, hidden files and what is clearly no text are left out and counted; a file named outright is always in the
list, and reading it tells what is wrong with it. No connection is opened unless a remote address is named.
"""

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bertsmith.errors import UserError
from bertsmith.text.decoding import why_binary
from bertsmith.text.documents import ReadReport
from bertsmith.text.streams import detect_compression, file_system, is_url

NOT_TEXT_SUFFIXES = (
    ".7z .avi .bin .bmp .class .db .dll .doc .docx .epub .exe .flac .gif .h5 .ico .jar .jpeg .jpg .mov .mp3 .mp4 .npy "
    ".npz .o .odt .ogg .onnx .pdf .pickle .pkl .png .ppt .pptx .pt .pth .pyc .rar .safetensors .so .sqlite .tar .tif "
    ".tiff .ttf .wav .webm .webp .woff .woff2 .xls .xlsx .zip"
)


def expand_inputs(inputs: Sequence[str], report: ReadReport | None = None) -> list[str]:
    """The files that `inputs` name, each once, sorted; what a folder holds besides is counted in `report`.

    Raises UserError where an input does not exist, is no regular file, or gives no file at all.
    """
    if not inputs:
        raise UserError("no input: name at least one file, folder, glob or URL")
    report = report if report is not None else ReadReport()
    found: dict[str, str] = {}
    for name in inputs:
        files = expand_url(name, report) if is_url(name) else expand_local(name, report)
        if not files:
            left_out = ", ".join(f"{count} × {reason}" for reason, count in sorted(report.skipped.items()))
            raise UserError(f"{name}: no text file in it" + (f" (left out: {left_out})" if left_out else ""))
        for file in sorted(files):
            identity = file if is_url(file) else os.path.realpath(file)
            if identity in found and found[identity] != file:
                report.skip("the same file under another name", file)
            found.setdefault(identity, file)
    return sorted(found.values())


def expand_local(name: str, report: ReadReport) -> list[str]:
    path = name if os.path.lexists(name) else os.path.expanduser(name)
    if os.path.isdir(path):
        return list(walk_folder(path, report))
    if os.path.isfile(path):
        return [path]
    if os.path.lexists(path):
        raise UserError(f"{name}: no regular file (a pipe, a device or a broken link); write it to a file first")
    if not glob.has_magic(path):
        raise UserError(f"{name}: no such file or folder")
    matches = sorted(glob.glob(path, recursive=True))
    if not matches:
        raise UserError(f"{name}: nothing matches")
    files: list[str] = []
    for match in matches:
        if os.path.isdir(match):
            # under ** the folders' files match by themselves
            files += [] if "**" in path else walk_folder(match, report)
        elif os.path.isfile(match):
            files.append(match)
        else:
            report.skip("no regular file", match)
    return files


def walk_folder(folder: str, report: ReadReport) -> Iterator[str]:
    """The text files under `folder`; links to folders are followed, each folder once."""
    seen = {os.path.realpath(folder)}
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=refuse_folder):
        kept = []
        for name in sorted(folders):
            path = os.path.join(parent, name)
            if hidden(name):
                report.skip("hidden folder", path)
            elif (real := os.path.realpath(path)) in seen:
                report.skip("the same folder under another name", path)
            else:
                seen.add(real)
                kept.append(name)
        folders[:] = kept
        for name in sorted(files):
            path = os.path.join(parent, name)
            if reason := why_left_out(name) or why_local_file_left_out(path):
                report.skip(reason, path)
            else:
                yield path


def refuse_folder(error: OSError) -> None:
    raise UserError(f"{error.filename}: this folder cannot be read: {error.strerror}") from error


def hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def why_left_out(name: str) -> str | None:
    """Why a file in a folder is left out, by its name."""
    if hidden(name):
        return "hidden file"
    suffix = os.path.splitext(name)[1].lower()
    return f"not text ({suffix})" if suffix and suffix in NOT_TEXT_SUFFIXES.split() else None


def why_local_file_left_out(path: str) -> str | None:
    """Why a file in a folder is left out, by what it is."""
    if not os.path.isfile(path):
        return "no regular file"
    try:
        with open(path, "rb", buffering=0) as file:
            head = file.read(4096)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if head.startswith(b"PAR1") or detect_compression(head):
        return None
    reason = why_binary(head)
    return "not text (binary data)" if reason and reason.startswith("binary") else reason and f"not text ({reason})"


def expand_url(url: str, report: ReadReport) -> list[str]:
    if "::" in url:
        return [url]  # a chain (zip://a.txt::s3://…) names one file; reading it says if it is not there
    system, path = file_system(url)
    try:
        if system.isfile(path):
            return [url]
        if system.isdir(path):
            return list(find_in(system, [path], report))
        if not glob.has_magic(url):
            raise UserError(f"{url}: no such file or folder")
        matches = sorted(system.glob(path))
        if not matches:
            raise UserError(f"{url}: nothing matches")
        files = [match for match in matches if system.isfile(match)]
        folders = [] if "**" in url else [match for match in matches if system.isdir(match)]
        return [system.unstrip_protocol(file) for file in files] + list(find_in(system, folders, report))
    except UserError:
        raise
    except Exception as error:  # every remote file system has its own
        raise UserError(f"{url}: cannot be listed: {type(error).__name__}: {error}") from error


def find_in(system: Any, folders: Iterable[str], report: ReadReport) -> Iterator[str]:
    for folder in folders:
        for file in sorted(system.find(folder)):
            inside = file[len(folder) :].strip("/").split("/")
            name = system.unstrip_protocol(file)
            if any(hidden(part) for part in inside[:-1]):
                report.skip("hidden folder", name)
            elif reason := why_left_out(inside[-1]):
                report.skip(reason, name)
            else:
                yield name


def input_size(paths: Sequence[str]) -> int:
    """Bytes of `paths` as they are stored (compressed), for progress; a file whose size is not known counts 0."""
    total = 0
    for path in paths:
        try:
            if is_url(path):
                system, inner = file_system(path)
                total += system.size(inner) or 0
            else:
                total += os.path.getsize(path)
        except Exception as error:
            if isinstance(error, UserError) or not (isinstance(error, OSError) or is_url(path)):
                raise
            raise UserError(f"{path}: no such file, or it cannot be read: {error}") from error
    return total
