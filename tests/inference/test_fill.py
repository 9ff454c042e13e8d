"""Filling masks: the numbers transformers gives, alone or in a batch, and only [MASK] is special."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from bertsmith.errors import UserError
from bertsmith.inference.fill import fill_masks, find_model
from bertsmith.text.tokenizer import load_tokenizer
from command_line import Made

TEXTS = [
    "The [MASK] sleeps.",
    "[MASK]",
    "The old dog [MASK] the [MASK] and a tree because the night likes cats.",
    "café 中 ♡ [MASK] unknownword [MASK]",
    "a big small old young house runs day but [MASK]" + " and the cat" * 30,
    "[MASK][MASK] x [MASK]",
]


def transformers_guesses(folder: Path, text: str) -> list[torch.Tensor]:
    """Probabilities (V,) for each [MASK] of a text, from transformers on the same folder."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(text, return_tensors="pt")
    with torch.inference_mode():
        logits = model(**batch).logits[0]
    return list(logits[batch["input_ids"][0] == tokenizer.mask_token_id].softmax(-1))


def check_against_transformers(folder: Path, texts: list[str]) -> None:
    tokenizer = load_tokenizer(folder)
    filled = fill_masks(folder, texts, top=8)["texts"]
    for text, result in zip(texts, filled, strict=True):
        expected = transformers_guesses(folder, text)
        assert len(result["masks"]) == len(expected) == text.count("[MASK]")
        for guesses, shares in zip(result["masks"], expected, strict=True):
            # rows of a padded word table are no tokens: ours gives them no share
            shares = shares[: tokenizer.vocab_size] / shares[: tokenizer.vocab_size].sum()
            ids = [tokenizer.token_to_id(guess["token"]) for guess in guesses]
            found = torch.tensor([guess["probability"] for guess in guesses])
            torch.testing.assert_close(found, shares[ids], rtol=0, atol=1e-5)
            torch.testing.assert_close(found, shares.topk(8).values, rtol=0, atol=1e-5)


def test_our_model_is_filled_as_transformers_fills_it(made: Made) -> None:
    check_against_transformers(made.model, TEXTS)


def test_a_model_of_transformers_is_filled_as_it_fills_it(made: Made, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    vocabulary = load_tokenizer(made.vocab)
    config = transformers.BertConfig(
        vocab_size=vocabulary.vocab_size + 6,  # padded, as NVIDIA's checkpoints are
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=128,
        initializer_range=0.5,
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    vocabulary.save(tmp_path)
    check_against_transformers(tmp_path, [text for text in TEXTS if len(text) < 120])


def test_alone_or_in_a_batch_the_same(made: Made) -> None:
    texts = [f"{'the cat ' * (7 * n % 40)}[MASK] {'and a dog ' * (11 * n % 30)}" for n in range(60)]
    together = fill_masks(made.model, texts, top=5)["texts"]
    assert [result["text"] for result in together] == texts
    for n in range(0, 60, 7):
        (alone,) = fill_masks(made.model, texts[n : n + 1], top=5)["texts"]
        one, other = ([guess["probability"] for guess in result["masks"][0]] for result in (alone, together[n]))
        assert one == pytest.approx(other, abs=1e-5)


def test_only_mask_is_special(made: Made) -> None:
    # a separator typed by a user is text: the same guesses as for text that means nothing, not those of two segments
    tokenizer = load_tokenizer(made.model)
    assert tokenizer.sep_id not in tokenizer.encode_ids(["good [SEP] bad [CLS] [PAD]"])[0]
    (plain,) = fill_masks(made.model, ["the [SEP] [MASK] [PAD]"])["texts"]
    (spaced,) = fill_masks(made.model, ["the [ SEP ] [MASK] [ PAD ]"])["texts"]
    assert plain["masks"] == spaced["masks"]


def test_the_folder_says_whether_case_counts(made: Made, tmp_path: Path) -> None:
    upper, lower = fill_masks(made.model, ["THE Old DOG [MASK]", "the old dog [MASK]"])["texts"]
    assert [guess["token"] for guess in upper["masks"][0]] == [guess["token"] for guess in lower["masks"][0]]
    for path in made.model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name, key in (("tokenizer_config.json", "do_lower_case"), ("tokenizer.json", "lowercase")):
        values = json.loads((tmp_path / name).read_text(encoding="utf-8"))
        (values.get("normalizer") or values)[key] = False
        (tmp_path / name).write_text(json.dumps(values), encoding="utf-8")
    upper, lower = fill_masks(tmp_path, ["THE Old DOG [MASK]", "the old dog [MASK]"])["texts"]
    assert upper["masks"] != lower["masks"]


@pytest.mark.parametrize(("words", "tokens"), [(508, 511), (509, 512)])
def test_texts_up_to_the_models_positions_are_filled(words: int, tokens: int, made: Made) -> None:
    assert len(load_tokenizer(made.model).encode_ids(["cat " * words])[0]) == tokens - 3
    (result,) = fill_masks(made.model, ["cat " * words + "[MASK]"])["texts"]
    assert len(result["masks"]) == 1


def test_positions_that_pre_training_left_random_are_said(
    made: Made, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made.model, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"bertsmith_trained_positions": 9}), encoding="utf-8")
    fill_masks(tmp_path, ["cat " * 6 + "[MASK]"])
    assert "random" not in capfd.readouterr().err
    fill_masks(tmp_path, ["[MASK]", "cat " * 8 + "[MASK]", "dog [MASK]"])
    found = f"{tmp_path}: pre-training came to 9 of the model's 512 positions, the others are random"
    assert f"warning: {found}; sequences of 11 tokens use them\n" in capfd.readouterr().err


