"""Named remotes: two services in one command, and what a file of settings may say."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from ftckpt.delta.index.head import recorded_path, resolved
from ftckpt.errors import DeniedError, UsageError
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.remotes import Remote, named, remotes, split
from ftckpt.storage.settings import config_path
from tests.commands.golden import RUN
from tests.servers.s3 import BUCKET, S3Service
from tests.workers.forked import run

APPLY = ("--keep-last", "1", "--min-survivors", "1", "--apply")
SECRET = "Wq7-not-to-be-shown"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "config.toml"
    monkeypatch.setenv("FTCKPT_CONFIG", str(file))
    return file


def written(config: Path, text: str) -> Path:
    config.write_text(text)
    return config


def test_where_the_settings_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert config_path() == f"{tmp_path}/.config/ftckpt/config.toml"
    assert remotes() == {}
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert config_path() == f"{tmp_path}/.config/ftckpt/config.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "/xdg")
    assert config_path() == "/xdg/ftckpt/config.toml"
    monkeypatch.setenv("FTCKPT_CONFIG", "/mine.toml")
    assert config_path() == "/mine.toml"
    with pytest.raises(UsageError, match=r"FTCKPT_CONFIG names .* is not there"):
        remotes()


def test_a_changed_file_is_read_again(config: Path) -> None:
    written(config, '[remotes.a]\nurl = "/a"\n')
    assert list(remotes()) == ["a"]
    written(config, '[remotes.b2]\nurl = "/b"\n')
    assert list(remotes()) == ["b2"]


def test_what_a_name_means(config: Path) -> None:
    written(
        config,
        '[remotes.cold]\nurl = "s3://bucket/runs/"\nendpoint = "http://e:1"\nprofile = "p"\n'
        'retry_seconds = 5\n[remotes.all]\nurl = "s3://"\n[remotes.nvme]\nurl = "/nvme"\n',
    )
    cold = remotes()["cold"]
    assert cold.place("") == "s3://bucket/runs"
    assert cold.place("run7/ckpt") == cold.place("/run7/ckpt") == "s3://bucket/runs/run7/ckpt"
    assert remotes()["all"].place("b/x") == "s3://b/x"
    assert remotes()["nvme"].place("run7") == "/nvme/run7"
    # The flags of a command are about its other place: none of them may leak to a remote.
    flags = StoreOptions(endpoint="http://other", profile="q", anonymous=True, timeout=7)
    assert cold.options(flags) == StoreOptions(
        endpoint="http://e:1", profile="p", retry_seconds=5, timeout=7
    )
    for url in ("s3://bucket/x", "/a:b", "./cold:x", "a/cold:x", "memory://cold", "s3:/x", "cold"):
        assert named(url) is None
    assert split("cold:step-1") == ("cold:", "step-1")
    assert split("cold:run/step-1") == ("cold:run", "step-1")
    assert split("a:b/c") == ("a:b", "c")
    assert split("x") == (".", "x")
    assert split("/x") == ("/", "x")


def test_what_leads_out_of_a_remote(config: Path) -> None:
    written(config, '[remotes.nvme]\nurl = "/nvme/run7"\n')
    with pytest.raises(UsageError, match="leads out of the remote nvme"):
        open_store("nvme:a/../../other")


def test_a_name_that_is_none(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(config, '[remotes.cold]\nurl = "/nvme"\n')
    with pytest.raises(UsageError, match="unknown remote 'clod'") as caught:
        open_store("clod:run7")
    assert "did you mean cold:?" in caught.value.hint
    assert "a file is ./clod:run7" in caught.value.hint
    done = run(["verify", "clod:run7"], os.environ, tmp_path)
    assert done.returncode == 2
    assert "did you mean cold:?" in done.stderr
    # After one slash a URL was meant.
    assert "a URL has two slashes: s3://b/run7" in run(["verify", "s3:/b/run7"], os.environ).stderr


def test_files_with_a_colon(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written(config, f'[remotes.cold]\nurl = "{tmp_path}/far"\n')
    shutil.copytree(RUN / "step-1", tmp_path / "cold:x")
    shutil.copytree(RUN / "step-1", tmp_path / "2026-01-31T03:14")
    assert run(["verify", "2026-01-31T03:14"], os.environ, tmp_path).returncode == 0
    assert run(["verify", "./cold:x"], os.environ, tmp_path).returncode == 0
    assert run(["verify", "cold:x"], os.environ, tmp_path).returncode == 9  # the remote's
    shutil.copytree(RUN / "step-1", tmp_path / "far" / "x")
    assert run(["verify", "cold:x"], os.environ, tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("[remotes.a", "is not TOML", ""),
        ("\nmin_survivors = 0", "line 2: there are no settings 'min_survivors'", "[remotes.NAME]"),
        ("remotes = 3", "line 1: remotes is written as [remotes]", ""),
        ("[remotes]\na = 3", "written as [remotes.NAME]", ""),
        ('[remotes.s3]\nurl = "/x"', "'s3' cannot name a remote", ""),
        ('[remotes."a b"]\nurl = "/x"', "'a b' cannot name a remote", ""),
        ("[remotes.a]", "needs a url", ""),
        ('[remotes.a]\nurl = "nvme/run7"', "needs a url", ""),
        ('[remotes.a]\nurl = "simplecache::s3://b"', "needs a url", ""),
        ('[remotes.a]\nurl = "/x"\nno_proof = true', "has no setting 'no_proof'", "it may set"),
        ('[remotes.a]\nurl = "s3://b"\nendpont = "x"', "no setting 'endpont'", "mean endpoint?"),
        (
            f'[remotes.a]\nurl = "s3://b"\nsecret_access_key = "{SECRET}"',
            "no setting 'secret_access_key'",
            "no secret stands here",
        ),
        (f'[remotes.a]\nurl = "s3://b"\nprofile = "{SECRET}', "is not TOML", ""),
        (
            f'[remotes.a]\nurl = "s3://b"\nendpoint = "http://me:{SECRET}@e"',
            "a name or a password",
            "AWS profile",
        ),
        (f'[remotes.a]\nurl = "s3://me:{SECRET}@b"', "a name or a password", ""),
        ('[remotes.a]\nurl = "s3://b"\nendpoint = "e:9000"', "must begin with https://", ""),
        ('[remotes.a]\nurl = "/x"\nprofile = "p"', "profile is for s3:// alone", ""),
        ('[remotes.a]\nurl = "s3://b"\nanonymous = "yes"', "anonymous must be true or false", ""),
        ('[remotes.a]\nurl = "s3://b"\ntimeout = true', "timeout must be a number", ""),
        ('[remotes.a]\nurl = "s3://b"\ntimeout = nan', "timeout must be a number", ""),
        ('[remotes.a]\nurl = "s3://b"\nprofile = 3', "profile must be a text", ""),
    ],
)
def test_settings_that_are_refused(config: Path, text: str, says: str, hint: str) -> None:
    written(config, text)
    done = run(["verify", "a:x", "--debug"], os.environ)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert hint in done.stderr
    assert SECRET not in done.stdout + done.stderr


def test_settings_that_nobody_may_read(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DeniedError, match="cannot read"):
        remotes()
    monkeypatch.delenv("FTCKPT_CONFIG")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    # A home that is somebody else's, as in a container, has no settings for this user.
    assert remotes() == {}
    mine = tmp_path / "ftckpt" / "config.toml"
    mine.parent.mkdir()
    mine.touch()
    with pytest.raises(DeniedError, match="cannot read"):
        remotes()


def test_a_delta_names_a_base_on_a_remote() -> None:
    base, delta = "cold:run7/step-1", "cold:run7/step-2"
    assert resolved(recorded_path(base, delta), delta) == "cold:/run7/step-1"
    assert recorded_path("cold:a/step-1", "hot:a/step-2") == "cold:a/step-1"
    assert resolved("cold:a/step-1", "hot:a/step-2") == "cold:a/step-1"
    assert recorded_path("cold:a/step-1", "/a/step-2") == "cold:a/step-1"


def test_a_store_travels_with_its_name(config: Path) -> None:
    written(config, '[remotes.cold]\nurl = "s3://bucket"\nendpoint = "http://127.0.0.1:1"\n')
    store = open_store("cold:/run7", StoreOptions(retry_seconds=1))
    config.unlink()  # the machine that it travels to has other settings
    there = pickle.loads(pickle.dumps(store))
    assert there.url == store.url == "cold:run7"
    assert there.describe("x") == "cold:run7/x"
    assert there.identity("x") == store.identity("x") == "http://127.0.0.1:1 s3://bucket/run7/x"
    assert there.options.retry_seconds == 1


def test_the_remote_itself(config: Path) -> None:
    written(config, '[remotes.cold]\nurl = "memory://far/away"\n')
    store = open_store("cold:")
    store.put("step-1", b"1")
    assert store.describe("step-1") == "cold:step-1"
    assert open_store("memory://far/away").read("step-1") == b"1"
    assert Remote("r", "/").place("x") == "/x"


@pytest.fixture
def services(
    swift: S3Service,
    rclone: S3Service,
    config: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> str:
    """Two services, `hot` and `cold`, with other credentials each; returns a prefix of our own."""
    credentials = tmp_path / "credentials"
    credentials.write_text(
        "".join(
            f"[{name}]\naws_access_key_id = {one.key}\naws_secret_access_key = {one.secret}\n"
            for name, one in (("hot", swift), ("cold", rclone))
        )
    )
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(credentials))
    # What stands in the environment is wrong for both.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    prefix = tmp_path.name.replace("_", "-")
    rows = (("hot", swift, f"s3://{BUCKET}/{prefix}"), ("cold", rclone, "s3://"))
    config.write_text(
        "".join(
            f'[remotes.{name}]\nurl = "{url}"\nendpoint = "{one.endpoint}"\nprofile = "{name}"\n'
            f'region = "us-east-1"\n'
            for name, one, url in rows
        )
    )
    return f"{BUCKET}/{prefix}"


def answer(*words: str) -> tuple[int, dict[str, Any]]:
    done = run([*words, "--json"], os.environ)
    for service_secret in ("SECRETSECRET", "testing"):
        assert f'"{service_secret}"' not in done.stdout
    return done.returncode, json.loads(done.stdout)


@pytest.mark.s3
def test_two_services_in_one_command(
    services: str, swift: S3Service, rclone: S3Service, tmp_path: Path
) -> None:
    far = f"cold:{services}"
    code, document = answer("copy", str(RUN / "step-1"), "hot:step-1")
    assert (code, document["destination"]) == (0, "hot:step-1")
    assert swift.get(f"{services.partition('/')[2]}/step-1/.metadata")
    code, document = answer("copy", "hot:step-1", f"{far}/")
    assert (code, document["destination"]) == (0, f"{far}/step-1")
    assert rclone.get(f"{services.partition('/')[2]}/step-1/.metadata")
    assert document["remotes"] == {
        "hot": {"url": f"s3://{services}", "endpoint": swift.endpoint, "profile": "hot"}
        | {"region": "us-east-1"},
        "cold": {"url": "s3://", "endpoint": rclone.endpoint, "profile": "cold"}
        | {"region": "us-east-1"},
    }
    assert answer("diff", "hot:step-1", f"{far}/step-1")[0] == 0
    assert answer("verify", "hot:step-1", "--against", f"{far}/step-1")[0] == 0
    code, document = answer("latest", f"{far}", "--level", "content")
    assert (code, document["path"]) == (0, f"{far}/step-1")
    code, document = answer("status", "hot:", "--tier", far)
    assert code in (0, 14), document["result"]
    code, document = answer("gc", far, "--keep-last", "1")
    assert code == 0, document["result"]
    # A damaged one is mended from the other service.
    local = tmp_path / "step-1"
    assert answer("copy", "hot:step-1", str(local))[0] == 0
    data = next(local.glob("*.distcp"))
    body = bytearray(data.read_bytes())
    body[len(body) // 2] ^= 1
    data.write_bytes(body)
    assert answer("repair", str(local), "--from", f"{far}/step-1")[0] == 0
    assert answer("verify", str(local), "--level", "content")[0] == 0
    # The same bucket and prefix on another service is another place; on the same it is the source.
    code, document = answer("copy", "hot:step-1", "hot:/step-1")
    assert code == 8, document["result"]
    # Flags are about places without a remote.
    flags = ("--endpoint", rclone.endpoint, "--profile", "cold", "--region", "us-east-1")
    code, document = answer("copy", "hot:step-1", f"s3://{services}/again", *flags)
    assert code == 0, document["result"]
    assert rclone.get(f"{services.partition('/')[2]}/again/.metadata")
    code, document = answer("copy", f"{far}/step-1", f"s3://{services}/step-1", *flags)
    assert (code, document["result"]["name"]) == (8, "REFUSED"), document["result"]
    assert "is the source itself" in document["result"]["message"]


@pytest.mark.s3
def test_gc_on_a_named_remote(services: str, swift: S3Service) -> None:
    far = "hot:"
    for step in (1, 2):
        assert answer("copy", str(RUN / f"step-{step}"), f"{far}run/")[0] == 0

    def keys() -> set[str]:
        store = open_store(f"{far}run")
        return {entry.path for entry in store.walk() if not entry.path.startswith(".ftckpt/")}

    # A service on which two runs would not see each other is refused, by its name.
    cold = f"cold:{services}"
    assert answer("copy", str(RUN / "step-1"), f"{cold}/run/")[0] == 0
    assert answer("copy", str(RUN / "step-2"), f"{cold}/run/")[0] == 0
    code, document = answer("gc", f"{cold}/run", *APPLY)
    assert code == 13
    assert document["result"]["message"].startswith(f"{cold}/run cannot be locked")
    for step in (1, 2):
        assert answer("verify", f"{cold}/run/step-{step}", "--level", "content")[0] == 0
    whole = keys()
    assert {key.partition("/")[0] for key in whole} == {"step-1", "step-2"}
    code, document = answer("gc", f"{far}run", *APPLY)
    assert code == 0, document["result"]
    assert answer("latest", f"{far}run")[1]["path"] == f"{far}run/step-2"
    assert answer("verify", f"{far}run/step-1")[0] != 0
    # It can be had back by its name on the remote, and is whole then.
    code, document = answer("gc", "undelete", f"{far}run", "step-1")
    assert code == 0, document["result"]
    assert keys() == whole
    assert answer("verify", f"{far}run/step-1", "--level", "content")[0] == 0
    code, document = answer("gc", f"{far}run", *APPLY, "--purge-now", "--yes")
    assert code == 0, document["result"]
    assert keys() == {key for key in whole if key.startswith("step-2/")}
    assert answer("verify", f"{far}run/step-2", "--level", "content")[0] == 0
    prefix = services.partition("/")[2]
    assert swift.get(f"{prefix}/run/step-2/.metadata")


def test_gc_on_a_named_directory(config: Path, tmp_path: Path) -> None:
    shutil.copytree(RUN, tmp_path / "disk" / "run")
    written(config, f'[remotes.nvme]\nurl = "{tmp_path}/disk"\n')
    code, document = answer("gc", "nvme:run", *APPLY)
    assert code == 0, document["result"]
    assert not (tmp_path / "disk" / "run" / "step-1").exists()
    assert answer("gc", "undelete", "nvme:run", "step-1")[0] == 0
    assert (tmp_path / "disk" / "run" / "step-1" / ".metadata").exists()
