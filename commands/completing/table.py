"""What is looked up for which word, without an import of the verbs: that takes as long as a look.

Tests hold these tables to the verbs.
"""

from __future__ import annotations

# Kinds of values. `place`: a path, a URL, `ROOT@STEP` or a remote. `tensor`: of the first argument,
# a checkpoint. Of the first argument, a root: `step` (steps and names), `pinned` and `tagged`
# (names that are), `tag`, and `trash` (names in it).
OPTIONS = {
    "--device": "device",
    "--tensor": "tensor",
    "--match": "tensor",
    "--keep-tag": "tag",
    "--tag": "tag",
    **dict.fromkeys(("--against", "--also", "--like", "--checkpoint", "--baseline"), "place"),
    **dict.fromkeys(("--adapter", "convert --beside"), "place"),
    # The other verbs with an option of this name mean something else.
    **dict.fromkeys(("repair --from", "repair --to", "plan --from"), "place"),
    **dict.fromkeys(("status --tier", "guard --tier"), "place"),
}


def option_kind(verb: str, option: str) -> str:
    """Return the kind of an option's value; "" where nothing is looked up."""
    return OPTIONS.get(f"{verb} {option}", OPTIONS.get(option, ""))


# Arguments of verbs, in their order; the last may repeat. All others are places.
ARGUMENTS = {
    "cat": ("place", "tensor"),
    "gc undelete": ("place", "trash"),
    "pin": ("place", "step"),
    "pin --remove": ("place", "pinned"),
    "rm": ("place", "step"),
    "tag": ("place", "step", "tag"),
    "tag --remove": ("place", "tagged", "tag"),
}
DEVICES = ("cpu", "auto", "cuda")
# Options that take no word after them, of all verbs; `plan --restart T` has no arguments after it.
SWITCHES = frozenset(
    {
        "--advise", "--again", "--all", "--allow-gaps", "--allow-missing-tier", "--anonymous",
        "--any-name", "--apply", "--backwards",
        "--create-root", "--debug", "--delete-corrupt", "--dry-run",
        "--fail-fast", "--files", "--finish", "--finish-last", "--force",
        "--from-master", "-h", "--help", "--include-bases", "--no-check",
        "--integrity", "--json",
        "--layout-state", "--no-lock", "--no-proof", "--objects",
        "--purge-now", "-q", "--quiet", "--reader", "--remember", "--remove",
        "--requester-pays",
        "--restart", "--resume", "--retry-suspected", "--sha256", "--sign", "--signal-group",
        "--signature", "--sigstore", "--simulate",
        "--skip-unverified", "--stop-at-unsafe", "--strict", "--tensors",
        "--trust-recorded", "--unmanaged", "-v", "--verbose", "--wait",
        "--weights", "--yes",
        "--zero-is-done",
    }
)  # fmt: skip
