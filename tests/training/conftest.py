"""A small real corpus, made once a session, and the probe into the training loop."""

from pathlib import Path

import pytest
import torch
from made_runs import Probe, demo_rows

from bertsmith import hardware
from bertsmith.corpus.prepare import prepare_corpus
from bertsmith.text.vocabulary import build_vocabulary


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 110 kB of English prose, 20 documents."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text.jsonl").write_text(demo_rows("english", 0, 20), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def vocabulary(texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """800 entries."""
    folder = tmp_path_factory.mktemp("vocabulary") / "vocab"
    build_vocabulary([str(texts)], folder, size=800, workers=1)
    return folder


@pytest.fixture(scope="session")
def corpus(texts: Path, vocabulary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """33,000 tokens, a third of them held out; one window of the shuffle."""
    folder = tmp_path_factory.mktemp("corpus") / "corpus"
    prepare_corpus([str(texts)], vocabulary, folder, workers=1, held_out=0.15)
    return folder


@pytest.fixture(scope="session")
def other_corpus(vocabulary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other documents, the same tokenizer."""
    folder = tmp_path_factory.mktemp("other")
    (folder / "text.jsonl").write_text(demo_rows("english", 30, 45), encoding="utf-8")
    prepare_corpus([str(folder / "text.jsonl")], vocabulary, folder / "corpus", workers=1, held_out=0.15)
    return folder / "corpus"


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    """See made_runs.Probe."""
    return Probe(monkeypatch)


@pytest.fixture(autouse=True)
def quick_measurement(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No half second of matrix products at every start, except where the test asks for them."""
    if "real_measurement" not in request.fixturenames:
        monkeypatch.setattr(hardware, "measure_matmul", lambda device, dtype: 1e11 if dtype is torch.float32 else 9e10)


@pytest.fixture
def real_measurement() -> None:
    """The machine's matrix-product rate is really measured in this test."""
