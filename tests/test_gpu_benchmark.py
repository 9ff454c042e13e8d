"""benchmarks/gpu.sh: its dry run takes the GPU's way at CPU size; what goes wrong is said and stops nothing else."""

import importlib
import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_step")


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_parity")


@pytest.mark.slow
def test_the_dry_run(tmp_path: Path) -> None:
    command = [BENCHMARKS / "gpu.sh", "--out", tmp_path / "results", "--dry-run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == json.loads((tmp_path / "results" / "gpu.json").read_text(encoding="utf-8"))
    assert (tmp_path / "results" / "gpu.md").read_text(encoding="utf-8") in done.stdout
    assert found["parity"]["ok"]
    assert all(check["ok"] and check["found"] <= check["limit"] for check in found["parity"]["checks"])
    assert len(found["parity"]["checks"]) > 15
    assert list(found["cases"]) == ["base at 128", "large at 128", "base at 512"]
    for name, case in found["cases"].items():
        runs = [job for job in case if job.startswith(("ours", "theirs"))]
        assert runs == ["ours", "theirs", *(["theirs-grouped"] if name == "base at 512" else [])]
        for job in runs:
            assert case[job]["tokens_per_second"] > 0
            assert case[job]["utilization"] == pytest.approx(case[job]["tflops"] / case[job]["matmul_tflops"])
        best = max(case[job]["tokens_per_second"] for job in runs if job != "ours")
        assert case["ratio"] == pytest.approx(case["ours"]["tokens_per_second"] / best)
        assert case["ours"]["filled_up_share"] < 0.2


def test_a_job_that_takes_too_long_or_fails_is_said(driver: Any, tmp_path: Path) -> None:
    assert driver.run_job("parity", driver.DRY_RUN, tmp_path, "tiny", 16, 0.2) == {"error": "not finished in 0 s"}
    failed = driver.run_job("ours", driver.DRY_RUN, tmp_path / "no corpus", "tiny", 16, 120)
    assert "no corpus" in failed["error"]
    results = {
        "parity": failed,
        "cases": {"base at 128": {"model": "tiny", "length": 16, "ours": failed, "theirs": failed, "ratio": None}},
    }
    assert driver.as_markdown(results).count("no corpus") == 3


def test_transformers_gets_the_same_rows(driver: Any, parity: Any) -> None:
    batch = parity.make_batch()
    for groups in (1, 3):
        padded = driver.pad_batch(batch, 128, groups, torch.device("cpu"))
        assert len(padded) == groups
        rows = {}
        for group in padded:
            assert group["input_ids"].shape[1] % 32 == 0
            for n in range(len(group["input_ids"])):
                real = int(group["attention_mask"][n].sum())
                assert not group["input_ids"][n, real:].any()
                assert (group["labels"][n, real:] == -100).all()
                row = tuple(tuple(group[name][n, :real].tolist()) for name in ("input_ids", "token_type_ids", "labels"))
                rows[row] = int(group["next_sentence_label"][n])
        labels = np.full(len(batch.token_ids), -100)
        labels[batch.masked_positions] = batch.masked_labels
        borders = list(zip(batch.sequence_starts, batch.sequence_starts[1:], strict=False))
        expected = {
            tuple(tuple(array[a:b].tolist()) for array in (batch.token_ids, batch.segment_ids, labels)): label
            for (a, b), label in zip(borders, batch.next_sentence_labels.tolist(), strict=True)
        }
        assert rows == expected


def test_a_check_can_fail(parity: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that is wrong is found out, and so is dropout that does not follow its key."""
    torch._dynamo.reset()
    from bertsmith.model import attention

    real = attention.varlen_attention

    def wrong(qkv: Any, plan: Any, heads: int, probability: float, masks: Any) -> Any:
        return real(qkv, plan, heads, probability, masks) * 1.01

    monkeypatch.setattr(attention, "varlen_attention", wrong)
    found = parity.run_checks("cpu", "eager")
    failed = {check["name"] for check in found["checks"] if not check["ok"]}
    assert not found["ok"]
    assert any("variable-length attention" in name for name in failed)
    assert not any(math.isnan(check["found"]) for check in found["checks"])
    torch._dynamo.reset()


def test_without_a_gpu_it_says_so(driver: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu_step.py", "--out", "x"])
    with pytest.raises(SystemExit) as exit:
        driver.main()
    assert exit.value.code == 2
    assert "--dry-run runs the same code at CPU size" in capsys.readouterr().err
