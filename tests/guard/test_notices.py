"""Notices of preemption, from services on loopback that answer as the clouds document it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ftckpt.guard.notices import (
    Aws,
    Azure,
    Google,
    Notice,
    NoticeCommand,
    NoticeThread,
    sources,
    write_notice,
)


class Metadata:
    """The three services.

    Attributes:
        says: answers by path: a status and a text.
        asked: method and path of each request.
    """

    def __init__(self) -> None:
        self.says: dict[str, tuple[int, str]] = {}
        self.asked: list[str] = []
        self.token = "token-1"
        self.url = ""

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        self.asked.append(f"{method} {path}")
        if path == "/latest/api/token":
            if method != "PUT" or "X-aws-ec2-metadata-token-ttl-seconds" not in headers:
                return 400, ""
            return 200, self.token
        if path.startswith("/latest/"):
            if headers.get("X-aws-ec2-metadata-token") != self.token:
                return 401, ""
        elif path.startswith("/computeMetadata/"):
            if headers.get("Metadata-Flavor") != "Google":
                return 403, "Missing Metadata-Flavor:Google header."
        elif headers.get("Metadata") != "true":
            return 400, '{"error": "Bad request. Required metadata header not specified"}'
        return self.says.get(path, (404, "not found"))


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Metadata]:
    service = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            status, text = service.answer(self.command, self.path, self.headers)
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = _answer  # the names that http.server asks for

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    service.url = f"http://127.0.0.1:{server.server_port}"
    # A proxy of the environment must not be asked for a link-local address.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    yield service
    server.shutdown()
    thread.join()
    server.server_close()


def test_aws(cloud: Metadata) -> None:
    source = Aws(cloud.url)
    assert source.ask() is None
    assert cloud.asked == [
        "PUT /latest/api/token", "GET /latest/meta-data/spot/instance-action",
    ]  # fmt: skip
    cloud.token = "token-2"  # the first one has ended
    assert source.ask() is None
    when = (datetime.now(UTC) + timedelta(seconds=118)).strftime("%Y-%m-%dT%H:%M:%SZ")
    text = json.dumps({"action": "terminate", "time": when})
    cloud.says["/latest/meta-data/spot/instance-action"] = 200, text
    notice = source.ask()
    assert notice is not None
    assert notice.seconds is not None
    assert 110 < notice.seconds <= 118
    assert "terminate" in notice.detail
    cloud.says["/latest/meta-data/spot/instance-action"] = 500, ""
    with pytest.raises(ValueError, match="answers 500"):
        source.ask()


def test_google(cloud: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", cloud.url.removeprefix("http://"))
    place = "/computeMetadata/v1/instance"
    cloud.says |= {
        f"{place}/preempted": (200, "FALSE"),
        f"{place}/maintenance-event": (200, "NONE"),
    }
    source = Google()
    assert source.ask() is None
    cloud.says[f"{place}/maintenance-event"] = 200, "MIGRATE_ON_HOST_MAINTENANCE"
    assert source.ask() is None
    cloud.says[f"{place}/maintenance-event"] = 200, "TERMINATE_ON_HOST_MAINTENANCE"
    assert source.ask() == Notice("gcp", None, "maintenance event: TERMINATE_ON_HOST_MAINTENANCE")
    cloud.says[f"{place}/preempted"] = 200, "TRUE"
    assert source.ask() == Notice("gcp", 30.0, "instance preempted")


def test_azure(cloud: Metadata) -> None:
    source = Azure(cloud.url)
    name = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    events = "/metadata/scheduledevents?api-version=2020-07-01"
    cloud.says[name] = 200, "node7"
    cloud.says[events] = 200, json.dumps({"DocumentIncarnation": 1, "Events": []})
    assert source.ask() is None

    def event(kind: str, machine: str, before: str) -> str:
        one = {
            "EventId": "C7061BAC", "EventType": kind, "ResourceType": "VirtualMachine",
            "Resources": [machine], "EventStatus": "Scheduled", "NotBefore": before,
        }  # fmt: skip
        return json.dumps({"DocumentIncarnation": 2, "Events": [one]})

    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    for kind, machine in (("Freeze", "node7"), ("Preempt", "node8")):
        cloud.says[events] = 200, event(kind, machine, soon)
        assert source.ask() is None
    cloud.says[events] = 200, event("Preempt", "node7", soon)
    notice = source.ask()
    assert notice is not None
    assert notice.seconds is not None
    assert 20 < notice.seconds <= 30
    cloud.says[events] = 200, event("Terminate", "node7", "")
    assert source.ask() == Notice("azure", 0.0, "Terminate now")


def test_a_command(tmp_path: Path) -> None:
    source = NoticeCommand(f'[ -e "{tmp_path}/now" ] && echo 90 seconds')
    assert source.ask() is None
    (tmp_path / "now").touch()
    assert source.ask() == Notice("command", 90.0, "90 seconds")
    assert NoticeCommand("true").ask() == Notice("command", None, "true")


def test_a_service_that_does_not_answer_is_told_once_and_asked_again(cloud: Metadata) -> None:
    told: list[Notice] = []
    remarks: list[str] = []
    thread = NoticeThread(
        sources(["aws"], url="http://127.0.0.1:9"), told.append, remarks.append, every=0.01
    )
    thread.start()
    time.sleep(0.2)
    thread.stop()
    thread.join(60)
    assert told == []
    assert len(remarks) == 1
    assert remarks[0].startswith("no notices from aws")
    assert not thread.is_alive()
    thread = NoticeThread(sources(["true"]), told.append, remarks.append, every=0.01)
    thread.start()
    thread.join(60)
    assert told == [Notice("command", None, "true")]


def test_nonsense_ends_no_guard(cloud: Metadata) -> None:
    remarks: list[str] = []
    place = "/latest/meta-data/spot/instance-action"
    for text in ("", "[]", "{}", '{"action": 5, "time": "soon"}', "\0" * 100):
        cloud.says[place] = 200, text
        remarks.clear()
        thread = NoticeThread([Aws(cloud.url)], lambda _: None, remarks.append, every=30.0)
        thread.start()
        deadline = time.monotonic() + 60
        while not remarks and time.monotonic() < deadline:
            time.sleep(0.005)
        assert remarks, text
        thread.stop()
        thread.join(60)


def test_a_cloud_has_a_name_and_anything_else_is_a_command() -> None:
    assert [type(one).__name__ for one in sources(["aws", "true"])] == ["Aws", "NoticeCommand"]


def test_the_file_of_a_notice_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "notice.json"
    write_notice(str(path), Notice("aws", 60.0, "x"))
    told = json.loads(path.read_text())
    assert told["seconds"] == 60.0
    assert 0 < told["deadline"] - time.time() <= 60
    write_notice(str(tmp_path / "absent" / "x"), Notice("aws", None, "x"))  # says nothing
