"""Two spellings of one model: what becomes of each parameter, and that nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import FtckptError, UnsupportedError, UsageError
from ftckpt.formats.families import to_hugging_face, to_megatron
from ftckpt.formats.families.tables import Family, built_by_arguments, family
from ftckpt.formats.families.views.joins import Heads, Join, LinearHeads, part_rows, runs
from ftckpt.formats.safetensors.writer import SafetensorsWriter
from ftckpt.formats.state.rule_tables import built_in
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.transfer.request.narrowing import drop
from tests.builders.archives import extract
from tests.builders.checkpoints import open_checkpoint
from tests.builders.materialise import materialise

ARCHIVES = Path(__file__).parents[4] / "shared" / "checkpoints"
LAYERS, EXPERTS, HIDDEN, VOCABULARY, FFN = 2, 3, 12, 20, 10
HEADS = Heads(6, 2, 4)
FLAT = Heads(6, 6, 4)  # where a family has no groups
OLD = frozenset({"gpt2", "gpt_neox"})


def heads_of(name: str) -> Heads:
    return FLAT if name in OLD else HEADS


def config_of(name: str) -> dict[str, Any]:
    heads = heads_of(name)
    config = {
        "model_type": name,
        "num_attention_heads": heads.queries,
        "num_key_value_heads": heads.groups,
        "head_dim": heads.width,
        "hidden_size": HIDDEN,
    }
    return config | ({"use_parallel_residual": False} if name == "gpt_neox" else {})


def shape_of(name: str, heads: Heads) -> tuple[int, ...]:
    """The shape of a parameter by Hugging Face's name."""
    leaf = name.rsplit(".", 2)[-2]
    queries, keys = heads.queries * heads.width, heads.groups * heads.width
    out = {
        "q_proj": queries, "k_proj": keys, "v_proj": keys, "query_key_value": heads.rows,
        "c_attn": heads.rows, "gate_proj": FFN, "up_proj": FFN, "w1": FFN, "w3": FFN,
        "dense_h_to_4h": FFN, "c_fc": FFN, "embed_tokens": VOCABULARY, "lm_head": VOCABULARY,
        "embed_in": VOCABULARY, "embed_out": VOCABULARY, "wte": VOCABULARY, "gate": EXPERTS,
        "wpe": 7, "qkv_proj": heads.rows, "gate_up_proj": 2 * FFN, "shared_expert_gate": 1,
    }.get(leaf, HIDDEN)  # fmt: skip
    inner = {"o_proj": queries, "down_proj": FFN, "w2": FFN, "dense_4h_to_h": FFN}
    into = inner.get(leaf, FFN if ".mlp.c_proj" in name else HIDDEN)
    if ".attn.c_proj" in name or ".attention.dense" in name:
        into = queries
    if name.endswith(".bias") or "norm" in leaf or leaf.startswith("ln_"):
        return (out,)
    conv = leaf.startswith("c_")
    return (into, out) if conv else (out, into)


def hf_names(table: Family) -> list[str]:
    """Every name that the family's table gives, once, as a model has them."""
    found: dict[str, None] = {}
    dense = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    experts = any("{expert}" in known.text for e in table.entries for known in e.hf)
    for entry in table.entries:
        for known in entry.hf:
            if experts and any(word in known.text for word in dense):
                continue
            for layer in range(LAYERS):
                for expert in range(EXPERTS):
                    numbers = {"layer": str(layer), "expert": str(expert)}
                    found[known.fill(numbers)] = None
    return list(found)


