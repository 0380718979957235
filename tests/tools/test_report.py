"""`flatshard report` in a browser: it loads alone, shows every gather, names what the pointer is on, and zooms."""

from __future__ import annotations

import json

import pytest

from flatshard.cli import main
from flatshard.tools.report import Record, differences, html
from tests.tools.browser import CHROMIUM, Browser

UNITS = ["FSDPNet", "blocks.0", "blocks.1", "</script><b>head"]


def _recording(wait: float = 0.4):
    """One step of four units: each is gathered while the one before computes, and ``wait`` too late."""
    spans, waits, memory, at = [], [], [], 0.0
    for phase, order in (("forward", UNITS), ("backward", UNITS[::-1])):
        for unit in order:
            gather = {"lane": "gather", "kind": "all_gather", "unit": unit, "bytes": 1 << 20}
            spans.append({**gather, "begin": at, "end": at + wait})
            waits.append({"phase": phase, "unit": unit, "begin": at, "end": at + wait})
            memory.append({"at": at + wait, "gathered": 2 << 20, "staging": 1 << 10, "allocated": None})
            at += wait
            spans.append({"lane": "compute", "kind": phase, "unit": unit, "bytes": 0, "begin": at, "end": at + 1})
            at += 1
            if phase == "backward":
                reduce = {"lane": "reduce", "kind": "reduce_scatter", "unit": unit, "bytes": 1 << 20}
                spans.append({**reduce, "begin": at, "end": at + 0.1})
    units = [
        {"unit": unit, "parameters": 9, "dtype": "float32", "compute": "bfloat16", "placements": "Flat", "bytes": 36}
        | {"gathered": 72, "waste": 0.01}
        for unit in UNITS
    ]
    steps = [{"number": 7, "begin": 0.0, "end": at + 0.2}]
    run = {"rank": 0, "world": 2, "device": "an H100", "torch": "2", "memory": {"parameters": 1 << 20}}
    run |= {"tokens_per_step": 100 * (at + 0.2), "flops_per_step": 98.9e12 * (at + 0.2)}
    return {
        "title": "a run",
        "steps": steps,
        "spans": spans,
        "waits": waits,
        "memory": memory,
        "units": units,
        "run": run,
    }


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / "slow.json", tmp_path / "fast.json", tmp_path / "losses.jsonl"]
    paths[0].write_text(json.dumps(_recording()))
    paths[1].write_text(json.dumps(_recording(0.001)))
    lines = [{"step": step, "loss": 5.0 / step, "tokens_per_second": 100.0 + step} for step in range(1, 9)]
    paths[2].write_text("\n".join(map(json.dumps, lines)))
    return paths


def test_waits_are_told_with_what_to_try(files):
    slow, fast = Record.read(files[0], files[2]), Record.read(files[1])
    assert fast.exposed() == []
    rows = slow.exposed()
    assert len(rows) == len({row["advice"] for row in rows}) == 3, "one for each advice"
    assert sum(row["share"] for row in rows) == pytest.approx(8 * 0.4 / slow.step_seconds)
    advice = {(unit, what): row["advice"] for row in rows for unit in row["units"] for what in row["what"]}
    assert "smaller first unit" in advice["root", "all-gather in forward"]
    assert "reshard_after_forward=False" in advice[UNITS[-1], "all-gather in backward"]
    assert "launched too late" in advice["blocks.1", "all-gather in forward"]
    figures = {figure.name: str(figure) for figure in slow.figures()}
    assert figures == {
        "step": "11.40 s",
        "exposed: compute waits": "28.1%",
        "tokens/s per rank": "100",
        "MFU": "10.0%",
        "communicated per step": "12.58 MB",
        "peak memory": "3.15 MB",
        "last loss": "0.625",
    }
    assert differences([slow]) == []
    changes = {name: by for name, _, _, by in differences([slow, fast])}
    assert changes["step"] == f"{100 * (fast.step_seconds / slow.step_seconds - 1):+.1f}%"
    assert changes["exposed: compute waits"] == "-28.0 points"
    assert "srcdoc" in slow._repr_html_()
    assert html([slow]).count("</script>") == 2, "what a unit is called cannot end the script"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("nonsense", "is not a recording; make one with `flatshard rehearse"),
        ("{}", "is not a recording; make one with `flatshard rehearse"),
        ('{"steps": [], "spans": [{}], "waits": [], "memory": [], "units": []}', "is damaged, or not a recording"),
        (None, "No such file"),
    ],
)
def test_other_files_are_refused(tmp_path, content, expected, capsys):
    path = tmp_path / "record.json"
    if content is not None:
        path.write_text(content)
    assert main(["report", str(path)]) == 2
    assert expected in capsys.readouterr().err


