"""A sixth attack: two writers on one bucket, secrets, planted records, odd names in pictures."""

from __future__ import annotations

import csv
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ftckpt.amounts import size
from ftckpt.commands.cli.environment import said_again
from ftckpt.commands.gc.text import command_to_apply
from ftckpt.commands.pictures.drawing import csv_text
from ftckpt.discovery import resolve as opening
from ftckpt.errors import ExitCode, RefusedError, UsageError
from ftckpt.manifest.locate import thinned_from
from ftckpt.parts import finish
from ftckpt.retention.apply.purge import undelete
from ftckpt.retention.locks.hold import hold as holding
from ftckpt.retention.locks.remote import RemoteLock
from ftckpt.retention.records import log
from ftckpt.retention.trash import local as local_trash
from ftckpt.retention.trash import remote as remote_trash
from ftckpt.storage import StoreOptions, secrets
from ftckpt.storage.memory import MemoryStore
from ftckpt.storage.secrets import hidden, withheld
from tests.builders.checkpoints import save_dcp
from tests.builders.small_format import Small
from tests.first_contact.lines import Printed, printed
from tests.retention import remote_roots
from tests.retention.remote_roots import TimedStore, place_of, saves
from tests.retention.trash.test_remote import applied, purged

KEEP = ("--keep-last", "1", "--apply", "--min-survivors", "1", "--no-check")
FIRST, SECOND = "hunTER2secretAAAA", "tailOFsecretBBBB"


def _files(path: Path, step: int) -> Path:
    return save_dcp(path / f"step-{step}", step=step)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three saves of DCP."""
    root = tmp_path_factory.mktemp("three")
    for step in (1, 2, 3):
        _files(root, step)
    return root


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, three: Path, tmp_path: Path) -> str:
    """A root of these saves, on disk or in an object store."""
    if request.param == "local":
        import shutil

        shutil.copytree(three, tmp_path / "root")
        return str(tmp_path / "root")
    url = f"memory://sixth-{os.urandom(6).hex()}"
    store = MemoryStore(url)
    for path in sorted(p for p in three.rglob("*") if p.is_file()):
        store.put(str(path.relative_to(three)), path.read_bytes())
    return url


@pytest.fixture
def bucket(root: str) -> str:
    if "://" not in root:
        pytest.skip("a local drop is one rename")
    return root


def once(work: Callable[[], object]) -> Callable[[], None]:
    """Return what does some work the first time that it is called, in a thread of its own."""
    done: list[bool] = []

    def call() -> None:
        if not done:
            done.append(True)
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()

    return call


def test_gc_looks_for_deltas_after_it_has_dropped_their_base(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delta that appears between its last look and the drop has its base back."""
    from ftckpt import delta_pack

    pack = once(lambda: delta_pack(f"{root}/step-1", f"{root}/step-3", f"{root}/step-4"))
    for trash in (local_trash.LocalTrash, remote_trash.RemoteTrash):
        drop = trash.discard

        def discard(self: object, *given: object, _drop: object = drop, **more: object) -> object:
            pack()
            return _drop(self, *given, **more)  # type: ignore[operator]

        monkeypatch.setattr(trash, "discard", discard)
    done = printed("gc", root, *KEEP, "--purge-now", "--yes")
    assert done.code in (ExitCode.PARTIAL, ExitCode.REFUSED), done.err
    assert printed("verify", f"{root}/step-4", "--level", "content").code == 0
    assert printed("verify", f"{root}/step-1").code == 0


