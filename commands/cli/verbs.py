"""The verbs: found by name, imported on demand, given the options that every verb has.

A verb is imported when it runs or when its own help is asked for, so that `ftckpt --help` starts as
fast as Python does. A verb of two words (`plan sweep`) is a verb like any other: the command line
is matched against two words first.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ftckpt import plugins
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.storage.settings import read_settings

if TYPE_CHECKING:
    from .derive import Verb

# Summaries stand here so that the list of verbs needs no verb; a test holds them to the modules.
VERBS: dict[str, str] = {
    "inspect": "Show what a checkpoint holds, from headers alone",
    "ls": "List the checkpoints of a root: step, age, size, class, verified or not, pins",
    "du": "Show where a checkpoint's bytes are, by component and layer",
    "cat": "Print a tensor, a part of it, or other state, reading only what that needs",
    "verify": "Check a checkpoint, and name the evidence for the verdict",
    "scrub": "Check a root's checkpoints in turn, the longest unread first; remember each verdict",
    "seal": "Record digests of a checkpoint, so that any later change is found",
    "latest": "Print the newest checkpoint that passes",
    "promote": "Point a root at a checkpoint, after verifying it",
    "restart": "Print a checkpoint that a job of N ranks loads: find, check, reshard if needed",
    "reshard": "Write a checkpoint for another number of ranks, optimizer included",
    "convert": "Write a checkpoint in another format: whole, or one part of it",
    "families": "List the tables of model families, or check one against a model",
    "copy": "Copy a checkpoint between tiers: verified on the way, resumable, visible at the end",
    "sync": "Ship the checkpoints of a root to another tier, the oldest missing one first",
    "repair": "Repair a damaged checkpoint with the blocks of a replica",
    "diff": "Show what changed between two checkpoints, of any formats and topologies",
    "gc": "Drop the checkpoints that no rule keeps: shows a plan, and --apply carries it out",
    "gc undelete": "Restore checkpoints from the trash (without a name: list it)",
    "gc purge": "Free the space of trash that is old enough",
    "rm": "Drop checkpoints by name: shows a plan, and --apply moves them to the trash",
    "pin": "Keep a checkpoint against all retention rules, until the pin is taken away",
    "tag": "Tag a checkpoint, for example to keep it with gc --keep-tag",
    "delta pack": "Write a checkpoint as its difference from another one, or compressed whole",
    "delta unpack": "Write a delta as a full checkpoint, every tensor proven by its digest",
    "delta info": "Show a delta's content, its chain of bases, and the cost of a restore",
    "delta rebase": "Rewrite a delta against another base, or none; every bit stays",
    "plan": "Compute how often to save, what it costs, and what to improve first",
    "plan sweep": "Plan over a range of cluster sizes, save times or failure rates",
    "plan elastic": "Compute batch, accumulation and learning rate for fewer or more GPUs",
    "plan compress": "Compute whether compressing a checkpoint makes the save shorter",
    "plan risk": "Compute how likely a run is to fail, and its time without checkpoints",
    "status": "Show a run's checkpoint health: newest saves, age, cadence, size, alerts",
    "incidents": "Show what failed, how often and where, from job logs, sacct and the guard's log",
    "guard": "Start a job from its newest good checkpoint, watch it, and restart it",
    "replay run": "Run a training and its restart, and compare them bit by bit",
    "replay compare": "Compare the logs of runs, and name the first event that differs",
    "replay audit": "Report what a restart from a checkpoint would lack, without running it",
    "doctor": "Show what this machine and a place can do, and what to do about the rest",
    "demo": "Make a small real checkpoint, damage it, and walk through the incident",
    "completions": "Print the completion script of a shell",
    "config": "Show which settings are active, and where each comes from",
    "help": "Explain exit codes, the environment, or a verb",
}

# The next run of the same command continues what a killed run of these has done.
RESUMABLE = frozenset(
    {"restart", "reshard", "convert", "copy", "sync", "repair"}
    | {"delta pack", "delta unpack", "delta rebase"}
)

# Where a verb is as like a word as this, those that are less like it are not meant.
_ALIKE = 0.75
# What other tools call it. The command line says which of several was meant.
_MEANT = {
    "restore": ("restart", "delta unpack", "repair", "gc undelete"),
    "resume": ("restart", "latest"),
    "undo": ("gc undelete",),
    "list": ("inspect", "status"),
    "show": ("inspect",),
    "info": ("inspect", "delta info"),
    "check": ("verify",),
    "validate": ("verify",),
    "compare": ("diff",),
    "merge": ("convert",),
    "export": ("convert",),
    "cp": ("copy",),
    "delete": ("rm", "gc"),
    "prune": ("gc",),
    "forget": ("gc",),
}


def names() -> list[str]:
    """Return the names of all verbs; those that other packages add come last."""
    return list(dict.fromkeys((*VERBS, *plugins.plugins(plugins.VERBS))))


def all_verbs(*, broken: bool = True) -> dict[str, str]:
    """Return all verbs with their summaries, which those of other packages are loaded for.

    Args:
        broken: whether those are listed that do not work; their summary says so.
    """
    found = {verb: VERBS.get(verb) or summary(verb) for verb in names()}
    failed = () if broken else plugins.failures()
    return {verb: said for verb, said in found.items() if said not in failed}


def is_verb(name: str) -> bool:
    """Say whether there is such a verb; other packages are asked last."""
    return name in VERBS or name in plugins.plugins(plugins.VERBS)


def summary(verb: str) -> str:
    """Return the first line of a verb's help, or that it does not work."""
    try:
        return (load(verb).help or "").strip().partition("\n")[0].rstrip(".")
    except UnsupportedError as error:
        return error.message


