"""The ledger of a root: what was checked, how deep, on which files, by whom, with which result.

`.ftckpt/verdicts/NAME/LEVEL.OWNER.json` below the root, one object for each checkpoint (`NAME` is
its path in the root, percent-encoded), level and writer. Each is written whole by one put and
touches no other, so two writers at once both succeed on any store.

A verdict counts while the identity of the files is what it was: every file's name and size, its
ETag, or its inode, modification time and change time. Of verdicts on the same files the newest
wins, but a check never overrides what a deeper one of one's own has found.

Forging one is worthless. A good verdict counts if its file belongs to the owner of the root, to the
reader or to the superuser; on an object store, where nothing has an owner, who can write a verdict
can also write the checkpoint. A bad one from anybody else is a reason to look: `latest` reads the
content itself, gc counts no survivor and drops nothing by it, and a newer check of one's own that
read the content overrides it, however deep the other claims to be. A ledger detects accidents and
lies about them, not an owner's own lies.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple
from urllib.parse import quote, unquote

from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    FtckptError,
    IncompleteError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ftckpt.own_files import DELTA, FOLDER, SUFFIX, TEMPORARY
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.local.ownership import is_believed
from ftckpt.storage.remotes import split
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry, EntryKind, Store, join, relative
from ftckpt.strict_json import JsonError, decode
from ftckpt.version import __version__

from .listing import files_of, open_part
from .recognise import UnopenedPart
from .roots import Root, concurrently
from .step_names import step_in_name

SCHEMA = "ftckpt.verdict/1"
VERDICTS = "verdicts"
LEVELS = ("structure", "content", "values")
# Answers about the checkpoint; any other code is about the storage or the user.
_ANSWERS = frozenset(
    {
        ExitCode.OK, ExitCode.CORRUPT, ExitCode.INCOMPLETE, ExitCode.UNVERIFIED, ExitCode.UNSAFE,
        ExitCode.UNSUPPORTED,
    }
)  # fmt: skip
_BAD = frozenset({ExitCode.CORRUPT, ExitCode.UNSAFE})
_MAX_BYTES = 16 << 10
# The number of checkpoints that are remembered; beyond it, those that have left the root go.
_MOST = 2000
# Clocks of two machines differ; a verdict dated later than this counts for nothing.
_CLOCK = 60.0


@dataclass(frozen=True, slots=True)
class KeptVerdict:
    """The result of one check.

    Attributes:
        name: of the checkpoint: its path in the root, or the whole path or URL where the ledger
            does not lie in the root.
        level: `structure`, `content` or `values`: how deep. Of a check that passed, what was
            proven for every byte.
        code: its exit code.
        reason: the verdict in a sentence.
        evidence: `manifest`, `crc32`, `digests`, `replica`, ...; `none` without any.
        nbytes: bytes that were read.
        seconds: how long it took.
        checked: when it ended, in seconds since the epoch.
        identity: of the files (`identity_of`), 32 hex digits.
        by: user and machine.
        strict: whether warnings counted as errors: such a failure does not mean damage.
        tool: the program that checked.
    """

    name: str
    level: str
    code: int
    reason: str
    evidence: str
    nbytes: int
    seconds: float
    checked: float
    identity: str
    by: str
    strict: bool = False
    tool: str = f"ftckpt {__version__}"

    @property
    def bad(self) -> bool:
        """Whether it says that the checkpoint is damaged or unsafe."""
        return self.code in _BAD and not self.strict

    @property
    def read(self) -> bool:
        """Whether every byte was read and passed, by the deepest evidence that the format has."""
        return self.code == ExitCode.OK and (
            self.level == "values" or (self.level == "content" and self.evidence != "none")
        )

    @property
    def proven(self) -> bool:
        """Whether evidence covered every byte, and all passed."""
        return self.read and self.evidence != "none"

    def dump(self) -> bytes:
        """Return the object's bytes."""
        return json.dumps({"schema": SCHEMA} | asdict(self)).encode() + b"\n"


class Remembered(NamedTuple):
    """A verdict as it was found.

    Attributes:
        url: of its object.
        own: whether it may be believed although it is good (see the module).
    """

    verdict: KeptVerdict
    url: str
    own: bool


class ContentStanding(NamedTuple):
    """What is known of a checkpoint as its files are now.

    Attributes:
        bad: the verdict that it is damaged or unsafe; None without one.
        good: the deepest own verdict that it passed; None without one, or beside a bad one.
        last: the newest own verdict of any kind; None without one.
    """

    bad: Remembered | None = None
    good: Remembered | None = None
    last: Remembered | None = None


