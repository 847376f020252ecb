"""Find what a delta depends on: by the recorded place, among its siblings, and by content.

A path alone proves nothing. A base that is a delta says in its index which content it holds; a full
one is known by its manifest, else only by the digests of the blocks that are decoded from it. What
can be told without reading tensors is told before anything is read or written.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from posixpath import basename
from shlex import quote

from ftckpt.checkpoint import Checkpoint
from ftckpt.delta import NAME, BaseName, DeltaIndex
from ftckpt.delta.index.head import resolved
from ftckpt.digests.tensors import digest_tensor
from ftckpt.discovery.dropped import dropped_names
from ftckpt.discovery.recognise import Format
from ftckpt.discovery.resolve import open_target
from ftckpt.discovery.step_names import step_in_name
from ftckpt.errors import (
    CorruptError,
    FtckptError,
    IncompleteError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from ftckpt.manifest import Manifest
from ftckpt.manifest.locate import find
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.remotes import split
from ftckpt.transfer.places import place_of

_LOOKED_AT = 1 << 20  # bytes of small tensors that tell one step of a run from another

# Deltas on one full checkpoint. Each costs a restore about as much as a checkpoint, and decoding
# goes down through all of them at once, which the interpreter bounds.
MOST_LINKS = 32


@dataclass(kw_only=True, repr=False)
class ChainLink(Checkpoint):
    """A delta as a part of its chain.

    Attributes:
        index: what it says of itself.
        formats: that read its base, in asking order.
        given: places where bases of the chain may lie, beside those that are recorded.
        stores: how to reach them.
        above: places of the deltas for which it was opened as a base: none can be a base of its.
    """

    index: DeltaIndex
    formats: Sequence[Format]
    given: Sequence[str] = ()
    stores: StoreOptions
    above: frozenset[str] = frozenset()

    @property
    @abstractmethod
    def base(self) -> Checkpoint | None:
        """What it depends on, opened once; None for a full one."""


def open_base(delta: ChainLink, base: BaseName) -> Checkpoint:
    """Open the checkpoint that a delta depends on; headers are read, no tensors.

    Args:
        delta: that names it.
        base: what it says of it.

    Raises:
        NotFoundError: it is nowhere (`missing-base`).
        CorruptError: what stands there holds other content (`wrong-base`), or is damaged.
        FtckptError: what stands there cannot be opened.
    """
    recorded = resolved(base.path, place_of(delta.source))
    above = delta.above | {place_of(delta.source)}
    wrong: FtckptError | None = None
    likely: Checkpoint | None = None
    remains: FtckptError | None = None
    near = ""
    for url, beside in _places(delta, recorded, base):
        try:
            found, why = _try(delta, base, url, above, look=url != recorded)
        except NotFoundError:
            continue
        except IncompleteError as error:  # a base was whole when it was packed against
            remains = remains or (error if url == recorded else None)
            continue
        except FtckptError as error:  # what lies elsewhere may be whole
            if beside:
                near = near or f"{url} cannot be read ({error.message})"
            else:
                wrong = wrong or error
            continue
        if found is None:
            continue
        if place_of(found.source) in above:  # its content may be the right one all the same
            if url == recorded:
                wrong = wrong or _comes_back(delta, found)
        elif why and beside:  # it has the same step, and nobody has said that it is the base
            near = near or f"{found.source.url} is another ({why})"
        elif why:
            wrong = wrong or CorruptError(
                f"{found.source.url} is not the base of {delta.source.url}: {why}",
                hint="find the checkpoint that it was packed against; --base PATH says where it is",
                kind="wrong-base",
            )
        elif is_known(found, base):
            if isinstance(found, ChainLink):
                found.above = above
            return found
        else:
            likely = likely or found
    if likely is not None:
        return likely
    if wrong is not None:
        raise wrong
    raise _gone(delta, base, recorded, remains, near)


def _try(
    delta: ChainLink,
    base: BaseName,
    url: str,
    above: frozenset[str],
    *,
    look: bool,
) -> tuple[Checkpoint | None, str]:
    """Open what lies at a place, and say why it cannot be the base; "" where it may be.

    Raises:
        FtckptError: it cannot be opened or read.
    """
    found = _open(url, delta)
    if found is None or place_of(found.source) in above:
        return found, ""
    why = _misfit(delta, found)
    if not why and not is_known(found, base):
        why = _difference(delta, base, found, look=look)
    return found, why


def _gone(
    delta: ChainLink, base: BaseName, recorded: str, remains: FtckptError | None, near: str
) -> NotFoundError:
    """Return the error of a base that is nowhere: where it was, and what became of it."""
    parent, name = split(recorded.rstrip("/"))
    what = f"the base of {delta.source.url}, {_step(base)}, is"
    beside = f"; {near}" if near else ""
    if _was_dropped(delta, parent, name):
        return NotFoundError(
            f"{what} gone: {recorded} was dropped{beside}",
            hint=f"ftckpt gc undelete {quote(parent)} {quote(name)} brings it back until it is "
            "purged",
            kind="missing-base",
        )
    where = f"not at {recorded}"
    if remains is not None:
        where = f"gone: at {recorded} is not a whole checkpoint any more ({remains.message})"
    return NotFoundError(
        f"{what} {where}{beside}",
        hint="bring it back, or say where it is: ftckpt delta unpack DELTA OUT --base PATH",
        kind="missing-base",
    )


def _was_dropped(delta: ChainLink, parent: str, name: str) -> bool:
    if not parent:
        return False
    try:
        return name in dropped_names(open_store(parent, delta.stores))
    except FtckptError:
        return False


def chain(delta: ChainLink) -> list[Checkpoint]:
    """Return a delta, what it depends on, and so on down to the full checkpoint (see `walk`)."""
    return list(walk(delta))


def walk(delta: ChainLink) -> Iterator[Checkpoint]:
    """Yield a delta, what it depends on, and so on down to the full checkpoint.

    Raises:
        UnsupportedError: the chain is too long.
        CorruptError: it comes back to where it was (`bad-delta`), or a base is wrong.
        NotFoundError: a base is missing.
    """
    here: Checkpoint = delta
    yield here
    while isinstance(here, ChainLink) and here.index.base is not None:
        if len(here.above) >= MOST_LINKS:
            raise UnsupportedError(
                f"{delta.source.url} depends on more than {MOST_LINKS} deltas",
                hint="ftckpt delta rebase makes one in the middle of the chain full",
            )
        base = here.base
        assert base is not None
        here = base
        yield here


def step_of(base: BaseName) -> int | None:
    """Return the step of a base: as its content showed it, else as its name said it."""
    return step_in_name(basename(base.path.rstrip("/"))) if base.step is None else base.step


def within(base: Checkpoint, file: str | None) -> str | None:
    """Return a file of a base as its URL; what is one already as it is."""
    if file is None or file.startswith("/") or "://" in file:
        return file
    return base.source.store.describe(base.source.path(file))


# A container that two readers would read differently. It was none when it was packed against.
_AMBIGUOUS = frozenset(("unsafe-zip", "unsafe-header", "unsafe-index"))


def is_damage(kind: str) -> bool:
    """Say whether what would be refused as ambiguous elsewhere is damage in a base.

    A delta is packed only against what is sound, so the bytes have changed since. A pickle that
    calls something stays refused: nobody can say that a bit has flipped there.
    """
    return kind in _AMBIGUOUS


def of_base(error: FtckptError) -> FtckptError:
    """Return an error that a base raised as the delta based on it raises it (see `is_damage`)."""
    if not is_damage(error.kind):
        return error
    return CorruptError(
        error.message,
        kind="wrong-base",
        hint="bring the base back as it was: ftckpt repair, or --base PATH for another copy",
        file=error.file,
        tensor=error.tensor,
        offset=error.offset,
        length=error.length,
    )


def manifest_digest(manifest: Manifest) -> str:
    """Return the digest that a delta records of its base's manifest: the one in its last line."""
    return manifest.dump().rsplit(b'"', 2)[-2].decode()


