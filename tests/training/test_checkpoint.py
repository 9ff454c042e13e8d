"""Exact round trips, kills, damaged files, a full disk: what is found is always complete and what was written."""

import json
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bertsmith.errors import UserError
from bertsmith.storage import PARTIAL
from bertsmith.training import checkpoint as module
from bertsmith.training.checkpoint import find_newest_checkpoint, open_checkpoint, save_checkpoint
from bertsmith.training.optimizer import BertOptimizer, OptimizerSettings


def tensors_of(step: int, size: int = 100) -> dict[str, Tensor]:
    return {"a.weight": torch.full((size, 3), float(step)), "a.bias": torch.arange(size) * step}


def save(run: Path, step: int, keep: int = 2, size: int = 100) -> Path:
    return save_checkpoint(run, step, tensors_of(step, size), {"step": torch.tensor(step)}, {"step": step}, keep)


def steps_in(run: Path) -> list[str]:
    return sorted(os.listdir(run / "checkpoints"))


def newest(run: Path) -> int:
    found, broken = find_newest_checkpoint(run)
    assert found is not None
    assert broken == []
    assert found.state["step"] == found.step
    for name, tensor in found.load_weights(tensors_of(0)).items():
        assert torch.equal(tensor, tensors_of(found.step)[name])
    assert int(found.load_optimizer()["step"]) == found.step
    return found.step


def test_round_trip_is_exact(tmp_path: Path) -> None:
    awkward = torch.tensor([0.1, -0.0, float("inf"), float("nan"), 1e-45, 3.4e38])
    weights = {"w": awkward, "transposed": torch.randn(3, 5).T, "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    state: dict[str, Any] = {"loss": 0.1 + 0.2, "place": [1, None, "é中♡"], "worst": float("nan"), "big": 2**63}
    folder = save_checkpoint(tmp_path, 7, weights, {"step": torch.tensor(2**40)}, state)
    assert folder.name == "step-00000007"
    found, broken = find_newest_checkpoint(tmp_path)
    assert found is not None
    assert broken == []
    assert (found.step, found.folder) == (7, folder)
    assert repr(found.state) == repr(state)
    loaded = found.load_weights(weights)
    assert loaded.keys() == weights.keys()
    for name, tensor in weights.items():
        assert loaded[name].contiguous().view(torch.int32).equal(tensor.contiguous().view(torch.int32)), name
    assert int(found.load_optimizer()["step"]) == 2**40


def test_a_model_with_its_optimizer_continues_bit_by_bit(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[nn.Module, BertOptimizer]:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"encoder": nn.ModuleDict({"layer": nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])})})
        settings = OptimizerSettings("muon", learning_rate=0.01)
        return model, BertOptimizer(model.named_parameters(), settings)

    def train(model: nn.Module, optimizer: BertOptimizer, first: int, last: int) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step(1.0)

    whole, optimizer = build(0)
    train(whole, optimizer, 0, 10)
    model, optimizer = build(0)
    train(model, optimizer, 0, 4)
    save_checkpoint(tmp_path, 4, model.state_dict(), optimizer.state_tensors(), {})
    model, optimizer = build(1)
    found, _ = find_newest_checkpoint(tmp_path)
    assert found is not None
    model.load_state_dict(found.load_weights(model.state_dict()))
    optimizer.load_state_tensors(found.load_optimizer())
    train(model, optimizer, 4, 10)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_tied_weights_are_stored_once_and_come_back_tied(tmp_path: Path) -> None:
    table = torch.randn(1000, 16)
    folder = save_checkpoint(tmp_path, 1, {"word": table, "decoder": table, "alike": table.clone()}, {}, {})
    assert (folder / "model.safetensors").stat().st_size < 2.1 * table.nbytes
    loaded = open_checkpoint(folder).load_weights({"word": table, "decoder": table, "alike": table})
    assert loaded["word"].data_ptr() == loaded["decoder"].data_ptr() != loaded["alike"].data_ptr()
    assert all(torch.equal(tensor, table) for tensor in loaded.values())


