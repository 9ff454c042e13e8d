"""BERT under each task's output layer is transformers': logits, losses, gradients, folders in both directions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bertsmith import progress
from bertsmith.errors import UserError
from bertsmith.inference.loaded import load
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.dropout import DropoutMasks
from bertsmith.model.task_model import ARCHITECTURES, BertForTask
from bertsmith.model.weights import load_folder_weights, save_model, to_hugging_face
from bertsmith.tasks import losses
from bertsmith.tasks.batches import PackedBatch, pack_examples
from bertsmith.tasks.examples import EncodedSequence
from bertsmith.tasks.model_folder import load_task_model, open_tokenizer, save_task_model, start_model
from bertsmith.tasks.registry import make_task
from bertsmith.tasks.spec import TASK_KEY, TaskSpec
from bertsmith.tasks.task import Task
from made_tasks import make_config, make_tokenizer

CPU = torch.device("cpu")
CONFIG = make_config(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
# a task of each head, with what its labels and outputs are
SPECS = {
    "sequence": TaskSpec("classify", 32, ("neg", "01", "é")),
    "choice": TaskSpec("choice", 32),
    "token": TaskSpec("ner", 32, ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")),
    "span": TaskSpec("squad1", 32, stride=8),
}
LENGTHS = (9, 4, 17, 6)


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


def make(head: str, folder: Path, seed: int = 3) -> tuple[Task, BertForTask]:
    task = make_task(SPECS[head], make_tokenizer(folder / "vocabulary"))
    return task, BertForTask(CONFIG, task.head, task.outputs).initialize(seed)


def sequences(head: str, lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[EncodedSequence]:
    """Random tokens in two segments; the positions a head looks at; targets of its kind."""
    random = np.random.default_rng(seed)
    made = []
    for length in lengths:
        positions = {"token": np.sort(random.choice(length, length // 2, replace=False)), "span": np.arange(length)}
        chosen = positions.get(head, np.zeros(1, dtype=np.int64))
        targets = {"token": random.integers(5, size=len(chosen)), "span": random.integers(length, size=2)}
        made.append(
            EncodedSequence(
                random.integers(5, CONFIG.vocab_size, length).astype(np.int32),
                length // 2 + 1,
                chosen.astype(np.int32),
                targets.get(head, random.integers(3, size=1)).astype(np.int64),
            )
        )
    return made


def padded(batch: PackedBatch, width: int | None = None) -> dict[str, Tensor]:
    """The packed sequences as transformers takes them, one row each."""
    parts = {}
    lengths = batch.sequence_starts.diff().tolist()
    for name, flat in (("input_ids", batch.token_ids), ("token_type_ids", batch.segment_ids)):
        rows = torch.zeros(len(lengths), width or max(lengths), dtype=torch.int64)
        for row, piece in zip(rows, flat.split(lengths), strict=True):
            row[: len(piece)] = piece
        parts[name] = rows
    parts["attention_mask"] = (torch.arange(parts["input_ids"].shape[1]) < torch.tensor(lengths)[:, None]).long()
    return parts


def their_scores(head: str, theirs: Any, batch: PackedBatch) -> Tensor:
    """What transformers says of the same rows, in our order, (R, outputs)."""
    inputs = padded(batch)
    if head == "choice":
        return theirs(**{name: tensor[None] for name, tensor in inputs.items()}).logits[0][:, None]
    output = theirs(**inputs)
    if head == "sequence":
        return output.logits
    table = output.logits if head == "token" else torch.stack([output.start_logits, output.end_logits], -1)
    sequence = torch.repeat_interleave(torch.arange(len(batch.row_counts)), torch.tensor(batch.row_counts))
    return table[sequence, batch.rows - batch.sequence_starts[sequence]]


@pytest.mark.parametrize("head", ARCHITECTURES)
def test_our_folder_opens_there(transformers: Any, tmp_path: Path, head: str) -> None:
    task, model = make(head, tmp_path)
    save_task_model(tmp_path / "ours", model, task)
    kind = getattr(transformers, ARCHITECTURES[head])
    theirs, report = kind.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    if task.spec.labels:
        assert theirs.config.id2label == dict(enumerate(task.spec.labels))
        assert theirs.config.label2id == {label: number for number, label in enumerate(task.spec.labels)}
    batch = pack_examples([[sequence] for sequence in sequences(head)], CPU)
    with torch.inference_mode():
        ours = model(*batch.inputs())
        torch.testing.assert_close(ours, their_scores(head, theirs.eval(), batch), rtol=0, atol=1e-4)
        if head == "span":  # no rows: all tokens
            assert torch.equal(ours, model(*batch.inputs()[:-1], None))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert tokenizer("anna lives in paris")["input_ids"][1:-1] == task.tokenizer.encode_ids(["anna lives in paris"])[0]


@pytest.mark.parametrize("head", ARCHITECTURES)
def test_their_folder_fills_our_model(transformers: Any, tmp_path: Path, head: str) -> None:
    torch.manual_seed(1)
    outputs = make_task(SPECS[head], make_tokenizer(tmp_path)).outputs
    labels = {} if head == "choice" else {"num_labels": outputs}
    theirs = getattr(transformers, ARCHITECTURES[head])(transformers.BertConfig(**CONFIG.to_dict(), **labels)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    theirs.save_pretrained(tmp_path)
    model = BertForTask(CONFIG, head, outputs)
    report = load_folder_weights(model, tmp_path)
    assert not report.missing
    assert not report.unused
    batch = pack_examples([[sequence] for sequence in sequences(head)], CPU)
    with torch.inference_mode():
        torch.testing.assert_close(model(*batch.inputs()), their_scores(head, theirs, batch), rtol=0, atol=1e-4)


CLASS_WEIGHTS = torch.tensor([0.5, 2.0, 1.25])


def our_loss(task: Task, model: BertForTask, examples: list[list[EncodedSequence]]) -> tuple[float, dict[str, Tensor]]:
    """The loss of a step, and its gradients under transformers' names."""
    batch = pack_examples(examples, CPU)
    loss = task.loss(model(*batch.inputs()), batch) / task.weight(batch)
    loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.data = parameter.grad
    return float(loss.detach()), to_hugging_face(model)


