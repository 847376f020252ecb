"""Other state with tensors in it: what is left of it, and what holds it, is the same anywhere."""

from __future__ import annotations

import filecmp
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftckpt.delta.pack.assemble import PackOptions
from ftckpt.errors import CorruptError, ExitCode
from ftckpt.formats.delta.pack import pack_checkpoint
from ftckpt.formats.state.same_object import SameObject
from ftckpt.formats.writers import format_and_writer
from ftckpt.storage import StoreOptions
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.transfer.prove.rehearsal import rehearse
from ftckpt.transfer.run import require_place
from tests.builders.checkpoints import open_checkpoint
from tests.campaign import examples
from tests.commands.golden import ftckpt


def _model(add: float, layers: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {f"l{i}.weight": torch.randn(8, 9, generator=generator) + add for i in range(layers)}


def _half(add: float) -> dict[str, torch.Tensor]:
    return {name: tensor.bfloat16() for name, tensor in _model(add).items()}


KINDS: dict[str, Callable[[float], Any]] = {
    "extra": lambda v: {"model": _model(v), "extra": {"w": torch.ones(3) + v}},
    "master": lambda v: {"model": _half(v), "master": _model(v)},
    "fp32": lambda v: {"model": _half(v), "fp32": _model(v)},
    "teacher": lambda v: {"model": _model(v), "teacher": _model(2 * v)},
    "criterion": lambda v: {"model": _model(v), "criterion": {"weight": torch.ones(5) + v}},
    "gan": lambda v: {"model": _model(v), "discriminator": _model(v, 1), "step": 3},
    "list": lambda v: {"model": _model(v), "buffers": [torch.ones(4) + v, torch.zeros(2)]},
    "behind": lambda v: {"model": _model(v), "window": [5, torch.zeros(2) + v], "none": []},
    "keys": lambda v: {"model": _model(v), "keys": {1: torch.ones(2) + v, "1": 7, 2: {}}},
    "deep": lambda v: {"model": _model(v), "a": {"b": [[torch.ones(1) + v], [3]], "e": {}}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_packed_and_comes_back(kind: str, tmp_path: Path) -> None:
    for number, add in enumerate((0.0, 1e-4)):
        torch.save(KINDS[kind](add), tmp_path / f"{number}.pt")
    done = ftckpt("delta", "pack", "0.pt", "1.pt", "packed", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = ftckpt("delta", "unpack", "packed", "again.pt", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert filecmp.cmp(tmp_path / "1.pt", tmp_path / "again.pt", shallow=False)


def test_a_proof_that_fails_leaves_no_staging(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, add in enumerate((0.0, 1e-4)):
        torch.save(KINDS["gan"](add), tmp_path / f"{number}.pt")
    base, target = (open_checkpoint(tmp_path / f"{number}.pt") for number in (0, 1))
    with monkeypatch.context() as patched:
        patched.setattr(SameObject, "__call__", lambda self, name: False)
        with pytest.raises(CorruptError, match="the proof failed") as caught:
            pack_checkpoint(
                target,
                base,
                str(tmp_path / "packed"),
                options=PackOptions(),
                store_options=StoreOptions(),
            )
        assert caught.value.exit_code is ExitCode.CORRUPT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.pt", "1.pt"]
    done = ftckpt("delta", "pack", "1.pt", "packed", cwd=tmp_path)  # another plan, the same place
    assert done.returncode == 0, done.stderr


_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.sampled_from([torch.zeros(2), torch.arange(3), torch.tensor(float("nan")), torch.Size([2])]),
    st.frozensets(st.integers(0, 9), max_size=3),
    st.tuples(st.integers(), st.just(torch.ones(1))),
)
_KEYS = st.one_of(st.text(max_size=2), st.integers(-3, 3), st.none(), st.booleans(),
                  st.tuples(st.integers(0, 2), st.text(max_size=1)))  # fmt: skip
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=3)),
    max_leaves=8,
)


@settings(
    max_examples=examples(40, 2000),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(tree=_TREES)
def test_whatever_it_is_formats_that_hold_any_state_hold_it(tree: Any, tmp_path: Path) -> None:
    path = tmp_path / "one.pt"
    torch.save({"model": {"w": torch.ones(2)}, "thing": tree}, path)
    source = open_checkpoint(path)
    content = Content.of(source)
    for to in ("safetensors", "torchsave", "dcp"):
        target, writer = format_and_writer(to)
        layout = writer.layout(content, LayoutRequest())
        require_place(layout)
        rehearse(content, layout, target, SameObject, single=writer.single)
