"""Fixtures every test folder shares."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from command_line import TINY, Made, bertsmith, write_texts

# The first example of a test may import a library, and another process may have the processor: time says nothing here.
# Fixtures that every example shares are meant: tokenizers, and folders whose files each example writes anew.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; the test is skipped, with the reason printed, where it is absent."""
    named = os.environ.get("BERTSMITH_SHARED_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real data not found at {folder}; name its folder in BERTSMITH_SHARED_DATA")
    return folder


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Texts, vocabulary, corpus and a finished run of 6 steps. Tests must not change them."""
    made = Made(tmp_path_factory.mktemp("made"))
    write_texts(made.texts)
    for name, arguments in {
        "vocab": (made.texts, "--out", made.vocab, "--size", 120, "--workers", 1),
        "prepare": (made.texts, "--tokenizer", made.vocab, "--out", made.corpus, "--held-out", 0.3, "--workers", 1),
        "pretrain": ("--data", made.corpus, "--out", made.run, "--steps", 6, *TINY),
    }.items():
        made.summaries[name] = bertsmith(name, *arguments, "--json").json
    return made


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch on one thread: how a product is split over threads shows in its rounding, and threads that wait for each
    other wait long where other processes are at work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_configure() -> None:
    """Ctrl-C reaches the processes that tests start, also where a script runs the suite in the background (`&`)."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first, so that a plain mistake shows at once; the order is otherwise kept."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
