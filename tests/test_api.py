"""The Python API, as docs/python.md shows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from inspect import signature
from pathlib import Path
from types import FunctionType
from typing import Any, Unpack

import click
import pytest

import ftckpt
from ftckpt.commands.cli import derive, verbs
from ftckpt.errors import CorruptError, ExitCode, NotFoundError, UsageError
from ftckpt.findings import Finding
from ftckpt.observer import Observer
from ftckpt.operations import choosing, packing, restarting, retaining, transferring
from ftckpt.operations.definition import groups, lenient
from ftckpt.operations.loading import LoadFlags
from ftckpt.verification.places import PlaceReport
from tests.builders.checkpoints import flip, save_dcp


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("api")
    save_dcp(root / "step-7")
    return root


def test_all_that_is_promised_is_there() -> None:
    for name in ftckpt.__all__:
        assert getattr(ftckpt, name) is not None
    assert dir(ftckpt) == sorted(ftckpt.__all__)
    with pytest.raises(AttributeError):
        _ = ftckpt.nothing


def test_importing_is_cheap() -> None:
    script = "import ftckpt, sys; print([m for m in sys.modules if m.startswith('ftckpt.')])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "['ftckpt.version']\n"


def test_one_string_stands_for_a_sequence_of_one(root: Path, tmp_path: Path) -> None:
    """As letters, `also="/x"` would search `/`, and no tensor would match a pattern."""
    step = f"{root}/step-7"
    with pytest.raises(NotFoundError, match=r"nowhere does not"):
        ftckpt.open_checkpoint(step, also=f"{tmp_path}/nowhere")
    assert ftckpt.diff(step, step, tensor="*").code is ExitCode.OK
    with pytest.raises(UsageError, match=r"--drop nothing\* matches no tensor"):
        ftckpt.convert(step, f"{tmp_path}/out", "safetensors", drop="nothing*")
    assert not (tmp_path / "out").exists()


def test_a_path_of_pathlib_stands_for_a_string(root: Path, tmp_path: Path) -> None:
    step = root / "step-7"
    assert ftckpt.verify(step).code is ExitCode.OK  # type: ignore[arg-type]
    assert ftckpt.latest([root]).step == 7  # type: ignore[list-item]
    assert ftckpt.convert(step, tmp_path / "out", "safetensors").files  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match=r"nowhere does not"):
        ftckpt.open_checkpoint(step, also=[tmp_path / "nowhere"])  # type: ignore[list-item]


@lenient
def loaded_with(**flags: Unpack[LoadFlags]) -> LoadFlags:
    return flags


def test_every_flag_that_takes_several_is_known() -> None:
    said = {name: kind.__forward_arg__ for name, kind in LoadFlags.__annotations__.items()}
    several = {name for name, kind in said.items() if kind.startswith("Sequence[str]")}
    assert {"also", "drop", "bases", "adapter", "spelling"} <= several
    given = loaded_with(**dict.fromkeys(said, "a"))  # type: ignore[arg-type]
    assert {name for name, value in given.items() if value == ["a"]} == several
    with pytest.raises(TypeError, match="unexpected keyword argument 'dry_rum'"):
        loaded_with(dry_rum=True)  # type: ignore[call-arg]


def test_open_inspect_verify_seal_latest(root: Path, tmp_path: Path) -> None:
    for path in (f"{root}/step-7", f"{root}@7", f"{root}@latest"):
        checkpoint = ftckpt.open_checkpoint(path)
        assert (checkpoint.step, checkpoint.format) == (7, "dcp")
    with pytest.raises(UsageError):
        ftckpt.open_checkpoint(str(root))
    assert ftckpt.inspect(checkpoint).tensors.count == 4
    assert ftckpt.verify(f"{root}/step-7").code is ExitCode.OK
    sealed = ftckpt.seal(f"{root}/step-7", manifest=f"{tmp_path}/m.json")
    assert Path(sealed.manifest).exists()
    found = ftckpt.latest(str(root), level="content")
    assert (found.code, found.path, found.step) == (ExitCode.OK, f"{root}/step-7", 7)


def test_a_root_is_verified_by_one_call(tmp_path: Path) -> None:
    """As `ftckpt verify ROOT` and `ROOT --all` answer."""
    for step in (7, 8, 9):
        save_dcp(tmp_path / f"step-{step}", step=step)
    (tmp_path / "latest").write_text("step-9")
    newest = ftckpt.verify(str(tmp_path))
    assert (newest.code, newest.url, newest.step) == (ExitCode.OK, f"{tmp_path}/step-9", 9)
    ftckpt.seal(f"{tmp_path}/step-8")
    file = tmp_path / "step-9" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    whole = ftckpt.verify(str(tmp_path), all_=True)
    assert [one.url for one in whole.checkpoints] == [f"{tmp_path}/step-{n}" for n in (9, 8, 7)]
    assert [one.code for one in whole.checkpoints] == [ExitCode.CORRUPT, ExitCode.OK, ExitCode.OK]
    assert (whole.code, whole.url) == (ExitCode.CORRUPT, str(tmp_path))
    assert whole.message == f"1 of 3 checkpoints failed: {tmp_path}/step-9 first"
    # The weakest word is the word.
    assert [one.evidence for one in whole.checkpoints] == ["crc32", "manifest", "crc32"]
    assert (whole.evidence, whole.level, whole.format) == ("crc32", "content", "dcp")
    assert whole.bytes_read == sum(one.bytes_read for one in whole.checkpoints) > 0
    assert whole.findings == ()
    (tmp_path / "latest").write_text("step-10")
    dangling = ftckpt.verify(f"{tmp_path}@8")
    assert (dangling.code, dangling.findings) == (ExitCode.OK, ())
    pointed = ftckpt.verify(str(tmp_path), all_=True)
    assert [one.kind for one in pointed.findings] == ["pointer-dangling"]


def test_damage_in_one_part_of_a_step_is_the_steps(tmp_path: Path) -> None:
    for name in ("actor", "critic"):
        save_dcp(tmp_path / "global_step_3" / name)
    file = tmp_path / "global_step_3" / "critic" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    report = ftckpt.verify(f"{tmp_path}@3")
    assert (report.code, report.format) == (ExitCode.CORRUPT, "bundle")
    assert {one.file for one in report.findings if one.severity == "error"} == {
        "critic/__0_0.distcp"
    }


def test_what_is_watched_comes_as_it_is_found(tmp_path: Path) -> None:
    heard: list[str] = []

    class Ears(Observer):
        def begin(self, url: str) -> None:
            heard.append(url.rpartition("/")[2])

        def found(self, one: Finding) -> None:
            heard.append(one.kind)

        def end(self, report: PlaceReport) -> None:
            heard.append(report.code.name)

    for step in (7, 8):
        save_dcp(tmp_path / f"step-{step}", step=step)
    (tmp_path / "step-8" / ".metadata").write_bytes(b"no pickle")
    ftckpt.verify(str(tmp_path), all_=True, on=Ears())
    assert heard[0] == "step-8"
    assert heard[2] in ("CORRUPT", "UNSAFE")
    assert heard[3] == "step-7"
    assert heard[-1] == "OK"


def test_diff(root: Path, tmp_path: Path) -> None:
    save_dcp(tmp_path / "step-7")
    same = ftckpt.diff(f"{root}/step-7", f"{tmp_path}/step-7")
    assert (same.code, same.total.tensors, same.evidence) == (ExitCode.OK, 4, {"read": 4})
    file = tmp_path / "step-7" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    report = ftckpt.diff(f"{root}/step-7", f"{tmp_path}/step-7", jobs=2)
    assert (report.code, report.total.changed) == (ExitCode.CORRUPT, 1)
    report = ftckpt.diff(f"{root}/step-7", f"{tmp_path}/step-7", trust_recorded=True)
    assert (report.code, report.evidence) == (ExitCode.OK, {"crc32": 4})
    table = tmp_path / "names.toml"
    table.write_text('[[rename]]\nfrom = "layers.*"\nto = "h.*"')
    step = f"{root}/step-7"
    renamed = ftckpt.diff(step, step, component=["model"], rename=str(table))
    assert renamed.total.counts == {"missing": 4, "added": 4}


class Heard(Observer):
    """Keeps what was told."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []
        self.warned: list[str] = []

    def note(self, text: str) -> None:
        self.noted.append(text)

    def warn(self, text: str) -> None:
        self.warned.append(text)


