"""A second attack: links that deletion followed, names without end, text that was quoted."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ftckpt.discovery import ledger as ledgers
from ftckpt.discovery import series
from ftckpt.errors import UnsafeError
from ftckpt.formats.huggingface.declared_folders import MODULES, PIPELINE, declared_folders
from ftckpt.formats.torchsave import _PICKLED
from ftckpt.guard.supervise import last_lines
from ftckpt.storage import StoreOptions, open_store
from tests.builders.checkpoints import save_dcp
from tests.first_contact.lines import printed
from tests.first_contact.test_hub_cache import cached
from tests.json_run import ftckpt_json


@contextmanager
def ends_within(seconds: int) -> Iterator[None]:
    """Fail where a pattern goes on for ever; what is right takes a thousandth of this."""

    def stop(*_: object) -> None:
        raise AssertionError("it does not end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def victim(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    return folder


def test_a_full_ledger_forgets_nothing_behind_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    save_dcp(root / "step-1", step=1)
    verdicts = root / ".ftckpt" / "verdicts"
    (verdicts / "step-0").mkdir(parents=True)
    (verdicts / "step-0" / "content.u1.json").write_text("{}")
    home = victim(tmp_path)
    (verdicts / "zz").symlink_to(home)
    (verdicts / "note").write_text("no folder")
    monkeypatch.setattr(ledgers, "_MOST", 1)
    assert printed("verify", str(root / "step-1"), "--level", "content", "--remember").code == 0
    assert [p.name for p in home.iterdir()] == ["thesis.tex"]
    assert sorted(p.name for p in verdicts.iterdir()) == ["note", "step-1", "zz"]


@pytest.mark.parametrize("link", [".ftckpt", ".ftckpt/parts", ".ftckpt/guard/job"])
def test_nothing_is_deleted_behind_a_link_in_place_of_our_folder(tmp_path: Path, link: str) -> None:
    home, root = victim(tmp_path), tmp_path / "run"
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(home)
    store = open_store(str(root), StoreOptions())
    key = f"{link}/thesis.tex"
    assert isinstance(store.delete([key])[key], UnsafeError)
    assert (home / "thesis.tex").read_text() == "precious"
    if "/" in link:
        assert store.delete([link])[link] is None  # the link itself goes
        assert not (root / link).is_symlink()


def test_a_stranger_cannot_hide_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forged verdict that claims a deeper level won against every check of the content."""
    for step in (1, 2):
        save_dcp(tmp_path / f"step-{step}", step=step)
    assert printed("verify", str(tmp_path / "step-2"), "--remember").code == 0
    own = next((tmp_path / ".ftckpt" / "verdicts" / "step-2").iterdir())
    forged = own.with_name("values.u777.json")
    said = json.loads(own.read_text())
    forged.write_text(json.dumps(said | {"level": "values", "code": 4, "checked": time.time()}))
    believed = ledgers.Ledger._is_believed
    monkeypatch.setattr(
        ledgers.Ledger,
        "_is_believed",
        lambda self, path: "u777" not in path and believed(self, path),
    )

    def latest_step(*flags: str) -> object:
        return json.loads(printed("latest", str(tmp_path), "--json", *flags).out)["step"]

    assert latest_step() == 2
    assert latest_step("--level", "content") == 2
    own_bad = own.with_name(own.name.replace("structure", "values").replace("content", "values"))
    own_bad.write_text(forged.read_text())  # one's own stands until a check as deep
    assert latest_step("--level", "content") == 1


def test_a_long_number_in_a_name_does_not_hold_latest_up(tmp_path: Path) -> None:
    """One planted name was enough: 200 digits are numbers side by side in 2^199 ways."""
    with ends_within(20):
        for name in (f"epoch_{'9' * 200}.pt", f"step{'1_' * 100}.pt", f"rank{'7' * 200}.pkl!"):
            assert re.fullmatch(_PICKLED, name) is None
    for name in ("step_100.pkl", "state-1-2=3.pickle", "my_ckpt12.pkl", "7.pkl", "latest.pkl"):
        assert re.fullmatch(_PICKLED, name), name
    save_dcp(tmp_path / "step-1", step=1)
    (tmp_path / f"epoch_{'9' * 200}.pt").touch()
    with ends_within(60):
        answer = ftckpt_json("latest", str(tmp_path))
    assert (answer["result"]["code"], answer["path"]) == (0, f"{tmp_path}/step-1")


