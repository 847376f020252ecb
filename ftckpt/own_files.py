"""The files that are ftckpt's own: their names, and which paths a record in them may hold.

A user who may write the root may plant a record there. A record tells which files to read, restore
or delete, so `own_path` holds each path in it to the entry that the record is about.
"""

from ftckpt.errors import UnsafeError

MANIFEST = "ftckpt.manifest.json"
SUFFIX = ".ftckpt.json"
FOLDER = ".ftckpt"  # trash, leases and logs of ftckpt itself
# Stands in a directory that a transfer is building, or was killed building, until the manifest is.
TRANSFER = f"{FOLDER}/transfer.json"
# The index of a delta: of all about deltas the only thing that recognising one needs.
DELTA = "ftckpt.delta"
# What `seal` writes for others to check by: no format counts them, and others write them too.
VOUCHERS = frozenset({"model.sig", "SHA256SUMS"})
# `step-1000.ftckpt-weights` holds the weights of `step-1000`, which gc has thinned. It counts while
# `step-1000` does not stand, so that a root shows one checkpoint of the step at every moment.
WEIGHTS = ".ftckpt-weights"
# What is written under a name that begins so is renamed or deleted a moment later.
TEMPORARY = ".ftckpt-tmp-"


def is_own(name: str) -> bool:
    """Say whether a file of a checkpoint's directory is ftckpt's own, by its relative path."""
    return name == MANIFEST or name.endswith(SUFFIX) or name.split("/")[0] == FOLDER


def is_leftover(name: str) -> bool:
    """Whether a name (or the last element of a path) is a killed writer's temporary file."""
    return name.rpartition("/")[2].startswith(TEMPORARY)


def own_path(path: object, entry: str, *, named_by: str) -> str:
    """Return a path out of a record of ours if it is the record's own entry or lies below it.

    Every reader of a record that tells which files to read, write, restore or delete calls this for
    each path, before it touches anything. The manifest beside a file belongs to the file.

    Args:
        path: what the record says; it may be anything.
        entry: the entry that the record is about, spelled as the paths in it; "" allows every path
            that does not climb out of where the record counts.
        named_by: the record, for the message.

    Raises:
        UnsafeError: it means something else, or nothing plain.
    """
    plain = (
        isinstance(path, str)
        and "\0" not in path
        and not any(part in ("", ".", "..") for part in path.split("/"))
    )
    own = plain and (
        not entry or path in (entry, entry + SUFFIX) or str(path).startswith(f"{entry}/")
    )
    if not own:
        what = f"{entry!r} or below it" if entry else "a path below it"
        raise UnsafeError(
            f"{named_by} names {str(path)[:255]!r}, which is not {what}: nothing is touched",
            hint="ftckpt did not write this; see who may write there, then remove the record",
            kind="unsafe-path",
            file=named_by,
        )
    assert isinstance(path, str)
    return path


def weights_of(name: str) -> str:
    """Return the name of the checkpoint whose weights a name is for; "" for any other name."""
    return name.removesuffix(WEIGHTS) if name.endswith(WEIGHTS) else ""


_BEGUN = "a transfer to "
# A killed transfer does not record which verb it was.
GO_ON = (
    "the command that began it (ftckpt copy, sync, convert or reshard, with the same arguments) "
    "goes on where it was"
)


def under_way(url: str) -> str:
    """Return the sentence about a place to which a transfer was begun and not finished."""
    return f"{_BEGUN}{url} is under way, or was killed"


def is_under_way(why: str) -> bool:
    """Say whether a reason is that of `under_way`: a copy of ftckpt's, not a trainer's save."""
    return why.startswith(_BEGUN)
