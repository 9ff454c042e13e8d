"""A folder loaded once: what it holds decides what can be done; alone or in a batch the same; no second load."""

import json
import re
import reprlib
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from alike import assert_alike
from safetensors.torch import load_file, save_file
from small_models import SMALL, TOKENS, save_pretrained

import bertsmith
from bertsmith.errors import UserError
from bertsmith.hardware import Machine
from bertsmith.inference import loaded
from bertsmith.inference.fill import fill_masks
from bertsmith.inference.loaded import LoadedModel, load
from bertsmith.inference.predict import predict_file
from bertsmith.model.task_model import BertForTask
from bertsmith.tasks.model_folder import save_task_model
from bertsmith.tasks.registry import make_task
from bertsmith.tasks.spec import TaskSpec
from bertsmith.text.tokenizer import BertTokenizer

TEXTS = ["the cat sat on a mat.", "", "running, seer!", "a", "the old house " * 30, "old new"]
SPECS = {
    "classify": TaskSpec("classify", 64, ("bad", "good")),
    "pairs": TaskSpec("pairs", 64, ("no", "yes")),
    "regress": TaskSpec("regress", 64),
    "classify-two": TaskSpec("classify", 64, ("no", "yes"), text_column="a", text_pair_column="b"),
    "multilabel": TaskSpec("multilabel", 64, ("a", "b")),
    "sst-2": TaskSpec("sst-2", 64, ("0", "1")),
    "mrpc": TaskSpec("mrpc", 64, ("0", "1")),
    "sts-b": TaskSpec("sts-b", 64),
    "choice": TaskSpec("choice", 64),
    "ner": TaskSpec("ner", 16, ("O", "B-PER", "I-PER")),
    "squad2": TaskSpec("squad2", 48, stride=16, max_question=16),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A pre-trained folder, an encoder without heads and a fine-tuned one of each kind, all of random weights."""
    folder = tmp_path_factory.mktemp("folders")
    made = {"pretrained": save_pretrained(folder / "pretrained"), "encoder": save_pretrained(folder / "encoder")}
    weights = made["encoder"] / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(weights).items() if not name.startswith(("cls.", "bert.pool"))}
    save_file(kept, weights, metadata={"format": "pt"})
    for name, spec in SPECS.items():
        task = make_task(spec, BertTokenizer(TOKENS))
        save_task_model(folder / name, BertForTask(SMALL, task.head, task.outputs).initialize(1), task)
        made[name] = folder / name
    return made


@pytest.fixture(scope="module")
def models(folders: dict[str, Path]) -> dict[str, LoadedModel]:
    return {name: load(folder, precision="fp32") for name, folder in folders.items()}


def test_what_a_folder_holds_decides_what_it_can_do(models: dict[str, LoadedModel]) -> None:
    assert {name: model.abilities for name, model in models.items()} == {
        "pretrained": ("embed", "fill", "score"),
        "encoder": ("embed",),
        "classify": ("embed", "predict"),
        "pairs": ("embed", "predict"),
        **dict.fromkeys(("regress", "classify-two", "multilabel", "sst-2", "mrpc", "sts-b"), ("embed", "predict")),
        "choice": ("embed", "predict"),
        "ner": ("embed", "predict", "tag", "entities"),
        "squad2": ("embed", "predict", "answer"),
    }
    assert "squad2: embed, predict, answer; cpu, fp32," in repr(models["squad2"])
    for model in models.values():
        assert np.shape(model.embed(TEXTS)) == (len(TEXTS), SMALL.hidden_size)


@pytest.mark.parametrize(
    ("name", "call", "message"),
    [
        (
            "encoder",
            lambda m: m.fill(["a [MASK]"]),
            r"encoder: has no masked-LM head \(cls\.predictions\.\S+ is missing",
        ),
        ("encoder", lambda m: m.score(["a"]), r"encoder: has no masked-LM head"),
        ("encoder", lambda m: m.embed(["a"], pool="pooler"), r"encoder: has no pooler \(bert\.pooler"),
        ("ner", lambda m: m.embed(["a"], pool="pooler"), r"ner: was fine-tuned for ner and has no pooler"),
        ("classify", lambda m: m.score(["a"]), r"was fine-tuned for classify and has no masked-LM head; use a pre-tr"),
        ("pretrained", lambda m: m.predict(["a"]), r"was not fine-tuned for a task.*`bertsmith finetune TASK --model"),
        ("pretrained", lambda m: m.answer("a", "b"), r"was not fine-tuned for a task"),
        (
            "classify",
            lambda m: m.answer("a", "b"),
            r"for classify, which is for texts; a model that finds answers",
        ),
        ("squad2", lambda m: m.tag(["a"]), r"for squad2, which finds answers in contexts; a model that tags words is"),
    ],
)
def test_a_part_that_was_never_trained_is_refused_by_name(
    models: dict[str, LoadedModel], name: str, call: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        call(models[name])


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("classify", ["a", 3], "row 2: the model takes one text; give a text$"),
        ("classify", [{"text": "x"}], "row 1: the model takes one text; give a text$"),
        ("classify", [("a", "b", "c")], "row 1: the model takes one text; give a text$"),
        ("pairs", [{"text": "x"}], r"row 1: the model compares two texts; give \(text, text\)$"),
        ("choice", [("a", "b")], r"row 1: give \(context, \[ending, …\]\)"),
        ("choice", [("a", [])], r"row 1: give \(context, \[ending, …\]\)"),
        ("pairs", [("a", "b"), "a"], r"row 2: the model compares two texts; give \(text, text\)"),
        *((name, [("a", "b"), "a"], r"row 2: the model compares two texts; give \(text, text\)")
          for name in ("classify-two", "mrpc", "sts-b")),
        *((name, ["a", ("a", "b")], "row 2: the model takes one text; give no pair")
          for name in ("classify", "regress", "multilabel", "sst-2")),
        ("ner", [["a", None]], "row 1: give a list of words"),
        ("squad2", ["what?"], r"row 1: give \(question, context\)"),
        ("classify", "one text", "texts: give a list of texts, not one text"),
        ("classify", {"text": "a"}, "texts: give a list of texts, not an object"),
        ("ner", None, "texts: give a list of texts, not nothing"),
    ],
)  # fmt: skip
def test_rows_of_another_kind_are_refused(models: dict[str, LoadedModel], name: str, rows: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        models[name].predict(rows)
    if isinstance(rows, str):
        with pytest.raises(UserError, match=message):
            models[name].embed(rows)


def test_what_is_no_text_is_refused_by_number(folders: dict[str, Path], models: dict[str, LoadedModel]) -> None:
    model = models["pretrained"]
    for texts, message in (
        (["ok", None], "text 2: is (or holds )?nothing, not a text"),
        ([1], "text 1: is (or holds )?a number, not a text"),
        ([b"a"], "text 1: is (or holds )?a bytes, not a text"),
        ([["a", 2]], "text 1: is (a list|or holds a number), not a text"),
    ):
        with pytest.raises(UserError, match=message):
            model.embed(texts)
        with pytest.raises(UserError, match=message):
            model.fill(texts)
        with pytest.raises(UserError, match=message):
            model.score(texts)
    for call in (model.embed, model.fill, model.score):
        with pytest.raises(UserError, match="texts: are bytes; give a list of texts, each decoded"):
            call(b"ab")  # type: ignore[operator]
        with pytest.raises(UserError, match="texts: give a list of texts, not"):
            call(np.array("abc"))  # type: ignore[operator]
    words = model.embed([["a", "cat"], ("a", "cat"), np.array(["a", "cat"])], words=True)
    assert [part.shape for part in words] == [words[0].shape] * 3


def test_an_untrained_pooler_is_refused(tmp_path: Path, models: dict[str, LoadedModel]) -> None:
    assert models["pretrained"].embed(["a"], pool="pooler").shape == (1, 48)
    model = load(save_pretrained(tmp_path, "mlm"), precision="fp32")
    with pytest.raises(UserError, match=r"its pooler was not trained \(objective mlm\); use pool mean or cls"):
        model.embed(["a"], pool="pooler")


ROWS = {
    "classify": (TEXTS, [{"text": text} for text in TEXTS]),
    "pairs": (
        [("the cat", text) for text in TEXTS],
        [{"sentence1": "the cat", "sentence2": text} for text in TEXTS],
    ),
    "regress": (TEXTS, [{"text": text} for text in TEXTS]),
    "ner": ([text.split() for text in TEXTS], [{"tokens": text.split()} for text in TEXTS]),
    "squad2": (
        [("cat?", text) for text in TEXTS],
        [{"id": f"row {n}", "question": "cat?", "context": text} for n, text in enumerate(TEXTS, 1)],
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_predictions_are_those_of_the_command(
    name: str, folders: dict[str, Path], models: dict[str, LoadedModel], tmp_path: Path
) -> None:
    rows, written = ROWS[name]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in written), encoding="utf-8")
    predict_file(folders[name], str(path), tmp_path / "y.jsonl", precision="fp32")
    expected = [json.loads(line) for line in (tmp_path / "y.jsonl").read_text(encoding="utf-8").splitlines()]
    assert_alike(models[name].predict(rows), expected)
    for number, row in enumerate(rows):  # alone as in a batch
        alone = {key: value for key, value in expected[number].items() if key != "id"}
        assert_alike(models[name].predict([row]), [alone])


def test_choices(models: dict[str, LoadedModel]) -> None:
    rows = [("the cat", ["sat", "runs", "a mat"]), ("a dog", ["old", "new"])]
    together = models["choice"].predict(rows)
    assert [len(row["scores"]) for row in together] == [3, 2]
    for row, expected in zip(rows, together, strict=True):
        assert_alike(models["choice"].predict([row]), [expected])


def test_answer_and_tag(models: dict[str, LoadedModel]) -> None:
    context = "the old cat sat on a mat because the house runs"
    answer = models["squad2"].answer("cat?", context)
    assert answer["answer"] == context[answer["start"] : answer["end"]] or answer["start"] in (-1, None)
    assert answer == models["squad2"].predict([("cat?", context)])[0]
    sentences = ["the cat sat", ["a", "b12", "\U000fe4fa"], [], "old " * 40]
    tags = models["ner"].tag(sentences)
    assert [len(each) for each in tags] == [3, 3, 0, 40]
    assert {tag for each in tags for tag in each} <= {"O", "B-PER", "I-PER"}


def test_fill_gives_what_the_command_gives(folders: dict[str, Path], models: dict[str, LoadedModel]) -> None:
    texts = ["the [MASK] sat", "[MASK] [MASK]", "the cat " * 50 + "[MASK]"]
    expected = [row["masks"] for row in fill_masks(folders["pretrained"], texts, top=3)["texts"]]
    found = models["pretrained"].fill(texts, top=3)
    assert_alike(found, expected)
    for text, masks in zip(texts, found, strict=True):
        assert_alike(models["pretrained"].fill([text], top=3), [masks])
    with pytest.raises(UserError, match="text 2: holds no"):
        models["pretrained"].fill(["a [MASK]", "b"])
    for top in (0, "5", True):
        with pytest.raises(UserError, match=rf"top: {top!r} is not a number from 1 up"):
            models["pretrained"].fill(["a [MASK]"], top=top)


def test_embed_takes_layers_in_every_form(models: dict[str, LoadedModel]) -> None:
    model = models["pretrained"]
    np.testing.assert_array_equal(model.embed(TEXTS, -1), model.embed(TEXTS, "-1"))
    np.testing.assert_array_equal(model.embed(TEXTS, [2, 3]), model.embed(TEXTS, "2:"))
    np.testing.assert_array_equal(model.embed(TEXTS, range(2, 4)), model.embed(TEXTS, "-2,-1"))
    assert model.embed([]).shape == (0, 48)
    assert model.embed([], pool="none") == []
    assert [len(rows) for rows in model.embed([["a", "cat"], "the old dog", ""], words=True)] == [2, 3, 0]
    assert [len(rows) for rows in model.embed(["a cat", ""], pool="none")] == [4, 2]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": None}, "layers: None is not a whole number"),
        ({"layers": 1.5}, "layers: 1.5 is not a whole number"),
        ({"layers": slice(0, 2)}, r"layers: slice\(0, 2, None\) is not a whole number"),
        ({"max_length": "12"}, "max_length: '12' is not a whole number"),
        ({"max_length": 12.0}, r"max_length: 12\.0 is not a whole number"),
        ({"normalize": "no"}, "normalize: 'no' is neither True nor False"),
        ({"words": 1}, "words: 1 is neither True nor False"),
    ],
)
def test_options_of_embed_of_another_kind_are_refused(
    models: dict[str, LoadedModel], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        models["pretrained"].embed(["a"], **options)


def test_numpys_numbers_are_numbers(models: dict[str, LoadedModel]) -> None:
    model = models["pretrained"]
    found = model.embed(TEXTS, np.int64(1), max_length=np.int32(9), normalize=np.bool_(True))
    np.testing.assert_array_equal(found, model.embed(TEXTS, 1, max_length=9, normalize=True))
    np.testing.assert_array_equal(model.embed(TEXTS, np.array([0, 1])), model.embed(TEXTS, [0, 1]))


def test_options_of_embed_that_are_not_known_are_refused_with_those_that_are(models: dict[str, LoadedModel]) -> None:
    with pytest.raises(UserError, match=r"^foo: embed has no such option; there are layers, combine, pool, words, "):
        models["encoder"].embed(["a"], foo=1)
    with pytest.raises(UserError, match=r"^normalise: embed has no such option; did you mean normalize\?; there are"):
        models["encoder"].embed(["a"], normalise=True)


def test_random_positions_are_used_on_request_only(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = load(save_pretrained(tmp_path / "whole"), precision="fp32")
    some = load(save_pretrained(tmp_path / "some", trained_positions=16), precision="fp32")
    found = f"{some.folder}: pre-training came to 16 of the model's 512 positions, the others are random"
    np.testing.assert_array_equal(some.embed(TEXTS), whole.embed(TEXTS, max_length=16))
    for ours, theirs in zip(some.embed(TEXTS, words=True), whole.embed(TEXTS, words=True, max_length=16), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert [row["tokens"] for row in some.score(TEXTS)] == [min(row["tokens"], 14) for row in whole.score(TEXTS)]
    said = capfd.readouterr().err
    assert f"note: {found}; of a longer text 16 tokens at a time are used\n" in said
    assert (
        said.count("warning: 1 of 6 texts are longer than 16 tokens; 76 tokens were cut\n") == 3
    )  # embed, embed, score
    assert said.count("\n") == 4
    np.testing.assert_array_equal(some.embed(TEXTS, max_length=20), whole.embed(TEXTS, max_length=20))
    some.embed(TEXTS, max_length=20)
    some.embed(TEXTS, max_length=16)
    said = capfd.readouterr().err
    assert said.count(found) == 1
    assert f"warning: {found}; sequences of 20 tokens use them\n" in said


def test_transformers_opens_a_folder_that_tells_its_positions(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = save_pretrained(tmp_path / "some", trained_positions=16)
    model = transformers.BertForPreTraining.from_pretrained(folder)
    model.save_pretrained(tmp_path / "again")
    BertTokenizer(TOKENS).save(tmp_path / "again")
    assert load(tmp_path / "again", precision="fp32").encoder.max_length == 16


def test_the_second_call_takes_a_small_part_of_the_first(minilm: LoadedModel, one_thread: None) -> None:
    """A tenth of it where the files are not yet in memory; here they are, and PyTorch is loaded."""
    begun = time.perf_counter()
    model = load(minilm.folder, precision="fp32")
    model.embed(["the cat"])
    first = time.perf_counter() - begun
    later = []
    for _ in range(5):
        begun = time.perf_counter()
        model.embed(["the cat"])
        later.append(time.perf_counter() - begun)
    assert min(later) < first / 4


def test_nothing_is_read_again(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders["pretrained"], folder)
    model = load(folder, precision="fp32")
    shutil.rmtree(folder)
    assert model.embed(["the cat"]).shape == (1, 48)
    assert model.score(["the cat"])[0]["tokens"] == 2
    assert len(model.fill(["the [MASK]"])) == 1


def test_threads_are_those_asked_for(folders: dict[str, Path]) -> None:
    before = torch.get_num_threads()
    try:
        model = load(folders["encoder"], precision="fp32", threads=3)
        assert torch.get_num_threads() == 3
        assert model.describe() == "cpu, fp32, 3 threads"
        load(folders["encoder"], precision="fp32")
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    for threads in (0, "2", True, 2.0, [2]):
        with pytest.raises(UserError, match=rf"threads: {re.escape(repr(threads))} is not a number from 1 up"):
            load(folders["encoder"], threads=threads)  # type: ignore[arg-type]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("fastest", "least", "chosen"), [("fp32", 0.999, "fp32"), ("bf16", 0.9, "bf16"), ("bf16", 1.1, "fp32")]
)
def test_bf16_is_chosen_where_it_is_faster_and_measures_alike(
    fastest: str,
    least: float,
    chosen: str,
    folders: dict[str, Path],
    models: dict[str, LoadedModel],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(loaded, "_faster_precision", lambda device: fastest)
    monkeypatch.setattr(loaded, "LEAST_COSINE", least)
    model = load(folders["pretrained"])
    assert model.precision == chosen
    said = capsys.readouterr().err
    assert ("least cosine" in said) == (fastest == "bf16")
    if fastest == "bf16":
        assert f"computes in {chosen}" in said
    exact, found = models["pretrained"].embed(TEXTS), model.embed(TEXTS)
    if chosen == "fp32":  # the measurement has not rounded the weights
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5)
    else:
        assert np.abs(found - exact).max() > 1e-4
        assert model.encoder.bert.encoder.layer[0].qkv.weight.dtype == torch.bfloat16


def test_the_machine_is_measured_once_a_process(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def prepare(device: str) -> Machine:
        measured.append(device)
        return Machine(torch.device(device), "fp32", 2e11, 1e11)

    monkeypatch.setattr(loaded, "prepare_machine", prepare)
    loaded._faster_precision.cache_clear()
    assert [load(folders["encoder"], "cpu").precision for _ in range(3)] == ["fp32"] * 3
    assert measured == ["cpu"]
    loaded._faster_precision.cache_clear()


def test_bf16_that_the_chip_does_not_have_is_warned_of(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for emulated in (True, False):
        monkeypatch.setattr(loaded, "emulates_bf16", lambda device, emulated=emulated: emulated)
        load(folders["encoder"], precision="bf16")
        said = capfd.readouterr().err
        assert ("warning: this CPU has no instructions for bf16" in said) == emulated
        load(folders["encoder"], precision="fp32")
        assert "bf16" not in capfd.readouterr().err


def test_bf16_on_request(folders: dict[str, Path], models: dict[str, LoadedModel]) -> None:
    for name in ("pretrained", "classify"):
        model = load(folders[name], precision="bf16")
        assert model.precision == "bf16"
        one, other = model.embed(TEXTS, normalize=True), models[name].embed(TEXTS, normalize=True)
        assert 0.99 < (one * other).sum(1).min() < 1 - 1e-7
    (row,), (exact,) = (m.predict(["the cat"]) for m in (model, models["classify"]))
    assert row["scores"]["good"] == pytest.approx(exact["scores"]["good"], abs=0.05)


def test_unknown_options_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="precision: 'fp16' is not known; use one of auto, bf16, fp32"):
        load(folders["encoder"], precision="fp16")
    with pytest.raises(UserError, match="device: 'tpu' is not known"):
        load(folders["encoder"], device="tpu")
    with pytest.raises(UserError, match=r"no config\.json here"):
        load(tmp_path)
    for threads, said in ((0, "not a number from 1 up"), ("2", "not a number"), (1.5, "not a n"), (10**9, "give")):
        with pytest.raises(UserError, match=rf"^threads.*{said}"):
            load(folders["encoder"], threads=threads)  # type: ignore[arg-type]


def test_what_is_no_folder_or_no_name_is_refused(folders: dict[str, Path]) -> None:
    for folder in (None, 123, b"model", ["model"], {"word": list(range(1000))}):
        with pytest.raises(UserError, match=rf"^folder: {re.escape(reprlib.repr(folder))} is not a path; name the mod"):
            bertsmith.load(folder)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="is not a path"):
            bertsmith.load_model(folder)  # type: ignore[arg-type]
    for value in (None, 16, b"fp32", True, ["fp32"], torch.float32):
        with pytest.raises(UserError, match=r"^precision: .* is not known; use one of auto, bf16, fp32"):
            load(folders["encoder"], precision=value)  # type: ignore[arg-type]
        with pytest.raises(UserError, match=r"^device: .* is not known; use one of auto, cpu, cuda"):
            load(folders["encoder"], device=value)  # type: ignore[arg-type]


def test_it_is_part_of_the_package(folders: dict[str, Path]) -> None:
    assert bertsmith.load(folders["encoder"], precision="fp32").abilities == ("embed",)
