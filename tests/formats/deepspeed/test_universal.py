"""Universal checkpoints that DeepSpeed's own converter made, whole and damaged."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from ftckpt.checkpoint import CommitState, Kind
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import CorruptError, ExitCode, IncompleteError, worst
from ftckpt.formats.deepspeed.universal import DeepSpeedUniversal
from tests.conformance.formats import (
    FormatTests,
    Made,
    Truth,
    findings_of,
    listing_of_path,
    open_path,
)
from tests.formats.deepspeed.sets import copied, tag, truth_of

FORM = DeepSpeedUniversal()


def truth(source: str) -> dict[str, Truth]:
    """Return what the job held, as the converter keeps it."""
    found = truth_of(source)
    if source == "tp":  # the row of padding is gone from what the optimizer has of the vocabulary
        for key in ("master:embed", "exp_avg:embed", "exp_avg_sq:embed"):
            dtype, (_, width), data = found[key]
            found[key] = Truth(dtype, (11, width), data[: 11 * width * 4])
    return found


# What the converter widens to fp32 although the optimizer does not have it.
COPIES = ("frozen.weight", "rope", "seen", "head.weight")
# It looks for parameters in the module's state_dict, which has these without their wrapper's name.
UNWRAPPED = ("up.weight", "up.bias")


class TestUniversal(FormatTests):
    format = FORM
    truncated = frozenset({"bad-zip", "truncated-file"})
    missing = frozenset({"missing-rank", "missing-file"})
    empty = frozenset({"bad-zip", "truncated-file"})

    def make(self, root: Path) -> list[Made]:
        made = []
        for source in ("z1", "z3", "tp", "wrap"):
            path = copied(f"universal_{source}", root)
            known = truth(source)
            copies = {"z1": COPIES, "wrap": (*COPIES, *UNWRAPPED)}.get(source, ())
            for name in copies:
                known[f"extra:universal:{name}.fp32"] = widened(known[name])
            made.append(Made(path, known))
        return made


def widened(value: Truth) -> Truth:
    import torch

    raw = torch.frombuffer(bytearray(value.data), dtype=getattr(torch, value.dtype))
    numbers = raw.float().tolist()
    return Truth("float32", value.shape, struct.pack(f"<{len(numbers)}f", *numbers))


def test_what_the_source_was_is_kept() -> None:
    checkpoint = open_path(FORM, tag("universal_z1"))
    assert (checkpoint.step, checkpoint.topology.dp) == (2, 4)
    assert checkpoint.load_object("optimizer.param_groups")[0]["lr"] == 0.01
    assert checkpoint.aliases["head.weight"] == "embed.weight"
    assert checkpoint.tensors["frozen.weight"].kind is Kind.PARAM
    assert "master:frozen.weight" not in checkpoint.tensors
    assert [*checkpoint.check(), *checkpoint.notes] == []


def test_a_parameter_that_was_never_stepped_has_its_master_alone(tmp_path: Path) -> None:
    path = copied("universal_z1", tmp_path)
    for leaf in ("exp_avg", "exp_avg_sq", "step"):
        (path / "zero" / "gain" / f"{leaf}.pt").unlink()
    assert findings_of(FORM, path) == []
    assert "exp_avg:gain" not in open_path(FORM, path).tensors


@pytest.mark.parametrize("source", ["z1", "wrap"])
def test_a_lost_copy_of_what_is_not_trained_is_missed(source: str, tmp_path: Path) -> None:
    path = copied(f"universal_{source}", tmp_path)
    for name in (*COPIES, *(UNWRAPPED if source == "wrap" else ())):
        lost = path / "zero" / name / "fp32.pt"
        kept = lost.read_bytes()
        lost.unlink()
        found = [f for f in findings_of(FORM, path) if f.code is not ExitCode.OK]
        assert [(f.kind, f.file) for f in found] == [("missing-file", f"zero/{name}/fp32.pt")]
        lost.write_bytes(kept)


def test_converters_that_copy_nothing_are_no_loss(tmp_path: Path) -> None:
    path = copied("universal_z1", tmp_path)
    for name in COPIES:
        shutil.rmtree(path / "zero" / name)
    assert findings_of(FORM, path) == []


def test_another_shape_than_the_parameters_is_no_master(tmp_path: Path) -> None:
    path = copied("universal_z1", tmp_path)
    shutil.copy(path / "zero" / "gain" / "fp32.pt", path / "zero" / "up.bias" / "fp32.pt")
    (found,) = (f for f in findings_of(FORM, path) if f.code is not ExitCode.OK)
    assert (found.kind, found.file) == ("shape-mismatch", "zero/up.bias/fp32.pt")
    assert "master:up.bias" not in open_path(FORM, path).tensors


def test_a_flat_state_of_another_length_is_no_master(tmp_path: Path) -> None:
    path = copied("universal_z3", tmp_path)
    shutil.copy(path / "zero" / "gain" / "fp32.pt", path / "zero" / "up.bias" / "fp32.pt")
    (found,) = (f for f in findings_of(FORM, path) if f.code is not ExitCode.OK)
    assert (found.kind, found.file) == ("size-mismatch", "zero/up.bias/fp32.pt")


def test_an_interrupted_conversion_is_incomplete(tmp_path: Path) -> None:
    path = copied("universal_z1", tmp_path)
    (path / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CorruptError):
        open_path(FORM, path)
    (path / "tmp" / "gain" / "0").mkdir(parents=True)
    (path / "tmp" / "gain" / "0" / "fp32.00").write_bytes(b"x")
    (path / "zero" / "optimizer_state.pt").unlink()
    found = FORM.recognise(listing_of_path(path))
    assert found is not None
    assert found.commit is CommitState.UNCOMMITTED
    with pytest.raises(IncompleteError, match="did not finish"):
        open_path(FORM, path)


def test_a_work_area_that_was_kept_is_a_stray(tmp_path: Path) -> None:
    path = copied("universal_z1", tmp_path)
    (path / "tmp").mkdir()
    (path / "tmp" / "fp32.00").write_bytes(b"x")
    found = findings_of(FORM, path)
    assert {(f.kind, f.file) for f in found} == {("stray-file", "tmp/fp32.00")}
    assert worst(f.code for f in found) is ExitCode.OK


def test_a_pipeline_leaves_its_layers_behind(tmp_path: Path) -> None:
    import torch

    path = copied("universal_z1", tmp_path)
    file = path / "mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    state["module"], state["shared_params"] = None, {}
    state["param_shapes"] = [
        {f"{n}.{name}": shape for n, (name, shape) in enumerate(group.items())}
        for group in state["param_shapes"]
    ]
    torch.save(state, file)
    for group in state["param_shapes"]:
        for name in group:
            (path / "zero" / name.partition(".")[2]).rename(path / "zero" / name)
    assert findings_of(FORM, path) == []
    checkpoint = open_path(FORM, path)
    assert not [t for t in checkpoint.tensors.values() if t.component == "model"]
    assert "master:0.embed.weight" in checkpoint.tensors


def test_a_step_that_is_a_plain_number(tmp_path: Path) -> None:
    import torch

    path = copied("universal_z1", tmp_path)
    for folder in (path / "zero").iterdir():
        if (folder / "step.pt").exists():
            torch.save(2, folder / "step.pt")
    checkpoint = open_path(FORM, path)
    assert checkpoint.load_object("optimizer.gain.step") == 2
    assert checkpoint.step == 2
    assert findings_of(FORM, path) == []


def test_a_name_with_slashes_is_a_name(tmp_path: Path) -> None:
    import torch

    path = copied("universal_z1", tmp_path)
    folder = path / "zero" / "a/b.weight"
    folder.mkdir(parents=True)
    torch.save({"param": torch.arange(3.0)}, folder / "fp32.pt")
    checkpoint = open_path(FORM, path)
    data = torch.arange(3.0).numpy().tobytes()
    assert read_tensor(checkpoint, "extra:universal:a/b.weight.fp32") == data
