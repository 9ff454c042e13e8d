"""Weight files of any age: read alike whatever their format, and no code in them is ever run."""

import contextlib
import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from bertsmith.errors import UserError
from bertsmith.model.pickled import TensorSource, find_weights, read_pytorch_bin

TENSORS = {
    "bert.embeddings.word_embeddings.weight": torch.arange(12.0).reshape(4, 3),
    "bert.embeddings.position_ids": torch.arange(5).expand((1, -1)),
    "bert.pooler.dense.bias": torch.tensor([1.5, -2.0], dtype=torch.float16),
    "cls.bias": torch.nn.Parameter(torch.ones(2)),
}
FORMATS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


def save(path: Path, content: object, zipped: bool = True) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


def assert_same(found: dict[str, Tensor]) -> None:
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
        assert not found[name].requires_grad


def read(folder: Path) -> dict[str, Tensor]:
    source = TensorSource(find_weights(folder))
    tensors = {name: source.get(name) for name in source.names()}
    assert {name: source.shape(name) for name in tensors} == {name: tuple(t.shape) for name, t in tensors.items()}
    return tensors


def write_shards(folder: Path, ending: str) -> Path:
    """Two shards and their index, as transformers names them; returns the index."""
    stem = {"safetensors": "model", "bin": "pytorch_model"}[ending]
    places = {}
    for number, names in enumerate((list(TENSORS)[:2], list(TENSORS)[2:]), 1):
        file_name = f"{stem}-{number:05d}-of-00002.{ending}"
        part = {name: TENSORS[name].detach().contiguous() for name in names}
        save_file(part, folder / file_name) if ending == "safetensors" else save(folder / file_name, part)
        places |= dict.fromkeys(names, file_name)
    index = folder / f"{stem}.{ending}.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}), encoding="utf-8")
    return index


def change_places(index: Path, name: str, file_name: object) -> None:
    content = json.loads(index.read_text(encoding="utf-8"))
    content["weight_map"][name] = file_name
    index.write_text(json.dumps(content), encoding="utf-8")


def test_what_stands_in_the_place_of_weights_is_told(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.mkdir()
    with pytest.raises(UserError, match=r"model\.safetensors: is a folder where a file is needed"):
        find_weights(tmp_path)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"model\.safetensors: is a pipe or a device where a file is needed"):
        find_weights(tmp_path)
    path.unlink()
    path.symlink_to("../blobs/1")
    with pytest.raises(UserError, match=r"is a link that points nowhere \(\.\./blobs/1 is not there\); copy the file"):
        find_weights(tmp_path)
    save(tmp_path / "pytorch_model.bin", TENSORS)  # is as good
    assert find_weights(tmp_path).path.name == "pytorch_model.bin"


@FORMATS
@pytest.mark.parametrize("wrapped", [False, True])
def test_both_formats_of_pytorch(tmp_path: Path, zipped: bool, wrapped: bool) -> None:
    content = {"epoch": 3, "state_dict": TENSORS} if wrapped else TENSORS
    assert_same(read_pytorch_bin(save(tmp_path / "pytorch_model.bin", content, zipped)))
    assert_same(read(tmp_path))