def _places(delta: ChainLink, recorded: str, base: BaseName) -> Iterator[tuple[str, bool]]:
    """Yield where the base may lie, and whether that is a guess by the step in a name beside it.

    A root that was put together anew is listed last.
    """
    yield from ((place, False) for place in delta.given)
    yield recorded, False
    own = place_of(delta.source)
    parent, name = split(own.rstrip("/"))
    step = step_of(base)
    if step is None or not parent:
        return
    try:
        beside = open_store(parent, delta.stores).names()
    except FtckptError:
        return
    for other in beside:
        if other != name and step_in_name(other) == step:
            yield f"{parent}/{other}", True


def _open(url: str, delta: ChainLink) -> Checkpoint | None:
    """Open what lies at a place; None where it is not a single checkpoint."""
    try:
        target = open_target(url, delta.formats, delta.stores)
        return None if target.part is None else target.open()
    except UsageError:
        return None
    except NotFoundError:
        raise
    except IncompleteError:
        raise
    except FtckptError as error:
        error.message = f"the base of {delta.source.name} cannot be opened: {error.message}"
        error.args = (error.message,)
        if error.file is not None:
            error.file = f"{url}/{error.file}"
        raise of_base(error) from None


def is_known(found: Checkpoint, base: BaseName) -> bool:
    """Say whether a checkpoint is known to be the base: by its content, or by its manifest."""
    if isinstance(found, ChainLink):
        return found.index.content() == base.content
    return bool(base.manifest) and _manifest(found) == base.manifest