def standing(
    found: Iterable[Remembered], identity: str, now: float | None = None
) -> ContentStanding:
    """Return what verdicts say of files with this identity; pure but for the time."""
    now = time.time() if now is None else now
    valid = sorted(
        (
            one
            for one in found
            if one.verdict.identity == identity and one.verdict.checked <= now + _CLOCK
        ),
        key=lambda one: one.verdict.checked,
    )
    own = [one for one in valid if one.own]
    good = [one for one in own if one.verdict.code == ExitCode.OK]
    bad = [
        one
        for one in valid
        if one.verdict.bad
        and not any(
            g.verdict.checked > one.verdict.checked
            and (depth(g.verdict) >= depth(one.verdict) or (g.verdict.read and not one.own))
            for g in good
        )
    ]
    last = own[-1] if own else None
    if bad:
        # An own verdict says more: it lets gc drop what it is about.
        return ContentStanding(max(bad, key=lambda one: (one.own, one.verdict.checked)), None, last)
    return ContentStanding(
        None, max(good, key=lambda g: (depth(g.verdict), g.verdict.checked), default=None), last
    )


def is_answer(code: ExitCode) -> bool:
    """Whether a code says something about a checkpoint, and not about its storage or the user."""
    return code in _ANSWERS


def depth(verdict: KeptVerdict) -> int:
    """Return how deep a check was, for comparisons."""
    return LEVELS.index(verdict.level)


def parse(data: bytes) -> KeptVerdict:
    """Parse the bytes of a verdict.

    Raises:
        ValueError: it is cut, or of another schema.
    """
    try:
        body = decode(data)
        if body.pop("schema") != SCHEMA:
            raise ValueError("its schema is another")
        found = KeptVerdict(**body)
        numbers = (found.nbytes, found.seconds, found.checked)
        texts = (found.name, found.reason, found.evidence, found.identity, found.by, found.tool)
        fits = (
            found.level in LEVELS
            and type(found.strict) is bool
            and all(type(n) in (int, float) and abs(n) < 1e18 for n in numbers)
            and all(isinstance(text, str) for text in texts)
        )
        if not fits or ExitCode(found.code) not in _ANSWERS:
            raise ValueError("it has a field that is none")
        return found
    except (JsonError, KeyError, TypeError, AttributeError) as error:
        raise ValueError("it is not a verdict") from error


