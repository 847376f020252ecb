"""What `incidents` prints, writes and refuses."""

from __future__ import annotations

import gzip
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.commands.golden import check_golden, ftckpt
from tests.joblogs.test_grouping import FAILED, XID, steps
from tests.json_run import ftckpt_json
from tests.test_docs import validate

SECRET = "hf_abcdefgh"
LOST = "OSError: [Errno 28] No space left on device: 's3://bucket?X-Amz-Signature=" + SECRET + "'\n"
ATTACK = '<script>alert(1)</script>"\x1b[31m'
RECORDS = [
    {"event": "failure", "time": 1767225600 + 86400 * n, "class": "nic" if n % 3 else ATTACK,
     "component": "network", "node": f"n{n % 4}", "detect": 60, "restart": 400 + 20 * n}
    for n in range(1, 9)
]  # fmt: skip


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    """A job, a kernel, a scheduler, and records: of one run."""
    texts = {
        "job.log": steps(10, 140, 0) + FAILED + steps(110, 200, 2000) + LOST,
        "kern.log": XID,
        "sacct.txt": "JobID|JobName|State|Start|End|NodeList|ExitCode\n"
        "42|run7|FAILED|2026-01-01T00:00:00|2026-01-01T00:21:00|n[1-8]|1:0\n"
        "42|run7|FAILED|2026-01-01T00:30:00|2026-01-01T00:40:00|n[1-8]|1:0\n",
        "more.jsonl": "".join(json.dumps(one) + "\n" for one in RECORDS),
    }
    paths = []
    for name, text in texts.items():
        path = tmp_path / name
        path.write_text(text)
        os.utime(path, (1767312000, 1767312000))
        paths.append(path)
    return paths


def test_the_answer_is_as_kept(logs: list[Path]) -> None:
    done = ftckpt("incidents", *(path.name for path in logs), cwd=logs[0].parent)
    check_golden("incidents.txt", done, timed=False)
    assert SECRET not in done.stdout + done.stderr


class Page(HTMLParser):
    """What a browser would load, and the words."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.words = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


def test_the_page_needs_nothing_else_and_says_the_same(logs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "deep" / "page.html"
    document = ftckpt_json("incidents", *map(str, logs), "--html", str(page), "--run", ATTACK)
    validate(document)
    text = page.read_text()
    found = Page()
    found.feed(text)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in found.tags}
    assert not any(
        name.startswith(("on", "src", "href")) for _, attrs in found.tags for name in attrs
    )
    assert "url(" not in text
    assert "@import" not in text
    assert SECRET not in text
    assert "<script>alert(1)</script>" in found.words  # as words
    pictures = [attrs for tag, attrs in found.tags if attrs.get("role") == "img"]
    assert pictures
    assert all(attrs["aria-label"] for attrs in pictures)
    rows = re.findall(r"<tr role=row><th scope=row", text)
    assert len(rows) == sum(
        len(document[key]) for key in ("classes", "components", "nodes", "incidents")
    )
    for word in ("prefers-color-scheme: dark", "max-width: 44rem", "time (UTC)"):
        assert word in text


def test_the_metrics_say_what_is_known(logs: list[Path], tmp_path: Path) -> None:
    file = tmp_path / "run.prom"
    ftckpt_json("incidents", str(logs[3]), "--run", "run7", "--prometheus", str(file))
    text = file.read_text()
    assert 'ftckpt_incidents{run="run7",class="nic",component="network"} 6\n' in text
    assert 'ftckpt_incidents_by_node{run="run7",node="n1"} 2\n' in text
    assert 'ftckpt_incidents_recovery_seconds{run="run7",until="recorded",which="median"}' in text
    assert "ftckpt_incidents_step_seconds" not in text
    assert "ftckpt_incidents_rewound" not in text
    for line in text.splitlines():
        assert re.fullmatch(r'# .*|\w+\{(\w+="([^"\\\n]|\\.)*",?)*\} -?[\d.e+-]+', line), line


def test_the_trend_of_recoveries(logs: list[Path]) -> None:
    recovery = ftckpt_json("incidents", str(logs[3]))["recovery"]
    assert recovery["trend"]["per_day"] == pytest.approx(20)
    assert recovery["until"] == "recorded"


def test_what_is_cut_is_told_after_the_answer(logs: list[Path], tmp_path: Path) -> None:
    cut = tmp_path / "cut.gz"
    cut.write_bytes(gzip.compress(XID.encode() * 2 + os.urandom(4000))[:-200])
    document = ftckpt_json("incidents", str(cut))
    assert document["result"]["code"] == 14
    assert document["incidents"]
    validate(document)


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("", 2, "LOG"),
        ("more.jsonl --timezone Nowhere", 2, "no such zone"),
        ("more.jsonl --set together=0s", 2, "above zero"),
        ("more.jsonl --set together=soon", 2, "not a duration"),
        ("more.jsonl --html s3://b/x.html", 2, "on this machine"),
        ("sacct.txt --job other", 2, "no such job"),
        (".", 8, "is a directory"),
        ("absent.log", 9, "does not exist"),
        ("nothing.log", 9, "no line says anything that is known"),
        ("broken.jsonl", 2, "line 2 of broken.jsonl"),
    ],
)
def test_what_is_refused(logs: list[Path], line: str, code: int, said: str) -> None:
    (logs[0].parent / "nothing.log").write_text("hello\n")
    (logs[0].parent / "broken.jsonl").write_text('{"event": "start"}\nnot json\n')
    folder = os.getcwd()
    os.chdir(logs[0].parent)
    try:
        result = ftckpt_json("incidents", *line.split())["result"]
    finally:
        os.chdir(folder)
    assert (result["code"], said in result["message"]) == (code, True), result


def test_a_log_may_be_stdin(logs: list[Path]) -> None:
    import subprocess
    import sys

    with open(logs[3], "rb") as file:
        done = subprocess.run(
            [sys.executable, "-m", "ftckpt", "incidents", "-", "--json"], stdin=file,
            capture_output=True, check=True, timeout=60,
        )  # fmt: skip
    assert json.loads(done.stdout)["total"]["incidents"] == len(RECORDS)
