"""Source and destination lie apart, however they are spelled, and every name is a file's."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt.errors import RefusedError, UnsafeError
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from ftckpt.transfer.layout import Layout, Literal, OutputFile
from ftckpt.transfer.places import absolute, place_of, require_apart, require_names


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    step = tmp_path / "run" / "step-1"
    step.mkdir(parents=True)
    (step / "data").write_bytes(b"1")
    (tmp_path / "linked").symlink_to(step)
    monkeypatch.chdir(tmp_path)
    return Source.directory(open_store("run/step-1"))


@pytest.mark.parametrize(
    "inside", ["run/step-1/out", "run/step-1/deep/out/", "linked/out", "run/../run/step-1/out"]
)
def test_nothing_is_written_into_the_source(source: Source, inside: str) -> None:
    with pytest.raises(RefusedError, match="lies inside the source"):
        require_apart(source, open_store(inside))


@pytest.mark.parametrize("beside", ["run/step-1-tp4", "run/step-2", "out", "/out"])
def test_what_lies_beside_it_may_be_written(source: Source, beside: str) -> None:
    require_apart(source, open_store(beside))


def test_what_is_built_for_a_destination_is_no_source_for_it(tmp_path: Path) -> None:
    state = tmp_path / ".out.ftckpt-staging" / "state"
    state.mkdir(parents=True)
    (state / "data").touch()
    for source in (
        Source.directory(open_store(str(state))),
        Source.file(open_store(str(state)), open_store(str(state)).stat("data")),
    ):
        with pytest.raises(RefusedError, match=r"where .* is built"):
            require_apart(source, open_store(f"{tmp_path}/out/"))
        require_apart(source, open_store(f"{tmp_path}/other"))


def test_places_in_an_object_store() -> None:
    store = open_store("memory://bucket/run/step-1")
    store.put("data", b"1")
    source = Source.directory(store)
    for url in ("memory://bucket/run/step-1/out", "memory://bucket/run"):
        with pytest.raises(RefusedError):
            require_apart(source, open_store(url))
    require_apart(source, open_store("memory://bucket/run/step-10"))


def test_a_place_has_one_name(source: Source, tmp_path: Path) -> None:
    spelled = ["linked", "run/step-1/", f"file://{tmp_path}/run/step-1", "run/../run/./step-1"]
    assert {place_of(Source.directory(open_store(s))) for s in spelled} == {place_of(source)}
    here = str(tmp_path / "run" / "out")
    for text in ("run/out", "run/out/", "linked/../out", f"file://{here}"):
        assert absolute(open_store(text)) == here
    assert absolute(open_store("/")) == "/"
    assert absolute(open_store("run/.")) == str(tmp_path / "run")


@pytest.mark.parametrize(
    "names",
    [
        ["../out"],
        ["/etc/passwd"],
        ["a//b"],
        ["a\0"],
        [""],
        ["a\\b"],
        ["a", "a"],
        ["a", "a/b"],
        ["a/b/c", "a/b"],
        ["ftckpt.manifest.json"],
        [".ftckpt/transfer.json"],
    ],
)
def test_names_that_are_no_files_are_refused(names: list[str]) -> None:
    files = [OutputFile(name, [Literal(b"")]) for name in names]
    with pytest.raises(UnsafeError) as caught:
        require_names(Layout(files=files[:1], commit=files[1:]))
    assert caught.value.kind == "unsafe-path"


def test_ordinary_names_are_taken() -> None:
    names = ["a", "b/a", "b/c/a", ".metadata", "ftckpt.objects/index.json", "a" * 300]
    require_names(Layout(files=[OutputFile(name, []) for name in names]))
