"""Fixtures of the model tests."""

import pytest
from packed_batches import Packed, make_packed


@pytest.fixture(params=[[16] * 3, [20, 3, 17, 19, 1, 20, 5]], ids=["equal", "mixed"])
def packed(request: pytest.FixtureRequest) -> Packed:
    return make_packed(request.param)
