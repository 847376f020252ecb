"""The values level: what is a verdict, a warning, a note; on files that torch wrote."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._extension import ZStandard

from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.errors import ExitCode
from ftckpt.findings import Finding, Severity, Strictness
from ftckpt.formats.dcp import Dcp
from ftckpt.verification import Level, VerifyOptions, VerifyReport, verify
from ftckpt.verification.values.numbers import count_values
from tests.conformance.formats import open_path
from tests.formats.dcp.writing import DATA, save, truth_of

FLOATS = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
)  # fmt: skip
INFINITE = FLOATS[:5]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def report(path: Path, *, strict: bool = False) -> VerifyReport:
    classes = frozenset(Strictness) if strict else frozenset[Strictness]()
    return verify(open_path(Dcp(), path), VerifyOptions(level=Level.VALUES, strict=classes))


def said(path: Path) -> dict[str, Finding]:
    quiet = ("not-covered", "step-unknown")
    return {f.kind: f for f in report(path).findings if f.kind not in quiet}


# --- counting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e8m0fnu], ids=name_of)
@given(data=st.binary(max_size=200))
def test_counts_are_torchs(dtype: torch.dtype, data: bytes) -> None:
    data = data[: len(data) - len(data) % dtype.itemsize]
    got = count_values(DTYPES[name_of(dtype)], data)
    assert got is not None
    if not data:
        assert got == (0, 0, 0, False, -1)
        return
    # float64 holds every value of the narrower types.
    values = torch.frombuffer(bytearray(data), dtype=dtype).to(torch.float64)
    assert got.nan == int(values.isnan().sum())
    assert got.inf == int(values.isinf().sum())
    assert got.negative == int((values < 0).sum())
    assert got.nonzero == bool((values != 0).any())
    bad = (~values.isfinite()).nonzero()
    assert got.first == (int(bad[0]) if len(bad) else -1)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=name_of)
@given(data=st.binary(max_size=200))
def test_either_part_of_a_complex_number_counts(dtype: torch.dtype, data: bytes) -> None:
    data = data[: len(data) - len(data) % dtype.itemsize]
    got = count_values(DTYPES[name_of(dtype)], data)
    assert got is not None
    if not data:
        return
    values = torch.frombuffer(bytearray(data), dtype=dtype)
    assert got.nan == int(torch.view_as_real(values).isnan().sum())
    bad = (~values.isfinite()).nonzero()
    assert got.first == (int(bad[0]) if len(bad) else -1)


@pytest.mark.parametrize("name", ["int64", "uint8", "bool", "float4_e2m1"])
def test_types_without_special_values(name: str) -> None:
    assert count_values(DTYPES[name], bytes(range(16))) is None


# --- verdicts -----------------------------------------------------------------------------------


def training(dtype: torch.dtype, **change: torch.Tensor) -> dict[str, Any]:
    ones = torch.ones(6).to(dtype)
    parts = {"weight": ones, "exp_avg": ones, "exp_avg_sq": ones, "master_param": ones, **change}
    return {
        "model": {"w": parts.pop("weight"), "bn.running_mean": parts.pop("buffer", ones)},
        "optimizer": {"state": {"w": parts}},
    }


def with_value(dtype: torch.dtype, value: float) -> torch.Tensor:
    tensor = torch.ones(6)
    tensor[4] = value
    return tensor.to(dtype)


KEYS = {
    "weight": "w", "exp_avg": "exp_avg:w", "exp_avg_sq": "exp_avg_sq:w",
    "master_param": "master:w",
}  # fmt: skip


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("part", KEYS)
def test_nan_is_a_verdict(tmp_path: Path, dtype: torch.dtype, part: str) -> None:
    path = save(training(dtype, **{part: with_value(dtype, math.nan)}), tmp_path / "c")
    answer = report(path)
    assert answer.code is ExitCode.CORRUPT
    (found,) = [f for f in answer.findings if f.severity is Severity.ERROR]
    assert (found.kind, found.tensor, found.file) == ("nan", KEYS[part], "__0_0.distcp")
    assert "1 NaN" in found.message
    assert "element 4" in found.message


@pytest.mark.parametrize("dtype", INFINITE, ids=name_of)
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinity_is_a_verdict(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    path = save(training(dtype, weight=with_value(dtype, value)), tmp_path / "c")
    assert report(path).code is ExitCode.CORRUPT
    assert said(path)["inf"].tensor == "w"


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_a_negative_second_moment_is_a_verdict(tmp_path: Path, dtype: torch.dtype) -> None:
    path = save(training(dtype, exp_avg_sq=with_value(dtype, -0.5)), tmp_path / "c")
    assert report(path).code is ExitCode.CORRUPT
    assert said(path)["negative-exp-avg-sq"].tensor == "exp_avg_sq:w"
    below = with_value(dtype, -0.5)
    state = training(dtype, weight=below, master_param=below, exp_avg=below)
    fine = save(state, tmp_path / "fine")
    assert report(fine).code is ExitCode.OK


def test_negative_zero_is_not_negative(tmp_path: Path) -> None:
    path = save(training(torch.float32, exp_avg_sq=with_value(torch.float32, -0.0)), tmp_path / "c")
    assert report(path).code is ExitCode.OK


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_buffers_may_hold_what_is_not_finite(tmp_path: Path, value: float) -> None:
    path = save(training(torch.float32, buffer=with_value(torch.float32, value)), tmp_path / "c")
    answer = report(path, strict=True)
    assert answer.code is ExitCode.OK
    note = next(f for f in answer.findings if f.kind == "nonfinite-buffer")
    assert (note.severity, note.tensor) == (Severity.NOTE, "bn.running_mean")


MASK = torch.full((4, 4), -math.inf).triu(1)


@pytest.mark.parametrize("flat", [False, True])
def test_a_mask_is_told_from_a_parameter_by_the_optimizer(tmp_path: Path, flat: bool) -> None:
    state = training(torch.float32)
    state["model"]["layers.0.attn.mask"] = MASK
    if flat:  # as torch flattens it: the names alone, and nothing that says what is a buffer
        moments = {f"optimizer.state.w.{k}": v for k, v in state["optimizer"]["state"]["w"].items()}
        state = {**state["model"], **moments}
    answer = report(save(state, tmp_path / "c"), strict=True)
    assert answer.code is ExitCode.OK
    note = next(f for f in answer.findings if f.kind == "nonfinite-buffer")
    assert (note.severity, note.tensor) == (Severity.NOTE, "layers.0.attn.mask")
    assert answer.message.endswith("the values are sound")


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("name", ["layers.0.attn.mask", "layers.0.weight"])
def test_what_cannot_be_told_is_a_warning(tmp_path: Path, name: str, state: bool) -> None:
    tree = training(torch.float32)
    tree["model"][name] = MASK
    if not state:
        del tree["optimizer"]
    path = save(tree, tmp_path / "c")
    answer = report(path)
    (found,) = [f for f in answer.findings if f.tensor == name]
    kinds = {
        ("layers.0.attn.mask", True): "nonfinite-buffer",
        ("layers.0.attn.mask", False): "nonfinite-unknown",
        ("layers.0.weight", True): "nonfinite-unknown",  # frozen, or a strange name of a buffer
        ("layers.0.weight", False): "inf",
    }
    assert found.kind == kinds[name, state]
    if found.kind == "nonfinite-unknown":
        assert (answer.code, found.severity) == (ExitCode.OK, Severity.WARNING)
        assert answer.message.endswith("1 tensor that may be a parameter is not finite")
        assert answer.hint == "--strict=values makes that an error"
        assert report(path, strict=True).code is ExitCode.CORRUPT


def test_state_that_is_kept_by_numbers_tells_nothing(tmp_path: Path) -> None:
    tree = training(torch.float32)
    tree["optimizer"]["state"] = {"0": tree["optimizer"]["state"]["w"]}
    tree["model"]["layers.0.weight"] = with_value(torch.float32, math.nan)
    assert report(save(tree, tmp_path / "c")).code is ExitCode.CORRUPT


@pytest.mark.parametrize("part", ["exp_avg", "exp_avg_sq"])
def test_a_moment_of_zeros_is_a_note(tmp_path: Path, part: str) -> None:
    path = save(training(torch.float32, **{part: torch.zeros(6)}), tmp_path / "c")
    answer = report(path, strict=True)
    assert answer.code is ExitCode.OK
    note = next(f for f in answer.findings if f.kind == "zero-moment")
    assert note.tensor == KEYS[part]


def test_weights_of_zeros_are_nothing(tmp_path: Path) -> None:
    state = training(torch.float32, weight=torch.zeros(6), master_param=torch.zeros(6))
    assert said(save(state, tmp_path / "c")) == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=name_of)
def test_a_master_that_does_not_cast_is_a_warning(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    master = torch.randn(1000) * torch.logspace(-6, 4, 1000)
    optimizer = {"state": {"w": {"master_param": master}}}
    weight = master.to(dtype).clone()
    good = save({"model": {"w": weight}, "optimizer": optimizer}, tmp_path / "good")
    assert said(good) == {}
    weight[7] += 1
    bad = save({"model": {"w": weight}, "optimizer": optimizer}, tmp_path / "bad")
    found = said(bad)["master-differs"]
    assert (found.severity, found.tensor) == (Severity.WARNING, "master:w")
    assert "1 of 1000" in found.message
    assert report(bad).code is ExitCode.OK
    assert report(bad, strict=True).code is ExitCode.CORRUPT


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name_of)
def test_weights_that_no_rounding_makes_of_their_masters_are_of_another_save(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    master = torch.randn(1000)
    rounded = master.to(dtype)
    optimizer = {"state": {"w": {"master_param": master}}}
    # Stochastic rounding takes each of the two neighbours, also over zero.
    off = torch.where(rounded.float() < master, 1, -1) * torch.where(rounded < 0, -1, 1)
    other = (rounded.view(torch.int16) + off.to(torch.int16)).view(dtype)
    taken = torch.where(torch.rand(1000) < 0.5, other, rounded)
    stochastic = save({"model": {"w": taken}, "optimizer": optimizer}, tmp_path / "stochastic")
    assert report(stochastic).code is ExitCode.OK
    assert "master-differs" in said(stochastic)
    moved = save({"model": {"w": rounded.flip(0)}, "optimizer": optimizer}, tmp_path / "moved")
    assert report(moved).code is ExitCode.CORRUPT
    assert "are of two runs or ranks" in said(moved)["mixed-steps"].message


def test_weights_that_are_near_their_masters_are_a_warning(tmp_path: Path) -> None:
    """Megatron with --fp8-param-gather saves dequantised weights; averages differ as well."""
    torch.manual_seed(0)
    master = torch.randn(64, 64)
    scale = 448 / master.abs().max()
    fp8 = (master * scale).to(torch.float8_e4m3fn).float() / scale
    average = 0.3 * master + 0.1 * torch.randn(64, 64)
    empty = torch.zeros(64, 64)
    optimizer = {"state": {"w": {"master_param": master}}}
    for name, weight in (("fp8", fp8), ("average", average), ("empty", empty)):
        model = {"w": weight.to(torch.bfloat16)}
        near = save({"model": model, "optimizer": optimizer}, tmp_path / name)
        assert (report(near).code, "mixed-steps" in said(near)) == (ExitCode.OK, False)
        assert "weights kept in FP8" in said(near)["master-differs"].message


@given(data=st.binary(min_size=4, max_size=200))
def test_masters_are_cast_as_torch_casts(data: bytes) -> None:
    import numpy as np

    from ftckpt.verification.values.masters import cast_master

    bits = np.frombuffer(data[: len(data) - len(data) % 4], np.uint32)
    values = torch.frombuffer(bytearray(bits.tobytes()), dtype=torch.float32)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        got = cast_master(bits.view(np.float32), DTYPES[name_of(dtype)])
        assert got is not None
        back = torch.frombuffer(bytearray(got.tobytes()), dtype=dtype)
        want = values.to(dtype)
        number = ~values.isnan()
        assert torch.equal(back[number].view(torch.uint8), want[number].view(torch.uint8))
        assert bool(back[~number].isnan().all())


def test_copies_that_differ_are_a_warning(tmp_path: Path) -> None:
    import shutil

    path = Path(shutil.copytree(DATA / "ranklocal" / "step-3", tmp_path / "step-3"))
    assert "replica-differs" not in said(path)
    piece = open_path(Dcp(), path).tensors["seen"].pieces[1]
    place = open_path(Dcp(), path).payload(piece).extent
    data = bytearray((path / place.file).read_bytes())
    data[place.offset] ^= 1
    (path / place.file).write_bytes(data)
    found = said(path)
    assert found["bad-crc"].rank == 1  # the CRC tells which of the two is wrong
    differs = found["replica-differs"]
    assert (differs.severity, differs.tensor, differs.rank) == (Severity.WARNING, "seen", 1)


def test_ranks_of_one_rng_state_are_noted(tmp_path: Path) -> None:
    torch.manual_seed(1)
    one, two = torch.get_rng_state(), torch.get_rng_state().clone()
    two[100] += 1
    apart = save({"rng": {"rank_0": one, "rank_1": two}}, tmp_path / "apart")
    assert "equal-rng" not in said(apart)
    equal = save({"rng": {"rank_0": one, "rank_1": one.clone()}}, tmp_path / "equal")
    note = said(equal)["equal-rng"]
    assert note.severity is Severity.NOTE
    assert report(equal, strict=True).code is ExitCode.OK


def test_compressed_items_are_looked_at_whole(tmp_path: Path) -> None:
    torch.manual_seed(2)
    large = torch.randn(700_001)
    large[700_000] = math.nan
    path = save({"model": {"w.weight": large, "b": torch.randn(3)}}, tmp_path / "c",
                _extensions=[ZStandard()])  # fmt: skip
    found = said(path)["nan"]
    assert found.tensor == "w.weight"
    assert "element 700000" in found.message


def test_strided_items_are_looked_at_without_their_neighbours(tmp_path: Path) -> None:
    base = torch.full((4, 6), math.nan)
    base[:, ::2] = 1.0
    path = save({"model": {"w": base[:, ::2], "t": torch.ones(3, 5).t()}}, tmp_path / "c")
    assert truth_of(base[:, ::2]).shape == (4, 3)
    assert said(path) == {}
