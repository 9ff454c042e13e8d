"""Training on several ranks: batches, masks, losses, decisions and files are those of one process."""

import math
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from made_runs import checkpoint_steps, log_lines, make_settings, results, train

from bertsmith.corpus.prepare import prepare_corpus
from bertsmith.errors import UserError
from bertsmith.model.weights import load_model
from bertsmith.rank import local_rank, own_rank, world_size
from bertsmith.training import loop
from bertsmith.training.checkpoint import find_newest_checkpoint
from bertsmith.training.distributed import spread_model
from bertsmith.training.ranks import ALONE, join_ranks
from command_line import bertsmith
from rank_runs import example_rows, joined_rows, run_ranks, train_rank

# accumulation and dropout; held-out examples that no number of ranks divides
USUAL: dict[str, Any] = {
    "steps": 5, "batch_size": 8, "micro_batch_size": 2, "eval__examples": 13, "eval__every": 3, "checkpoint__every": 3,
}  # fmt: skip


def assert_close(lines: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 1e-6) -> None:
    """Two logs are of the same steps with the same values up to rounding."""
    assert len(lines) == len(expected)
    for line, other in zip(lines, expected, strict=True):
        assert_values_close(line, other, tolerance)


def assert_values_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-6) -> None:
    """Two dictionaries hold the same but for the rounding of numbers and the bits that a digest stands for."""
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        allowed = max(tolerance, 1e-5) if key == "grad_norm" else tolerance  # a root of 600,000 squares in float32
        if key != "weights_sha256":
            assert found[key] == (pytest.approx(value, rel=allowed) if isinstance(value, float) else value), key


def sorted_rows(batches: list[Any]) -> list[list[tuple[Any, ...]]]:
    return [sorted(rows) for rows in example_rows(batches)]


