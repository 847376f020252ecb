"""torchao's tensor subclasses in DCP: listed, carried, and put back where `dcp.load` finds them.

With torchao 0.18, `dcp.load` took what `--to dcp` writes, with equal codes and scales.
"""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ftckpt import convert, open_checkpoint
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import ExitCode, UnsupportedError
from ftckpt.findings import Severity
from ftckpt.formats.dcp.reader import DcpCheckpoint
from ftckpt.inspection.resume import Presence, resume_check
from ftckpt.verification import Level, VerifyOptions, verify

REAL = Path(__file__).parents[2] / "data" / "optimizers"
SAVED = REAL / "torchao_adamw8bit_dcp"
RECORD = "optimizer.state.weight.exp_avg"
CODES = "optimizer:weight.exp_avg.codes"


def _truth() -> dict[str, bytes]:
    """Return the tensors of the same training state that was saved with torch.save."""
    found = {}
    for path, tensor in load_file(REAL / "torchao_adamw8bit.safetensors").items():
        parameter, state, leaf = path.partition(".state.")
        own = leaf in ("exp_avg", "exp_avg_sq")
        key = f"{leaf}:{parameter}" if own else f"optimizer:{parameter}.{leaf}"
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found[key if state else path] = data
    return found


@pytest.mark.parametrize("to", ["", "dcp", "torchsave", "safetensors"])
def test_what_lies_inside_equals_memory(to: str, tmp_path: Path) -> None:
    place = SAVED
    if to:
        place = tmp_path / "written"
        convert(str(SAVED), str(place), to=to)
    opened = open_checkpoint(str(place))
    for key, data in _truth().items():
        assert read_tensor(opened, key) == data
    moments = next(item for item in resume_check(opened) if item.key == "moments")
    assert moments.presence is Presence.PRESENT


def test_dcp_keeps_the_record_and_what_torch_says_of_it(tmp_path: Path) -> None:
    """The metadata call it a tensor of one chunk, as torch's planner needs it."""
    convert(str(SAVED), str(tmp_path / "again"), to="dcp")
    held = []
    for place in (SAVED, tmp_path / "again"):
        meta = pickle.loads((place / ".metadata").read_bytes())
        (at,) = [s for index, s in meta.storage_data.items() if index.fqn == RECORD]
        data = (place / at.relative_path).read_bytes()[at.offset : at.offset + at.length]
        held.append((data, meta.state_dict_metadata[RECORD], meta.planner_data[RECORD]))
        assert not any(name.startswith(f"{RECORD}.") for name in meta.state_dict_metadata)
    assert held[0] == held[1]


def test_what_is_derived_is_not_put_into_what_was_read() -> None:
    checkpoint = open_checkpoint(str(SAVED))
    assert isinstance(checkpoint, DcpCheckpoint)
    recorded = pickle.loads((SAVED / ".metadata").read_bytes()).planner_data
    assert checkpoint.meta.paths == {name: tuple(path) for name, path in recorded.items()}
    assert checkpoint.inner_paths
    assert not checkpoint.inner_paths.keys() & recorded.keys()
    assert set(checkpoint.inner_paths) < set(checkpoint.stored.values())


def test_a_flipped_bit_inside_is_found(tmp_path: Path) -> None:
    place = tmp_path / "damaged"
    shutil.copytree(SAVED, place)
    extent = open_checkpoint(str(SAVED)).tensors[CODES].pieces[0].extent
    data = bytearray((place / extent.file).read_bytes())
    data[extent.offset + 5] ^= 1
    (place / extent.file).write_bytes(data)
    report = verify(open_checkpoint(str(place)), VerifyOptions(level=Level.CONTENT))
    assert report.code is ExitCode.CORRUPT
    assert RECORD in {found.tensor for found in report.findings if found.severity is Severity.ERROR}


def test_a_tensor_inside_is_not_left_out_alone(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot be changed or left out alone"):
        convert(str(SAVED), str(tmp_path / "cut"), to="dcp", drop=[CODES])
