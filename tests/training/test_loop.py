"""The loop itself: what a run leaves behind, budgets and phases, bad steps, divergence, accumulation, repeatability."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_runs import Crash, Probe, checkpoint_steps, demo_rows, log_lines, results, train
from torch.nn import Parameter

from bertsmith.corpus.batches import Batch
from bertsmith.corpus.prepare import prepare_corpus
from bertsmith.errors import UserError
from bertsmith.model.weights import load_model
from bertsmith.options import load_recipe
from bertsmith.text.tokenizer import load_tokenizer
from bertsmith.text.vocabulary import build_vocabulary
from bertsmith.training import loop
from bertsmith.training.loop import pretrain
from bertsmith.training.metrics_log import read_metrics
from bertsmith.training.setup import run_settings


def test_what_a_run_leaves_behind(corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    summary = train(corpus, out, steps=6, eval__every=4, log__examples=2, log__every=2)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert {
        "steps", "tokens", "train_loss", "eval_loss", "eval_mlm_accuracy", "eval_nsp_accuracy", "unigram_entropy",
        "ln_vocab", "tokens_per_second", "utilization", "model_dir", "weights_sha256",
    } <= summary.keys()  # fmt: skip
    assert (summary["steps"], summary["skipped_steps"]) == (6, 0)
    assert summary["ln_vocab"] == pytest.approx(math.log(800))
    assert 3 < summary["unigram_entropy"] < summary["ln_vocab"]
    lines = read_metrics(out)
    logged = [line for line in lines if "loss" in line]
    assert [line["step"] for line in logged] == [2, 4, 6]
    assert logged[0].keys() >= {
        "loss", "mlm_loss", "nsp_loss", "learning_rate", "grad_norm", "tokens", "tokens_per_second", "utilization",
        "seconds", "epochs",
    }  # fmt: skip
    for line in logged:
        assert line["loss"] == pytest.approx(line["mlm_loss"] + line["nsp_loss"])
        assert line["seconds"] > 0
        assert line["tokens_per_second"] > 0
    assert logged[-1]["tokens"] == summary["tokens"] == summary["examples"]["tokens"]
    assert summary["train_loss"] == logged[-1]["loss"]
    assert [line["step"] for line in lines if "eval_loss" in line] == [4, 6]
    assert lines[-1]["eval_loss"] == summary["eval_loss"]
    assert checkpoint_steps(out) == [3, 6]
    names = {path.name for path in out.iterdir() if not path.name.startswith(".")}
    assert names == {"config.toml", "metrics.jsonl", "tensorboard", "loss.png", "checkpoints", "model"}
    _, report, values = load_model(out / "model")
    assert (report.missing, report.unused) == ([], [])
    assert values["bertsmith_objective"] == "mlm+nsp"
    assert load_tokenizer(out / "model").fingerprint == load_tokenizer(corpus / "tokenizer").fingerprint
    said = capfd.readouterr().err
    assert said.count("[CLS]") == 2, "the first examples are shown decoded"
    assert "(ln V)" in said
    assert "(unigram entropy)" in said
    for step in (2, 4, 6):
        assert f"\nstep {step}/6  loss {logged[step // 2 - 1]['loss']:.3f}" in said
    assert said.count(" tok/s ") == said.count(" left\n") == 3
    assert "step 6: held-out MLM loss" in said


def test_nothing_is_left_of_a_run_that_could_not_start(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        train(tmp_path / "absent", tmp_path / "run", steps=3)
    with pytest.raises(UserError, match=r"max_length: sequences of 600 tokens are longer than the model's 512"):
        train(corpus, tmp_path / "run", steps=3, second_phase__share=0.1, second_phase__max_length=600)
    with pytest.raises(UserError, match=r"max_length: 4 is not from 5 to"):
        train(corpus, tmp_path / "run", steps=3, second_phase__share=0.1, second_phase__max_length=4)
    assert list(tmp_path.iterdir()) == []


# --- budgets and phases


def test_learning_rates_and_an_injected_infinite_gradient(corpus: Path, tmp_path: Path, probe: Probe) -> None:
    """P5 and P2: the list of (step, learning rate) is the same with and without a step that was skipped."""
    options = {"steps": 20, "warmup": 5}
    train(corpus, tmp_path / "good", **options)
    expected = [(line["step"], line["learning_rate"]) for line in log_lines(tmp_path / "good") if "loss" in line]
    assert [rate for _, rate in expected] == pytest.approx(
        [1e-3 * k / 5 for k in range(1, 6)] + [1e-3 * (20 - k) / 15 for k in range(5, 20)]
    )
    bad = [probe.batches[number].example_ids.tolist() for number in (2, 3, 10)]

    def spoil(parameters: list[Parameter]) -> None:
        ids = probe.batches[-1].example_ids.tolist()
        if ids in bad:
            value = (math.inf, -math.inf, math.nan)[bad.index(ids)]
            parameters[len(probe.batches) % 7].grad.view(-1)[5] = value  # type: ignore[union-attr]

    probe.on_update = spoil
    probe.batches.clear()
    summary = train(corpus, tmp_path / "spoilt", **options)
    rows = probe.rows()
    assert [
        (line["step"], line["learning_rate"]) for line in log_lines(tmp_path / "spoilt") if "loss" in line
    ] == expected
    assert (summary["steps"], summary["skipped_steps"], len(rows)) == (20, 3, 23)
    weights = load_model(tmp_path / "spoilt" / "model")[0].state_dict()
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())

    # killed after the first two and after the third of them
    def spoil_and_die(parameters: list[Parameter]) -> None:
        spoil(parameters)
        if len(probe.batches) == 9:
            raise Crash

    probe.on_update = spoil_and_die
    for _ in range(2):
        probe.batches.clear()
        with pytest.raises(Crash):
            train(corpus, tmp_path / "killed", **options)
    probe.on_update = spoil
    assert results(train(corpus, tmp_path / "killed", **options)) == results(summary)
    assert log_lines(tmp_path / "killed") == log_lines(tmp_path / "spoilt")


def test_many_bad_steps_stop_the_run(
    corpus: Path, tmp_path: Path, probe: Probe, capfd: pytest.CaptureFixture[str]
) -> None:
    def spoil(parameters: list[Parameter]) -> None:
        if len(probe.batches) > 7:
            parameters[0].grad.fill_(math.nan)  # type: ignore[union-attr]

    probe.on_update = spoil
    newest = tmp_path / "run" / "checkpoints" / "step-00000006"
    with pytest.raises(
        UserError, match="10 steps in a row gave no finite gradient; the last good checkpoint is"
    ) as stop:
        train(corpus, tmp_path / "run", steps=40)
    assert str(newest) in str(stop.value)
    assert len(probe.batches) == 17
    assert capfd.readouterr().err.count("batch skipped") == 10
    assert log_lines(tmp_path / "run")[-1]["step"] == 7


def test_a_batch_without_masks_has_loss_0(corpus: Path, tmp_path: Path, probe: Probe) -> None:
    nothing = np.zeros(0, dtype=np.int64)

    def alter(batch: Batch) -> Batch:
        if len(probe.batches) == 1:
            return replace(batch, masked_positions=nothing, masked_labels=nothing)
        return batch

    probe.alter = alter
    for objective in ("mlm+nsp", "mlm"):
        probe.batches.clear()
        summary = train(corpus, tmp_path / objective, steps=3, objective=objective, micro_batch_size=2)
        losses = [line["mlm_loss"] for line in log_lines(tmp_path / objective) if "loss" in line]
        assert losses[1] == 0
        assert losses[0] > 5 < losses[2]
        assert summary["skipped_steps"] == 0


def test_the_second_phase_begins_at_the_exact_step(corpus: Path, tmp_path: Path, probe: Probe) -> None:
    train(corpus, tmp_path / "run", steps=20, second_phase__share=0.1, second_phase__max_length=100, eval__every=10)
    lengths = [batch.max_sequence_length for batch in probe.batches]
    assert len(lengths) == 20
    assert max(lengths[:18]) <= 32
    assert min(lengths[18:]) > 32
    evaluations = [line for line in log_lines(tmp_path / "run") if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [10, 20]


def test_epochs_end_with_the_last_partial_batch(corpus: Path, tmp_path: Path, probe: Probe) -> None:
    summary = train(corpus, tmp_path / "run", epochs=1, batch_size=100, log__every=2)
    ids = Counter(np.concatenate([batch.example_ids for batch in probe.batches]).tolist())
    assert set(ids.values()) == {1}, "each example once"
    sizes = [len(batch) for batch in probe.batches]
    assert sizes[:-1] == [100] * (len(sizes) - 1)
    assert 0 < sizes[-1] < 100
    assert (summary["epochs"], summary["steps"]) == (1.0, len(sizes))
    fractions = [line["epochs"] for line in log_lines(tmp_path / "run") if "loss" in line]
    assert fractions == sorted(fractions)
    assert fractions[0] == pytest.approx(200 / sum(sizes), abs=0.02)
    assert fractions[-1] == 1.0
    # and on: the second epoch holds the same examples in another order, with other masks
    before = list(probe.batches)
    probe.batches.clear()
    assert train(corpus, tmp_path / "run", epochs=2, batch_size=100, log__every=2)["epochs"] == 2.0
    again = np.concatenate([batch.example_ids for batch in probe.batches])
    assert len(again) == pytest.approx(sum(sizes), rel=0.1)
    assert again.tolist() != np.concatenate([batch.example_ids for batch in before]).tolist()


def test_a_part_of_an_epoch(corpus: Path, tmp_path: Path) -> None:
    summary = train(corpus, tmp_path / "run", epochs=0.25)
    assert 0.25 <= summary["epochs"] < 0.27


def test_epochs_with_two_phases(corpus: Path, tmp_path: Path, probe: Probe) -> None:
    """What a change of length passes over is not counted as read: the second phase gets its share."""
    summary = train(corpus, tmp_path / "run", epochs=0.5, second_phase__share=0.4, second_phase__max_length=64)
    tokens = dict.fromkeys((32, 64), 0)
    for batch in probe.batches:
        tokens[32 if batch.max_sequence_length <= 32 else 64] += len(batch.token_ids)
    assert tokens[64] / sum(tokens.values()) == pytest.approx(0.4, abs=0.08)
    assert 0.5 <= summary["epochs"] < 0.55


class Clock:
    """A clock that goes on by a second each time it is read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr(loop.time, "monotonic", self)

    def __call__(self) -> float:
        self.now += 1
        return self.now