def _comes_back(delta: ChainLink, found: Checkpoint) -> CorruptError:
    return CorruptError(
        f"{delta.source.url} depends on itself: the chain comes back to {found.source.url}",
        kind="bad-delta",
        file=NAME,
    )


def _misfit(delta: ChainLink, found: Checkpoint) -> str:
    """Say which tensor that a delta is decoded from a checkpoint does not have; "" for none.

    What a delta says of its base is not proof of that, whatever digests it names.
    """
    for tensor in delta.index.tensors:
        if tensor.base is None:
            continue
        info = found.tensors.get(tensor.base.key)
        if info is None:
            return f"it has no tensor {tensor.base.key}"
        if (info.shape, info.dtype) != (tensor.shape, tensor.dtype):
            return f"its {tensor.base.key} is {info.dtype.name}{list(info.shape)}"
    return ""


def _difference(delta: ChainLink, base: BaseName, found: Checkpoint, *, look: bool) -> str:
    """Say why a checkpoint cannot be the base; "" where it may be.

    Args:
        delta: that depends on it.
        base: what it says of it.
        found: the checkpoint; it has the tensors (`_misfit`).
        look: whether to compare small ones: it lies where nobody recorded it.
    """
    if isinstance(found, ChainLink):
        return f"its content is {found.index.content()}, not {base.content}"
    left = _LOOKED_AT if look else 0
    for tensor in sorted((t for t in delta.index.tensors if t.base), key=lambda t: t.nbytes):
        assert tensor.base is not None
        left -= tensor.nbytes
        if left <= 0:
            break
        if digest_tensor(found, found.tensors[tensor.base.key]) != tensor.base.digest:
            return f"its {tensor.base.key} has other values"
    return ""


def _manifest(found: Checkpoint) -> str:
    try:
        manifest = find(found.source)
    except FtckptError:  # a manifest that cannot be understood is not evidence; the verbs report it
        return ""
    return "" if manifest is None else manifest_digest(manifest)


def _step(base: BaseName) -> str:
    step = step_of(base)
    return "whose step is not known" if step is None else f"step {step}"
