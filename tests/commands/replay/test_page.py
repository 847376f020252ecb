"""The page of a replay in a real browser: what it shows, and that it needs nothing else."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ftckpt.commands.pictures.webpage import POLICY
from ftckpt.commands.replay.page import page
from ftckpt.replay.compare.verdict import Judgement, judge
from ftckpt.replay.record.log import written
from tests.replay.made import log

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
AT = 10
# Added to the page: what the browser made of it, as JSON in an element of its own.
PROBE = """
<script>
addEventListener("load", () => {
  const box = (one) => one && (({left, right, top, bottom}) => ({left, right, top, bottom}))(
    one.getBoundingClientRect());
  const first = document.querySelector("td.first");
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify({
    width: innerWidth, overflow: document.documentElement.scrollWidth - innerWidth,
    title: document.querySelector("h1").innerText, text: document.body.innerText,
    first: box(first), sign: first && first.innerText,
    row: first && first.parentElement.querySelector("th").innerText,
    columns: [...document.querySelectorAll("table.grid thead th")].filter(
      (one) => one.checkVisibility()).map((one) => one.innerText),
    loaded: performance.getEntriesByType("resource").length,
    ground: getComputedStyle(document.body).backgroundColor,
  });
  document.body.append(out);
});
</script>
"""


def shown(folder: Path, judgement: Judgement, *flags: str, width: int = 1200) -> dict[str, Any]:
    """Return what a browser makes of the page of a judgement."""
    file = folder / "page.html"
    text = page(judgement)
    assert POLICY in text  # which forbids the probe too
    file.write_text(text.replace(POLICY, "").replace("</html>", PROBE + "</html>"))
    done = subprocess.run(
        [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
         "--no-first-run", "--disable-background-networking", "--disable-component-update",
         "--disable-sync", "--disable-dev-shm-usage", "--enable-logging=stderr",
         f"--user-data-dir={folder / 'profile'}", f"--window-size={width},900", *flags,
         "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    text = done.stdout.partition('<pre id="probe">')[2].partition("</pre>")[0]
    for name, sign in (("&lt;", "<"), ("&gt;", ">"), ("&nbsp;", " "), ("&amp;", "&")):
        text = text.replace(name, sign)
    probe: dict[str, Any] = json.loads(text)
    assert probe["loaded"] == 0
    return probe


def judged(last: int, since: int, rank: int = 0, ranks: int = 1) -> Judgement:
    """Return the judgement of a restart whose weights and loss differ from a step on."""

    def change(step: int, of_rank: int, of: dict[str, dict[str, Any]]) -> None:
        if step >= since and of_rank == rank:
            of["params"] = {"w": "float32[2]:0"}
            of["loss"] = {"0": written((1 + 3 * 2**-23) / step, "float32")}

    u = [log(range(1, last + 1), name, ranks=ranks) for name in ("<U>", "U'")]
    a = [log(range(AT + 1, last + 1), name, ranks=ranks, change=change) for name in ("A", "B")]
    return judge(u, a, AT + 1, last)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_the_first_difference_of_a_long_run_is_seen_at_once(tmp_path: Path) -> None:
    probe = shown(tmp_path, judged(1010, since=500))
    assert probe["title"] == "State missing or wrongly restored"
    assert (probe["sign"], probe["row"]) == ("≠", "model weights")
    assert probe["columns"] == ["rank 0, step", "11\u2013499", "500", "501\u20131010"]
    assert 0 < probe["first"]["left"] < probe["first"]["right"] < probe["width"]
    assert 0 < probe["first"]["top"] < probe["first"]["bottom"] < 900
    assert "<U>" in probe["text"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_the_rank_that_differs_is_open_in_a_narrow_window(tmp_path: Path) -> None:
    probe = shown(tmp_path, judged(40, since=11, rank=1, ranks=2), width=500)
    assert probe["columns"][:3] == ["rank 1, step", "11", "12"]
    assert "rank 0: equal" in probe["text"]
    assert probe["overflow"] <= 0  # the grid scrolls, the page does not
    assert probe["first"]["right"] < probe["width"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_an_exact_restart_in_the_dark(tmp_path: Path) -> None:
    probe = shown(tmp_path, judged(30, since=99), "--blink-settings=preferredColorScheme=0")
    assert probe["title"] == "Exact"
    assert probe["first"] is None
    # The grid of the restart is open, the other two are folded.
    assert probe["columns"] == ["rank 0, step", *map(str, range(11, 31))]
    assert max(map(int, probe["ground"].strip("rgb()").split(","))) < 64


def test_steps_whose_tensors_were_not_read_are_put_together() -> None:
    def sparse(step: int, rank: int, of: dict[str, dict[str, Any]]) -> None:
        if step % 10:
            del of["params"], of["optimizer"], of["grad"]

    u, a = (log(range(1, 1001), name, change=sparse) for name in ("U", "A"))
    text = page(judge([u], [a], AT + 1, 1000))
    assert "11&ndash;1000" in text
    assert len(text) < 10_000


def test_everything_that_a_log_says_is_escaped() -> None:
    text = page(judged(12, since=11))
    assert "&lt;U&gt;" in text
    assert "<U>" not in text
    assert "<script" not in text
