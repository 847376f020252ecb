"""What was written of a tensor is found again, and what others need is written first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ftckpt.digests.blocks
import ftckpt.transfer.write.blocks
import ftckpt.transfer.write.files
import ftckpt.workers.processes
from ftckpt.checkpoint import Decoding
from ftckpt.transfer.layout import Elements, Layout, Literal, OutputFile
from ftckpt.transfer.read.elements import Gatherer
from ftckpt.transfer.staging.local import LocalStaging
from ftckpt.transfer.write.files import make_shares
from ftckpt.transfer.write.peek_output import Peek, Written, depth_of, depths_of, in_order
from tests.builders.materialise import file_bytes
from tests.builders.raw_checkpoint import RawCheckpoint
from tests.campaign import examples
from tests.delta.packs import tensors_of
from tests.transfer.contents import content_of
from tests.transfer.layouts import transfers

Helpers = Mapping[str, Sequence[str]]


@dataclass
class Helped(Decoding):
    """How the tensors that need others are decoded."""

    needs: Helpers

    def helpers(self) -> Helpers:
        return self.needs


@dataclass(kw_only=True)
class Needing(RawCheckpoint):
    """A checkpoint some of whose tensors need others."""

    needs: Helpers = field(default_factory=dict)

    @property
    def decoding(self) -> Decoding:
        return Helped(self.needs)


def needing(checkpoint: Any, needs: Helpers) -> Needing:
    return Needing(source=checkpoint.source, tensors=checkpoint.tensors, objects={}, needs=needs)


def peek_into(files: Mapping[str, bytes]) -> Peek:
    def peek(path: str, offset: int, view: memoryview) -> bool:
        if path not in files:
            return False
        view[:] = files[path][offset : offset + len(view)]
        return True

    return peek


@settings(deadline=None, max_examples=examples(50, 800))
@given(transfers(), st.data())
def test_what_is_found_is_the_tensor(drawn: tuple[RawCheckpoint, Layout], data: Any) -> None:
    checkpoint, layout = drawn
    files = {file.path: file_bytes(file, checkpoint) for file in layout.files}
    source = needing(checkpoint, {"one": list(checkpoint.tensors)})
    written = Written(layout, source, peek_into(files))
    for key, whole in tensors_of(checkpoint).items():
        start = data.draw(st.integers(0, len(whole)))
        stop = data.draw(st.integers(start, len(whole)))
        view = bytearray(stop - start)
        if written.look(key, start, memoryview(view)):
            assert view == whole[start:stop]


def test_what_is_written_in_pieces_of_several_files_is_found() -> None:
    content = content_of({"w": ("model", "param", (6, 2), "float32")})
    shard = content.whole("w")
    files = [
        OutputFile("a", [Literal(b"head"), Elements(shard, 7, 12)]),
        OutputFile("b", [Elements(shard, 0, 7), Literal(b"tail")]),
    ]
    layout, source = Layout(files=files), needing(content.checkpoint, {"one": ["w"]})
    truth = bytes(range(48))
    held = {"a": b"head" + truth[28:], "b": truth[:28] + b"tail"}
    view = bytearray(30)
    assert Written(layout, source, peek_into(held)).look("w", 10, memoryview(view))
    assert view == truth[10:40]
    assert not Written(layout, source, peek_into({"b": held["b"]})).look("w", 10, memoryview(view))
    nobody_needs_it = Written(layout, needing(content.checkpoint, {}), peek_into(held))
    assert not nobody_needs_it.look("w", 10, memoryview(view))


def test_of_copies_the_one_that_is_made_first_is_found() -> None:
    content = content_of({"w": ("model", "param", (6, 2), "float32")})
    whole = Elements.all(content.whole("w"))
    layout = Layout(files=[OutputFile(path, [whole]) for path in "bca"])
    source, truth = needing(content.checkpoint, {"one": ["w"]}), bytes(range(48))
    for held, found in ({"b": truth}, True), ({"c": truth, "a": truth}, False):
        view = memoryview(bytearray(30))
        assert Written(layout, source, peek_into(held)).look("w", 10, view) is found


def test_what_others_need_is_made_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (
        ftckpt.digests.blocks,
        ftckpt.transfer.write.blocks,
        ftckpt.transfer.write.files,
    ):
        monkeypatch.setattr(module, "BLOCK", 32)
    content = content_of(dict.fromkeys("abcd", ("model", "param", (8,), "float32")))
    needs = {"a": ["b", "c"], "c": ["b"], "d": ["a"]}
    source = needing(content.checkpoint, needs)
    depths = depths_of(source)
    assert depths == {"c": 1, "a": 2, "d": 3}

    def file(path: str, names: str) -> OutputFile:
        return OutputFile(path, [Elements.all(content.whole(name)) for name in names])

    files = [file("deep", "dda"), file("mixed", "ab"), file("none", "b")]
    layout = Layout(files=[*files, OutputFile("small", [Literal(b"x")])])
    assert [f.path for f in in_order(layout, depths).files] == ["none", "small", "mixed", "deep"]
    assert in_order(layout, depths_of(needing(source, {}))) is layout
    assert depth_of(files[1], depths, 0, 32) == 2
    assert depth_of(files[1], depths, 16, 64) == 2 / 3
    monkeypatch.setattr(ftckpt.workers.processes, "are_safe", lambda: False)
    monkeypatch.setattr(Gatherer, "fill_bytes", lambda *_: None)
    staging = LocalStaging(str(tmp_path / "out"), single=False)
    staging.begin("plan", {file.path: file.size for file in layout.files}, restart=False)
    shares = make_shares(layout, Gatherer(source), staging, depths=depths, jobs=1, copies=2)
    order = [(share.path, *[made.number for made in share.blocks]) for share in shares]
    staging.close()
    assert sorted(order[:3]) == [("mixed", 1), ("none", 0), ("small", 0)]
    assert sorted(order[3:5]) == [("deep", 2), ("mixed", 0)]
    assert order[5:] == [("deep", 0), ("deep", 1)]


def test_a_staged_file_is_looked_into_as_it_is(tmp_path: Path) -> None:
    staging = LocalStaging(str(tmp_path / "out"), single=False)
    staging.begin("plan", {"f": 10}, restart=False)
    try:
        view = memoryview(bytearray(4))
        assert not staging.peek("f", 0, view)
        upload = staging.open(OutputFile("f", [Literal(bytes(10))])).upload
        assert upload is not None
        upload.write(2, memoryview(b"abcd"))
        assert staging.peek("f", 2, view)
        assert bytes(view) == b"abcd"
        assert not staging.peek("f", 8, view)  # it ends before
        upload.close()
    finally:
        staging.close()