def test_a_delta_whose_base_went_while_it_was_shown_is_not_ok(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = thinned_from
    gc = once(lambda: _gc(root))

    def dropped_now(source: object) -> object:
        gc()
        return real(source)  # type: ignore[arg-type]

    monkeypatch.setattr("ftckpt.delta.pack.run.thinned_from", dropped_now)
    done = printed("delta", "pack", f"{root}/step-1", f"{root}/step-3", f"{root}/step-4")
    assert done.code == ExitCode.NOT_FOUND, done.err
    assert "what it is packed against has gone" in done.err
    assert printed("gc", "undelete", root, "step-1").code == 0
    assert printed("verify", f"{root}/step-4").code == 0


def _gc(root: str) -> None:
    import ftckpt

    ftckpt.gc(root, keep_last=1, min_survivors=1, no_check=True, apply=True)


def test_what_was_dropped_from_a_bucket_is_not_called_damaged(bucket: str) -> None:
    """Its drop takes the commit marker away, and the manifest says that the marker is missing."""
    for step in (1, 3):
        assert printed("seal", f"{bucket}/step-{step}").code == 0
    assert printed("gc", bucket, *KEEP).code == 0
    for words in (["verify"], ["inspect"], ["diff", f"{bucket}/step-3"]):
        done = printed(*words, f"{bucket}/step-1")
        assert done.code == ExitCode.NOT_FOUND, done.err
        assert "was dropped" in done.err
        assert "gc undelete" in done.err
    assert printed("gc", "undelete", bucket, "step-1").code == 0
    assert printed("verify", f"{bucket}/step-1").code == 0
    MemoryStore(bucket).delete(["step-1/.metadata"])  # nobody's drop
    assert printed("verify", f"{bucket}/step-1").code == ExitCode.CORRUPT


def test_what_was_purged_meanwhile_is_not_said_to_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    store = TimedStore()
    saves(store, range(1, 6))
    applied(store)
    store.now += 2 * remote_roots.DAY
    real = holding

    def hold(*given: object) -> object:
        monkeypatch.setattr("ftckpt.retention.apply.purge.hold", real)
        purged(store)
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr("ftckpt.retention.apply.purge.hold", hold)
    done = undelete(place_of(store), [Small()], ["step-1"], actor="bob", now=lambda: store.now)
    assert done.code == ExitCode.NOT_FOUND
    assert done.restored == ()


def test_a_lease_of_any_number_excludes_others() -> None:
    """The next number after one that somebody planted is seen, however long it is."""
    store = TimedStore()
    saves(store, range(1, 4))
    planted = json.dumps({"schema": "ftckpt.lock/1", "holder": "x", "token": "x", "seconds": 1})
    store.put(f".ftckpt/lock/{10**18 - 1}.json", planted.encode())
    store.now += 60
    root = opening.open_root(place_of(store), [Small()])
    mine = RemoteLock(root, "alice")
    mine.acquire()
    with pytest.raises(RefusedError):
        RemoteLock(root, "bob").acquire()
    mine.check()
    mine.release()


@pytest.mark.parametrize("more", [SECOND, ""])
@pytest.mark.parametrize("sign", ["/", "?", "#"])
@pytest.mark.parametrize("scheme", ["s3", "s3a", "http", "gs", "abfss", "S3", "simplecache::s3"])
def test_a_key_with_a_slash_is_refused_and_not_printed(scheme: str, sign: str, more: str) -> None:
    """Half of all keys of AWS hold one, and the URL then has no user by the letter."""
    url = f"{scheme}://AKIAEXAMPLE:{FIRST}{sign}{more}@bucket/run"
    with pytest.raises(UsageError) as caught:
        withheld(url)
    done = printed("inspect", url, "--debug")
    assert done.code == ExitCode.USAGE
    for text in (str(caught.value), caught.value.hint, done.out, done.err):
        assert FIRST not in text
        assert not more or more not in text


@pytest.mark.parametrize(
    "url",
    [
        f"s3:/AKIAEXAMPLE:{FIRST}@bucket/run",
        f"s3:AKIAEXAMPLE:{FIRST}@bucket/run",
        f"zip://a::http://u:{FIRST}@127.0.0.1/x.zip",
        f"az://container/x?sv=2020&sig={FIRST}",
        f"gs://bucket/x?X-Goog-Signature={FIRST}",
        f"s3://bucket/x?AWSAccessKeyId=A&Signature={FIRST}",
    ],
)
def test_a_secret_that_no_store_takes_is_refused_and_not_printed(url: str) -> None:
    for words in (["inspect", url], ["status", "x", f"--tier={url}"], ["inspect", url, "--json"]):
        done = printed(*words)
        assert done.code == ExitCode.USAGE, done.err
        assert FIRST not in done.out + done.err


@pytest.mark.parametrize("sign", ["'", '"', " ", "\\"])
def test_a_password_with_a_quote_is_hidden(sign: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_users", {})
    url = f"http://u:{FIRST}{sign}{SECOND}@127.0.0.1:9/x"
    assert withheld(url) == "http://127.0.0.1:9/x"
    assert hidden(f"cannot reach {url}: no") == "cannot reach http://127.0.0.1:9/x: no"


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/run@latest", "s3://bucket/a?b=c", "file:///run:7@latest", "/x/run:7@3",
        "cold:run7@latest", "http://host:80/x@3", "hdfs://host:8020/a@b", "hf://user/repo@main",
        "http://[::1]:80/x@1", "step:5@x", "abfss://container@account/x",
    ],
)  # fmt: skip
def test_other_words_with_these_letters_are_as_they_were(url: str) -> None:
    assert withheld(url) == url


