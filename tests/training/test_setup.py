"""From settings to a run's parts: what may change on resume, what fits together, what is refused before any work."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_runs import RECIPE, checkpoint_steps, make_settings, train

from bertsmith.cli import main
from bertsmith.errors import UserError
from bertsmith.hardware import Machine
from bertsmith.model.config import BertConfig
from bertsmith.model.weights import read_config
from bertsmith.options import Recipe, load_settings
from bertsmith.training import loop, setup
from bertsmith.training.checkpoint import find_newest_checkpoint
from bertsmith.training.settings import PretrainSettings
from bertsmith.training.setup import (
    build_model,
    evaluation_stream,
    micro_batch_size,
    model_config,
    open_data,
    run_settings,
    take_machine,
    training_streams,
)
from bertsmith.training.state import RunState


def pretrain_command(corpus: Path, out: Path, *flags: str) -> list[str]:
    """A tiny run, as typed."""
    given = {
        "--data": str(corpus), "--out": str(out), "--model": "tiny", "--batch-size": "4", "--max-length": "32",
        "--log.examples": "0", "--eval.examples": "8", "--precision": "fp32",
    } | dict(zip(flags[::2], flags[1::2], strict=True))  # fmt: skip
    return ["pretrain", "--json", *(word for pair in given.items() for word in pair)]


# --- resuming by the command line


def test_the_same_command_resumes_and_more_steps_extend(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    summaries = []
    for steps in ("4", "4", "6"):
        assert main(pretrain_command(corpus, tmp_path / "run", "--steps", steps)) == 0
        summaries.append(json.loads(capfd.readouterr().out))
    assert summaries[0] == summaries[1]
    assert (summaries[2]["steps"], summaries[2]["resumed_from_step"]) == (6, 4)
    # the folder alone says enough
    assert main(["pretrain", "--out", str(tmp_path / "run"), "--steps", "8", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["steps"] == 8


def test_other_settings_are_refused_in_one_sentence(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(pretrain_command(corpus, run, "--steps", "3")) == 0
    before = (run / "config.toml").read_bytes()
    capfd.readouterr()
    changes = ["--seed", "1", "--optimizer.beta2", "0.9", "--objective", "mlm"]
    assert main(pretrain_command(corpus, run, "--steps", "6", *changes)) == 2
    written = capfd.readouterr()
    assert written.out == ""
    assert len(written.err.splitlines()) == 1
    for change in (
        "seed was 0 and is now 1",
        "optimizer.beta2 was 0.999 and is now 0.9",
        "objective was mlm+nsp and is",
    ):
        assert change in written.err
    assert "another --out" in written.err
    assert (run / "config.toml").read_bytes() == before
    assert checkpoint_steps(run) == [3]


def test_what_may_change(corpus: Path, tmp_path: Path) -> None:
    train(corpus, tmp_path / "run", steps=3)
    changes: dict[str, Any] = {
        "epochs": 0.05, "steps": "none", "eval__every": 2, "eval__examples": 12, "log__every": 2, "checkpoint__keep": 5,
        "checkpoint__every": 4, "examples__workers": 1, "micro_batch_size": 2, "device": "cpu", "log__examples": 1,
    }  # fmt: skip
    summary = train(corpus, tmp_path / "run", **changes)
    assert summary["steps"] > 3
    assert summary["resumed_from_step"] == 3
    with pytest.raises(UserError, match=r"dropout was 0\.1 and is now 0\.2"):
        make_settings(corpus, tmp_path / "run", dropout=0.2, steps=6)
    with pytest.raises(UserError, match="precision was fp32 and is now bf16"):
        make_settings(corpus, tmp_path / "run", precision="bf16", steps=6)
    assert make_settings(corpus, tmp_path / "run", precision="auto", steps=6).precision == "fp32"


def test_evaluating_otherwise_is_done_again_at_the_end(corpus: Path, tmp_path: Path) -> None:
    first = train(corpus, tmp_path / "run", steps=3, eval__examples=8)
    second = train(corpus, tmp_path / "run", steps=3, eval__examples=40)
    assert second["weights_sha256"] == first["weights_sha256"]
    assert second["eval_loss"] != first["eval_loss"]


def test_before_the_first_checkpoint_everything_may_change(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(
        f'data = "{corpus}"\nsteps = 5\nmodel = "mini"\nseed = 3\n', encoding="utf-8"
    )
    assert run_settings(tmp_path / "run", None, [("seed", "4")]).seed == 4
    assert run_settings(tmp_path / "run", None, []).model == "mini"


def test_a_folder_that_holds_something_else(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match=r"holds something else than a run"):
        make_settings(corpus, tmp_path, steps=3)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--steps", "3", "--epochs", "1"], "exactly one of the three (several are given)"),
        (["--minutes", "inf"], "minutes: inf is not a length of training"),
        (["--steps", "3", "--warmup", "inf"], "warmup: inf is neither"),
        (["--steps", "3", "--warmup", "1.5"], "warmup: 1.5 is neither"),
        (["--steps", "3", "--seed", "-1"], "seed: -1 is not"),
        (["--steps", "3", "--examples.workers", "-1"], "examples.workers: -1 is negative"),
        (["--steps", "3", "--examples.short-share", "2"], "examples.short_share: 2.0 is not a share"),
        (["--steps", "3", "--log.examples", "-1"], "log.examples: -1 is negative"),
        (["--steps", "3", "--checkpoint.keep", "0"], "checkpoint.keep: 0 would keep no checkpoint"),
        (["--steps", "3", "--eval.examples", "0"], "eval.examples: 0 is not"),
        (["--steps", "3", "--second-phase.share", "1"], "second_phase.share: 1.0 is not a share"),
        (["--steps", "3", "--schedule.floor", "1"], "schedule.floor: 1.0 is not a share"),
        (["--steps", "3", "--clip-norm", "0"], "clip_norm: 0.0 is not above 0"),
        (["--steps", "3", "--dropout", "1"], "dropout: 1.0 is not in"),
        (["--steps", "3", "--micro-batch-size", "0"], "micro_batch_size: 0 is not"),
        (["--steps", "3", "--learning-rat", "1"], "--learning-rat is not known; did you mean --learning-rate?"),
    ],
)
def test_wrong_settings(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    assert main(pretrain_command(corpus, tmp_path / "run", *flags)) == 2
    said = capfd.readouterr().err
    assert named in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


# --- streams


def test_one_stream_a_length(corpus: Path, tmp_path: Path) -> None:
    settings = make_settings(corpus, tmp_path, steps=9, second_phase__share=0.5, second_phase__max_length=64)
    assert list(training_streams(settings, open_data(settings))) == [32, 64]
    settings = make_settings(corpus, tmp_path, steps=9, second_phase__share=0.5, second_phase__max_length=32)
    assert list(training_streams(settings, open_data(settings))) == [32]


def test_evaluation_is_the_same_for_any_run(corpus: Path, tmp_path: Path) -> None:
    """Neither seed nor dropout, batch size, masking or a second phase changes what is asked."""

    def asked(**changes: Any) -> list[tuple[Any, ...]]:
        settings = make_settings(corpus, tmp_path, steps=9, **changes)
        stream = evaluation_stream(settings, open_data(settings))
        assert stream is not None
        return [
            (batch.token_ids.tolist(), batch.masked_labels.tolist(), batch.example_ids.tolist())
            for batch in stream.evaluation_batches(20)
        ]

    assert asked() == asked(
        seed=5, dropout=0, batch_size=9, masking__rate=0.3, second_phase__share=0.1, second_phase__max_length=64
    )
    assert asked() != asked(max_length=40)


def test_no_held_out_documents_is_said(
    texts: Path, vocabulary: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from bertsmith.corpus.prepare import prepare_corpus

    prepare_corpus([str(texts)], vocabulary, tmp_path / "corpus", workers=1, held_out=0)
    capfd.readouterr()
    summary = train(tmp_path / "corpus", tmp_path / "run", steps=3)
    assert "warning: no held-out documents to evaluate on" in capfd.readouterr().err
    assert (summary["steps"], summary["eval_loss"], summary["eval_nsp_accuracy"]) == (3, None, None)


def test_few_held_out_examples_are_said(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = make_settings(corpus, tmp_path / "run", steps=3)
    data = open_data(settings)
    rows = data.corpus.split("held-out").tokens // settings.max_length
    assert 100 < rows < 1000
    evaluation_stream(settings, data)
    told = f"about {rows} examples, are held out: so few that the held-out loss and accuracies are noisy; prepare the"
    assert told in capfd.readouterr().err
    monkeypatch.setattr(setup, "FEW_HELD_OUT_ROWS", rows)
    evaluation_stream(settings, data)
    assert capfd.readouterr().err == ""


def test_one_held_out_document_takes_random_segments_from_the_training_text(
    vocabulary: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from bertsmith.corpus.writer import write_corpus
    from bertsmith.text.tokenizer import load_tokenizer

    generator = np.random.default_rng(0)
    documents = [[generator.integers(5, 800, 12).tolist() for _ in range(30)] for _ in range(8)]
    single = [[generator.integers(5, 800, 12).tolist()]]
    tokenizer = load_tokenizer(vocabulary)
    write_corpus(tmp_path / "one", tokenizer, {"train": documents, "held-out": documents[:1]})
    settings = make_settings(tmp_path / "one", tmp_path / "run", steps=3)
    stream = evaluation_stream(settings, open_data(settings))
    assert stream is not None
    labels = np.concatenate([batch.next_sentence_labels for batch in stream.evaluation_batches(50)])
    assert set(labels.tolist()) == {0, 1}
    # a single sentence offers no pair at all: said with the reason, and the run goes on without evaluation
    write_corpus(tmp_path / "none", tokenizer, {"train": documents, "held-out": single})
    capfd.readouterr()
    assert train(tmp_path / "none", tmp_path / "run", steps=3)["eval_loss"] is None
    assert "warning: the held-out documents cannot be evaluated on: objective mlm+nsp needs" in capfd.readouterr().err


# --- models


def test_initialization(corpus: Path, tmp_path: Path) -> None:
    settings = make_settings(corpus, tmp_path, steps=3, output_bias="unigram", seed=3)
    data = open_data(settings)
    model = build_model(settings, data)
    again = build_model(settings, data).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())
    bias = model.mlm_head.bias.detach()
    # what the bias alone predicts is the corpus's unigram distribution
    counts = data.corpus.token_counts.copy()
    counts[list(data.corpus.special_ids)] = 0
    loss = -(torch.log_softmax(bias.double(), 0) * torch.from_numpy(counts / counts.sum())).sum()
    assert float(loss) == pytest.approx(data.corpus.unigram_entropy, abs=0.01)
    plain = build_model(make_settings(corpus, tmp_path, steps=3, seed=3), data)
    assert not plain.mlm_head.bias.any()
    torch.testing.assert_close(plain.bert.embeddings.word, model.bert.embeddings.word)


def test_positions_that_no_sequence_reaches_are_said(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told = "sequences of 32 tokens: of the model's 512 positions, those from 32 on learn nothing"

    def said(out: str, **changes: Any) -> bool:
        capfd.readouterr()
        settings = make_settings(corpus, tmp_path / out, max_length=32, **changes)
        loop.pretrain(settings, tmp_path / out)
        return told in capfd.readouterr().err

    assert said("run", steps=2)
    assert not said("run", steps=3)  # resumed: said already
    assert said("on", model=tmp_path / "run" / "model", steps=2)
    whole = make_settings(corpus, tmp_path / "new", steps=2, second_phase__share=0.1, second_phase__max_length=512)
    setup.say_untrained_positions(whole, BertConfig())
    assert capfd.readouterr().err == ""


def test_how_many_positions_were_trained_stays_with_the_model(corpus: Path, tmp_path: Path) -> None:
    def trained(out: str, **changes: Any) -> tuple[int | None, int]:
        """What config.json says, and how many positions may be used by it."""
        settings = make_settings(corpus, tmp_path / out, **({"steps": 2} | changes))
        loop.pretrain(settings, tmp_path / out)
        config, values = read_config(tmp_path / out / "model")
        return values.get("bertsmith_trained_positions"), config.trained_positions

    def untold(folder: Path) -> Path:
        """The folder as it would be from elsewhere: nothing is said of its positions."""
        path = folder / "config.json"
        values = json.loads(path.read_bytes())
        del values["bertsmith_trained_positions"]
        path.write_text(json.dumps(values), encoding="utf-8")
        return folder

    assert trained("run", max_length=24) == (24, 24)
    assert trained("run", max_length=24, steps=3) == (24, 24)  # resumed
    assert trained("phases", second_phase__share=0.5, second_phase__max_length=48) == (48, 48)
    first = tmp_path / "run" / "model"
    assert trained("longer", model=first, max_length=40) == (40, 40)
    assert trained("shorter", model=first, max_length=16) == (24, 24)
    assert trained("published", model=untold(first), max_length=16) == (None, 512)
    assert trained("whole", second_phase__share=0.5, second_phase__max_length=512) == (None, 512)


def test_a_run_of_a_version_that_did_not_note_positions_goes_on(corpus: Path, tmp_path: Path) -> None:
    settings = make_settings(corpus, tmp_path / "run", steps=2)
    loop.pretrain(settings, tmp_path / "run")
    data = setup.open_data(settings)
    checkpoint, _ = find_newest_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    del checkpoint.state["architecture"]["bertsmith_trained_positions"]
    model, _ = setup.resume_model(settings, data, checkpoint)
    assert model.config.trained_positions == 32


def test_models_that_do_not_fit(corpus: Path, vocabulary: Path, tmp_path: Path) -> None:
    def config_of(folder: Path, **changes: Any) -> BertConfig:
        settings = make_settings(corpus, tmp_path / "run", steps=3, model=folder, **changes)
        return model_config(settings, open_data(settings))

    with pytest.raises(UserError, match=r"model: 'huge' is neither a published size \(tiny, .*large\) nor a folder"):
        config_of(Path("huge"))
    folder = tmp_path / "folder"
    shutil.copytree(vocabulary, folder)
    values = BertConfig.of_size("tiny", 800, max_position_embeddings=40).to_dict()

    def write(**changes: Any) -> Path:
        (folder / "config.json").write_text(json.dumps(values | changes), encoding="utf-8")
        return folder

    assert config_of(write()).max_position_embeddings == 40
    assert config_of(write(vocab_size=808)).vocab_size == 808, "a padded word table is fine"
    assert config_of(write(hidden_dropout_prob=0.3), dropout=0.0).hidden_dropout_prob == 0, "the run decides dropout"
    with pytest.raises(UserError, match="its word table has 700 rows, the corpus's vocabulary 800"):
        config_of(write(vocab_size=700))
    with pytest.raises(UserError, match="sequences of 48 tokens are longer than the model's 40 positions"):
        config_of(write(), max_length=48)
    with pytest.raises(UserError, match=r"no embedding for a second segment .* use --objective mlm"):
        config_of(write(type_vocab_size=1))
    assert config_of(write(type_vocab_size=1), objective="mlm").type_vocab_size == 1


# --- micro-batches and machines


def test_micro_batch_sizes() -> None:
    def size(max_length: int, **changes: Any) -> int:
        settings = load_settings(PretrainSettings, Recipe(RECIPE | {"data": "x", "steps": 3} | changes, "test"))
        return micro_batch_size(settings, max_length, torch.device("cpu"))

    assert size(128, batch_size=256) == 64
    assert size(512, batch_size=256) == 16
    assert size(128, batch_size=8) == 8
    assert size(128, batch_size=256, micro_batch_size=7) == 7
    assert size(128, batch_size=4, micro_batch_size=7) == 4


def test_another_device_chooses_micro_batches_anew(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = load_settings(PretrainSettings, Recipe(RECIPE | {"data": "x", "steps": 3}, "test"))
    machine = Machine(torch.device("cpu"), "bf16", 1e11, None)
    state = RunState(micro_batch_size=9)
    take_machine(state, settings, machine)
    take_machine(state, settings, machine)
    assert state.micro_batch_size == 9
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(setup.torch.cuda, "get_device_name", lambda device: "NVIDIA X")
    take_machine(state, settings, Machine(torch.device("cuda"), "bf16", 1e14, None))
    assert state.micro_batch_size == 0
    assert "the run began otherwise (device cpu → NVIDIA X)" in capfd.readouterr().err


def test_ln_vocab(corpus: Path, tmp_path: Path) -> None:
    assert open_data(make_settings(corpus, tmp_path, steps=3)).ln_vocab == pytest.approx(math.log(800))
