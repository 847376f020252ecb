"""What is asked of a layout: each writer grants what it reads and refuses the rest."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import ftckpt as api
from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.sharding import parse_rules
from ftckpt.errors import ExitCode, UnsupportedError, UsageError
from ftckpt.formats.catalog import reads_by_rules
from ftckpt.formats.writers import FILE_WRITERS, WRITERS
from ftckpt.storage import open_store
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest, Writer
from ftckpt.transfer.request.example import RANKS, flag, lay_out, require_granted
from ftckpt.transfer.request.narrowing import Only, only
from tests.builders.checkpoints import open_checkpoint
from tests.builders.megatron_files import write
from tests.builders.megatron_model import Job
from tests.commands.golden import ftckpt
from tests.formats.deepspeed.sets import tag

RULES = parse_rules('[[rule]]\nnames = ["none"]\nsplit = 0\n', "rules.toml")
ASKED: Mapping[str, Any] = {
    **dict.fromkeys(RANKS, 2),
    "zero_stage": 1,
    "max_shard_size": 1000,
    "rules": RULES,
    "true_vocab_size": 100,
}
_MEGATRON = {*RANKS, "rules", "true_vocab_size"}
GRANTED = {
    "dcp": {"dp"},
    "deepspeed": {"tp", "pp", "dp", "ep", "zero_stage", "rules", "true_vocab_size"},
    "deepspeed-universal": {"rules", "true_vocab_size"},
    "megatron": _MEGATRON,
    "megatron-dist": _MEGATRON,
    "megatron-fsdp": {"dp"},
    "orbax": set(),
    "ranks": {"tp", "dp"},
    "safetensors": {"max_shard_size"},
    "torch-checkpointing": {"dp"},
    "torchsave": set(),
}
EVERY = [make() for make in (*WRITERS.values(), *(one.make for one in FILE_WRITERS.values()))]
PAIRS = [(writer, wish) for writer in EVERY for wish in ASKED]


def test_the_table_is_of_all_writers_and_all_wishes() -> None:
    assert {writer.name for writer in EVERY} == set(GRANTED)
    assert {field.name for field in fields(LayoutRequest)} == {*ASKED, "like"}


@pytest.mark.parametrize(
    ("writer", "wish"), PAIRS, ids=[f"{type(w).__name__}-{wish}" for w, wish in PAIRS]
)
def test_a_wish_that_a_writer_has_no_use_for_is_refused(writer: Writer, wish: str) -> None:
    request = LayoutRequest(**{wish: ASKED[wish]})
    if wish in GRANTED[writer.name]:
        require_granted(writer, request)
        return
    says = f"{flag(wish)} has no meaning for {writer.name} "
    with pytest.raises(UsageError, match=says) as found:
        require_granted(writer, request)
    assert found.value.hint.startswith("leave it out")
    for other in GRANTED[writer.name]:
        assert flag(other) in found.value.hint
    require_granted(writer, request, used=[wish])
    if wish in RANKS:  # what is not divided is of one rank
        one: dict[str, Any] = {wish: 1}
        require_granted(writer, LayoutRequest(**one))


def _weights(place: Path) -> Content:
    import torch

    torch.save({"w": torch.ones(3)}, place / "x.pt")
    return only(Content.of(open_checkpoint(place / "x.pt")), Only.MODEL)


def _megatron(place: Path) -> Content:
    return Content.of(open_checkpoint(write(place / "iter_0000001", Job(tp=2, dp=2)).path))


def _deepspeed(_: Path) -> Content:
    return Content.of(open_checkpoint(tag("tp")))


SOURCES: Mapping[str, Callable[[Path], Content]] = {
    "weights": _weights, "megatron": _megatron, "deepspeed": _deepspeed
}  # fmt: skip


class Watched(LayoutRequest):
    """Notes which of its fields are read."""

    read: set[str]

    def __getattribute__(self, name: str) -> Any:
        if name in ASKED:
            super().__getattribute__("read").add(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("writer", EVERY, ids=[type(writer).__name__ for writer in EVERY])
def test_what_is_granted_is_what_is_read(writer: Writer, tmp_path: Path) -> None:
    read: set[str] = set()
    for name, source in SOURCES.items():
        (tmp_path / name).mkdir()
        content = source(tmp_path / name)
        for example in (None, content.checkpoint):
            request = Watched(like=example)
            object.__setattr__(request, "read", read)
            try:
                writer.layout(content, request)
            except UnsupportedError:  # not of this source; it has read what it has read
                continue
    assert read == GRANTED[writer.name]


def test_a_layout_is_held_to_it(tmp_path: Path) -> None:
    content, place = _weights(tmp_path), open_store(str(tmp_path / "out"))
    torchsave = WRITERS["torchsave"]()
    with pytest.raises(UsageError, match="--zero-stage has no meaning"):
        lay_out(torchsave, content, LayoutRequest(zero_stage=2), place)
    source: Checkpoint = content.checkpoint
    with pytest.raises(UsageError, match="--rules has no meaning"):
        api.convert(
            source, str(tmp_path / "out.pt"), "torchsave", request=LayoutRequest(rules=RULES)
        )
    assert os.listdir(tmp_path) == ["x.pt"]


def test_the_formats_that_are_read_by_rules() -> None:
    names = {name for name in GRANTED if reads_by_rules(name)}
    assert names == {"deepspeed", "deepspeed-universal", "megatron", "ranks"}


@pytest.mark.parametrize(
    "words",
    [
        "convert x.pt out --to safetensors --zero-stage 2",
        "convert x.pt out --to dcp --max-shard-size 1GB",
        "convert x.pt out --to dcp --true-vocab-size 10",
        "convert x.pt out --to dcp --rules rules.toml",
        "convert x.pt out --to dcp --family llama",
        "convert x.pt out --to dcp --spelling local",
        "reshard x.pt out.pt --ep 2",
    ],
)
def test_a_flag_without_a_meaning_is_a_usage_error(words: str, tmp_path: Path) -> None:
    _weights(tmp_path)
    (tmp_path / "rules.toml").write_text('[[rule]]\nnames = ["w"]\nsplit = 0\n')
    done = ftckpt(*words.split(), cwd=tmp_path)
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert words.split()[-2] in done.stderr
    assert "hint: " in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["rules.toml", "x.pt"]
