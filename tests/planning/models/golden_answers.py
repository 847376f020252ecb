"""How the library answers each entry of tests/data/golden/plan.json, by the entry's id.

An entry whose id ends in a table's row (`000.table.900`) is answered by the longest prefix here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from typing import Any

from ftckpt.checkpoint.coverage import intersection
from ftckpt.extents import Box
from ftckpt.planning import rates, risk
from ftckpt.planning.models import (
    arithmetic,
    asynchronous,
    silent,
    storage,
    tiers,
    young_daly,
)
from ftckpt.planning.models.spot import CopyTier, Pattern
from ftckpt.planning.rates import DAY, HOUR

Answer = Callable[[dict[str, Any]], Any]


def _table(i: dict[str, Any]) -> list[Any]:
    found = young_daly.first_order(i["tau_s"], i["C_s"], i["M_s"])
    return [found.save, found.lost, found.waste, found.useful]


def _least_waste(save: float, mtbf: float) -> Any:
    return young_daly.outcome(young_daly.optimum(save, mtbf), save, mtbf).waste


def _asymmetry(i: dict[str, Any]) -> list[Any]:
    young = young_daly.young(i["C_s"], i["M_s"])
    return [
        young_daly.outcome(interval, i["C_s"], i["M_s"]).waste
        for interval in (young * i["f"], young / i["f"])
    ]


def _rules(save: float, mtbf: float = 1.0) -> list[Any]:
    young = young_daly.young(save, mtbf)
    return [
        young,
        young_daly.daly(save, mtbf),
        young_daly.optimum(save, mtbf),
        young_daly.first_order(young, save, mtbf).waste,
        _least_waste(save, mtbf),
        young_daly.outcome(young, save, mtbf).waste,
    ]


def _peak(value: Callable[[float], Any], near: float) -> float:
    """Return where a concave function is largest, from its values at three places."""
    step = near / 8
    low, middle, high = (float(value(near + k * step)) for k in (-1, 0, 1))
    return near + step * (low - high) / (2 * (low - 2 * middle + high))


def _wrong_and_right_step(i: dict[str, Any]) -> list[float]:
    # The page's useful time of a bulk is a parabola in tau; what counts is useful time per second.
    save, mtbf = i["C_s"], i["M_s"]
    parabola = _peak(lambda tau: tau * young_daly.first_order(tau, save, mtbf).useful, mtbf / 2)
    return [parabola, float(young_daly.young(save, mtbf))]


def _case_waste(i: dict[str, Any]) -> list[Any]:
    mtbf = i["M_s"]
    before = young_daly.first_order(7200, 660, mtbf).waste
    after = young_daly.first_order(360, 30, mtbf).waste
    return [before, after, young_daly.first_order(young_daly.young(30, mtbf), 30, mtbf).waste]


def _sweep(i: dict[str, Any]) -> list[list[Any]]:
    rows = []
    for hours in i["M_h"]:
        row = []
        for save in (90, 4):
            interval = young_daly.young(save, hours * HOUR)
            row += [interval / 60, young_daly.per_period(interval, save, hours * HOUR)]
        rows.append(row)
    return rows


def _sync(i: dict[str, Any]) -> list[Any]:
    interval = young_daly.young(i["C_s"], i["M_s"])
    saves = i["RUN_s"] / interval
    waste = young_daly.per_period(interval, i["C_s"], i["M_s"])
    return [interval / 60, waste, saves, saves * i["C_s"] / 60]


def _component_rates(i: dict[str, Any]) -> list[Any]:
    parts = [i["gpus"], i["hosts"], i["switches"]]
    return [rates.from_mtbf(hours * HOUR, count) * HOUR for count, hours in parts]


def _combined(i: dict[str, Any]) -> float:
    causes = [rates.Cause(str(n), rate / HOUR) for n, rate in enumerate(i["rates"])]
    return rates.combine(causes).mtbf / HOUR


def _async_period(i: dict[str, Any]) -> Any:
    """Answer an entry that gives the period from save to save instead of the work."""
    return asynchronous.outcome(
        i["P_s"] - i["s_s"], i["s_s"], i["M_s"], flush=i["F_s"],
        restart=i.get("R_s", 0), detect=i.get("D_s", 0),
    ).useful  # fmt: skip


def _slowed(i: dict[str, Any]) -> Any:
    return asynchronous.outcome(
        i["tau_work_s"], i["s_s"], i["M_s"], flush=i["F_s"], slowdown=i["a"],
        restart=i["R_s"], detect=i["D_s"],
    ).useful  # fmt: skip


def _two_tiers(i: dict[str, Any]) -> tuple[CopyTier, CopyTier]:
    return (
        CopyTier("near", i["C1_s"], i.get("R1_s", 0), i["p1"]),
        CopyTier("far", i["C2_s"], i.get("R2_s", 0), 1),
    )


def _two_tiers_first_order(i: dict[str, Any]) -> list[float]:
    found = tiers.first_order(_two_tiers(i), i["M_s"])
    return [found.gaps[1] / found.gaps[0], found.gaps[1], found.overhead]


def _two_tiers_exact(i: dict[str, Any]) -> Any:
    pattern = Pattern(_two_tiers(i), i["w_s"], (i["n"],))
    return tiers.outcome(pattern, i["M_s"], detect=i["D_s"]).useful


def _elastic(i: dict[str, Any]) -> list[float]:
    kept = arithmetic.options(i["gpus0"], i["gpus1"], i["batch"], i["lr"])[0]
    return [kept.per_gpu, kept.batch, kept.lr_linear]


def _elastic_batches(i: dict[str, Any]) -> list[float]:
    found = {o.name: o for o in arithmetic.options(64, i["gpus"], i["batch"], i["lr"])}
    up = found["batch-up"]
    return [
        i["batch"] / i["gpus"],
        up.batch,
        up.lr_linear,
        found["accumulate-full"].batch,
        found["accumulate"].batch,
    ]


def _hang(i: dict[str, Any]) -> list[Any]:
    hours = storage.gpu_hours(i["gpus"], i["minutes"] * 60)
    price = i["budget_usd"] / storage.gpu_hours(i["gpus"], i["weeks"] * 7 * DAY)
    return [hours, price, hours * price]


def _per_step(i: dict[str, Any]) -> list[Any]:
    # Failures per step and per second are two units of one rate, and give one number of steps.
    by_step = young_daly.young(i["tc_s"] / i["ts_s"], i["M_s"] / i["ts_s"])
    by_second = young_daly.young(i["tc_s"], i["M_s"]) / i["ts_s"]
    return [by_step, by_second]


def _bloom(i: dict[str, Any]) -> list[Any]:
    seconds = i["days"] * DAY
    saves = seconds / (i["ckpt_every_h"] * HOUR)
    return [saves, saves * i["save_s"] / HOUR, saves * i["save_s"] / seconds]


def _restarts(i: dict[str, Any]) -> list[float]:
    days = (date(2022, 1, 6) - date(2021, 11, 11)).days
    seen = rates.observed(i["restarts"], days * DAY)
    return [1 / seen.per_second / HOUR, i["ideal_days"] / days]


def _silent(i: dict[str, Any]) -> Any:
    return silent.first_order(i["V_s"], i["C_s"], i["ls_per_s"], i["lf_per_s"])


def _moved(i: dict[str, Any], nbytes: str, per_second: str) -> Any:
    return storage.transfer_seconds(i[nbytes], i[per_second])


def _nodes(i: dict[str, Any]) -> float:
    """Answer an entry on a rate per node and day, with eight GPUs in a node."""
    return float(1 / rates.from_daily(i["rate_per_node_day"], i["gpus"] / 8) / HOUR)


def _snapshot_and_write(i: dict[str, Any]) -> list[Any]:
    copy, write = _moved(i, "bytes", "pcie_Bps"), _moved(i, "bytes", "fs_Bps")
    return [copy, write, copy + write, (copy + write) / copy]


def _slow_storage(i: dict[str, Any]) -> list[Any]:
    found = storage.compare(i["S_GB"], i["ratio"], i["Bc_GBps"], i["B_GBps"])
    return [found.plain, found.pipelined]


def _shards(i: dict[str, Any]) -> list[list[int]]:
    old = [Box((rank,), (1,)) for rank in range(i["tp_old"])]
    wide = i["tp_old"] // i["tp_new"]
    new = [Box((rank * wide,), (wide,)) for rank in range(i["tp_new"])]
    return [[n for n, part in enumerate(old) if intersection(part, whole)] for whole in new]


def _spare_nodes(i: dict[str, Any]) -> int:
    least, most = (int(nodes) for nodes in i["nnodes"].split(":"))
    return most - least


ANSWERS: dict[str, Answer] = {
    "000.mtbf": lambda i: 1 / rates.from_mtbf(i["mtbf_gpu_days"] * DAY, i["n"]),
    "000.failures_55d": lambda i: risk.expected_failures(1 / i["M_s"], i["T_days"] * DAY),
    "000.llama3_mtbf": lambda i: (
        1 / rates.observed(i["interruptions"], i["days"] * DAY).per_second / HOUR
    ),
    "000.tau_young": lambda i: young_daly.young(i["C_s"], i["M_s"]),
    "000.waste_opt": lambda i: _table(i)[2],
    "000.table": _table,
    "000.exact": lambda i: young_daly.outcome(i["tau_s"], i["C_s"], i["M_s"]).useful,
    "000.tau_exact": lambda i: young_daly.optimum(i["C_s"], i["M_s"]),
    "000.tau_daly": lambda i: young_daly.daly(i["C_s"], i["M_s"]),
    "000.minwaste_exact": lambda i: _least_waste(i["C_s"], i["M_s"]),
    "000.state_bytes": lambda i: storage.state_bytes(i["P"], i["bytes_per_param"]),
    "000.footprint16": lambda i: storage.state_bytes(i["P"], 16),
    "000.C_from_bw": lambda i: _moved(i, "bytes", "bw_Bps"),
    "000.n_ckpt_22": lambda i: storage.written(1, i["tau_min"] * 60, i["T_days"] * DAY),
    "000.pb": lambda i: storage.written(i["bytes"], 1, i["n"]),
    "000.retention": lambda i: storage.kept(i["n"], i["keep_last"], i["every"]) * i["bytes"],
    "000.writers": lambda i: [
        storage.bandwidth(i["ranks"], i["nic_Bps"]),
        storage.bandwidth(i["ranks"], i["nic_Bps"]) / i["nic_Bps"],
    ],
    "000.scale_C": lambda i: young_daly.young(i["C_ratio"], 1) / young_daly.young(1, 1),
    "000.flatness": lambda i: (
        young_daly.first_order(i["f"] * young_daly.young(1, 1), 1, 1).waste
        / young_daly.first_order(young_daly.young(1, 1), 1, 1).waste
    ),
    "000.asym": _asymmetry,
    "000.dU_wrong": _wrong_and_right_step,
    "001.sync": _sync,
    "001.async.exact": lambda i: [
        young_daly.optimum(i["C_s"], i["M_s"]), _least_waste(i["C_s"], i["M_s"]),
    ],
    "001.case.tau": lambda i: young_daly.young(i["C_s"], i["M_s"]),
    # The cost at which first-order waste is least at a given interval: both its halves are equal.
    "001.case.C_implied": lambda i: (
        i["tau_s"] * young_daly.first_order(i["tau_s"], 0, i["M_s"]).lost
    ),
    "001.case.waste": _case_waste,
    "001.ex3.waste": lambda i: [
        young_daly.first_order(young_daly.young(i["C_s"], i["M_s"]), i["C_s"], i["M_s"]).waste,
        young_daly.per_period(young_daly.young(i["C_s"], i["M_s"]), i["C_s"], i["M_s"]),
        _least_waste(i["C_s"], i["M_s"]),
    ],
    "001.ex2.peer": lambda i: [
        young_daly.young(i["C_s"], i["M_s"]),
        young_daly.per_period(young_daly.young(i["C_s"], i["M_s"]), i["C_s"], i["M_s"]),
    ],
    "001.ex2.sweep": _sweep,
    "002.stress": lambda i: 1 / rates.from_mtbf(i["mtbf_h"] * HOUR, i["n"]),
    "002.interval": lambda i: young_daly.young(i["C_s"], HOUR / i["lambda_per_h"]),
    "002.async_100gb": lambda i: _moved(i, "bytes", "bw_Bps"),
    "002.ex1.rates": _component_rates,
    "002.ex1.mtbf": _combined,
    "002.ex2.tau": lambda i: young_daly.young(i["C_s"], i["M_s"]),
    "002.ex2.table": lambda i: _table(i)[:3],
    "002.ex3.times": _snapshot_and_write,
    "002.ex3.tau_sync": lambda i: young_daly.young(i["C_s"], i["M_s"]),
    "002.ex3.memory": lambda i: storage.staging_bytes(i["bytes"], 1, i["buffers"]),
    "002.ex3.async_exact": _async_period,
    "002.ex5.low": _slow_storage,
    "002.ex6": _elastic,
    "002.ex6.option2": _elastic_batches,
    "002.ex6.steps": lambda i: arithmetic.options(64, 48, 2048, 1e-3)[0].steps,
    "002.reshard": _shards,
    "003.bytes": lambda i: storage.state_bytes(i["P"], 14),
    "003.shard": lambda i: storage.staging_bytes(i["bytes"], i["writers"]),
    "003.snapshot": lambda i: _moved(i, "bytes", "pcie_Bps"),
    "003.tau": lambda i: young_daly.young(i["C_s"], i["M_s"]),
    "003.peer_read": lambda i: storage.transfer_seconds(i["bytes"], i["bits_per_s"] / 8),
    "003.async_tau": lambda i: [
        young_daly.young(i["C_s"], i["M_s"]), asynchronous.least_interval(i["F_s"]),
    ],
    "003.async_floor": _async_period,
    "004.first": lambda i: risk.time_to_first(rates.from_daily(i["p_day"], i["N"])) / DAY,
    "004.afr": lambda i: [
        risk.time_to_first(rates.from_afr(afr, i["N"])) / DAY for afr in i["afr"]
    ],
    "004.p_today_exact": lambda i: risk.probability_of_trials(i["p"], i["N"]),
    "004.run_prob": lambda i: [
        risk.expected_failures(rates.from_daily(i["p"], i["N"]), i["T_days"] * DAY),
        risk.probability_of_trials(i["p"], i["N"] * i["T_days"]),
    ],
    "004.hang_cost": _hang,
    "004.timeout_cost": lambda i: (
        storage.gpu_hours(i["gpus"], i["minutes"] * 60) * i["usd_per_gpu_h"]
    ),
    "004.cstar_dimension": _per_step,
    "004.load70": lambda i: _moved(i, "bytes", "bw_Bps"),
    "004.timeout_gain": lambda _: storage.gpu_hours(1, 8 * 60) / storage.gpu_hours(1, 2 * HOUR),
    "004.adam": lambda i: storage.state_bytes(i["P"], 4),
    "004.tiers": lambda i: (
        storage.transfer_seconds(1, i["s3_GBps"]) / storage.transfer_seconds(1, i["nvme_GBps"])
    ),
    "004.spot": lambda i: [i["usd"] * (1 - discount) for discount in i["discount"]],
    "004.elastic": _spare_nodes,
    "daly2006": lambda i: young_daly.daly(i["C_min"], i["M_min"]),
    "llama3.sum": lambda i: sum(i["counts"]),
    "rsc": _nodes,
    "bloom.overhead": _bloom,
    "bloom.volume": lambda i: storage.written(i["TB"], 3 * HOUR, DAY),
    "opt.bytes": lambda i: storage.written(i["bytes"], 1, i["files"]),
    "lab.young_daly": lambda i: [
        young_daly.young(i["C_min"], i["M_h"] * 60), young_daly.daly(i["C_min"], i["M_h"] * 60),
    ],
    "twolevel.fo": _two_tiers_first_order,
    "silent.fo": _silent,
    "yd_error": lambda i: _rules(i["C_over_M"]),
    "peer_ram": lambda i: [tiers.survival(i["N"], i["m"], lost) for lost in i["k"]],
    "async.slowdown": _slowed,
    "twolevel.exact": _two_tiers_exact,
    "opt.restarts": _restarts,
}  # fmt: skip


def answer_to(entry_id: str) -> Answer | None:
    """Return the answer with the longest name that `entry_id` begins with."""
    names = [name for name in ANSWERS if entry_id == name or entry_id.startswith(f"{name}.")]
    names += [name for name in ANSWERS if entry_id.startswith(f"{name}_")]
    return ANSWERS[max(names, key=len)] if names else None