@pytest.mark.parametrize("words", [510, 1997])
def test_longer_texts_are_refused_with_both_numbers(words: int, made: Made) -> None:
    with pytest.raises(UserError, match=rf"text 2: {words + 3} tokens are more than the model's 512; shorten"):
        fill_masks(made.model, ["a [MASK]", "cat " * words + "[MASK]"])


def test_all_texts_that_cannot_be_used_are_named_at_once(made: Made) -> None:
    texts = ["a [MASK]", *["none"] * 7]
    with pytest.raises(UserError) as caught:
        fill_masks(made.model, texts, places=[f"x.txt:{n}" for n in range(1, 9)])
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("x.txt:2: holds no [MASK]")
    assert len(lines) == 6
    assert lines[-1] == "… and 2 more"


def test_many_unknown_tokens_are_said(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    fill_masks(made.model, ["the cat [MASK]"])
    assert "UNK" not in capsys.readouterr().err
    fill_masks(made.model, ["кот спит [MASK]"])
    assert "40% of the tokens are [UNK]" in capsys.readouterr().err


def test_every_token_when_more_guesses_are_asked_for_than_there_are(made: Made) -> None:
    (result,) = fill_masks(made.model, ["[MASK]"], top=10**6)["texts"]
    tokens = [guess["token"] for guess in result["masks"][0]]
    assert sorted(tokens) == sorted(load_tokenizer(made.model).tokens)
    assert sum(guess["probability"] for guess in result["masks"][0]) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_precision_is_the_one_asked_for(precision: str, made: Made) -> None:
    exact = fill_masks(made.model, TEXTS[:3])["texts"]
    found = fill_masks(made.model, TEXTS[:3], precision=precision)["texts"]
    if precision == "fp32":
        assert found == exact
    else:
        assert found != exact
        first, second = (results[0]["masks"][0][0]["probability"] for results in (found, exact))
        assert first == pytest.approx(second, rel=0.05)


def test_a_finished_run_stands_for_its_model(made: Made, tmp_path: Path) -> None:
    assert find_model(made.run) == made.model
    assert fill_masks(made.run, TEXTS[:1])["texts"] == fill_masks(made.model, TEXTS[:1])["texts"]
    (tmp_path / "config.toml").write_text("steps = 1\n", encoding="utf-8")
    with pytest.raises(UserError, match="this run has no finished model yet"):
        fill_masks(tmp_path, TEXTS)


def test_a_model_without_an_mlm_head_is_refused(made: Made, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.AutoModel.from_pretrained(made.model).save_pretrained(tmp_path)
    load_tokenizer(made.vocab).save(tmp_path)
    with pytest.raises(UserError, match=r"has no masked-LM head \(cls\.predictions"):
        fill_masks(tmp_path, TEXTS)


def test_a_tokenizer_of_another_model_is_refused(made: Made, tmp_path: Path) -> None:
    for path in made.model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tokens = [*load_tokenizer(made.model).tokens, "onemore"]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match="they do not belong together"):
        fill_masks(tmp_path, TEXTS)
