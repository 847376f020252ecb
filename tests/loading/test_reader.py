"""What a job loads by `Reader`, in one process: names, settings, values, evidence, refusals."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import ftckpt
from ftckpt import load as ftckpt_load
from ftckpt.errors import (
    CorruptError,
    FtckptError,
    IncompleteError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
    UsageError,
)
from ftckpt.torch import Reader
from tests.formats.dcp.fsdp2_loading import Model, require_equal, trained

dcp: Any = checkpoint
taken: Any = get_state_dict

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DATA = Path(__file__).parents[1] / "data"


def job(*, two_groups: bool = False) -> tuple[Model, torch.optim.AdamW]:
    """Return an untrained model and its optimizer."""
    torch.manual_seed(12)
    model = Model()
    bias = [p for n, p in model.named_parameters() if n.endswith("bias")]
    rest = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    groups: Any = [{"params": rest}, {"params": bias}] if two_groups else model.parameters()
    return model, torch.optim.AdamW(groups, lr=1.0)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one state as several makers save it."""
    root = tmp_path_factory.mktemp("saved")
    model, optimizer = trained()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(root / "dcp"))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    titan = get_state_dict(model, optimizer, options=flat)
    dcp.save({**titan[0], "optimizer": titan[1]}, checkpoint_id=str(root / "titan"))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()},
               root / "plain.pt")  # fmt: skip
    lightning = {f"model.{name}": value for name, value in model.state_dict().items()}
    torch.save({"state_dict": lightning, "optimizer_states": [optimizer.state_dict()]},
               root / "last.ckpt")  # fmt: skip
    ddp = {f"module.{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": ddp, "optimizer": optimizer.state_dict()}, root / "ddp.pt")
    return root


def error_of(load: Callable[[], object]) -> FtckptError:
    """Return ftckpt's error in what a load raises."""
    with pytest.raises(CheckpointException) as caught:
        load()
    failures = caught.value.failures
    assert list(failures) == [0]
    error = failures[0][0]
    assert isinstance(error, FtckptError), error
    assert type(pickle.loads(pickle.dumps(error))) is type(error)  # or the collective would break
    return error


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("two_groups", [False, True])
@pytest.mark.parametrize("name", ["dcp", "titan", "plain.pt", "last.ckpt", "ddp.pt"])
def test_a_job_resumes_whatever_saved_it(
    saved: Path, name: str, two_groups: bool, flat: bool, staged: bool
) -> None:
    model, optimizer = job(two_groups=two_groups)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, settings = get_state_dict(model, optimizer, options=options)
    nested = {"model": weights, "optimizer": settings}
    state: dict[str, Any] = {**weights, "optim": settings} if flat else nested
    reader = Reader(saved / name, _staged=staged)
    assert reader.check(state).ok
    dcp.load(state, storage_reader=reader)
    loaded = {key: state[key] for key in weights} if flat else state["model"]
    set_state_dict(
        model, optimizer, model_state_dict=loaded,
        optim_state_dict=state["optim" if flat else "optimizer"], options=options,
    )  # fmt: skip
    got, want = taken(model, optimizer), taken(*trained())
    require_equal(got[0], want[0])
    require_equal(got[1]["state"], want[1]["state"])
    groups = got[1]["param_groups"]
    assert len(groups) == 1 + two_groups
    for group in groups:
        mine = {key: value for key, value in group.items() if key != "params"}
        first = want[1]["param_groups"][0]
        require_equal(mine, {key: value for key, value in first.items() if key != "params"})
    assert reader.report.evidence.crc32
    assert not reader.report.evidence.none


