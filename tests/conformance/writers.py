"""What every writer promises: its own format reads back what it laid out, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ftckpt.checkpoint import Checkpoint
from ftckpt.digests.tensors import digest_tensor
from ftckpt.errors import ExitCode
from ftckpt.formats.torch_files.write_tree import CopiedTree, pickled
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest, Writer
from ftckpt.verification import Level, VerifyOptions, verify
from tests.builders.checkpoints import open_checkpoint
from tests.builders.materialise import materialise


def write(writer: Writer, source: Checkpoint | Content, to: Path, **request: Any) -> Checkpoint:
    """Lay out, make the files plainly, and open the result; nothing may be left unplaced."""
    content = source if isinstance(source, Content) else Content.of(source)
    layout = writer.layout(content, LayoutRequest(**request))
    assert list(layout.unplaced) == []
    assert_repeatable(writer.layout(content, LayoutRequest(**request)), layout)
    materialise(layout, content.checkpoint, to)
    result = open_checkpoint(to / layout.files[0].path if writer.single else to)
    assert result.format == writer.name
    return result


def assert_repeatable(again: Layout, layout: Layout) -> None:
    """Require the same files of a second layout: a killed run is resumed by it."""
    for one, two in zip(
        (*layout.files, *layout.commit), (*again.files, *again.commit), strict=True
    ):
        assert (one.path, one.size) == (two.path, two.size)
        for a, b in zip(one.segments, two.segments, strict=True):
            assert type(a) is type(b)
            assert a == b or hasattr(a, "ranges")


def assert_same_tensors(result: Checkpoint, source: Checkpoint) -> None:
    """Compare keys, shapes, types and every bit."""
    assert set(result.tensors) == set(source.tensors)
    for key, info in source.tensors.items():
        found = result.tensors[key]
        assert (found.shape, found.dtype) == (info.shape, info.dtype), key
        assert digest_tensor(result, found) == digest_tensor(source, info), key


def assert_sound(result: Checkpoint) -> None:
    """Let `verify` read every byte, and find evidence for all of them."""
    report = verify(result, VerifyOptions(level=Level.CONTENT, require_content=True))
    assert report.code is ExitCode.OK, report.findings
    assert [f for f in report.findings if f.severity != "note"] == []


def as_bytes(value: Any) -> bytes:
    """Return an object without tensors as bytes that are equal for equal state."""
    return pickled(CopiedTree(value, {}))[0]
