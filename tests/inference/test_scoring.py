"""Pseudo-log-likelihood: each token masked in turn, as transformers computes it; minimal pairs; cuts are counted."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from small_models import SMALL, TOKENS, save_pretrained

from bertsmith.errors import UserError
from bertsmith.inference.loaded import LoadedModel, load
from bertsmith.inference.scoring import score_file, score_pairs_file
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.weights import save_model
from bertsmith.text.tokenizer import BertTokenizer

TEXTS = ["the cat sat on a mat.", "", "running, seer!", "a", "the old house because", "zzz the"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(save_pretrained(tmp_path_factory.mktemp("pretrained")), precision="fp32")


def naive_pll(model: LoadedModel, text: str, within_word: str = "visible") -> float:
    """By transformers, one copy of the sentence at a time."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(model.folder).eval()
    tokenizer = model.encoder.tokenizer
    ids = [tokenizer.cls_id, *tokenizer.encode_ids([text])[0], tokenizer.sep_id]
    total = 0.0
    for place in range(1, len(ids) - 1):
        masked = list(ids)
        masked[place] = tokenizer.mask_id
        after = place + 1
        while within_word == "mask" and TOKENS[ids[after]].startswith("##"):
            masked[after] = tokenizer.mask_id
            after += 1
        with torch.inference_mode():
            logits = theirs(torch.tensor([masked])).logits[0, place, : len(TOKENS)]  # the rest is padding
        total += float(logits.log_softmax(-1)[ids[place]])
    return total


@pytest.mark.parametrize("within_word", ["visible", "mask"])
def test_scores_are_those_of_masking_each_token(model: LoadedModel, within_word: str) -> None:
    for text, row in zip(TEXTS, model.score(TEXTS, within_word), strict=True):
        assert row["tokens"] == len(model.encoder.tokenizer.encode_ids([text])[0])
        if text:
            assert row["pll"] == pytest.approx(naive_pll(model, text, within_word), abs=1e-4)
            assert row["pppl"] == pytest.approx(math.exp(-row["pll"] / row["tokens"]))
        else:
            assert row == {"pll": None, "tokens": 0, "pppl": None}


def test_the_pieces_of_a_word_tell_each_other(model: LoadedModel) -> None:
    visible, masked = (model.score(["the zzz cat", "the cat"], how) for how in ("visible", "mask"))
    assert visible[0]["pll"] != pytest.approx(masked[0]["pll"], abs=1e-3)  # z ##z ##z
    assert visible[1]["pll"] == pytest.approx(masked[1]["pll"], abs=1e-5)  # words of one piece each


def test_alone_or_in_a_batch_the_same(model: LoadedModel) -> None:
    texts = [f"{'the cat ' * (n % 9)}sat {'on a mat ' * (5 * n % 7)}" for n in range(30)]
    together = model.score(texts)
    for n in range(0, 30, 6):
        (alone,) = model.score([texts[n]])
        assert alone["pll"] == pytest.approx(together[n]["pll"], abs=1e-5 * max(1, alone["tokens"]))


def test_a_longer_sentence_is_cut_and_counted(model: LoadedModel) -> None:
    scorer = model.scorer()
    scorer.encoder.max_length, before = 20, scorer.encoder.max_length
    try:
        rows = scorer.score(["the cat", "the " * 100, "cat " * 18])
    finally:
        scorer.encoder.max_length = before
    assert [row["tokens"] for row in rows] == [2, 18, 18]
    assert (scorer.report.truncated, scorer.report.truncated_tokens) == (1, 82)


def test_a_file_is_scored_row_by_row(model: LoadedModel, tmp_path: Path) -> None:
    source, out = tmp_path / "x.txt", tmp_path / "scores.jsonl"
    source.write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    summary = score_file(model.scorer(), str(source), out)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    expected = model.score(TEXTS)
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in expected]
    scored = [row for row in rows if row["tokens"]]
    assert [row["pll"] for row in scored] == pytest.approx([row["pll"] for row in expected if row["tokens"]], abs=1e-4)
    total, tokens = sum(row["pll"] for row in scored), sum(row["tokens"] for row in rows)
    assert summary["without_tokens"] == 1
    assert summary["rows"] == len(TEXTS)
    assert summary["tokens"] == tokens
    assert summary["pll_mean"] == pytest.approx(total / (len(TEXTS) - 1))
    assert summary["pppl"] == pytest.approx(math.exp(-total / tokens))