def test_minutes_count_over_all_parts(
    corpus: Path, tmp_path: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    whole = train(corpus, tmp_path / "whole", minutes=1, log__every=4)
    assert 60 <= whole["seconds"] < 70
    rates = [line["learning_rate"] for line in log_lines(tmp_path / "whole") if "loss" in line]
    assert rates[0] > rates[-1] > 0
    assert log_lines(tmp_path / "whole")[-2]["step"] == whole["steps"], "the last steps are logged, however few"
    probe.crash_at(whole["steps"] * 3 // 4)
    with pytest.raises(Crash):
        train(corpus, tmp_path / "run", minutes=1, log__every=4)
    used = [line["seconds"] for line in read_metrics(tmp_path / "run")][-1]
    assert used > 30
    begun = len(probe.batches)
    parts = train(corpus, tmp_path / "run", minutes=1, log__every=4)
    assert 60 <= parts["seconds"] < 70
    assert len(probe.batches) - begun < whole["steps"] // 2, "the time used so far counts"
    assert abs(parts["steps"] - whole["steps"]) <= 5
    again = train(corpus, tmp_path / "run", minutes=1, log__every=4)
    assert again == parts | {"resumed_from_step": None, "resume_seconds": None}
    longer = train(corpus, tmp_path / "run", minutes=1.5, log__every=4)
    assert 90 <= longer["seconds"] < 100


# --- divergence


@pytest.mark.parametrize("log_every", [1, 3])
def test_a_learning_rate_far_too_high_stops(corpus: Path, tmp_path: Path, log_every: int) -> None:
    with pytest.raises(
        UserError, match=r"the loss diverged: it is \d+.*last good checkpoint is .*step-.*Lower"
    ) as stop:
        train(corpus, tmp_path / "run", steps=150, learning_rate=10, log__every=log_every, checkpoint__every=1)
    assert len(str(stop.value).splitlines()) == 1
    last = checkpoint_steps(tmp_path / "run")[-1]
    lines = [line for line in log_lines(tmp_path / "run") if "loss" in line]
    assert lines[-1]["step"] - last >= 4 * log_every, "none is written while the loss runs away"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to …"),
        MemoryError("Unable to allocate 4 GiB"),
    ],
)
def test_memory_that_runs_out(corpus: Path, tmp_path: Path, probe: Probe, error: BaseException) -> None:
    def fail() -> None:
        raise error

    probe.at_update(5, fail)
    with pytest.raises(UserError, match=r"memory ran out with 3 sequences at once; .* --micro-batch-size") as stop:
        train(corpus, tmp_path / "run", steps=6, micro_batch_size=3)
    assert str(error) in str(stop.value)
    assert train(corpus, tmp_path / "run", steps=6, micro_batch_size=1)["resumed_from_step"] == 3


