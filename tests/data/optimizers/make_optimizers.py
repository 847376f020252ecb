"""Make the samples of this folder: states of optimizers, and models, of tensor subclasses.

    python make_optimizers.py

with torch 2.13, torchao 0.18 and bitsandbytes 0.50 (on the CPU). Beside each sample stands its
truth, from live memory: every tensor that lies inside, by the path to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict

HERE = Path(__file__).parent
BLOCK = 256  # the least elements that are quantised here: the library's default is 4096


def parts(path: str, value: Any) -> dict[str, torch.Tensor]:
    """Return the tensors inside a value by the path to each."""
    if isinstance(value, dict):
        found = (parts(f"{path}.{key}" if path else str(key), one) for key, one in value.items())
        return {name: tensor for one in found for name, tensor in one.items()}
    if not isinstance(value, torch.Tensor):
        return {}
    if hasattr(value, "__tensor_flatten__") and type(value) is not torch.Tensor:
        names = value.__tensor_flatten__()[0]
        inner = {name: getattr(value, name) for name in names}
        return parts(path, {name: one for name, one in inner.items() if one is not None})
    return {path: value.detach().clone().contiguous()}


def trained(make: Any) -> tuple[torch.nn.Module, Any]:
    """Return a model of two parameters and its optimizer after two steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64).bfloat16()
    optimizer = make(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 64, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
    return model, optimizer


def keep(name: str, model: torch.nn.Module, optimizer: Any) -> None:
    """Save a training state with torch.save and with DCP, and its truth."""
    state = optimizer.state_dict()
    torch.save({"model": model.state_dict(), "optimizer": state}, HERE / f"{name}.pt")
    names = [parameter for parameter, _ in model.named_parameters()]
    truth = parts("", dict(model.state_dict()))
    for number, values in state["state"].items():
        truth |= parts(f"{names[number]}.state", values)
    save_file(truth, HERE / f"{name}.safetensors")


def linear_in_codes() -> None:
    """Save a model of bitsandbytes' linear layers with torch.save, and its truth."""
    import bitsandbytes

    torch.manual_seed(1)
    make = bitsandbytes.nn.Linear4bit
    layers = [
        make(64, 96, quant_type="nf4", compress_statistics=True),
        make(96, 64, bias=False, quant_type="fp4", compress_statistics=False),
        bitsandbytes.nn.Linear8bitLt(64, 32, has_fp16_weights=False),
    ]
    for layer in layers:
        if getattr(layer.weight, "quant_state", None) is None:
            layer.weight = layer.weight._quantize("cpu")
    state = torch.nn.Sequential(*layers).state_dict()
    torch.save({"model": state, "step": 3}, HERE / "bitsandbytes_linear.pt")
    save_file(parts("", dict(state)), HERE / "bitsandbytes_linear.safetensors")


def main() -> None:
    linear_in_codes()
    """Make all samples."""
    import bitsandbytes
    from torchao.optim import AdamW8bit  # type: ignore[import-not-found]
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # type: ignore[import-not-found]

    model, optimizer = trained(lambda p: AdamW8bit(p, lr=0.01))
    keep("torchao_adamw8bit", model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    place = HERE / "torchao_adamw8bit_dcp"
    state_dict_saver.save({"model": weights, "optimizer": state}, checkpoint_id=place)
    adam = bitsandbytes.optim.AdamW8bit
    keep("bitsandbytes_adamw8bit", *trained(lambda p: adam(p, lr=0.01, min_8bit_size=BLOCK)))
    model = torch.nn.Linear(32, 16).bfloat16()
    quantize_(model, Int8WeightOnlyConfig())
    torch.save(model.state_dict(), HERE / "torchao_int8.pt")
    save_file(parts("", dict(model.state_dict())), HERE / "torchao_int8.safetensors")


if __name__ == "__main__":
    main()
