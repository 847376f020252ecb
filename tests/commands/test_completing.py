"""Words that are looked up when TAB is pressed: in real shells, in time, and silently."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftckpt.commands import completing
from ftckpt.commands.completing import answer as places
from ftckpt.commands.completing import cache, table
from ftckpt.commands.completing.answer import answer, parse, quoted, split_line
from ftckpt.commands.completions import words_of_verbs
from tests.commands.golden import RUN
from tests.commands.saves import answer as ran
from tests.commands.shells import Terminal, place_program
from tests.servers.s3 import upload_tree

LATER = time.monotonic() + 1e9


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home with roots, a remote, a tag, a pin and something in the trash."""
    for name in ("run", "my run", "sub/a=b"):
        shutil.copytree(RUN, tmp_path / name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / ".config" / "ftckpt" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(f'[remotes.cold]\nurl = "{tmp_path}/sub"\n')
    for words in (("tag", "run", "2", "milestone"), ("pin", "run", "1", "--reason", "paper")):
        assert ran(*words)["result"]["code"] == 0
    return tmp_path


def fish(*words: str) -> list[str]:
    """Return the offers for the last word; the form that fish takes has them plain."""
    first, *rest = answer(["fish", *words], LATER).splitlines()
    assert first in ("words", "nospace")
    return [one.removesuffix("\t") for one in rest]


def test_what_is_offered(home: Path) -> None:
    assert fish("verify", "run@") == ["run@latest", "run@2", "run@1"]
    assert fish("verify", "run@l") == ["run@latest"]
    assert fish("verify", "~/my run@2") == ["~/my run@2"]
    assert fish("verify", "absent@") == []
    (home / "mail@host").mkdir()
    assert fish("verify", "mail@") == ["mail@host/"]
    assert fish("verify", "co") == ["cold:"]
    assert fish("verify", "cold:") == ["cold:a=b/"]
    assert fish("verify", "cold:a=b@") == ["cold:a=b@latest", "cold:a=b@2", "cold:a=b@1"]
    assert answer(["fish", "verify", "r"], LATER) == "files\n"
    assert answer(["fish", "verify", "run/st"], LATER) == "files\n"
    assert fish("pin", "run", "") == ["latest", "1", "2"]
    assert fish("pin", "--remove", "run", "") == ["step-1"]
    assert fish("tag", "run", "--remove", "") == ["step-2"]
    assert fish("tag", "--remove", "run", "step-2", "m") == fish("gc", "run", "--keep-tag", "")
    assert fish("gc", "run", "--keep-tag", "") == ["milestone"]
    assert fish("gc", "undelete", "run", "") == []
    drop = ("gc", "sub/a=b", "--keep-last", "1", "--min-survivors", "1", "--apply")
    assert ran(*drop)["result"]["code"] == 0
    assert fish("gc", "undelete", "sub/a=b", "") == ["step-1"]
    assert fish("cat", "run@1", "1.") == ["1.bias", "1.bias.step", "1.weight", "1.weight.step"]
    assert fish("cat", "run@1", "exp_avg:1.b") == ["exp_avg:1.bias"]
    assert fish("diff", "run@1", "run@2", "--tensor=1.b") == ["1.bias", "1.bias.step"]
    assert fish("convert", "--device", "c")[:2] == ["cpu", "cuda"]
    assert fish("tag", "--endpoint", "http://x", "--json", "run", "") == ["latest", "1", "2"]
    assert "cold:" in fish("cat", "")


def test_many_tensors_are_offered_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"layers.{i}.{kind}.weight" for i in range(200) for kind in ("attn", "mlp")]
    parts = places._next_parts(names, "")
    assert parts == ["layers."]
    assert places._next_parts(names, "layers.19")[0] == "layers.19.attn.weight"
    assert len(places._next_parts(names, "layers.")) == 200


def test_a_name_that_moves_the_cursor_is_not_offered(home: Path) -> None:
    (home / "run" / "\x1b[2Jstep").mkdir()
    (home / "run" / "a\nb").mkdir()
    assert fish("pin", "run", "") == ["latest", "1", "2"]