def test_other_faults_stay_what_they_are(corpus: Path, tmp_path: Path, probe: Probe) -> None:
    def fail() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    probe.at_update(1, fail)
    with pytest.raises(RuntimeError, match="mat1"):
        train(corpus, tmp_path / "run", steps=6)


# --- the same result, however it is carried out


@pytest.mark.parametrize("objective", ["mlm+nsp", "mlm"])
def test_accumulation_is_the_big_batch(corpus: Path, tmp_path: Path, objective: str) -> None:
    """P3: dropout off, fp32; losses, gradient norms and weights agree to rounding."""
    options = {"steps": 4, "batch_size": 7, "dropout": 0, "objective": objective}
    train(corpus, tmp_path / "whole", micro_batch_size=7, **options)
    expected = log_lines(tmp_path / "whole")
    for size in (1, 2, 5):
        train(corpus, tmp_path / f"by {size}", micro_batch_size=size, **options)
        for line, wanted in zip(log_lines(tmp_path / f"by {size}"), expected, strict=True):
            assert line.keys() == wanted.keys()
            for key in line:
                if wanted[key] is None:
                    assert line[key] is None
                    continue
                assert line[key] == pytest.approx(wanted[key], rel=1e-6 if "loss" in key else 1e-5), (key, line["step"])


