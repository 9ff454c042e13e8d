"""TensorFlow checkpoints: a genuine one returns byte for byte, and damaged ones are refused in one sentence."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bertsmith.errors import UserError
from bertsmith.model.leveldb_table import masked_crc32c, read_table, varint, write_table
from bertsmith.model.tensor_bundle import read_bundle, write_bundle

DATA = ".data-00000-of-00001"
TENSORS = {
    "bert/embeddings/word_embeddings": np.arange(60, dtype=np.float32).reshape(20, 3) / 7,
    "bert/encoder/layer_0/kernel": np.random.default_rng(1).normal(size=(10, 20)),
    "bert/half": np.array([1.5, -2.0], dtype=np.float16),
    "flag": np.array([True, False, True]),
    "global_step": np.array(20, dtype=np.int64),
    "nothing": np.zeros((0, 4), dtype=np.float32),
    "small": np.array([[1], [-1]], dtype=np.int32),
    "bytes": np.arange(256, dtype=np.uint8),
}

Table = dict[bytes, bytes]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    path = tmp_path / "bert_model.ckpt"
    write_bundle(path, TENSORS)
    return path


@pytest.fixture
def genuine(shared_data: Path) -> Path:
    return shared_data / "checkpoints" / "tf1_tiny" / "bert_model.ckpt"


def field(number: int, value: int | bytes) -> bytes:
    """A protocol-buffer field; a number of field 6 has fixed width."""
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    return varint(number << 3 | 5) + value.to_bytes(4, "little") if number == 6 else varint(number << 3) + varint(value)


def entry(dtype: int, shape: tuple[int, ...], offset: int, content: bytes, shard: int = 0) -> bytes:
    dimensions = b"".join(field(2, field(1, size % 2**64)) for size in shape)
    place = field(3, shard) + field(4, offset) + field(5, len(content))
    return field(1, dtype) + field(2, dimensions) + place + field(6, masked_crc32c(content))


def change_index(prefix: Path, change: Callable[[Table], object]) -> None:
    """Change entries of an index, leaving its checksums right."""
    index = Path(f"{prefix}.index")
    table = read_table(index.read_bytes())
    change(table)
    index.write_bytes(write_table(sorted(table.items())))


def test_a_genuine_checkpoint_is_read(genuine: Path) -> None:
    bundle = read_bundle(genuine)
    assert len(bundle) == 139
    sizes = json.loads(genuine.with_name("bert_config.json").read_text(encoding="utf-8"))
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    assert bundle["bert/embeddings/word_embeddings"].shape == (sizes["vocab_size"], hidden)
    assert bundle["bert/encoder/layer_1/output/dense/kernel/adam_v"].shape == (inner, hidden)
    assert bundle["global_step"].dtype == "int64"
    for name in bundle:
        assert bundle[name].readable
        tensor = bundle.tensor(name)
        assert (tensor.dtype.name, tensor.shape) == (bundle[name].dtype, bundle[name].shape)
        assert np.isfinite(tensor).all()
    # what tf.train.load_checkpoint of TensorFlow 2.21 reads
    assert bundle.tensor("global_step") == 20
    expected = np.float32([-6.131137524789665e-06, 6.131137979537016e-06])
    np.testing.assert_array_equal(bundle.tensor("cls/seq_relationship/output_bias"), expected)


def test_what_is_written_is_what_tensorflow_wrote(genuine: Path, tmp_path: Path) -> None:
    bundle = read_bundle(genuine)
    write_bundle(tmp_path / "again", {name: bundle.tensor(name) for name in reversed(list(bundle))})
    for ending in (".index", DATA):
        assert Path(f"{tmp_path / 'again'}{ending}").read_bytes() == Path(f"{genuine}{ending}").read_bytes()


def test_every_type_returns(prefix: Path) -> None:
    for name in (prefix, str(prefix), f"{prefix}.index", f"{prefix}{DATA}"):
        bundle = read_bundle(name)
        assert list(bundle) == sorted(TENSORS)
        for key, tensor in TENSORS.items():
            read = bundle.tensor(key)
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            np.testing.assert_array_equal(read, tensor)
    assert sorted(p.name for p in prefix.parent.iterdir()) == sorted(prefix.name + end for end in (".index", DATA))


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=20),
        arrays.arrays(
            st.sampled_from(["<f4", ">f4", "f8", "f2", "i1", "<i8", ">i2", "u4", "?", "c8"]),
            arrays.array_shapes(min_dims=0, min_side=0, max_side=4),
        ),
        max_size=5,
    )
)
def test_any_tensors_return(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    write_bundle(tmp_path / "any", tensors)
    bundle = read_bundle(tmp_path / "any")
    assert list(bundle) == sorted(tensors)
    for name, tensor in tensors.items():
        read = bundle.tensor(name)
        assert (read.dtype, read.shape) == (tensor.dtype.newbyteorder("<"), tensor.shape)
        assert read.tobytes() == tensor.astype(read.dtype).tobytes()


def test_strided_tensors_are_written_in_order(tmp_path: Path) -> None:
    tensor = np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1)[::2]
    write_bundle(tmp_path / "x", {"t": tensor})
    np.testing.assert_array_equal(read_bundle(tmp_path / "x").tensor("t"), tensor)


def test_bfloat16_is_widened_exactly(prefix: Path) -> None:
    data = Path(f"{prefix}{DATA}")
    content = (np.float32([1.0, -0.15625, 3.0e38, np.inf]).view(np.uint32) >> 16).astype("<u2").tobytes()
    offset = data.stat().st_size
    data.write_bytes(data.read_bytes() + content)
    change_index(prefix, lambda table: table.update({b"narrow": entry(14, (2, 2), offset, content)}))
    bundle = read_bundle(prefix)
    assert bundle["narrow"].dtype == "bfloat16"
    expected = (np.float32([1.0, -0.15625, 3.0e38, np.inf]).view(np.uint32) & 0xFFFF0000).view(np.float32)
    np.testing.assert_array_equal(bundle.tensor("narrow"), expected.reshape(2, 2))


def test_several_data_files(prefix: Path) -> None:
    parts = {0: np.arange(5, dtype=np.float32), 2: np.arange(7, dtype=np.float32)}
    table = {b"": field(1, 3) + field(3, field(1, 1))}
    for shard, part in parts.items():
        Path(f"{prefix}.data-{shard:05d}-of-00003").write_bytes(b"??" + part.tobytes())
        table[f"part{shard}".encode()] = entry(1, part.shape, 2, part.tobytes(), shard)
    Path(f"{prefix}.index").write_bytes(write_table(table.items()))
    bundle = read_bundle(prefix)
    for shard, part in parts.items():
        np.testing.assert_array_equal(bundle.tensor(f"part{shard}"), part)
    Path(f"{prefix}.data-00002-of-00003").unlink()
    with pytest.raises(UserError, match=r"data-00002-of-00003: no such file"):
        read_bundle(prefix)


def test_only_what_is_asked_for_is_read(prefix: Path) -> None:
    """A data file of 64 GiB, nearly all of it a hole."""
    with Path(f"{prefix}{DATA}").open("r+b") as file:
        start = file.seek(0, os.SEEK_END)
        file.truncate(start + 2**36)
    large = field(1, 6) + field(2, field(2, field(1, 2**36))) + field(4, start) + field(5, 2**36)
    change_index(prefix, lambda table: table.update({b"large": large}))
    bundle = read_bundle(prefix)
    assert bundle["large"].shape == (2**36,)
    np.testing.assert_array_equal(bundle.tensor("small"), TENSORS["small"])


def test_what_cannot_be_read_is_listed_and_named(prefix: Path) -> None:
    slices = field(7, field(1, b"")) * 2
    strange = {
        b"_CHECKPOINTABLE_OBJECT_GRAPH": entry(7, (), 0, b""),
        b"future": entry(77, (3,), 0, b""),
        b"parts": field(1, 1) + field(2, field(2, field(1, 8))) + slices,
        b"\0\1parts\0\1": entry(1, (), 0, b"0000"),  # in the place of the tensor that is dropped
    }
    change_index(prefix, lambda table: table.update(strange) or table.pop(b"bert/embeddings/word_embeddings"))
    bundle = read_bundle(prefix)
    unreadable = {name for name in bundle if not bundle[name].readable}
    assert unreadable == {"_CHECKPOINTABLE_OBJECT_GRAPH", "future", "parts"}
    for name, message in {
        "_CHECKPOINTABLE_OBJECT_GRAPH": "_CHECKPOINTABLE_OBJECT_GRAPH is of type string; those read are .*float32",
        "future": "number 77",
        "parts": "tensor parts is stored in slices",
        "absent": "no tensor absent",
    }.items():
        with pytest.raises(UserError, match=message):
            bundle.tensor(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(b""), "no header"),
        (lambda t: t.update({b"": field(1, 0)}), "0 data files"),
        (lambda t: t.update({b"": field(1, 2**40)}), "data files"),
        (lambda t: t.update({b"": field(1, 1) + field(2, 1)}), "big-endian"),
        (lambda t: t.update({b"": field(1, 1) + field(3, field(2, 9))}), "format is 9"),
        (lambda t: t.update({b"": field(1, b"one")}), "wrong type"),
        (lambda t: t.update({b"x": b"\x0b"}), "no protocol-buffer"),
        (lambda t: t.update({b"x": b"\x0a\x7f"}), "cut off"),
        (lambda t: t.update({b"x": field(1, 1) + field(2, 5)}), "wrong type"),
        (lambda t: t.update({b"\xff\xfe": entry(1, (0,), 0, b"")}), "decode"),
        (lambda t: t.update({b"a\nb": entry(1, (0,), 0, b"")}), "name"),
        (lambda t: t.update({b"x": entry(1, (3,), 0, bytes(8))}), "has 8 bytes"),
        (lambda t: t.update({b"x": entry(1, (2**40, 2**40), 0, bytes(4))}), "impossible"),
        (lambda t: t.update({b"x": entry(1, (0, 2**62, 2**62), 0, b"")}), "impossible"),
        (lambda t: t.update({b"x": entry(1, (-1,), 0, b"")}), "impossible"),
        (lambda t: t.update({b"x": entry(1, (1,) * 40, 0, bytes(4))}), "impossible"),
        (lambda t: t.update({b"x": field(1, 1) + field(2, field(3, 1))}), "unknown"),
        (lambda t: t.update({b"x": entry(1, (2,), 2**64 - 8, bytes(8))}), "negative"),
        (lambda t: t.update({b"x": entry(1, (2,), 2**40, bytes(8))}), "asks for 1,099,511,627,784"),
        (lambda t: t.update({b"x": entry(1, (2,), 4, bytes(8))}), "share bytes"),
        (lambda t: t.update({b"x": entry(1, (2,), 0, bytes(8), shard=1)}), "data file 1 of 1"),
    ],
)
def test_hostile_indices_are_refused(prefix: Path, change: Callable[[Table], object], message: str) -> None:
    change_index(prefix, change)
    with pytest.raises(UserError, match=message) as error:
        read_bundle(prefix)
    assert "\n" not in str(error.value)
    assert str(prefix) in str(error.value)


def test_damaged_numbers_are_noticed(prefix: Path) -> None:
    data = Path(f"{prefix}{DATA}")
    bundle = read_bundle(prefix)
    content = bytearray(data.read_bytes())
    content[bundle["bert/encoder/layer_0/kernel"].offset + 900] ^= 1
    data.write_bytes(content)
    bundle = read_bundle(prefix)
    np.testing.assert_array_equal(bundle.tensor("small"), TENSORS["small"])
    with pytest.raises(UserError, match="tensor bert/encoder/layer_0/kernel is damaged"):
        bundle.tensor("bert/encoder/layer_0/kernel")


@pytest.mark.parametrize("kept", [0, 1, 47, 48, 200])
def test_short_files_are_refused(prefix: Path, kept: int) -> None:
    for ending, message in ((DATA, f"has {kept} bytes where bert_model.ckpt.index asks for"), (".index", "damaged")):
        path = Path(f"{prefix}{ending}")
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(UserError, match=message) as error:
            read_bundle(prefix)
        assert str(path) in str(error.value)


def test_absent_and_older_checkpoints_are_named(tmp_path: Path, prefix: Path) -> None:
    with pytest.raises(UserError, match=r"absent\.index: no such file; name a TensorFlow checkpoint"):
        read_bundle(tmp_path / "absent")
    (tmp_path / "model.ckpt").write_bytes(bytes(100))
    with pytest.raises(UserError, match="format V2"):
        read_bundle(tmp_path / "model.ckpt")
    Path(f"{prefix}{DATA}").unlink()
    with pytest.raises(UserError, match="00000-of-00001: no such file"):
        read_bundle(prefix)
    Path(f"{tmp_path / 'large'}.index").write_bytes(bytes(2**22 + 1))
    with pytest.raises(UserError, match="larger than"):
        read_bundle(tmp_path / "large")


def test_a_refused_type_leaves_the_old_checkpoint(prefix: Path) -> None:
    before = {path: path.read_bytes() for path in prefix.parent.iterdir()}
    with pytest.raises(UserError, match=r"tensor words is of type <U1"):
        write_bundle(prefix, {"a": np.zeros(3), "words": np.array(["a"])})
    assert {path: path.read_bytes() for path in prefix.parent.iterdir()} == before


def read_all(prefix: Path) -> None:
    """Whatever is read without an error must be right; nothing but a UserError may be raised."""
    with contextlib.suppress(UserError):
        bundle = read_bundle(prefix)
        for name in bundle:
            with contextlib.suppress(UserError):
                read = bundle.tensor(name)
                assert name in TENSORS
                np.testing.assert_array_equal(read, TENSORS[name])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that every example damages and mends."""
    path = tmp_path_factory.mktemp("written") / "bert_model.ckpt"
    write_bundle(path, TENSORS)
    return path


