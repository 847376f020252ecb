"""What is said of a command line that cannot be read: in plain words, with what to type instead.

Nothing runs on a guess: an unknown verb, and an option that a verb lacks, are refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from shlex import quote
from typing import TYPE_CHECKING, cast

from ftckpt.errors import UsageError
from ftckpt.storage.secrets import hidden

from .environment import HELP
from .verbs import VERBS, family, is_verb, load, named, names

if TYPE_CHECKING:
    import click

    from .derive import Verb

# Where a word is as like a name as this, names that are less like it are not meant.
_ALIKE = 0.75
# A word that is longer is not repeated whole.
_SHOWN = 60

# What a verb does, for people who call it by another word.
DOES = {
    "cat": "prints a tensor",
    "convert": "writes a checkpoint in another format",
    "copy": "copies a checkpoint",
    "delta pack": "stores a checkpoint as a difference",
    "delta unpack": "writes a delta as a full checkpoint",
    "diff": "compares two checkpoints",
    "doctor": "tries what this machine can do",
    "du": "shows where the bytes are",
    "gc": "shows what it would drop by rules, and drops it with --apply",
    "gc purge": "frees the space of the trash",
    "gc undelete": "restores what was dropped",
    "guard": "starts a job and restarts it",
    "help": "explains a verb",
    "inspect": "shows what a checkpoint holds",
    "latest": "prints the newest good checkpoint",
    "ls": "lists the checkpoints of a root",
    "pin": "keeps a checkpoint, and pin --remove lets it go",
    "plan": "computes how often to save",
    "promote": "points a root at a checkpoint",
    "repair": "mends a checkpoint from a replica",
    "reshard": "writes a checkpoint for other ranks",
    "restart": "prints a checkpoint that a job of N ranks loads",
    "rm": "shows what of the named checkpoints it would drop, and drops it with --apply",
    "scrub": "checks the checkpoints of a root in turn",
    "seal": "records digests of a checkpoint",
    "status": "shows how the saves of a run are doing",
    "sync": "copies the checkpoints of a root to another tier",
    "tag": "tags a checkpoint, and tag --remove takes tags away",
    "verify": "checks a checkpoint",
}
# What other tools call it.
TRIED = {
    "archive": ("copy", "delta pack"),
    "audit": ("replay audit",),
    "backup": ("copy", "sync"),
    "check": ("verify",),
    "checksum": ("seal", "verify"),
    "clean": ("gc",),
    "cleanup": ("gc",),
    "compare": ("diff",),
    "compress": ("delta pack",),
    "cp": ("copy",),
    "del": ("rm", "gc"),
    "delete": ("rm", "gc"),
    "describe": ("inspect",),
    "dir": ("ls",),
    "download": ("copy",),
    "dump": ("cat",),
    "export": ("convert",),
    "expire": ("gc",),
    "find": ("ls", "latest"),
    "fix": ("repair",),
    "forget": ("gc",),
    "fsck": ("verify",),
    "hash": ("seal",),
    "health": ("status",),
    "info": ("inspect",),
    "keep": ("pin",),
    "last": ("latest",),
    "list": ("ls",),
    "man": ("help",),
    "merge": ("convert",),
    "mirror": ("sync",),
    "newest": ("latest",),
    "prune": ("gc",),
    "purge": ("gc purge",),
    "pins": ("ls",),
    "pull": ("copy", "sync"),
    "push": ("copy", "sync"),
    "recover": ("gc undelete", "repair"),
    "remove": ("rm", "gc"),
    "restore": ("restart", "gc undelete", "delta unpack"),
    "resume": ("restart", "latest"),
    "revert": ("promote", "gc undelete"),
    "rollback": ("promote", "gc undelete"),
    "rsync": ("sync",),
    "run": ("guard",),
    "scan": ("verify",),
    "show": ("inspect",),
    "sign": ("seal",),
    "size": ("du",),
    "start": ("guard",),
    "stat": ("inspect",),
    "stats": ("status",),
    "test": ("verify",),
    "unpin": ("pin",),
    "untag": ("tag",),
    "undo": ("gc undelete",),
    "upload": ("copy", "sync"),
    "validate": ("verify",),
    "view": ("inspect",),
}
# Options of other tools, and what stands for them here: the first that the verb has.
_OPTIONS = {
    "--check": ("--level", "--dry-run"),
    "--checksum": ("--level",),
    "--concurrency": ("--jobs",),
    "--content": ("--level",),
    "--deep": ("--level",),
    "--delete": ("--apply",),
    "--destination": ("--to",),
    "--execute": ("--apply",),
    "--fast": ("--level", "--sample"),
    "--full": ("--level",),
    "--gpus": ("--world",),
    "--keep": ("--keep-last",),
    "--last": ("--keep-last", "--newest"),
    "--memory": ("--max-memory",),
    "--nproc": ("--world",),
    "--output": ("--to", "--json"),
    "--overwrite": ("--force",),
    "--parallel": ("--jobs",),
    "--processes": ("--jobs",),
    "--quick": ("--level", "--sample"),
    "--ranks": ("--world",),
    "--rate": ("--limit-rate",),
    "--silent": ("--quiet",),
    "--threads": ("--jobs",),
    "--verify": ("--level",),
    "--workers": ("--jobs",),
    "--world-size": ("--world",),
    "-f": ("--force",),
    "-n": ("--dry-run",),
    "-p": ("--jobs",),
    "-y": ("--yes",),
}
# The same, where no option stands for it.
_ADVICE = {
    **dict.fromkeys(
        ("--color", "--colour", "--no-color", "--no-colour"),
        "colours are shown on terminals alone; NO_COLOR=1 turns them off",
    ),
    **dict.fromkeys(("--dry-run", "-n"), "without --apply nothing changes"),
    **dict.fromkeys(("--format", "-o", "--output"), "--json prints the answer for programs"),
    **dict.fromkeys(("--recursive", "-r", "-R"), "what is below a root is found without it"),
    **dict.fromkeys(("--verbose", "-v", "-vv"), "what is known is said without it; --json has all"),
    **dict.fromkeys(
        ("--root", "--path", "--dir", "--checkpoint"), "a place stands by itself, without an option"
    ),
    "--step": "a step is named as ROOT@STEP",
    "--version": "ftckpt --version",
    "-V": "ftckpt --version",
}


def resolve(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the verb that a command line begins with, and the words after it.

    Raises:
        UsageError: there is none of that name; it says what may be meant.
    """
    verb = named(words)
    if not verb:
        raise unknown_verb(words)
    rest = list(words[len(verb.split()) :])
    if rest and len(family(verb)) > 1:
        _refuse_mistyped(verb, rest[0])
    return verb, rest


