"""Save small models as MaxText keeps them, by Orbax over 8 devices, with the logits that JAX gives.

Run with a Python that has orbax-checkpoint and jax: `python make_maxtext.py [DIRECTORY]`.

The forward pass is MaxText's: heads and their width apart, queries multiplied as they are stored,
for Llama 3.1 a rotation of neighbours. What transformers makes of the same weights must agree.
Each sample is a folder `NAME` with a step; `NAME.json` has its config.json and its logits.
"""

# mypy: ignore-errors
# JAX and its libraries are in no environment of the tests.

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

HERE = Path(__file__).resolve().parent
jax.config.update("jax_default_matmul_precision", "highest")
TOKENS = [3, 17, 8, 20, 1, 22]
BASE = {
    "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 24, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "attention_bias": False,
}  # fmt: skip
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
GEMMA = {
    "tie_word_embeddings": True, "sliding_window": 4, "rms_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
MODELS = {
    "maxtext_llama31": {
        "config": {"model_type": "llama", "architectures": ["LlamaForCausalLM"],
                   "rope_scaling": SCALING},
        "scan": True, "neighbours": True, "scaled": True, "dtype": "float32", "padded": 32,
    },
    "maxtext_llama": {
        "config": {"model_type": "llama", "architectures": ["LlamaForCausalLM"],
                   "head_dim": 16},  # its root is exact
        "scan": False, "scaled": True, "dtype": "bfloat16",
    },
    "maxtext_mixtral": {
        "config": {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
                   "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
        "scan": True, "scaled": True, "dtype": "float32", "experts": "MoeBlock_0",
    },
    "maxtext_qwen3": {
        "config": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
                   "tie_word_embeddings": True},
        "scan": True, "dtype": "bfloat16", "norms": True,
    },
    "maxtext_qwen2": {
        "config": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"],
                   "use_sliding_window": False},
        "scan": True, "dtype": "float32", "biases": True,
    },
    # Two layers in one, the first of which sees four tokens.
    "maxtext_gemma2": {
        "config": {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], **GEMMA,
                   "num_hidden_layers": 4, "attn_logit_softcapping": 5.0,
                   "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 12},
        "scan": True, "scaled": True, "dtype": "float32", "padded": 32,
    },
    # Six layers in one, and two that are left over.
    "maxtext_gemma3": {
        "config": {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], **GEMMA,
                   "num_hidden_layers": 8, "rope_theta": 1000000.0,
                   "rope_local_base_freq": 10000.0, "sliding_window_pattern": 6,
                   "query_pre_attn_scalar": 8},
        "scan": True, "dtype": "bfloat16", "norms": True,
    },
}  # fmt: skip


def weights(model, config):
    """Return the arrays of one layer each, by their name in it, and those of no layer."""
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    hidden, heads, groups = (config[name] for name in names)
    width, inner, rows = config["head_dim"], config["intermediate_size"], config["vocab_size"]
    shapes = {
        "self_attention.query.kernel": (hidden, heads, width),
        "self_attention.key.kernel": (hidden, groups, width),
        "self_attention.value.kernel": (hidden, groups, width),
        "self_attention.out.kernel": (heads, width, hidden),
        "pre_self_attention_layer_norm.scale": (hidden,),
        "post_self_attention_layer_norm.scale": (hidden,),
    }
    if gemma := config["model_type"].startswith("gemma"):
        del shapes["pre_self_attention_layer_norm.scale"]
        del shapes["post_self_attention_layer_norm.scale"]
        shapes |= {
            f"{place}.scale": (hidden,)
            for place in (
                "pre_self_attention_norm",
                "post_self_attention_norm",
                "pre_ffw_norm",
                "post_ffw_norm",
            )
        }
    if model.get("norms"):
        shapes |= {f"self_attention.{n}_norm.scale": (width,) for n in ("query", "key")}
    if model.get("biases"):
        shapes |= {"self_attention.query.bias": (heads, width),
                   "self_attention.key.bias": (groups, width),
                   "self_attention.value.bias": (groups, width)}  # fmt: skip
    if block := model.get("experts"):
        count = config["num_local_experts"]
        shapes |= {
            f"{block}.gate.kernel": (hidden, count),
            f"{block}.wi_0": (count, hidden, inner),
            f"{block}.wi_1": (count, hidden, inner),
            f"{block}.wo": (count, inner, hidden),
        }
    else:
        shapes |= {"mlp.wi_0.kernel": (hidden, inner), "mlp.wi_1.kernel": (hidden, inner),
                   "mlp.wo.kernel": (inner, hidden)}  # fmt: skip
    top = {"token_embedder.embedding": (model.get("padded", rows), hidden),
           "decoder.decoder_norm.scale": (hidden,)}  # fmt: skip
    if not config["tie_word_embeddings"]:
        top["decoder.logits_dense.kernel"] = (hidden, model.get("padded", rows))
    key = jax.random.key(7)

    def draw(shape, name):
        nonlocal key
        key, own = jax.random.split(key)
        values = jax.random.normal(own, shape) * (0.3 if name.endswith("kernel") else 0.2)
        if gemma and name.endswith("embedding"):
            values *= np.sqrt(hidden)
        if gemma and name.endswith("scale"):  # so that one less is exact
            values = jnp.clip(values, -0.5, 0.5)
        return (values + name.endswith("scale")).astype(model["dtype"])

    layers = [{name: draw(shape, name) for name, shape in shapes.items()}
              for _ in range(config["num_hidden_layers"])]  # fmt: skip
    return layers, {name: draw(shape, name) for name, shape in top.items()}


