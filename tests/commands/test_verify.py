"""`ftckpt verify`, as a user sees it."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ftckpt.findings import described, finding, in_file, renamed
from ftckpt.workers import Work
from tests.builders.checkpoints import open_checkpoint
from tests.builders.real_sets import real_set
from tests.commands.golden import DATA, check_golden, ftckpt
from tests.json_run import ftckpt_json

# A byte of exp_avg:0.weight in __0_1.distcp.
DAMAGE = 15000


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_whole_checkpoint(here: Path) -> None:
    check_golden("verify.txt", ftckpt("verify", "run/step-2", cwd=here))


def test_a_root_takes_its_newest(here: Path) -> None:
    check_golden("verify-root.txt", ftckpt("verify", "run", cwd=here))


def test_one_flipped_bit_is_found_and_located(here: Path) -> None:
    flip(here / "run/step-2/__0_1.distcp", DAMAGE)
    check_golden("verify-flipped.txt", ftckpt("verify", "run/step-2", cwd=here))


def test_structure_does_not_see_it_and_says_so(here: Path) -> None:
    flip(here / "run/step-2/__0_1.distcp", DAMAGE)
    done = ftckpt("verify", "run/step-2", "--level", "structure", cwd=here)
    assert done.returncode == 0
    assert "the content was not read" in done.stdout


def test_a_truncated_file(here: Path) -> None:
    path = here / "run/step-2/__0_1.distcp"
    path.write_bytes(path.read_bytes()[:20000])
    check_golden("verify-truncated.txt", ftckpt("verify", "run/step-2", cwd=here))


def test_a_root_of_several_ends_with_a_table(here: Path) -> None:
    flip(here / "run/step-2/__0_1.distcp", DAMAGE)
    (here / "run/step-1/__0_1.distcp").unlink()
    done = ftckpt("verify", "run", "--all", cwd=here)
    check_golden("verify-all.txt", done)
    # stderr says the whole, and no finding again.
    assert "CRC-32" not in done.stderr
    assert "missing" not in done.stderr


def test_a_finding_says_nothing_twice() -> None:
    file, key = "rank_0/a.pt", "exp_avg:0.weight"
    place: dict[str, Any] = {"file": file, "tensor": key, "rank": 1, "offset": 8, "length": 4}
    whole = finding("bad-crc", "the bytes differ", **place)
    assert described(whole) == (
        "error: bad-crc [rank_0/a.pt, bytes 8-12, exp_avg:0.weight, rank 1]: the bytes differ"
    )
    for said, left in (
        (f"{key} (rank 1) in {file} differs", "bytes 8-12"),
        (f"0.weight in {file} differs", "bytes 8-12, exp_avg, rank 1"),
        (f"optimizer.state.0.weight.exp_avg in {file} differs", "bytes 8-12, rank 1"),
        # Another name, and not this one.
        ("in rank_0/a.pt.tmp 10.weight of rank 11 differs", ", ".join(
            [file, "bytes 8-12", key, "rank 1"]
        )),
    ):  # fmt: skip
        found = finding("bad-crc", said, **place)
        assert described(found) == f"error: bad-crc [{left}]: {said}"
    assert described(finding("missing-file", f"{file} is missing", file=file)) == (
        "error: missing-file: rank_0/a.pt is missing"
    )


def test_a_finding_takes_another_name_in_its_sentence_too() -> None:
    found = finding("bad-crc", "a.b in x.pt, not a.b.c in y/x.pt", file="x.pt", tensor="a.b")
    assert renamed(found, "model:b").message == "model:b in x.pt, not a.b.c in y/x.pt"
    assert in_file(found, "run/x.pt").message == "a.b in run/x.pt, not a.b.c in y/x.pt"
    assert renamed(finding("bad-crc", "a byte of a", tensor="a"), "m:a").message == "a byte of a"


def test_a_missing_file(here: Path) -> None:
    (here / "run/step-2/__0_1.distcp").unlink()
    done = ftckpt("verify", "run/step-2", cwd=here)
    assert done.returncode == 4
    assert "__0_1.distcp is missing" in done.stderr


def test_a_file_of_another_step(here: Path) -> None:
    shutil.copy(here / "run/step-1/__0_0.distcp", here / "run/step-2/__0_0.distcp")
    shutil.copy(here / "run/step-1/__0_1.distcp", here / "run/step-2/__0_1.distcp")
    # Both data files are of step 1: only the name disagrees, and a name is a hint.
    both = ftckpt("verify", "run/step-2", cwd=here)
    assert both.returncode == 0
    assert "step-name" in both.stdout
    assert ftckpt("verify", "run/step-2", "--strict", cwd=here).returncode == 4


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ([], 0),
        (["--strict"], 4),
        (["--strict=steps"], 4),
        (["--strict=replicas,masters"], 0),
        (["--strict=replicas", "--strict=steps"], 4),
        (["--strict=all"], 4),
        (["--strict=step"], 2),
    ],
    ids=str,
)
def test_strictness_is_chosen_by_class(here: Path, flags: list[str], code: int) -> None:
    for name in ("__0_0.distcp", "__0_1.distcp"):
        shutil.copy(here / "run/step-1" / name, here / "run/step-2" / name)
    for words in (["run/step-2", *flags], [*flags, "run/step-2"], [*flags, "--", "run/step-2"]):
        done = ftckpt("verify", *words, cwd=here)
        assert done.returncode == code, done.stderr
        if code == 0:
            assert "; its name says another step" in done.stdout
            assert "--strict=steps makes that an error" in done.stderr
        if code == 2:
            assert "did you mean steps?" in done.stderr


def test_what_trainers_pickle_of_their_own_is_known(tmp_path: Path) -> None:
    import torch

    alone = ftckpt("verify", DATA / "pickles/training_args.bin")
    assert alone.returncode == 13  # it holds settings, and no state
    shutil.copy(DATA / "pickles/training_args.bin", tmp_path)
    torch.save({"weight": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    done = ftckpt("verify", tmp_path, "--strict=opaque")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("accelerate_fsdp1", "checkpoint_3"),
        ("accelerate_fsdp2", "checkpoint_3"),
        ("dcp_2d_tpfsdp", "step-3"),
        ("dcp_fsdp2_nested", "step-3"),
        ("dcp_fsdp2_titan", "step-3"),
        ("dcp_torch26_fsdp2_async", "step-3"),
        ("ds_pp2dp2_z1_bf16", "global_step2"),
        ("ds_z1_w4_bf16", "global_step3"),
        ("ds_z2_w2_bf16", "global_step3"),
        ("ds_z3_w2_fp32", "global_step3"),
        ("hf4_llama_bin", ""),
        ("hf_llama", ""),
        ("hf_mixtral", ""),
        ("lightning_ddp", "last.ckpt"),
        ("mcore0161_tp2dp2_dpreshard", "iter_0000003"),
        ("mcore_torch_tp2dp2_distopt_bf16", "iter_0000003"),
        ("mcore_torch_tp2pp2", "iter_0000003"),
        ("mcore_torchdist_tp2dp2_fullyreshard_bf16", "iter_0000003"),
        ("mcore_torchdist_tp2pp2", "iter_0000003"),
        ("verl_fsdp", "global_step_3"),
    ],
)
def test_untouched_real_sets_pass_strictly(
    name: str, inside: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = real_set(name, inside, tmp_path_factory)
    done = ftckpt_json("verify", str(path), "--level", "values", "--strict")
    assert done["result"]["code"] == 0, done["result"]
    assert done["result"]["message"].endswith("the values are sound")


def test_a_format_that_records_no_ranks_is_unverified_strictly(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """DCP's Hugging Face shards: a lost last rank would only make every tensor smaller."""
    path = str(real_set("dcp_hf", "sharded_index", tmp_path_factory))
    assert ftckpt_json("verify", path, "--level", "values")["result"]["code"] == 0
    assert ftckpt_json("verify", path, "--strict")["result"]["code"] == 6
    assert ftckpt_json("verify", path, "--strict=replicas,links")["result"]["code"] == 0