@pytest.mark.parametrize(
    ("name", "columns", "flags"),
    [
        ("blimp.jsonl", ("sentence_good", "sentence_bad"), {}),
        ("x.csv", ("good", "bad"), {}),
        ("x.tsv", ("right", "wrong"), {"good_column": "right", "bad_column": "wrong"}),
    ],
)
def test_minimal_pairs(model: LoadedModel, tmp_path: Path, name: str, columns: tuple[str, str], flags: dict) -> None:
    pairs = [("the cat sat", "the cats sat"), ("a mat", "mat a"), ("dog runs", "dog runs"), ("old house", "house old")]
    lines = [json.dumps(dict(zip(columns, pair, strict=True), UID="x")) for pair in pairs]
    if not name.endswith("jsonl"):
        lines = [",\t"[name.endswith("tsv")].join(row) for row in [columns, *pairs]]
    (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    summary = score_pairs_file(model.scorer(), str(tmp_path / name), tmp_path / "out.jsonl", **flags)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    scores = [model.score(pair) for pair in pairs]
    for row, (good, bad) in zip(rows, scores, strict=True):
        assert row["good_pll"] == pytest.approx(good["pll"], abs=1e-4)
        assert row["bad_pll"] == pytest.approx(bad["pll"], abs=1e-4)
        assert row["correct"] == (row["good_pll"] > row["bad_pll"])
        assert (row["good_tokens"], row["bad_tokens"]) == (good["tokens"], bad["tokens"])
    assert not rows[2]["correct"]
    assert summary["ties"] == 1
    assert summary["rows"] == 4
    assert summary["accuracy"] == sum(row["correct"] for row in rows) / 4


NOTHING = ["\ue000", "\u200b"]  # the tokenizer leaves nothing of them


def test_a_text_without_tokens_is_no_likely_one(
    model: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sum over no token is 0, the best of all scores: it must win nothing and lift no mean."""
    source, out = tmp_path / "x.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*NOTHING, "the cat"]), encoding="utf-8")
    summary = score_file(model.scorer(), str(source), out)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["pll"] for row in rows[:2]] == [None, None]
    assert summary["pll_mean"] == pytest.approx(rows[2]["pll"])
    assert summary["without_tokens"] == 2
    assert "warning: 2 of 3 texts hold no token, so that they have no score" in capsys.readouterr().err
    pairs = [(NOTHING[0], "the cat"), ("the cat", NOTHING[1]), (NOTHING[0], NOTHING[1])]
    source.write_text("".join(json.dumps({"good": good, "bad": bad}) + "\n" for good, bad in pairs), encoding="utf-8")
    summary = score_pairs_file(model.scorer(), str(source), out)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["correct"] for row in rows] == [None] * 3
    assert (summary["accuracy"], summary["ties"], summary["without_tokens"]) == (None, 0, 3)
    assert "warning: 3 of 3 pairs hold a sentence without a token" in capsys.readouterr().err


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_no_rows(model: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str], ending: str) -> None:
    source, out = tmp_path / "x.csv", tmp_path / f"out{ending}"
    source.write_text("text,good,bad\n", encoding="utf-8")
    for score, columns in (
        (score_file, ["pll", "tokens", "pppl"]),
        (score_pairs_file, ["good_pll", "bad_pll", "good_tokens", "bad_tokens", "correct"]),
    ):
        assert score(model.scorer(), str(source), out)["rows"] == 0
        assert capsys.readouterr().err == f"warning: {source}: no rows, and so none in {out}\n"
        if ending == ".parquet":
            assert pq.read_table(out).schema.names == columns
        else:
            expected = "" if ending == ".jsonl" else (",\t"[ending == ".tsv"]).join(columns) + "\n"
            assert out.read_text() == expected


def test_pairs_that_are_not_there_are_named(model: LoadedModel, tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("good,other\na,b\n", encoding="utf-8")
    told = r"x\.csv: no column 'sentence_good' and no 'sentence_bad'; there are 'good', 'other'; name yours with"
    with pytest.raises(UserError, match=told):
        score_pairs_file(model.scorer(), str(path))
    with pytest.raises(UserError, match=r"--bad-column; did you mean 'other'\?$"):
        score_pairs_file(model.scorer(), str(path), good_column="good", bad_column="othr")
    path.write_text("good,bad\na,b\nc,\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"x\.csv:3: column 'bad' is empty; every row needs two sentences"):
        score_pairs_file(model.scorer(), str(path), tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_the_output_is_checked_before_anything_is_scored(model: LoadedModel, tmp_path: Path) -> None:
    source = tmp_path / "x.jsonl"
    source.write_text('{"text": "a"}\n', encoding="utf-8")
    with pytest.raises(UserError, match="is the input as well"):
        score_file(model.scorer(), str(source), source)
    with pytest.raises(UserError, match="ends in"):
        score_file(model.scorer(), str(source), tmp_path / "x.txt")
    assert source.read_text(encoding="utf-8") == '{"text": "a"}\n'


@pytest.mark.parametrize("scored", [score_file, score_pairs_file])
def test_a_row_at_the_end_that_is_none_is_told_before_anything_is_scored(
    model: LoadedModel, tmp_path: Path, scored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.jsonl"
    rows = [{"text": "the cat", "good": "a", "bad": "b"}] * 300 + [{"text": None, "good": None, "bad": "b"}]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    scorer = model.scorer()
    monkeypatch.setattr(scorer, "score", lambda texts: pytest.fail("scored already"))
    with pytest.raises(UserError, match=r"in\.jsonl:301"):
        scored(scorer, str(source), tmp_path / "o.jsonl")
    assert not (tmp_path / "o.jsonl").exists()


def test_what_is_unknown_is_refused(model: LoadedModel) -> None:
    with pytest.raises(UserError, match="within_word: 'hidden' is not known; use one of visible, mask"):
        model.score(["a"], "hidden")


def test_a_model_that_diverged_is_refused(tmp_path: Path) -> None:
    model = BertForPreTraining(SMALL).initialize(0)
    with torch.no_grad():
        model.mlm_head.bias[7] = float("nan")
    save_model(tmp_path, model, "mlm+nsp")
    BertTokenizer(TOKENS).save(tmp_path)
    loaded = load(tmp_path, precision="fp32")
    with pytest.raises(UserError, match="score: the model's log-probabilities are not finite numbers; its training"):
        loaded.score(["the cat"])
    with pytest.raises(UserError, match="fill: the model's probabilities are not finite numbers"):
        loaded.fill(["the [MASK]"])