def test_the_number_of_loader_workers_changes_nothing(corpus: Path, tmp_path: Path) -> None:
    runs = [train(corpus, tmp_path / str(workers), steps=5, examples__workers=workers) for workers in (0, 1, 2)]
    assert results(runs[0]) == results(runs[1]) == results(runs[2])


def test_config_toml_repeats_the_run(corpus: Path, tmp_path: Path) -> None:
    first = train(
        corpus, tmp_path / "run", steps=5, precision="auto", objective="mlm+sop", masking__unit="word", seed=3,
        schedule__floor=0.1, output_bias="unigram", optimizer__name="muon", optimizer__matrix_rate_factor=2,
    )  # fmt: skip
    recipe = load_recipe(tmp_path / "run" / "config.toml")
    assert recipe["precision"] == first["precision"] == "fp32"
    again = pretrain(run_settings(tmp_path / "run2", recipe, []), tmp_path / "run2")
    assert again["weights_sha256"] == first["weights_sha256"]
    assert log_lines(tmp_path / "run2") == log_lines(tmp_path / "run")
    other = pretrain(run_settings(tmp_path / "run3", recipe, [("seed", "4")]), tmp_path / "run3")
    assert other["weights_sha256"] != first["weights_sha256"]
    assert other["eval_loss"] != first["eval_loss"]


def test_the_seed_decides_dropout_too(corpus: Path, tmp_path: Path, probe: Probe) -> None:
    train(corpus, tmp_path / "a", steps=2)
    train(corpus, tmp_path / "b", steps=2, dropout=0)
    a, b = log_lines(tmp_path / "a"), log_lines(tmp_path / "b")
    assert probe.rows()[:2] == probe.rows()[2:]
    assert a[0]["loss"] != b[0]["loss"]


# --- P1: does it learn at all

NOUNS = [
    first + last for first in ("bar", "dol", "fin", "gor", "hel", "kam") for last in ("da", "mi", "no", "ru", "te")
]
VERBS = ["sees", "likes", "follows", "hears", "finds", "calls", "meets", "knows"]
KINDS = ["old", "young", "tall", "small", "quiet", "clever", "happy", "tired", "hungry", "grey"]
PLACES = ["garden", "house", "river", "field", "forest", "market", "town", "castle", "valley", "church"]


