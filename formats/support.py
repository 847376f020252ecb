"""The table of what is read, written and resharded: for help, pages and tests.

`python -m ftckpt.formats.support FILE …` puts it between its markers in pages. It imports no
format, so that help can name what is written; a test holds it to readers, writers and samples.
"""

from __future__ import annotations

from typing import NamedTuple

BEGIN, END = "<!-- formats -->", "<!-- end of formats -->"


class Support(NamedTuple):
    """One layout of a format.

    Attributes:
        format: as an answer's `format` says it.
        what: the layout.
        written: whether `convert --to FORMAT` and `reshard` write this very layout.
        resharded: what `reshard` changes of it, as its flags are called; nothing where it is not
            written.
        tried: what wrote the samples that the tests read.
        samples: these samples: a set's name, with a place inside it, or a path in tests/data.
    """

    format: str
    what: str
    written: bool
    resharded: tuple[str, ...]
    tried: str
    samples: tuple[str, ...]


LAYOUTS = (
    Support("dcp", "PyTorch DCP: `.metadata` and `__R_N.distcp` (FSDP, HSDP, tensor parallel)",
           True, ("dp",), "torch 2.6, 2.13",
           ("dcp/fsdp2/step-3", "dcp/hsdp/step-3", "dcp/tp/step-3", "dcp_torch26_fsdp2_async:")),
    Support("dcp", "state below wrappers (`app`, `trainer`, any key), several models side by side",
           True, ("dp",), "torch 2.13", ("dcp/actors/step-3",)),
    Support("dcp", "with a file of each rank beside it: VeOmni's `extra_state/`, prime-rl's"
           " `dataloader/`, pith-train's `rng-rank-00000.pt`", False, (),
           "torch 2.13 in the places of VeOmni, prime-rl and pith-train of 2026",
           ()),
    Support("dcp", "with `meta.pt` beside it: Lightning's and Fabric's FSDP strategies", True,
           ("dp",), "torch 2.13 in the places of Lightning 2.6 and litgpt", ()),
    Support("dcp", "copies of all data files: `copy-0/`, `copy-1/` (S3StorageWriter, `num_copies`)",
           False, (), "torch 2.13 in the places of s3torchconnector's pull request 368",
           ()),
    Support("dcp", "with compressed items (zstd)", False, (), "torch 2.13", ()),
    Support("dcp", "with torchao's tensor subclasses, each whole in one item", True, ("dp",),
           "torch 2.13, torchao 0.18", ("optimizers/torchao_adamw8bit_dcp",)),
    Support("dcp", "schedule-free optimizers (FSDP2)", True, ("dp",),
           "torch 2.13, schedulefree 1.4",
           ("dcp/schedulefree/step-3",)),
    Support("dcp", "weights of bitsandbytes: NF4, FP4, int8", True, ("dp",),
           "torch 2.13, bitsandbytes 0.50", ()),
    Support("dcp", "saved without collectives: `__R.metadata` a rank", False, (), "torch 2.13",
           ("dcp/ranklocal/step-3",)),
    Support("safetensors", "Hugging Face folder: one file, or shards with an index",
           True, ("max_shard_size",), "transformers 5.23", ("hf_llama:", "hf_mixtral:")),
    Support("safetensors", "one file (`--to safetensors`, to a name that ends in .safetensors)",
           True, (), "safetensors 0.8", ("trainer_dirs/trainer/model.safetensors",)),
    Support("safetensors", "one file, compressed: `model.safetensors.zst`, `.lz4`, `.gz`",
           False, (), "safetensors 0.8, zstd", ("by_hand/packed/model.safetensors.zst",)),
    Support("safetensors", "DCP's Hugging Face shards", False, (), "torch 2.13",
           ("dcp_hf:sharded",)),
    Support("safetensors", "the same with the consolidated files (`enable_consolidation=True`)",
           False, (), "torch 2.13: 2, 3 and 4 ranks, FSDP2, HSDP", ("consolidated/three",)),
    Support("torchsave", "one torch.save file (zip)", True, (), "torch 2.13",
           ("trainer_dirs/trainer/optimizer.pt",)),
    Support("torchsave", "weights of bitsandbytes: NF4, FP4, int8", True, (),
           "torch 2.13, bitsandbytes 0.50", ("optimizers/bitsandbytes_linear.pt",)),
    Support("torchsave", "Transformer Engine's tensors in 8 and 4 bits (`Float8Tensor` and others)",
           True, (), "classes that pickle as Transformer Engine 1.x and 2.x do", ()),
    Support("torchsave", "one torch.save file before torch 1.6 (legacy stream)", False, (),
           "torch 2.13 (the old form)", ()),
    Support("torchsave", "one torch.save file, compressed: `ckpt_100.pt.zst`, `.pt.lz4`, `.pt.gz`",
           False, (), "torch 2.13, zstd, lz4, gzip",
           ("by_hand/compressed/ckpt_100.pt.zst", "by_hand/compressed/ckpt_100.pt.lz4",
            "by_hand/compressed/ckpt_100.pt.gz")),
    Support("torchsave", "one file of `pickle.dump`, tensors or arrays: `latest.pkl`",
           False, (), "torch 2.13, numpy 2, pickle protocols 3 to 5",
           ("by_hand/pickled/latest.pkl", "by_hand/pickled/ckpt_100.pkl",
            "by_hand/pickled/step_100.pkl")),
    Support("torchsave", "`pytorch_model-*.bin` with an index", False, (), "transformers 4.57",
           ("hf4_llama_bin:",)),
    Support("torchsave", "Lightning `.ckpt`", False, (), "Lightning 2.6", ("lightning_ddp:",)),
    Support("bundle", "Hugging Face Trainer's `checkpoint-N`, with and without PEFT", False, (),
           "transformers 5.23, peft 0.21", ("trainer_dirs/trainer", "trainer_dirs/trainer_peft")),
    Support("bundle", "Hugging Face Trainer's `checkpoint-N` with DeepSpeed's `global_stepN/`",
           False, (), "transformers 5.23, DeepSpeed 0.19",
           ("trainer_dirs/trainer_zero2", "trainer_dirs/trainer_zero3")),
    Support("bundle", "accelerate's directory: plain, with FSDP's DCP folders, of several models",
           False, (), "accelerate 1.15",
           ("trainer_dirs/accelerate", "trainer_dirs/accelerate_two",
            "accelerate_fsdp1:", "accelerate_fsdp2:")),
    Support("bundle", "the same two with weights in folders: diffusers' `unet/`, `transformer/`,"
           " `unet_ema/`; PEFT's named adapters", False, (),
           "torch 2.13 in the places of diffusers' examples and peft 0.21", ()),
    Support("bundle", "folders that `modules.json` (sentence-transformers) or `model_index.json`"
           " (diffusers) names; `--to safetensors` keeps them", False, (),
           "sentence-transformers 6.2; safetensors in the places of diffusers' pipelines", ()),
    Support("bundle", "OLMo-core: `stepN/` with `model_and_optim/` and `train/`", False, (),
           "torch 2.13 in the places of OLMo-core of 2026", ()),
    Support("bundle", "files of a step beside those of other steps: nanochat's `model_N.pt`,"
           " `meta_N.json`, `optim_N_rankR.pt`; guided-diffusion's `modelN.pt`, `emaN`, `optN.pt`",
           False, (), "torch 2.13 in the places of nanochat and guided-diffusion", ()),
    Support("bundle", "NeMo 2: `MODEL--step=N…/` with `weights/` and `context/`", False, (),
           "a store of core 0.16 in the places of NeMo 2.6", ()),
    Support("bundle", "steps with a DCP store in a folder: xtuner's `weights/`, prime-rl's"
           " `trainer/`, RLinf's `actor/dcp_checkpoint/`, miles' `model/` and `optimizer/`",
           False, (), "torch 2.13 in the places of xtuner, prime-rl, RLinf and miles of 2026",
           ()),
    Support("bundle", "RLinf's other stores: one file a rank in `local_shard_checkpoint/`,"
           " Megatron's `actor/iter_N/`; components of SAC and IQL", False, (),
           "torch 2.13 and a store of core 0.16 in the places of RLinf of August 2026", ()),
    Support("bundle", "miles with LoRA: `iter_N/adapter/`, a PEFT adapter and a file of each rank",
           False, (), "torch 2.13 in the places of miles of August 2026", ()),
    Support("bundle", "verl with Megatron: `actor/` with `dist_ckpt/`, or with"
           " `ckpt_contents.json` and a store each", False, (),
           "a store of core 0.16 in the places of verl of 2025 and 2026", ()),
    Support("bundle", "a step of any trainer whose folders and files are parts that are read:"
           " NeMo-RL, NeMo Automodel, LeRobot, SpeechBrain, `actor/` and `critic/`", False, (),
           "torch 2.13 in the places of the trainers of 2026", ()),
    Support("ranks", "one file a rank with DTensor inside: verl's names", True, ("dp",),
           "torch 2.13", ("ranks/tp_fsdp2/actor", "ranks/hsdp/actor", "verl_fsdp:")),
    Support("ranks", "one file a rank with ShardedTensor inside", False, (), "torch 2.13",
           ("ranks/fsdp1/actor",)),
    Support("ranks",
           "plain shards saved by hand: `shard_0_of_8.pt`, `rank_0.pt`, `model_rank_0.pt`",
           True, ("tp", "dp"), "torch 2.13",
           ("by_hand/recorded", "by_hand/offsets", "by_hand/specs")),
    Support("ranks", "the same, compressed: `rank_0.pt.zst`, `.lz4`, `.gz`; written uncompressed",
           False, (), "torch 2.13, gzip", ("by_hand/packed/ranks",)),
    Support("torchsave", "shards of several ranks in one file, with their specs", False,
           (), "torch 2.13",
           ("by_hand/one_file/by_rank.pt", "by_hand/one_file/listed.pt",
            "by_hand/one_file/by_tensor.pt")),
    Support("ranks", "a rank after a dot: `model.rank_0.pth`; fairseq's"
           " `checkpoint_1_100-shard0.pt`; cosmos-rl's `policy/`", False, (),
           "torch 2.13 in the places of cosmos-rl and fairseq", ()),
    Support("ranks", "pipeline stages saved by hand: `checkpoint_step100_stage0.pt`", False, (),
           "torch 2.13", ("by_hand/stages",)),
    Support("torch-checkpointing", "Meta's torch_checkpointing: `metadata.pkl`, `model_0.pt`,"
            " `optimizer_0.pt`; items in torch.save, safetensors, JSON and raw files",
            True, ("dp",), "torch_checkpointing 0.1.1",
            ("torch_checkpointing/fsdp/step-10", "torch_checkpointing/grid/step-10",
             "torch_checkpointing/fsdp_tp/step-10", "torch_checkpointing/mixed/step-10")),
    Support("megatron", "Megatron-LM's legacy `mp_rank_*`", True, ("tp", "pp", "vp", "dp", "ep"),
           "Megatron-LM, core 0.16",
           ("mcore_torch_tp2pp2:", "mcore_torch_tp2dp2_distopt_bf16:")),
    Support("megatron", "Muon beside Adam (`--optimizer muon`)", True, ("tp", "pp", "dp"),
           "core 0.16.1 with emerging-optimizers 0.1.0: tp and dp loaded", ()),
    Support("megatron-dist", "Megatron-Core's torch_dist", True, ("tp", "pp", "vp", "dp", "ep"),
           "core 0.16",
           ("mcore_torchdist_tp2pp2:", "mcore_torchdist_tp2dp2_fullyreshard_bf16:",
            "mcore0161_tp2dp2_dpreshard:")),
    Support("megatron-dist", "roots of slime, and of miles with Megatron: `iter_N/` or `release/`,"
           " and `rollout/`", True, ("tp", "pp", "vp", "dp", "ep"),
           "a store of core 0.16 in the places of slime of August 2026", ()),
    Support("megatron-dist", "Muon beside Adam, also the layer-wise optimizer (`dist_muon`)", True,
           ("tp", "pp", "dp"),
           "core 0.16.1 with emerging-optimizers 0.1.0: tp and dp loaded; pp without the"
            " framework", ()),
    Support("megatron-dist", "with local replicas: `__shadow_R__NAME`, `NAME.__tp_replica_R`",
           False, (), "core 0.16 with the names of pull requests 5556 and 3392", ()),
    Support("megatron-fsdp", "Megatron-FSDP: `fsdp_dtensor`, a DCP store of a Megatron job", True,
           ("dp",), "core 0.16.1 on one H200, one rank, loaded and trained on; several ranks as far"
           " as it runs without a GPU; megatron-fsdp 0.6.1 alone on a GPU (a `dcp` store)", ()),
    Support("nvrx-local", "NVIDIA resiliency extension: `SESSION/RANK/iter_0000010_3_local.pt`",
           False, (), "nvidia-resiliency-ext 0.4.1, core 0.16", ()),
    Support("deepspeed", "DeepSpeed's tags: ZeRO 1 to 3, pipelines, tensor slices",
           True, ("tp", "pp", "dp", "zero_stage"), "DeepSpeed 0.19",
           ("deepspeed/z1/global_step2", "deepspeed/z2/global_step2", "deepspeed/z3/global_step2",
            "deepspeed/pipe/global_step2", "deepspeed/tp/global_step2", "ds_z2_w2_bf16:")),
    Support("deepspeed", "frozen models with LoRA, with and without the frozen part", True,
           ("dp", "zero_stage"), "DeepSpeed 0.19.8, peft 0.21",
           ("deepspeed/lora_z2/global_step2", "deepspeed/lora_z3/global_step2",
            "deepspeed/lora_left/global_step2")),
    Support("deepspeed", "AutoTP's slices with affine maps", True, ("dp", "zero_stage"),
           "DeepSpeed 0.19.8, transformers 5.23", ("deepspeed/autotp/global_step2",)),
    Support("deepspeed", "DeepSpeed's layers of experts (`deepspeed.moe`), ZeRO 1 and 2", True,
           ("dp", "ep", "zero_stage"), "DeepSpeed 0.19",
           ("deepspeed/moe_z1/global_step2", "deepspeed/moe_bf16/global_step2")),
    Support("deepspeed", "experts that AutoEP stacks, ZeRO 1 to 3", True,
           ("dp", "ep", "zero_stage"), "DeepSpeed 0.19.8",
           tuple(f"deepspeed/{one}/global_step2"
                 for one in ("autoep_z1", "autoep_data", "autoep_z3"))),
    Support("deepspeed", "DeepSpeed without ZeRO; layers shared by different numbers of ranks",
           False, (), "DeepSpeed 0.19",
           ("deepspeed/off/global_step2", "deepspeed/moe_off/global_step2",
            "deepspeed/moe_z2/global_step2")),
    Support("deepspeed-universal", "DeepSpeed's universal form", True, (), "DeepSpeed 0.19",
           ("deepspeed/universal_z1/global_step2_universal",
            "deepspeed/universal_tp/global_step2_universal")),
    Support("orbax", "Orbax's trees of arrays in OCDBT, zarr 2 and zarr 3 with shards, of one"
           " and of several processes", False, (), "orbax 0.9.1, 0.11.25, 0.12.8",
           ("orbax/everything", "orbax/sharded_zarr3", "orbax/processes")),
    Support("orbax", "the same as directories of arrays (`use_ocdbt=False`)", True, (),
           "orbax 0.9.1, 0.11.25, 0.12.8", ("orbax/files",)),
    Support("orbax", "a CheckpointManager's root, with items of JSON", False, (),
           "orbax 0.9.1, 0.11.25, 0.12.8", ("orbax/manager/30",)),
    Support("delta", "a delta against a base, by `delta pack`", False, (), "ftckpt", ("delta",)),
)  # fmt: skip
# What `--to` takes.
WRITTEN = tuple(dict.fromkeys(one.format for one in LAYOUTS if one.written))


def table() -> str:
    """Return the table as the pages show it."""
    rows = ["| format | layout | read | written | resharded by | tried with |",
            "|---|---|---|---|---|---|"]  # fmt: skip
    for one in LAYOUTS:
        written = "yes" if one.written else "by `delta pack`" if one.format == "delta" else "no"
        flags = ", ".join(f"`--{flag.replace('_', '-')}`" for flag in one.resharded) or "no"
        rows.append(f"| `{one.format}` | {one.what} | yes | {written} | {flags} | {one.tried} |")
    return "\n".join(rows)


def put(page: str) -> str:
    """Return a page with the table between its markers.

    Raises:
        ValueError: it has no markers.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


if __name__ == "__main__":
    import sys
    from pathlib import Path

    for name in sys.argv[1:]:
        file = Path(name)
        file.write_text(put(file.read_text()))
