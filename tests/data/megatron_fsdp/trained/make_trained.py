"""Make the archives beside this file: `python make_trained.py LM OUT`, on a GPU.

LM is a checkout of Megatron-LM whose helpers are built. Made with core 0.16.1 (its own
Megatron-FSDP), torch 2.11 and CUDA 13 on one H200, NCCL, a world of one rank, `--transformer-impl
local`. `torch-dense` had torch's Adam. `fused-experts` had the FusedAdam of apex, whose kernels
were built for it; its `multi_tensor_applier` was given the local part of each DTensor, as that of
Transformer Engine takes it. `fsdp` is what Megatron-FSDP saved after three steps, `base` what the
same job saved in torch_dist without it.

Afterwards the fraction of each weight, master and moment is cut to two bits, in place and with its
CRC-32, so that the archives are small; all other bytes are those that the jobs wrote.
"""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

HERE = Path(__file__).parent
JOB = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48
    --seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4
    --tokenizer-type NullTokenizer --vocab-size 63 --make-vocab-size-divisible-by 8
    --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-rope-fusion --no-bias-swiglu-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --attention-dropout 0 --hidden-dropout 0
    --lr 1e-3 --min-lr 1e-5 --lr-decay-style linear --train-iters 6 --weight-decay 0.1
    --adam-beta2 0.95 --rerun-mode disabled --save-interval 3 --mock-data --log-interval 1
    --eval-iters 0 --eval-interval 100 --num-workers 0 --split 100,0,0
    --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm
    --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
    --bf16 --use-distributed-optimizer
"""
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01"
FSDP = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    " --ckpt-format fsdp_dtensor"
)
JOBS = {
    "torch-dense/fsdp": FSDP,
    "torch-dense/base": "--ckpt-format torch_dist",
    "fused-experts/fsdp": f"{FSDP} {EXPERTS}",
}


def train(lm: Path, place: Path, words: str) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29801", "RANK": "0", "WORLD_SIZE": "1"}
    how = {"TORCH_COMPILE_DISABLE": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "LOCAL_RANK": "0"}
    many = {"CUDA_DEVICE_MAX_CONNECTIONS": "8" if FSDP in words else "1", "PYTHONPATH": str(lm)}
    command = [sys.executable, str(lm / "pretrain_gpt.py"), *JOB.split(), *words.split()]
    command += ["--save", str(place)]
    subprocess.run(command, env={**os.environ, **where, **how, **many}, check=True)


def shortened(data: bytes, dtype: torch.dtype) -> bytes:
    """Return the elements rounded to bfloat16, and of their fractions two bits."""
    if dtype == torch.float32:
        bits = np.frombuffer(data, "<u4").astype(np.int64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFE00000
        return rounded.astype("<u4").tobytes()
    return (np.frombuffer(data, "<u2") & 0xFFE0).tobytes()


def shorten(place: Path) -> None:
    """Shorten each weight, master and moment of a checkpoint where it lies."""
    meta = FileSystemReader(place).read_metadata()
    for index, where in meta.storage_data.items():
        kind = meta.state_dict_metadata[index.fqn]
        if not isinstance(kind, TensorStorageMetadata) or index.fqn.endswith("step"):
            continue
        if kind.properties.dtype not in (torch.float32, torch.bfloat16):
            continue
        file = place / where.relative_path
        whole = bytearray(file.read_bytes())
        item = whole[where.offset : where.offset + where.length]
        with zipfile.ZipFile(io.BytesIO(item)) as archive:
            names = [i for i in archive.infolist() if i.filename.rpartition("/data/")[2].isdigit()]
            (info,) = names
            old = archive.read(info)
        new = shortened(old, kind.properties.dtype)
        assert item.count(old) == 1
        assert len(new) == len(old)
        at = item.find(old)
        sums = struct.pack("<I", info.CRC), struct.pack("<I", zlib.crc32(new))
        head, tail = (part.replace(*sums) for part in (item[:at], item[at + len(old) :]))
        whole[where.offset : where.offset + where.length] = head + new + tail
        file.write_bytes(whole)


def main(lm: Path, out: Path) -> None:
    for name, words in JOBS.items():
        train(lm, out / name, words)
        shorten(out / name / "iter_0000003")
    for name in ("torch-dense", "fused-experts"):
        places = [f"{job}/iter_0000003" for job in JOBS if job.startswith(name)]
        subprocess.run(
            ["tar", "--mtime=2026-11-27", "--sort=name", "-cJf", HERE / f"{name}.tar.xz",
             "-C", out, *places], check=True,
        )  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
