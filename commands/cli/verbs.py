"""The verbs: found by name, imported on demand, given the options that every verb has.

A verb is imported when it runs or when its own help is asked for, so that `ftckpt --help` starts as
fast as Python does. A verb of two words (`plan sweep`) is a verb like any other: the command line
is matched against two words first.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ftckpt import plugins
from ftckpt.errors import UnsupportedError
from ftckpt.storage.settings import read_settings

if TYPE_CHECKING:
    from .derive import Verb

# Verbs under the headings of `ftckpt --help`, each with its summary: the list needs no verb. A test
# holds the summaries to the modules, and to one line of 80 columns.
HEADINGS: dict[str, dict[str, str]] = {
    "Look": {
        "ls": "List the checkpoints of a root: step, age, size, verified, pins",
        "status": "Show a run's checkpoint health: age, cadence, size, alerts",
        "inspect": "Show what a checkpoint holds, from headers alone",
        "du": "Show where a checkpoint's bytes are, by component and layer",
        "cat": "Print a tensor, a part of it, or other state",
        "diff": "Show what changed between two checkpoints of any formats",
    },
    "Trust": {
        "verify": "Check a checkpoint, and name the evidence for the verdict",
        "scrub": "Check a root's checkpoints in turn, the longest unread first",
        "seal": "Record digests of a checkpoint, so that a later change is found",
        "repair": "Repair a damaged checkpoint with the blocks of a replica",
    },
    "Change": {
        "reshard": "Write a checkpoint for another number of ranks",
        "convert": "Write a checkpoint in another format: whole, or one part of it",
        "families": "List the tables of model families, or try one on a model",
        "delta pack": "Write a checkpoint as its difference from another, or compressed",
        "delta unpack": "Write a delta as a full checkpoint, every tensor proven",
        "delta info": "Show a delta's content, its bases, and the cost of a restore",
        "delta rebase": "Rewrite a delta against another base, or none",
    },
    "Keep": {
        "copy": "Copy a checkpoint between tiers: verified, resumable",
        "sync": "Ship the checkpoints of a root to another tier, oldest first",
        "gc": "Drop the checkpoints that no rule keeps: a plan, then --apply",
        "gc undelete": "Restore checkpoints from the trash (without a name: list it)",
        "gc purge": "Free the space of trash that is old enough",
        "rm": "Drop checkpoints by name: a plan, then --apply",
        "pin": "Keep a checkpoint against all rules, until its pin is removed",
        "tag": "Tag a checkpoint, for example to keep it with gc --keep-tag",
    },
    "Run": {
        "latest": "Print the newest checkpoint that passes",
        "restart": "Print a checkpoint that N ranks load: find, check, reshard",
        "guard": "Start a job from its newest good checkpoint, and restart it",
        "promote": "Point a root at a checkpoint, after verifying it",
        "replay run": "Run a training and its restart, and compare them bit by bit",
        "replay compare": "Compare the logs of runs, and name the first difference",
        "replay audit": "Report what a restart from a checkpoint would lack",
    },
    "Learn": {
        "plan": "Compute how often to save, what it costs, and what to improve",
        "plan sweep": "Plan over a range of cluster sizes, save times or failure rates",
        "plan elastic": "Compute batch and learning rate for fewer or more GPUs",
        "plan compress": "Compute whether compressing a checkpoint makes a save shorter",
        "plan risk": "Compute how likely a run is to fail, and its time unsaved",
        "incidents": "Show what failed, how often and where, from the logs of jobs",
        "doctor": "Show what this machine and a place can do, and what is wrong",
        "demo": "Make a small real checkpoint, damage it, and find the damage",
        "config": "Show which settings are active, and where each comes from",
        "completions": "Print the completion script of a shell",
        "help": "Explain exit codes, the environment, or a verb",
    },
}
VERBS: dict[str, str] = {verb: said for verbs in HEADINGS.values() for verb, said in verbs.items()}
# Verbs of two words that the list shows in one line.
FAMILIES = {
    "delta": "Store checkpoints as differences: pack, unpack, info, rebase",
    "replay": "Prove that a restart repeats a run: run, compare, audit",
    "plan": "Compute how often to save (also sweep, elastic, compress, risk)",
}

# The next run of the same command continues what a killed run of these has done.
RESUMABLE = frozenset(
    {"restart", "reshard", "convert", "copy", "sync", "repair"}
    | {"delta pack", "delta unpack", "delta rebase"}
)


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

    others = tuple(one for one in family(verb.split()[0]) if one != verb)
    if verb in VERBS:
        module = import_module(f"ftckpt.commands.{verb.replace(' ', '.')}")
        return Verb(verb, module, _settled, others)
    module = plugins.load(plugins.VERBS, verb)
    try:
        return Verb(verb, module, _settled, others)
    except Exception as error:
        raise plugins.failed(plugins.VERBS, verb, error) from error


def _settled(verb: str) -> dict[str, Any]:
    """Return what the user's file of settings has for the options of a verb."""
    if not read_settings().tables:
        return {}
    from ftckpt.commands.config.defaults import defaults_of

    return defaults_of(verb, is_verb)
