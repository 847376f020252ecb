"""The components of a training state, and the names under which trainers store them.

One table, as data: the resume check matches it against a checkpoint's names, and a replay's audit
explains a difference by it. The consequences come from ablations of a restart: one component left
out, and the first step at which the run differs from an uninterrupted one.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class StateRow(NamedTuple):
    """One row of the table.

    Attributes:
        key: stable name, for JSON and for `replay`.
        title: for people.
        consequence: the effect on a restart without it.
        known: matches names that show it.
        hint: matches names that may hold it or stand in for it: cannot tell.
        per_rank: whether every rank has its own.
    """

    key: str
    title: str
    consequence: str
    known: re.Pattern[str] | None = None
    hint: re.Pattern[str] | None = None
    per_rank: bool = False


def _names(*alternatives: str) -> re.Pattern[str]:
    # A name matches by whole segments, so that `scheduler_progress` is not a scheduler.
    return re.compile(rf"(?:^|[./:])(?:{'|'.join(alternatives)})(?=[./:]|$)", re.IGNORECASE)


def _rng(*alternatives: str, whose: str) -> re.Pattern[str]:
    # `cpu` and `python` mean a generator only below something that speaks of random numbers, or
    # with its word: `torch_rng_state`.
    leaf = "|".join(alternatives)
    below = rf"(?:rng|random|seed|generator).*?[./:](?:{leaf})"
    own = rf"(?:^|[./:])(?:{whose})_(?:rng|random)(?:_states?)?(?:_all)?"
    return re.compile(rf"(?:{below}|{own})(?=[./:]|$)", re.IGNORECASE)


_PART = r"(?:[./:](?:(?:dp_|global_)?rank_?\d+|shard_[\d._]+|\d+))?"
# A rank's file of a trainer's state whose inside is not known: it may hold its generators too.
_OF_RANK = r"(?:extra|client|trainer)_state[-_]rank[-_]?\d+\.pt$"
_BLIND_RNG = (
    rf"(?:rng|rng_states?|random|random_states?)(?:[-_](?:rank[-_]?)?\d+)?"
    rf"(?:\.(?:pkl|pth|pt))?{_PART}$",
    _OF_RANK,
)
_BLIND = (
    r"common_state(?:/shard_[\d._]+)?$",
    r"common\.pt$",
    r"(?:extra|client|trainer)_state(?:\.pt)?$",
    _OF_RANK,
)

WEIGHTS = StateRow(
    "weights",
    "model weights",
    "Nothing to resume: the run starts from fresh weights, and the loss jumps back at once.",
)
MOMENTS = StateRow(
    "moments",
    "optimizer moments",
    "Adam restarts from zero moments: the first update has full step size in every coordinate, so"
    " weights differ after one step and the loss after two, often as a visible spike.",
)
MASTERS = StateRow(
    "masters",
    "master weights",
    "Updates smaller than half a unit of the 16-bit weights are lost: the restart rounds what the"
    " optimizer had accumulated in 32 bits.",
)
# What nothing but tensors can hold.
HELD_BY_TENSORS = frozenset({WEIGHTS.key, MOMENTS.key, MASTERS.key})
STEP = StateRow(
    "step",
    "step counter",
    "The trainer counts from zero: schedule, logging, retention and the end of the run are wrong.",
    _names(
        r"global_steps?", r"(?:train|training)_state[./:](?:global_)?step", r"iteration",
        r"trainer_state(?:\.json)?[./:]global_step", r"step", r"steps", r"num_steps", r"curr_step",
        r"batch_idx_train", r"iter_num", r"num_updates", r"current_step", r"n_iter", r"step_count",
        r"timestamp[./:]batch", r"(?:global_)?train_steps?",
    ),
    _names(*_BLIND, r"epoch", r"(?:total_)?(?:env|agent)_steps?"),
)  # fmt: skip
TABLE: tuple[StateRow, ...] = (
    WEIGHTS,
    MOMENTS,
    MASTERS,
    StateRow(
        "scheduler",
        "learning-rate schedule",
        "The learning rate starts its schedule again: warm-up is repeated or decay is forgotten;"
        " weights differ from the second step on.",
        _names(
            r"lr_schedulers?(?:_states?)?(?:_dict)?(?:_\d+)?", r"schedulers?(?:_states?)?(?:_dict)?"
            r"(?:_\d+)?(?:\.(?:pt|bin))?", r"opt_param_scheduler", r"lr_sched(?:uler)?",
        ),
        _names(*_BLIND),
    ),
    StateRow(
        "rng-python",
        "RNG of Python",
        "Shuffling and augmentation done with `random` repeat or jump; the first batch drawn with"
        " it differs.",
        _rng(
            r"python", r"py", r"random", r"random_rng_state", r"random_state", r"rng_py",
            r"py(?:thon)?_(?:rng_)?state", r"python_rng", r"python_random_state", r"random_seed",
            whose=r"py(?:thon)?",
        ),
        _names(*_BLIND_RNG),
        per_rank=True,
    ),
    StateRow(
        "rng-numpy",
        "RNG of NumPy",
        "Batches sampled with NumPy differ from the first step on.",
        _rng(
            r"numpy", r"np", r"np_rng_state", r"rng_np", r"numpy_(?:rng_)?(?:random_)?state",
            r"numpy_rng", r"numpy_random_seed", r"np_random_state",
            whose=r"np|numpy",
        ),
        _names(*_BLIND_RNG),
        per_rank=True,
    ),
    StateRow(
        "rng-torch",
        "RNG of torch (CPU)",
        "Dropout, initialisation and the samplers' seeds differ: gradients and loss part ways at"
        " the first step.",
        _rng(
            r"torch", r"cpu", r"torch_rng_state", r"cpu_rng_state", r"rng_torch", r"torch_cpu",
            r"torch_state", r"torch_rng", r"torch_manual_seed", r"torch_random_state",
            whose=r"torch|cpu|torch_cpu",
        ),
        _names(*_BLIND_RNG),
        per_rank=True,
    ),
    StateRow(
        "rng-cuda",
        "RNG of the device",
        "Dropout on the device draws other masks: gradients and loss part ways at the first step.",
        _rng(
            r"(?:torch_)?(?:cuda|gpu|xpu|npu|hpu|mlu|musa)(?:_rng)?(?:_states?)?(?:_all)?",
            r"device", r"device_rng_state", r"rng_tracker_states", r"rng_cuda",
            r"torch_(?:cuda|xpu|npu|hpu|mlu|musa)_manual_seed", r"cuda_random_state",
            whose=r"(?:torch_)?(?:cuda|gpu|xpu|npu|hpu|mlu|musa)",
        ),
        _names(*_BLIND_RNG),
        per_rank=True,
    ),
    StateRow(
        "data",
        "dataloader position",
        "Samples are seen again or never: the first batch differs, and an epoch is silently longer"
        " or shorter.",
        _names(
            r"(?:train_|stateful_)?data_?loaders?(?:_states?)?(?:_dict)?(?:_\d+)?(?:\.(?:pt|bin))?",
            r"train_dataloader_dprank\d+\.pt", r"dl_state_dict(?:_\d+)?(?:\.bin)?",
            r"data_(?:iterator|position|cursor|state)", r"dataset_state", r"data\.pt",
            r"sampler(?:_\d+)?(?:\.bin)?", r"data_sampler", r"consumed_(?:train_)?samples",
        ),
        _names(
            *_BLIND, r"global_samples", r"batch_progress", r"args",
            r"trainer_state(?:\.json)?[./:](?:epoch|global_step)",
            r"(?:train_state[./:])?(?:tokens|samples|epoch)(?:_seen)?",
        ),
    ),
    STEP,
    StateRow(
        "scaler",
        "loss scaler",
        "With float16 the scale starts again: no difference is seen until the next overflow, then"
        " steps are skipped that the first run took.",
        _names(
            r"(?:grad_|loss_|amp_)?scaler(?:_states?)?(?:_dict)?(?:\.pt)?",
            r"(?<!args[.:/])loss_scale",
            r"amp", r"dynamic_loss_scale", r"MixedPrecision",
        ),
        _names(*_BLIND),
    ),
)  # fmt: skip


_RATES = re.compile(
    r"(?:^|[._])(?:_last_lr|base_lrs?|initial_lr|(?:max_|min_)?lr|learning_rate)(?:\.\d+)?$"
)
_SETTINGS = re.compile(
    r"(?:^|[./:])(?:args|(?:adapter_|ds_)?config|hyper_parameters|param_groups)(?=[./:]|$)"
)
# What a job was told is not what it has reached: `cfg.lr_scheduler` names a class.
_TOLD = re.compile(
    r"(?:^|[./:])(?:args|cfg|hparams|hyper_parameters|(?:\w+_)?config|training_args|opts|options)"
    r"[./:]",
    re.IGNORECASE,
)


def about(name: str) -> tuple[str, str]:
    """Return which part of the training state a field is: a stable key, and words for a person."""
    if _RATES.search(name):
        return "learning-rate", "learning rate"
    if re.search(r"(?:^|[./:])args[./:]", name):  # what a job was told is not what it has reached
        return "settings", "settings"
    for row in TABLE:
        if row.known is not None and row.known.search(name):
            return row.key, row.title
    if _SETTINGS.search(name):
        return "settings", "settings"
    return "other", "other state"


def is_setting(name: str) -> bool:
    """Return whether a field lies below what a job was told: arguments, a configuration."""
    return _TOLD.search(name) is not None