class Ledger:
    """The verdicts on the checkpoints of one root.

    Args:
        store: of the root.
        base: the root's path in it.
        folder: a directory or URL that keeps what is about the root; "" for the root's `.ftckpt`.
        options: how to reach that.
    """

    def __init__(
        self, store: Store, base: str, folder: str = "", options: StoreOptions | None = None
    ) -> None:
        self._root, self._base = store, base
        self._outside = bool(folder)
        if folder:
            self._store, self._folder = open_store(folder, options or StoreOptions()), ""
        else:
            self._store, self._folder = store, join(base, f"{FOLDER}/{VERDICTS}")

    @classmethod
    def around(
        cls, store: Store, place: str, folder: str, options: StoreOptions
    ) -> tuple[Ledger, str]:
        """Return the ledger of the directory around a checkpoint, and its path in that's store."""
        if place:
            return cls(store, place.rpartition("/")[0], folder, options), place
        local = store.local_path("")
        url = store.describe("") if local is None else os.path.realpath(local)
        parent, name = split(url.rstrip("/"))
        return cls(open_store(parent, options), "", folder, options), name

    @classmethod
    def of_root(cls, root: Root, folder: str, options: StoreOptions) -> tuple[Ledger, str]:
        """Return the ledger for what lies in a root, and what to put before its paths.

        A step that holds a checkpoint for each model is remembered in the root around it.
        """
        if not root.base and all(c.step is None for c in root.candidates):
            around, name = cls.around(root.store, "", folder, options)
            if step_in_name(name) is not None:
                return around, f"{name}/"
        return cls(root.store, root.base, folder, options), ""

    @property
    def url(self) -> str:
        """Where the verdicts lie, as a user would type it."""
        return self._store.describe(self._folder)

    def read(self, places: Sequence[str]) -> dict[str, list[Remembered]]:
        """Return the verdicts on checkpoints, by their paths in the root's store.

        What cannot be parsed, or is not in its place, is left out: it says nothing.

        Raises:
            UnavailableError, DeniedError: they could not be read.
        """
        held: dict[str, list[Entry]] = {}
        one = join(self._folder, self._holder(places[0])) if len(places) == 1 else self._folder
        try:
            self.require_own()
            self._require_plain(one)
            for entry in self._store.walk(one):
                holder = relative(self._folder, entry.path).partition("/")[0]
                held.setdefault(holder, []).append(entry)
        except (NotFoundError, UnsafeError):
            return {}
        asked = [place for place in places if self._holder(place) in held]
        found = concurrently(self._store, lambda p: self._of(p, held[self._holder(p)]), asked)
        return {place: each for place, each in zip(asked, found, strict=True) if each}

    def standing(self, part: CheckedPlace) -> ContentStanding:
        """Return what is known of one checkpoint as its files are now.

        Raises:
            UnavailableError, DeniedError: it could not be found out.
        """
        return self.standings([part])[0]

    def standings(self, parts: Sequence[CheckedPlace]) -> list[ContentStanding]:
        """Return what is known of several checkpoints of the root (see `standing`).

        Raises:
            UnavailableError, DeniedError: it could not be found out.
        """
        found = self.read([part.place for part in parts])

        def one(part: CheckedPlace) -> ContentStanding:
            said = found.get(part.place)
            identity = part.identity() if said else ""
            return standing(said, identity) if said and identity else ContentStanding()

        return concurrently(self._store, one, parts) if found else [ContentStanding()] * len(parts)

    def write(self, place: str, verdict: KeptVerdict) -> None:
        """Keep a verdict, in the place of the writer's last one of this level.

        Raises:
            UnsafeError: `.ftckpt` or a directory in it is a link.
            DeniedError, NoResourceError, UnavailableError: it could not be written.
        """
        self.require_own()
        folder = join(self._folder, self._holder(place))
        self._require_plain(folder)
        writer = f"u{os.geteuid()}" if self._store.traits.local else "any"
        label = f"{verdict.level}{'.strict' if verdict.strict else ''}.{writer}.json"
        self._store.put(f"{folder}/{label}", verdict.dump())
        if not self._outside:
            with suppress(FtckptError):
                self._forget()

    def require_own(self) -> None:
        """Refuse to go through a link.

        Raises:
            UnsafeError: `.ftckpt`, or its folder of verdicts, is one; its target is not the root's.
        """
        if not self._outside:
            self._require_plain(self._folder.rpartition("/")[0])
            self._require_plain(self._folder)

    def require_writable(self) -> None:
        """Try to write, and leave nothing.

        Raises:
            UnsafeError, DeniedError, NoResourceError, UnavailableError: see `write`.
        """
        import secrets

        self.require_own()
        probe = join(self._folder, f"{TEMPORARY}probe-{secrets.token_hex(8)}")
        try:
            self._store.put(probe, b"")
        except FtckptError as error:
            if not self._outside:
                error.hint = f"{error.hint}; " if error.hint else ""
                error.hint += "--ledger DIR remembers it elsewhere"
            raise
        self._store.delete([probe])

    def name(self, place: str) -> str:
        """Return the name of a checkpoint in this ledger's verdicts."""
        if not self._outside:
            return relative(self._base, place)
        local = self._root.local_path(place)
        return os.path.realpath(local) if local is not None else self._root.describe(place)

    def _of(self, place: str, entries: Iterable[Entry]) -> list[Remembered]:
        found = []
        for entry in entries:
            plain = entry.kind is EntryKind.FILE and entry.link is None
            if plain and entry.path.endswith(".json") and entry.size <= _MAX_BYTES:
                with suppress(ValueError, NotFoundError, CorruptError):
                    verdict = parse(self._store.read(entry.path, 0, entry.size))
                    if verdict.name == self.name(place):
                        url = self._store.describe(entry.path)
                        found.append(Remembered(verdict, url, self._is_believed(entry.path)))
        return found

    def _is_believed(self, path: str) -> bool:
        """Whether a file belongs to the root's owner, to the reader or to the superuser."""
        local = self._store.local_path(path)
        if local is None:
            return True
        home = self._store.local_path("" if self._outside else self._base)
        return is_believed(local, home or local)

    def _require_plain(self, path: str) -> None:
        local = self._store.local_path(path)
        if local is not None and os.path.islink(local):
            raise UnsafeError(f"{local} is a link: it was not made by ftckpt", kind="special-file")

    def _holder(self, place: str) -> str:
        name = self.name(place)
        if self._outside:
            return _digest(os.fsencode(name))
        return quote(name, safe="@=+,", errors="surrogateescape").replace(".", "%2E")

    def _forget(self) -> None:
        """Forget checkpoints that are not in the root any more, if there are too many."""
        held = self._store.names(self._folder)
        if len(held) <= _MOST:
            return
        there = self._root.names(self._base)
        for entry in self._store.children(self._folder):
            holder = relative(self._folder, entry.path)
            if entry.link is not None or entry.kind is not EntryKind.DIRECTORY:
                continue  # none of ours
            if unquote(holder, errors="surrogateescape").partition("/")[0] not in there:
                folder = join(self._folder, holder)
                self._store.delete([entry.path for entry in self._store.children(folder)])
                local = self._store.local_path(folder)
                if local is not None:
                    with suppress(OSError):
                        os.rmdir(local)