def templated_sentences(count: int) -> list[str]:
    """Sentences whose second half follows from the first."""
    generator = np.random.default_rng(0)
    sentences = []
    for _ in range(count):
        noun, verb, kind, place = (int(generator.integers(len(words))) for words in (NOUNS, VERBS, KINDS, PLACES))
        other, third = NOUNS[(noun + verb + 1) % len(NOUNS)], NOUNS[(noun + 13) % len(NOUNS)]
        sentences.append(
            f"The {KINDS[kind]} {NOUNS[noun]} {VERBS[verb]} the {other} in the {PLACES[place]} and the {KINDS[kind]} "
            f"{third} stays in the {PLACES[(place + 3) % len(PLACES)]}."
        )
    return sentences


@pytest.mark.parametrize("repeated", [False, True])
def test_templated_sentences_are_learnt(tmp_path: Path, repeated: bool) -> None:
    sentences = templated_sentences(2000)
    documents = [sentences[i : i + 10] for i in range(0, 2000, 10)]
    if repeated:  # 5000 copies of one line, most of them in documents that are not alike
        documents = [document + ["All rights reserved by the publisher."] * 25 for document in documents]
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join("\n".join(document) for document in documents), encoding="utf-8")
    from bertsmith.text.documents import ReadOptions

    options = ReadOptions(documents="blank-line")
    build_vocabulary([str(text)], tmp_path / "vocab", size=200, workers=1, read_options=options)
    report = prepare_corpus(
        [str(text)], tmp_path / "vocab", tmp_path / "corpus", workers=1, read_options=options, held_out=0.05
    )
    assert any("repeat" in warning for warning in report["warnings"]) == repeated
    summary = train(
        tmp_path / "corpus",
        tmp_path / "run",
        steps=200,
        batch_size=16,
        max_length=32,
        objective="mlm",
        warmup=20,
        dropout=0,
        optimizer__name="muon",
        optimizer__matrix_rate_factor=4,
        learning_rate=3e-3,
        output_bias="unigram",
        checkpoint__every=0,
        eval__examples=50,
        log__every=10,
    )
    assert summary["eval_mlm_loss"] < summary["unigram_entropy"] - 0.7
    assert summary["train_loss"] < summary["unigram_entropy"] - 0.7


# --- going on from a model folder