def test_a_wrong_log_is_not_said_to_be_a_wrong_recording(tmp_path, capsys):
    record, log = tmp_path / "record.json", tmp_path / "losses.jsonl"
    record.write_text('{"steps": [], "spans": [], "waits": [], "memory": [], "units": []}')
    log.write_text("nonsense")
    assert main(["report", str(record), "--losses", str(log)]) == 2
    assert f"{log}: is not the log of a run" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.parametrize("width", [1366, 1920])
def test_the_page_works_in_a_browser(files, tmp_path, width):
    page = tmp_path / "page.html"
    assert main(["report", *map(str, files[:2]), "--losses", str(files[2]), "-o", str(page)]) == 0
    with Browser(tmp_path / "profile", width) as browser:
        browser.open(page)
        assert browser.errors == []
        assert browser.requests == [page.as_uri()], "it loads nothing"
        assert browser.evaluate("document.querySelectorAll('section').length") == 2
        lefts = browser.evaluate("[...document.querySelectorAll('section')].map(s => s.getBoundingClientRect().left)")
        assert (lefts[0] < lefts[1]) is (width == 1920), "side by side where there is room"
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        gathers = "document.querySelector('section svg.lanes').querySelectorAll('[data-kind=all_gather]').length"
        assert browser.evaluate(gathers) == 8
        assert browser.evaluate("document.querySelector('section svg.lanes').querySelectorAll('.wait').length") == 8
        assert browser.evaluate("document.querySelectorAll('section')[0].querySelectorAll('svg.curve').length") == 2
        assert browser.evaluate("document.querySelector('table.exposed tbody').rows.length") == 3
        assert browser.evaluate("document.querySelector('table.differences tbody').rows.length") == 6
        heads = browser.evaluate("[...document.querySelectorAll('h1')].map(h => h.textContent)")
        assert heads == ["A: slow.json and B: fast.json", "A: a run", "B: a run"]
        assert "step 7" in browser.evaluate("[...document.querySelectorAll('button')].map(b => b.textContent)")
        assert browser.evaluate("document.querySelector('svg.memory text.peak').textContent") == "peak 3.15 MB"
        wide = "Math.max(...[...document.querySelectorAll('table.layout')].map(t => t.offsetWidth)) < 900"
        assert browser.evaluate(wide), "a table is as wide as what is in it"
        colors = (
            "new Set([...document.querySelectorAll('section:first-child svg.lanes .bar')].map(b => b.classList[1]))"
        )
        keys = "document.querySelectorAll('section:first-child .controls')[0].querySelectorAll('.key').length"
        assert browser.evaluate(f"{colors}.size === {keys}"), "every colour has a legend"
        box = browser.evaluate(
            "(() => { const b = document.querySelector('[data-lane=compute][data-unit=\"blocks.1\"]')"
            ".getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2, b.width]; })()"
        )
        browser.mouse("mouseMoved", *box[:2])
        shown = "[document.getElementById('tip').style.display, document.getElementById('tip').textContent]"
        assert browser.evaluate(shown) == ["block", "forward blocks.1\n1.00 s"]
        browser.mouse("mouseWheel", *box[:2], deltaX=0, deltaY=-120)
        wider = (
            "new Promise(done => requestAnimationFrame(() => setTimeout(() => done(document.querySelector("
            "'[data-lane=compute][data-unit=\"blocks.1\"]').getBoundingClientRect().width), 50)))"
        )
        assert browser.evaluate(wider) == pytest.approx(1.25 * box[2], rel=0.02)
        browser.evaluate("[...document.querySelectorAll('button')].find(b => b.textContent === 'all').click()")
        assert browser.evaluate(wider) == pytest.approx(box[2], rel=0.02)
        colors = []
        for scheme in ("light", "dark"):
            browser.color_scheme(scheme)
            colors.append(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
            browser.screenshot(tmp_path / f"{scheme}.png")
        assert colors == ["rgb(255, 255, 255)", "rgb(20, 23, 28)"]
        assert browser.errors == []
