"""Open a checkpoint of Orbax (see `orbax`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from ftckpt.checkpoint import Commit, CommitState, ObjectInfo, TensorInfo, Topology
from ftckpt.errors import CorruptError, IncompleteError, UnsupportedError
from ftckpt.extents import Extent
from ftckpt.findings import Finding, counted, finding, listed
from ftckpt.formats.safetensors.records import FOLDER, INDEX, read_objects
from ftckpt.storage.source import Source
from ftckpt.workers.budget import demand

from .checkpoint import KeptObjects, OrbaxCheckpoint
from .chunks import ChunkForm, Chunks, chunks_of, filled, first_absent, first_outside, not_stored
from .names import (
    AGGREGATE,
    BELONGS,
    CHECKPOINT_METADATA,
    COMMIT,
    DESCRIPTOR,
    JSON_FILES,
    JSON_HANDLER,
    MANIFEST,
    MARKER,
    METADATA,
    PROCESS,
    SHARDING,
    STRINGS,
    TEMPORARY,
)
from .ocdbt import Value, read_database
from .source import ValueSource, value_name
from .states import roles_of
from .tree import DeviceMesh, Tree, TreeFiles, divides, items_of, meshes, read_json, read_tree
from .zarr import Array, parse_array

Path = tuple[str, ...]
_MOST_FILLED = 1 << 20  # chunks of an array that are not stored
_FILLED = 1024  # bytes of memory for the piece of each, as a bound
_ZARR = {".zarray": 2, "zarr.json": 3}


def open_orbax(source: Source) -> OrbaxCheckpoint:
    """Read the metadata of a step (see `Orbax.open`)."""
    if TEMPORARY in source.name:
        raise _unfinished(source, "its name says that it is being written")
    names = source.entries
    metadata = read_json(source, CHECKPOINT_METADATA) if CHECKPOINT_METADATA in names else {}
    commit = _commit(source, metadata)
    handlers = items_of(metadata, CHECKPOINT_METADATA)
    opening = _Opening(source)
    opening.items(handlers)
    return opening.result(commit)


def _unfinished(source: Source, why: str) -> IncompleteError:
    return IncompleteError(
        f"{source.url} was not finished: {why}",
        kind="uncommitted",
        hint="wait for the save, or use an earlier checkpoint",
    )


def _commit(source: Source, metadata: object) -> Commit:
    """Return whether the save was finished, by its marker or by its time."""
    temporary = next((n for n in source.entries if TEMPORARY in n.split("/")[0]), "")
    if temporary:
        raise _unfinished(source, f"{temporary.split('/')[0]} is still being written")
    if COMMIT in source.entries:
        return Commit(CommitState.COMMITTED, COMMIT)
    name = "commit_timestamp_nsecs"
    if isinstance(metadata, dict) and name in metadata:
        if metadata[name] is None:
            raise _unfinished(source, f"{CHECKPOINT_METADATA} has no {name}")
        marked = (n for n in source.entries if n.endswith(f"/{COMMIT}") and n.count("/") == 1)
        bare = METADATA in source.entries or MANIFEST in source.entries
        if not bare and (
            item := next(marked, "")
        ):  # Orbax writes the step's marker after those of its items
            raise _unfinished(source, f"it has {item} and no {COMMIT}")
        return Commit(CommitState.COMMITTED, CHECKPOINT_METADATA)
    return Commit(CommitState.NO_MARKER)


@dataclass
class _Item:
    """A tree of arrays.

    Attributes:
        folder: "" or ending in a slash.
        prefix: of its paths in the step.
        arrays: metadata and chunks of each array, by its name in the database.
    """

    folder: str
    prefix: Path
    tree: Tree
    arrays: dict[str, tuple[Array, Chunks]] = field(default_factory=dict)


@dataclass
class _Opening:
    """What is gathered while a step is opened."""

    source: Source
    owned: set[str] = field(default_factory=set)
    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    nodes: list[Extent] = field(default_factory=list)
    databases: list[str] = field(default_factory=list)
    inline: dict[str, Value] = field(default_factory=dict)
    trees: list[_Item] = field(default_factory=list)
    defects: list[Finding] = field(default_factory=list)
    strings_at: dict[str, tuple[str, Path]] = field(default_factory=dict)
    kept: dict[str, KeptObjects] = field(default_factory=dict)
    steps: dict[str, int | None] = field(default_factory=dict)
    filled: dict[str, int] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    meshes: set[DeviceMesh] = field(default_factory=set)

    def items(self, handlers: Mapping[str, str]) -> None:
        """Find the items of a step, and read each."""
        names = self.source.entries
        tops = {name.partition("/")[0] for name in names if "/" in name}
        self.owned |= {CHECKPOINT_METADATA, COMMIT, MARKER} & names.keys()
        if METADATA in names or MANIFEST in names:
            self.tree("", ())
            return
        trees = [t for t in sorted(tops) if {f"{t}/{METADATA}", f"{t}/{MANIFEST}"} & names.keys()]
        for top in trees:
            self.tree(f"{top}/", (top,) if len(trees) > 1 else ())
        for item in sorted({*tops, *filter(None, handlers)} - set(trees)):
            self.json(item, handlers.get(item))
        if not trees and not self.objects:
            raise CorruptError(
                f"{self.source.url} holds neither a tree of arrays nor another item",
                kind="missing-file", file=METADATA,
            )  # fmt: skip

    def json(self, item: str, handler: str | None) -> None:
        """Take an item of JSON; refuse one that a handler wrote which is not known."""
        inside = sorted(n for n in self.source.entries if n.startswith(f"{item}/"))
        files = [n for n in inside if n != f"{item}/{COMMIT}"]
        known = files in ([f"{item}/{name}"] for name in JSON_FILES)
        if item == DESCRIPTOR:  # Orbax's own, for its services, and named also where it is absent
            self.owned |= set(inside)
            return
        if handler is None and not known:
            return  # a directory of somebody else, which the checks name as a stray
        if not files:
            raise CorruptError(f"the item {item} is missing", kind="missing-file", file=item)
        if not known or (handler and not re.search(JSON_HANDLER, handler)):
            raise UnsupportedError(
                f"the item {item} of {self.source.url} was saved by {handler or 'nobody known'},"
                " which is not read",
                file=files[0],
            )
        self.owned |= set(inside)
        place = Extent(files[0], 0, self.source.size(files[0]))
        self.objects[item] = ObjectInfo(item, place)

    def tree(self, folder: str, prefix: Path) -> None:
        """Read a tree of arrays: its leaves, its database or directories, its chunks' places."""
        names = self.source.entries
        if f"{folder}{AGGREGATE}" in names:
            raise UnsupportedError(
                f"{self.source.url} keeps values in a msgpack file ({folder}{AGGREGATE}), as Orbax"
                " did before 2024, which is not read",
                hint="restore and save it with a newer Orbax",
                file=f"{folder}{AGGREGATE}",
            )
        tree = read_tree(self.source, f"{folder}{METADATA}")
        item = _Item(folder, prefix, tree)
        self.trees.append(item)
        inside = [name for name in names if name.startswith(folder)]
        self.owned |= {n for n in inside if re.fullmatch(BELONGS, n[len(folder) :])}
        values = self.values(folder, inside)
        self.arrays(item, values)
        self.strings(item)
        self.keep(folder)
        sharding = f"{folder}{SHARDING}"
        if sharding in names:
            self.meshes |= set(meshes(read_json(self.source, sharding)))

    def values(self, folder: str, inside: Iterable[str]) -> Mapping[str, Value]:
        """Return the values of a tree, by key: of its database, or the files themselves."""
        if f"{folder}{MANIFEST}" not in self.source.entries:
            lost = next((n for n in inside if re.fullmatch(PROCESS, n[len(folder) :])), "")
            if lost:  # what the processes wrote was never merged, or its manifest is lost
                raise CorruptError(
                    f"{folder}{MANIFEST} is missing: {lost} is one process's",
                    kind="missing-file", file=f"{folder}{MANIFEST}",
                )  # fmt: skip
            self._say("arrays as files")
            entries = self.source.entries
            return {n[len(folder) :]: Value(Extent(n, 0, entries[n].size)) for n in inside}
        found = read_database(self.source, folder)
        self._say("OCDBT")
        self.nodes += found.nodes
        self.owned |= {node.file for node in found.nodes}
        own = {n[len(folder) :] for n in inside}
        ranks = sorted(n for n in own if re.fullmatch(PROCESS, n))
        self.databases += [f"{folder}{n.removesuffix(MANIFEST)}" for n in ranks]
        for key, value in found.values.items():
            if value.inline is None:
                self.owned.add(value.extent.file)
            else:
                self.inline[value_name(value, f"{folder}{key}")] = value
        return found.values

    def arrays(self, item: _Item, values: Mapping[str, Value]) -> None:
        """Parse the metadata of a tree's arrays, and find their chunks."""
        objects: dict[str, dict[str, Extent]] = {}
        described: dict[str, tuple[str, Value]] = {}
        for key, value in values.items():
            name, _, last = key.partition("/")
            if last in _ZARR:
                if name in described:
                    raise CorruptError(
                        f"{name} has metadata of zarr 2 and of zarr 3",
                        kind="bad-metadata", file=value.extent.file, tensor=name,
                    )  # fmt: skip
                described[name] = (last, value)
            elif last:
                place = value.extent
                if value.inline is not None:
                    file = value_name(value, f"{item.folder}{key}")
                    place = Extent(file, 0, len(value.inline))
                objects.setdefault(name, {})[last] = place
        raws = self._contents([value for _, value in described.values()])
        shown = ValueSource.over(self.source, self.inline)
        wanted = {".".join(path) for path in item.tree.arrays}
        for (name, (last, value)), raw in zip(described.items(), raws, strict=True):
            file = value.extent.file
            if value.inline is None:
                self.owned |= {file, *(place.file for place in objects.get(name, {}).values())}
            if name not in wanted:
                self.defects.append(
                    finding("unindexed-tensor", f"{name} is not in {item.folder}{METADATA}",
                            file=file, tensor=name)
                )  # fmt: skip
                continue
            array = _parsed(raw, file, _ZARR[last])
            found = chunks_of(shown, name, array, objects.get(name, {}))
            self._hold(item, name, value, array, objects.get(name, {}))
            if found.lacking and not item.tree.stores_all:
                found = self._filled(item, name, value, array, found)
            if value.inline is None and (key := first_absent(array, objects.get(name, {}))):
                lost = f"{item.folder}{name}/{key}"
                said = f"{lost} is missing: chunks of {name}"
                self.defects.append(finding("missing-file", said, file=lost, tensor=name))
            item.arrays[name] = (array, found)
        for name in sorted(wanted - described.keys()):
            self.defects.append(
                finding("missing-tensor", f"{name} of {item.folder}{METADATA} is in no file",
                        file=f"{item.folder}{METADATA}", tensor=name)
            )  # fmt: skip

    def _hold(
        self, item: _Item, name: str, described: Value, array: Array, objects: Mapping[str, Extent]
    ) -> None:
        """Hold the metadata of an array to the chunks that are stored, and to the tree's.

        A reader that trusts it would see fewer rows, or others, without an error.
        """
        file = described.extent.file
        if key := first_outside(array, objects):
            said = (
                f"{item.folder}{name}/{key} lies outside {list(array.shape)}, the shape in {file}"
            )
            place = objects[key]
            self.defects.append(
                finding("out-of-bounds", said, file=file, tensor=name,
                        offset=place.offset, length=place.length)
            )  # fmt: skip
        part = item.tree.parts.get(name)
        if part is not None and not divides(part, array.shape):
            said = f"{name} is {list(array.shape)} in {file}, and was written as parts {list(part)}"
            self.defects.append(finding("shape-mismatch", said, file=file, tensor=name))
        if item.tree.zarr not in (None, array.version):
            said = (
                f"{item.folder}{METADATA} says zarr {item.tree.zarr}, and {name} is {array.version}"
            )
            self.defects.append(finding("bad-metadata", said, file=f"{item.folder}{METADATA}"))

    def _filled(
        self, item: _Item, name: str, described: Value, array: Array, found: Chunks
    ) -> Chunks:
        """Return chunks with pieces of the fill value for those that were not stored.

        Only where checked nodes and indexes lack them: an absent file may be a lost one.
        """
        checked = f"{item.folder}{MANIFEST}" in self.source.entries
        if checked and not self.filled:
            self._require_merged(item.folder)
        checked = checked and (array.indexed is None or array.indexed.crc)
        if array.fill is None or not checked or found.lacking > _MOST_FILLED:
            raise UnsupportedError(
                f"{counted(found.lacking, 'chunk')} of {name} are absent, and this Orbax left"
                " out chunks that equal the fill value: nothing tells them from lost ones",
                hint="restore and save it with a newer Orbax",
                file=described.extent.file, tensor=name,
            )  # fmt: skip
        number = found.lacking + sum(self.filled.values())
        demand(number * (_FILLED + 2 * len(name)), f"pieces for {number} chunks that are absent")
        pieces, forms = list(found.pieces), list(found.forms)
        for number, box in enumerate(not_stored(array, found)):
            file = value_name(described, f"{item.folder}{name}//fill/{number}")
            self.inline[file] = Value(described.extent, array.fill)
            piece, form = filled(box, Extent(file, 0, len(array.fill)))
            pieces.append(piece)
            forms.append(form)
        self.filled[name] = found.lacking
        return found._replace(pieces=tuple(pieces), forms=tuple(forms), lacking=0)

    def _require_merged(self, folder: str) -> None:
        """Require that the merged database has all keys of those of single processes."""
        merged = read_database(self.source, folder).values.keys()
        for one in self.databases:
            if not one.startswith(folder):
                continue
            lost = read_database(self.source, one).values.keys() - merged
            if lost:
                raise CorruptError(
                    f"{folder}{MANIFEST} lacks {counted(len(lost), 'key')} of {one}{MANIFEST},"
                    f" {min(lost)} among them",
                    kind="bad-metadata", file=f"{folder}{MANIFEST}",
                )  # fmt: skip

    def _contents(self, values: list[Value]) -> list[bytes]:
        """Return the bytes of values, those in files read at once."""
        outside = [value.extent for value in values if value.inline is None]
        for place in outside:
            size = self.source.size(place.file)
            if place.end > size:
                raise CorruptError(
                    f"{place.file} ends at byte {size} of {place.end}",
                    kind="truncated-file", file=place.file,
                    offset=place.offset, length=place.length,
                )  # fmt: skip
            if place.length > 1 << 20:
                raise CorruptError(
                    f"the metadata of an array in {place.file} has {place.length} bytes",
                    kind="bad-metadata", file=place.file,
                )  # fmt: skip
        # Any number of arrays may be said to have theirs at one place.
        demand(sum(place.length for place in outside), f"metadata of {len(outside)} arrays")
        read = iter(self.source.read_many(outside)) if outside else iter(())
        return [next(read) if value.inline is None else value.inline for value in values]

    def strings(self, item: _Item) -> None:
        """Take the strings of a tree, which lie in a file of their own."""
        file = f"{item.folder}{STRINGS}"
        if not item.tree.strings:
            return
        value = read_json(self.source, file)
        place = Extent(file, 0, self.source.size(file))
        for path in item.tree.strings:
            name = ".".join(path)
            if not isinstance(value, dict) or not isinstance(value.get(name), str):
                raise CorruptError(f"{file} lacks {name}", kind="bad-metadata", file=file)
            full = ".".join((*item.prefix, name))
            self.objects[full] = ObjectInfo(full, place, field=(name,))
            self.strings_at[full] = (item.folder[:-1], path)

    def keep(self, folder: str) -> None:
        """Take the non-tensor state that `convert --to orbax` stored beside a tree."""
        if not any(name.startswith(folder + FOLDER) for name in self.source.entries):
            return
        inside = self.source.part(folder[:-1]) if folder else self.source
        kept = KeptObjects(folder, inside, read_objects(inside))
        for name, info in kept.stored.infos.items():
            if name in self.objects:
                raise CorruptError(
                    f"{folder}{FOLDER} holds {name}, which is an item too",
                    kind="bad-index", file=f"{folder}{INDEX}",
                )  # fmt: skip
            place = info.extent._replace(file=folder + info.extent.file)
            self.objects[name] = info._replace(extent=place)
            self.kept[name] = kept
        self.owned |= {folder + file for file in kept.stored.files}
        self.steps[f"{folder}{INDEX}"] = kept.stored.step

    def _say(self, word: str) -> None:
        if word not in self.words:
            self.words.append(word)

    def result(self, commit: Commit) -> OrbaxCheckpoint:
        """Return the checkpoint."""
        held = {
            (*item.prefix, *path): (
                *item.arrays[name],
                ".".join((*item.prefix, name)),
                (item.folder[:-1], path),
            )
            for item in self.trees
            for path in item.tree.arrays
            if (name := ".".join(path)) in item.arrays
        }
        roles = roles_of({place: array.shape for array, _, _, place in held.values()})
        tensors: dict[str, TensorInfo] = {}
        forms: dict[Extent, ChunkForm] = {}
        indexes: list[tuple[Extent, str]] = []
        paths: dict[str, tuple[str, Path]] = {}
        for array, found, stored, place in held.values():
            leaf = roles[place]
            info = TensorInfo(
                leaf.component, leaf.name, leaf.kind, array.shape, array.dtype, found.pieces,
                "" if stored == leaf.name else stored,
            )  # fmt: skip
            if info.key in tensors:
                raise CorruptError(
                    f"two arrays are called {info.key}", kind="duplicate-tensor", tensor=info.key
                )
            tensors[info.key] = info
            paths[info.key] = place
            for piece, form in zip(found.pieces, found.forms, strict=True):
                if forms.setdefault(piece.extent, form) is not form:
                    raise CorruptError(
                        f"two chunks lie at {piece.extent.offset} of {piece.extent.file}",
                        kind="extent-overlap", file=piece.extent.file, tensor=info.key,
                        offset=piece.extent.offset, length=piece.extent.length,
                    )  # fmt: skip
            indexes += [(one, info.key) for one in found.indexes]
        versions = sorted({array.version for array, *_ in held.values()})
        words = [*self.words, *(f"zarr {version}" for version in versions)]
        names = [f"{item.folder}{METADATA}" for item in self.trees]
        return OrbaxCheckpoint(
            source=ValueSource.over(self.source, self.inline),
            tensors=tensors,
            objects=self.objects,
            topology=self._topology(),
            commit=commit,
            dialect=", ".join(words),
            notes=self._notes(),
            open_findings=self.defects,
            marker=names[0] if names else CHECKPOINT_METADATA,
            owned=frozenset(self.owned),
            forms=forms,
            nodes=self.nodes,
            indexes=indexes,
            databases=self.databases,
            trees=[item.folder[:-1] for item in self.trees],
            paths=paths,
            files=[
                TreeFiles(
                    item.folder,
                    item.tree,
                    {n: (array.shape, array.chunk) for n, (array, _) in item.arrays.items()},
                )
                for item in self.trees
            ],
            strings=self.strings_at,
            kept=self.kept,
            steps={file: step for file, step in self.steps.items() if step is not None},
            defects=self.defects,
        )

    def _notes(self) -> list[Finding]:
        """Return how many chunks are not stored, and in which arrays."""
        if not self.filled:
            return []
        count = counted(sum(self.filled.values()), "chunk")
        said = f"{count} of {listed(list(self.filled))} in no node of OCDBT: read as the fill value"
        return [finding("fill-value", said)]

    def _topology(self) -> Topology:
        """Return the number of devices, if all arrays were on meshes of as many."""
        sizes = {mesh.devices for mesh in self.meshes}
        if len(sizes) != 1:
            return Topology()
        mesh = min(self.meshes)
        said = f"{mesh}" if len(self.meshes) == 1 else f"{len(self.meshes)} divisions of it"
        return Topology(world_size=sizes.pop(), evidence=f"devices of the mesh ({said})")


@lru_cache(maxsize=1024)  # thousands of arrays have few shapes
def _cached(raw: bytes, version: int) -> Array:
    return parse_array(raw, "an array", version)


def _parsed(raw: bytes, file: str, version: int) -> Array:
    """Return an array's metadata; an error names the file."""
    try:
        return _cached(raw, version)
    except (CorruptError, UnsupportedError):
        return parse_array(raw, file, version)
