"""These tests are about what commands say: equal models are captured once."""

import pytest
from captures import shared_captures  # noqa: F401  (a fixture)


@pytest.fixture(autouse=True)
def captured_once(shared_captures):  # noqa: F811
    """Let all tests of this folder share captures."""