def frequencies(config):
    width = config["head_dim"]
    found = 1.0 / config["rope_theta"] ** (np.arange(0, width, 2, dtype=np.float32) / width)
    scaling = config.get("rope_scaling")
    if not scaling:
        return jnp.asarray(found)
    old, low, high = (scaling[n] for n in (
        "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))  # fmt: skip
    waves = 2 * np.pi / found
    smooth = (old / waves - low) / (high - low)
    between = (1 - smooth) * found / scaling["factor"] + smooth * found
    slow = np.where(waves > old / low, found / scaling["factor"], found)
    middle = (waves >= old / high) & (waves <= old / low)
    return jnp.asarray(np.where(middle, between, slow), jnp.float32)


def rotated(x, model, config, local):
    """Rotate [position, head, width]."""
    if local and "rope_local_base_freq" in config:
        config = config | {"rope_theta": config["rope_local_base_freq"]}
    angles = jnp.arange(x.shape[0])[:, None] * frequencies(config)[None]
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    if model.get("neighbours"):
        a, b = x[..., ::2], x[..., 1::2]
        return jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def norm(x, scale, config):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * scale


def capped(x, most):
    return most * jnp.tanh(x / most) if most else x


def attention(x, layer, model, config, local=False):
    def project(name):
        found = jnp.einsum("th,hnd->tnd", x, layer[f"self_attention.{name}.kernel"])
        return found + layer.get(f"self_attention.{name}.bias", 0.0)

    q, k, v = (project(name) for name in ("query", "key", "value"))
    if model.get("norms"):
        q = norm(q, layer["self_attention.query_norm.scale"], config)
        k = norm(k, layer["self_attention.key_norm.scale"], config)
    q, k = rotated(q, model, config, local), rotated(k, model, config, local)
    if not model.get("scaled"):  # else queries are stored divided
        q = q / np.sqrt(config.get("query_pre_attn_scalar", config["head_dim"]))
    each = q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, each, 1), jnp.repeat(v, each, 1)
    scores = capped(jnp.einsum("tnd,snd->nts", q, k), config.get("attn_logit_softcapping"))
    mask = jnp.tril(jnp.ones(scores.shape[1:], bool))
    if local:
        mask &= ~jnp.tril(mask, -config["sliding_window"])
    shares = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1)
    found = jnp.einsum("nts,snd->tnd", shares, v)
    return jnp.einsum("tnd,ndh->th", found, layer["self_attention.out.kernel"])


def feed(x, layer, model, config):
    if block := model.get("experts"):
        logits = x @ layer[f"{block}.gate.kernel"]
        top, which = jax.lax.top_k(logits, config["num_experts_per_tok"])
        shares = jax.nn.softmax(top, -1)
        gate = jnp.einsum("th,ehi->tei", x, layer[f"{block}.wi_0"])
        up = jnp.einsum("th,ehi->tei", x, layer[f"{block}.wi_1"])
        each = jnp.einsum("tei,eih->teh", jax.nn.silu(gate) * up, layer[f"{block}.wo"])
        chosen = jnp.take_along_axis(each, which[..., None], 1)
        return (chosen * shares[..., None]).sum(1)
    gate, up = x @ layer["mlp.wi_0.kernel"], x @ layer["mlp.wi_1.kernel"]
    gelu = config["model_type"].startswith("gemma")
    gate = jax.nn.gelu(gate, approximate=True) if gelu else jax.nn.silu(gate)
    return (gate * up) @ layer["mlp.wo.kernel"]


def is_local(number, config):
    """Say whether a layer of Gemma sees a window alone."""
    return (number + 1) % config.get("sliding_window_pattern", 2) != 0


