"""Sizes in bytes, as text and from text."""

from __future__ import annotations

import pytest

from flatshard._sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"), [("80", 80), ("80GB", 80 * 10**9), (" 5 gib ", 5 << 30), ("1.5TB", 15 * 10**11), ("1e2kb", 10**5)]
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GB", "80XB", "5 parsec", "-0.1", "nan", "infGB"])
def test_other_texts_are_no_sizes(text):
    assert parse_bytes(text, "GB") is None


def test_a_number_without_a_unit_has_the_default():
    assert parse_bytes("80", "GB") == 80 * 10**9


@pytest.mark.parametrize(
    ("size", "decimal", "binary"),
    [(999, "999 B", "999 B"), (1536, "1.54 kB", "1.50 KiB"), (3e9, "3.00 GB", "2.79 GiB")],
)
def test_sizes_are_written_in_the_largest_unit_they_reach(size, decimal, binary):
    assert (format_bytes(size), format_bytes(size, binary=True)) == (decimal, binary)