def test_nothing_yet(tmp_path: Path) -> None:
    assert find_newest_checkpoint(tmp_path) == (None, [])
    assert find_newest_checkpoint(tmp_path / "absent") == (None, [])
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "notes.txt").write_text("the user's own", encoding="utf-8")
    assert find_newest_checkpoint(tmp_path) == (None, [])
    assert steps_in(tmp_path) == ["notes.txt"]


def test_older_ones_go_after_the_new_one_is_there(tmp_path: Path) -> None:
    for step in (1, 2, 3, 100_000_000):
        save(tmp_path, step)
    assert steps_in(tmp_path) == ["step-00000003", "step-100000000"]
    assert newest(tmp_path) == 100_000_000
    save(tmp_path, 100_000_001, keep=1)
    assert steps_in(tmp_path) == ["step-100000001"]


def test_files_can_be_read_by_others(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert len(list(folder.iterdir())) == 4
    assert len(modes) == 1


def damage_truncate(folder: Path) -> str:
    with (folder / "optimizer.safetensors").open("r+b") as file:
        file.truncate(20)
    return r"optimizer\.safetensors has 20 of \d+ bytes"


def damage_flip(folder: Path) -> str:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-5, os.SEEK_END)
        file.write(bytes([byte[0] ^ 1]))
    return r"model\.safetensors is damaged"


def damage_state(folder: Path) -> str:
    path = folder / "state.json"
    path.write_bytes(path.read_bytes().replace(b"2", b"9", 1))
    return r"state\.json is damaged"


def damage_remove(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return r"model\.safetensors: No such file"


def damage_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes()[:40])
    return r"manifest\.json is not JSON"


def damage_manifest_binary(folder: Path) -> str:
    (folder / "manifest.json").write_bytes(b"\xff\xfe\x00")
    return r"manifest\.json is not JSON"


def damage_manifest_content(folder: Path) -> str:
    (folder / "manifest.json").write_text('{"version": 1, "step": 2, "files": {}}', encoding="utf-8")
    return r"manifest\.json is not a manifest"


def damage_empty(folder: Path) -> str:
    shutil.rmtree(folder)
    folder.mkdir()
    return r"manifest\.json: No such file"


DAMAGES = [
    damage_truncate,
    damage_flip,
    damage_state,
    damage_remove,
    damage_manifest,
    damage_manifest_binary,
    damage_manifest_content,
    damage_empty,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_newest_is_named_and_the_one_before_is_used(tmp_path: Path, damage: Any) -> None:
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    reason = damage(folder)
    with pytest.raises(UserError, match=reason):
        open_checkpoint(folder)
    found, broken = find_newest_checkpoint(tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(broken) == 1
    assert broken[0].startswith(f"{folder}: broken checkpoint, ")
    assert steps_in(tmp_path) == ["step-00000001", "step-00000002"]  # left for the user to look at
    save(tmp_path, 2)  # the resumed run comes to the same step again
    assert newest(tmp_path) == 2


def test_a_broken_one_is_kept_until_the_run_has_passed_it_and_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, 10)
    damage_truncate(save(tmp_path, 20))
    save(tmp_path, 15)
    assert steps_in(tmp_path) == ["step-00000010", "step-00000015", "step-00000020"]
    save(tmp_path, 25)
    assert steps_in(tmp_path) == ["step-00000015", "step-00000025"]


def test_all_broken_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    damage_flip(save(tmp_path, 1))
    damage_truncate(save(tmp_path, 2))
    with pytest.raises(UserError, match=r"no complete checkpoint is left.*step-00000002.*step-00000001.*Move"):
        find_newest_checkpoint(tmp_path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    manifest = json.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"version": 2}), encoding="utf-8")
    with pytest.raises(UserError, match="its format is 2, this bertsmith reads 1"):
        open_checkpoint(folder)


