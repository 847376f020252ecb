"""Save small adapters with Megatron-Bridge, and what its own exporter and merge make of them.

Run: python make_bridge_adapters.py   (megatron-bridge 0.3; tests/trainers/bridge_job.py says how)

`bridge_adapters.tar.xz` gets `base/iter_0000001`, its export `base/hf`, and for each KIND of
`lora`, `canonical` and `dora` `KIND/iter_0000001`: the adapter alone, as Bridge saves it. Of the
first two it gets `KIND/peft.safetensors` (`stream_adapter_weights_megatron_to_hf`) and
`KIND/merged.safetensors` (`stream_weights_megatron_to_hf`). Bridge has no merge of DoRA: there
`KIND/merged.safetensors` is `magnitude / norm * (W + scale * B @ A)`, as its forward pass has it.
"""

from __future__ import annotations

import json
import socket
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[2])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from tests.trainers import bridge_job  # noqa: E402

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": 32, "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip


def save(out: Path, model: Any, made: Any, peft: Any) -> None:
    """Save as Bridge's training loop does; with `peft`, Bridge keeps the adapter alone."""
    from megatron.bridge.training import checkpointing
    from megatron.bridge.training.state import GlobalState, TrainState

    state = GlobalState()
    state.cfg = bridge_job.config(made, out)
    state.cfg.peft = peft
    state.train_state = TrainState(step=1)
    checkpointing.save_checkpoint(state, [model], None, None, 0)


def exported(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights with the adapter merged, and the adapter, by Bridge's own exporter."""
    from megatron.bridge.models.llama.llama_bridge import LlamaBridge
    from transformers import LlamaConfig, LlamaForCausalLM

    bridge = LlamaBridge()
    hf = LlamaForCausalLM(LlamaConfig(**CONFIG))
    merged = dict(bridge.stream_weights_megatron_to_hf([model], Weights(hf), show_progress=False))
    return merged, dict(
        LlamaBridge().stream_adapter_weights_megatron_to_hf([model], show_progress=False)
    )


class State(dict[str, Any]):
    """Weights by name; Bridge asks for the names in the order of the files."""

    @property
    def source(self) -> State:
        """The same."""
        return self

    def get_all_keys(self) -> list[str]:
        """All names."""
        return sorted(self)


class Weights:
    """What Bridge asks of a model of Hugging Face: its configuration and its names."""

    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.state = State(model.state_dict())


def model_of(made: Any) -> Any:
    """Return the base: the same bits each time."""
    torch.manual_seed(1)
    model = made.provide().to(torch.bfloat16)
    for one in model.parameters():
        one.data.normal_(0, 0.5)
    return model


def kept(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def main() -> None:
    """Make all, and pack them."""
    bridge_job.stand_in()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    from megatron.bridge.peft import utils
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.dora import DoRA
    from megatron.bridge.peft.lora import LoRA
    from megatron.core import parallel_state

    utils.HAVE_TE = False  # megatron-core has the names without it, and each is None
    parallel_state.initialize_model_parallel()
    made = bridge_job.provider()
    made.params_dtype = torch.bfloat16
    made.bf16 = True
    made.finalize()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        model = model_of(made)
        save(out / "base", model, made, None)
        (out / "base" / "hf").mkdir()
        save_file(kept(exported(model)[0]), out / "base" / "hf" / "model.safetensors")
        (out / "base" / "hf" / "config.json").write_text(json.dumps(CONFIG, indent=1))
        for name, kind in (("lora", LoRA), ("canonical", CanonicalLoRA), ("dora", DoRA)):
            model = model_of(made)
            peft = kind(dim=4, alpha=6)
            if name == "lora":
                peft.target_modules = ["linear_qkv", "linear_proj", "linear_fc1"]
            model = peft(model, training=True)
            torch.manual_seed(7)
            for key, one in model.named_parameters():
                if ".adapter." in key:
                    one.data = one.data.to(torch.bfloat16)
                if key.endswith("linear_out.weight"):
                    one.data.normal_(0, 0.3)
                elif key.endswith("weight_magnitude"):
                    one.data.mul_(1.25)
            save(out / name, model, made, peft)
            if name == "dora":
                tensors = {}
                for key, module in model.named_modules():
                    if type(module).__name__ == "DoRALinear":
                        a, b = module.adapter.linear_in.weight, module.adapter.linear_out.weight
                        w = module.to_wrap.weight.float() + 1.5 * (b.float() @ a.float())
                        m = module.adapter.weight_magnitude.float()
                        w = w * (m / torch.linalg.norm(w, dim=1))[:, None]
                        tensors[f"{key}.weight"] = w.to(torch.bfloat16)
                save_file(kept(tensors), out / name / "merged.safetensors")
                continue
            merged, adapter = exported(model)
            save_file(kept(merged), out / name / "merged.safetensors")
            save_file(kept(adapter), out / name / "peft.safetensors")
        with tarfile.open(HERE / "bridge_adapters.tar.xz", "w:xz") as packed:
            for path in sorted(p for p in out.rglob("*") if p.is_file()):
                packed.add(path, path.relative_to(out).as_posix(), filter=plain)
    dist.destroy_process_group()


def plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Leave out who made it, and when."""
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    main()