def test_no_line_to_type_again_has_a_webhook() -> None:
    words = [
        "gc",
        "/r",
        "--alert-url",
        "https://h/SECRET",
        "--on-alert=curl SECRET",
        "--json",
        "-q",
    ]
    assert command_to_apply(words) == "ftckpt gc /r --apply"
    more = ["guard", "r", "--on-alert", "--alert-url", "--", "a", "--on-alert", "b"]
    assert said_again(more) == ["guard", "r", "--", "a", "--on-alert", "b"]


def test_the_end_of_an_endless_log_is_read(three: Path, tmp_path: Path) -> None:
    place = tmp_path / "root" / "step-1"
    place.mkdir(parents=True)
    for file in (three / "step-1").iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    own = place.parent / ".ftckpt"
    own.mkdir()
    with open(own / "log.jsonl", "wb") as out:
        out.truncate(1 << 40)  # a terabyte that takes no space
        out.seek(0, os.SEEK_END)
        out.write(b'\n{"time": 5, "event": "applied"}\n')
    found = opening.open_root(opening.locate(str(place.parent), StoreOptions()), [Small()])
    assert log.read(found) == [{"time": 5, "event": "applied"}]


@pytest.mark.parametrize(
    ("field", "value"),
    [("bytes", None), ("bytes", "x"), ("seconds", 1e308), ("seconds", []), ("host", {})],
)  # fmt: skip
def test_a_record_of_another_shape_does_not_end_status(
    field: str, value: object, three: Path, tmp_path: Path
) -> None:
    parts = str(tmp_path)
    for number in (0, 1):
        part = ("--part", f"{number}/3", "--parts", parts)
        assert printed("verify", str(three / "step-1"), *part).code == 0
    one = next(tmp_path.rglob("0-3.json"))
    head, lines = one.read_text().split("\n"), []
    for line in head:
        name = line.partition(":")[0].strip(' "')
        if name != field:
            lines.append(line)
        elif value is not None:
            lines.append(f'"{name}": {json.dumps(value)},')
    one.write_text("\n".join(lines))
    assert finish.watch(parts, StoreOptions())[0].of == 3
    assert printed("status", str(three), "--parts", parts).code != ExitCode.INTERNAL


@pytest.fixture
def odd(tmp_path: Path) -> str:
    """A root whose own name, and whose saves' names, are no text."""
    root = tmp_path / os.fsdecode(b"run\xff\x1b[2J")
    for step in (1, 2, 3):
        place = root / os.fsdecode(b"=\xfecmd-step-%d" % step)
        place.mkdir(parents=True)
        torch.save({"w": torch.ones(3) * step, "step": step}, place / "model.pt")
    return str(root)


@pytest.mark.parametrize("kind", ["png", "svg", "html"])
def test_a_name_that_is_no_text_is_drawn(kind: str, odd: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / f"picture.{kind}"
    done = printed("status", odd, "--plot", str(picture))
    assert done.code != ExitCode.INTERNAL, done.err
    assert b"\x1b[2J" not in picture.read_bytes()
    numbers = (tmp_path / "picture.csv").read_text()
    assert "\x1b" not in numbers
    assert "\\xfecmd" in numbers


def test_a_name_is_no_formula_of_a_spreadsheet() -> None:
    text = csv_text(
        {"name": ["=cmd|' /c calc'!A1", "-x", "a\x1bb", "\udcff"], "n": [-1, 2.5, None, 0]}
    )
    rows = list(csv.reader(text.splitlines()))
    assert [row[0] for row in rows[1:]] == ["'=cmd|' /c calc'!A1", "'-x", "a\\x1bb", "\\xff"]
    assert [row[1] for row in rows[1:]] == ["-1", "2.5", "", "0"]


@pytest.mark.parametrize(
    "words",
    [
        ("gc", "{root}", "--keep-last", "9" * 30),
        ("gc", "{root}", "--thin-after", "1" * 5000),
        ("verify", "{root}/step-1", "--max-memory", "9" * 400),
        ("cat", "{root}/step-1", "model.layers.0.weight", "--slice", "1" * 5000),
        ("reshard", "{root}/step-1", "{root}/out", "--dp", str(1 << 64)),
        (
            "plan",
            "--gpus",
            "8",
            "--gpu-mtbf",
            "9h",
            "--save",
            "1s",
            "--set",
            ("weights-between=") + "9" * 400,
        ),
    ],
    ids=lambda words: f"{words[0]} {words[-2]}",
)
def test_a_number_beyond_any_use_is_a_slip(words: tuple[str, ...], three: Path) -> None:
    done: Printed = printed(*(word.replace("{root}", str(three)) for word in words))
    assert done.code == ExitCode.USAGE, done.err


def test_a_size_that_a_float_cannot_hold() -> None:
    with pytest.raises(UsageError):
        size("1" * 400)
    assert size("8EiB".replace("E", "P")) == 8 << 50