@contextlib.contextmanager
def mended(path: Path) -> Iterator[None]:
    content = path.read_bytes()
    try:
        yield
    finally:
        path.write_bytes(content)


@settings(max_examples=300)
@given(st.sampled_from([".index", DATA]), st.data())
def test_damaged_files_give_an_error_or_the_right_numbers(written: Path, ending: str, data: st.DataObject) -> None:
    path = Path(f"{written}{ending}")
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    with mended(path):
        path.write_bytes(content[: data.draw(st.one_of(st.none(), st.integers(0, len(content))))])
        read_all(written)


@settings(max_examples=300)
@given(st.sampled_from(["", *TENSORS]), st.data())
def test_entries_changed_under_right_checksums_raise_nothing_else(
    written: Path, name: str, data: st.DataObject
) -> None:
    def change(table: Table) -> None:
        value = bytearray(table[name.encode()])
        for _ in range(data.draw(st.integers(1, 3))):
            value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
        table[name.encode()] = bytes(value[: data.draw(st.one_of(st.none(), st.integers(0, len(value))))])

    with mended(Path(f"{written}.index")), contextlib.suppress(UserError):
        change_index(written, change)
        bundle = read_bundle(written)
        for other in bundle:
            with contextlib.suppress(UserError):
                assert bundle.tensor(other).nbytes <= 2 * Path(f"{written}{DATA}").stat().st_size
