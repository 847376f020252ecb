"""FSDP2 around torchao's float8 training, as a GPU saved it (see `make_float8_cuda.py`)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ftckpt import convert, open_checkpoint
from ftckpt.errors import ExitCode
from ftckpt.findings import Severity
from ftckpt.inspection.resume import Presence, resume_check
from ftckpt.verification import Level, VerifyOptions, verify
from tests.formats.ranks.test_coded import SAMPLES, holds

NAME = "float8_cuda"


@pytest.mark.parametrize("form", ["dcp", "ranks"])
def test_it_is_read_and_carried_without_a_warning(form: str, tmp_path: Path) -> None:
    place = SAMPLES / NAME / "dcp"
    if form == "ranks":
        place = tmp_path / "saved"
        place.mkdir()
        shutil.copy(SAMPLES / NAME / "rank_0_of_1.pt", place)
    holds(place, NAME)
    opened = open_checkpoint(str(place))
    report = verify(opened, VerifyOptions(level=Level.VALUES))
    assert report.code is ExitCode.OK
    assert [one for one in report.findings if one.severity is not Severity.NOTE] == []
    moments = next(item for item in resume_check(opened) if item.key == "moments")
    assert moments.presence is Presence.PRESENT
    convert(str(place), str(tmp_path / "written"), to="safetensors")
    holds(tmp_path / "written", NAME)
