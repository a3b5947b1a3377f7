"""What the tests of kernels share."""

from __future__ import annotations

import pytest

from treeeagle_edge.kernels.native.library import available_isas
from treeeagle_edge.kernels.native.loader import problem


@pytest.fixture(params=available_isas() if problem() is None else ["none"])
def isa(request: pytest.FixtureRequest) -> str:
    """Every instruction set that this machine can run."""
    return str(request.param)
