"""What commands print where there is little to say."""

from __future__ import annotations

import json

import pytest

from flatshard.cli import main
from flatshard.rehearsal.report import Report


@pytest.mark.parametrize(
    ("header", "said"),
    [({}, "all empty: these ranks have launched no collective"), ({"error": "ValueError: x"}, "raised ValueError: x")],
)
def test_empty_records_are_not_said_to_agree(tmp_path, capsys, header, said):
    for rank in (0, 1):
        record = {"header": {"rank": rank, "world": 2, **header}, "entries": []}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(record))
    assert main(["blame", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert said in printed
    assert "launched the same" not in printed


def test_exposed_time_is_never_negative():
    """On a busy machine the run on a free network may be the slower one."""
    report = Report(8, 0, "h100-nvlink", 8, "cpu", "2", 2, [0.1, 0.1], free_network_seconds=[0.14, 0.14])
    assert report.exposed == 0
    assert "exposed              not measurable: steps vary by more (free network: 140.00 ms)" in report.table()
    report.free_network_seconds = [0.09, 0.09]
    assert "exposed              10.00 ms per step (free network: 90.00 ms)" in report.table()
    assert "more than the wire time" in report.table(), "nothing has been sent"
    report.traffic["all_gather"] = {"launches": 1.0, "bytes": 8.0, "wire_bytes": 7.0, "wire_seconds": 0.02}
    assert "more than the wire time" not in report.table()


def test_short_times_are_not_zero():
    report = Report(8, 0, "h100-nvlink", 8, "cpu", "2", 2, [0.1, 0.1], waits={"reduce 0": 3e-6})
    assert "3.0 us" in report.table()