@pytest.mark.parametrize("kind", ["mlm+nsp", "mlm, muon"])
def test_any_number_of_ranks_is_the_same_run(corpus: Path, tmp_path: Path, probe: Any, kind: str) -> None:
    options = USUAL if kind == "mlm+nsp" else USUAL | {"objective": "mlm", "optimizer__name": "muon", "steps": 3}
    whole = train(corpus, tmp_path / "one", **options)
    for size in (2, 4) if kind == "mlm+nsp" else (2,):
        out = tmp_path / f"on {size}"
        endings = run_ranks(size, train_rank, corpus, out, options)
        assert joined_rows(endings) == sorted_rows(probe.batches)
        assert all(len(rows) == 8 // size for ending in endings for rows in ending.value["rows"])
        assert_close(log_lines(out), log_lines(tmp_path / "one"))
        assert_values_close(results(endings[0].value["summary"]), results(whole))
        assert {path.name for path in out.iterdir()} == {path.name for path in (tmp_path / "one").iterdir()}
        for ending in endings[1:]:
            assert ending.value["summary"] == {}
            assert ending.said == ""


# --- sizes that do not divide


def test_more_ranks_than_examples_and_fewer_shards(texts: Path, vocabulary: Path, tmp_path: Path, probe: Any) -> None:
    """Three shards on four ranks, batches of three, an epoch that ends in the middle of one."""
    corpus = tmp_path / "corpus"
    prepare_corpus([str(texts)], vocabulary, corpus, workers=1, held_out=0.15, chunk_characters=3000, shard_tokens=8500)
    assert len(list(corpus.glob("train-*.arrow"))) == 3
    # micro-batches as each number of ranks chooses them, and so without dropout, whose masks depend on them
    options = {
        "dropout": 0,
        "epochs": 0.02,
        "steps": "none",
        "batch_size": 3,
        "warmup": 0.1,
        "eval__examples": 5,
        "log__every": 1,
    }
    train(corpus, tmp_path / "one", **options)
    endings = run_ranks(4, train_rank, corpus, tmp_path / "four", options)
    assert joined_rows(endings) == sorted_rows(probe.batches)
    assert endings[3].value["rows"][0] == []
    assert_close(log_lines(tmp_path / "four"), log_lines(tmp_path / "one"))


# --- fsdp


def test_fsdp_is_ddp(corpus: Path, tmp_path: Path) -> None:
    """Weights after 10 steps; the checkpoint is the usual one, the model an ordinary folder."""
    options = USUAL | {"steps": 10, "batch_size": 6, "eval__every": 0}  # three micro-batches for two ranks
    for how in ("ddp", "fsdp"):
        endings = run_ranks(2, train_rank, corpus, tmp_path / how, options | {"parallel": how})
        assert [ending.error for ending in endings] == [None, None], endings
    assert_close(log_lines(tmp_path / "fsdp"), log_lines(tmp_path / "ddp"))
    models = [load_model(tmp_path / how / "model")[0].state_dict() for how in ("ddp", "fsdp")]
    states = [find_newest_checkpoint(tmp_path / how)[0] for how in ("ddp", "fsdp")]
    assert states[0] is not None
    assert states[1] is not None
    optimizers = [state.load_optimizer() for state in states if state is not None]
    for first, second in (models, optimizers, [state.load_weights(models[0]) for state in states if state is not None]):
        assert list(first) == list(second)
        for name, tensor in first.items():
            assert torch.allclose(tensor, second[name], rtol=0, atol=1e-5), name


def test_fsdp_in_bf16(corpus: Path, tmp_path: Path) -> None:
    options = USUAL | {"steps": 3, "precision": "bf16", "objective": "mlm"}
    for how in ("ddp", "fsdp"):
        endings = run_ranks(2, train_rank, corpus, tmp_path / how, options | {"parallel": how})
        assert [ending.error for ending in endings] == [None, None], endings
    assert_close(log_lines(tmp_path / "fsdp"), log_lines(tmp_path / "ddp"), tolerance=1e-2)


def test_fsdp_on_one_process_computes_again_what_it_did_not_keep(corpus: Path, tmp_path: Path) -> None:
    summaries = [train(corpus, tmp_path / how, steps=4, parallel=how) for how in ("ddp", "fsdp")]
    assert results(summaries[0]) == results(summaries[1]), "all bits, dropout included"


def test_fsdp_and_muon(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"parallel.*optimizer\.name.*muon needs it whole; use ddp or adamw"):
        make_settings(corpus, tmp_path / "run", steps=3, parallel="fsdp", optimizer__name="muon")


# --- checkpoints


def test_saved_on_some_ranks_and_resumed_on_others(corpus: Path, tmp_path: Path, probe: Any) -> None:
    parts = [(2, "fsdp", 3), (4, "ddp", 5), (1, "ddp", 6), (2, "fsdp", 8)]  # ranks, how, the step they are to reach
    options = USUAL | {"schedule__decay": "constant", "eval__every": 0}
    train(corpus, tmp_path / "whole", **options | {"steps": parts[-1][2]})
    expected = sorted_rows(probe.batches)
    seen: list[Any] = []
    for size, how, steps in parts:
        changes = options | {"steps": steps, "parallel": how}
        if size == 1:
            probe.batches.clear()
            train(corpus, tmp_path / "run", **changes)
            seen += sorted_rows(probe.batches)
        else:
            endings = run_ranks(size, train_rank, corpus, tmp_path / "run", changes)
            seen += joined_rows(endings)
            if steps > 3:
                # this process may have another number of threads than the ranks
                assert re.search(r"warning: the run began otherwise \(.*ranks \d → \d", endings[0].said)
                assert "resuming from" in endings[0].said
    assert seen == expected
    losses = [[line for line in log_lines(tmp_path / run) if "loss" in line] for run in ("run", "whole")]
    assert_close(*losses)


# --- what ends a run ends it on every rank


def interrupt_rank_1(probe: Any, rank: int) -> None:
    if rank == 1:
        probe.at_update(4, lambda: signal.raise_signal(signal.SIGTERM))


def test_a_signal_to_one_rank_stops_all_at_the_same_step(corpus: Path, tmp_path: Path) -> None:
    options = USUAL | {"steps": 9, "checkpoint__every": 0}
    endings = run_ranks(2, train_rank, corpus, tmp_path / "run", options, interrupt_rank_1)
    assert [ending.error for ending in endings] == ["KeyboardInterrupt: ", "KeyboardInterrupt: "], endings
    assert checkpoint_steps(tmp_path / "run") == [4]
    assert "interrupted: the run is saved at step 4" in endings[0].said
    assert endings[1].said == ""


def fail_on_rank_1(probe: Any, rank: int) -> None:
    def alter(batch: Any) -> Any:
        if len(probe.batches) == 3:
            raise UserError("the corpus is damaged")
        return batch

    if rank == 1:
        probe.alter = alter


def test_a_mistake_found_by_one_rank(corpus: Path, tmp_path: Path) -> None:
    endings = run_ranks(2, train_rank, corpus, tmp_path / "run", USUAL | {"steps": 500}, fail_on_rank_1)
    assert endings[1].error == "UserError: the corpus is damaged"
    assert endings[0].error is not None
    assert endings[0].error.startswith("ToldElsewhere: another process of this job ended")
    assert "another process of this job ended in the middle of the work" in endings[0].said
    assert max(ending.seconds for ending in endings) < 30
    assert checkpoint_steps(tmp_path / "run") == [3]


def other_corpus_on_rank_1(probe: Any, rank: int) -> None:
    if rank == 1:
        open_data = loop.open_data
        loop.open_data = lambda settings: open_data(
            replace(settings, data=settings.data.replace("corpus", "elsewhere"))
        )


def test_a_mistake_in_the_set_up_is_told_once(corpus: Path, other_corpus: Path, tmp_path: Path) -> None:
    missing = run_ranks(2, train_rank, tmp_path / "none", tmp_path / "run", USUAL)
    assert missing[0].error is not None
    assert missing[0].error.startswith("UserError: ")
    assert "does not exist" in missing[0].error
    assert missing[1].error == missing[0].error.replace("UserError", "ToldElsewhere")
    (tmp_path / "corpus").symlink_to(corpus)
    (tmp_path / "elsewhere").symlink_to(other_corpus)
    differing = run_ranks(2, train_rank, tmp_path / "corpus", tmp_path / "run", USUAL, other_corpus_on_rank_1)
    assert differing[0].error is not None
    assert re.match(r"UserError: rank 1 of 2 on .*: data: .* is not the same corpus here", differing[0].error)
    assert differing[1].error is not None
    assert differing[1].error.startswith("ToldElsewhere")


def spoil_step_2_on_rank_1(probe: Any, rank: int) -> None:
    calls = []

    def spoilt(*arguments: Any) -> Any:
        spread = spread_model(*arguments)
        forward = spread._module.forward

        def forward_or_nan(**batch: Any) -> Any:
            loss = forward(**batch)
            calls.append(1)
            if len(calls) == 4:  # two micro-batches a step
                loss.total = loss.total * math.nan
            return loss

        spread._module.forward = forward_or_nan
        return spread

    spread_model = loop.spread_model
    if rank == 1:
        loop.spread_model = spoilt


def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(corpus: Path, tmp_path: Path) -> None:
    options = USUAL | {"steps": 4}
    endings = run_ranks(2, train_rank, corpus, tmp_path / "run", options, spoil_step_2_on_rank_1)
    assert [ending.error for ending in endings] == [None, None], endings
    summary = endings[0].value["summary"]
    assert (summary["steps"], summary["skipped_steps"]) == (4, 1)
    assert [len(ending.value["rows"]) for ending in endings] == [5, 5]


class FastClock:
    """time, but that `monotonic` runs a hundred times as fast."""

    monotonic = staticmethod(lambda: 100 * time.monotonic())


def hurry_on_rank_1(probe: Any, rank: int) -> None:
    if rank == 1:
        loop.time = FastClock


def test_the_first_rank_has_the_clock(corpus: Path, tmp_path: Path) -> None:
    """A budget in minutes and checkpoints by the clock, with clocks that differ: the same steps on both ranks."""
    options = USUAL | {
        "minutes": 0.03, "steps": "none", "warmup": 0.1, "checkpoint__every": 0, "checkpoint__minutes": 0.012,
        "second_phase__share": 0.4, "second_phase__max_length": 48,
    }  # fmt: skip
    endings = run_ranks(2, train_rank, corpus, tmp_path / "run", options, hurry_on_rank_1)
    assert [ending.error for ending in endings] == [None, None], endings
    assert len(endings[0].value["rows"]) == len(endings[1].value["rows"]) == endings[0].value["summary"]["steps"]
    assert 1.8 <= endings[0].value["summary"]["seconds"] < 10
    assert len(checkpoint_steps(tmp_path / "run")) == 2


# --- gradients move once a step


def gradients_after_each_micro_batch(micro_batches: int) -> list[float]:
    """A sum of squares over a matrix's gradient as this rank holds it then."""
    from bertsmith.hardware import Machine
    from bertsmith.model.bert import BertForPreTraining
    from bertsmith.model.config import BertConfig
    from bertsmith.training.benchmark import synthetic_batch

    found = []
    with join_ranks() as ranks:
        device = torch.device("cpu")
        model = BertForPreTraining(BertConfig.of_size("tiny", 30522), next_sentence=False).initialize(0)
        spread = spread_model(model, "ddp", ranks, Machine(device, "fp32", 1.0, None))
        for number in range(micro_batches):
            with spread.micro_batch(last=number == micro_batches - 1):
                batch = synthetic_batch(2, 16, device, 10 * number + ranks.rank)
                spread(**batch, mlm_scale=1.0, nsp_scale=1.0).total.backward()
            gradient = model.bert.encoder.layer[0].output.weight.grad
            found.append(float((gradient**2).sum()))
        del spread, model
    return found


def test_gradients_move_once_a_step() -> None:
    endings = run_ranks(2, gradients_after_each_micro_batch, 3)
    first, second = (ending.value for ending in endings)
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert first[2] == second[2]


# --- started where it cannot work together


def test_other_commands_run_in_one_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused = bertsmith("vocab", tmp_path, "--out", tmp_path / "vocab")
    assert refused.mistake == (
        "vocab runs in one process and was started in 2 (RANK and WORLD_SIZE are set); start it without torchrun"
    )


def test_a_lone_world_size_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (world_size(), own_rank(), local_rank()) == (1, 0, 0)
    with join_ranks() as ranks:
        assert ranks is ALONE


def test_one_process_asks_nothing_of_torch_distributed(corpus: Path, tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch.distributed
from made_runs import train
for name in ("init_process_group", "all_reduce", "broadcast", "barrier"):
    setattr(torch.distributed, name, None)
train(Path({str(corpus)!r}), Path({str(tmp_path / "run")!r}), steps=2)
print([name for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- compiled


def train_traced_rank(corpus: Path, out: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """As `train_rank`, compiled without generating code."""
    from functools import partial

    from bertsmith.model.compiled import compile_encoder

    loop.compile_encoder = partial(compile_encoder, backend="aot_eager")  # the process is this job's alone
    return train_rank(corpus, out, changes | {"compile": "on"})


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_compiled_on_two_ranks(corpus: Path, tmp_path: Path, how: str) -> None:
    """The run of one process without compiling, but for dropout, whose draws are others."""
    options = USUAL | {"steps": 3, "dropout": 0, "parallel": how}
    train(corpus, tmp_path / "one", **options)
    endings = run_ranks(2, train_traced_rank, corpus, tmp_path / "two", options)
    assert [ending.error for ending in endings] == [None, None], endings
    assert_close(log_lines(tmp_path / "two"), log_lines(tmp_path / "one"), 1e-5)