class Harmful:
    """Unpickled by Python itself, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"echo run > {self.marker}",)


@FORMATS
def test_code_is_refused_and_not_run(tmp_path: Path, zipped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # a user's setting for other programs
    marker = tmp_path / "marker"
    path = save(tmp_path / "pytorch_model.bin", TENSORS | {"x": Harmful(marker)}, zipped)
    with pytest.raises(
        UserError, match=r"more than tensors \(\w+\.system\), which could be code and was not run"
    ) as error:
        read(tmp_path)
    assert not marker.exists()
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    torch.load(path, weights_only=False)  # the file would have done it
    assert marker.exists()


def test_a_plain_pickle_with_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful(tmp_path / "marker")))
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        read_pytorch_bin(tmp_path / "pytorch_model.bin")
    assert not (tmp_path / "marker").exists()


@FORMATS
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.nn.Linear(2, 2), r"more than tensors \(torch\.nn"),
        ([torch.ones(2)], "holds a list, not tensors by name"),
        (torch.ones(2), "holds a Tensor"),
        ({"model": {"a": torch.ones(2)}}, r"'model' is a dict, no tensor; save model\.state_dict\(\) alone"),
        ({"state_dict": {"a": 1}}, "'a' is a int"),
        ({3: torch.ones(2)}, "3 is a Tensor"),
        ({"a": torch.ones(2).to_sparse()}, "'a' is sparse"),
        ({"a": torch.empty(2, device="meta")}, "'a' is sparse, quantized or without numbers"),
        ({"a": torch.ones(1).expand(1000)}, "'a' claims more numbers"),
    ],
)
def test_other_contents_are_named(tmp_path: Path, content: object, message: str, zipped: bool) -> None:
    path = save(tmp_path / "x.bin", content, zipped)
    with pytest.raises(UserError, match=message) as error:
        read_pytorch_bin(path)
    assert "\n" not in str(error.value)


@FORMATS
def test_short_files_are_refused(tmp_path: Path, zipped: bool) -> None:
    path = save(tmp_path / "pytorch_model.bin", TENSORS, zipped)
    whole = path.read_bytes()
    for kept in [*range(0, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:kept])
        # (cut within a name, a file of the old format asks for something unknown)
        with pytest.raises(UserError, match=r"pytorch_model\.bin: (damaged|cannot be read|holds more)") as error:
            read_pytorch_bin(path)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_pytorch_bin(tmp_path / "absent.bin")


@settings(max_examples=100)
@given(st.data(), st.booleans())
def test_damaged_files_raise_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, zipped: bool
) -> None:
    path = save(tmp_path_factory.mktemp("damaged") / "x.bin", TENSORS, zipped)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(UserError):
        for tensor in read_pytorch_bin(path).values():
            assert tensor.numel() * tensor.element_size() <= len(content)


def test_compressed_archives_are_refused(tmp_path: Path) -> None:
    """They would be read wrongly when mapped, and can unfold to any size."""
    path = save(tmp_path / "x.bin", {"a": torch.zeros(100_000)})
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "y.bin", "w", zipfile.ZIP_DEFLATED) as new:
        for record in old.infolist():
            new.writestr(record.filename, old.read(record))
    with pytest.raises(UserError, match="zip archive is compressed"):
        read_pytorch_bin(tmp_path / "y.bin")


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_shards_are_read_by_their_index(tmp_path: Path, ending: str) -> None:
    index = write_shards(tmp_path, ending)
    assert_same(read(tmp_path))
    source = TensorSource(find_weights(tmp_path))
    assert source.path == index
    assert source.file("cls.bias").name.startswith(index.name.partition(".")[0] + "-00002-of-00002")
    with pytest.raises(UserError, match=r"index\.json: has no tensor 'other'"):
        source.get("other")


def test_the_better_format_is_chosen(tmp_path: Path) -> None:
    chosen = []
    save(tmp_path / "pytorch_model.bin", TENSORS)
    (tmp_path / "tf_model.h5").write_bytes(b"")
    for made in (
        lambda: None,
        lambda: write_shards(tmp_path, "bin"),
        lambda: write_shards(tmp_path, "safetensors"),
        lambda: save_file({k: v.detach().contiguous() for k, v in TENSORS.items()}, tmp_path / "model.safetensors"),
    ):
        made()
        chosen.append(find_weights(tmp_path).path.name)
        assert_same(read(tmp_path))
    assert chosen == ["pytorch_model.bin", "pytorch_model.bin", "model.safetensors.index.json", "model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "pytorch_model.bin").unlink()
    assert find_weights(tmp_path).path.name == "pytorch_model.bin.index.json"


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "C:model.safetensors",
        "..",
        "",
        "config.json",
        "model.bin",
    ],
)
def test_an_index_names_files_of_its_folder_only(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path, folder / "sub"):
        save_file({"cls.bias": torch.ones(2)}, place / "model.safetensors")
    index = write_shards(folder, "safetensors")
    change_places(index, "cls.bias", name)
    with pytest.raises(UserError, match=r"which is no \.safetensors file of this folder") as error:
        find_weights(folder)
    assert repr(name) in str(error.value)


def test_missing_shards_and_tensors_are_named(tmp_path: Path) -> None:
    index = write_shards(tmp_path, "safetensors")
    change_places(index, "absent", "model-00001-of-00002.safetensors")
    with pytest.raises(UserError, match=r"model-00001-of-00002\.safetensors: has no tensor 'absent', though model"):
        TensorSource(find_weights(tmp_path))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"1 of the 2 files it names are not there, the first is model-00002-of-00002"):
        find_weights(tmp_path)


def test_a_tensor_in_two_shards_is_taken_from_where_the_index_says(tmp_path: Path) -> None:
    write_shards(tmp_path, "safetensors")
    names = list(TENSORS)
    copies = {name: TENSORS[name].detach().contiguous() for name in names}
    one = {name: copies[name] for name in names[:2]} | {names[2]: torch.zeros(2), "unlisted": torch.ones(1)}
    two = {name: copies[name] for name in names[2:]} | {names[0]: torch.zeros(3)}
    for number, part in enumerate((one, two), 1):
        save_file(part, tmp_path / f"model-{number:05d}-of-00002.safetensors")
    tensors = read(tmp_path)
    assert torch.equal(tensors.pop("unlisted"), torch.ones(1))
    assert_same(tensors)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "no weight_map"),
    ],
)
def test_broken_indices_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        find_weights(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 50, -1])
def test_broken_safetensors_are_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(30)}, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"model\.safetensors: not a readable safetensors file") as error:
        TensorSource(find_weights(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], r"no model\.safetensors or pytorch_model\.bin here, .* \(found no weights\)"),
        (["tf_model.h5", "flax_model.msgpack"], r"found flax_model\.msgpack, tf_model\.h5\); save it"),
        (["bert_model.ckpt.index"], r"found bert_model\.ckpt\.index\); convert TensorFlow's checkpoint first"),
    ],
)
def test_folders_without_weights_say_what_is_read(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=message):
        find_weights(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        find_weights(tmp_path / "absent")


def test_safetensors_are_read_one_at_a_time(tmp_path: Path) -> None:
    """A file of 8 GiB, nearly all of it a hole: reading all of it would not fit, or take a while."""
    header = {
        "large": {"dtype": "F32", "shape": [2**31], "data_offsets": [0, 2**33]},
        "small": {"dtype": "F32", "shape": [1], "data_offsets": [2**33, 2**33 + 4]},
    }
    written = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        file.truncate(8 + len(written) + 2**33 + 4)
    source = TensorSource(find_weights(tmp_path))
    assert source.shape("large") == (2**31,)
    assert source.get("small").tolist() == [0.0]
