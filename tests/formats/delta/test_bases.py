"""What a kept delta depends on is kept: through chains, across runs, wherever a root was moved."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt import seal
from ftckpt.delta import NAME
from ftckpt.delta.index import HEAD
from ftckpt.delta.index.head import _member, read_base, recorded_path, resolved
from ftckpt.discovery import resolve as opening
from ftckpt.errors import CorruptError, DeniedError, UnsupportedError
from ftckpt.formats.catalog import FORMATS
from ftckpt.manifest import Manifest
from ftckpt.manifest.locate import read as read_manifest
from ftckpt.retention.apply.prepare import Prepared, prepare, remember
from ftckpt.retention.apply.purge import purge
from ftckpt.retention.policy import Policy
from ftckpt.retention.scan.entries import EntryClass
from ftckpt.retention.scan.entry import no_bases
from ftckpt.storage import StoreOptions, open_store
from ftckpt.storage.local.store import LocalStore
from ftckpt.storage.store import Store
from tests.builders.checkpoints import open_checkpoint
from tests.delta.on_disk import pack_delta, put, run_of, save_full, state_at, training

HOUR = 3600.0


def plan_of(root: Path | str, policy: Policy) -> Prepared:
    place = opening.locate(str(root), StoreOptions())
    return prepare(place, FORMATS, policy, time.time() + HOUR)


def dropped(prepared: Prepared) -> list[str]:
    return sorted(decision.entry.name for decision in prepared.plan.drop)


def mixed_run(root: Path) -> None:
    """Write steps 0 (full), 1 based on 0, 2 full, 3 on 1, 4 full, 5 on 3."""
    saves = training(6)
    for step, upon in enumerate((None, 0, None, 1, None, 3)):
        if upon is None:
            save_full(root / f"step-{step}", saves[step])
            continue
        whole = save_full(root.parent / f"{root.name}-whole" / str(step), saves[step])
        target = state_at(open_checkpoint(whole))
        pack_delta(root / f"step-{step}", target, root / f"step-{upon}", step=step)


def test_a_kept_delta_keeps_all_that_it_stands_upon(tmp_path: Path) -> None:
    root = tmp_path / "run"
    mixed_run(root)
    assert dropped(plan_of(root, Policy(keep_last=1))) == ["step-2", "step-4"]


def test_the_bases_go_where_that_is_spelled_out(tmp_path: Path) -> None:
    root = tmp_path / "run"
    mixed_run(root)
    place = opening.locate(str(root), StoreOptions())
    blind = prepare(place, FORMATS, Policy(keep_last=1), time.time() + HOUR, bases=no_bases)
    assert set(dropped(blind)) >= {"step-0", "step-1", "step-2"}


def test_the_recipe_of_the_page_leaves_every_delta_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    mixed_run(root)
    page = (Path(__file__).parents[3] / "docs/retention.md").read_text()
    recipe = page.split("## From Python")[1].split("```python\n")[1].split("```")[0]
    assert "bases" not in recipe
    recipe = recipe.replace("/ckpt/run7", str(root)).replace("keep_last=3", "keep_last=1")
    # A second time two days later, so that the trash is reclaimed too.
    for later in (0.0, 48 * HOUR):
        moment = time.time() + later
        monkeypatch.setattr(time, "time", lambda moment=moment: moment)
        exec(recipe, {})
    assert sorted(p.name for p in root.glob("step-*")) == ["step-0", "step-1", "step-3", "step-5"]
    assert not list((root / ".ftckpt/trash").iterdir())
    assert capsys.readouterr().out.count("0 0\n") == 2


def test_a_base_in_the_trash_is_not_reclaimed(tmp_path: Path) -> None:
    root = tmp_path / "run"
    mixed_run(root)
    trash = root / ".ftckpt/trash"
    trash.mkdir(parents=True)
    for step in (1, 4):
        (root / f"step-{step}").rename(trash / f"20200101T000000.000000Z~step-{step}")
    place = opening.locate(str(root), StoreOptions())
    purged = purge(place, FORMATS, actor="me", now=time.time)
    assert [t.name for t in purged.erased] == ["step-4"]
    assert [str(r) for r in purged.held.values()] == ["base: step-3 depends on it"]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_delta_that_passed_and_has_lost_its_base_is_no_survivor(
    tmp_path: Path, elsewhere: bool
) -> None:
    root = tmp_path / "run"
    mixed_run(root)
    if elsewhere:
        (tmp_path / "archive").mkdir()
        for step in (3, 5):
            (root / f"step-{step}").rename(tmp_path / "archive" / f"step-{step}")
        base = (root / "step-0").rename(tmp_path / "archive" / "step-0")
        shutil.rmtree(root / "step-1")
        target = state_at(open_checkpoint(root / "step-4"))
        pack_delta(root / "step-7", target, base, step=7, place=str(base))
    policy = Policy(keep_last=1)
    before = plan_of(root, policy)
    assert "step-4" in dropped(before)
    remember(before)
    shutil.rmtree(base if elsewhere else root / "step-0")
    after = plan_of(root, policy)
    assert "step-4" not in dropped(after)
    last = after.found["step-7" if elsewhere else "step-5"].entry
    assert last.entry_class is EntryClass.FOREIGN


def test_a_moved_root_keeps_its_chains(tmp_path: Path) -> None:
    mixed_run(tmp_path / "run")
    moved = (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert dropped(plan_of(moved, Policy(keep_last=1))) == ["step-2", "step-4"]


def test_a_base_in_another_run_is_kept(tmp_path: Path) -> None:
    saves = training(4)
    for step in range(3):
        save_full(tmp_path / "one" / f"step-{step}", saves[step])
    whole = save_full(tmp_path.parent / f"{tmp_path.name}-whole", saves[3])
    target = state_at(open_checkpoint(whole))
    for step in (8, 9):
        pack_delta(
            tmp_path / "two" / f"step-{step}", target, tmp_path / "one" / "step-0", step=step
        )
    prepared = plan_of(tmp_path, Policy(keep_last=1))
    assert dropped(prepared) == ["one/step-1", "two/step-8"]


def test_a_base_that_went_is_looked_for_among_those_of_its_step(tmp_path: Path) -> None:
    root = tmp_path / "run"
    mixed_run(root)
    (root / "step-0").rename(root / "checkpoint-0")
    prepared = plan_of(root, Policy(keep_last=1))
    assert dropped(prepared) == ["step-2", "step-4"]
    assert prepared.found["step-1"].entry.bases == ("step-0", "checkpoint-0")


@pytest.mark.parametrize("name", ["warm-up", "step-77"])
def test_a_renamed_base_is_kept(tmp_path: Path, name: str) -> None:
    root, saves = tmp_path / "run", training(4)
    for step in (0, 2, 3):
        seal(str(save_full(root / f"step-{step}", saves[step])))
    target = state_at(open_checkpoint(save_full(tmp_path / "whole", saves[1])))
    pack_delta(root / "step-1", target, root / "step-0", step=1)
    (root / "step-0").rename(root / name)
    prepared = plan_of(root, Policy(keep_last=1, min_survivors=1))
    assert name in prepared.found["step-1"].entry.bases
    assert name not in dropped(prepared)
    assert "step-2" in dropped(prepared)


def test_manifests_are_read_once_and_one_that_may_not_be_read_may_be_the_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, saves = tmp_path / "run", training(8)
    for step in (0, 4, 5, 6):
        seal(str(save_full(root / f"step-{step}", saves[step])))
    target = state_at(open_checkpoint(save_full(tmp_path / "whole", saves[1])))
    for step in (1, 2, 3):
        pack_delta(root / f"step-{step}", target, root / "step-0", step=step)
    shutil.rmtree(root / "step-0")
    asked: list[str] = []

    def read(store: Store, path: str) -> Manifest:
        asked.append(path)
        if path.startswith("step-4/"):
            raise DeniedError("not allowed")
        return read_manifest(store, path)

    monkeypatch.setattr("ftckpt.formats.delta.bases.read", read)
    prepared = plan_of(root, Policy(keep_last=1, min_survivors=1))
    assert len(asked) == len(set(asked)) == 6
    assert prepared.found["step-1"].entry.bases == ("step-0", "step-4")
    assert "step-5" in dropped(prepared)


def test_a_store_of_objects(tmp_path: Path) -> None:
    mixed_run(tmp_path / "run")
    store = open_store("memory://delta-bases")
    for step in range(6):
        put(store, tmp_path / "run" / f"step-{step}", f"step-{step}")
    assert dropped(plan_of("memory://delta-bases", Policy(keep_last=1))) == ["step-2", "step-4"]


def test_only_the_first_bytes_of_an_index_are_read(tmp_path: Path) -> None:
    run_of(tmp_path, 2)
    index = tmp_path / "step-1" / NAME
    index.write_bytes(index.read_bytes() + bytes(1 << 20))
    store = LocalStore(str(tmp_path))
    base = read_base(store, "step-1")
    assert base is not None
    assert (base.path, base.step) == ("../step-0", None)
    assert store.usage().bytes_read < 5000


def test_a_full_delta_has_no_base(tmp_path: Path) -> None:
    whole = save_full(tmp_path / "whole", training(1)[0])
    pack_delta(tmp_path / "step-1", state_at(open_checkpoint(whole)), step=1)
    assert read_base(LocalStore(str(tmp_path)), "step-1") is None


def test_a_base_behind_the_first_read_is_found(tmp_path: Path) -> None:
    run_of(tmp_path, 2)
    index = tmp_path / "step-1" / NAME
    data = index.read_bytes()
    old = b'"tool":"ftckpt 0.1.0"'
    new = b'"tool":"' + b"f" * 100_000 + b'"'
    _, _, _, size, _ = HEAD.unpack_from(data)
    head = data[:16] + (size + len(new) - len(old)).to_bytes(8, "little") + data[24 : HEAD.size]
    index.write_bytes(head + data[HEAD.size :].replace(old, new, 1))
    base = read_base(LocalStore(str(tmp_path)), "step-1")
    assert base is not None
    assert base.path == "../step-0"


@pytest.mark.parametrize("keep", [0, 7, 31, 40, 200])
def test_a_cut_index_is_damage(tmp_path: Path, keep: int) -> None:
    run_of(tmp_path, 2)
    index = tmp_path / "step-1" / NAME
    index.write_bytes(index.read_bytes()[:keep])
    with pytest.raises(CorruptError) as raised:
        read_base(LocalStore(str(tmp_path)), "step-1")
    assert raised.value.kind == "bad-delta"


def test_of_another_version_nothing_is_known(tmp_path: Path) -> None:
    run_of(tmp_path, 2)
    index = tmp_path / "step-1" / NAME
    data = bytearray(index.read_bytes())
    data[8] = 2
    index.write_bytes(data)
    with pytest.raises(UnsupportedError, match="version 2"):
        plan_of(tmp_path, Policy(keep_last=1))


@pytest.mark.parametrize(
    ("base", "delta", "recorded"),
    [
        ("/ckpt/run/step-1", "/ckpt/run/step-2", "../step-1"),
        ("/ckpt/full/step-1", "/ckpt/deltas/step-2", "../../full/step-1"),
        ("/ckpt/a/b/full/step-1", "/ckpt/c/d/step-2", "/ckpt/a/b/full/step-1"),
        ("/nvme/step-1", "/ckpt/step-2", "/nvme/step-1"),
        ("s3://b/run/step-1", "s3://b/run/step-2", "../step-1"),
        ("s3://b/step-1", "s3://b/run/step-2", "../../step-1"),
        ("s3://other/run/step-1", "s3://b/run/step-2", "s3://other/run/step-1"),
        ("s3://b/run/step-1", "/ckpt/step-2", "s3://b/run/step-1"),
        ("/ckpt/run/step-1", "s3://b/run/step-2", "/ckpt/run/step-1"),
        ("/ckpt/run/step-2/inside", "/ckpt/run/step-2", "/ckpt/run/step-2/inside"),
    ],
)
def test_places(base: str, delta: str, recorded: str) -> None:
    assert recorded_path(base, delta) == recorded
    assert resolved(recorded, delta) == base


_NAMES = st.lists(st.sampled_from(["a", "b", "step-1", "x.y"]), min_size=1, max_size=5)


@given(
    st.sampled_from(["", "s3://b", "memory://m"]), _NAMES, st.sampled_from(["", "s3://b"]), _NAMES
)
def test_what_is_recorded_is_resolved(
    near: str, own: list[str], far: str, other: list[str]
) -> None:
    delta, base = "/".join([near, *own]), "/".join([far, *other])
    recorded = recorded_path(base, delta)
    assert resolved(recorded, delta) == base
    if recorded.startswith("."):  # both were moved together
        moved = f"{near}/moved/further"
        assert resolved(recorded, moved + delta.removeprefix(near)) == moved + base.removeprefix(
            far
        )


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), _VALUES, max_size=5), _VALUES, st.integers(1, 40))
def test_a_member_is_found_however_much_is_read_first(
    before: dict[str, Any], value: Any, first: int
) -> None:
    before.pop("base", None)
    text = json.dumps(before | {"base": value, "tensors": [1] * 50}, separators=(",", ":"))
    assert _member(text) == value
    # A text that ends too early never gives another value: it fails, and more is read.
    with suppress(ValueError, IndexError):
        assert _member(text[: len(text) * first // 40]) == value


def test_a_place_does_not_climb_out_of_its_bucket() -> None:
    assert resolved("../../../../x", "s3://b/run/step-2") == "s3://b/x"
