"""The contract of the command line: what each command prints with --json, exit codes, and help that teaches."""

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

import bertsmith as package
from bertsmith.arguments import CommandParser, add_json
from bertsmith.commands import COMMANDS, Command
from bertsmith.errors import UserError
from command_line import Made, Outcome, bertsmith

# what the design promises for each command (commands.md)
PROMISED = {
    "vocab": "size requested_size sha256 words characters_dropped seconds peak_memory_mb",
    "prepare": "documents sentences tokens bytes_per_token unknown_rate invalid_bytes skipped duplicates_dropped "
    "sha256 seconds peak_memory_mb",
    "pretrain": "steps tokens train_loss eval_loss eval_mlm_accuracy eval_nsp_accuracy unigram_entropy ln_vocab "
    "tokens_per_second utilization model_dir weights_sha256",
}


@pytest.mark.parametrize("name", PROMISED)
def test_the_summary_holds_what_is_promised(made: Made, name: str) -> None:
    summary = made.summaries[name]
    absent = set(PROMISED[name].split()) - set(summary)
    assert not absent
    assert all(summary[key] is not None for key in PROMISED[name].split())


def test_a_run_from_text_to_model(made: Made) -> None:
    vocab, prepare, pretrain = (made.summaries[name] for name in ("vocab", "prepare", "pretrain"))
    assert vocab["size"] <= vocab["requested_size"] == 120
    assert prepare["documents"] == 12
    assert prepare["unknown_rate"] == 0
    assert pretrain["steps"] == 6
    assert pretrain["model_dir"] == str(made.model)
    assert {path.name for path in made.run.iterdir() if path.name[0] != "."} == {
        "config.toml",
        "metrics.jsonl",
        "tensorboard",
        "loss.png",
        "checkpoints",
        "model",
    }


def test_fill_prints_one_object_with_the_guesses(made: Made) -> None:
    summary = bertsmith("fill", made.model, "The [MASK] é 中 ♡ [MASK].", "A [MASK]", "--top", 3, "--json").json
    assert list(summary) == ["model", "texts"]
    assert summary["model"] == str(made.model)
    assert [list(text) for text in summary["texts"]] == [["text", "masks"]] * 2
    assert summary["texts"][0]["text"] == "The [MASK] é 中 ♡ [MASK]."
    assert [len(text["masks"]) for text in summary["texts"]] == [2, 1]
    guesses = summary["texts"][0]["masks"][1]
    assert [list(guess) for guess in guesses] == [["token", "probability"]] * 3
    shares = [guess["probability"] for guess in guesses]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) < 1


def test_fill_shows_a_person_the_guesses(made: Made) -> None:
    outcome = bertsmith("fill", made.run, "The [MASK] sleeps.", "--top", 2)
    assert outcome.code == 0
    first, second = outcome.out.splitlines()
    assert first == "The [MASK] sleeps."
    assert re.fullmatch(r"  mask 1: (\S+ \d+\.\d%  )\S+ \d+\.\d%", second)


@pytest.mark.parametrize("what", [(), ("pretrain",)])
def test_bench_pretrain(what: tuple[str, ...]) -> None:
    arguments = ("--model", "tiny", "--batch", 2, "--length", 16, "--steps", 2, "--seed", 3, "--json")
    summary = bertsmith("bench", *what, *arguments).json
    assert summary["tokens_per_second"] > 0
    assert 0 < summary["utilization"] < 1.5
    assert (summary["model"], summary["batch"], summary["length"], summary["steps"]) == ("tiny", 2, 16, 2)


def test_bench_prepare(made: Made) -> None:
    summary = bertsmith("bench", "prepare", made.texts, "--workers", 1, "--json").json
    assert summary["tokens_per_second"] > 0
    assert 0 < summary["utilization"] < 1.5
    assert summary["tokens"] == made.summaries["prepare"]["tokens"]


def test_a_summary_for_a_person_is_plain_lines(made: Made) -> None:
    outcome = bertsmith("info", made.corpus)
    assert outcome.code == 0
    assert "kind: corpus\n" in outcome.out
    assert "\nsplits:\n  train:\n    shards: 1\n" in outcome.out
    assert "{" not in outcome.out
    assert "[" not in outcome.out


def test_options_and_inputs_come_in_any_order(made: Made, tmp_path: Path) -> None:
    files = sorted(made.texts.iterdir())[:2]
    outcome = bertsmith("vocab", files[0], "--out", tmp_path / "v", "--json", files[1], "--size=1e2", "--workers", 1)
    assert outcome.json["read"]["files"] == 2
    assert outcome.json["requested_size"] == 100


def test_switches_of_vocab_and_prepare(made: Made, tmp_path: Path) -> None:
    vocab = tmp_path / "vocab"
    options = ("--cased", "--strip-accents", "yes", "--min-frequency", 3, "--alphabet-limit", 30, "--workers", 1)
    summary = bertsmith("vocab", made.texts, "--out", vocab, *options, "--json").json
    assert (summary["lowercase"], summary["strip_accents"]) == (False, True)
    assert summary["characters"] > 30
    twice = sorted(made.texts.iterdir())[0]
    for flag, dropped in (("--dedup", 1), ("--no-dedup", 0)):
        copy = tmp_path / "copy.txt"
        copy.write_bytes(twice.read_bytes())
        out = tmp_path / f"corpus{flag}"
        reading = ("--documents", "file", "--on-invalid", "error", "--encoding", "utf-8", "--text-column", "text")
        arguments = (
            twice,
            copy,
            "--tokenizer",
            vocab,
            "--out",
            out,
            "--workers",
            1,
            "--language",
            "fr",
            flag,
            *reading,
        )
        assert bertsmith("prepare", *arguments, "--json").json["duplicates_dropped"] == dropped


