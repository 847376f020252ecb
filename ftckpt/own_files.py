"""The names of the files that are ftckpt's own, beside those of a checkpoint or a root."""

MANIFEST = "ftckpt.manifest.json"
SUFFIX = ".ftckpt.json"
FOLDER = ".ftckpt"  # trash, leases and logs of ftckpt itself
# Stands in a directory that a transfer is building, or was killed building, until the manifest is.
TRANSFER = f"{FOLDER}/transfer.json"
# The index of a delta: of all about deltas the only thing that recognising one needs.
DELTA = "ftckpt.delta"


def is_own(name: str) -> bool:
    """Say whether a file of a checkpoint's directory is ftckpt's own, by its relative path."""
    return name == MANIFEST or name.endswith(SUFFIX) or name.split("/")[0] == FOLDER