def unknown_verb(words: Sequence[str]) -> UsageError:
    """Return the error for a command line that begins with no verb."""
    name = words[0]
    small = name.lower()
    members = family(name)
    if members:
        asked = f'ftckpt has no verb "{_said(" ".join(words[:2]))}"' if words[1:2] else name
        joined = ": there are" if words[1:2] else " is several verbs:"
        return UsageError(f"{asked}{joined} {_listed(members, 'and')}")
    what = f'ftckpt has no verb "{_said(name)}"'
    begins = [" ".join(words[:length]).lower() for length in (2, 1)]
    meant = next(filter(is_verb, begins), "") or (small if family(small) else "")
    if meant:
        return UsageError(f"{what}: verbs are written in small letters: ftckpt {meant}")
    if small in TRIED:
        does = (f"ftckpt {verb} {DOES[verb]}" if verb in DOES else f"ftckpt {verb}"
                for verb in TRIED[small])  # fmt: skip
        return UsageError(f"{what}: {'; '.join(does)}")
    if any(sign in name for sign in "/@:") or os.path.exists(name):
        return UsageError(
            f'"{_said(name)}" is a place, and a verb comes first: ftckpt ls {quote(_said(name))}'
        )
    near = _near(small)
    if near:
        return UsageError(f"{what}: did you mean {_listed([f'ftckpt {one}' for one in near])}?")
    return UsageError(f"{what}: ftckpt --help lists the verbs")


def _refuse_mistyped(verb: str, word: str) -> None:
    """Refuse what is nearly the second word of a verb, `gc undelte`, and names no place.

    Raises:
        UsageError: it says which verb may be meant.
    """
    seconds = [one.split()[-1] for one in family(verb) if one != verb]
    near = _closest(word.lower(), seconds, 1, _ALIKE)
    if near and not any(sign in word for sign in "/@:.") and not os.path.exists(word):
        what = f'ftckpt has no verb "{verb} {_said(word)}": did you mean ftckpt {verb} {near[0]}?'
        raise UsageError(what, hint=f"a place of this name is ./{_said(word)}")