def save_model(folder: Path, name: str, *, names: list[str] | None = None) -> dict[str, Any]:
    """Write a Hugging Face folder with an AdamW state beside it; return the tensors by key."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(len(name))
    (folder / "optimizer").mkdir(parents=True)
    names = names or hf_names(family(name))
    weights = {n: torch.randn(shape_of(n, heads_of(name))) for n in names}
    state: dict[str, Any] = {}
    for n, weight in weights.items():
        state[f"exp_avg.{n}"] = torch.randn(weight.shape)
        state[f"master.{n}"] = weight.double()
        state[f"other.{n}.step"] = torch.tensor(3.0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(state, folder / "optimizer" / "optimizer.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(name)))
    return weights | {
        k.replace(".", ":", 1).replace("other", "optimizer"): v for k, v in state.items()
    }


def write(content: Content, folder: Path) -> Checkpoint:
    materialise(SafetensorsWriter().layout(content, LayoutRequest()), content.checkpoint, folder)
    return open_checkpoint(folder)


def tensor(checkpoint: Checkpoint, key: str) -> Any:
    import torch

    info = checkpoint.tensors[key]
    raw = bytearray(read_tensor(checkpoint, key))
    return torch.frombuffer(raw, dtype=getattr(torch, info.dtype.name)).reshape(info.shape)


def grouped(parts: Iterable[Any], heads: Heads) -> Any:
    """Megatron-Bridge's `merge_qkv_weights`, in two lines of torch."""
    import torch

    split = (t.reshape(heads.groups, -1, *t.shape[1:]) for t in parts)
    return torch.cat(tuple(split), dim=1).flatten(0, 1)


@pytest.mark.parametrize("name", built_by_arguments())
def test_there_and_back_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    tensors = save_model(tmp_path / "hf", name)
    content = to_megatron(Content.of(open_checkpoint(tmp_path / "hf")))
    there = write(content, tmp_path / "megatron")
    assert not any(key.startswith(("model.", "transformer.", "gpt_neox.")) for key in there.tensors)
    back = write(to_hugging_face(Content.of(there)), tmp_path / "back")
    assert set(back.tensors) == set(tensors)
    for key, value in tensors.items():
        assert tensor(back, key).equal(value), key


@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral"])
def test_parts_are_joined_as_megatron_joins_them(name: str, tmp_path: Path) -> None:
    import torch

    given = save_model(tmp_path / "hf", name)
    made = write(to_megatron(Content.of(open_checkpoint(tmp_path / "hf"))), tmp_path / "out")
    for prefix in ("", "exp_avg:", "master:"):
        here = f"{prefix}model.layers.1.self_attn."
        there = f"{prefix}decoder.layers.1.self_attention.linear_qkv."
        for leaf in ("weight", "bias") if name == "qwen2" else ("weight",):
            parts = [given[f"{here}{part}_proj.{leaf}"] for part in "qkv"]
            assert tensor(made, there + leaf).equal(grouped(parts, HEADS))
        mlp = f"{prefix}decoder.layers.1.mlp."
        if name == "mixtral":
            moe = f"{prefix}model.layers.1.block_sparse_moe.experts.2."
            gate, up, down = (given[f"{moe}{w}.weight"] for w in ("w1", "w3", "w2"))
            mlp += "experts.local_experts.2."
        else:
            gate, up, down = (
                given[f"{prefix}model.layers.1.mlp.{w}_proj.weight"] for w in ("gate", "up", "down")
            )
        assert tensor(made, f"{mlp}linear_fc1.weight").equal(torch.cat([gate, up]))
        assert tensor(made, f"{mlp}linear_fc2.weight").equal(down)


def test_conv1d_is_transposed_and_unpacked(tmp_path: Path) -> None:
    given = save_model(tmp_path / "hf", "gpt2")
    made = write(to_megatron(Content.of(open_checkpoint(tmp_path / "hf"))), tmp_path / "out")
    for prefix in ("", "exp_avg:"):
        for leaf in ("weight", "bias"):
            packed = given[f"{prefix}transformer.h.0.attn.c_attn.{leaf}"]
            expected = grouped((packed.T if leaf == "weight" else packed).chunk(3), FLAT)
            key = f"{prefix}decoder.layers.0.self_attention.linear_qkv.{leaf}"
            assert tensor(made, key).equal(expected)
        expected = given[f"{prefix}transformer.h.0.mlp.c_proj.weight"].T
        assert tensor(made, f"{prefix}decoder.layers.0.mlp.linear_fc2.weight").equal(expected)