def test_what_the_source_lacks_and_the_job_leaves_is_said(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weights = trained()[0].state_dict()
    weights["head.weight"] = torch.zeros(2)
    weights["gain"] = torch.zeros(3)
    weights["layers.0.bias"] = torch.zeros(6, dtype=torch.float64)
    del weights["seen"]
    check = Reader(saved / "dcp").check({"model": weights})
    assert not check.ok
    assert list(check.missing) == ["model.head.weight"]
    assert "model.layers.0.weight" in str(check)
    assert check.shapes == {"model.gain": ((2,), (3,))}
    assert check.cast == {"model.layers.0.bias": ("float32", "float64")}
    assert "model.seen" in check.unexpected
    del weights["head.weight"], weights["gain"]
    reader = Reader(saved / "dcp")
    with caplog.at_level(logging.INFO, "ftckpt.torch"):
        dcp.load({"model": weights}, storage_reader=reader)
    assert "model.seen" in reader.report.left
    assert "not asked for" in caplog.text
    assert reader.report.cast == ["model.layers.0.bias"]
    strict = Reader(saved / "dcp", strict_dtype=True)
    error = error_of(lambda: dcp.load({"model": weights}, storage_reader=strict))
    assert isinstance(error, UnsupportedError)
    assert "float64" in error.message


def test_two_tensors_of_one_name_are_an_error(tmp_path: Path) -> None:
    state = {"model": {"model": {"w": torch.ones(2)}, "w": torch.zeros(2)}}
    dcp.save(state, checkpoint_id=str(tmp_path / "c"))
    asked = {"app": {"model": {"model": {"w": torch.empty(2)}}}}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(asked, storage_reader=Reader(tmp_path / "c"))
    assert "may mean" in str(caught.value)
    exact = {"model": {"model": {"w": torch.empty(2)}, "w": torch.empty(2)}}
    dcp.load(exact, storage_reader=Reader(tmp_path / "c"))
    assert exact["model"]["model"]["w"].tolist() == [1, 1]  # type: ignore[index]


def test_settings_that_differ_in_a_group_are_an_error(tmp_path: Path) -> None:
    model, _ = trained()
    first, *rest = model.parameters()
    groups = [{"params": [first], "lr": 0.5}, {"params": rest, "lr": 0.25}]
    optimizer = torch.optim.AdamW(groups)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(tmp_path / "c"))
    model, optimizer = job()
    state = taken(model, optimizer)[1]
    asked = {"optimizer": state}
    error = error_of(lambda: dcp.load(asked, storage_reader=Reader(tmp_path / "c")))
    assert isinstance(error, UnsupportedError)
    assert "lr of the job's group 0 differs" in error.message
    # Grouped as they were saved, in another order, each has its own.
    first, *rest = model.parameters()
    optimizer = torch.optim.AdamW([{"params": rest}, {"params": [first]}], lr=1.0)
    state = taken(model, optimizer)[1]
    dcp.load({"optimizer": state}, storage_reader=Reader(tmp_path / "c"))
    assert [group["lr"] for group in state["param_groups"]] == [0.25, 0.5]
    names = {name for name, _ in model.named_parameters()}
    assert {n for group in state["param_groups"] for n in group["params"]} == names


def test_other_strides_and_types_are_filled(saved: Path) -> None:
    truth = trained()[0].state_dict()
    for staged in (False, True):
        state = {
            "embed.weight": torch.empty(6, 13).t(),
            "layers.0.weight": torch.empty(6, 6, dtype=torch.bfloat16),
            "layers.1.weight": torch.empty(6, 12)[:, ::2],
        }
        dcp.load(state, storage_reader=Reader(saved / "dcp", _staged=staged))
        assert torch.equal(state["embed.weight"], truth["embed.weight"])
        assert torch.equal(state["layers.0.weight"], truth["layers.0.weight"].bfloat16())
        assert torch.equal(state["layers.1.weight"], truth["layers.1.weight"])