def family(first: str) -> list[str]:
    """Return the verbs that begin with a word: `delta pack` and its kin for `delta`."""
    return [verb for verb in names() if verb.partition(" ")[0] == first]


def _near(name: str) -> list[str]:
    """Return the verbs that a word may mean: the second of two (`undelete`), or one mistyped."""
    if name in _MEANT:
        return list(_MEANT[name])
    known: dict[str, list[str]] = {}
    for verb in names():
        for word in dict.fromkeys((verb.partition(" ")[0], verb.rpartition(" ")[2])):
            known.setdefault(word, []).append(verb)
    if name in known:
        return known[name]
    near = get_close_matches(name, known, cutoff=_ALIKE) or get_close_matches(name, known)
    return list(dict.fromkeys(verb for word in near for verb in known[word]))


def resolve(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the verb that a command line begins with, and the words after it.

    Raises:
        UsageError: there is none of that name; it says what may be meant.
    """
    verb = named(words)
    if verb:
        return verb, list(words[len(verb.split()) :])
    name, hint = words[0], "see ftckpt --help"
    known = family(name)
    if known:
        raise UsageError(f"{name} is several verbs: {', '.join(known)}", hint=hint)
    near = _near(name)
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    raise UsageError(f"unknown verb {name!r}{meant}", hint=hint)


def named(words: Sequence[str]) -> str:
    """Return the verb that words begin with, one of two words first, or ""."""
    begins = [" ".join(words[:length]) for length in (2, 1)]
    own = [name for name in begins if name in VERBS]
    return next(iter(own or filter(is_verb, begins)), "")


def load(verb: str) -> Verb:
    """Import a verb's module and return its command.

    Raises:
        UnsupportedError: it is another package's, and does not work.
    """
    from .derive import Verb  # what stands before a verb needs no click

    if verb in VERBS:
        module = import_module(f"ftckpt.commands.{verb.replace(' ', '.')}")
        return Verb(verb, module, _settled)
    module = plugins.load(plugins.VERBS, verb)
    try:
        return Verb(verb, module, _settled)
    except Exception as error:
        raise plugins.failed(plugins.VERBS, verb, error) from error


def _settled(verb: str) -> dict[str, Any]:
    """Return what the user's file of settings has for the options of a verb."""
    if not read_settings().tables:
        return {}
    from ftckpt.commands.config.defaults import defaults_of

    return defaults_of(verb, is_verb)
