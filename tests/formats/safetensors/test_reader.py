"""safetensors files and folders, written by the libraries that people use."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ftckpt.checkpoint import CommitState, Extent, Kind, StepRole
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import ExitCode, IncompleteError, NotFoundError, UnsafeError, worst
from ftckpt.findings import Finding, Strictness
from ftckpt.formats.safetensors import Safetensors
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from ftckpt.verification import Level, VerifyOptions, verify
from tests.builders.archives import extract
from tests.conformance.formats import (
    FormatTests,
    Made,
    Truth,
    findings_of,
    listing_of_path,
    open_path,
)

FORMAT = Safetensors()
ARCHIVES = Path(__file__).parents[4] / "shared" / "checkpoints"


def tensors(seed: int = 0) -> dict[str, Any]:
    """A state dict with every dtype that torch and safetensors share, 0-d and empty shapes."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    state = {}
    names = (
        "float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 uint64 "
        "uint32 uint16 uint8 bool complex64"
    )
    for number, name in enumerate(names.split()):
        dtype = getattr(torch, name)
        raw = torch.randint(0, 2, (3 + number, 16), dtype=torch.uint8, generator=generator)
        state[f"layers.{number}.{name}"] = (
            raw.to(dtype) if name == "bool" else raw.flatten().view(dtype)
        )
    state["scalar"] = torch.tensor(2.5)
    state["empty"] = torch.zeros(4, 0)
    state["matrix"] = torch.randn(33, 7, generator=generator)
    return state


