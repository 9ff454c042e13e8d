"""Every mistake on the command line is one sentence that says what and where, exit code 2, and nothing is made."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from command_line import Made, bertsmith, bertsmith_process

MISTAKES = {
    # the command itself
    "vocb texts --out x": "'vocb' is no command; did you mean vocab?",
    "--verson": "'--verson' is no option; did you mean --version?",
    "bench foo": "'bench foo' is no command",
    "help foo": "'foo' is no command",
    # flags
    "vocab texts": "the following arguments are required: --out (see `bertsmith vocab --help`)",
    "vocab --out x": "the following arguments are required: INPUT",
    "vocab texts --out x --sze 100": "option --sze is not known; did you mean --size?",
    "vocab texts --out x --hlp 1": "option --hlp is not known; put --",
    "vocab texts --out x --siz 100": "option --siz is not known; did you mean --size?",
    "vocab texts --out x -q": "option -q is not known",
    "vocab texts --out x --size": "--size: needs a value",
    "vocab texts --out x --size 9 --size 10": "option --size is given twice",
    "vocab texts --out x --json=yes": "--json: takes no value",
    "info corpus run": "'run' is one argument too many; quote",
    "prepare texts --tokenizer vocab --out x --dedup --no-dedup": "option --no-dedup contradicts --dedup",
    "bench pretrain texts": "'texts' is one argument too many; name a model with --model",
    "bench embed run/model": "'run/model' is one argument too many; name a model with --model",
    "bench pretrain --workers 2": "option --workers is not known",
    "bench prepare --batch 2": "option --batch is not known",
    # numbers
    "vocab texts --out x --size abc": "--size: 'abc' is not a whole number",
    "vocab texts --out x --size 2.5": "--size: '2.5' is not a whole number",
    "vocab texts --out x --size 0": "--size 0: from 6",
    "vocab texts --out x --size -1": "--size -1: from 6",
    "vocab texts --out x --size 5": "--size 5: from 6",
    "vocab texts --out x --min-frequency 0": "--min-frequency 0: at least 1",
    "vocab texts --out x --alphabet-limit 0": "--alphabet-limit 0: at least 1",
    "vocab texts --out x --workers 0": "--workers 0: at least 1",
    "vocab texts --out x --workers -2": "--workers -2: at least 1",
    "prepare texts --tokenizer vocab --out x --workers 0": "--workers 0: at least 1",
    "prepare texts --tokenizer vocab --out x --held-out half": "--held-out: 'half' is not a number",
    "prepare texts --tokenizer vocab --out x --held-out 1": "--held-out 1: a share from 0 to below 1",
    "prepare texts --tokenizer vocab --out x --held-out -0.1": "--held-out -0.1: a share from 0 to below 1",
    "prepare texts --tokenizer vocab --out x --held-out nan": "--held-out: 'nan' is not a number",
    "fill run/model a[MASK] --top 0": "--top 0: a number from 1 up",
    "bench pretrain --batch 0": "--batch 0 --length 128: at least one row",
    "bench pretrain --length 513": "--batch 32 --length 513: at least one row, of 2 to 512 tokens",
    "bench pretrain --steps 0": "--steps 0: at least one is needed",
    "bench pretrain --seed -1": "--seed -1: a number from 0",
    "demo --out x --minutes 0": "minutes: 0.0 is not a length of training",
    "demo --out x --minutes inf": "minutes: inf is not a length of training",
    "demo --out x --minutes nan": "--minutes: 'nan' is not a number",
    "demo --out x --seed -1": "seed: -1 is not a number from 0",
    # words from a list
    "vocab texts --out x --documents page": "--documents: invalid choice: 'page'",
    "vocab texts --out x --encoding klingon": "--encoding: 'klingon' is not a text encoding",
    "vocab texts --out x --strip-accents maybe": "--strip-accents: invalid choice: 'maybe'",
    "prepare texts --tokenizer vocab --out x --language klingon": "--language: 'klingon' is not known",
    "fill run/model a[MASK] --precision fp16": "--precision: invalid choice: 'fp16'",
    "fill run/model a[MASK] --device cuda": "device: cuda was asked for, but PyTorch finds no CUDA device",
    "bench pretrain --model huge": "model: 'huge' is not a published size; use one of tiny, mini",
    # inputs
    "vocab nowhere --out x": "nowhere: no such file or folder",
    "vocab nothing-*.txt --out x": "nothing-*.txt: nothing matches",
    "vocab empty --out x": "empty: no text file in it",
    "vocab empty.txt --out x": "empty.txt: no word in 0 documents",
    "vocab blank.txt --out x": "blank.txt: no word in 0 documents",
    "vocab foo://x --out x": "foo://x: cannot be opened: Protocol not known: foo",
    "vocab run/model/model.safetensors --out x": "run/model/model.safetensors: not utf-8",
    "vocab table.csv --out x": "table.csv: no column 'text'; there are 'id', 'body'; choose one with --text-column",
    "prepare empty.txt --tokenizer vocab --out x": "no text to train on in empty.txt",
    "prepare texts --tokenizer nowhere --out x": "nowhere: no such tokenizer",
    "prepare texts --tokenizer texts --out x": "texts: neither vocab.txt nor tokenizer.json is here",
    "prepare texts --tokenizer run --out x": "nor tokenizer.json is here; did you mean run/model?",
    "prepare texts --tokenizer corpus --out x": "corpus: neither vocab.txt nor tokenizer.json is here",
    "info nowhere": "nowhere: does not exist; name a corpus, run",
    "info empty.txt": "empty.txt: is no folder",
    "info empty": "empty: is no corpus, run, checkpoint, model or tokenizer folder",
    "info .": ".: is no corpus, run, checkpoint, model or tokenizer folder; name one of corpus, run, vocab",
    # outputs
    "vocab texts --out empty.txt": "empty.txt: a file stands where a folder is needed",
    "vocab texts --out empty.txt/x": "empty.txt/x: a file stands where a folder is needed",
    "vocab texts --out corpus": "corpus: holds something else than a tokenizer",
    "vocab texts --out .": "--out .: give the new folder a name",
    "prepare texts --tokenizer vocab --out corpus": "corpus: exists already",
    "prepare texts --tokenizer vocab --out empty.txt": "empty.txt: a file stands where a folder is needed",
    "demo --out texts": "texts: holds something else than an earlier demo",
    "demo --out empty.txt": "empty.txt: a file stands where a folder is needed",
    "pretrain --data corpus --out empty.txt --steps 1": "empty.txt: a file stands where a folder is needed",
    "pretrain --data corpus --out corpus --steps 1": "corpus: holds something else than a run",
    # fill
    "fill run/model": "fill: give texts with [MASK], or --input FILE",
    "fill run/model a[MASK] --input texts.txt": "fill: give texts with [MASK], or --input FILE",
    "fill run/model [mask]": "text 1: holds no [MASK], and [mask] is plain text: capitals matter; write [MASK]",
    "fill run/model mask": "text 1: holds no [MASK]; write [MASK] where",
    "fill run/model The horse was [MASK]": "fill: of 4 texts 3 without [MASK], such as 'The'; if all are one text, "
    'put quotes around it: "The horse was [MASK]"',
    "fill run/model a[MASK] --output x.json": "option --output is not known; fill prints its guesses: --json prints",
    "fill nowhere a[MASK]": "nowhere: no such folder; only folders on this machine are opened",
    "fill corpus a[MASK]": "corpus: no config.json here, for this is a corpus",
    "fill run/model --input masks.txt": "masks.txt:2: holds no [MASK]",
    "fill run/model --input nowhere.txt": "nowhere.txt: no such file",
    "fill run/model --input texts": "texts: a folder where a file was expected",
    # pretrain
    "pretrain --data corpus": "the following arguments are required: --out",
    "pretrain --out x --steps 1": "data is missing: give --data or write it in the recipe",
    "pretrain --data nowhere --out x": "nowhere: does not exist (corpus.json is missing)",
    "pretrain --data texts --out x": "texts: is not a corpus folder (corpus.json is missing)",
    "pretrain --data run/model --out x": "run/model: is not a corpus folder",
    "pretrain --data empty.txt --out x": "empty.txt",
    "pretrain --data corpus --out x --steps 2 --minutes 3": "steps, minutes, epochs: give exactly one of the three",
    "pretrain --data corpus --out x --steps 2 --steps 3": "option --steps is given twice",
    "pretrain --data corpus --out x --steps 0": "steps: 0 is not",
    "pretrain --data corpus --out x --steps few": "steps = 'few' is not allowed; give a whole number",
    "pretrain --data corpus --out x --minutes inf": "minutes: inf is not a length of training",
    "pretrain --data corpus --out x --epochs nan": "epochs = 'nan' is not allowed",
    "pretrain --data corpus --out x --model huge": "model: 'huge' is neither a published size",
    "pretrain --data corpus --out x --model vocab": "model: 'vocab' is neither a published size",
    "pretrain --data corpus --out x --objective clm": "objective = 'clm' is not allowed; give one of mlm+nsp",
    "pretrain --data corpus --out x --recipe labtop": "recipe 'labtop' is not known; did you mean laptop?",
    "pretrain --data corpus --out x --recipe none.toml": "none.toml: the recipe cannot be read",
    "pretrain --data corpus --out x --lerning-rate 1": "--lerning-rate is not known; did you mean --learning-rate?",
    "pretrain --data corpus --out x --lr 1": "option --lr is not known; did you mean --learning-rate?",
    "pretrain --data corpus --out x --checkpoint 5": "option --checkpoint is not known; did you mean --checkpoint.",
    "pretrain --data corpus --out x --masking.rat 1": "masking.rat is not known; did you mean masking.rate?",
    "pretrain --data corpus --out x --masking.rate 2": "masking.rate: 2.0 is not a share",
    "pretrain --data corpus --out x --learning-rate -1": "optimizer.learning_rate: -1.0 is not a number above 0",
    "pretrain --data corpus --out x --learning-rate 1 --optimizer.learning-rate 2": "(--learning-rate) is given twice",
    "pretrain --data corpus --out x --batch-size 0": "batch_size: 0 is not a number from 1 up",
    "pretrain --data corpus --out x --micro-batch-size 0": "micro_batch_size: 0 is not a number from 1 up",
    "pretrain --data corpus --out x --max-length 2": "max_length: 2 is not",
    "pretrain --data corpus --out x --max-length 1000": "max_length: sequences of 1000 tokens are longer than",
    "pretrain --data corpus --out x --dropout 1": "dropout: 1.0 is not in [0, 1)",
    "pretrain --data corpus --out x --warmup -1": "warmup: -1.0 is neither",
    "pretrain --data corpus --out x --seed -1": "seed: -1 is not a number from 0",
    "pretrain --data corpus --out x --seed 99999999999999999999": "seed: 99999999999999999999 is not a number from 0",
    "pretrain --data corpus --out x --device tpu": "device = 'tpu' is not allowed; give one of auto, cpu, cuda",
    "pretrain --data corpus --out x --device cuda": "device: cuda was asked for, but PyTorch finds no CUDA device",
    "pretrain --data corpus --out x --precision fp16": "precision = 'fp16' is not allowed",
    "pretrain --data corpus --out x --examples.workers -1": "examples.workers: -1 is negative",
    "pretrain --data corpus --out x --examples.short-share 2": "examples.short_share: 2.0 is not a share",
    "pretrain --data corpus --out x --checkpoint.keep 0": "checkpoint.keep: 0 would keep no checkpoint",
    "pretrain --data corpus --out x --eval.examples 0": "eval.examples: 0 is not a number from 1 up",
    "pretrain --data corpus --out x --log.every 0": "log.every: 0 is not a number from 1 up",
    "pretrain --data corpus --out x stray": "argument 'stray' belongs to no option",
    "pretrain --data corpus --out run --steps 9 --seed 5": "run: this run was started with other settings",
}


@pytest.fixture
def place(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with links to what was made, and some files that are of no use."""
    for name, target in {"texts": made.texts, "vocab": made.vocab, "corpus": made.corpus, "run": made.run}.items():
        (tmp_path / name).symlink_to(target, target_is_directory=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "blank.txt").write_bytes(b"\n \n\n")
    (tmp_path / "masks.txt").write_text("a [MASK]\nb\n", encoding="utf-8")
    (tmp_path / "table.csv").write_text("id,body\n1,hello\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_one_sentence(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "cuda" in command:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    before = sorted(place.rglob("*"))
    told = bertsmith(*command.split()).mistake
    assert MISTAKES[command] in told
    assert "\n" not in told
    assert sorted(place.rglob("*")) == before


def test_all_wrong_settings_are_told_together(place: Path) -> None:
    told = bertsmith("pretrain", "--data", "corpus", "--out", "x", "--seed", "-1", "--log.every", "0").mistake
    assert told.startswith("2 options are wrong:\n")
    assert "seed: -1" in told
    assert "log.every: 0" in told


def test_an_empty_name_is_refused(place: Path) -> None:
    assert "no such file or folder" in bertsmith("vocab", "", "--out", "x").mistake
    assert "give the new folder a name" in bertsmith("vocab", "texts", "--out", "").mistake
    assert bertsmith("info", "").mistake.startswith(".: is no corpus")


# --- what is broken on disk


def cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(values | changes), encoding="utf-8")

    return edit


