"""Another package adds a verb and a format, as docs/extending.md shows it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ftckpt import plugins
from tests.builders.checkpoints import save_dcp

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
POINTS = """
[console_scripts]
ours = ours:main

[ftckpt.verbs]
dtypes = ours.dtypes
; a remark

[ftckpt.formats]
ours-raw = ours.raw:OursRaw
"""


def install(place: Path, points: str = POINTS, name: str = "ours") -> Path:
    """Install a package with the modules of the page."""
    text = PAGE.read_text()
    folder = place / name
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        if name == "ours":
            (place / block.splitlines()[0].removeprefix("# ")).write_text(block)
    metadata = place / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(points)
    return place


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return install(tmp_path / "site")


def ftckpt(
    place: Path, *words: str | Path, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    variables = os.environ | environment | {"PYTHONPATH": str(place)}
    line = [sys.executable, "-m", "ftckpt", *map(str, words)]
    return subprocess.run(
        line, capture_output=True, text=True, timeout=300, env=variables, cwd=cwd, check=False
    )


def save(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "ours.raw").write_bytes(bytes(range(40)))
    shapes = {"w": ["float32", [2, 4]], "b": ["bfloat16", [4]]}
    (folder / "ours.json").write_text(json.dumps(shapes))
    return folder


def test_the_page_says_what_is_installed_here() -> None:
    said = re.findall(r"^(\S+) = \"(ours.*)\"$", PAGE.read_text(), re.MULTILINE)
    assert {name: value for name, value in said if name != "name"} == {
        name.strip(): value.strip()
        for name, _, value in (line.partition("=") for line in POINTS.splitlines())
        if value and name.strip() != "ours"
    }


def test_its_verb_is_one_as_any_other(place: Path, tmp_path: Path) -> None:
    step = tmp_path / "step-1"
    save_dcp(step, step=1)
    done = ftckpt(place, "dtypes", step)
    assert (done.returncode, done.stdout) == (0, "float32 33.0 KiB\n"), done.stderr
    document = json.loads(ftckpt(place, "dtypes", step, "--json").stdout)
    assert document["schema"] == "ftckpt.dtypes/1"
    assert (document["format"], document["bytes"]) == ("dcp", {"float32": 33792})
    assert (document["result"]["code"], document["result"]["message"]) == (0, "1 types")
    few = ftckpt(place, "dtypes", step, "--json", "--least", "99999")
    assert json.loads(few.stdout)["bytes"] == {}
    assert ftckpt(place, "dtypes", tmp_path / "nowhere").returncode == 9
    wrong = ftckpt(place, "dtypes", step, "--most", "1")
    assert (wrong.returncode, "No such option" in wrong.stderr) == (2, True)
    unknown = ftckpt(place, "inspect", step, FTCKPT_DTYPES_MOST="1")
    assert (unknown.returncode, "sets no option" in unknown.stderr) == (2, True)


def test_its_verb_is_in_help_completion_and_pages(place: Path, tmp_path: Path) -> None:
    summary = "Show how many bytes each type takes"
    for words in (["--help"], ["help"]):
        assert f"dtypes          {summary}" in ftckpt(place, *words).stdout
    shown = ftckpt(place, "dtypes", "--help").stdout
    assert ftckpt(place, "help", "dtypes").stdout.strip() == shown.strip()
    for said in (summary, "--least BYTES", "--endpoint URL", "ftckpt dtypes run/step-1000"):
        assert said in shown
    for shell in ("bash", "zsh", "fish"):
        script = ftckpt(place, "completions", shell).stdout
        assert "dtypes" in script
        assert "least" in script
    ftckpt(place, "help", "--man", tmp_path / "man")
    assert "least" in (tmp_path / "man" / "ftckpt-dtypes.1").read_text()
    page = (
        "from ftckpt.commands.manual.contents import markdown_pages\n"
        "print(dict(markdown_pages(['dtypes']))['verbs/dtypes.md'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", page], capture_output=True, text=True, timeout=300, check=True,
        env=os.environ | {"PYTHONPATH": str(place)},
    )  # fmt: skip
    assert done.stdout.startswith(f"# dtypes\n\n{summary}.")
    near = ftckpt(place, "dtype", "x")
    assert "did you mean dtypes?" in near.stderr


def test_every_verb_reads_its_format(place: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    save(root / "step-1")
    step = save(root / "step-2")
    document = json.loads(ftckpt(place, "inspect", step, "--json").stdout)
    assert (document["format"], document["tensors"]["count"]) == ("ours-raw", 2)
    assert ftckpt(place, "cat", step, "b").returncode == 0
    assert ftckpt(place, "latest", root).stdout.strip() == str(step)
    assert ftckpt(place, "verify", step).returncode == 0
    done = ftckpt(place, "convert", step, tmp_path / "hf", "--to", "safetensors")
    assert done.returncode == 0, done.stderr
    assert ftckpt(place, "diff", step, tmp_path / "hf").returncode == 0
    (step / "ours.raw").write_bytes(b"short")
    assert ftckpt(place, "verify", step).returncode == 4
    (step / "ours.json").unlink()
    assert ftckpt(place, "latest", root).stdout.strip() == str(root / "step-1")


def test_without_the_package_its_places_are_strange_and_not_empty(
    place: Path, tmp_path: Path
) -> None:
    """9 lets a job start from scratch."""
    root = tmp_path / "run"
    step = save(root / "step-1")
    assert ftckpt(tmp_path, "dtypes", step).returncode == 2
    for words in (("inspect", step), ("latest", root), ("gc", root, "--keep-last", "1")):
        assert ftckpt(tmp_path, *words).returncode == 13, words
    (place / "ours" / "raw.py").write_text("import nowhere_to_be_found\n")
    assert ftckpt(place, "latest", root).returncode == 13


def test_a_package_in_the_working_directory_adds_nothing(place: Path, tmp_path: Path) -> None:
    step = save(place / "step-1")
    assert ftckpt(tmp_path, "dtypes", step, cwd=place).returncode == 2
    assert ftckpt(tmp_path, "inspect", step, cwd=place).returncode == 13


def test_a_broken_package_is_named_and_breaks_no_other_verb(place: Path, tmp_path: Path) -> None:
    (place / "ours" / "dtypes.py").write_text("import nowhere_to_be_found\n")
    (place / "ours" / "raw.py").write_text("def OursRaw():\n    raise ValueError('a\\nb')\n")
    warning = "warning: the format 'ours-raw' of the package ours 1.0 does not work: "
    dcp, ours = tmp_path / "run" / "step-1", save(tmp_path / "step-1")
    save_dcp(dcp, step=1)
    done = ftckpt(place, "dtypes", dcp)
    verb = (
        "the verb 'dtypes' of the package ours 1.0 does not work: ModuleNotFoundError: No module"
        " named 'nowhere_to_be_found'"
    )
    assert (done.returncode, done.stderr.splitlines()[0]) == (13, f"ftckpt: {verb}")
    listed = ftckpt(place, "--help")
    assert listed.returncode == 0
    assert " ".join(verb.split()) in " ".join(listed.stdout.split())
    assert ftckpt(place, "completions", "bash").returncode == 0
    for words in (("inspect", dcp), ("verify", dcp), ("help", "verify")):
        found = ftckpt(place, *words)
        others = [one for one in found.stderr.splitlines() if not one.startswith(warning)]
        assert (found.returncode, others) == (0, []), words
    checks = json.loads(ftckpt(place, "doctor", "--json").stdout)["checks"]
    assert [one["means"] for one in checks if one["name"] == "dtypes"] == [verb]
    unread = ftckpt(place, "inspect", ours)
    assert unread.returncode == 13
    assert unread.stderr.splitlines().count(f"{warning}ValueError: a b") == 1


@pytest.mark.parametrize("method", ["recognise", "open"])
def test_a_format_that_fails_on_a_place_is_named(method: str, place: Path, tmp_path: Path) -> None:
    module = place / "ours" / "raw.py"
    begins, fails = rf"(    def {method}\(.*:\n)", r"\1        raise KeyError('oh')\n"
    module.write_text(re.sub(begins, fails, module.read_text()))
    done = ftckpt(place, "inspect", save(tmp_path / "step-1"))
    assert done.returncode == 13
    assert "the format 'ours-raw' of the package ours 1.0 does not work: KeyError" in done.stderr
    dcp = tmp_path / "step-2"
    save_dcp(dcp, step=2)
    assert ftckpt(place, "inspect", dcp).returncode == 0


def test_a_verb_that_fails_is_its_packages_mistake(place: Path, tmp_path: Path) -> None:
    module = place / "ours" / "dtypes.py"
    module.write_text(module.read_text().replace("sums = Counter()", "sums = {}['x']"))
    save_dcp(tmp_path / "step-1", step=1)
    done = ftckpt(place, "dtypes", tmp_path / "step-1")
    assert done.returncode == 1
    assert "the verb 'dtypes' of the package ours 1.0 failed: KeyError: 'x'" in done.stderr


def test_two_packages_with_one_name_are_named(place: Path, tmp_path: Path) -> None:
    install(place, POINTS, "theirs")
    done = ftckpt(place, "dtypes", tmp_path)
    assert (done.returncode, "unknown verb" in done.stderr) == (2, True)
    said = "the verb 'dtypes' is added by ours 1.0 and theirs 1.0: neither is used"
    assert f"warning: {said}" in done.stderr.splitlines()


def test_metadata_of_any_kind_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, points in (
        ("a-1.0.dist-info", "[ftckpt.verbs]\nx = a.b : c [extra]\n"),
        ("b-2.egg-info", "[ftckpt.verbs]\n# x = y\ny=b\n[other]\nz = c\n"),
        ("c-3.dist-info", "\xff\n"),
        ("d-4.dist-info", "no group\n= nothing\n[ftckpt.formats]\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "entry_points.txt").write_text(points, encoding="latin-1")
    (tmp_path / "e-5.dist-info").touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/nowhere", str(tmp_path / "e-5.dist-info")])
    everything = sorted(plugins._read())
    assert [one.name for _, one in everything] == ["x", "y"]
    assert everything[0][1] == plugins.Plugin("x", "a.b : c", "a 1.0")
