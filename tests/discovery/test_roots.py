from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.discovery import resolve as opening
from ftckpt.discovery.candidates import child_of_step, newest_child
from ftckpt.discovery.pointers import Pointer
from ftckpt.discovery.promotion import moves
from ftckpt.discovery.recognise import Listing, Recognition
from ftckpt.discovery.step_names import is_put_aside, step_in_name
from ftckpt.errors import DeniedError, NotFoundError, RefusedError, UnsupportedError, UsageError
from ftckpt.storage import StoreOptions
from tests.builders.small_format import Small, read, write

OPTIONS = StoreOptions()


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-1000", 1000),
        ("step_1000", 1000),
        ("step1000", 1000),
        ("global_step7", 7),
        ("global_step_7", 7),
        ("iter_0000042", 42),
        ("checkpoint-500", 500),
        ("checkpoint_3", 3),
        ("epoch=2-step=300.ckpt", 300),
        ("epoch=2-step=300-v1.ckpt", 300),
        ("step=2.ckpt", 2),
        ("step-10.safetensors", 10),
        ("0012", 12),
        ("epoch=0-step=100-val_loss=0.25", 100),
        ("epoch=0-step=100-val_loss=0.25.ckpt", 100),
        ("epoch=0-step=100-val_loss=-1.5e-05-acc=nan-v2.ckpt", 100),
        ("val_loss=0.25-global_step=7", 7),
        ("best-step-250", 250),
        ("best_step_250.pt", 250),
        ("last-epoch=1-step=8.ckpt", 8),
        ("final-checkpoint-12", 12),
        ("epoch_3_step_500", 500),
        ("epoch3-step500.pt", 500),
        ("best-250", None),
        ("best", None),
        ("old-best-step-10", None),
        ("old-epoch=0-step=10", None),
        ("best-step-10.tmp", None),
        ("epoch=0-val_loss=0.25", None),
        ("step=5-step=10", None),
        ("step=10-val_loss=", None),
        ("step=10-old", None),
        ("last.ckpt", None),
        ("old-step-10", None),
        ("step-10-copy", None),
        ("step-10.old", None),
        ("step-", None),
        ("step--1", None),
        ("step-1e3", None),
        ("release", None),
        ("attempt-5", None),
        ("step-" + "9" * 40, None),
        ("step-٣", None),
    ],
)
def test_only_whole_names_say_a_step(name: str, step: int | None) -> None:
    assert step_in_name(name) == step


@given(st.text(max_size=20), st.integers(0, 10**12), st.text(min_size=1, max_size=20))
def test_text_around_a_step_is_never_that_step(before: str, step: int, after: str) -> None:
    # What follows is no digit and no suffix, so the whole name cannot be a known pattern.
    name = f"{before}step-{step}@{after}"
    assert step_in_name(name) is None


@pytest.mark.parametrize("name", [".ftckpt-tmp-0123456789abcdef", ".tmp", "-tmp", ".part"])
def test_a_temporary_file_in_a_root_is_a_foreign_name(tmp_path: Path, name: str) -> None:
    write(tmp_path, "step-10", 10)
    (tmp_path / name).touch()
    root = read(tmp_path)
    assert [c.path for c in root.candidates] == ["step-10"]
    assert root.foreign == (name,)


def test_children_are_recognised_and_other_names_reported(tmp_path: Path) -> None:
    write(tmp_path, "step-10", 10)
    write(tmp_path, "step-9", 9)
    write(tmp_path, "best", 9)
    write(tmp_path, "step-11.tmp", 11)
    (tmp_path / "logs").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / ".ftckpt").mkdir()
    (tmp_path / "lost+found").mkdir()
    root = read(tmp_path)
    assert [c.candidate.path for c in root.children()] == ["step-10", "step-9", "best"]
    assert set(root.foreign) == {"notes.txt", ".ftckpt", "lost+found"}
    assert root.url_of(root.children()[0].candidate) == f"{tmp_path}/step-10"


def test_a_root_is_known_without_listing_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftckpt.storage.local.store import LocalStore

    for step in range(200):
        write(tmp_path, f"step-{step}", step)
    listed: list[str] = []
    children = LocalStore.children

    def counted(self: LocalStore, path: str = "") -> object:
        listed.append(path)
        return children(self, path)

    def refused(self: LocalStore, path: str = "") -> object:
        raise AssertionError(f"walked {path}")

    monkeypatch.setattr(LocalStore, "children", counted)
    monkeypatch.setattr(LocalStore, "walk", refused)
    target = opening.open_target(str(tmp_path), [Small()], OPTIONS)
    assert target.root is not None
    assert len(target.root.candidates) == 200
    assert len(listed) <= 4


