"""From what a shell says of its command line to the lines that its script takes.

The first line is `words`, `nospace` (the word goes on) or `files` (the shell completes names of
files itself); the words follow. For bash and zsh a word is the text to insert.

The words of a command line of bash, and quotes for what is inserted there.

What may stand on the command line, by the kind of a word: steps, tags, tensors, remotes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ftckpt.commands.cli.environment import environment_name
from ftckpt.storage.options import StoreOptions

from .table import ARGUMENTS, DEVICES, SWITCHES, option_kind

if TYPE_CHECKING:
    from ftckpt.discovery.roots import Root


# What a word may hold without a quote in bash and zsh; no letter outside ASCII means anything.
_PLAIN = re.compile(r"[\w./:@%+,=-]", re.ASCII)


def split_line(line: str) -> tuple[list[str], str]:
    """Return the words up to the cursor, without quotes, and the quote that is open there.

    The last word is the one that is being typed; it may be empty. Assignments before the command
    are left out. Nothing is expanded.
    """
    words: list[str] = []
    word: str | None = None
    quote = ""
    letters = iter(line)
    for letter in letters:
        if quote == "'":
            if letter == "'":
                quote = ""
            else:
                word = (word or "") + letter
        elif letter == "\\":
            after = next(letters, "")
            keep = quote and after not in '"\\$`'
            word = (word or "") + ("\\" if keep else "") + after
        elif quote:
            if letter == '"':
                quote = ""
            else:
                word = (word or "") + letter
        elif letter in "'\"":
            quote, word = letter, word or ""
        elif letter.isspace():
            if word is not None:
                words.append(word)
            word = None
        else:
            word = (word or "") + letter
    words.append(word or "")
    while len(words) > 1 and re.match(r"[A-Za-z_]\w*=", words[0]):
        words = words[1:]
    return words, quote


def quoted(text: str, quote: str) -> str:
    """Return a text as it must be typed inside an open quote, or outside any."""
    if quote == "'":
        return text.replace("'", "'\\''")
    if quote == '"':
        return re.sub(r'(["\\$`])', r"\\\1", text)
    return "".join(one if _PLAIN.match(one) or not one.isascii() else f"\\{one}" for one in text)


# More tensors than this are offered by the next part of their names.
_MANY = 100


class Looking(NamedTuple):
    """Where and how to look.

    Attributes:
        verb: the verb of the command line.
        arguments: its arguments before the word.
        stores: how to reach object stores.
        deadline: when nobody waits any more, by the monotonic clock.
    """

    verb: str
    arguments: tuple[str, ...]
    stores: StoreOptions
    deadline: float

    def ask(self, what: str, place: str, look: Callable[[], Iterable[str]]) -> list[str]:
        """Return what is found at a place, or was found there a moment ago and too late."""
        from .cache import remembered

        where = place if "://" in place else os.path.abspath(place)
        return remembered(
            (what, where, self.arguments[1:], *self.stores),
            self.deadline,
            lambda: list(dict.fromkeys(look())),
        )


def candidates(kind: str, current: str, looking: Looking) -> list[str] | None:
    """Return whole words that the current one may become; None for names of files.

    Args:
        kind: of the word, as in `table`.
        current: its beginning.
        looking: where and how to look.
    """
    if kind == "device":
        return [*DEVICES, *_gpus()]
    if kind == "place":
        return _places(current, looking)
    look = _tensors if kind == "tensor" else _IN_A_ROOT.get(kind)
    if look is None:
        return None
    if not looking.arguments:
        return []  # nobody knows of which place
    place = _expanded(looking.arguments[0])
    names = looking.ask(kind, place, lambda: look(place, looking))
    return _next_parts(names, current) if kind == "tensor" else names


def _gpus() -> list[str]:
    names = (one.removeprefix("nvidia") for one in os.listdir("/dev") if one.startswith("nvidia"))
    return [f"cuda:{one}" for one in sorted(n for n in names if n.isdecimal())]


def _expanded(path: str) -> str:
    """Return a path as the shell would pass it: `~` and variables may still stand in it."""
    return os.path.expandvars(os.path.expanduser(path))


def _places(current: str, looking: Looking) -> list[str] | None:
    """Return steps of `ROOT@`, what lies below a URL, and remotes; None for files alone."""
    from ftckpt.storage.remotes import remotes

    root, _, step = current.rpartition("@")
    if root and "/" not in step:
        where = _expanded(root)
        if ":" in where:
            steps = looking.ask("steps", where, lambda: _steps(where, looking))
        else:
            steps = _steps(where, looking)
        return [*(f"{root}@{one}" for one in steps), *_files(current)]
    if "://" in current or (current.partition(":")[0] in (known := remotes()) and ":" in current):
        return _below(current, looking)
    if "/" in current:
        return None
    named = [f"{name}:" for name in known if name.startswith(current)]
    return [*named, *_files(current)] if named else None


def _below(current: str, looking: Looking) -> list[str]:
    """Return what lies in the directory of a URL or of a remote."""
    from ftckpt.storage import open_store
    from ftckpt.storage.store import EntryKind

    cut = current.rfind("/") + 1
    if current[:cut].endswith("://"):
        return []  # a bucket is not guessed
    folder = current[:cut] or current[: current.index(":") + 1]

    def look() -> Iterable[str]:
        names = open_store(folder.rstrip("/"), looking.stores).names("")
        return (f"{n}/" if kind is EntryKind.DIRECTORY else n for n, kind in names.items())

    return [folder + one for one in looking.ask("below", folder, look)]


def _files(current: str) -> list[str]:
    """Return names of files that begin so, directories with a slash."""
    folder, begun = os.path.split(current)
    where = folder.rstrip("/") + "/" if folder else ""
    try:
        with os.scandir(_expanded(folder) or ".") as entries:
            return [
                f"{where}{one.name}{'/' * one.is_dir()}"
                for one in entries
                if one.name.startswith(begun) and (begun or not one.name.startswith("."))
            ]
    except OSError:
        return []


def _root(path: str, looking: Looking) -> Root:
    """Return a root by the names in it alone; no format is asked."""
    from ftckpt.discovery.roots import read_root
    from ftckpt.storage import open_store

    return read_root(open_store(path, looking.stores), lambda _: None)


def _steps(path: str, looking: Looking) -> list[str]:
    """Return what may follow `ROOT@`, by one listing where the names say the steps."""
    from ftckpt.discovery.step_names import step_in_name
    from ftckpt.errors import FtckptError
    from ftckpt.storage import open_store

    try:
        names = open_store(path, looking.stores).names("")
    except FtckptError:  # it may be the name of a file with an @
        return []
    steps = {step for name in names if (step := step_in_name(name)) is not None}
    return ["latest", *map(str, sorted(steps, reverse=True))] if steps else []


def _entries(path: str, looking: Looking) -> Iterable[str]:
    root = _root(path, looking)
    yield "latest"
    for one in root.candidates:
        if not one.staging:
            yield one.path if one.step is None else str(one.step)


def _pinned(path: str, looking: Looking) -> Iterable[str]:
    from ftckpt.retention.records.pins import pins

    return (one.entry for one in pins(_root(path, looking)))


def _tagged(path: str, looking: Looking) -> Iterable[str]:
    from ftckpt.retention.records.tags import tags

    return tags(_root(path, looking))


def _tags(path: str, looking: Looking) -> Iterable[str]:
    from ftckpt.retention.records.tags import tags

    for words in tags(_root(path, looking)).values():
        yield from words


def _trash(path: str, looking: Looking) -> Iterable[str]:
    from ftckpt.retention.trash.open import open_trash

    return (one.entry for one in open_trash(_root(path, looking)).listed() if not one.erasing)


_IN_A_ROOT: dict[str, Callable[[str, Looking], Iterable[str]]] = {
    "step": _entries,
    "pinned": _pinned,
    "tagged": _tagged,
    "tag": _tags,
    "trash": _trash,
}


def _tensors(path: str, looking: Looking) -> Iterable[str]:
    """Return names of tensors, of other state where it has a name of its own, then the keys."""
    from ftckpt.operations.opening import open_checkpoint

    checkpoint = open_checkpoint(path, looking.stores)
    yield from sorted(one.name for one in checkpoint.tensors.values())
    yield from checkpoint.objects
    yield from checkpoint.tensors


def _next_parts(names: list[str], current: str) -> list[str]:
    """Return the names that begin so; of many, the parts up to the next dot."""
    begun = [one for one in names if one.startswith(current)]
    # A key begins with the kind of its tensor; they are for who has typed that.
    begun = [one for one in begun if ":" not in one[len(current) :]] or begun
    if len(begun) <= _MANY:
        return begun
    size = len(current)
    parts = (one[size:].partition(".") for one in begun)
    return list(dict.fromkeys(current + head + dot for head, dot, _ in parts))


# A word that ends in one of these goes on.
_OPEN = ("/", ":", ".")


class Asked(NamedTuple):
    """What is completed.

    Attributes:
        verb: the verb, of two words where `ARGUMENTS` names such a one.
        kind: of the word, as in `table`.
        current: the beginning of the word, without quotes and without `--option=`.
        arguments: the verb's arguments before it.
        given: values of options before it.
    """

    verb: str
    kind: str
    current: str
    arguments: tuple[str, ...]
    given: Mapping[str, str]


def answer(arguments: Sequence[str], deadline: float) -> str:
    """Return the lines for a shell's script.

    Args:
        arguments: `bash LINE TEXT`, `zsh QUOTE TEXT WORD...` or `fish WORD...`: TEXT is the
            beginning of what the shell replaces, as typed; of the words the last is completed.
        deadline: when the shell has no use for it any more, by the monotonic clock.
    """
    shell, *rest = arguments
    quote = text = ""
    if shell == "bash":
        line, text = rest
        words, quote = split_line(line)
        words = words[1:]
    elif shell == "zsh":
        quote, text, *words = rest
    else:
        words = list(rest)
    asked = parse(words)
    looking = Looking(asked.verb, asked.arguments, _stores(asked), deadline)
    found = candidates(asked.kind, asked.current, looking)
    if found is None:
        return "files\n"
    # A name in a store must not move the cursor, nor end a line.
    begun = [one for one in found if one.startswith(asked.current) and one.isprintable()]
    goes_on = len(begun) == 1 and begun[0].endswith(_OPEN)
    if shell == "fish":
        # A word with a description of its own, if an empty one, is not given the option's.
        shown = [f"{one}\t" for one in begun]
    else:
        shown = [text + quoted(one[len(asked.current) :], quote) for one in begun]
    return "\n".join(["nospace" if goes_on else "words", *shown, ""])


def parse(words: Sequence[str]) -> Asked:
    """Find out what the last of the words after the program's name is."""
    *before, current = words
    arguments: list[str] = []
    given: dict[str, str] = {}
    waiting = ""
    options = True
    for word in before:
        if waiting:
            given[waiting] = word
            waiting = ""
        elif options and word == "--":
            options = False
        elif options and len(word) > 1 and word.startswith("-"):
            name, joined, value = word.partition("=")
            if joined:
                given[name] = value
            elif name not in SWITCHES:
                waiting = name
        else:
            arguments.append(word)
    size = 2 if " ".join(arguments[:2]) in ARGUMENTS else 1
    verb, arguments = " ".join(arguments[:size]), arguments[size:]
    if options and not waiting and current.startswith("--"):
        waiting, _, current = current.partition("=")
    kinds = ARGUMENTS.get(verb, ("place",))
    if "--remove" in before:
        kinds = ARGUMENTS.get(f"{verb} --remove", kinds)
    kind = kinds[min(len(arguments), len(kinds) - 1)] if not waiting else option_kind(verb, waiting)
    return Asked(verb, kind, current, tuple(arguments), given)


def _stores(asked: Asked) -> StoreOptions:
    """Return how to reach object stores: as said on the line or in the environment, impatiently."""

    def said(flag: str) -> str:
        variable = environment_name(flag)
        return asked.given.get(f"--{flag}", os.environ.get(variable, ""))

    return StoreOptions(
        endpoint=said("endpoint"),
        profile=said("profile"),
        region=said("region"),
        retry_seconds=3,
        timeout=5,
    )