def truth_of(state: Mapping[str, Any]) -> dict[str, Truth]:
    import torch

    return {
        key: Truth(
            str(value.dtype).removeprefix("torch."),
            tuple(value.shape),
            bytes(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            if value.numel()
            else b"",
        )
        for key, value in state.items()
    }


def save_sharded(folder: Path, state: Mapping[str, Any], shards: int, stem: str = "model") -> None:
    """Write a folder as transformers and huggingface_hub do, by safetensors' own writer."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    names = list(state)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"{stem}-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: state[name] for name in names[number::shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.numel() * t.element_size() for t in state.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def save_dcp(folder: Path, state: Mapping[str, Any], **options: Any) -> None:
    """Write a folder by torch's own HuggingFaceStorageWriter, in one process."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(dict(state), storage_writer=HuggingFaceStorageWriter(str(folder), **options))


def split_by_rank(folder: Path, whole: Mapping[str, Any], ranks: int, parts: int = 1) -> None:
    """Write what each rank of an FSDP job leaves: rows dealt out by ceil(n / ranks)."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    names = list(whole)
    for rank in range(ranks):
        for part in range(parts):
            held: dict[str, Any] = {}
            offsets: dict[str, dict[str, Sequence[int]]] = {}
            for name in names[part::parts]:
                value = whole[name]
                if value.dim() == 0:
                    if rank == ranks - 1:
                        held[name], offsets[name] = value, {"saved_offsets": []}
                    continue
                rows = -(-len(value) // ranks)
                begin = min(rank * rows, len(value))
                held[name] = torch.clone(value[begin : begin + rows])
                offsets[name] = {"saved_offsets": [begin] + [0] * (value.dim() - 1)}
            file = f"shard-{rank + 1:05d}-model-{part + 1:05d}-of-{parts:05d}.safetensors"
            metadata = {
                "format": "pt",
                "DCP_VERSION": "1.0",
                "DCP_SHARDING_INFO": json.dumps(offsets),
            }
            save_file(held, folder / file, metadata=metadata)


class TestSafetensors(FormatTests):
    format = FORMAT

    def make(self, root: Path) -> list[Made]:
        from safetensors.torch import save_file

        state = tensors()
        truth = truth_of(state)
        save_file(state, root / "one.safetensors", metadata={"format": "pt"})
        shutil.copy(root / "one.safetensors", root / "renamed.bin")
        (root / "folder").mkdir()
        save_file(state, root / "folder" / "model.safetensors")
        (root / "folder" / "config.json").write_text("{}")
        (root / "folder" / "tokenizer.model").write_bytes(b"\0")
        (root / "folder" / "README.md").write_text("a model")
        save_sharded(root / "sharded", state, 3)
        floats = {k: v for k, v in state.items() if k in ("scalar", "matrix", "empty")}
        save_dcp(root / "dcp", floats)
        save_dcp(root / "dcp_alone", floats, save_distributed=True)
        rows = {k: v for k, v in state.items() if v.numel()}
        split_by_rank(root / "ranks", rows, 4, 2)
        return [
            Made(root / "one.safetensors", truth),
            Made(root / "renamed.bin", truth),
            Made(root / "folder", truth),
            Made(root / "sharded", truth),
            Made(root / "dcp", truth_of(floats)),
            Made(root / "dcp_alone", truth_of(floats)),
            Made(root / "ranks", truth_of(rows)),
        ]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not ARCHIVES.is_dir():
        pytest.skip(f"no real checkpoints at {ARCHIVES}")
    root = tmp_path_factory.mktemp("real")
    for name in ("dcp_hf", "hf_llama", "hf_mixtral"):
        extract(ARCHIVES / f"{name}.tar.xz", root / name)
    return root


def real(root: Path, name: str) -> Path:
    """Return the directory with ckpt/ and truth/ of an unpacked set."""
    found: Path = next((root / name).rglob("truth")).parent
    return found


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("hf_llama", "."),
        ("hf_mixtral", "."),
        ("dcp_hf", "index"),
        ("dcp_hf", "sharded"),
        ("dcp_hf", "sharded_index"),
        ("dcp_hf", "consolidated/sharded"),
    ],
)
def test_real_checkpoints_equal_the_truth(unpacked: Path, name: str, folder: str) -> None:
    place = real(unpacked, name)
    path = place / "ckpt" / folder
    truth = open_path(FORMAT, place / "truth" / "state.safetensors")
    checkpoint = open_path(FORMAT, path)
    assert len(checkpoint.tensors) > 20
    for key, tensor in checkpoint.tensors.items():
        expected = truth.tensors[key]
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype)
        assert read_tensor(checkpoint, key) == read_tensor(truth, key), key
    assert worst(f.code for f in findings_of(FORMAT, path)) is ExitCode.OK


def test_a_failed_consolidation_is_incomplete(unpacked: Path) -> None:
    path = real(unpacked, "dcp_hf") / "ckpt" / "consolidated"
    found = FORMAT.recognise(listing_of_path(path))
    assert found is not None
    assert found.commit is CommitState.UNCOMMITTED
    with pytest.raises(IncompleteError) as caught:
        open_path(FORMAT, path)
    assert caught.value.hint.endswith("consolidated/sharded")


def test_shards_of_ranks_beside_unfinished_files_are_incomplete(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    split_by_rank(tmp_path / "sharded", {"w": torch.ones(4)}, 2)
    found = FORMAT.recognise(listing_of_path(tmp_path))
    assert found is not None
    assert found.commit is CommitState.UNCOMMITTED
    assert findings_of(FORMAT, tmp_path)[0].code is ExitCode.INCOMPLETE
    # The merged file is there, but its index, which is written last, is not.
    save_file({"w": torch.ones(4)}, tmp_path / "model-00001-of-00001.safetensors")
    found = FORMAT.recognise(listing_of_path(tmp_path))
    assert found is not None
    assert found.commit is CommitState.UNCOMMITTED
    assert findings_of(FORMAT, tmp_path)[0].code is ExitCode.INCOMPLETE
    # Without ranks beside it, one shard of one is a whole.
    shutil.rmtree(tmp_path / "sharded")
    assert findings_of(FORMAT, tmp_path) == []


def test_a_folder_called_sharded_alone_is_no_failed_consolidation(
    tmp_path: Path, unpacked: Path
) -> None:
    import torch
    from safetensors.torch import save_file

    # A root whose children are called `sharded`, `index` and so on: torch leaves no such thing.
    assert FORMAT.recognise(listing_of_path(real(unpacked, "dcp_hf") / "ckpt")) is None
    save_file({"w": torch.ones(4)}, tmp_path / "model-00001-of-00001.safetensors")
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / "notes.txt").write_text("mine")
    found = FORMAT.recognise(listing_of_path(tmp_path))
    assert found is not None
    assert found.commit is CommitState.NO_MARKER
    assert list(open_path(FORMAT, tmp_path).tensors) == ["w"]


def consolidated(unpacked: Path, to: Path) -> Path:
    shutil.copytree(real(unpacked, "dcp_hf") / "ckpt" / "consolidated_float", to)
    return to


def test_what_ranks_wrote_before_a_consolidation_is_its_second_copy(
    unpacked: Path, tmp_path: Path
) -> None:
    path = consolidated(unpacked, tmp_path / "c")
    checkpoint = open_path(FORMAT, path)
    shards = {f"sharded/{file.name}" for file in (path / "sharded").iterdir()}
    assert not checkpoint.second_copies & shards
    assert set(checkpoint.members()) >= shards
    for name, tensor in open_path(FORMAT, path / "sharded").tensors.items():
        assert checkpoint.tensors[name].shape == tensor.shape
        assert checkpoint.tensors[name].dtype == tensor.dtype
    assert verify(checkpoint, VerifyOptions(level=Level.VALUES)).code is ExitCode.OK
    report = verify(checkpoint, VerifyOptions(level=Level.VALUES))
    assert "stray-file" not in {found.kind for found in report.findings}


def test_a_consolidation_that_differs_from_its_shards_is_found(
    unpacked: Path, tmp_path: Path
) -> None:
    path = consolidated(unpacked, tmp_path / "c")
    checkpoint = open_path(FORMAT, path)
    copy = next(p for t in checkpoint.tensors.values() for p in t.pieces if p.replica)
    file = path / copy.extent.file
    data = bytearray(file.read_bytes())
    data[copy.extent.offset] ^= 1
    file.write_bytes(data)
    report = verify(open_path(FORMAT, path), VerifyOptions(level=Level.VALUES))
    assert report.code is ExitCode.CORRUPT
    assert "copy-differs" in {found.kind for found in report.findings}


def test_a_scalar_that_only_the_shards_hold_is_not_lost(unpacked: Path, tmp_path: Path) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path = consolidated(unpacked, tmp_path / "c")
    first = sorted((path / "sharded").iterdir())[0]
    held = load_file(first)
    with safe_open(first, "pt") as opened:
        said = json.loads(opened.metadata()["DCP_SHARDING_INFO"])
    held["seen"], said["seen"] = torch.tensor(7), {"saved_offsets": []}
    save_file(held, first, {"DCP_SHARDING_INFO": json.dumps(said)})
    checkpoint = open_path(FORMAT, path)
    assert read_tensor(checkpoint, "seen") == (7).to_bytes(8, "little")
    said_so = [found for found in checkpoint.open_findings if found.tensor == "seen"]
    assert [found.kind for found in said_so] == ["note"]


def test_shards_without_their_index_are_incomplete(tmp_path: Path) -> None:
    save_sharded(tmp_path, tensors(), 2)
    (tmp_path / "model.safetensors.index.json").unlink()
    found = FORMAT.recognise(listing_of_path(tmp_path))
    assert found is not None
    assert found.commit is CommitState.UNCOMMITTED
    with pytest.raises(IncompleteError):
        open_path(FORMAT, tmp_path)


def test_a_folder_without_weights_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotFoundError):
        open_path(FORMAT, tmp_path)


def test_shards_of_an_earlier_save_are_stale(tmp_path: Path) -> None:
    save_sharded(tmp_path, tensors(1), 4)
    save_sharded(tmp_path, tensors(2), 3)
    found = findings_of(FORMAT, tmp_path)
    stale = [f for f in found if f.kind == "stale-shard"]
    assert len(stale) == 4
    assert all(f.file and f.file.endswith("of-00004.safetensors") for f in stale)
    assert worst(f.code for f in found) is ExitCode.OK
    assert worst(f.strict(frozenset(Strictness)).code for f in found) is ExitCode.CORRUPT
    state = tensors(2)
    checkpoint = open_path(FORMAT, tmp_path)
    assert read_tensor(checkpoint, "matrix") == truth_of(state)["matrix"].data


def test_one_file_goes_before_shards_of_its_name(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_sharded(tmp_path, tensors(1), 2)
    save_file(tensors(2), tmp_path / "model.safetensors")
    checkpoint = open_path(FORMAT, tmp_path)
    assert read_tensor(checkpoint, "matrix") == truth_of(tensors(2))["matrix"].data
    assert [f.kind for f in checkpoint.check()] == ["stale-shard", "stale-shard"]


def test_several_stems_are_several_components(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    save_sharded(tmp_path, {"w": torch.zeros(2), "v": torch.zeros(3)}, 2, "model.fp16")
    (tmp_path / "model.fp16.safetensors.index.json").rename(
        tmp_path / "model.safetensors.index.fp16.json"
    )
    save_file({"lora": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    checkpoint = open_path(FORMAT, tmp_path)
    assert set(checkpoint.tensors) == {
        "w",
        "extra:model.fp16:w",
        "extra:model.fp16:v",
        "extra:adapter_model:lora",
    }
    assert list(checkpoint.check()) == []


def test_optimizer_state_and_objects_lie_beside_the_weights(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_sharded(tmp_path, {"a.w": torch.ones(2), "b.w": torch.ones(3)}, 2)
    (tmp_path / "optimizer").mkdir()
    save_file(
        {
            "master.a.w": torch.ones(2),
            "exp_avg.a.w": torch.ones(2),
            "exp_avg_sq.a.w": torch.ones(2),
            "other.a.w.step": torch.tensor(7.0),
            "loose": torch.ones(1),
        },
        tmp_path / "optimizer" / "model-00001-of-00001.safetensors",
    )
    (tmp_path / "ftckpt.objects").mkdir()
    (tmp_path / "ftckpt.objects" / "lr_scheduler.json").write_text('{"last_epoch": 7}')
    (tmp_path / "ftckpt.objects" / "rng.bin").write_bytes(b"\x80\x04N.")
    checkpoint = open_path(FORMAT, tmp_path)
    kinds = {key: tensor.kind for key, tensor in checkpoint.tensors.items()}
    assert kinds == {
        "a.w": Kind.PARAM,
        "b.w": Kind.PARAM,
        "master:a.w": Kind.MASTER,
        "exp_avg:a.w": Kind.EXP_AVG,
        "exp_avg_sq:a.w": Kind.EXP_AVG_SQ,
        "optimizer:a.w.step": Kind.OTHER,
        "optimizer:loose": Kind.OTHER,
    }
    assert checkpoint.tensors["exp_avg:a.w"].stored_name == "exp_avg.a.w"
    assert [(s.value, s.role) for s in checkpoint.scalars(8)] == [(7.0, StepRole.OPTIMIZER)]
    assert list(checkpoint.scalars(0)) == []
    assert checkpoint.load_object("lr_scheduler.json") == {"last_epoch": 7}
    assert checkpoint.load_object("rng.bin") == b"\x80\x04N."
    assert set(checkpoint.members()) == set(checkpoint.source.entries)


def test_hidden_directories_and_strange_files_are_no_members(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors(), tmp_path / "model.safetensors")
    for name in (".cache/huggingface/x.json", ".git/config", "notes.xyz", "sub/config.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert list(open_path(FORMAT, tmp_path).members()) == ["model.safetensors"]


@pytest.mark.parametrize(("count", "notes"), [(2, 2), (6, 1)])
def test_followed_links_are_noted(tmp_path: Path, count: int, notes: int) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    save_sharded(blobs, tensors(), count - 1)
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    found = findings_of(FORMAT, snapshot)
    assert [f.kind for f in found] == ["link-followed"] * notes
    assert worst(f.strict(frozenset(Strictness)).code for f in found) is ExitCode.UNSAFE


def test_a_fifo_among_the_shards_is_unsafe(tmp_path: Path) -> None:
    import os

    save_sharded(tmp_path, tensors(), 2)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    os.mkfifo(tmp_path / "model-00001-of-00002.safetensors")
    with pytest.raises(UnsafeError) as caught:
        open_path(FORMAT, tmp_path)
    assert caught.value.kind == "special-file"


def test_damage_in_one_shard_does_not_hide_the_others(tmp_path: Path) -> None:
    save_sharded(tmp_path, tensors(), 3)
    (tmp_path / "model-00002-of-00003.safetensors").write_bytes(b"")
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    found = list(open_path(FORMAT, tmp_path).check())
    assert [(f.kind, f.file) for f in found] == [
        ("truncated-file", "model-00002-of-00003.safetensors"),
        ("missing-file", "model-00003-of-00003.safetensors"),
    ]


def test_headers_take_two_rounds_of_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    big = {f"layer.{n:04d}.{'x' * 100}": torch.zeros(1) for n in range(1500)}
    save_sharded(tmp_path, big, 3)
    rounds: list[list[Extent]] = []
    read_many = Source.read_many

    def counted(self: Source, extents: Sequence[Extent]) -> list[bytes]:
        rounds.append(list(extents))
        return read_many(self, extents)

    monkeypatch.setattr(Source, "read_many", counted)
    checkpoint = FORMAT.open(Source.directory(open_store(str(tmp_path))))
    assert len(checkpoint.tensors) == 1500
    headers = [batch for batch in rounds if batch[0].file.endswith(".safetensors")]
    assert [len(batch) for batch in headers] == [3, 3]
    first = min(t.pieces[0].extent.offset for t in checkpoint.tensors.values())
    assert all(first >= e.end for batch in headers for e in batch)


def known(folder: Path) -> list[Finding]:
    """Return what is found, but for the remark that DCP's shards never say how many there are."""
    found = open_path(FORMAT, folder).check()
    return [f for f in found if f.kind != "count-unknown"]


@pytest.mark.parametrize(
    ("lost", "kind"),
    [
        ("shard-00002-model-00001-of-00002.safetensors", "missing-file"),
        ("shard-00003-model-00001-of-00002.safetensors", "missing-file"),
        ("shard-00003-model-00002-of-00002.safetensors", "missing-file"),
    ],
)
def test_the_grid_of_ranks_shows_a_lost_shard(tmp_path: Path, lost: str, kind: str) -> None:
    import torch

    split_by_rank(tmp_path, {f"w{n}": torch.randn(9, 2) for n in range(4)}, 3, 2)
    assert known(tmp_path) == []
    (tmp_path / lost).unlink()
    assert [(f.kind, f.file) for f in known(tmp_path)] == [(kind, lost)]


def test_a_part_that_no_rank_has_is_missing(tmp_path: Path) -> None:
    import torch

    split_by_rank(tmp_path, {f"w{n}": torch.randn(9, 2) for n in range(4)}, 3, 2)
    for file in tmp_path.glob("*-model-00002-*"):
        file.unlink()
    assert [f.kind for f in known(tmp_path)] == ["missing-file"]


def test_a_lost_last_rank_cannot_be_seen_and_is_called_unknown(tmp_path: Path) -> None:
    import torch

    split_by_rank(tmp_path, {f"w{n}": torch.randn(9, 2) for n in range(4)}, 3, 1)
    for lost in (None, "shard-00003-model-00001-of-00001.safetensors"):
        if lost:
            (tmp_path / lost).unlink()
        (found,) = open_path(FORMAT, tmp_path).check()
        assert (found.kind, found.severity) == ("count-unknown", "warning")
        assert found.strict({Strictness.COUNTS}).code is ExitCode.UNVERIFIED


def test_a_rank_without_a_part_is_only_noted_where_nothing_shows_a_loss(tmp_path: Path) -> None:
    import torch

    whole = {f"w{n}": torch.randn(9) for n in range(4)}
    split_by_rank(tmp_path, whole, 1, 2)
    # The second rank holds a replicated vector of part 1 and nothing of part 2.
    split_by_rank(tmp_path / "other", {"extra": torch.randn(3)}, 1, 1)
    (tmp_path / "other" / "shard-00001-model-00001-of-00001.safetensors").rename(
        tmp_path / "shard-00002-model-00001-of-00002.safetensors"
    )
    found = known(tmp_path)
    assert [f.kind for f in found] == ["note"]
    assert found[0].code is ExitCode.OK


def test_ranks_that_disagree_are_reported(tmp_path: Path) -> None:
    import torch

    for rank, value in ((1, torch.ones(2, 2)), (2, torch.ones(2, 2).half()), (3, torch.ones(4))):
        split_by_rank(tmp_path / str(rank), {"w": value}, 1)
        (tmp_path / str(rank) / "shard-00001-model-00001-of-00001.safetensors").rename(
            tmp_path / f"shard-{rank:05d}-model-00001-of-00001.safetensors"
        )
    kinds = {f.kind for f in open_path(FORMAT, tmp_path).check()}
    assert {"dtype-mismatch", "shape-mismatch"} <= kinds


def test_equal_boxes_of_two_ranks_are_replicas(tmp_path: Path) -> None:
    import torch

    split_by_rank(tmp_path, {"w": torch.ones(4)}, 1)
    one = tmp_path / "shard-00001-model-00001-of-00001.safetensors"
    shutil.copy(one, tmp_path / "shard-00002-model-00001-of-00001.safetensors")
    pieces = open_path(FORMAT, tmp_path).tensors["w"].pieces
    assert [(p.replica, p.rank) for p in pieces] == [(0, 0), (1, 1)]


def test_one_rank_shard_opened_alone_says_so(tmp_path: Path) -> None:
    import torch

    split_by_rank(tmp_path, {"w": torch.ones(9, 2)}, 3)
    checkpoint = open_path(FORMAT, tmp_path / "shard-00002-model-00001-of-00001.safetensors")
    assert checkpoint.tensors["w"].shape == (3, 2)
    assert "rank 1" in checkpoint.dialect
    assert list(checkpoint.check()) == []


def test_a_folder_with_dcp_metadata_is_left_to_dcp(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(tensors(), tmp_path / "model.safetensors")
    (tmp_path / ".metadata").write_bytes(b"")
    assert FORMAT.recognise(listing_of_path(tmp_path)) is None


def test_another_single_file_is_not_claimed(tmp_path: Path) -> None:
    for name, content in (("a.bin", b"PK\3\4" + b"\0" * 40), ("b.bin", b""), ("c", b"{}" * 9)):
        (tmp_path / name).write_bytes(content)
        assert FORMAT.recognise(listing_of_path(tmp_path / name)) is None