def _near(name: str) -> list[str]:
    """Return the verbs that a word may mean: the second of two (`undelete`), or one mistyped."""
    known: dict[str, list[str]] = {}
    for verb in names():
        for word in dict.fromkeys((verb.partition(" ")[0], verb.rpartition(" ")[2])):
            known.setdefault(word, []).append(verb)
    if name in known:
        return known[name]
    near = _closest(name, known, cutoff=_ALIKE) or _closest(name, known)
    return list(dict.fromkeys(verb for word in near for verb in known[word]))


def misplaced(word: str) -> UsageError:
    """Return the error for an option before the verb that not every verb has."""
    flag = word.partition("=")[0]
    if flag in _ADVICE:
        return UsageError(f"ftckpt has no option {_said(flag)}: {_ADVICE[flag]}")
    from .derive import before_the_verb

    common = [name for one in before_the_verb() for name in one.opts] + ["--version", *HELP]
    near = _closest(flag.lower(), common, 1, _ALIKE)
    if near:
        return UsageError(f"ftckpt has no option {_said(flag)}; did you mean {near[0]}?")
    return UsageError(
        f"{_said(flag)} cannot stand before the verb: only options that every verb has can",
        hint=f"write it after the verb: ftckpt VERB {_said(word)}",
    )


def refused(error: click.UsageError, verb: Verb, words: Sequence[str]) -> UsageError:
    """Return the error for a command line that click cannot parse.

    Args:
        error: of click, or of a type of `derive`.
        verb: whose line it is.
        words: the line after the verb.
    """
    from click import exceptions

    see = f"ftckpt {verb.name} -h shows how it is used"
    joined = _one_dash(words, verb)
    if joined:
        return UsageError(f"{joined} is written with two minus signs: -{joined}", hint=see)
    if isinstance(error, exceptions.NoSuchOption):
        return _no_option(error.option_name, verb, see)
    if isinstance(error, exceptions.BadOptionUsage):
        name = error.option_name
        param = _of(name, verb)
        if param is not None and param.is_flag:
            return UsageError(f"{name} takes no value: write {name} alone", hint=see)
        return UsageError(f"{name} needs a value: {_form(param)}", hint=see)
    if isinstance(error, exceptions.MissingParameter):
        return _missing(error, verb)
    if isinstance(error, exceptions.BadParameter) and error.param is not None:
        return UsageError(f"{_called(error.param, error.ctx)} {error.message}", hint=see)
    extra = re.fullmatch(r"Got unexpected extra arguments? *\(?s?\)? \((.*)\)\.?", error.message)
    if extra:
        return _too_many(extra[1], words, verb, see)
    return UsageError(" ".join(error.message.split()).rstrip("."), hint=see)


def _no_option(name: str, verb: Verb, see: str) -> UsageError:
    from .derive import SET

    what = f"{verb.name} has no option {_said(name)}"
    known = [one for param in verb.params for one in param.opts if one.startswith("-")] + [*HELP]
    assumed = [one.partition(" ")[2] for one in known if one.startswith(f"{SET} ")]
    if assumed and name.partition(" ")[0] == SET:
        asked = name.partition(" ")[2]
        near = _closest(asked, assumed, 1)
        meant_one = f"; did you mean {near[0]}?" if near else ""
        unknown = f", and it has no {_said(asked)}{meant_one}" if asked else ""
        return UsageError(
            f"{SET} takes NAME=VALUE{unknown}", hint=f"names are {_listed(assumed, 'and')}"
        )
    known = [one for one in known if not one.startswith(f"{SET} ")]
    meant = [one for one in _OPTIONS.get(name, ()) if one in known][:1]
    if (
        not meant
        and name in _ADVICE
        and not (name in ("--dry-run", "-n") and "--apply" not in known)
    ):
        return UsageError(f"{what}: {_ADVICE[name]}", hint=see)
    spelled = name.lower().replace("_", "-")
    meant = meant or [one for one in known if one == spelled]
    meant = meant or _closest(spelled, known, 3, _ALIKE)
    if meant:
        return UsageError(f"{what}; did you mean {_listed(meant)}?", hint=see)
    others = [one for one in VERBS if name in {o for p in load(one).params for o in p.opts}]
    if others and name.startswith("--"):
        more = f" and {len(others) - 3} others" if len(others) > 4 else ""
        shown = others[:3] if more else others
        return UsageError(f"{what}; it is one of {', '.join(shown)}{more}", hint=see)
    return UsageError(what, hint=see)


