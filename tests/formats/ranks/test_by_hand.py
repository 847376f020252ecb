"""Rank files of trainers that save by hand: read as the whole model, divided anew, damaged."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.sharding import Rules, parse_rules
from ftckpt.errors import ExitCode, UnsupportedError, UsageError
from ftckpt.formats.ranks import Ranks
from ftckpt.formats.ranks.writer import RanksWriter
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.verification import Level, VerifyOptions, VerifyReport, verify
from tests.builders.materialise import materialise
from tests.conformance.formats import FormatTests, Made, Truth
from tests.data.by_hand import make_by_hand
from tests.formats.ranks.jobs import truth_of
from tests.json_run import ftckpt_json

DATA = Path(__file__).parents[2] / "data" / "by_hand"
LAYOUTS = tuple(make_by_hand.LAYOUTS)
RULES = parse_rules(make_by_hand.RULES, "rules.toml")
PACKED = "qkv.weight"


def rules_of(layout: str) -> Rules | None:
    return RULES if layout == "ruled" else None


def opened(path: Path, rules: Rules | None = None) -> Checkpoint:
    return Ranks(rules).open(Source.directory(open_store(str(path))))


def truth_in(root: Path, layout: str) -> dict[str, Truth]:
    """Return the truth of a layout; the packed weight is in those alone that are read by rules."""
    whole = {name: truth_of(value) for name, value in load_file(root / "truth.safetensors").items()}
    if layout == "ruled":
        return whole
    return {name: value for name, value in whole.items() if PACKED not in name}


def rng_truth(folder: Path, world: int) -> dict[str, Truth]:
    found = {}
    for rank in range(world):
        value = loaded(folder / f"shard_{rank:05d}.pt")["rng"]
        found[f"extra:rank{rank}:rank{rank}.rng"] = truth_of(value)
    return found


def loaded(path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.load(path, weights_only=True)


def equal(a: Any, b: Any, tensors: Callable[..., bool] = torch.equal) -> bool:
    """Compare what two torch.save files hold, to the bit."""
    if isinstance(a, torch.Tensor):
        return type(b) is type(a) and a.dtype is b.dtype and tensors(a, b)
    if isinstance(a, dict):
        same = isinstance(b, dict) and list(a) == list(b)
        return same and all(equal(a[k], b[k], tensors) for k in a)
    if isinstance(a, (list, tuple)):
        same = isinstance(b, (list, tuple)) and isinstance(a, tuple) == isinstance(b, tuple)
        pairs = zip(a, b, strict=True) if same and len(a) == len(b) else [(0, 1)]
        return all(equal(x, y, tensors) for x, y in pairs)
    return type(a) is type(b) and bool(a == b)


def generated_alike(a: Any, b: Any) -> bool:
    """Compare what two machines generated: processors differ in the last bits of `randn`."""
    return equal(a, b, lambda one, other: torch.allclose(one, other, rtol=1e-5, atol=1e-6))


def made_at(root: Path, world: int) -> Path:
    folder = root / f"world{world}"
    make_by_hand.make(folder, world)
    return folder


class _ByHand(FormatTests):
    truncated = frozenset({"bad-zip", "truncated-file"})
    missing = frozenset({"missing-rank"})
    empty = frozenset({"bad-zip", "truncated-file"})

    def copied(self, root: Path, *layouts: str) -> list[Made]:
        made = []
        for layout in layouts:
            folder = Path(shutil.copytree(DATA / layout, root / layout))
            truth = truth_in(DATA, layout)
            if layout == "entries":
                truth |= rng_truth(folder, 2)
            made.append(Made(folder, truth))
        return made


class TestSaid(_ByHand):
    """How the shards are cut is written down."""

    format = Ranks()

    def make(self, root: Path) -> list[Made]:
        return self.copied(root, *(name for name in LAYOUTS if name != "ruled"))


class TestRuled(_ByHand):
    """The user's table of rules says how they are cut."""

    format = Ranks(RULES)
    construct = (
        "from ftckpt.formats.ranks import Ranks;"
        " from ftckpt.checkpoint.sharding import parse_rules;"
        f" form = Ranks(parse_rules({make_by_hand.RULES!r}, 'rules.toml'))"
    )
    imports = frozenset()

    def make(self, root: Path) -> list[Made]:
        return self.copied(root, "ruled")