def test_a_longer_budget_on_the_command_line_replaces_the_recipes(made: Made, tmp_path: Path) -> None:
    # the laptop recipe says minutes; --steps must not contradict it
    text = (made.run / "config.toml").read_text(encoding="utf-8")
    assert "steps = 6\n" in text
    assert "minutes = 30" not in text


@pytest.mark.skipif(sys.getfilesystemencoding() != "utf-8", reason="names are UTF-8 bytes in this test")
def test_a_name_that_is_no_utf8_is_shown_as_well_as_it_can_be(made: Made, tmp_path: Path) -> None:
    name = os.fsdecode(b"b\xffd")
    shutil.copytree(made.vocab, tmp_path / name)
    assert bertsmith("info", tmp_path / name, "--json").json["folder"] == f"{tmp_path}/b\ufffdd"
    assert bertsmith("info", tmp_path / name).out.startswith(f"kind: tokenizer\nfolder: {tmp_path}/b\ufffdd\n")
    assert "is no corpus" not in bertsmith("info", tmp_path / name / "vocab.txt").out


# --- exit codes


def test_a_fault_of_ours_is_1_with_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _fail_with(KeyError("tokens"), monkeypatch).code == 1
    outcome = _fail_with(KeyError("tokens"), monkeypatch)
    assert "Traceback" in outcome.err
    assert outcome.err.rstrip().endswith(
        "this is a fault of bertsmith, not of yours; please report it with the lines above"
    )
    assert not outcome.out


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (UserError("x.txt:3: no"), "x.txt:3: no"),
        (MemoryError(), "not enough memory; use a smaller --micro-batch-size"),
        (RuntimeError("[x] DefaultCPUAllocator: can't allocate memory: 4 bytes"), "not enough memory ([x] Default"),
        (PermissionError(13, "Permission denied", "secret.txt"), "secret.txt: permission denied"),
        (OSError(28, "No space left on device", "big.bin"), "big.bin: the disk is full; free some space"),
        (OSError(28, "No space left on device"), "the disk is full; free some space"),
    ],
)
def test_what_the_user_can_mend_is_2_without_traceback(
    error: Exception, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _fail_with(error, monkeypatch).mistake.startswith(told)


def test_an_interruption_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = _fail_with(KeyboardInterrupt(), monkeypatch)
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "bertsmith: interrupted\n")


def _fail_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    def fail(*_: object) -> dict[str, object]:
        raise error

    info = COMMANDS["info"]
    monkeypatch.setitem(COMMANDS, "info", Command(info.summary, info.details, info.examples, info.add, fail))
    return bertsmith("info", "x")


def test_numbers_that_json_cannot_hold_are_null(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> dict[str, object]:
        return {"loss": float("nan"), "parts": [1.5, float("inf")], "name": "é"}

    info = COMMANDS["info"]
    monkeypatch.setitem(COMMANDS, "info", Command(info.summary, info.details, info.examples, info.add, run))
    assert bertsmith("info", "x", "--json").out == '{"loss": null, "parts": [1.5, null], "name": "é"}\n'


# --- help


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_the_overview_names_every_command(arguments: tuple[str, ...]) -> None:
    outcome = bertsmith(*arguments)
    assert outcome.code == 0
    assert all(f"\n  {name} " in outcome.out for name in COMMANDS)
    assert "bertsmith fill run/model" in outcome.out


def test_version() -> None:
    assert bertsmith("--version").out == f"bertsmith {package.__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_explains_in_a_hundred_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    outcome = bertsmith(*name.split(), "--help")
    assert outcome.code == 0
    assert outcome.out.startswith(f"usage: bertsmith {name} ")
    assert max(map(len, outcome.out.splitlines())) <= 100
    assert "\nexamples:\n  bertsmith " in outcome.out
    assert "--json" in outcome.out
    assert bertsmith("help", *name.split()).out == outcome.out


def test_help_of_bench_names_its_parts() -> None:
    assert "bench prepare" in bertsmith("bench", "--help").out


def test_help_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    described = bertsmith("vocab", "--help").out.partition("examples:")[0]
    assert max(map(len, described.splitlines())) <= 70


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_in_help_is_one_the_program_takes(name: str) -> None:
    command = COMMANDS[name]
    examples = re.findall(r"^  bertsmith (.*)$", command.examples, re.MULTILINE)
    assert examples
    for example in examples:
        arguments = shlex.split(example)
        assert " ".join(arguments[: len(name.split())]) == name
        parser = CommandParser(name, command.summary, command.details, command.examples, command.usage)
        command.add(parser)
        add_json(parser)
        parser.parse(arguments[len(name.split()) :])
