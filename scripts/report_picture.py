"""A picture of a step, for README and docs.

python -m scripts.report_picture record b step.json            a case of benchmarks.table, on this device
python -m scripts.report_picture draw step.json docs/report.png       of any recording; needs Chromium
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks.systems import get_system
from benchmarks.table import CASES, NETWORK
from flatshard._recording import recording
from flatshard.rehearsal import rehearse
from flatshard.tools.report import Record, html
from tests.tools.browser import Browser


def record(case: str, path: Path) -> None:
    """A few steps of a case as one rank of its world, with the modelled network of the benchmarks."""
    setup = CASES[case]
    tokens = setup.microbatches * setup.batch * setup.seq
    with recording() as recorded, rehearse(setup.world, NETWORK) as rehearsal:
        step = get_system("flatshard")(setup)
        for _ in range(8):
            step()
            rehearsal.mark_step(tokens, tokens * setup.model.flops_per_token(setup.seq))
        title = f"Case ({case}) of the benchmarks, rank 0 of {setup.world}"
        document = {"title": title, **recorded.to_dict(keep=1), "rehearsal": rehearsal.report().to_dict()}
    path.write_text(json.dumps(document))


def draw(path: Path, picture: Path) -> None:
    """What `flatshard report` shows of a recording, 1280 pixels wide, without the table of units at its end."""
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder, "profile"), 1280) as browser:
        page = Path(folder, "report.html")
        page.write_text(html([Record.read(path)]), encoding="utf-8")
        browser.open(page)
        browser.color_scheme("light")
        layout = "[...document.querySelectorAll('h2')].find(heading => heading.textContent === 'Layout')"
        browser.screenshot(picture, height=browser.evaluate(f"{layout}.getBoundingClientRect().top"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "draw"))
    parser.add_argument("source", help="a case, or a recording")
    parser.add_argument("target", type=Path, help="the recording, or the picture")
    options = parser.parse_args()
    if options.action == "record":
        record(options.source, options.target)
    else:
        draw(Path(options.source), options.target)


if __name__ == "__main__":
    main()