@pytest.mark.parametrize(
    "kind", ["classes", "weighted classes", "number", "labels", "weighted labels", "choice", "tags", "spans"]
)
def test_losses_and_gradients_are_theirs(transformers: Any, tmp_path: Path, kind: str) -> None:
    head = {"choice": "choice", "tags": "token", "spans": "span"}.get(kind, "sequence")
    name = {"number": "regress", "labels": "multilabel", "weighted labels": "multilabel"}.get(kind)
    task, _ = make(head, tmp_path)
    if name is not None:
        task = make_task(TaskSpec(name, 32, () if name == "regress" else ("a", "b", "c")), task.tokenizer)
    model = BertForTask(CONFIG, task.head, task.outputs).initialize(3)
    save_task_model(tmp_path / "m", model, task)
    theirs = getattr(transformers, ARCHITECTURES[head]).from_pretrained(tmp_path / "m", attn_implementation="eager")
    assert not theirs.config.hidden_dropout_prob
    theirs.train()
    # spans: transformers counts padding among the places an answer may be; of one length there is none
    made = sequences(head, (9, 9, 9, 9) if kind == "spans" else LENGTHS)
    targets = {
        "number": [np.array([y], dtype=np.float32) for y in (0, 1, 2, 5)],
        "labels": list(np.array([[0, 1, 1], [0, 0, 0], [1, 1, 1], [1, 0, 0]], dtype=np.float32)),
    }
    targets["weighted labels"] = targets["labels"]
    for sequence, target in zip(made, targets.get(kind, ()), strict=False):
        sequence.targets = target
    batch = pack_examples([[sequence] for sequence in made], CPU)
    inputs, labels = padded(batch), batch.targets
    if kind.startswith("weighted"):
        task.weights = CLASS_WEIGHTS
    if kind == "weighted classes":
        loss = F.cross_entropy(theirs(**inputs).logits, labels, CLASS_WEIGHTS)
    elif kind == "weighted labels":
        logits = theirs(**inputs).logits
        loss = F.binary_cross_entropy_with_logits(logits, labels.view(4, 3), pos_weight=CLASS_WEIGHTS)
    elif kind == "labels":
        loss = theirs(**inputs, labels=labels.view(4, 3)).loss
    elif kind == "choice":  # two questions of two choices
        right = torch.tensor([1, 0])
        loss = theirs(**{key: tensor.view(2, 2, -1) for key, tensor in inputs.items()}, labels=right).loss
        for sequence, target in zip(made, ([1], [], [0], []), strict=True):
            sequence.targets = np.array(target, dtype=np.int64)
    elif kind == "tags":
        table = torch.full_like(inputs["input_ids"], -100)
        sequence_of = torch.repeat_interleave(torch.arange(4), torch.tensor(batch.row_counts))
        table[sequence_of, batch.rows - batch.sequence_starts[sequence_of]] = labels
        loss = theirs(**inputs, labels=table).loss
    elif kind == "spans":
        starts, ends = labels.view(4, 2).unbind(1)
        loss = theirs(**inputs, start_positions=starts, end_positions=ends).loss
    else:
        loss = theirs(**inputs, labels=labels).loss
    loss.backward()
    examples = [made[:2], made[2:]] if kind == "choice" else [[sequence] for sequence in made]
    value, gradients = our_loss(task, model, examples)
    assert value == pytest.approx(loss.item(), abs=1e-6)
    expected = {key: parameter.grad for key, parameter in theirs.named_parameters()}
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-6, msg=key)


