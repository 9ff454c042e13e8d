"""Helpers of the reader tests: writing files in every wrapping, and reading them back."""

import bz2
import gzip
import lzma
from pathlib import Path

import pyarrow as pa

from bertsmith.text.readers import Document, ReadOptions, ReadReport, read_documents

COMPRESS = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lambda data: lzma.compress(data, preset=0),
    ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
}


def read(path: Path | str, **options: str) -> tuple[list[Document], ReadReport]:
    """All documents of a file and the report."""
    report = ReadReport()
    return list(read_documents(str(path), ReadOptions(**options), report)), report


def read_texts(path: Path | str, **options: str) -> list[str]:
    return [document.text for document in read(path, **options)[0]]


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode("utf-8") if isinstance(data, str) else data)
    return path
