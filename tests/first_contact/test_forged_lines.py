"""A name of a file, a tensor or a root forges no line of an answer."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from ftckpt.commands.cli.render import block, pairs, printable, table
from tests.first_contact.lines import printed

FORGED = "ok: everything passed, all good"
EVIL = f"w\x1b[2J\r\n{FORGED}\n"
ODD = "".join(map(chr, (0x200B, 0x200C, 0x200D, 0x2060, 0xFEFF, 0x202E, 0x2066, 0xAD, 0xE0041)))


def save(path: Path, shift: float = 0.0, name: str = EVIL) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {name: torch.arange(4) + shift, "step": 5, f"note{name}": f"of {shift}{name}"}
    torch.save(state, path)
    return path


def require_clean(*words: str) -> None:
    """Run a command, and demand that no line of it is the forged one, nor holds an odd letter."""
    found = printed(*words)
    said = found.out + found.err
    assert said, words
    for line in said.split("\n"):
        assert not line.startswith(FORGED), (words, said)
        for letter in line:
            assert unicodedata.category(letter) not in ("Cc", "Cf"), (words, line)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a root whose own path, whose checkpoints and whose tensors are named so."""
    place = tmp_path / f"run{EVIL.replace('/', '')}{ODD}"
    for step in (5, 6, 7):
        save(place / f"step-{step}.pt", step, EVIL + ODD)
    return place


COMMANDS = {
    "verify": ("verify", "{root}/step-5.pt"),
    "verify all": ("verify", "{root}", "--all"),
    "inspect": ("inspect", "{root}/step-5.pt", "--tensors", "--files"),
    "ls": ("ls", "{root}"),
    "du": ("du", "{root}/step-5.pt"),
    "cat": ("cat", "{root}/step-5.pt", EVIL + ODD),
    "cat stats": ("cat", "{root}/step-5.pt", EVIL + ODD, "--stats"),
    "diff": ("diff", "{root}/step-5.pt", "{root}/step-6.pt"),
    "convert": ("convert", "{root}/step-5.pt", "{root}/out", "--to", "dcp", "--dry-run", "-v"),
    "sync": ("sync", "{root}", "{root}-tier"),
    "sync dry": ("sync", "{root}", "{root}-tier2", "--dry-run"),
    "pin": ("pin", "{root}", "step-5.pt", "--reason", EVIL, "--owner", f"me{EVIL}"),
    "pins": ("ls", "{root}", "--all"),
    "tag": ("tag", "{root}", "step-5.pt", "best"),
    "plan": ("gc", "{root}", "--keep-last", "1"),
    "apply": ("gc", "{root}", "--keep-last", "1", "--apply"),
    "undelete": ("gc", "undelete", "{root}"),
    "purge": ("gc", "purge", "{root}"),
    "status": ("status", "{root}"),
    "latest": ("latest", "{root}/nothing"),
    "promote": ("promote", "{root}/step-7.pt"),
    "seal": ("seal", "{root}/step-7.pt"),
    "delta": ("delta", "pack", "{root}/step-6.pt", "{root}/step-7.pt", "{root}/delta"),
    "copy": ("copy", "{root}/step-7.pt", "{root}-copy/step-7.pt"),
    "doctor": ("doctor", "{root}"),
    "config": ("config", "verify", "{root}"),
    "unpin": ("pin", "{root}", "step-9", "--remove"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_answer_has_a_forged_line(name: str, root: Path) -> None:
    if name in ("pins", "unpin"):
        printed("pin", str(root), "step-5.pt", "--reason", EVIL, "--owner", "me")
    if name in ("undelete", "purge"):
        printed("gc", str(root), "--keep-last", "1", "--apply")
    require_clean(*(word.replace("{root}", str(root)) for word in COMMANDS[name]))


@pytest.mark.filterwarnings("ignore:constrained_layout")
@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_a_picture_is_well_formed_whatever_names_it_shows(
    suffix: str, root: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"x.{suffix}"
    for words in (
        ("diff", f"{root}/step-5.pt", f"{root}/step-6.pt"),
        ("status", str(root)),
    ):
        found = printed(*words, "--plot", str(file))
        assert file.exists(), found
        text = file.read_text()
        for letter in re.sub(r"[\n\t]", "", text):
            assert unicodedata.category(letter) not in ("Cc", "Cf"), hex(ord(letter))
        if suffix == "svg":
            ElementTree.fromstring(text)
        for made in tmp_path.glob("x.*"):
            made.unlink()


def test_a_value_is_one_line_and_a_block_is_ours() -> None:
    assert printable(EVIL).count("\n") == 0
    assert table(["name"], [[EVIL]]).split("\n")[2:] == [printable(EVIL)]
    assert pairs([(EVIL, EVIL)]).count("\n") == 0
    assert block(EVIL, table(["a"], [["b"]])).split("\n") == [printable(EVIL), "a", "-", "b"]
    assert printable(ODD).isascii()
