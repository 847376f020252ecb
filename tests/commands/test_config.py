"""The file of settings: what it sets, who goes before it, and what may not stand in it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from ftckpt.commands.cli.verbs import VERBS, load
from ftckpt.commands.config.defaults import _DEFAULTS
from ftckpt.storage.settings import SettingsFile
from tests.commands.golden import RUN
from tests.commands.saves import answer
from tests.test_docs import validate

STEP = str(RUN / "step-1")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "config.toml"
    monkeypatch.setenv("FTCKPT_CONFIG", str(file))
    return file


def options(*words: str) -> dict[str, tuple[Any, str]]:
    document = answer("config", *words)
    validate(document)
    assert document["result"]["code"] == 0, document["result"]
    return {one["option"]: (one["value"], one["from"]) for one in document["options"]}


def test_who_goes_before_whom(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text(
        '[defaults]\njobs = 3\nlimit-rate = "1GiB/s"\n\n[defaults.verify]\njobs = 2\n'
        '[defaults."delta pack"]\nmax-memory = "2GiB"\n'
    )
    found = options("verify")
    assert found["--jobs"] == (2, f"{config}, line 6")
    assert found["--limit-rate"] == ("1GiB/s", f"{config}, line 3")
    assert found["--level"] == ("auto", "default")
    assert options("copy")["--jobs"] == (3, f"{config}, line 2")
    assert options("delta", "pack")["--max-memory"] == ("2GiB", f"{config}, line 8")
    assert options("verify", STEP, "--jobs", "6")["--jobs"] == (6, "command line")
    monkeypatch.setenv("FTCKPT_RETRY_SECONDS", "5")
    assert options("verify")["--retry-seconds"] == (5, "FTCKPT_RETRY_SECONDS")
    monkeypatch.delenv("FTCKPT_RETRY_SECONDS")
    # And so the verb itself has it.
    document = answer("verify", STEP)
    assert document["result"]["code"] == 0
    assert document["settings"] == {"jobs": 2, "limit_rate": "1GiB/s"}
    validate(document)
    assert answer("verify", STEP, "--jobs", "1")["settings"] == {"limit_rate": "1GiB/s"}
    assert "settings" not in answer("ls", str(RUN))
    assert answer("config", "nothing")["result"]["code"] == 2
    assert answer("config", "verify", "--nosuch")["result"]["code"] == 2


def test_what_is_shown(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config.write_text(
        '[remotes.cold]\nurl = "/far"\n[defaults]\njobs = 1\n[policies]\n"/ckpt" = "/r.toml"\n'
    )
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-one")
    monkeypatch.setenv("AWS_REGION", "eu-1")
    document = answer("config")
    validate(document)
    assert document["file"] == str(config)
    assert document["defaults"] == [{"verb": "", "option": "jobs", "value": 1, "line": 4}]
    assert document["remotes"] == {"cold": {"url": "/far"}}
    where = f"{config}, line 6"
    assert document["policies"] == [{"root": "/ckpt", "file": "/r.toml", "where": where}]
    assert document["environment_variables"]["AWS_REGION"] == "eu-1"
    assert "hidden-one" not in str(document)
    monkeypatch.delenv("FTCKPT_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(config.parent / "none"))
    assert answer("config")["file"] is None


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("[defaults]\n\nyes = true", 3, "'yes' has no default to set"),
        ("[defaults.gc]\nmin-survivors = 0", 2, "'min-survivors' has no default"),
        ("[defaults.gc]\nmin_survivors = 0", 2, "'min_survivors' has no default"),
        ("[defaults.gc]\npolicy = '/x'", 2, "'policy' has no default"),
        ("[defaults]\nno-proof = true", 2, "'no-proof' has no default"),
        ("[defaults]\nlevel = 'structure'", 2, "'level' has no default to set"),
        ("[defaults.verify]\nrequire = 'content'", 2, "'require' has no default to set"),
        ("[defaults]\ndefaults = 1\n", 2, "'defaults' has no default"),
        ("[defaults]\njobs = '4'", 2, "jobs must be a whole number"),
        ("[defaults]\njobs = true", 2, "jobs must be a whole number"),
        ("[defaults]\njobs = -1", 2, "jobs: it is below 0"),
        ("[defaults]\nlimit-rate = '200'", 2, "limit-rate: '200': a rate needs its unit"),
        ("[defaults]\nmax-memory = 'lots'", 2, "max-memory: 'lots' is not a size"),
        ("[defaults]\nretry-seconds = nan", 2, "retry-seconds: it is below 0"),
        ("[defaults]\nprogress = 'silent'", 2, "progress: it is one of auto, json"),
        ("[defaults.nothing]\njobs = 1", 1, "no verb is called 'nothing'"),
        ("[policies]\n'/ckpt' = 'relative.toml'", 2, "a policy is written as"),
        ("[policies]\n'/ckpt' = 3", 2, "a policy is written as"),
        ("[remotes.a]\nurl = '/x'\nprofil = 'p'", 3, "has no setting 'profil'"),
        ("\n[more]\na = 1", 2, "there are no settings 'more'"),
        ("apply = true", 1, "there are no settings 'apply'"),
    ],
)
def test_what_may_not_stand_there(config: Path, text: str, line: int, says: str) -> None:
    config.write_text(text)
    for words in (("config",), ("verify", STEP)):
        if says.startswith("has no setting") and words[0] == "verify":
            continue  # remotes are read where one is named
        result = answer(*words)["result"]
        assert result["code"] == 2
        assert says in result["message"]
        assert f"{config}, line {line}" in result["message"]
    assert answer("help", "exit-codes")["result"]["code"] == 0


def test_only_speed_and_display_can_be_set() -> None:
    names = {one.replace("-", "_") for one in _DEFAULTS}
    speed = {"jobs", "limit_rate", "max_memory", "retry_seconds", "progress"}
    assert names == speed | {"expect_interval", "on_alert", "alert_url"}
    for verb in VERBS:
        for param in load(verb).params:
            for flag in getattr(param, "opts", ()):
                if flag.removeprefix("--") in _DEFAULTS:  # else the file would set another
                    assert str(param.name) == flag.removeprefix("--").replace("-", "_"), verb


def test_a_policy_plans_and_never_drops(config: Path, tmp_path: Path) -> None:
    root, file = tmp_path / "run", tmp_path / "retention.toml"
    shutil.copytree(RUN, root)
    file.write_text('[[tier]]\nname = "a"\nroots = ["/*"]\nkeep-last = 1\nmin-survivors = 1\n')
    (tmp_path / "link").symlink_to(root)
    config.write_text(f'[policies]\n"{tmp_path}/link" = "{file}"\n')
    document = answer("gc", str(root))
    validate(document)
    assert (document["result"]["code"], document["drops"]) == (0, 1), document["result"]
    assert document["policy_from"] == f"{config}, line 2"
    refused = answer("gc", str(root), "--apply")["result"]
    assert refused["code"] == 2
    assert refused["hint"] == f"ftckpt gc {root} --policy {file} --apply"
    assert sorted(os.listdir(root)) == ["latest", "step-1", "step-2"]
    # A rule that is typed is the only one.
    assert answer("gc", str(root), "--keep-last", "2")["drops"] == 0
    assert answer("gc", str(RUN))["result"]["code"] == 2
    assert '"keep": false' in json.dumps(answer("status", str(root)))
    assert answer("gc", *refused["hint"].split()[2:])["result"]["code"] == 0
    assert sorted(os.listdir(root)) == [".ftckpt", "latest", "step-2"]


def test_lines() -> None:
    text = '# x\n[a."b c"]\n"d.e" = 1\nf.g = 2\n[h]\n'
    settings = SettingsFile("p", text, {})
    assert settings.line("a", "b c", "d.e") == 3
    assert settings.line("a", "b c", "f", "g") == 4
    assert settings.line("a", "b c", "none") == 2
    assert settings.line("h") == 5
    assert settings.line("none") is None
    assert settings.where("none") == "p"