BROKEN_MODELS: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut weights": (lambda folder: cut(folder / "model.safetensors"), "model.safetensors: not a readable safetensors"),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        "no model.safetensors or pytorch_model.bin here",
    ),
    "broken config": (lambda folder: cut(folder / "config.json"), "config.json: not valid JSON"),
    "another architecture": (edit_config(model_type="roberta"), "config.json: model_type is 'roberta'"),
    "a word for a number": (edit_config(hidden_size="wide"), "config.json: model configuration: hidden_size: 'wide'"),
    "another size": (edit_config(vocab_size=50), "do not belong together"),
    "too large for any memory": (
        edit_config(hidden_size=2 * 10**9, num_attention_heads=1),
        "but the weights beside it have",
    ),
    "cut vocabulary": (lambda folder: cut(folder / "vocab.txt"), "different vocabularies"),
}


@pytest.mark.parametrize("kind", BROKEN_MODELS)
def test_a_broken_model_is_refused(kind: str, made: Made, tmp_path: Path) -> None:
    damage, told = BROKEN_MODELS[kind]
    folder = tmp_path / "model"
    shutil.copytree(made.model, folder)
    damage(folder)
    assert told in bertsmith("fill", folder, "a [MASK]").mistake
    assert told in bertsmith("info", folder).mistake
    out = tmp_path / "run"
    going_on = ("--data", made.corpus, "--model", folder, "--out", out, "--steps", 1, "--max-length", 32)
    assert told in bertsmith("pretrain", *going_on).mistake
    assert not (out / "config.toml").exists()