def test_weights_of_another_model_are_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path, 1))
    expected = tensors_of(1)
    with pytest.raises(UserError, match=r"a\.extra is missing"):
        checkpoint.load_weights(expected | {"a.extra": torch.zeros(1)})
    with pytest.raises(UserError, match=r"a\.bias is not known to the model"):
        checkpoint.load_weights({"a.weight": expected["a.weight"]})
    with pytest.raises(UserError, match=r"a\.weight has shape \(100, 3\), the model \(3, 3\)"):
        checkpoint.load_weights(expected | {"a.weight": torch.zeros(3, 3)})


def test_what_kills_left_is_cleaned(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    partial = folder.with_name(f".step-00000002{PARTIAL}4711")
    pruned = folder.with_name(f".step-00000000{PARTIAL}pruned-4711")
    for leftover in (partial, pruned):
        shutil.copytree(folder, leftover)
    assert newest(tmp_path) == 1
    assert steps_in(tmp_path) == ["step-00000001"]


def test_killed_between_the_two_renames_of_a_replacement(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    os.rename(folder, folder.with_name(f".{folder.name}{PARTIAL}old-4711"))
    assert newest(tmp_path) == 1
    assert steps_in(tmp_path) == ["step-00000001"]


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)  # this process forks: no thread pool in the parent
sys.path.insert(0, sys.argv[1])
from test_checkpoint import newest, save

run, seed, rounds = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
generator = random.Random(seed)
step, progress = 0, []
for _ in range(rounds):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        while True:
            step += 1
            save(run, step)
            os.write(writer, b".")
    os.read(reader, 1)  # it has saved once; the kill comes somewhere in the saves that follow
    time.sleep(generator.uniform(0, 0.05))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.set_blocking(reader, False)
    try:
        saved = 1 + len(os.read(reader, 100000))
    except BlockingIOError:
        saved = 1
    leftovers = any(name.startswith(".") for name in os.listdir(run / "checkpoints"))
    found = newest(run)  # asserts that the content is that of its step
    assert found in (step + saved, step + saved + 1), (found, step, saved)
    assert not any(name.startswith(".") for name in os.listdir(run / "checkpoints"))
    step = found
    progress.append(leftovers)
print(sum(progress))
"""


def test_twenty_kills_during_saves(tmp_path: Path) -> None:
    seed = random.randrange(1000)
    arguments = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path), str(seed), "20"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, (seed, done.stderr)
    assert int(done.stdout) >= 1, "no kill came in the middle of a save"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=False).returncode
    ):
        pytest.skip("mounting a small disk is not allowed here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_leaves_the_previous_checkpoint(small_disk: Path) -> None:
    save(small_disk, 1, size=20_000)  # 400 kB each
    save(small_disk, 2, size=20_000)
    with pytest.raises(UserError, match=r"the disk is full.*step-00000002 is complete and will be used"):
        save(small_disk, 3, size=20_000)
    assert steps_in(small_disk) == ["step-00000001", "step-00000002"]
    found, broken = find_newest_checkpoint(small_disk)
    assert found is not None
    assert (found.step, broken) == (2, [])
    assert torch.equal(found.load_weights(tensors_of(0, 20_000))["a.bias"], torch.arange(20_000) * 2)


@pytest.mark.parametrize("failing", ["save_file", "atomic_folder"])
def test_a_disk_that_refuses_without_a_small_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def refuse(*_: Any) -> None:
        if failing == "save_file":
            raise module.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        raise UserError("somewhere: the disk is full")

    save(tmp_path, 1)
    monkeypatch.setattr(module, failing, refuse)
    with pytest.raises(UserError, match=r"the disk is full.*step-00000001 is complete"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert steps_in(tmp_path) == ["step-00000001"]
    assert newest(tmp_path) == 1


def test_the_first_save_on_a_full_disk_says_that_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", refuse)
    with pytest.raises(UserError, match="there is no earlier one"):
        save(tmp_path, 1)
    assert steps_in(tmp_path) == []
