"""Predictions compared."""

from typing import Any

import pytest


def assert_alike(found: Any, expected: Any) -> None:
    """The same values, numbers within 1e-5 (what is written is rounded nowhere)."""
    if isinstance(expected, dict):
        assert found.keys() >= expected.keys()
        for key, value in expected.items():
            assert_alike(found[key], value)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-5)
    else:
        assert found == expected
