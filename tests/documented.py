"""The commands of ftckpt that the pages show: in blocks, in prose, in tables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ftckpt.commands.cli import verbs

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
PAGES += sorted(one for one in (DOCS / "jobs").rglob("*") if one.is_file())
SHELLS = ("sh", "bash", "shell", "console", "yaml", "ini", "Dockerfile")
_NAMES_IT = ("import", "from", "install", "-t", "-n", "--name")  # words before a name of something
_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """One command as a page shows it, without the program's name."""

    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    output: tuple[str, ...] = ()
    """What a page shows below it: lines of a session."""
    code: int | None = None
    """What `echo $?` shows behind it; None where a page does not."""

    @property
    def line(self) -> str:
        return shlex.join(self.words)


@dataclass(frozen=True)
class Scene:
    """Commands that a reader pastes at once: one block, or one command in prose."""

    page: str
    number: int
    commands: tuple[Shown, ...]
    language: str
    """Of the block; "" for prose, which may name a verb or an option without what belongs to it."""


def scenes(page: Path) -> list[Scene]:
    """Return every command of ftckpt that a page shows, in its order."""
    text, name = page.read_text(), page.relative_to(ROOT).as_posix()
    if page.suffix != ".md":
        text = f"```sh\n{text}\n```"
    found = [
        (tuple(_of_block(block)), language)
        for language, block in _BLOCK.findall(text)
        if language in SHELLS
    ]
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", _BLOCK.sub("", text)):
        line = re.sub(r"\s+", " ", span.replace("\\|", "|")).strip()
        if re.search(r"\bftckpt [a-z]", line):
            found.append((tuple(in_shell(line)), ""))
        elif any(_is_command(line, verb) for verb in verbs.VERBS):
            found.append((tuple(in_shell(f"ftckpt {line}")), ""))
    with_any = [one for one in found if one[0]]
    return [Scene(name, number, *one) for number, one in enumerate(with_any)]


def _is_command(line: str, verb: str) -> bool:
    """Tell whether words in prose are a verb with its arguments, and no sentence that names it."""
    rest = line.removeprefix(f"{verb} ")
    return rest != line and (" --" in f" {rest}" or re.match(r"[A-Z]{2,}\b", rest) is not None)


def _of_block(block: str) -> Iterator[Shown]:
    lines = re.sub(r"\\\n\s*", " ", block).splitlines()
    if not any(line.startswith("$ ") for line in lines):
        for line in lines:
            yield from in_shell(line)
        return
    waiting: list[Shown] = []
    for line in lines:
        if line == "$ echo $?":
            waiting[-1] = replace(waiting[-1], code=-1)  # the next line says it
        elif line.startswith("$ "):
            yield from waiting
            waiting = in_shell(line[2:])
        elif waiting and waiting[-1].code == -1:
            waiting[-1] = replace(waiting[-1], code=int(line))
        elif waiting:
            waiting[-1] = replace(waiting[-1], output=(*waiting[-1].output, line))
    yield from waiting


def in_shell(line: str) -> list[Shown]:
    """Return the commands of ftckpt in one line of a shell."""
    try:
        scanner = shlex.shlex(line, posix=True, punctuation_chars=True)
        scanner.whitespace_split = True
        words = list(scanner)
    except ValueError:  # a quote that ends in another line
        return []
    found: list[Shown] = []
    for at, word in enumerate(words):
        if word.lstrip("$(") != "ftckpt" or (at and words[at - 1] in _NAMES_IT):
            continue
        rest = words[at + 1 :]
        end = next((n for n, one in enumerate(rest) if set(one) <= set("&|;()<>")), len(rest))
        told = tuple(one.strip("[]") for one in rest[:end] if one not in ("…", "...", "[…]"))
        set_for_it = re.fullmatch(r"(FTCKPT_\w+)=(.*)", words[at - 1] if at else "")
        if told and re.fullmatch(r"[a-z-]+", told[0]):
            found.append(Shown(told, (set_for_it.groups(),) if set_for_it else ()))  # type: ignore[arg-type]
    return found