def test_a_model_without_its_head_lacks_a_prefix(tmp_path: Path) -> None:
    bare = [n.removeprefix("transformer.") for n in hf_names(family("gpt2")) if "lm_head" not in n]
    given = save_model(tmp_path / "hf", "gpt2", names=bare)
    made = write(to_megatron(Content.of(open_checkpoint(tmp_path / "hf"))), tmp_path / "out")
    assert tensor(made, "embedding.word_embeddings.weight").equal(given["wte.weight"])
    assert "output_layer.weight" not in made.tensors


def test_implementations_of_megatron_differ_in_names(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", "mixtral")
    content = Content.of(open_checkpoint(tmp_path / "hf"))
    default = to_megatron(content)
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in default.tensors
    assert "decoder.layers.0.pre_mlp_layernorm.weight" in default.tensors
    other = to_megatron(content, spellings=("megatron", "local", "grouped"))
    assert "decoder.layers.0.input_layernorm.weight" in other.tensors
    assert "decoder.layers.0.mlp.experts.linear_fc1.weight2" in other.tensors
    back = to_hugging_face(Content.of(write(other, tmp_path / "out")))
    assert set(back.tensors) == set(content.tensors)


@pytest.mark.parametrize(
    ("leaf", "shape"),
    [("down_proj", (2, 0, 16)), ("gate_up_proj", (2, 16, 0)), ("gate_up_proj", (2, 0, 16))],
)
def test_experts_without_elements_are_no_experts(
    leaf: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Written under Megatron's names they were proven equal, and empty."""
    import torch
    from safetensors.torch import save_file

    name = f"model.layers.0.mlp.experts.{leaf}"
    weights = {"model.embed_tokens.weight": torch.ones(24, 16), name: torch.ones(shape)}
    save_file(weights, tmp_path / "model.safetensors")
    config = {"num_local_experts": 2, "intermediate_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(config_of("gpt_oss") | config))
    with pytest.raises(UsageError, match=rf"{leaf} of .* holds no "):
        to_megatron(Content.of(open_checkpoint(tmp_path)))


def test_padding_of_the_vocabulary_is_cut_where_its_size_is_said(tmp_path: Path) -> None:
    given = save_model(tmp_path / "hf", "llama")
    content = Content.of(open_checkpoint(tmp_path / "hf"))
    made = write(to_megatron(content, true_vocab_size=17), tmp_path / "out")
    for key, name in (("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
                      ("exp_avg:output_layer.weight", "exp_avg:lm_head.weight")):  # fmt: skip
        assert tensor(made, key).equal(given[name][:17])
    again = to_hugging_face(Content.of(made), true_vocab_size=16)
    assert again.tensors["lm_head.weight"].shape == (16, HIDDEN)
    with pytest.raises(UsageError, match="17 rows, fewer than a vocabulary of 18"):
        to_hugging_face(Content.of(made), true_vocab_size=18)


def test_ties_stay_tied(tmp_path: Path) -> None:
    import torch

    embed = torch.randn(VOCABULARY, HIDDEN)
    state = {"embedding.word_embeddings.weight": embed, "output_layer.weight": embed}
    args = {
        "num_attention_heads": 6, "num_layers": 0, "hidden_size": HIDDEN, "swiglu": True,
        "normalization": "RMSNorm", "position_embedding_type": "rope",
    }  # fmt: skip
    torch.save({"model": state, "args": args}, tmp_path / "x.pt")
    content = to_hugging_face(Content.of(open_checkpoint(tmp_path / "x.pt")))
    assert content.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    config = json.loads(content.beside["config.json"])
    assert config["tie_word_embeddings"] is True
    assert (config["vocab_size"], config["model_type"]) == (VOCABULARY, "llama")
    made = write(drop(content, ["args"]), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    assert made.aliases == content.aliases


def test_what_the_configuration_gives_is_left_out_and_said(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    save_model(tmp_path / "hf", "llama")
    file = tmp_path / "hf" / "model.safetensors"
    weights = load_file(file)
    for layer in range(LAYERS):
        weights[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(weights, file)
    made = to_megatron(Content.of(open_checkpoint(tmp_path / "hf")))
    assert not any("inv_freq" in key for key in made.tensors)
    assert "inv_freq" in made.dropped[0]
    assert "counters of parts" in made.dropped[0]


@pytest.mark.parametrize(
    ("patterns", "config", "error", "message"),
    [
        (
            [],
            {"model_type": "bert"},
            UnsupportedError,
            "no table exists for models of the type 'bert'",
        ),
        ([], {"model_type": None}, UnsupportedError, "no table exists for models"),
        ([], {"model_type": [1]}, UnsupportedError, "no table exists for models"),
        ([], {"model_type": "falcon"}, UnsupportedError, "'falcon': its attention and its MLP"),
        ([], {"model_type": "olmo2"}, UnsupportedError, "'olmo2': no norm stands in front"),
        ([], {"num_attention_heads": 4, "num_key_value_heads": 3}, UsageError, "give no attention"),
        ([], {"num_attention_heads": 0}, UsageError, "give no attention"),
        ([], {"head_dim": "4"}, UsageError, "give no attention"),
        ([], {"head_dim": 3}, UsageError, "grouped parts"),
        ([], {"num_attention_heads": 4, "num_key_value_heads": 4}, UsageError, "grouped parts"),
        (["*k_proj.weight*"], {}, UnsupportedError, r"whose part .*k_proj\.weight is not there"),
        (["master:*0*up_proj*"], {}, UnsupportedError, "is not there"),
        ([], {"model_type": "gpt_neox"}, UnsupportedError, "parallel residual"),
        ([], {"model_type": "mixtral"}, UnsupportedError, r"mixtral has no|whose part|calls"),
    ],
)
def test_what_does_not_fit_is_refused(
    patterns: list[str],
    config: dict[str, Any],
    error: type[FtckptError],
    message: str,
    tmp_path: Path,
) -> None:
    save_model(tmp_path / "hf", "qwen2")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config_of("qwen2") | config))
    content = Content.of(open_checkpoint(tmp_path / "hf"))
    if patterns:
        content = drop(content, patterns)
    with pytest.raises(error, match=message):
        to_megatron(content)


def test_parts_of_different_types_are_not_joined(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_model(tmp_path / "hf", "llama")
    file = tmp_path / "hf" / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.0.mlp.up_proj.weight"] = weights[
        "model.layers.0.mlp.up_proj.weight"
    ].bfloat16()
    save_file(weights, file)
    with pytest.raises(UnsupportedError, match="differ in type or shape"):
        to_megatron(Content.of(open_checkpoint(tmp_path / "hf")))


def test_a_name_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path / "hf", "llama")
    content = Content.of(open_checkpoint(tmp_path / "hf"))
    with pytest.raises(UnsupportedError, match="llama has no parameter that Megatron calls") as one:
        to_hugging_face(content)
    assert one.value.kind == "unknown-rule"
    assert one.value.hint
    with pytest.raises(UsageError, match="no family is called 'lama'"):
        to_megatron(content, family="lama")


def _megatron(tmp_path: Path, **args: Any) -> Content:
    import torch

    said = {
        "num_attention_heads": 6, "num_query_groups": 2, "group_query_attention": True,
        "kv_channels": 4, "hidden_size": HIDDEN, "swiglu": True, "normalization": "RMSNorm",
        "position_embedding_type": "rope",
    }  # fmt: skip
    weight = torch.randn(HEADS.rows, HIDDEN)
    state = {"decoder.layers.0.self_attention.linear_qkv.weight": weight}
    torch.save({"model": state, "args": said | args}, tmp_path / "x.pt")
    return Content.of(open_checkpoint(tmp_path / "x.pt"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"layernorm_zero_centered_gamma": True}, "norms hold their weights less one"),
        ({"rotary_interleaved": True}, "interleave"),
        ({"window_size": (128, 0)}, "window"),
        ({"normalization": "LayerNorm"}, "no family has a model like that"),
        ({"swiglu": False}, "no family has a model like that"),
        ({"rotary_percent": 0.5}, "rotates whole heads"),
        ({"num_experts": 4, "moe_router_pre_softmax": True}, "weighs its experts"),
        ({"num_experts": 4, "moe_layer_freq": 2}, "experts in every layer"),
    ],
)
def test_a_model_without_a_hugging_face_form_is_refused(
    args: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        to_hugging_face(_megatron(tmp_path, **args))


def test_the_family_may_be_said_where_arguments_cannot_tell(tmp_path: Path) -> None:
    content = _megatron(tmp_path)
    config = json.loads(to_hugging_face(content, family="mistral").beside["config.json"])
    assert config["architectures"] == ["MistralForCausalLM"]
    assert config["sliding_window"] is None
    with pytest.raises(UsageError, match="is not a qwen3: its arguments say qk_layernorm = None"):
        to_hugging_face(content, family="qwen3")


@pytest.mark.parametrize(
    ("args", "kind"),
    [
        ({}, "llama"),
        ({"add_qkv_bias": True}, "qwen2"),
        ({"qk_layernorm": True}, "qwen3"),
        ({"add_qkv_bias": True, "num_experts": 4, "moe_shared_expert_gate": True}, "qwen2_moe"),
        ({"num_experts": 4}, "mixtral"),
        ({"qk_layernorm": True, "num_experts": 4}, "qwen3_moe"),
    ],
)
def test_arguments_tell_the_family(args: Mapping[str, Any], kind: str, tmp_path: Path) -> None:
    made = to_hugging_face(_megatron(tmp_path, moe_router_topk=2, **args))
    config = json.loads(made.beside["config.json"])
    assert config["model_type"] == kind
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (6, 2)
    if "num_experts" in args:
        assert config["num_experts_per_tok"] == 2


def test_nothing_says_what_the_model_is(tmp_path: Path) -> None:
    import torch

    torch.save({"model": {"w": torch.ones(1)}}, tmp_path / "x.pt")
    with pytest.raises(UsageError, match=r"neither a config\.json nor the arguments"):
        to_hugging_face(Content.of(open_checkpoint(tmp_path / "x.pt")))


@pytest.mark.parametrize(
    "name",
    ["mcore_torch_tp2pp2", "mcore_torch_tp2dp2_distopt_bf16", "mcore_torchdist_tp2pp2"],
)
def test_real_checkpoints_of_megatron(name: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    archive = ARCHIVES / f"{name}.tar.xz"
    if not archive.exists():
        pytest.skip(f"{archive} is not there")
    extract(archive, tmp_path)
    content = Content.of(open_checkpoint(tmp_path / name / "ckpt" / "iter_0000003"))
    made = write(to_hugging_face(content, true_vocab_size=1000), tmp_path / "out")
    heads = Heads(8, 4, 8)
    truth = load_file(tmp_path / name / "truth" / "state.safetensors")
    moments = load_file(tmp_path / name / "truth" / "optim.safetensors")
    truth |= {
        k.removeprefix("optimizer.state.").replace(".", ":", 1): v for k, v in moments.items()
    }
    for prefix in ("", "exp_avg:"):
        for layer in range(4):
            here, there = f"{prefix}model.layers.{layer}.", f"{prefix}decoder.layers."
            parts = [tensor(made, f"{here}self_attn.{p}_proj.weight") for p in "qkv"]
            expected = truth[f"{there}self_attention.linear_qkv.weight"][layer]
            assert grouped(parts, heads).equal(expected)
            gate, up = truth[f"{there}mlp.linear_fc1.weight"][layer].chunk(2)
            assert tensor(made, f"{here}mlp.gate_proj.weight").equal(gate)
            assert tensor(made, f"{here}mlp.up_proj.weight").equal(up)
            norm = truth[f"{there}mlp.linear_fc1.layer_norm_weight"][layer]
            assert tensor(made, f"{here}post_attention_layernorm.weight").equal(norm)
        head = truth[f"{prefix}output_layer.weight"][:1000]
        assert tensor(made, f"{prefix}lm_head.weight").equal(head)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["vocab_size"], config["intermediate_size"]) == (1000, 168)
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (4, 4)


HEAD_COUNTS = st.builds(
    lambda each, groups, width, wide: Heads(
        each * groups, groups, width, LinearHeads(groups, each * groups, width, wide)
    ),
    st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4),
)  # fmt: skip


@given(HEAD_COUNTS, st.sampled_from(list(Join)), st.integers(1, 4))
def test_runs_tile_the_whole_and_every_part(heads: Heads, join: Join, parts: int) -> None:
    assert heads.linear is not None
    rows = {
        Join.WHOLE: 7, Join.STACKED: 6 * parts, Join.ALTERNATE: 2 * parts,
        Join.GATED: heads.rows + heads.queries * heads.width,
        Join.DELTA: heads.linear.keys * sum(heads.linear.blocks),
    }.get(join, heads.rows)  # fmt: skip
    counts = {
        Join.STACKED: parts, Join.GROUPED: 3, Join.GATED: 3, Join.DELTA: 2 + 2 * (parts % 2),
    }  # fmt: skip
    count = counts.get(join, 1)
    sizes = part_rows(join, count, rows, heads)
    assert sizes is not None
    assert sum(sizes) == rows
    whole: set[int] = set()
    inside: list[set[int]] = [set() for _ in sizes]
    for part, begin, joined, length in runs(join, count, rows, heads):
        for row in range(length):
            assert joined + row not in whole
            assert begin + row not in inside[part]
            whole.add(joined + row)
            inside[part].add(begin + row)
    assert whole == set(range(rows))
    assert inside == [set(range(size)) for size in sizes]


def test_rows_that_do_not_fit_have_no_parts() -> None:
    assert part_rows(Join.STACKED, 2, 7, HEADS) is None
    assert part_rows(Join.GROUPED, 3, HEADS.rows + 1, HEADS) is None
    assert part_rows(Join.GATED, 3, HEADS.rows, HEADS) is None
    assert part_rows(Join.DELTA, 2, 10, HEADS) is None
    assert part_rows(Join.DELTA, 2, 10, HEADS._replace(linear=LinearHeads(2, 4, 3, 5))) is None
    assert part_rows(Join.ALTERNATE, 1, 5, HEADS) is None


RULES = {"gpt2": "gpt2", "gpt_neox": "neox", "llama": "llama", "llama3.1": "llama",
         "mistral": "llama", "mixtral": "mixtral", "qwen2": "qwen",
         "qwen2_moe": "qwen", "qwen3": "qwen", "qwen3_moe": "qwen"}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_every_name_of_a_family_has_a_split_rule_that_fits_megatrons(name: str) -> None:
    """The two tables were written from two sources: they must cut the same parameters."""
    theirs, ours = built_in(RULES[name]), built_in("megatron", {"gated": 1})
    table = family(name)
    numbers = {"layer": "0", "expert": "0"}
    real = set(hf_names(table))
    for entry in table.entries:
        for known in entry.hf:
            if known.fill(numbers) not in real:
                continue
            hf = theirs.find(known.fill(numbers))
            mine = ours.find(next(iter(entry.megatron.values())).fill(numbers))
            axis = mine.split.axis
            if entry.transposed and axis is not None:
                axis = 1 - axis
            assert hf.split.axis == axis, known.text
            assert hf.expert == mine.expert, known.text
            assert hf.vocabulary == (entry.vocabulary and mine.vocabulary), known.text
            assert bool(hf.split.blocks) == (entry.join is Join.PACKED), known.text
