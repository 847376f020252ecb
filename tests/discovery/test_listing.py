"""Large local directories are looked into name by name, and say what small ones say."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt.checkpoint import CommitState
from ftckpt.discovery import listing as listings
from ftckpt.discovery.listing import FEW, listing_of_directory
from ftckpt.discovery.recognise import Recognition, recognise
from ftckpt.errors import NotFoundError
from ftckpt.formats.catalog import FORMATS
from ftckpt.storage.local.store import LocalStore
from ftckpt.storage.store import EntryKind
from tests.campaign import examples

LARGE = 3 * FEW


class Counted(LocalStore):
    """Remembers what was asked for."""

    def __init__(self, url: Path) -> None:
        super().__init__(str(url))
        self.listed: list[int | None] = []

    def names(self, path: str = "", most: int | None = None) -> dict[str, EntryKind]:
        self.listed.append(most)
        return super().names(path, most)


def make(path: Path, names: Collection[str]) -> None:
    path.mkdir(exist_ok=True)
    for name in names:
        (path / name).touch()


def recognised(store: LocalStore, path: str = "") -> Recognition | None:
    found = recognise(FORMATS, listing_of_directory(store, path))
    return None if found is None else found[1]


@pytest.mark.parametrize(
    ("markers", "data"),
    [
        ({".metadata"}, "__{}_0.distcp"),
        ({"ftckpt.delta"}, "{:05d}.blocks"),
        (set(), "{:05d}.blocks"),
        ({".metadata", "common.pt"}, "__{}_0.distcp"),
    ],
)
def test_a_commit_marker_is_found_without_a_listing(
    tmp_path: Path, markers: set[str], data: str
) -> None:
    make(tmp_path / "large", {data.format(n) for n in range(LARGE)} | markers)
    make(tmp_path / "small", {data.format(n) for n in range(3)} | markers)
    store = Counted(tmp_path)
    large = recognised(store, "large")
    assert store.listed == [FEW + 1]
    assert large is not None
    assert large == recognised(store, "small")


def test_the_marker_decides_and_not_what_was_seen_first(tmp_path: Path) -> None:
    make(tmp_path, [f"__{n}_0.distcp" for n in range(LARGE)])
    torn = recognised(LocalStore(str(tmp_path)))
    assert torn is not None
    assert torn.commit is CommitState.UNCOMMITTED
    (tmp_path / ".metadata").touch()
    whole = recognised(LocalStore(str(tmp_path)))
    assert whole is not None
    assert whole.commit is CommitState.COMMITTED


def test_what_no_marker_shows_is_listed_once(tmp_path: Path) -> None:
    make(tmp_path, [f"shard_{n:05d}_of_{LARGE:05d}.pt" for n in range(LARGE)])
    store = Counted(tmp_path)
    found = recognised(store)
    assert found is not None
    assert found.format == "ranks"
    assert store.listed == [FEW + 1, None]


def test_a_directory_of_few_names_is_known_whole(tmp_path: Path) -> None:
    make(tmp_path, [str(n) for n in range(FEW)])
    store = Counted(tmp_path)
    found = listing_of_directory(store, "")
    assert found.at_hand is found
    assert len(found.files) == FEW
    assert store.listed == [FEW + 1]
    (tmp_path / "one-more").touch()
    found = listing_of_directory(store, "")
    assert len(found.at_hand.files) == FEW + 1
    assert "one-more" in found.files
    (tmp_path / "two-more").touch()
    assert len(found.files) == FEW + 2


def test_a_name_is_no_path(tmp_path: Path) -> None:
    make(tmp_path, [str(n) for n in range(LARGE)])
    (tmp_path / "d").mkdir()
    (tmp_path / "d/x").touch()
    found = listing_of_directory(LocalStore(str(tmp_path)), "")
    for name in ("d/x", "d/../0", "", ".", "..", "a\0", "\ud800"):
        assert name not in found.files
        assert name not in found.directories
    assert "x" in found.inside("d").files


def test_what_goes_while_it_is_looked_at(tmp_path: Path) -> None:
    make(tmp_path, [str(n) for n in range(LARGE)])
    found = listing_of_directory(LocalStore(str(tmp_path)), "")
    assert "absent" not in found.files
    with pytest.raises(KeyError):
        found.files["absent"]
    names = list(found.files)
    os.remove(tmp_path / names[-1])
    assert found.files[names[-1]].kind is EntryKind.SPECIAL
    assert found.head(names[-1], 8) == b""
    with pytest.raises(NotFoundError):
        listing_of_directory(LocalStore(str(tmp_path)), "absent")


KINDS = st.dictionaries(
    st.text("ab.-", min_size=1, max_size=3).filter(lambda name: name.strip(".")),
    st.sampled_from(["file", "directory", "to-file", "to-directory", "to-nothing", "fifo"]),
    min_size=3,
    max_size=12,
)


@settings(max_examples=examples(25, 240), deadline=None)
@given(kinds=KINDS)
def test_large_and_small_say_the_same(
    tmp_path_factory: pytest.TempPathFactory, kinds: dict[str, str]
) -> None:
    top = tmp_path_factory.mktemp("kinds")
    (top / "file").write_text("12")
    (top / "directory").mkdir()
    (top / "here").mkdir()
    for name, kind in kinds.items():
        path = top / "here" / name
        if kind == "file":
            path.write_text(name)
        elif kind == "directory":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            path.symlink_to(Path("..", kind.removeprefix("to-")))
    store = LocalStore(str(top))
    small = listing_of_directory(store, "here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listings, "FEW", 1)
        one_by_one = listing_of_directory(store, "here")
        gone_through = listing_of_directory(store, "here")
    assert one_by_one.some is not None
    for large in (one_by_one, gone_through):
        if large is gone_through:
            assert list(large.files) == list(small.files)
            assert sorted(large.directories) == sorted(small.directories)
            assert len(large.directories) == len(small.directories)
        for name in [*kinds, "absent"]:
            assert (name in large.files) is (name in small.files)
            assert (name in large.directories) is (name in small.directories)
            assert large.files.get(name) == small.files.get(name)
            assert large.head(name, 2) == small.head(name, 2)