def test_thousands_of_series_are_compared_in_one_pass() -> None:
    words = sorted({"model", "net", "optim", "ema", "unet", "lora", "opt", "gen", "disc", "state"})
    names = ["-".join(words[int(d)] for d in str(n)) + f"-{n + 1}.pt" for n in range(30_000)]
    with ends_within(60):
        assert series.members(dict.fromkeys(names)) == {}
        pair = series.members(dict.fromkeys([*names, "G_7.pth"]))
    assert set(pair) == {"G_7.pth", names[6]}


def test_a_link_in_a_hub_cache_is_neither_read_nor_quoted(tmp_path: Path) -> None:
    model = cached(tmp_path)
    secret = tmp_path / "token"
    secret.write_text("hf_secret")
    (model / "refs" / "main").unlink()
    (model / "refs" / "main").symlink_to(secret)
    answer = printed("verify", str(model))
    assert answer.code == 7
    assert "hf_secret" not in answer.out + answer.err
    (model / "refs" / "main").unlink()
    (model / "refs").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "main").write_text("hf_secret")
    (model / "refs").symlink_to(tmp_path / "elsewhere")
    answer = printed("verify", str(model))
    assert answer.code == 7
    assert "hf_secret" not in answer.out + answer.err


@pytest.mark.parametrize("named", [True, False])
def test_a_snapshot_that_is_a_link_is_not_entered(named: bool, tmp_path: Path) -> None:
    model = cached(tmp_path, main=named)
    snapshot = next((model / "snapshots").iterdir())
    os.rename(snapshot, tmp_path / "moved")
    snapshot.symlink_to(tmp_path / "moved")
    answer = printed("verify", str(model))
    assert (answer.code, "is a link" in answer.err) == (7, True)


@pytest.mark.parametrize("file", [MODULES, PIPELINE])
def test_a_padded_list_of_folders_is_refused(file: str) -> None:
    """Whatever stood behind the first 64 KiB was passed over, and verify said ok without it."""
    text = (
        b" " * (64 << 10) + b'[{"path": "2_Dense", "type": "sentence_transformers.models.Dense"}]'
    )
    with pytest.raises(UnsafeError, match="is longer than"):
        declared_folders([file], lambda _, most: text[:most])


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("PUT https://u:hunter2@host/x?X-Amz-Signature=beef failed", "PUT https://host/x failed"),
        ("WANDB_API_KEY=0123456789 is not valid", "WANDB_API_KEY=*** is not valid"),
        (
            "{'aws_secret_access_key': 'hunter2', 'n': 3}",
            "{'aws_secret_access_key': '***', 'n': 3}",
        ),
        ("login with hf_abcdefghijklmnop failed", "login with *** failed"),
        ("x" * 280 + " https://user:" + "p" * 40 + "@host/", "x" * 280 + " https://host/"),
        ("RuntimeError: 3 tokens of the tokenizer, key 'w'", None),
        ("KeyError: 'model.layers.0.weight'", None),
    ],
)
def test_an_alert_carries_no_secret_of_the_command(line: str, shown: str | None) -> None:
    """The last lines of a command's stderr go to a webhook, which other people read."""
    assert last_lines(f"first\n{line}\n") == f"first | {line if shown is None else shown}"


def test_a_long_last_line_is_searched_once() -> None:
    with ends_within(10):
        for line in ("a" * 16_000 + "://", "secret" * 2700, "bearer " * 2300, "https://" * 2000):
            assert len(last_lines(line)) <= 300