def gemma_layer(x, layer, model, config, local):
    found = norm(x, layer["pre_self_attention_norm.scale"], config)
    found = attention(found, layer, model, config, local)
    x = x + norm(found, layer["post_self_attention_norm.scale"], config)
    found = feed(norm(x, layer["pre_ffw_norm.scale"], config), layer, model, config)
    return x + norm(found, layer["post_ffw_norm.scale"], config)


def logits(layers, top, model, config):
    def wide(arrays):
        return {name: array.astype(jnp.float32) for name, array in arrays.items()}

    top = wide(top)
    x = top["token_embedder.embedding"][jnp.asarray(TOKENS)]
    gemma = config["model_type"].startswith("gemma")
    for number, layer in enumerate(map(wide, layers)):
        if gemma:
            x = gemma_layer(x, layer, model, config, is_local(number, config))
            continue
        before = norm(x, layer["pre_self_attention_layer_norm.scale"], config)
        x = x + attention(before, layer, model, config)
        before = norm(x, layer["post_self_attention_layer_norm.scale"], config)
        x = x + feed(before, layer, model, config)
    x = norm(x, top["decoder.decoder_norm.scale"], config)
    output = top.get("decoder.logits_dense.kernel", top["token_embedder.embedding"].T)
    found = (x @ output)[:, : config["vocab_size"]]
    if gemma:  # it is stored multiplied
        found = found / np.sqrt(config["hidden_size"])
    return capped(found, config.get("final_logit_softcapping"))


def in_twos(layers):
    """Name two layers of Gemma 2 as MaxText does: as one, and stacked."""
    found = {}
    for side, place in enumerate(("local", "global")):
        for key in layers[0]:
            above, dot, last = key.rpartition(".")
            top, _, rest = above.partition(".")
            name = f"{top}_{place}" + (f".{rest}" if rest else "") + dot + last
            stacked = jnp.stack([one[key] for one in layers[side::2]], 1)
            found[f"decoder.layers.{name}"] = stacked
    return found


def in_sixes(layers):
    """Name layers of Gemma 3: six are one, which are stacked, and some are left over."""
    whole = len(layers) // 6 * 6
    found = {}
    for key in layers[0]:
        for n in range(6):
            stacked = jnp.stack([one[key] for one in layers[n:whole:6]], 1)
            found[f"decoder.layers.layers_{n}.{key}"] = stacked
        for n, one in enumerate(layers[whole:]):
            found[f"decoder.layers_remainder.layers_{n}.{key}"] = one[key]
    return found


def nested(arrays):
    tree = {}
    for name, array in arrays.items():
        at = tree
        *above, last = name.split(".")
        for word in above:
            at = at.setdefault(word, {})
        at[last] = array
    return tree


def main(root):
    """Make the samples that are not there."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))

    def put(array):
        """Cut the first axis that divides by four, and one after it by two."""
        spec, left = [], [("fsdp", 4), ("tensor", 2)]
        for size in array.shape:
            take = next((n for n, one in enumerate(left) if size % one[1] == 0), None)
            spec.append(left.pop(take)[0] if take is not None else None)
        return jax.device_put(array, NamedSharding(mesh, P(*spec)))

    for name, model in MODELS.items():
        if (root / name).exists():
            continue
        config = BASE | model["config"]
        layers, top = weights(model, config)
        arrays = dict(top)
        groups = {"gemma2": in_twos, "gemma3_text": in_sixes}.get(config["model_type"])
        if groups:
            arrays |= groups(layers)
        for key in () if groups else layers[0]:
            if model["scan"]:
                arrays[f"decoder.layers.{key}"] = jnp.stack([one[key] for one in layers], 1)
            else:
                arrays |= {f"decoder.layers_{n}.{key}": one[key] for n, one in enumerate(layers)}
        params = {"params": jax.tree.map(put, nested(arrays))}
        state = {"params": params, "step": put(jnp.asarray(100, jnp.int32))}
        if name == "maxtext_llama31":
            moments = {"mu": params, "nu": jax.tree.map(jnp.abs, params)}
            state["opt_state"] = [{"count": put(jnp.asarray(100, jnp.int32)), **moments}]
        with ocp.CheckpointManager(root / name, item_names=("items",)) as one:
            one.save(100, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state)))
            one.wait_until_finished()
        found = np.asarray(logits(layers, top, model, config), np.float32).tolist()
        said = {"config": config, "tokens": TOKENS, "logits": found}
        (root / f"{name}.json").write_text(json.dumps(said) + "\n")
        print(name)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if sys.argv[1:] else HERE)