def flip(path: Path, at: int) -> None:
    """Turn one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def place_of(checkpoint: Path, key: str) -> tuple[Path, int]:
    """Return a file, and where the elements of a tensor begin in it."""
    opened = ftckpt.open_checkpoint(str(checkpoint))
    payload = opened.payload(opened.tensors[key].pieces[0])
    file = checkpoint / payload.extent.file if checkpoint.is_dir() else checkpoint
    return file, payload.extent.offset


@pytest.mark.parametrize("name", ["dcp", "plain.pt"])
def test_one_flipped_bit_is_an_error(saved: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / name
    ftckpt.copy(str(saved / name), str(copy))
    for manifest in tmp_path.rglob("*ftckpt*.json"):
        manifest.unlink()
    flip(*(place := place_of(copy, "embed.weight"))[:1], place[1] + 5)
    weights = Model().state_dict()
    error = error_of(lambda: dcp.load({"model": weights}, storage_reader=Reader(copy)))
    assert isinstance(error, CorruptError)
    assert error.tensor == "embed.weight"
    assert error.offset is not None
    assert error.length == 13 * 6 * 4
    assert error.file == place[0].name
    state = {"model": {"gain": torch.empty(2)}}
    dcp.load(state, storage_reader=Reader(copy))  # what nobody asks for is not read
    quiet = Reader(copy, level="structure")
    dcp.load({"model": weights}, storage_reader=quiet)
    assert not torch.equal(weights["embed.weight"], trained()[0].state_dict()["embed.weight"])


def test_blocks_of_the_manifest_are_checked(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {f"w{n}": torch.randn(40, 50) for n in range(4)}
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    reader = Reader(folder)
    dcp.load({name: torch.empty(40, 50) for name in tensors}, storage_reader=reader)
    assert reader.report.evidence.none == 4 * 8000  # nothing is recorded of it
    ftckpt.seal(str(folder))
    state = {name: torch.empty(40, 50) for name in tensors}
    reader = Reader(folder)
    dcp.load(state, storage_reader=reader)
    assert all(torch.equal(state[name], tensors[name]) for name in tensors)
    assert reader.report.evidence.manifest == (folder / "model.safetensors").stat().st_size
    size = (folder / "model.safetensors").stat().st_size
    for at in (size - 1, size - 9000, 20):  # in what is asked for, in another tensor, in the header
        whole = (folder / "model.safetensors").read_bytes()
        flip(folder / "model.safetensors", at)
        some = {name: torch.empty(40, 50) for name in list(tensors)[-1:]}
        error = error_of(lambda: dcp.load(some, storage_reader=Reader(folder)))  # noqa: B023
        assert isinstance(error, CorruptError)
        (folder / "model.safetensors").write_bytes(whole)


def test_a_lost_file_is_an_error(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "lost"
    shutil.copytree(saved / "dcp", copy)
    (copy / "__0_0.distcp").unlink()
    weights = Model().state_dict()
    error = error_of(lambda: dcp.load({"model": weights}, storage_reader=Reader(copy)))
    assert isinstance(error, CorruptError)
    (copy / ".metadata").unlink()
    error = error_of(lambda: dcp.load({"model": weights}, storage_reader=Reader(copy)))
    assert isinstance(error, (IncompleteError, NotFoundError, UnsupportedError))
    error = error_of(lambda: dcp.load({"model": weights}, storage_reader=Reader(tmp_path / "no")))
    assert isinstance(error, NotFoundError)


class Hostile:
    """Runs something when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(Hostile.mark),)

    mark = Path()


class Own:
    """A class of the job's own."""

    def __init__(self) -> None:
        self.value = 7


def test_only_plain_data_is_handed_to_torch(tmp_path: Path) -> None:
    Hostile.mark = tmp_path / "ran"
    values = {
        "numbers": [1, 2.5, None, True], "text": "x", "nested": {"a": (1, 2), "b": {3}},
        "tensor": [torch.arange(3)], "raw": io.BytesIO(b"abc"),
    }  # fmt: skip
    dcp.save({"train": values}, checkpoint_id=str(tmp_path / "plain"))
    asked = {"train": dict.fromkeys(values, 0) | {"nested": {"a": 0, "b": 0}}}
    dcp.load(asked, storage_reader=Reader(tmp_path / "plain"),
             planner=DefaultLoadPlanner(allow_partial_load=True))  # fmt: skip
    got: Any = asked["train"]
    assert got["numbers"] == [1, 2.5, None, True]
    assert got["nested"] == {"a": (1, 2), "b": {3}}
    assert got["raw"].getvalue() == b"abc"
    dcp.save({"train": {"bad": Hostile()}}, checkpoint_id=str(tmp_path / "hostile"))
    bad = {"train": {"bad": 0}}
    error = error_of(lambda: dcp.load(bad, storage_reader=Reader(tmp_path / "hostile")))
    assert isinstance(error, UnsafeError)
    assert not Hostile.mark.exists()
    dcp.save({"train": {"own": Own()}}, checkpoint_id=str(tmp_path / "own"))
    own: dict[str, Any] = {"train": {"own": 0}}
    error = error_of(lambda: dcp.load(own, storage_reader=Reader(tmp_path / "own")))
    assert isinstance(error, UnsafeError)
    allow = f"{Own.__module__}.{Own.__qualname__}"
    assert allow in error.hint
    dcp.load(own, storage_reader=Reader(tmp_path / "own", allow=[allow]))
    assert own["train"]["own"].value == 7


def test_codes_are_not_taken_for_numbers() -> None:
    place = DATA / "quantised" / "fp8-block"
    reader = Reader(place)
    table, _ = reader._known()
    assert table.coded
    rows = {row.listed: row for row in table.rows}
    asked = {name: torch.empty(row.shape, dtype=torch.bfloat16) for name, row in rows.items()
             if row.key in table.coded}  # fmt: skip
    assert reader.check(asked).quantised == list(asked)
    error = error_of(lambda: dcp.load(asked, storage_reader=Reader(place)))
    assert isinstance(error, UnsupportedError)
    assert "codes" in error.message
    reader = Reader(place, dtype="bf16")
    dcp.load(asked, storage_reader=reader)
    assert reader.report.verified
    from ftckpt.checkpoint.dtypes import DTYPES
    from ftckpt.formats.quantised.dequantise import dequantised

    truth = dequantised(ftckpt.open_checkpoint(str(place)), DTYPES["bfloat16"])
    for name, tensor in asked.items():
        assert torch.equal(tensor, truth[rows[name].key].torch().bfloat16()), name


