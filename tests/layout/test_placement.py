"""Placements that cannot exist."""

import pytest

from flatshard.layout import Partial


def test_bad_placements_are_refused():
    with pytest.raises(ValueError, match="op"):
        Partial("max")  # type: ignore[arg-type]