def test_going_on_from_a_model_folder(
    corpus: Path, other_corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = train(corpus, tmp_path / "first", steps=30, learning_rate=3e-3, warmup=5, checkpoint__every=0)
    folder = tmp_path / "first" / "model"
    options: dict[str, Any] = {"model": folder, "learning_rate": 1e-9, "warmup": 0}
    capfd.readouterr()
    same = train(corpus, tmp_path / "same", steps=1, **options)
    assert same["eval_loss"] == pytest.approx(first["eval_loss"], abs=1e-4), "its weights are where it begins"
    assert "start from random values" not in capfd.readouterr().err
    other = train(other_corpus, tmp_path / "other", steps=4, model=folder)
    assert other["steps"] == 4
    # the folder it began from is not needed to resume
    (folder / "config.json").rename(folder / "gone.json")
    assert train(other_corpus, tmp_path / "other", steps=6, model=folder)["steps"] == 6
    with pytest.raises(UserError, match="neither a published size"):
        train(other_corpus, tmp_path / "third", steps=6, model=folder)


def test_missing_heads_are_said_and_start_from_the_seed(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file, save_file

    train(corpus, tmp_path / "first", steps=2)
    folder = tmp_path / "first" / "model"
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not name.startswith(("cls.", "bert.pooler."))}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    capfd.readouterr()
    runs = {}
    for objective, seed in (("mlm", 0), ("mlm+nsp", 0), ("mlm+nsp", 1)):
        out = tmp_path / f"{objective} {seed}"
        train(corpus, out, steps=2, model=folder, objective=objective, learning_rate=1e-9, seed=seed)
        said = capfd.readouterr().err
        assert "start from random values: " in said
        assert "cls.predictions.transform.dense.weight" in said
        assert ("cls.seq_relationship.weight" in said) == (objective == "mlm+nsp")
        runs[objective, seed] = load_file(out / "model" / "model.safetensors")
    word = "bert.embeddings.word_embeddings.weight"
    head = "cls.predictions.transform.dense.weight"
    torch.testing.assert_close(runs["mlm+nsp", 0][word], weights[word])
    torch.testing.assert_close(runs["mlm+nsp", 0][word], runs["mlm+nsp", 1][word])
    assert not torch.allclose(runs["mlm+nsp", 0][head], runs["mlm+nsp", 1][head])


def test_another_tokenizer_is_refused(corpus: Path, texts: Path, tmp_path: Path) -> None:
    build_vocabulary([str(texts)], tmp_path / "vocab", size=500, workers=1)
    prepare_corpus([str(texts)], tmp_path / "vocab", tmp_path / "corpus", workers=1, held_out=0.15)
    train(corpus, tmp_path / "first", steps=2)
    with pytest.raises(UserError, match=r"was made with another tokenizer .* than .*first/model holds"):
        train(tmp_path / "corpus", tmp_path / "run", steps=2, model=tmp_path / "first" / "model")
    assert not (tmp_path / "run").exists()


# --- in other surroundings

MEMORY = """
import sys
from pathlib import Path
import numpy as np
from bertsmith.corpus.writer import write_corpus
from bertsmith.options import Recipe, load_settings
from bertsmith.text.tokenizer import SPECIAL_TOKENS, BertTokenizer
from bertsmith.training.loop import pretrain
from bertsmith.training.settings import PretrainSettings
from bertsmith.workers import peak_memory

folder = Path(sys.argv[1])
tokenizer = BertTokenizer([*SPECIAL_TOKENS, *(f"w{i}" for i in range(30517))])
generator = np.random.default_rng(0)
documents = [[generator.integers(5, 30522, 25).tolist() for _ in range(50)] for _ in range(30)]
write_corpus(folder / "corpus", tokenizer, {"train": documents, "held-out": documents[:2]})
settings = {"data": str(folder / "corpus"), "model": "tiny", "steps": 2, "batch_size": 32, "micro_batch_size": 32,
            "max_length": 512, "precision": "fp32", "warmup": 0.0, "log": {"examples": 0}}
before = peak_memory()
pretrain(load_settings(PretrainSettings, Recipe(settings, "test")), folder / "run")
print(peak_memory() - before)
"""


def run_script(folder: Path, source: str, *arguments: Path, **environment: str) -> str:
    """Run Python source in a process of its own; its output."""
    script = folder / "script.py"
    script.write_text(source, encoding="utf-8")
    variables = {k: v for k, v in os.environ.items() if not k.startswith("LC_") and k != "LANG"} | environment
    done = subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        timeout=200,
        env=variables,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode("utf-8", "replace")
    return done.stdout.decode("utf-8")


def test_memory_of_a_large_batch(tmp_path: Path) -> None:
    """P9: 32 × 512 tokens; logits of all positions would be 2.0 GB, and as much again for their gradient."""
    used = int(run_script(tmp_path, MEMORY, tmp_path))
    assert used < 1.0e9


WHOLE_WAY = """
import sys
from bertsmith.cli import main

text, out = sys.argv[1:]
assert main(["vocab", text, "--out", f"{out}/vocab", "--size", "900", "--workers", "1"]) == 0
assert main(["prepare", text, "--tokenizer", f"{out}/vocab", "--out", f"{out}/corpus", "--workers", "1",
             "--held-out", "0.2", "--language", "zh"]) == 0
sys.exit(main(["pretrain", "--data", f"{out}/corpus", "--out", f"{out}/run", "--model", "tiny", "--steps", "3",
               "--batch-size", "4", "--max-length", "32", "--precision", "fp32", "--json"]))
"""


def test_the_whole_way_under_another_locale(tmp_path: Path) -> None:
    text = tmp_path / "文.jsonl"
    text.write_text(demo_rows("chinese", 0, 12) + demo_rows("english", 0, 2), encoding="utf-8")
    summaries = []
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for number, locale in enumerate(({"LC_ALL": "C.UTF-8"}, plain)):
        out = tmp_path / f"Läufe {number}"
        lines = run_script(tmp_path, WHOLE_WAY, text, out, PYTHONHASHSEED=str(number), **locale).splitlines()
        summaries.append(json.loads(lines[-1]))
    assert summaries[0]["weights_sha256"] == summaries[1]["weights_sha256"]
    assert summaries[0]["eval_loss"] == summaries[1]["eval_loss"]
    first, second = (tmp_path / f"Läufe {number}" / "run" for number in range(2))
    assert log_lines(first) == log_lines(second)
    for path in (first / "model").iterdir():
        assert path.read_bytes() == (second / "model" / path.name).read_bytes(), path.name
