"""Fixtures every test folder shares."""

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; the test is skipped, with the reason printed, where it is absent."""
    named = os.environ.get("BERTSMITH_SHARED_DATA")
    folder = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real data not found at {folder}; name its folder in BERTSMITH_SHARED_DATA")
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick tests first, so that a plain mistake shows at once; the order is otherwise kept."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
