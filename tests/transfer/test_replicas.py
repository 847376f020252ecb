"""What several ranks hold is proven in every file: a fault in a copy is seen, wherever it lies."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftckpt.checkpoint import Checkpoint, Piece, TensorInfo
from ftckpt.digests.tensors import digest_tensor
from ftckpt.errors import CorruptError, ExitCode
from ftckpt.formats.state.same_object import SameObject
from ftckpt.formats.writers import format_and_writer
from ftckpt.storage import StoreOptions
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.transfer.prove.against_digests import DigestProof
from ftckpt.transfer.prove.against_source import Proof, Prover, prove
from ftckpt.transfer.run import TransferOptions, TransferReport, transfer
from ftckpt.verification import Level, VerifyOptions, verify
from ftckpt.workers import Work
from tests.builders.checkpoints import flip, open_checkpoint
from tests.builders.megatron_files import write
from tests.builders.megatron_model import Job
from tests.formats.deepspeed.sets import tag
from tests.formats.ranks.jobs import job

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
NORM = "decoder.final_layernorm.weight"
MEGATRON = Job(tp=2, pp=2, dp=2, layers=2, tied=True, optimizer="masters")

# Source, target format, what is asked of it, and tensors of which the result has replicas.
CASES: Mapping[str, tuple[Any, str, dict[str, Any], set[str]]] = {
    "megatron": (MEGATRON, "megatron", {"tp": 4}, {EMBEDDING, NORM, f"exp_avg:{NORM}"}),
    "deepspeed to ranks": ("z1", "ranks", {}, {"seen", "rope"}),
    "ranks": ("hsdp", "ranks", {}, {"seen", "optimizer:gain.step"}),
    "deepspeed of tensor ranks": ("tp", "deepspeed", {}, {"norm", "master:norm"}),
    "deepspeed of stages": ("pipe", "deepspeed", {}, {"exp_avg:tied_modules.embed.weight"}),
    "deepspeed of partitions": ("z3", "deepspeed", {"dp": 3}, {"seen", "optimizer:gain.step"}),
    "deepspeed's universal": ("z3", "deepspeed-universal", {}, {"seen", "rope"}),
}


def source(name: str, folder: Path) -> Path:
    """Return the source of a case."""
    made = CASES[name][0]
    if isinstance(made, Job):
        return write(folder, made).path
    return job(folder, made) if made == "hsdp" else tag(made)


def move(
    place: Path, to: Path, name: str, prover: Prover = prove, family: str = ""
) -> TransferReport:
    """Carry a case out, or write its source plainly in another format."""
    _, own, request, _ = CASES[name]
    target, writer = format_and_writer(family or own)
    content = Content.of(open_checkpoint(place))
    layout = writer.layout(content, LayoutRequest() if family else LayoutRequest(**request))
    return transfer(
        content,
        replace(layout, unplaced=()),  # objects alone: what is proven here are tensors
        str(to),
        target,
        single=writer.single,
        same_objects=SameObject,
        options=TransferOptions(Work(threads=2), restart=True),
        store_options=StoreOptions(),
        prover=prover,
    )


def replicas(result: Checkpoint) -> Iterator[tuple[str, Piece]]:
    for key, info in result.tensors.items():
        yield from ((key, piece) for piece in info.pieces if piece.replica and piece.box.volume)


def flip_last(result: Checkpoint, key: str, piece: Piece) -> None:
    """Flip a bit of the last byte of a piece, whose elements are dense."""
    file, offset, length = result.payload(piece).extent
    path = result.source.store.local_path(result.source.path(file))
    assert path is not None
    flip(Path(path), offset + length - 1)


@pytest.mark.parametrize("name", CASES)
def test_a_fault_in_any_replica_fails_the_proof(name: str, tmp_path: Path) -> None:
    place = source(name, tmp_path / "source")
    tried: set[str] = set()

    def faulty(content: Content, result: Checkpoint, *args: Any, **more: Any) -> Proof:
        shared = {piece.extent: key for key, piece in replicas(result)}
        honest = prove(content, result, *args, **more)
        main = sum(info.nbytes for info in proven(content, result))
        assert honest.nbytes == main + sum(extent.length for extent in shared)
        for key, piece in dict(replicas(result)).items():
            flip_last(result, key, piece)
            with pytest.raises(CorruptError, match="repeats them, are not what the source") as seen:
                prove(content, result, *args, **more)
            assert seen.value.file == piece.extent.file
            assert seen.value.tensor in tensors_at(result, piece)
            flip_last(result, key, piece)
            tried.add(key)
        flip_last(result, key, piece)
        return prove(content, result, *args, **more)

    out = tmp_path / "results" / "out"
    out.parent.mkdir()
    with pytest.raises(CorruptError, match="the proof failed: elements") as caught:
        move(place, out, name, faulty)
    assert (caught.value.exit_code, caught.value.kind) == (ExitCode.CORRUPT, "failed-proof")
    assert not os.path.lexists(out)
    assert tried >= CASES[name][3]
    assert move(place, out, name).proof is not None


def tensors_at(result: Checkpoint, piece: Piece) -> set[str]:
    """Return the keys of all tensors that share the bytes of a piece."""
    return {key for key, one in replicas(result) if one.extent == piece.extent}


def proven(content: Content, result: Checkpoint) -> Iterator[TensorInfo]:
    """Yield what the result holds of each tensor, and of each tied weight that it stores apart."""
    for key in content.tensors:
        yield result.tensors[key if key in result.tensors else result.aliases[key]]
    for key in content.aliases.keys() & result.tensors.keys() - content.tensors.keys():
        yield result.tensors[key]


@pytest.mark.parametrize("family", ["dcp", "ranks", "torchsave"])
def test_a_fault_in_a_tied_weight_that_is_stored_apart_fails_the_proof(
    family: str, tmp_path: Path
) -> None:
    def faulty(content: Content, result: Checkpoint, *args: Any, **more: Any) -> Proof:
        assert content.aliases[OUTPUT] == EMBEDDING
        assert OUTPUT not in content.tensors
        prove(content, result, *args, **more)
        flip_last(result, OUTPUT, result.tensors[OUTPUT].pieces[-1])
        return prove(content, result, *args, **more)

    place = source("megatron", tmp_path / "source")
    says = rf"of (box .* of )?({OUTPUT}|{EMBEDDING}) are not what the source holds"
    with pytest.raises(CorruptError, match=says):
        move(place, tmp_path / "out", "megatron", faulty, family)
    assert not os.path.lexists(tmp_path / "out")


def test_of_replicas_that_differ_the_main_piece_goes_everywhere(tmp_path: Path) -> None:
    place = source("megatron", tmp_path / "source")
    checkpoint = open_checkpoint(place)
    norm = [piece for key, piece in replicas(checkpoint) if key in (NORM, EMBEDDING)]
    for piece in norm:
        flip(place / piece.extent.file, piece.extent.offset)
    values = VerifyOptions(level=Level.VALUES)
    assert "replica-differs" in {f.kind for f in verify(checkpoint, values).findings}
    assert move(place, tmp_path / "out", "megatron").proof is not None
    result = open_checkpoint(tmp_path / "out")
    assert "replica-differs" not in {f.kind for f in verify(result, values).findings}
    shutil.rmtree(place)
    again = source("megatron", tmp_path / "source")
    assert move(again, tmp_path / "same", "megatron").proof is not None
    for file in (tmp_path / "same").glob("mp_rank_*/*"):
        assert file.read_bytes() == (tmp_path / "out" / file.parent.name / file.name).read_bytes()


@pytest.mark.parametrize("digests", [False, True])
def test_a_replica_that_the_reader_leaves_out_fails_the_proof(
    digests: bool, tmp_path: Path
) -> None:
    """In another type it is no copy to a reader; a trainer would cast and load it."""
    import torch

    place = write(tmp_path / "source", Job(tp=2)).path
    content = Content.of(open_checkpoint(place))
    result = shutil.copytree(place, tmp_path / "result")
    tensors = content.checkpoint.tensors
    recorded = {key: digest_tensor(content.checkpoint, info) for key, info in tensors.items()}
    prover = DigestProof(recorded) if digests else prove
    assert prover(content, open_checkpoint(result), SameObject).tensors == len(tensors)
    file = result / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["model"][NORM] = state["model"][NORM].float() + 1
    torch.save(state, file)
    says = f"{NORM} is bfloat16 in mp_rank_00/.* and float32 in mp_rank_01/"
    with pytest.raises(CorruptError, match=says) as caught:
        prover(content, open_checkpoint(result), SameObject)
    assert (caught.value.kind, caught.value.tensor) == ("failed-proof", NORM)
