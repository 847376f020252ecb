"""The man pages: one a verb, and roff that two formatters take without a warning."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ftckpt.commands.cli.verbs import VERBS, load
from ftckpt.commands.manual import pages, write_pages
from ftckpt.commands.manual.contents import paragraphs, plain
from ftckpt.errors import ExitCode
from tests.commands.saves import answer

# The strict judge of each formatter: anything that it says is a fault.
JUDGES = {
    "groff": ["groff", "-man", "-Tutf8", "-ww", "-z"],
    "mandoc": ["mandoc", "-T", "lint", "-W", "warning"],
    "man": ["man", "--warnings", "-E", "UTF-8", "-l", "-Z"],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return write_pages(str(tmp_path_factory.mktemp("man")))


def test_each_verb_has_a_page_with_all_its_options(made: list[str]) -> None:
    texts = dict(pages())
    for verb in VERBS:
        text = texts[f"ftckpt-{verb.replace(' ', '-')}.1"]
        for param in load(verb).params:
            for flag in (*param.opts, *param.secondary_opts):
                if flag.startswith("-") and not getattr(param, "hidden", False):
                    assert plain(flag) in text, (verb, flag)
    codes = texts["ftckpt-exit-codes.7"]
    assert all(f"\\fB{int(code)} {code.name}" in codes for code in ExitCode)
    assert "FTCKPT_RETRY_SECONDS" in texts["ftckpt-environment.7"]
    assert sorted(Path(one).name for one in made) == sorted(texts)


@pytest.mark.parametrize("judge", JUDGES)
def test_a_formatter_takes_them(made: list[str], judge: str) -> None:
    if shutil.which(judge) is None:
        pytest.skip(f"{judge} is not installed")
    # One process for all, except for man, which takes its time for each.
    pages_of_run = made if judge != "man" else made[:2]
    done = subprocess.run(
        [*JUDGES[judge], *pages_of_run], capture_output=True, text=True, timeout=120, check=False
    )
    said = done.stderr if judge != "mandoc" else done.stdout
    assert (done.returncode, said) == (0, "")


def test_what_roff_would_take_as_its_own() -> None:
    assert plain(".SH x") == "\\&.SH x"
    assert plain("'a' -b \\n ~ ^ `") == "\\(aqa\\(aq \\-b \\en \\(ti \\(ha \\(ga"
    assert plain("1…2\nand") == "1\\[u2026]2 and"
    assert paragraphs("a\nb\n\nc", "") == ".PP\na b\n.PP\nc\n"


def test_the_judges_would_notice(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.1"
    wrong.write_text('.TH X 1 2026-11-26 "a" "b"\n.SH NAME\nx \\- y\n.nosuch z\n')
    for judge in ("groff", "mandoc"):
        if shutil.which(judge) is not None:
            done = subprocess.run(
                [*JUDGES[judge], wrong], capture_output=True, text=True, timeout=60, check=False
            )
            assert done.stderr + done.stdout


def test_by_the_command(tmp_path: Path) -> None:
    document = answer("help", "--man", str(tmp_path / "new" / "man"))
    assert document["result"]["code"] == 0
    assert (tmp_path / "new" / "man" / "ftckpt.1").read_text().startswith(".TH FTCKPT 1 ")