@pytest.mark.parametrize("command", ["info {}", "pretrain --data {} --out x --steps 1"])
def test_a_cut_shard_is_named(command: str, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made.corpus, tmp_path / "corpus")
    cut(tmp_path / "corpus" / "train-00000.arrow")
    told = bertsmith(*command.format("corpus").split()).mistake
    assert told.startswith("corpus/train-00000.arrow: ")
    assert not (tmp_path / "x" / "config.toml").exists()


def test_a_run_whose_checkpoints_are_all_broken_is_not_started_afresh(made: Made, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made.run, run)
    for weights in run.glob("checkpoints/*/model.safetensors"):
        cut(weights)
    told = bertsmith("pretrain", "--data", made.corpus, "--out", run, "--steps", 9).mistake
    assert "no complete checkpoint is left" in told
    assert "model.safetensors has" in told


def test_nothing_heavy_is_imported_for_a_mistake() -> None:
    outcome = bertsmith_process("vocab", "texts", "--out", "x", "--sze", "3", env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert outcome.code == 2
    imported = {line.rpartition("|")[2].strip() for line in outcome.err.splitlines() if line.startswith("import time:")}
    assert "bertsmith.commands" in imported
    assert not imported & {"torch", "numpy", "pyarrow", "tokenizers"}


def test_a_closed_stdout_is_told_before_any_work(made: Made, tmp_path: Path) -> None:
    command = f"{sys.executable} -m bertsmith vocab '{made.texts}' --out '{tmp_path / 'v'}' --size 100 --json >&-"
    result = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True)
    assert (result.returncode, "stdout is closed" in result.stderr) == (2, True)
    assert not (tmp_path / "v").exists()


def test_info_names_a_broken_tokenizer_in_a_corpus(made: Made, tmp_path: Path) -> None:
    shutil.copytree(made.corpus, tmp_path / "corpus")
    (tmp_path / "corpus" / "tokenizer" / "tokenizer.json").write_text("{", encoding="utf-8")
    refused = bertsmith("info", tmp_path / "corpus")
    assert (refused.code, "tokenizer.json" in refused.err) == (2, True)