def test_a_verdict_is_returned_not_raised(tmp_path: Path) -> None:
    save_dcp(tmp_path / "step-7")
    file = tmp_path / "step-7" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    assert ftckpt.verify(f"{tmp_path}/step-7").code is ExitCode.CORRUPT
    with pytest.raises(CorruptError, match="not sealed"):
        ftckpt.seal(f"{tmp_path}/step-7")
    heard = Heard()
    found = ftckpt.latest(str(tmp_path), level="content", wait=True, timeout=1, on=heard)
    assert (found.code, found.path) == (ExitCode.CORRUPT, None)
    assert len(heard.warned) == 1


def test_copy_and_repair(root: Path, tmp_path: Path) -> None:
    copy = ftckpt.copy(f"{root}@7", f"{tmp_path}/")
    assert (copy.url, copy.evidence) == (f"{tmp_path}/step-7", "crc32")
    ftckpt.copy(copy.url, f"{tmp_path}/replica")
    file = tmp_path / "step-7" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    looked = ftckpt.repair(copy.url, f"{tmp_path}/replica", dry_run=True)
    assert [(block.file, block.why) for block in looked.blocks] == [(file.name, "differs")]
    assert ftckpt.repair(copy.url, f"{tmp_path}/replica").done
    assert ftckpt.verify(copy.url).code is ExitCode.OK