def test_a_directory_that_holds_the_steps_is_the_root(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").mkdir()
    write(tmp_path / "checkpoint", "step-3", 3)
    root = read(tmp_path)
    assert root.url == f"{tmp_path}/checkpoint"
    assert root.url_of(root.candidates[0]) == f"{tmp_path}/checkpoint/step-3"


def test_two_directories_of_steps_are_ambiguous(tmp_path: Path) -> None:
    write(tmp_path / "run1", "step-3", 3)
    write(tmp_path / "run2", "step-3", 3)
    with pytest.raises(UsageError, match="several roots") as caught:
        read(tmp_path)
    assert "run2" in caught.value.hint


def test_a_step_may_hold_one_checkpoint_a_model(tmp_path: Path) -> None:
    write(tmp_path / "global_step_5", "actor", 5)
    write(tmp_path / "global_step_5", "critic", 5)
    (child,) = read(tmp_path).children()
    assert child.part.entry.path == "global_step_5"
    assert child.part.recognition.parts == ("actor", "critic")


def test_a_checkpoint_is_no_root(tmp_path: Path) -> None:
    write(tmp_path, "step-3", 3)
    with pytest.raises(UsageError, match="is a checkpoint, not a root"):
        read(tmp_path / "step-3")


def test_a_final_checkpoint_above_its_steps_leaves_a_root(tmp_path: Path) -> None:
    write(tmp_path, "run", 9)
    write(tmp_path / "run", "checkpoint-5", 5)
    assert [c.path for c in read(tmp_path / "run").candidates] == ["checkpoint-5"]
    target = opening.open_target(str(tmp_path / "run"), [Small()], OPTIONS)
    assert target.open().step == 9


def test_pointers_say_what_they_mean(tmp_path: Path) -> None:
    write(tmp_path, "iter_0000010", 10)
    write(tmp_path, "global_step20", 20)
    (tmp_path / "latest").write_text("global_step20\n")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    (tmp_path / "latest_universal").write_text("global_step30_universal")
    (tmp_path / "last.ckpt").symlink_to("global_step20")
    (tmp_path / "best").symlink_to(tmp_path / "iter_0000010")
    (tmp_path / "gone").symlink_to("step-99")
    (tmp_path / "dlrover_latest.txt").write_bytes(b"\xff\x00")
    root = read(tmp_path)
    assert root.pointers == (
        Pointer("best", str(tmp_path / "iter_0000010"), "iter_0000010", 10),
        Pointer("dlrover_latest.txt", "(2 bytes that are no name)", None, None),
        Pointer("gone", "step-99", None, None),
        Pointer("last.ckpt", "global_step20", "global_step20", 20),
        Pointer("latest", "global_step20", "global_step20", 20),
        Pointer("latest_checkpointed_iteration.txt", "10", "iter_0000010", 10),
        Pointer("latest_universal", "global_step30_universal", None, None),
    )
    assert [p.name for p in root.pointers if p.dangling] == [
        "dlrover_latest.txt",
        "gone",
        "latest_universal",
    ]
    assert [c.path for c in root.candidates] == ["global_step20", "iter_0000010"]


def test_the_tracker_of_skyrl_is_a_pointer(tmp_path: Path) -> None:
    write(tmp_path, "global_step_5", 5)
    (tmp_path / "latest_ckpt_global_step.txt").write_text("5")
    assert [p.target for p in read(tmp_path).pointers] == ["global_step_5"]


def test_release_is_a_pointer_to_a_name(tmp_path: Path) -> None:
    write(tmp_path, "release", None)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    (pointer,) = read(tmp_path).pointers
    assert pointer.target == "release"


def test_a_link_to_elsewhere_is_a_checkpoint_of_this_root(tmp_path: Path) -> None:
    write(tmp_path / "cold", "step-1", 1)
    root = tmp_path / "hot"
    write(root, "step-2", 2)
    (root / "step-1").symlink_to(tmp_path / "cold" / "step-1")
    assert [c.candidate.path for c in read(root).children()] == ["step-2", "step-1"]


def test_selectors(tmp_path: Path) -> None:
    write(tmp_path, "step-3", 3)
    write(tmp_path, "step-4", 4)
    small = [Small()]
    for text, name in (("@3", "step-3"), ("@latest", "step-4")):
        target = opening.open_target(f"{tmp_path}{text}", small, OPTIONS)
        assert target.root is not None
        which = target.place.which
        child = newest_child(target.root) if which == "latest" else child_of_step(target.root, 3)
        assert child.candidate.path == name
    with pytest.raises(NotFoundError):
        child_of_step(read(tmp_path), 5)
    with pytest.raises(NotFoundError):
        opening.open_target(f"{tmp_path}@other", small, OPTIONS)


def test_a_step_is_also_found_by_content(tmp_path: Path) -> None:
    write(tmp_path, "step-3", 3)
    write(tmp_path, "best", 7)
    assert child_of_step(read(tmp_path), 7).candidate.path == "best"


def test_a_path_that_exists_wins_over_a_selector(tmp_path: Path) -> None:
    write(tmp_path, "run", 1)
    write(tmp_path, "run@3", 2)
    place = opening.locate(str(tmp_path / "run@3"), OPTIONS)
    assert (place.which, place.url) == ("", str(tmp_path / "run@3"))


def test_places_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotFoundError, match="holds no checkpoint"):
        opening.open_target(str(tmp_path / "empty"), [Small()], OPTIONS)
    with pytest.raises(UnsupportedError, match="not a checkpoint of any known format"):
        opening.open_target(str(tmp_path / "file"), [Small()], OPTIONS)
    with pytest.raises(NotFoundError):
        opening.open_target(str(tmp_path / "absent"), [Small()], OPTIONS)


