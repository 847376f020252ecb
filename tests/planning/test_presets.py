from __future__ import annotations

import pytest

from ftckpt.errors import UsageError
from ftckpt.planning.presets import PRESETS, preset


def test_every_preset_names_its_source() -> None:
    for name, one in PRESETS.items():
        assert one.name == name
        assert one.source
        assert one.per_gpu > 0


def test_llama3_is_the_papers_table() -> None:
    llama = preset("llama3")
    assert sum(llama.classes.values()) == llama.failures == 419
    assert llama.gpus is not None
    assert 1 / (llama.per_gpu * llama.gpus) / 3600 == pytest.approx(3.0930787589498805)
    per_node_day = llama.per_gpu * 8 * 86400
    assert per_node_day == pytest.approx(3.79e-3, rel=1e-3)


def test_rsc_gives_the_papers_1_8_hours_at_16384() -> None:
    assert 1 / (preset("rsc1").per_gpu * 16_384) / 3600 == pytest.approx(1.8028846153846154)


def test_opt_restarted_every_fifteen_hours() -> None:
    opt = preset("opt175b")
    assert opt.gpus is not None
    assert 1 / (opt.per_gpu * opt.gpus) / 3600 == pytest.approx(14.933333333333334)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(UsageError) as raised:
        preset("gpt5")
    assert "llama3" in raised.value.hint
