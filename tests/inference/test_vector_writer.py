"""Files of vectors: what is written is what other libraries read, whatever the chunks; memory does not grow."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from bertsmith.errors import UserError
from bertsmith.inference.vector_writer import ENDINGS, Vectors, open_vector_writer

DIMENSION = 6


def make_chunks(sizes: list[list[int]], several: bool) -> list[Vectors]:
    """A chunk for each list; its numbers are how many vectors each text has (`several`) or count texts of one."""
    source = np.random.default_rng(0)
    chunks = []
    for counts in sizes:
        rows = sum(counts) if several else len(counts)
        chunks.append(
            Vectors(
                source.standard_normal((rows, DIMENSION), dtype=np.float32),
                np.array(counts, dtype=np.int64) if several else None,
                source.integers(0, 30_000, rows, dtype=np.int32) if several else None,
            )
        )
    return chunks


def write(path: Path, chunks: list[Vectors], several: bool, tokens: bool = False) -> None:
    with open_vector_writer(path, DIMENSION, several, tokens) as writer:
        for chunk in chunks:
            writer.write(chunk)


def read_rows(path: Path) -> np.ndarray:
    """(n, d), by each format's own library."""
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".safetensors":
        return load_file(path)["vectors"]
    return np.array(pq.read_table(path)["vector"].to_pylist(), dtype=np.float32).reshape(-1, DIMENSION)


SIZES = st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=4)


@pytest.mark.parametrize("ending", ENDINGS)
@settings(max_examples=25)
@given(sizes=SIZES)
def test_one_vector_a_text(ending: str, sizes: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("one") / f"x{ending}"
    chunks = make_chunks(sizes, several=False)
    write(path, chunks, several=False)
    expected = np.concatenate([np.zeros((0, DIMENSION), dtype=np.float32), *(chunk.rows for chunk in chunks)])
    np.testing.assert_array_equal(read_rows(path), expected)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("tokens", [False, True])
@settings(max_examples=25)
@given(sizes=SIZES)
def test_several_vectors_a_text(tokens: bool, sizes: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("several")
    chunks = make_chunks(sizes, several=True)
    texts: list[tuple[np.ndarray, np.ndarray]] = []
    for chunk in chunks:
        assert chunk.counts is not None
        assert chunk.token_ids is not None
        ends = np.cumsum(chunk.counts)
        texts += [(chunk.rows[e - c : e], chunk.token_ids[e - c : e]) for e, c in zip(ends, chunk.counts, strict=True)]

    write(folder / "x.safetensors", chunks, True, tokens)
    with safe_open(str(folder / "x.safetensors"), framework="np") as file:
        assert set(file.keys()) == {"vectors", "offsets", *(["token_ids"] if tokens else [])}
        offsets = file.get_tensor("offsets")
        assert len(offsets) == len(texts) + 1
        for (rows, ids), begin, end in zip(texts, offsets[:-1], offsets[1:], strict=True):
            np.testing.assert_array_equal(file.get_tensor("vectors")[begin:end], rows)
            if tokens:
                np.testing.assert_array_equal(file.get_tensor("token_ids")[begin:end], ids)

    write(folder / "x.parquet", chunks, True, tokens)
    table = pq.read_table(folder / "x.parquet").to_pylist()
    assert len(table) == len(texts)
    for row, (rows, ids) in zip(table, texts, strict=True):
        np.testing.assert_array_equal(np.array(row["vectors"], dtype=np.float32).reshape(-1, DIMENSION), rows)
        assert row.get("token_ids") == (ids.tolist() if tokens else None)


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_error_on_the_way_leaves_the_old_file_and_nothing_else(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{ending}"
    path.write_bytes(b"old")

    def broken() -> None:
        with open_vector_writer(path, DIMENSION, several=ending != ".npy") as writer:
            writer.write(make_chunks([[1, 2]], several=ending != ".npy")[0])
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        broken()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_endings_that_cannot_hold_it_are_refused_with_those_that_can(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"x\.txt: vectors are written to \.npy, \.parquet, \.safetensors"):
        write(tmp_path / "x.txt", [], several=False)
    with pytest.raises(UserError, match=r"x\.npy: .* one vector a text; .*\.safetensors or \.parquet"):
        write(tmp_path / "x.npy", [], several=True)
    assert not list(tmp_path.iterdir())


def stream(chunks: int) -> Iterator[Vectors]:
    for _ in range(chunks):
        yield Vectors(np.ones((4096, 64), dtype=np.float32), np.full(1024, 4), np.ones(4096, dtype=np.int32))


@pytest.mark.parametrize("ending", [".parquet", ".safetensors"])
def test_memory_does_not_grow_with_the_file(ending: str, tmp_path: Path) -> None:
    peaks = []
    for chunks in (4, 40):
        tracemalloc.start()  # counts what NumPy and Python hold
        with open_vector_writer(tmp_path / f"x{ending}", 64, several=True, tokens=True) as writer:
            for chunk in stream(chunks):
                writer.write(chunk)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (tmp_path / f"x{ending}").stat().st_size > 40 * (1 << 20)
    assert peaks[1] < peaks[0] + (1 << 20)