def test_relative_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "step-3", 3)
    monkeypatch.chdir(tmp_path)
    for typed, shown in ((".", "./step-3"), ("../" + tmp_path.name, f"../{tmp_path.name}/step-3")):
        root = read(typed)
        assert root.url_of(root.candidates[0]) == shown


def test_an_error_is_raised_only_where_nothing_else_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(3):
        write(tmp_path, f"step-{step}", step)

    def denied(name: str) -> None:
        recognise = Small.recognise

        def one(self: Small, listing: Listing) -> Recognition | None:
            if any(entry.path.startswith(name) for entry in listing.files.values()):
                raise DeniedError("no")
            return recognise(self, listing)

        monkeypatch.setattr(Small, "recognise", one)

    denied("step-2")
    assert read(tmp_path).holds_checkpoints()
    with pytest.raises(DeniedError):
        read(tmp_path).children()
    denied("step-")
    with pytest.raises(DeniedError):
        read(tmp_path).holds_checkpoints()


@pytest.mark.parametrize(
    "name",
    [
        "step-40.bad.pt",
        "step_40.old.safetensors",
        "epoch=1-step=100-old.ckpt",
        "step-40.bad-nan",
        "step-40.bad.bak",
        "step-40.invalid",
        "step-40.rejected",
        "step-40.pt.bak",
        "old-step-40.bad",
        "step-40.bak.2026-01-02",
        "step-40.bad2",
    ],
)
def test_names_that_put_a_checkpoint_aside(name: str) -> None:
    assert is_put_aside(name)


@pytest.mark.parametrize(
    "name",
    [
        "backup_1",
        "backup_00010",
        "orig_00010",
        "failed_7",
        "old_3",
        "40.bad",
        "bad.pt",
        "step-40.pt",
        "step-40.badge",
        "step-40-old-tokenizer",
    ],
)
def test_a_bare_number_or_another_word_puts_nothing_aside(name: str) -> None:
    assert not is_put_aside(name)


def test_a_long_name_is_judged_at_once() -> None:
    assert not is_put_aside("x.old" + "1" * 200 + "!")  # with backtracking it takes years


SECRET = "[default]\naws_secret_access_key = wJalrXUtnFEMI\n"


@pytest.mark.parametrize("name", ["latest", "last-known-good", "latest_step.txt", "best"])
@pytest.mark.parametrize("secret", [SECRET, "wJalrXUtnFEMI"])
def test_a_pointer_that_leads_out_of_the_root_is_not_read(
    tmp_path: Path, name: str, secret: str
) -> None:
    """Who may write a root has not, by a link, whatever the operator can read."""
    write(tmp_path / "run", "step-5", 5)
    (tmp_path / "credentials").write_text(secret)
    (tmp_path / "run" / name).symlink_to(tmp_path / "credentials")
    root = read(tmp_path / "run")
    assert "wJalrXUtnFEMI" not in repr(root.pointers)
    assert all(p.leaves and p.dangling for p in root.pointers)
    if root.pointers:
        with pytest.raises(RefusedError, match="outside the root"):
            moves(root, "step-5", 5, [name], backwards=True)


def test_a_pointer_that_is_a_link_within_its_root_is_read(tmp_path: Path) -> None:
    write(tmp_path, "step-5", 5)
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data/latest").write_text("step-5\n")
    (tmp_path / "latest").symlink_to("..data/latest")
    assert [(p.name, p.target, p.leaves) for p in read(tmp_path).pointers] == [
        ("latest", "step-5", False)
    ]


@pytest.mark.parametrize("text", [SECRET, "x" * 256, "a\x1bb", "step-5\nstep-6"])
def test_what_is_no_name_is_not_quoted(tmp_path: Path, text: str) -> None:
    write(tmp_path, "step-5", 5)
    (tmp_path / "latest").write_text(text)
    (found,) = read(tmp_path).pointers
    assert found.says == f"({len(text)} bytes that are no name)"
    assert found.target is None


def test_a_long_path_means_the_name_at_its_end(tmp_path: Path) -> None:
    write(tmp_path, "step-5", 5)
    (tmp_path / "latest").write_text("/mnt" * 200 + "/step-5/")
    (found,) = read(tmp_path).pointers
    assert (found.says, found.target) == ("step-5", "step-5")