def _missing(error: click.MissingParameter, verb: Verb) -> UsageError:
    param = error.param
    example = next((line for line, _ in verb.examples if " && " not in line), "")
    hint = f"for example: {example}" if example else f"ftckpt {verb.name} -h shows how it is used"
    if param is None:
        return UsageError(f"{verb.name} needs more than that", hint=hint)
    about = getattr(param, "about", "") or getattr(param, "help", "")
    name = _long(param) if param.param_type_name == "option" else ""
    shown = f"{name} {_metavar(param)}".strip()
    return UsageError(f"{verb.name} needs {shown}: {_begun_small(about)}", hint=hint)


def _too_many(extra: str, words: Sequence[str], verb: Verb, see: str) -> UsageError:
    what = f"more arguments than {verb.name} takes: {_said(extra)}"
    known = {one for param in verb.params for one in param.opts}
    dashes = "\u2013\u2014\u2212"
    for before, word in zip(["", *words], words, strict=False):
        if word[:1] and word[0] in dashes:
            option = _said(word.lstrip(dashes))
            return UsageError(
                what, hint=f"that is a text processor's dash, not two minus signs: --{option}"
            )
        if f"--{word}" in known:
            return UsageError(what, hint=f"an option begins with two minus signs: --{word}")
        step = re.fullmatch(r"@?(\d+|latest|newest)", word)
        if step and before[:1] not in ("", "-") and not extra.startswith(before):
            hint = f"a step is written with its root: {_said(before.rstrip('@'))}@{step[1]}"
            return UsageError(what, hint=hint)
    return UsageError(what, hint=f"a path with spaces needs quotes; {see}")


def _one_dash(words: Sequence[str], verb: Verb) -> str:
    """Return a word such as `-json`, which would be read as `-j son`."""
    end = words.index("--") if "--" in words else len(words)
    known = {one for param in verb.params for one in param.opts} | {*HELP}
    for word in words[:end]:
        flag = word.partition("=")[0]
        if re.fullmatch(r"-[a-z][a-z-]+", flag) and f"-{flag}" in known:
            return flag
    return ""


def _of(name: str, verb: Verb) -> click.Option | None:
    found = next((one for one in verb.params if name in one.opts), None)
    return cast("click.Option | None", found)


def _form(param: click.Option | None) -> str:
    """Return what a value looks like."""
    if param is None:
        return "it is the word that follows"
    words = getattr(param, "words", ())
    if words:
        return _listed(words)
    return f"{_metavar(param)}, {_begun_small(param.help)}"


def _metavar(param: click.Parameter) -> str:
    words = getattr(param, "words", ())
    if param.metavar is None and words:
        return f"{{{'|'.join(words)}}}"
    return param.metavar or str(param.name).upper()


def _long(param: click.Parameter) -> str:
    return next(one for one in param.opts if one.startswith("--"))


def _begun_small(text: str | None) -> str:
    text = (text or "").rstrip(".")
    return text if text[1:2].isupper() else f"{text[:1].lower()}{text[1:]}"


def _called(param: click.Parameter, ctx: click.Context | None) -> str:
    """Return what a parameter is called, and the variable that has set it."""
    if param.param_type_name == "argument":
        return str(param.metavar or param.name).upper()
    name = _long(param)
    source = ctx.get_parameter_source(str(param.name)) if ctx is not None else None
    if source is not None and source.name == "ENVIRONMENT":
        return f"{param.envvar} ({name})"
    return name


def _listed(words: Sequence[str], last: str = "or") -> str:
    *most, end = words
    return f"{', '.join(most)} {last} {end}" if most else end


def _said(word: str) -> str:
    """Return a word of the line as it may be printed."""
    word = hidden(word)
    return word if len(word) <= _SHOWN else f"{word[:_SHOWN]}…"


def _closest(word: str, known: Iterable[str], most: int = 3, cutoff: float = 0.6) -> list[str]:
    from difflib import get_close_matches  # half a millisecond that a right line does not wait for

    return get_close_matches(word, list(known), most, cutoff)
