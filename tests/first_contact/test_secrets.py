"""Credentials that a user typed, or keeps in the environment, are written and printed nowhere."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from ftckpt.errors import ExitCode, FtckptError, UsageError
from ftckpt.storage import open_store, secrets
from ftckpt.storage.secrets import complete, hidden, withheld
from tests.commands.saves import answer
from tests.first_contact.lines import printed

WORD, SIGNED = "SuperSecretPw", "X-Amz-Signature=abc/def%2B&e=1"


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("http://u:SuperSecretPw@h:9/a", "http://h:9/a"),
        ("https://SuperSecretPw@h/a", "https://h/a"),
        ("https://h/a/m.pt?X-Amz-Signature=SuperSecretPw", "https://h/a/m.pt"),
        ("sftp://bob:SuperSecretPw@h/a", "sftp://bob@h/a"),
        ("abfss://container@account.dfs.core.windows.net/x",
         "abfss://container@account.dfs.core.windows.net/x"),
        ("s3://bucket/a?b=c", "s3://bucket/a?b=c"),
        ("s3://bucket/team@x/y", "s3://bucket/team@x/y"),
        ("/local/http:/x?y@z", "/local/http:/x?y@z"),
    ],
)  # fmt: skip
def test_what_of_a_url_may_be_shown(
    typed: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "_users", {})
    monkeypatch.setattr(secrets, "_queries", {})
    assert hidden(f"cannot read '{typed}' now") == f"cannot read '{shown}' now"
    assert withheld(typed) == shown
    host = shown.partition("?")[0]
    assert complete(host) == (typed if "?" not in typed and typed != shown else host)


def test_s3_takes_no_credentials_from_its_url() -> None:
    with pytest.raises(UsageError) as caught:
        open_store("s3://AKIAEXAMPLE:SuperSecretPw@bucket/run")
    assert WORD not in str(caught.value)
    assert "AKIAEXAMPLE" not in str(caught.value)


class _Server(BaseHTTPRequestHandler):
    files: dict[str, bytes]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        pair = base64.b64encode(f"u:{WORD}".encode()).decode()
        if self.headers.get("Authorization") != f"Basic {pair}" and query != SIGNED:
            self.send_error(401)
            return
        if path not in self.files:
            self.send_error(404)
            return
        data = self.files[path]
        asked = self.headers.get("Range", "")
        first, _, last = asked.removeprefix("bytes=").partition("-")
        part = data[int(first or 0) : int(last) + 1 if last else None]
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header(
                "Content-Range", f"bytes {first}-{int(first) + len(part) - 1}/{len(data)}"
            )
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(part)

    def log_message(self, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Serve one checkpoint to who has the password or the signature; yield host and port."""
    pytest.importorskip("aiohttp")
    torch.manual_seed(0)
    weights = torch.randn(64, 64)
    torch.save({"model": {"w": weights}, "step": 4}, tmp_path / "step-4.pt")
    torch.save({"model": {"w": weights + 1e-3}, "step": 5}, tmp_path / "step-5.pt")
    handler = type(
        "Handler", (_Server,), {"files": {"/step-4.pt": (tmp_path / "step-4.pt").read_bytes()}}
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield f"127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


def test_a_delta_does_not_hold_the_password_of_its_base(server: str, tmp_path: Path) -> None:
    url = f"http://u:{WORD}@{server}/step-4.pt"
    done = printed(
        "delta", "pack", url, str(tmp_path / "step-5.pt"), str(tmp_path / "delta"), "--json"
    )
    assert json.loads(done.out)["result"]["code"] == 0, done.out
    written = b"".join(f.read_bytes() for f in (tmp_path / "delta").iterdir())
    assert f"http://{server}/step-4.pt".encode() in written
    for text in (written.decode("latin-1"), done.out, done.err):
        assert WORD not in text


def test_a_signed_url_is_read_by_its_signature(server: str) -> None:
    found = printed("inspect", f"http://{server}/step-4.pt?{SIGNED}", "--json")
    document = json.loads(found.out)
    assert document["result"]["code"] == 0
    assert document["format"] == "torchsave"
    assert "Signature" not in found.out + found.err


def test_an_error_does_not_quote_the_password(server: str) -> None:
    for words in (["--json"], ["--debug"], []):
        found = printed("verify", f"http://u:Wrong{WORD}@{server}/step-4.pt", *words)
        assert found.code == ExitCode.DENIED
        assert WORD not in found.out + found.err
    with pytest.raises(FtckptError) as caught:
        open_store(f"http://u:Wrong{WORD}@{server}/step-4.pt").read("")
    assert WORD not in str(caught.value)


@pytest.mark.parametrize("words", [(), ("status",), ("guard",), ("gc",), ("sync",), ("scrub",)])
def test_config_shows_no_webhook_and_no_command(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hook = f"http://u:{WORD}@hooks.example.com/x?token={WORD}"
    (tmp_path / "config.toml").write_text(
        f"[defaults]\nalert-url = '{hook}'\non-alert = \"curl -H 'Authorization: {WORD}'\"\n"
    )
    monkeypatch.setenv("FTCKPT_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://u:{WORD}@minio.example.com")
    said = printed("config", *words)
    assert said.code == 0
    assert WORD not in said.out + said.err
    assert "not shown" in said.out
    if words:
        assert "hooks.example.com" in said.out
    assert WORD not in json.dumps(answer("config", *words))
