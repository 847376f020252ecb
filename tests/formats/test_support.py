"""The table of what is read, written and resharded: the code does it, and the pages show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftckpt.errors import UsageError
from ftckpt.formats import writers
from ftckpt.formats.catalog import FORMATS
from ftckpt.formats.state.same_object import SameObject
from ftckpt.formats.support import LAYOUTS, WRITTEN, Support, put
from ftckpt.formats.unsupported import Recognised
from ftckpt.formats.writers import FILE_WRITERS, WRITERS, format_and_writer
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.transfer.prove.rehearsal import rehearse
from ftckpt.transfer.run import require_place
from tests.builders.checkpoints import open_checkpoint
from tests.builders.real_sets import real_set
from tests.transfer.test_real_round_trips import _open

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
AXES = ("tp", "pp", "vp", "dp", "ep", "zero_stage", "max_shard_size")
SAMPLES = [(row, sample) for row in LAYOUTS for sample in row.samples]


def test_the_page_shows_it() -> None:
    text = (ROOT / "docs" / "formats.md").read_text()
    assert put(text) == text, "run: python -m ftckpt.formats.support docs/formats.md"


def test_every_format_that_is_read_is_in_it() -> None:
    read = {one.name for one in FORMATS if not isinstance(one, Recognised)} - {"pieces"}
    assert {row.format for row in LAYOUTS} == read


def test_what_is_written_has_a_writer_and_every_writer_is_in_it() -> None:
    assert set(WRITTEN) == set(WRITERS)
    assert {name: make().name for name, make in WRITERS.items()} == {name: name for name in WRITERS}
    assert {end: (one.format, one.make().name) for end, one in FILE_WRITERS.items()} == {
        ".safetensors": ("safetensors", "safetensors")
    }


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_resharded_is_what_a_writer_grants(name: str) -> None:
    supported = WRITERS[name]().supported_options
    rows = [row for row in LAYOUTS if row.format == name and row.written]
    said = {axis for row in rows for axis in row.resharded}
    assert said == {axis for axis in AXES if axis in supported}


@pytest.mark.parametrize(("row", "sample"), SAMPLES, ids=lambda one: str(one)[:60])
def test_samples_are_read_and_what_is_written_is_written(
    row: Support, sample: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    name, kept, inside = sample.partition(":")
    path = real_set(name, inside, tmp_path_factory) if kept else DATA / name
    checkpoint = _open(path) if kept else open_checkpoint(path)
    assert checkpoint.format == row.format
    if row.written:
        target, writer = format_and_writer(row.format)
        content = Content.of(checkpoint)
        layout = writer.layout(content, LayoutRequest())
        require_place(layout)
        rehearse(content, layout, target, SameObject, single=writer.single)


def test_layouts_without_a_sample_are_made_by_other_tests() -> None:
    # torch writes compressed items and legacy streams, in the tests of dcp and torchsave;
    # trainer_dirs/test_nemo.py and test_verl.py put a real store in NeMo's and verl's places;
    # local replicas, Megatron-FSDP and nvrx are archives.
    # What trainers put beside a DCP store is in archives (trainer_dirs/test_dialects.py), and
    # trainers of RL over Megatron are laid out by a builder (trainer_dirs/test_rl_roots.py). Others
    # are laid out after their trainers' sources (first_contact/test_trainers.py).
    unsampled = [row.what for row in LAYOUTS if not row.samples]
    assert unsampled == [
        "with a file of each rank beside it: VeOmni's `extra_state/`, prime-rl's "
        "`dataloader/`, pith-train's `rng-rank-00000.pt`",
        "with `meta.pt` beside it: Lightning's and Fabric's FSDP strategies",
        "copies of all data files: `copy-0/`, `copy-1/` (S3StorageWriter, `num_copies`)",
        "with compressed items (zstd)",
        "weights of bitsandbytes: NF4, FP4, int8",
        "Transformer Engine's tensors in 8 and 4 bits (`Float8Tensor` and others)",
        "one torch.save file before torch 1.6 (legacy stream)",
        "the same two with weights in folders: diffusers' `unet/`, `transformer/`, "
        "`unet_ema/`; PEFT's named adapters",
        "folders that `modules.json` (sentence-transformers) or `model_index.json` "
        "(diffusers) names; `--to safetensors` keeps them",
        "OLMo-core: `stepN/` with `model_and_optim/` and `train/`",
        "files of a step beside those of other steps: nanochat's `model_N.pt`, `meta_N.json`,"
        " `optim_N_rankR.pt`; guided-diffusion's `modelN.pt`, `emaN`, `optN.pt`",
        "NeMo 2: `MODEL--step=N…/` with `weights/` and `context/`",
        "steps with a DCP store in a folder: xtuner's `weights/`, prime-rl's `trainer/`, "
        "RLinf's `actor/dcp_checkpoint/`, miles' `model/` and `optimizer/`",
        "RLinf's other stores: one file a rank in `local_shard_checkpoint/`, Megatron's "
        "`actor/iter_N/`; components of SAC and IQL",
        "miles with LoRA: `iter_N/adapter/`, a PEFT adapter and a file of each rank",
        "verl with Megatron: `actor/` with `dist_ckpt/`, or with `ckpt_contents.json` and a "
        "store each",
        "a step of any trainer whose folders and files are parts that are read: NeMo-RL, "
        "NeMo Automodel, LeRobot, SpeechBrain, `actor/` and `critic/`",
        "a rank after a dot: `model.rank_0.pth`; fairseq's `checkpoint_1_100-shard0.pt`; "
        "cosmos-rl's `policy/`",
        "Muon beside Adam (`--optimizer muon`)",
        "roots of slime, and of miles with Megatron: `iter_N/` or `release/`, and `rollout/`",
        "Muon beside Adam, also the layer-wise optimizer (`dist_muon`)",
        "with local replicas: `__shadow_R__NAME`, `NAME.__tp_replica_R`",
        "Megatron-FSDP: `fsdp_dtensor`, a DCP store of a Megatron job",
        "NVIDIA resiliency extension: `SESSION/RANK/iter_0000010_3_local.pt`",
    ]


@pytest.mark.parametrize(
    ("asked", "meant"), [("hf", "safetensors"), ("torch_dist", "megatron-dist"), ("dpc", "dcp")]
)
def test_another_name_of_a_format_is_understood(asked: str, meant: str) -> None:
    with pytest.raises(UsageError, match=f"{asked}' is not a format") as raised:
        format_and_writer(asked)
    assert f"did you mean {meant}?" in raised.value.hint


def test_other_names_are_of_formats_that_are_written_and_mean_one() -> None:
    others = [name for named in writers.CALLED.values() for name in named]
    assert set(writers.CALLED) <= set(WRITTEN)
    assert len(set(others)) == len(others)
    assert not set(others) & set(WRITTEN)