def test_a_tied_output_layer_is_loaded_from_the_embedding(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    shapes = {"model.embed_tokens.weight": (8, 4), "model.norm.weight": (4,)}
    save_file({n: torch.randn(s) for n, s in shapes.items()}, tmp_path / "model.safetensors")
    text = (
        '{"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 0, "vocab_size": 8,'
        ' "num_attention_heads": 1, "intermediate_size": 4, "tie_word_embeddings": TIED}'
    )
    (tmp_path / "config.json").write_text(text.replace("TIED", "true"))
    state = {"model.embed_tokens.weight": torch.empty(8, 4), "lm_head.weight": torch.empty(8, 4)}
    dcp.load(state, storage_reader=Reader(tmp_path))
    assert torch.equal(state["model.embed_tokens.weight"], state["lm_head.weight"])
    (tmp_path / "config.json").write_text(text.replace("TIED", "false"))
    assert list(Reader(tmp_path).check(state).missing) == ["lm_head.weight"]


def test_a_step_that_is_kept_once_is_every_parameters(tmp_path: Path) -> None:
    place = DATA / "deepspeed" / "z1" / "global_step2"
    reader = Reader(place)
    table, names = reader._known()
    assert table.step == 2
    row = next(row for row in table.rows if row.path[0] == "model" and row.dtype != "int64")
    name = str(row.path[1])
    asked = {"optim": {"state": {name: {"step": torch.empty(())}}}}
    dcp.load(asked, storage_reader=reader)
    assert float(asked["optim"]["state"][name]["step"]) == 2
    assert names.step_of(f"optim.state.{name}x.step") is None


@pytest.mark.parametrize(
    ("flags", "hint"),
    [({"level": "values"}, "verify"), ({"level": "x"}, "structure"), ({"names": "x"}, "hf")],
)
def test_wishes_that_cannot_be_granted(saved: Path, flags: dict[str, Any], hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        Reader(saved / "dcp", **flags).check({})
    assert hint in caught.value.hint


def test_an_unknown_word_is_a_type_error(saved: Path) -> None:
    with pytest.raises(TypeError, match="nmaes"):
        Reader(saved / "dcp", nmaes="hf")  # type: ignore[call-arg]
    with pytest.raises(UsageError):
        Reader().check({})


def test_a_root_is_selected_from_and_reset_reads_another(tmp_path: Path, saved: Path) -> None:
    root = tmp_path / "root"
    for step in (1, 2):
        dcp.save({"model": {"w": torch.full((2,), step)}, "step": step},
                 checkpoint_id=str(root / f"step-{step}"))  # fmt: skip
    state: dict[str, Any] = {"model": {"w": torch.zeros(2, dtype=torch.int64)}, "step": 0}
    reader = Reader(f"{root}@latest")
    with pytest.raises(FtckptError):
        len(Reader(root / "none").read_metadata().state_dict_metadata)
    dcp.load(state, storage_reader=reader)
    assert state["step"] == 2
    dcp.load(state, storage_reader=reader, checkpoint_id=str(root / "step-1"))
    assert (state["step"], state["model"]["w"].tolist()) == (1, [1, 1])


def test_the_limit_of_addresses_is_left_alone(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    set_: list[Any] = []
    monkeypatch.setattr(resource, "setrlimit", lambda *given: set_.append(given))
    weights = Model().state_dict()
    dcp.load({"model": weights}, storage_reader=Reader(saved / "dcp"))
    assert set_ == []


@pytest.mark.s3
def test_a_bucket_is_loaded_from(saved: Path, s3_url: str) -> None:
    ftckpt.copy(str(saved / "dcp"), f"{s3_url}/step-3")
    weights = Model().state_dict()
    reader = Reader(f"{s3_url}@latest")
    dcp.load({"model": weights}, storage_reader=reader)
    require_equal(dict(weights), dict(trained()[0].state_dict()))
    assert reader.report.evidence.crc32
    assert list(ftckpt_load(f"{s3_url}/step-3")) == list(weights)


def test_files_on_several_disks_are_one_checkpoint(tmp_path: Path) -> None:
    sample = DATA / "ranks" / "tp_fsdp2" / "actor"
    for name in ("one", "two"):
        (tmp_path / name / "actor").mkdir(parents=True)
    for number, file in enumerate(sorted(sample.iterdir())):
        shutil.copy(file, tmp_path / ("one", "two")[number % 2] / "actor")
    truth = ftckpt.open_checkpoint(str(sample))
    reader = Reader(tmp_path / "one" / "actor", also=tmp_path / "two" / "actor")  # type: ignore[arg-type]
    table, _ = reader._known()
    state = {r.listed: torch.zeros(r.shape, dtype=getattr(torch, r.dtype)) for r in table.rows}
    dcp.load(state, storage_reader=reader)
    assert len(state) == len(truth.tensors)
    assert all(torch.equal(state[row.listed], truth[row.key].torch()) for row in table.rows)
    alone = Reader(tmp_path / "one" / "actor")  # half of the ranks: a hole

    def half() -> None:
        alone.check(state)
        dcp.load(state, storage_reader=alone)

    with pytest.raises((FtckptError, CheckpointException)):
        half()


def test_a_delta_is_loaded_with_its_base(tmp_path: Path) -> None:
    place, bases = DATA / "delta", [str(DATA / "delta" / "base")]
    reader = Reader(place, bases=bases)
    table, _ = reader._known()
    state = {r.listed: torch.zeros(r.shape, dtype=getattr(torch, r.dtype)) for r in table.rows}
    dcp.load(state, storage_reader=reader)
    truth = ftckpt.open_checkpoint(str(place), bases=bases)
    for row in table.rows:
        got, want = state[row.listed].view(-1), truth[row.key].torch().view(-1)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), row.key
    assert reader.report.verified
    copy = tmp_path / "delta"
    shutil.copytree(place, copy)
    flip(copy / "00000.blocks", (copy / "00000.blocks").stat().st_size // 2)
    error = error_of(lambda: dcp.load(state, storage_reader=Reader(copy, bases=bases)))
    assert isinstance(error, CorruptError)


def test_the_structure_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's optimizer is lost."""
    sample = DATA / "ranks" / "tp_fsdp2" / "actor"
    mixed = tmp_path / "actor"
    shutil.copytree(sample, mixed)
    victim = next(mixed.glob("optim_world_size_*_rank_1.pt"))
    victim.unlink()
    with pytest.raises(FtckptError):
        Reader(mixed).check({})
    only = Reader(mixed, only="model", level="bytes")
    table, _ = only._known()
    state = {r.listed: torch.zeros(r.shape, dtype=getattr(torch, r.dtype)) for r in table.rows}
    dcp.load(state, storage_reader=only)
    assert only.report.evidence.crc32
    from ftckpt.torch import reader as module

    monkeypatch.setattr(module, "_AT_ONCE", 0)
    late = Reader(mixed)
    error = error_of(lambda: dcp.load(dict(state), storage_reader=late))
    assert isinstance(error, FtckptError)
    quiet = Reader(mixed, level="none")
    dcp.load(dict(state), storage_reader=quiet)


def test_settings_follow_the_names(tmp_path: Path) -> None:
    """A save of torchtitan's into a job with the names of Hugging Face, optimizer included."""
    families = DATA / "families"
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads((families / "torchtitan.json").read_text())["config"]))
    place = families / "torchtitan" / "step-3"
    reader = Reader(place, names="hf", config=str(config))
    table, _ = reader._known()
    rows = [row for row in table.rows if row.path[:2] == ("optimizer", "state")]
    moments = {
        str(row.path[2]): torch.zeros(row.shape) for row in rows if row.path[-1] == "exp_avg"
    }
    assert any(name.endswith("self_attn.q_proj.weight") for name in moments)
    state = {name: {"exp_avg": one, "step": torch.zeros(())} for name, one in moments.items()}
    groups: list[dict[str, Any]] = [{"lr": 0.0, "params": list(moments)}]
    dcp.load({"optim": {"state": state, "param_groups": groups}}, storage_reader=reader)
    own = Reader(place)
    lr = "optimizer.param_groups.tok_embeddings.weight.lr"
    asked = {lr: 0.0}
    dcp.load(asked, storage_reader=own)
    assert groups[0]["lr"] == asked[lr] != 0
    assert all(float(one["step"]) == 3 for one in state.values())
    assert all(bool(one["exp_avg"].any()) for one in state.values())
