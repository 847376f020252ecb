"""Which directories are looked into, and what their names say."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.recognise import Listing, Recognition
from ftckpt.formats.folders import Folder
from ftckpt.formats.folders.parts import role
from ftckpt.storage.source import Source
from ftckpt.storage.store import Entry

Tree = Mapping[str, "Tree | None"]


class Marked:
    """Know a directory with the file `marker`, and one with `torn` as unfinished."""

    name = "marked"

    def recognise(self, listing: Listing) -> Recognition | None:
        if "marker" in listing.files:
            return Recognition(self.name, "has marker", CommitState.COMMITTED)
        if "torn" in listing.files:
            return Recognition(self.name, "has torn", CommitState.UNCOMMITTED)
        return None

    def open(self, source: Source) -> None:
        raise AssertionError("names are enough")


STORE: Tree = {"marker": None}


def listing_of(tree: Tree, called: str, asked: list[str]) -> Listing:
    """Return a directory's listing; `asked` is told of each directory that is looked into."""

    def inside(name: str) -> Listing:
        asked.append(name)
        below = tree[name]
        assert below is not None
        return listing_of(below, name, asked)

    files = {n: Entry(n, 1, None) for n, below in tree.items() if below is None}
    folders: Collection[str] = frozenset(n for n, below in tree.items() if below is not None)
    return Listing(files, folders, lambda *_: b"", inside, called=called)


def found(tree: Tree, called: str = "any") -> tuple[Recognition | None, list[str]]:
    asked: list[str] = []
    form = Folder(lambda: [Marked()])  # type: ignore[list-item]  # it opens nothing
    return form.recognise(listing_of(tree, called, asked)), asked


@pytest.mark.parametrize(
    "tree",
    [
        {f"step-{n}": STORE for n in range(2000)},
        {str(n): STORE for n in range(2000)},
        {"checkpoint-5": STORE, "model": STORE, "optimizer": STORE},
        {"good": STORE, "best": STORE, "paper-submission": STORE},
        {"logs": {}, "eval": {}, "model": STORE},
        {f"run_{n}": STORE for n in range(300)},
        {"model_100.pt": None, "optimizer_100.pt": None},
        {"best_model.pt": None, "last_optimizer.pt": None},
    ],
)
def test_a_root_is_told_by_its_names_alone(tree: Tree) -> None:
    assert found(tree) == (None, [])


def test_names_tell_parts() -> None:
    known, asked = found({"model": STORE, "optim": STORE, "config.json": None})
    assert known is not None
    assert (known.format, known.commit) == ("bundle", CommitState.COMMITTED)
    assert asked == ["model", "optim"]
    assert found({"actor": STORE, "critic": STORE})[0] is not None
    assert found({"model.pt": None, "scheduler.pt": None})[0] is not None
    assert found({"adapter": STORE})[0] is None


def test_a_folder_named_by_a_step_may_have_any_parts() -> None:
    for called in ("step-7", "epoch_0_step_7", "checkpoint_000007", "0000007"):
        assert found({"foo": STORE, "bar": STORE}, called)[0] is not None
    assert found({"foo": {"deep": {"deeper": STORE}}}, "step-7")[0] is not None
    assert found({"step-1": STORE, "step-2": STORE}, "step-7")[0] is None
    assert found({"foo": {"step-1": STORE}}, "step-7")[0] is None  # a root inside
    assert found({"epoch_0": STORE, "epoch_1": STORE}, "step1")[0] is None  # a stage of training
    assert found({"01": STORE, "02": STORE}, "2024")[0] is None
    assert found({"checkpoint": STORE}, "checkpoint_000002")[0] is not None
    assert found({"best.pt": None, "last.pt": None}, "7")[0] is None  # a run's number
    assert found({"foo": STORE, "ftckpt.manifest.json": None})[0] is not None


def test_a_part_that_is_not_finished_counts() -> None:
    known, _ = found({"model": STORE, "optim": {"torn": None}})
    assert known is not None
    assert known.commit is CommitState.UNCOMMITTED
    known, _ = found({"model": STORE, "optimizer.pt": None})
    assert known is not None
    assert known.commit is CommitState.NO_MARKER


def test_what_every_step_has_is_named_without_numbers() -> None:
    one, _ = found({"train": {"marker": None, "rank0.pt": None, "rank1.pt": None}}, "step-7")
    two, _ = found({"train": {"marker": None, "rank0.pt": None}}, "step-8")
    assert one is not None
    assert two is not None
    assert one.parts == two.parts == ("train/rank#.pt",)


def test_few_folders_are_looked_into() -> None:
    wide: Tree = {f"a{n}": {f"b{m}": {} for m in range(50)} for n in range(50)}
    known, asked = found(wide, "step-7")
    assert known is None
    assert len(asked) <= 64


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model_and_optim", "optimizer"), ("lr_scheduler", "state"), ("dataloader.pt", "state"),
        ("pretrained_model", "model"), ("critic", "critic"), ("model-rank=0.pt", "model"),
        ("sdp_00.pt", ""), ("model_best.pt", ""), ("optimizer_200.pt", ""), ("step-3", ""),
        ("noam_scheduler.ckpt", "state"), ("foo", ""),
    ],
)  # fmt: skip
def test_what_a_name_says(name: str, said: str) -> None:
    assert role(name) == said