def test_replicas_that_differ_are_in_the_sentence(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    source = real_set("mcore_torch_tp2pp2", "iter_0000003", tmp_path_factory)
    path = shutil.copytree(source, tmp_path / source.name)
    checkpoint = open_checkpoint(path)
    piece = next(
        piece
        for info in checkpoint.tensors.values() if info.kind == "param"
        for piece in info.pieces if piece.replica
    )  # fmt: skip
    flip(path / piece.extent.file, checkpoint.payload(piece).extent.offset)
    drop_crcs(path / piece.extent.file)
    document = ftckpt_json("verify", str(path), "--level", "values")
    assert document["result"]["code"] == 0, document["result"]
    assert document["result"]["message"].endswith("; 1 replica differs")
    for flag, code in (("--strict=replicas", 4), ("--strict=masters,opaque", 0)):
        assert ftckpt("verify", path, "--level", "values", flag).returncode == code


def drop_crcs(path: Path) -> None:
    """Set the CRC-32s of a zip to "not computed", as torch writes them where it is told so."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        members, at = archive.infolist(), archive.start_dir
    for member in members:
        assert data[at : at + 4] == b"PK\1\2"
        for place in (at + 16, member.header_offset + 14):
            data[place : place + 4] = bytes(4)
        name, extra, comment = (int.from_bytes(data[at + n : at + n + 2], "little")
                                for n in (28, 30, 32))  # fmt: skip
        size = int.from_bytes(data[at + 20 : at + 24], "little")
        head = member.header_offset
        length = sum(int.from_bytes(data[head + n : head + n + 2], "little") for n in (26, 28))
        end = head + 30 + length + size
        if data[end : end + 4] == b"PK\7\10":
            data[end + 4 : end + 8] = bytes(4)
        at += 46 + name + extra + comment
    path.write_bytes(data)


def test_uncommitted(here: Path) -> None:
    (here / "run/step-2/.metadata").unlink()
    done = ftckpt("verify", "run/step-2", "--json", cwd=here)
    document = json.loads(done.stdout)
    assert done.returncode == 5
    assert document["result"]["name"] == "INCOMPLETE"
    assert document["findings"][0]["kind"] == "uncommitted"


def test_a_dangling_pointer_of_a_root(here: Path) -> None:
    (here / "run/latest").write_text("step-9")
    done = ftckpt("verify", "run", cwd=here)
    assert done.returncode == 4
    assert "step-9" in done.stderr


def test_all_of_a_root_and_the_worst_code_wins(here: Path) -> None:
    flip(here / "run/step-1/__0_1.distcp", DAMAGE)
    assert ftckpt("verify", "run", cwd=here).returncode == 0
    done = ftckpt("verify", "run", "--all", "--json", cwd=here)
    document = json.loads(done.stdout)
    assert done.returncode == 4
    assert [c["target"] for c in document["checkpoints"]] == ["run/step-2", "run/step-1"]
    kinds = [{f["kind"] for f in c["findings"]} for c in document["checkpoints"]]
    assert ["bad-crc" in k for k in kinds] == [False, True]
    assert document["bytes_read"] == sum(c["bytes_read"] for c in document["checkpoints"])
    assert (document["step"], document["findings"]) == (None, [])


def test_what_is_said_of_a_root_holds_for_each_of_its_checkpoints(here: Path) -> None:
    assert ftckpt("seal", "run/step-1", cwd=here).returncode == 0
    (here / "run/step-1/.metadata").write_bytes(b"")
    (here / "run/latest").write_text("step-9")
    document = json.loads(ftckpt("verify", "run", "--all", "--json", cwd=here).stdout)
    good, bad = document["checkpoints"]
    assert (good["evidence"], good["step"]) == ("crc32", 2)
    assert (bad["evidence"], bad["step"]) == ("none", None)
    assert (document["level"], document["evidence"]) == ("structure", "none")
    assert [f["kind"] for f in document["findings"]] == ["pointer-dangling"]


def test_several_models_in_one_step_are_one_checkpoint(here: Path) -> None:
    (here / "run/step-3").mkdir()
    for model, step in (("actor", "step-2"), ("critic", "step-1")):
        shutil.copytree(here / "run" / step, here / "run/step-3" / model)
    flip(here / "run/step-3/actor/__0_1.distcp", DAMAGE)
    document = json.loads(ftckpt("verify", "run", "--all", "--json", cwd=here).stdout)
    assert document["result"]["code"] == 4
    both, *single = document["checkpoints"]
    assert both["format"] == "bundle"
    assert {f["file"] for f in both["findings"] if f["kind"] == "bad-crc"} == {"actor/__0_1.distcp"}
    assert not any(f["kind"] == "bad-crc" for one in single for f in one["findings"])


def test_json_says_what_the_contract_says(here: Path) -> None:
    flip(here / "run/step-2/__0_1.distcp", DAMAGE)
    document = json.loads(ftckpt("verify", "run/step-2", "--json", cwd=here).stdout)
    assert document["schema"] == "ftckpt.verify/1"
    assert (document["level"], document["evidence"]) == ("content", "crc32")
    assert document["bytes_read"] > 0
    assert document["seconds"] > 0
    found = next(f for f in document["findings"] if f["kind"] == "bad-crc")
    assert found["file"] == "__0_1.distcp"
    assert found["rank"] == 0
    assert found["offset"] <= DAMAGE < found["offset"] + found["length"]
    assert found["tensor"] == "exp_avg:0.weight"
    assert document["result"]["code"] == 4


def test_content_is_demanded_where_there_is_no_evidence(here: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"w": np.zeros(4, np.float32)}, here / "model.safetensors")
    assert ftckpt("verify", "model.safetensors", cwd=here).returncode == 0
    done = ftckpt("verify", "model.safetensors", "--level", "content", cwd=here)
    assert done.returncode == 6
    assert "ftckpt seal" in done.stderr
    assert ftckpt("verify", "model.safetensors", "--level", "content", cwd=here).returncode == 6


def test_evidence_for_a_part_is_none_for_the_rest(here: Path) -> None:
    import numpy as np
    import torch
    from safetensors.numpy import save_file

    # A Trainer's directory: the optimizer has CRC-32s, the weights beside it have nothing.
    place = here / "checkpoint-5"
    place.mkdir()
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    save_file({"w": np.ones(4, np.float32)}, place / "model.safetensors")
    torch.save(optimizer.state_dict(), place / "optimizer.pt")
    (place / "trainer_state.json").write_text('{"global_step": 5}')
    assert ftckpt("verify", "checkpoint-5", cwd=here).returncode == 0
    done = ftckpt("verify", "checkpoint-5", "--level", "content", cwd=here)
    assert done.returncode == 6
    assert "model.safetensors" in done.stderr
    assert ftckpt("latest", ".", "--level", "content", cwd=here).returncode == 6
    assert ftckpt("seal", "checkpoint-5", cwd=here).returncode == 0
    assert ftckpt("verify", "checkpoint-5", "--level", "content", cwd=here).returncode == 0


def test_against_a_replica(here: Path) -> None:
    shutil.copytree(here / "run/step-2", here / "copy")
    same = ftckpt("verify", "run/step-2", "--against", "copy", "--json", cwd=here)
    assert (same.returncode, json.loads(same.stdout)["evidence"]) == (0, "replica")
    flip(here / "copy/__0_0.distcp", 1500)
    done = ftckpt("verify", "run/step-2", "--against", "copy", cwd=here)
    assert done.returncode == 4
    assert "bytes 1500" in done.stdout


def test_a_sample_of_the_tensors_of_another_layout(here: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    tensors = {f"w{n}": np.full(8, n, np.float32) for n in range(40)}
    save_file(tensors, here / "one.safetensors")
    save_file(tensors, here / "two.safetensors")
    words = ["verify", "one.safetensors", "--against", "two.safetensors", "--json"]
    whole = json.loads(ftckpt(*words, cwd=here).stdout)
    part = json.loads(ftckpt(*words, "--sample", "20%", cwd=here).stdout)
    assert (whole["result"]["code"], part["result"]["code"]) == (0, 0)
    assert (whole["sampled"], part["sampled"]) == (None, 0.2)
    assert 0 < part["bytes_read"] < whole["bytes_read"]


def test_fail_fast_stops_at_the_first_error(here: Path) -> None:
    for path in (here / "run/step-2").glob("*.distcp"):
        path.unlink()
    assert ftckpt("verify", "run/step-2", cwd=here).stdout.count("error: ") == 2
    assert ftckpt("verify", "run/step-2", "--fail-fast", cwd=here).stdout.count("error: ") == 1


def test_a_sample_is_said_to_be_one(here: Path) -> None:
    done = ftckpt("verify", "run/step-2", "--sample", "10%", "--json", cwd=here)
    document = json.loads(done.stdout)
    assert document["sampled"] == 0.1
    assert "sample" in document["result"]["message"]
    everything = json.loads(ftckpt("verify", "run/step-2", "--json", cwd=here).stdout)
    assert document["bytes_read"] < everything["bytes_read"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nope"], 9),
        (["run/step-2", "--sample", "0%"], 2),
        (["run/step-2", "--limit-rate", "fast"], 2),
        (["run/step-2", "--level", "deep"], 2),
        (["run@7"], 9),
        (["run/step-2", "--against", "run"], 2),
    ],
)
def test_wrong_command_lines(here: Path, arguments: list[str], code: int) -> None:
    done = ftckpt("verify", *arguments, "--json", cwd=here)
    assert done.returncode == code
    assert json.loads(done.stdout)["result"]["code"] == code
    assert done.stderr


def test_nothing_is_written(here: Path) -> None:
    def state() -> list[tuple[str, int, int]]:
        files = sorted((here / "run").rglob("*"))
        return [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in files]

    before = state()
    ftckpt("verify", "run", "--level", "values", cwd=here)
    assert state() == before


@pytest.mark.s3
def test_on_s3(here: Path, s3_url: str) -> None:
    from ftckpt.storage import open_store

    flip(here / "run/step-2/__0_1.distcp", DAMAGE)
    store = open_store(s3_url)
    for path in sorted((here / "run").rglob("*")):
        if path.is_file():
            store.put(path.relative_to(here / "run").as_posix(), path.read_bytes())
    assert ftckpt("verify", f"{s3_url}@1", "--level", "content").returncode == 0
    done = ftckpt("verify", s3_url)
    assert done.returncode == 4
    assert "0.weight" in done.stdout


def test_a_rate_is_kept_wherever_tensors_are_read(here: Path) -> None:
    from ftckpt import open_checkpoint
    from ftckpt.verification import Level, VerifyOptions, verify
    from ftckpt.workers.limits import RateLimit

    class Recorded(RateLimit):
        taken = 0

        def take(self, nbytes: int) -> None:
            self.taken += nbytes

    checkpoint = open_checkpoint(str(here / "run/step-2"))
    elements = sum(info.nbytes for info in checkpoint.tensors.values())
    content, values, tensors = Recorded(1e9), Recorded(1e9), Recorded(1e9)
    verify(checkpoint, VerifyOptions(Level.CONTENT), work=Work(limiter=content))
    verify(checkpoint, VerifyOptions(Level.VALUES), work=Work(limiter=values))
    assert values.taken - content.taken >= elements
    (here / "other").mkdir()
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"w": np.ones(64, np.float32)}, here / "other/one.safetensors")
    save_file({"w": np.ones(64, np.float32)}, here / "other/two.safetensors")
    one, two = (open_checkpoint(str(here / f"other/{n}.safetensors")) for n in ("one", "two"))
    verify(one, VerifyOptions(against=two), work=Work(limiter=tensors))
    assert tensors.taken >= 2 * 64 * 4