def test_convert_and_reshard(root: Path, tmp_path: Path) -> None:
    planned = ftckpt.reshard(f"{root}/step-7", f"{tmp_path}/four", dp=4, dry_run=True)
    assert planned.plan is not None
    assert len(planned.plan.files) == 5
    assert list(tmp_path.iterdir()) == []
    whole = ftckpt.reshard(f"{root}/step-7", f"{tmp_path}/four", dp=4)
    assert (whole.format, whole.files) == ("dcp", 5)
    assert whole.proof is not None
    weights = ftckpt.convert(
        ftckpt.open_checkpoint(f"{tmp_path}/four"), f"{tmp_path}/w", "safetensors", only="model"
    )
    assert weights.proof is not None
    assert weights.proof.objects == 0 < whole.proof.objects
    assert ftckpt.verify(f"{tmp_path}/w").code is ExitCode.OK


def test_promote_and_restart(root: Path, tmp_path: Path) -> None:
    for step in (7, 8):
        save_dcp(tmp_path / f"step-{step}", step=step)
    dry = ftckpt.promote(f"{tmp_path}@7", dry_run=True)
    assert [(m.name, m.before) for m in dry.moves] == [("last-known-good", None)]
    assert not (tmp_path / "last-known-good").exists()
    done = ftckpt.promote(f"{tmp_path}@7")
    assert (done.url, len(done.reports)) == (f"{tmp_path}/step-7", 1)
    assert ftckpt.latest(str(tmp_path), pointer="last-known-good").path == done.url
    file = tmp_path / "step-8" / "__0_0.distcp"
    flip(file, file.stat().st_size // 2)
    refused = ftckpt.promote(f"{tmp_path}/step-8")
    assert (refused.moves, refused.reports[-1].code) == ((), ExitCode.CORRUPT)
    again = ftckpt.restart(str(tmp_path), 64)
    assert (again.path, again.grid) == (f"{tmp_path}/step-7", {})


def test_the_session_of_the_page_is_what_a_reader_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import doctest

    for step in (100, 200, 300):
        save_dcp(tmp_path / "run7" / f"step-{step}", step=step)
    for folder in ("run7-64", "tier2", "deltas", "restored"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parent.parent / "docs" / "python.md"
    blocks = re.findall(r"^```pycon\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    parsed = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, page.name, str(page), 0)
    result = runner.run(parsed, out=said.append)
    assert result.attempted > 10
    assert result.failed == 0, "".join(said)


def test_the_page_for_a_notebook_says_what_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import doctest

    for step in (100, 200, 300):
        save_dcp(tmp_path / "run7" / f"step-{step}", step=step)
        for file in (tmp_path / "run7" / f"step-{step}").iterdir():
            os.utime(file, (step, step))
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).parent.parent / "docs" / "notebook.md"
    blocks = re.findall(r"^```pycon\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    said: list[str] = []
    parsed = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, page.name, str(page), 0)
    result = doctest.DocTestRunner().run(parsed, out=said.append)
    assert result.attempted > 10
    assert result.failed == 0, "".join(said)


def test_the_planning_of_the_page_runs() -> None:
    page = Path(__file__).parent.parent / "docs" / "python.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "planning" in block), names)
    assert 0 < names["plan"].outcome.useful < 1


# Verbs for people at a terminal, and one that takes its process over.
ONLY_VERBS = {"demo", "completions", "config", "help", "guard"}
# What a verb prints or draws, how it ends, and what its process may take, is no matter of a
# function. A function that measures gives the rates of which the advice is made.
OF_THE_SCREEN = {"html", "plot", "top", "stat", "tensor", "tensors", "files", "strict", "match",
                 "sort", "resume", "format", "verbose", "max_memory", "storage_bw",
                 "objects", "watch"}  # fmt: skip
ROWS_SHOWN = {"incidents": {"all"}}  # a report has all of them
# What divides a command line among the processes of many machines is about processes too.
OF_MANY = {"part", "parts", "finish", "finish_last", "cluster", "shares"}
# A caller of a function has its answer, and tells others itself.
OF_WHO_IS_TOLD = {"on_alert", "alert_url", "alert_state"}
FLAGS = {
    name: flags
    for module in (choosing, packing, restarting, retaining, transferring)
    for name, flags in vars(module).items()
    if name.endswith("Flags")
}


FUNCTIONS = [name for name in ftckpt.__all__ if isinstance(getattr(ftckpt, name), FunctionType)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_misspelt_flag_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'dryrun'"):
        getattr(ftckpt, name)("a", "b", dryrun=True)


@pytest.mark.parametrize("verb", sorted(set(verbs.VERBS) - ONLY_VERBS))
def test_the_flags_of_a_verb_are_arguments_of_its_function(verb: str) -> None:
    function = getattr(ftckpt, verb.replace(" ", "_"))
    taken = {one.name for group in groups(function).values() for one in fields(group)}
    for name, parameter in signature(function).parameters.items():
        taken.add(name)
        if parameter.kind is parameter.VAR_KEYWORD:
            group = str(parameter.annotation).removeprefix("Unpack[").removesuffix("]")
            taken |= set(FLAGS[group].__annotations__)
    own = [one for one in verbs.load(verb).params if isinstance(one, click.Option)]
    shared = derive.COMMON | derive.STORAGE | OF_THE_SCREEN | OF_MANY | OF_WHO_IS_TOLD
    shared |= ROWS_SHOWN.get(verb, set())
    # `all` is a function of Python's: here it is `all_`.
    missing = {
        name
        for one in own
        if not one.hidden and (name := one.opts[0].lstrip("-").replace("-", "_")) not in shared
        if not {name, f"{name}_", str(one.name)} & taken
    }
    assert missing == set()