@pytest.mark.parametrize("head", ARCHITECTURES)
def test_scores_are_not_rounded_to_the_arithmetics_type(tmp_path: Path, head: str) -> None:
    _, model = make(head, tmp_path)
    model.bert.compute_dtype = torch.bfloat16
    with torch.no_grad():
        scores = model.eval()(*pack_examples([sequences(head)], CPU).inputs())
    assert scores.dtype == torch.float32
    assert (scores.bfloat16().float() != scores).float().mean() > 0.5


def test_span_loss_does_not_look_at_padding(tmp_path: Path) -> None:
    """Unlike transformers: sequences of other lengths change nothing of one's own loss."""
    task, model = make("span", tmp_path)
    made = sequences("span")
    with torch.no_grad():
        alone = []
        for sequence in made:
            batch = pack_examples([[sequence]], CPU)
            alone.append(float(task.loss(model(*batch.inputs()), batch)))
        batch = pack_examples([[sequence] for sequence in made], CPU)
        assert float(losses.span_loss(model(*batch.inputs()), batch)) == pytest.approx(sum(alone), rel=1e-5)


def test_dropout_is_the_models(tmp_path: Path) -> None:
    task, _ = make("sequence", tmp_path)
    model = BertForTask(make_config(), task.head, task.outputs).initialize(0)
    batch = pack_examples([[sequence] for sequence in sequences("sequence")], CPU)
    with torch.inference_mode():
        plain, dropped = model(*batch.inputs()), model(*batch.inputs(), DropoutMasks((1, 2)))
        assert torch.equal(dropped, model(*batch.inputs(), DropoutMasks((1, 2))))
        assert not torch.allclose(dropped, model(*batch.inputs(), DropoutMasks((1, 3))))
        assert not torch.allclose(plain, dropped)