class CheckedPlace(NamedTuple):
    """One checkpoint of a root, not opened or opened.

    Attributes:
        store: of its files.
        known_as: its path in the root's store, if that is another store.
    """

    store: Store
    part: UnopenedPart | None = None
    checkpoint: Checkpoint | None = None
    known_as: str = ""

    @property
    def place(self) -> str:
        """Its path in the root's store."""
        if self.known_as:
            return self.known_as
        if self.part is not None:
            return self.part.entry.path
        assert self.checkpoint is not None
        return place_of(self.checkpoint.source)

    def identity(self) -> str:
        """Return the identity of its files; "" where it cannot be known, so that nothing counts.

        Raises:
            UnavailableError, DeniedError: it could not be found out.
        """
        try:
            if self.checkpoint is not None:
                return identity_of(self.checkpoint)
            assert self.part is not None
            source = files_of(self.store, self.part.entry)
            if source.single or DELTA in source.entries:  # further files, or bases, count too
                with suppress(CorruptError, UnsafeError, IncompleteError, UnsupportedError):
                    return identity_of(open_part(self.store, self.part))
            return identity_of_files(source)
        except (IncompleteError, NotFoundError, UnsupportedError):
            return ""


def place_of(source: Source) -> str:
    """Return the path of a checkpoint in its store."""
    named = source.named or (next(iter(source.entries)) if source.single else "")
    return source.path(named) if named else source.base


def identity_of(checkpoint: Checkpoint) -> str:
    """Return the identity of a checkpoint's files (`identity_of_files`), with those of its bases.

    Raises:
        FtckptError: a base cannot be opened, or as `identity_of_files`.
    """
    bases = [identity_of(base) for base in checkpoint.decoding.bases()]
    own = identity_of_files(checkpoint.source)
    return _digest("+".join([own, *bases]).encode()) if bases else own


def identity_of_files(source: Source) -> str:
    """Return a digest of the identity of every file of a checkpoint, as the store shows it now.

    That is name, size, and the ETag, or for local files inode, modification and change time; the
    manifest counts, also beside a one-file checkpoint.

    Raises:
        UnsupportedError: the store shows nothing that changes with the content.
        NotFoundError, UnavailableError, DeniedError: a file cannot be looked up.
    """
    body = json.dumps(list(_identities(source)), sort_keys=True, separators=(",", ":"))
    return _digest(body.encode())


def _identities(source: Source) -> Iterator[list[object]]:
    # Listed anew: a file that was added to a directory since it was opened counts.
    lone = source.single or bool(source.named)
    now = source if lone else Source.directory(source.store, source.base)
    names = [name for name in sorted(now.entries) if name.split("/")[0] != FOLDER]
    for name in names:
        yield _identity(source, name, None if lone else now.entries[name])
    if lone and names:
        with suppress(NotFoundError):
            yield _identity(source, (source.named or names[0]) + SUFFIX, None)


def _identity(source: Source, name: str, entry: Entry | None) -> list[object]:
    local = source.store.local_path(source.path(name))
    if local is not None:
        try:
            held = os.stat(local)
        except FileNotFoundError as error:
            raise NotFoundError(f"{local} does not exist") from error
        except OSError as error:
            raise UnsupportedError(f"{local} cannot be asked about: {error}") from error
        return [name, held.st_size, held.st_ino, held.st_mtime_ns, held.st_ctime_ns]
    entry = entry or source.store.stat(source.path(name))
    if entry.etag is None:
        raise UnsupportedError(f"{source.url} lies in a store that shows no ETag")
    return [name, entry.size, entry.etag]


def _digest(data: bytes) -> str:
    import xxhash

    return str(xxhash.xxh3_128_hexdigest(data))