def test_the_samples_are_what_the_generator_writes(tmp_path: Path) -> None:
    make_by_hand.make(tmp_path / "new", 2)
    for layout in LAYOUTS:
        for file in sorted((DATA / layout).glob("*.pt*")):
            new = loaded(tmp_path / "new" / layout / file.name)
            assert generated_alike(loaded(file), new), file


@pytest.mark.parametrize(("before", "after"), [(8, 4), (2, 8), (4, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_become_what_the_trainer_saves_in_another_world(
    layout: str, before: int, after: int, tmp_path: Path
) -> None:
    source = made_at(tmp_path, before) / layout
    native = made_at(tmp_path, after) / layout
    args = ["--rules", str(DATA / "rules.toml")] if layout == "ruled" else []
    if layout == "entries":
        args += ["--drop", "*rng"]  # a rank's own stream has no place in other worlds
    answer = ftckpt_json("reshard", str(source), str(tmp_path / "out"), "--tp", str(after), *args)
    assert answer["result"]["code"] == 0
    files = sorted(path.name for path in native.iterdir())
    out = sorted(p.name for p in (tmp_path / "out").iterdir() if "manifest" not in p.name)
    assert out == files
    for name in files:
        if name == "metadata.json":
            assert json.loads((tmp_path / "out" / name).read_text()) == json.loads(
                (native / name).read_text()
            )
            continue
        ours, theirs = loaded(tmp_path / "out" / name), loaded(native / name)
        theirs.pop("rng", None)
        assert set(ours) == set(theirs), name
        assert all(equal_in_any_order(ours[key], theirs[key]) for key in theirs), name


def equal_in_any_order(a: Any, b: Any) -> bool:
    """Compare as `equal` does; the order of a dict's keys is no part of a state."""
    if isinstance(a, dict) and isinstance(b, dict):
        return set(a) == set(b) and all(equal_in_any_order(a[k], b[k]) for k in a)
    if type(a) is list and type(b) is list and len(a) == len(b):
        return all(equal_in_any_order(x, y) for x, y in zip(a, b, strict=True))
    return equal(a, b)


def test_there_and_back_is_the_same_to_the_bit(tmp_path: Path) -> None:
    source = made_at(tmp_path, 4) / "recorded"
    for name, size in (("wide", "8"), ("back", "4")):
        done = ftckpt_json("reshard", str(source), str(tmp_path / name), "--tp", size)
        assert done["result"]["code"] == 0
        source = tmp_path / name
    first = made_at(tmp_path / "again", 4) / "recorded"
    one = tmp_path / "one"
    ftckpt_json("reshard", str(first), str(one), "--tp", "4")
    for file in sorted(one.glob("*.pt")):
        assert file.read_bytes() == (tmp_path / "back" / file.name).read_bytes()


def test_without_rules_the_refusal_says_which_flag(tmp_path: Path) -> None:
    source = opened(DATA / "ruled")
    with pytest.raises(UnsupportedError, match="nothing says how") as caught:
        RanksWriter().layout(Content.of(source), LayoutRequest(tp=4))
    assert caught.value.kind == "unknown-rule"
    assert "--rules" in caught.value.hint


def test_a_name_that_no_rule_matches_is_refused(tmp_path: Path) -> None:
    rules = parse_rules('[[rule]]\nnames = ["up.*"]\nsplit = 0\n', "some.toml")
    source = opened(DATA / "ruled", rules)
    assert "up.weight" in source.tensors
    with pytest.raises(UnsupportedError, match="nothing says how"):
        RanksWriter().layout(Content.of(source), LayoutRequest(tp=4))


def test_two_groups_are_refused(tmp_path: Path) -> None:
    source = opened(DATA / "recorded")
    with pytest.raises(UsageError, match="one group"):
        RanksWriter().layout(Content.of(source), LayoutRequest(tp=2, dp=2))


def test_any_result_is_sound_and_has_the_same_tensors(tmp_path: Path) -> None:
    from tests.conformance.writers import assert_same_tensors, assert_sound

    for layout in ("recorded", "offsets", "specs"):
        source = opened(DATA / layout)
        plan = RanksWriter().layout(Content.of(source), LayoutRequest(tp=4))
        assert list(plan.unplaced) == []
        materialise(plan, source, tmp_path / layout)
        result = opened(tmp_path / layout)
        assert_same_tensors(result, source)
        assert_sound(result)


class TestDamage:
    """Twins of the samples: a flipped bit, a lost rank, two steps, a file of another world."""

    @pytest.fixture(params=LAYOUTS)
    def folder(self, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        return Path(shutil.copytree(DATA / request.param, tmp_path / request.param))

    def checked(self, folder: Path) -> VerifyReport:
        checkpoint = opened(folder, rules_of(folder.name))
        return verify(checkpoint, VerifyOptions(level=Level.CONTENT))

    def last(self, folder: Path) -> Path:
        return max(folder.glob("*.pt*"), key=lambda path: path.name)

    def test_whole(self, folder: Path) -> None:
        assert self.checked(folder).code is ExitCode.OK

    def test_a_flipped_bit(self, folder: Path) -> None:
        file = self.last(folder)
        held = opened(folder, rules_of(folder.name)).tensors.values()
        at = next(p.extent.offset for t in held for p in t.pieces if p.extent.file == file.name)
        data = bytearray(file.read_bytes())
        data[at] ^= 4
        file.write_bytes(data)
        assert self.checked(folder).code is ExitCode.CORRUPT

    def test_a_lost_rank(self, folder: Path) -> None:
        self.last(folder).unlink()
        report = self.checked(folder)
        assert "missing-rank" in {f.kind for f in report.findings}
        marked = (folder / "metadata.json").exists()
        assert report.code is (ExitCode.CORRUPT if marked else ExitCode.INCOMPLETE)

    def test_two_mixed_steps(self, folder: Path) -> None:
        file = next(iter(sorted(folder.glob("*.pt*"))))
        state = loaded(file)
        inner = state.get("meta", state)
        key = next(k for k in ("step", "iteration", "global_step") if k in inner)
        inner[key] += 10
        torch.save(state, file)
        report = self.checked(folder)
        assert report.code is ExitCode.CORRUPT
        assert "mixed-steps" in {f.kind for f in report.findings}

    def test_a_file_of_another_world(self, folder: Path, tmp_path: Path) -> None:
        other = made_at(tmp_path, 4) / folder.name
        file = next(iter(sorted(folder.glob("*.pt*"))))
        name = file.name.replace("_of_2", "_of_4")
        file.unlink()
        shutil.copy(other / name, folder / name)
        assert self.checked(folder).code is ExitCode.CORRUPT


def test_a_spec_that_contradicts_the_others_is_left_out_and_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DATA / "entries", tmp_path / "c"))
    state = loaded(folder / "shard_00001.pt")
    state["model_shard"]["up.weight"]["sharding_spec"]["dim"] = 1
    torch.save(state, folder / "shard_00001.pt")
    found = {(f.kind, f.file) for f in opened(folder).check()}
    assert ("shape-mismatch", "shard_00001.pt") in found


def test_a_shard_that_does_not_fit_its_own_spec(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DATA / "offsets", tmp_path / "c"))
    state = loaded(folder / "model_rank_1.pt")
    state["tensors"]["up.weight"]["shard_offsets"] = (12, 0)
    torch.save(state, folder / "model_rank_1.pt")
    report = verify(opened(folder), VerifyOptions())
    assert report.code is ExitCode.CORRUPT


def test_replicas_of_one_tensor_rank_are_replicas(tmp_path: Path) -> None:
    """A grid of two tensor ranks and two replicas, all of which save."""
    folder = tmp_path / "grid"
    folder.mkdir()
    for rank in range(4):
        piece = torch.arange(12.0).reshape(4, 3).chunk(2)[rank % 2].clone()
        entry = {"data": piece, "dim": 0, "global_shape": [4, 3]}
        told = {"world_size": 4, "tp_size": 2, "dp_size": 2, "tp_rank": rank % 2}
        torch.save({"tensors": {"w": entry}, "rank": rank, **told}, folder / f"rank_{rank}.pt")
    checkpoint = opened(folder)
    assert list(checkpoint.check()) == []
    assert [p.replica for p in checkpoint.tensors["w"].pieces] == [0, 1, 0, 1]
    with pytest.raises(UnsupportedError, match="grid") as refused:
        RanksWriter().layout(Content.of(checkpoint), LayoutRequest(tp=4))
    assert "convert SRC DST --to safetensors" in refused.value.hint
    for name, to in (("out", "safetensors"), ("out.pt", "torchsave")):
        out = tmp_path / name
        done = ftckpt_json("convert", str(folder), str(out), "--to", to)
        assert done["result"]["code"] == 0
    whole = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(whole["model"]["w"], torch.arange(12.0).reshape(4, 3))


def test_placements_that_torch_pickles(tmp_path: Path) -> None:
    from torch.distributed.tensor import Replicate, Shard

    for rank in range(2):
        entries = {
            "w": {"data": torch.ones(2, 4), "placements": (Shard(0),), "global_shape": [4, 4]},
            "b": {"data": torch.ones(4), "placements": [Replicate()], "global_shape": [4]},
        }
        torch.save({"shard": entries, "num_shards": 2}, tmp_path / f"shard_{rank}.pt")
    checkpoint = opened(tmp_path)
    assert {k: t.shape for k, t in checkpoint.tensors.items()} == {"w": (4, 4), "b": (4,)}
    assert verify(checkpoint, VerifyOptions()).code is ExitCode.OK


def test_a_built_in_table_by_its_name(tmp_path: Path) -> None:
    """Eight files of a model with Llama's names, and not a word of how they are cut."""
    shapes = {
        "layers.0.self_attn.q_proj.weight": 0,
        "layers.0.self_attn.o_proj.weight": 1,
        "layers.0.input_layernorm.weight": None,
    }
    whole = {
        name: torch.randn((16, 16) if cut is not None else (16,)) for name, cut in shapes.items()
    }
    folder = tmp_path / "in"
    folder.mkdir()
    for rank in range(8):
        model = {
            name: whole[name] if cut is None else whole[name].chunk(8, cut)[rank].contiguous()
            for name, cut in shapes.items()
        }
        torch.save({"model": model, "world_size": 8, "rank": rank}, folder / f"rank_{rank}.pt")
    out = tmp_path / "out"
    answer = ftckpt_json("reshard", str(folder), str(out), "--tp", "2", "--rules", "llama")
    assert answer["result"]["code"] == 0
    one = loaded(out / "rank_1.pt")
    assert (one["world_size"], one["rank"]) == (2, 1)
    for name, cut in shapes.items():
        assert torch.equal(
            one["model"][name], whole[name] if cut is None else whole[name].chunk(2, cut)[1]
        )
    refused = ftckpt_json(
        "reshard", str(folder), str(tmp_path / "no"), "--tp", "2", "--rules", "megatron"
    )
    assert refused["result"]["code"] == ExitCode.USAGE


def test_one_shard_by_itself_is_no_checkpoint(tmp_path: Path) -> None:
    """Its own spec says that the tensor is larger: no single file may pass for the whole."""
    entry = {"data": torch.ones(2, 8), "dim": 0, "global_shape": [16, 8]}
    torch.save({"tensors": {"w": entry}, "world_size": 8, "rank": 0}, tmp_path / "checkpoint.pt")
    answer = ftckpt_json("verify", str(tmp_path / "checkpoint.pt"))
    assert answer["result"]["code"] == ExitCode.UNSUPPORTED
    assert "one rank's shard of" in answer["result"]["message"]
    whole = {"data": torch.ones(16, 8), "dim": 0, "global_shape": [16, 8]}
    torch.save({"tensors": {"w": whole}}, tmp_path / "whole.pt")
    assert ftckpt_json("verify", str(tmp_path / "whole.pt"))["result"]["code"] == 0


def test_diff_compares_whole_tensors_by_a_table_of_rules(tmp_path: Path) -> None:
    one, two = (str(made_at(tmp_path / str(world), world) / "ruled") for world in (2, 4))
    apart = ftckpt_json("diff", one, two)
    assert apart["result"]["code"] == ExitCode.DIFFERENT
    assert apart["total"]["counts"].get("missing", 0) + apart["total"]["counts"]["added"] > 0
    table = ["--rules", str(DATA / "rules.toml")]
    whole = ftckpt_json("diff", one, two, *table)
    assert whole["result"]["code"] == ExitCode.OK, whole["result"]
    assert set(whole["total"]["counts"]) == {"equal"}
    state = loaded(Path(two) / "rank_3.pt")
    state["model"]["up.weight"][0, 0] += 1
    torch.save(state, Path(two) / "rank_3.pt")
    changed = ftckpt_json("diff", one, two, *table)
    assert changed["result"]["code"] == ExitCode.DIFFERENT
    (tensor,) = (one for one in changed["tensors"] if one["status"] == "different")
    assert (tensor["key"], tensor["changed"]) == ("up.weight", 1)
    mistyped = ftckpt_json("diff", one, two, "--rules", str(tmp_path / "none.toml"))
    assert mistyped["result"]["code"] == ExitCode.USAGE