def test_start_from_pre_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Encoder and pooler are the folder's, the new layer is the seed's; without pre-training all is."""
    task, _ = make("sequence", tmp_path)
    source = BertForPreTraining(CONFIG).initialize(9)
    save_model(tmp_path / "m", source, "mlm+nsp")
    first, second = (start_model(tmp_path / "m", task, seed, None, False) for seed in (1, 2))
    for name, tensor in first.bert.state_dict().items():
        assert torch.equal(tensor, source.bert.state_dict()[name]), name
        assert torch.equal(tensor, second.bert.state_dict()[name]), name
    assert not torch.equal(first.classifier.weight, second.classifier.weight)
    assert torch.equal(first.classifier.weight, start_model(tmp_path / "m", task, 1, None, False).classifier.weight)
    fresh = start_model(tmp_path / "m", task, 1, None, True)
    assert torch.equal(first.classifier.weight, fresh.classifier.weight)
    assert not torch.allclose(first.bert.embeddings.word, fresh.bert.embeddings.word)
    assert start_model(tmp_path / "m", task, 1, 0.3, False).config.hidden_dropout_prob == 0.3
    assert "warning" not in capfd.readouterr().err
    # a folder without a pooler, as masked language models are saved: random, and said
    encoder = BertForTask(CONFIG, "token", 3).initialize(9)
    save_task_model(tmp_path / "t", encoder, make("token", tmp_path)[0])
    start_model(tmp_path / "t", task, 1, None, False)
    assert "bert.pooler.dense.weight, bert.pooler.dense.bias not in it" in capfd.readouterr().err
    # nor is another task's output layer taken over, of whatever shape
    assert start_model(tmp_path / "t", make("span", tmp_path)[0], 1, None, False).outputs == 2


def test_labels_and_task_travel(tmp_path: Path) -> None:
    task, model = make("sequence", tmp_path)
    save_task_model(tmp_path / "m", model, task)
    loaded, again = load_task_model(tmp_path / "m")
    assert loaded.spec == task.spec
    assert loaded.tokenizer.fingerprint == task.tokenizer.fingerprint
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    values = json.loads((tmp_path / "m" / "config.json").read_bytes())
    assert TaskSpec.from_dict(values[TASK_KEY], "m").labels == ("neg", "01", "é")
    assert load_task_model(tmp_path / "m", text_column="t", encoding=None)[0].spec.text_column == "t"


def test_folders_that_cannot_predict(transformers: Any, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(tmp_path / "v")
    save_model(tmp_path / "pretrained", BertForPreTraining(CONFIG).initialize(0), "mlm+nsp")
    theirs = transformers.BertForSequenceClassification(transformers.BertConfig(**CONFIG.to_dict()))
    theirs.save_pretrained(tmp_path / "theirs")
    for name, told in (
        ("pretrained", "was not fine-tuned for a task, so that it has no trained output layer"),
        ("theirs", "is a BertForSequenceClassification that was not fine-tuned for a task by bertsmith.* transformers"),
    ):
        tokenizer.save(tmp_path / name)
        with pytest.raises(UserError, match=rf"{name}: {told}.*run `bertsmith finetune TASK --model") as error:
            load_task_model(tmp_path / name)
        assert load(tmp_path / name, "cpu", "fp32").why_not["task"] == str(error.value)
    task, model = make("sequence", tmp_path)
    save_task_model(tmp_path / "m", model, task)
    # the encoder of another folder under this config: the output layer was never trained
    (tmp_path / "m" / "model.safetensors").write_bytes((tmp_path / "pretrained" / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match=r"classifier\.weight is missing.*never trained; fine-tune again"):
        load_task_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_length": 65}, "max_length 65, 64 positions"),
        ({"labels": []}, "0 outputs"),
        ({"labels": ["a", "b"]}, f"id2label and {TASK_KEY}.labels do not name the same labels"),
        ({"labels": ["a", "a", "b"]}, r"labels = \['a', 'a', 'b'\] is not what"),
        ({"labels": "abc"}, "labels = 'abc'"),
        ({"labels": [1, 2, 3]}, "labels"),
        ({"name": "nothing"}, "name = 'nothing'"),
        ({"name": None}, "name = None"),
        ({"max_length": True}, "max_length = True"),
        ({"max_length": "32"}, "max_length = '32'"),
        ({"long": "fold"}, "long = 'fold'"),
        ({"text_column": 3}, "text_column = 3"),
        ({"null_threshold": "x"}, "null_threshold = 'x'"),
        ({"null_threshold": True}, "null_threshold = True"),
        ({"unheard_of": 1}, "not what this version of bertsmith writes"),
    ],
)
def test_hostile_task_descriptions(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    task, model = make("sequence", tmp_path)
    save_task_model(tmp_path / "m", model, task)
    path = tmp_path / "m" / "config.json"
    values = json.loads(path.read_bytes())
    path.write_text(json.dumps(values | {TASK_KEY: values[TASK_KEY] | changes}), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        load_task_model(tmp_path / "m")


@pytest.mark.parametrize("value", [None, [], "classify", {}, {"name": "classify"}])
def test_no_task_description(tmp_path: Path, value: Any) -> None:
    task, model = make("sequence", tmp_path)
    save_task_model(tmp_path / "m", model, task)
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {TASK_KEY: value}), encoding="utf-8")
    with pytest.raises(UserError, match="not what this version of bertsmith writes; fine-tune again"):
        load_task_model(tmp_path / "m")


def test_tokenizer_of_another_model(tmp_path: Path) -> None:
    task, model = make("sequence", tmp_path)
    small = BertForTask(make_config(vocab_size=50), "sequence", 3).initialize(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "config", small.config)
        save_task_model(tmp_path / "m", small, task)
    with pytest.raises(UserError, match=r"its tokenizer has \d+ entries, its word table 50; they do not belong togeth"):
        load_task_model(tmp_path / "m")


def test_labels_changed_in_one_place_only_are_refused(tmp_path: Path) -> None:
    task, model = make("sequence", tmp_path)
    save_task_model(tmp_path / "m", model, task)
    path = tmp_path / "m" / "config.json"
    values = json.loads(path.read_bytes())
    changed = {"0": values["id2label"]["1"], "1": values["id2label"]["0"], "2": values["id2label"]["2"]}
    path.write_text(json.dumps(values | {"id2label": changed}), encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json: id2label and bertsmith_task\.labels do not name the same"):
        load_task_model(tmp_path / "m")
    del values["id2label"]
    path.write_text(json.dumps(values), encoding="utf-8")
    assert load_task_model(tmp_path / "m")[0].spec == task.spec


def test_layers_that_the_config_does_not_know_are_refused(tmp_path: Path) -> None:
    task, model = make("sequence", tmp_path)
    save_task_model(tmp_path / "m", model, task)
    path = tmp_path / "m" / "config.json"
    values = json.loads(path.read_bytes())
    path.write_text(json.dumps(values | {"num_hidden_layers": values["num_hidden_layers"] - 1}), encoding="utf-8")
    with pytest.raises(UserError, match=r"encoder\.layer\.\d+\.\S+ is of a layer past num_hidden_layers in config"):
        load_task_model(tmp_path / "m")


@pytest.mark.parametrize(("rows", "said"), [(30_000, True), (40, False)])
def test_a_vocabulary_much_smaller_than_the_table_is_said(
    tmp_path: Path, rows: int, said: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_said", set())
    tokenizer = make_tokenizer(tmp_path / "vocabulary")
    for name in ("m", "tuned"):  # the models that a command makes have the vocabulary of the one it began with
        tokenizer.save(tmp_path / name)
        open_tokenizer(tmp_path / name, make_config(vocab_size=tokenizer.vocab_size + rows))
    with progress.silenced():
        open_tokenizer(tmp_path / "m", make_config(vocab_size=tokenizer.vocab_size + rows + 1))
    assert capfd.readouterr().err.count("is vocab.txt this model's?") == said
    open_tokenizer(tmp_path / "m", make_config(vocab_size=tokenizer.vocab_size + rows + 1))
    assert capfd.readouterr().err.count("is vocab.txt this model's?") == said, "another table's rows are another fact"
