"""The names of Orbax's files."""

from __future__ import annotations

# Written last: the save is finished.
COMMIT = "commit_success.txt"
# Of a step: its items, and the times at which its save began and ended.
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
# Of a tree of arrays: its leaves; the mesh of each; strings, which are no arrays.
METADATA = "_METADATA"
SHARDING = "_sharding"
STRINGS = "_strings.json"
MANIFEST = "manifest.ocdbt"
# Of versions before 2024: a msgpack of the whole tree.
AGGREGATE = "checkpoint"
# Of Orbax's second interface: an empty file beside the items.
MARKER = "orbax.checkpoint"
# The file of an item of JSON: of the first interface, of the second, and of metrics.
JSON_FILES = ("metadata", "data.json", "metrics")
JSON_HANDLER = r"Json\w*Handler$|\.Metrics\w*Handler$"
DESCRIPTOR = "descriptor"
# Ends the names of directories that are still being written.
TEMPORARY = ".orbax-checkpoint-tmp"

PROCESS = r"ocdbt\.process_(?:replica_)?([A-Za-z0-9]+)/manifest\.ocdbt"
# What belongs to a tree of arrays, whether its values are reached or not: each process has a
# database of its own, and the merged one refers to its data files.
BELONGS = (
    r"(?:ocdbt\.process_(?:replica_)?[A-Za-z0-9]+/)?"
    r"(?:manifest\.ocdbt|(?:d|ocdbt_data|ocdbt_meta)/[0-9a-f]{32})"
    r"|array_metadatas/process_\d+|_METADATA|_sharding|_strings\.json|commit_success\.txt"
    r"|ftckpt\.objects/.+"
)
