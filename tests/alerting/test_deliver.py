"""A hook that fails, hangs or lies is told, and holds nobody up."""

from __future__ import annotations

import json
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ftckpt.alerting import AlertHook, alert_document, deliver
from ftckpt.errors import UsageError
from tests.test_docs import validate

DOCUMENT = alert_document(
    event="raised", verb="status", target="/ckpt/run7", time=1.0, kind="stale", message="it is old"
)


def test_the_document_fits_its_schema() -> None:
    validate(DOCUMENT)
    validate(DOCUMENT | {"event": "cleared", "about": ["step-1"]})


def test_a_command_gets_it_on_its_input(tmp_path: Path) -> None:
    said = tmp_path / "said"
    command = f'cat > {said}; echo "$FTCKPT_ALERT_KIND $FTCKPT_ALERT $FTCKPT_ALERT_EVENT" >> {said}'
    assert deliver(AlertHook(command), DOCUMENT) == []
    first, second = said.read_text().splitlines()
    assert json.loads(first) == DOCUMENT
    assert second == "stale it is old raised"


def test_a_long_message_is_cut_in_the_variable_alone(tmp_path: Path) -> None:
    said = tmp_path / "said"
    long = DOCUMENT | {"message": "\0" + "é" * 500_000}
    command = f'cat > {said}; printf %s "$FTCKPT_ALERT" > {said}2'
    assert deliver(AlertHook(command), long) == []
    assert json.loads(said.read_text()) == long
    assert len((tmp_path / "said2").read_text()) < 2_000


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("exit 3", "--on-alert ended with 3"),
        ("no-such-command-here 2>/dev/null", "--on-alert ended with 127"),
        ("sleep 60", "--on-alert did not end within 0.3 s, and was ended"),
        ("trap '' TERM; sleep 60 & sleep 60", "--on-alert did not end within 0.3 s"),
        ("exec <&-; exit 0", ""),  # it reads nothing of a document that fills the pipe
    ],
)
def test_a_command_that_fails_or_hangs_is_told(command: str, said: str) -> None:
    began = time.monotonic()
    long = DOCUMENT | {"message": "x" * 50_000}
    (problem,) = deliver(AlertHook(command), long, command_s=0.3) or [""]
    assert problem.startswith(said)
    assert bool(problem) == bool(said)
    assert time.monotonic() - began < 40


class Answers(BaseHTTPRequestHandler):
    """Answers as its path says."""

    got: ClassVar[list[tuple[str, bytes]]] = []
    who: ClassVar[list[str | None]] = []

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        Answers.got.append((self.path, data))
        Answers.who.append(self.headers["Authorization"])
        code = int(self.path.strip("/").split("-")[0])
        if code == 0:  # it answers byte by byte, and never ends
            for _ in range(200):
                self.wfile.write(b"H")
                time.sleep(0.05)
            return
        self.send_response(code)
        if 300 <= code < 400:
            self.send_header("Location", "/200-elsewhere")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Answers.got, Answers.who = [], []
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as running:
        running.daemon_threads = True
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def test_a_webhook_gets_it(server: str) -> None:
    assert deliver(AlertHook(url=f"{server}/200"), DOCUMENT) == []
    ((path, data),) = Answers.got
    assert path == "/200"
    assert json.loads(data) == DOCUMENT


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/500", "--alert-url answers 500"),
        ("/302", "--alert-url answers 302: redirects are not followed"),
        ("/307", "--alert-url answers 307: redirects are not followed"),
        ("/0", "--alert-url "),
    ],
)
def test_a_webhook_that_fails_is_told(server: str, path: str, said: str) -> None:
    seconds = 0.5 if path == "/0" else 20.0  # an answer takes as long as the machine is busy
    began = time.monotonic()
    (problem,) = deliver(AlertHook(url=server + path), DOCUMENT, webhook_s=seconds)
    assert problem.startswith(said)
    assert len(Answers.got) == 1
    assert time.monotonic() - began < 10 + seconds


def test_nobody_there_and_a_certificate_that_nobody_vouches_for(server: str) -> None:
    (problem,) = deliver(AlertHook(url="http://127.0.0.1:9/x"), DOCUMENT)
    assert "refused" in problem
    (problem,) = deliver(AlertHook(url=server.replace("http", "https")), DOCUMENT, webhook_s=5)
    assert "--alert-url failed" in problem
    assert not Answers.got


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "ftp://host/x", "https://", "hooks.example.com/x", "http://[::1",
        "http://host:secret/x", "http://me:secret@host:port/x", "http://host/a secret",
        "https://host/secret\n",
    ],
)  # fmt: skip
def test_what_is_no_webhook_is_refused_without_its_words(url: str) -> None:
    with pytest.raises(UsageError) as refused:
        AlertHook(url=url).require()
    assert url not in refused.value.message
    assert "secret" not in str(refused.value) + refused.value.hint


def test_a_password_in_the_url_is_sent_and_not_told(server: str) -> None:
    url = server.replace("http://", "http://me:s%3Acr@et@")
    AlertHook(url=url).require()
    assert deliver(AlertHook(url=f"{url}/200"), DOCUMENT) == []
    assert Answers.who == ["Basic " + b64encode(b"me:s:cr@et").decode()]
    for wrong in ("http://me:s3cret@host:port/x", "http://host/s3cret here", "s3cret"):
        (problem,) = deliver(AlertHook(url=wrong), DOCUMENT)
        assert problem.startswith("--alert-url failed")
        assert "s3cret" not in problem


def test_a_redirect_with_a_password_is_not_followed(server: str) -> None:
    (problem,) = deliver(AlertHook(url=server.replace("//", "//me:s3cret@") + "/302"), DOCUMENT)
    assert "not followed" in problem
    assert len(Answers.got) == 1