@pytest.mark.parametrize(
    ("line", "words", "quote"),
    [
        ("ftckpt verify ", ["ftckpt", "verify", ""], ""),
        ("ftckpt verify my\\ ru", ["ftckpt", "verify", "my ru"], ""),
        ("ftckpt verify 'a b' \"c d", ["ftckpt", "verify", "a b", "c d"], '"'),
        ("ftckpt verify 'it''s", ["ftckpt", "verify", "its"], "'"),
        ('f "a\\$b\\c', ["f", "a$b\\c"], '"'),
        ("A=1 B= ftckpt x", ["ftckpt", "x"], ""),
        ("f ''", ["f", ""], ""),
        ("f a\\", ["f", "a"], ""),
    ],
)
def test_a_line_of_bash(line: str, words: list[str], quote: str) -> None:
    assert split_line(line) == (words, quote)


def test_what_is_inserted_is_quoted() -> None:
    assert quoted("a b;$(x)é'", "") == "a\\ b\\;\\$\\(x\\)é\\'"
    assert quoted('a "$b`\\', '"') == 'a \\"\\$b\\`\\\\'
    assert quoted("it's", "'") == "it'\\''s"
    # Only what is added to the typed text: variables and quotes in that stay.
    assert answer(["bash", "ftckpt convert --device c", "c"], LATER).splitlines()[1] == "cpu"


def test_the_tables_are_the_verbs() -> None:
    verbs = words_of_verbs()
    switches = {n for v in verbs for f in v.flags if not f.takes_value for n in f.names}
    assert switches == table.SWITCHES
    known = {n for v in verbs for f in v.flags for n in f.names}
    assert {name.rpartition(" ")[2] for name in table.OPTIONS} <= known
    assert {one.removesuffix(" --remove") for one in table.ARGUMENTS} <= {v.verb for v in verbs}
    for name in table.OPTIONS:
        verb, _, flag = name.rpartition(" ")
        owners = [v.verb for v in verbs for f in v.flags if flag in f.names]
        assert verb in ("", *owners)


def test_where_a_word_stands() -> None:
    asked = parse(["--debug", "cat", "--slice", "0:4", "-q", "--endpoint=e", "ckpt", "x"])
    assert (asked.verb, asked.kind, asked.arguments) == ("cat", "tensor", ("ckpt",))
    assert asked.given == {"--slice": "0:4", "--endpoint": "e"}
    assert parse(["gc", "undelete", "run", ""]).kind == "trash"
    assert parse(["gc", "run", ""]).kind == "place"
    assert parse(["verify", "--", "--level"]).kind == "place"
    assert parse(["verify", "--against", ""]).kind == "place"
    assert parse(["verify", "--level", ""]).kind == ""


def test_a_late_answer_is_none_and_the_next_has_it(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completing, "DEADLINE", 0.2)
    plain = places._entries
    calls = home / "calls"

    def slow(path: str, looking: places.Looking) -> Iterator[str]:
        calls.write_text("x" * (calls.stat().st_size + 1 if calls.exists() else 1))
        for _ in range(6000):
            if (home / "go").exists():
                break
            time.sleep(0.01)
        yield from plain(path, looking)

    monkeypatch.setitem(places._IN_A_ROOT, "step", slow)
    words = ["fish", "pin", "run", ""]
    assert completing.ask(words, time.monotonic()) == b""
    # A second TAB meanwhile starts no second look.
    assert completing.ask(words, time.monotonic()) == b""
    (home / "go").touch()
    ends = time.monotonic() + 60
    while not (found := completing.ask(words, time.monotonic())) and time.monotonic() < ends:
        time.sleep(0.05)
    assert found.decode().splitlines() == ["words", "latest\t", "1\t", "2\t"]
    assert calls.read_text() == "x"
    assert os.stat(cache.folder()).st_mode & 0o777 == 0o700
    # What is kept is an answer, or it is looked for again.
    for one in Path(cache.folder()).iterdir():
        one.write_text('{"a": 1}')
    monkeypatch.setitem(places._IN_A_ROOT, "step", plain)
    monkeypatch.setattr(completing, "DEADLINE", 20)
    assert completing.ask(words, time.monotonic()).splitlines()[1:] == [b"latest\t", b"1\t", b"2\t"]


@pytest.mark.parametrize(
    "break_it",
    [
        lambda home: (home / ".config/ftckpt/config.toml").write_text("[remotes"),
        lambda home: shutil.rmtree(home / "run"),
        lambda home: (home / ".cache").write_text("a file"),
    ],
)
def test_nothing_goes_wrong_aloud(home: Path, break_it: Callable[[Path], object]) -> None:
    break_it(home)
    for words in (["fish", "pin", "run", ""], ["bash", "x"], ["fish", "verify", "c"], []):
        done = subprocess.run(
            [sys.executable, "-m", "ftckpt", "__complete", *words],
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")


def test_nothing_heavy_is_imported(home: Path) -> None:
    program = (
        "import json, sys, time\n"
        "from ftckpt.commands.completing.answer import answer\n"
        "end = time.monotonic() + 99\n"
        "found = [answer(words, end) for words in json.loads(sys.argv[1])]\n"
        "heavy = {'typer', 'torch', 'numpy', 's3fs', 'fsspec', 'rich'} & set(sys.modules)\n"
        "print(len(found), *heavy)"
    )
    words = [["fish", "cat", "run@"], ["fish", "cat", "run@1", ""], ["fish", "pin", "run", ""]]
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(words)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "3\n"


@pytest.mark.s3
def test_an_object_store(home: Path, s3_url: str) -> None:
    upload_tree(RUN, f"{s3_url}/run7")
    (home / ".config/ftckpt/config.toml").write_text(f'[remotes.far]\nurl = "{s3_url}"\n')
    found = [f"{s3_url}/run7@{one}" for one in ("latest", "2", "1")]
    assert fish("verify", f"{s3_url}/run7@") == found
    assert fish("verify", f"{s3_url}/ru") == [f"{s3_url}/run7/"]
    assert fish("verify", "far:run7@2") == ["far:run7@2"]
    assert fish("verify", "far:") == ["far:run7/"]
    assert fish("cat", "far:run7@1", "1.b") == ["1.bias", "1.bias.step"]
    # As the user has it: within the time or nothing, and then from the cache.
    began = time.monotonic()
    words = ["fish", "verify", "far:run7@2"]
    first = completing.ask(words, began)
    assert time.monotonic() - began < 20  # where the store hangs it would be minutes
    ends = time.monotonic() + 60
    while not (found_later := completing.ask(words, time.monotonic())):
        assert time.monotonic() < ends
        time.sleep(0.1)
    assert first in (b"", found_later)


# What is typed, and what runs when Return is pressed then.
TYPED = {
    "ftckpt cat run@l\t": ["cat", "run@latest"],
    "ftckpt verify my\\ run@l\t": ["verify", "my run@latest"],
    "ftckpt verify 'my run@l\t": ["verify", "my run@latest"],
    "ftckpt verify sub/a=b@l\t": ["verify", "sub/a=b@latest"],
    "ftckpt verify cold:a\t": ["verify", "cold:a=b/"],
    "ftckpt verify run --level=v\t": ["verify", "run", "--level=values"],
    "ftckpt convert --family=minimax_\t": ["convert", "--family=minimax_m2"],
    "ftckpt convert --device=cp\t": ["convert", "--device=cpu"],
    "ftckpt tag --remove run step-\t mi\t": ["tag", "--remove", "run", "step-2", "milestone"],
    "ftckpt cat run@1 optimizer.param_groups.0.l\t": [
        "cat",
        "run@1",
        "optimizer.param_groups.0.lr",
    ],
    "ftckpt verify nohost@\t": ["verify", "nohost@"],
}  # fmt: skip
# fish closes no quote and says nothing where there is nothing to offer.
NOT_IN_FISH = {"ftckpt verify nohost@\t"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_in_a_real_shell(home: Path, shell: str) -> None:
    place_program(home)
    terminal = Terminal(shell, home)
    try:
        for line, words in TYPED.items():
            if shell != "fish" or line not in NOT_IN_FISH:
                assert terminal.run(line) == words, line
    finally:
        terminal.close()
