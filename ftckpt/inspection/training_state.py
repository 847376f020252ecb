"""The components of a training state, and the names under which trainers store them.

One table, as data: the resume check matches it against a checkpoint's names, and a replay's audit
explains a difference by it. The consequences come from ablations of a restart: one component left
out, and the first step at which the run differs from an uninterrupted one.

Recognise the components of a training state by content, whatever their names are.

The trainer chooses names: `py`, `sched`, `rng.rank_0`, `amp_scaler` of a job without mixed
precision. The content is fixed: Python's generator is a version, 625 numbers and a cached deviate;
torch's is 5,056 bytes; a schedule keeps `last_epoch` and its rates. So content shows a component
that no known name shows, and that a known name stands for nothing. While some content is not
understood, or was not read, no component is known to be absent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.steps import StepRole, role_of
from ftckpt.errors import FtckptError, UnavailableError
from ftckpt.own_files import is_own
from ftckpt.storage.state_files import is_text_of_state, may_hold_tensors


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
# A count below an average's name or beside a generator's state is that object's own: EMA updates,
# or accelerate's calls in one process (`random_states_0.step`, which is 0 after many a trainer).
_COUNTS_ITSELF = (
    r"(?:ema|averag\w*|(?:rng|random)_states?(?:_\d+)?)(?:\.pkl)?[./:]"
    r"(?:steps?|num_updates)"
)
_STEP = re.compile(
    rf"^(?!.*(?:^|[./:]){_COUNTS_ITSELF}$).*?"
    + _names(
        r"global_steps?",
        r"(?:train|training)_state[./:](?:global_)?step",
        r"iteration",
        r"trainer_state(?:\.json)?[./:]global_step",
        r"step",
        r"steps",
        r"num_steps",
        r"curr_step",
        r"batch_idx_train",
        r"iter_num",
        r"num_updates",
        r"current_step",
        r"n_iter",
        r"step_count",
        r"timestamp[./:]batch",
        r"(?:global_)?train_steps?",
    ).pattern,
    re.IGNORECASE | re.DOTALL,
)
STEP = StateRow(
    "step",
    "step counter",
    "The trainer counts from zero: schedule, logging, retention and the end of the run are wrong.",
    _STEP,
    _names(*_BLIND, r"epoch", r"(?:total_)?(?:env|agent)_steps?",
           _COUNTS_ITSELF),
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


class StateValue(NamedTuple):
    """One value of the non-tensor state, and what it plainly is.

    Attributes:
        name: path in the trainer's state, joined by dots, without the rank.
        rank: whose it is, where each rank has its own.
        form: `integer`, `number` (also a few of them in a list), `text` (also True), `empty` (None,
            and containers with nothing in them), the key of a row of the table that it is by
            itself (`rng-python`, `scheduler`), or "" for anything else.
    """

    name: str
    rank: int | None
    form: str


Contents = Callable[[Checkpoint, Collection[str]], Iterable[StateValue | FtckptError]]
"""Reads objects of a checkpoint, by name, as leaves; what cannot be read is an answer too.

How state is stored is the formats' knowledge.
"""

# How many objects are read of one name that all ranks have, and in all: each can be a request.
_RANKS_READ, _MOST_READ = 4, 256
# Names of which one alone, and names of which one of each set, show a component below one parent:
# of schedules of torch, mmengine, Megatron, timm, SpeechBrain; torch's GradScaler, apex, DeepSpeed;
# loaders and samplers of torchdata, fairseq, OLMo, Mosaic's streaming; NumPy's bit generators.
_ALONE: dict[str, frozenset[str]] = {
    "scheduler": frozenset({"base_lrs", "_last_lr", "lr_lambdas"}),
    "scaler": frozenset({"_growth_tracker"}),
    "data": frozenset(
        {
            "_sampler_iter_yielded", "_num_yielded", "_sampler_iter_state", "_iterator_finished",
            "_steps_since_snapshot", "iterations_in_epoch", "batches_processed", "sample_in_epoch",
            "dataset_fingerprint", "samples_seen", "consumed_samples", "next_sample",
            "last_micro_batch_access_index",
        }
    ),
}  # fmt: skip
_TOGETHER: tuple[tuple[str, frozenset[str], frozenset[str]], ...] = (
    (
        "scheduler",
        frozenset({"last_epoch", "_step_count", "last_step", "_global_step", "n_steps", "num_steps",
                   "last_batch_iteration", "num_bad_epochs", "t_in_epochs"}),
        frozenset({"_step_count", "base_values", "_last_value", "max_lr", "min_lr", "min_lrs",
                   "current_lr", "T_max", "eta_min", "gamma", "milestones", "_milestones",
                   "total_steps", "warmup_steps", "lr_warmup_steps", "lr_decay_steps", "patience",
                   "param_group_field", "_schedulers", "step_size", "factor", "base_lr",
                   "end_factor", "warmup_num_steps", "max_lrs"}),
    ),
    ("scaler", frozenset({"scale", "_scale"}),
     frozenset({"growth_factor", "growth_interval", "backoff_factor"})),
    ("scaler", frozenset({"cur_scale"}), frozenset({"cur_iter"})),
    ("scaler", frozenset({"loss_scale"}), frozenset({"unskipped", "scale_factor"})),
    ("rng-numpy", frozenset({"bit_generator"}), frozenset({"state"})),
)  # fmt: skip
# Bytes of a generator's state as a tensor of uint8: torch's on the processor, CUDA's.
GENERATORS = {5056: "rng-torch", 16: "rng-cuda"}
# Components that one whole number can hold; no number is a generator's state.
HELD_BY_A_NUMBER = frozenset({"data", "step"})
_NO_COMPONENT = frozenset({"text", "number", "empty"})
_NOTHING = frozenset({"text", "empty"})
# Part of the optimizer, which the resume check judges by the tensors; Megatron-FSDP's is last.
GROUPS = re.compile(r"(?:^|[./:])param_(?:groups?|to_group_meta)(?=[./:]|$)")
_RANK = re.compile(r"(?a)(rank[_-]?)\d+")
_NO_STATE = re.compile(r"(?:^|/)(?:pre)?tokenizer[^/]*$")


@dataclass
class Found:
    """What the content of a checkpoint shows.

    Attributes:
        shown: key of a row of the table -> names of what is that, by its content.
        unknown: names of what was not understood or not read, and so may be anything.
        numbers: names of whole numbers that stand for something: a step, a position in the data.
        texts: small files that were not read, and may hold any state but tensors.
        names: of all that was read, with the rank in front.
        read: the objects that were read.
    """

    shown: dict[str, list[str]] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    numbers: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    read: set[str] = field(default_factory=set)
    _seen: set[str] = field(default_factory=set)
    _full: set[str] = field(default_factory=set)

    def hollow(self, name: str) -> bool:
        """Return whether a name was read and has nothing below it but text and None."""
        plain = _plain(name)
        return plain in self._seen and plain not in self._full

    def of(self, name: str) -> set[str]:
        """Return the rows that the content of a name, or of what lies around it, shows."""
        plain = _plain(name)
        return {
            key
            for key, names in self.shown.items()
            for one in map(_plain, names)
            if plain == one or plain.startswith(f"{one}.")
        }

    def see(self, leaf: StateValue) -> None:
        """Remember a value that was read."""
        self.names.append(_full(leaf))
        for name in {_full(leaf), leaf.name}:
            for place in (*(parent for parent, _ in _steps(name)), name):
                self._seen.add(place)
                if leaf.form not in _NOTHING:
                    self._full.add(place)


def look(checkpoint: Checkpoint, contents: Contents) -> Found:
    """Read the non-tensor state of a checkpoint and return what its content shows.

    Of ranks' objects of one name a few are read, and the others are taken to be alike.

    Raises:
        UnavailableError: storage failed, which says nothing of what a checkpoint holds.
    """
    found = Found()
    read, alike, unread = _choose(checkpoint)
    found.read = {*read, *(name for names in alike.values() for name in names)}
    leaves: list[StateValue] = []
    for leaf in contents(checkpoint, read):
        if isinstance(leaf, UnavailableError):
            raise leaf
        if isinstance(leaf, FtckptError):
            unread.append(leaf.tensor or leaf.file or "what cannot be read")
            found.read.discard(unread[-1])
        else:
            leaves.append(leaf)
            found.see(leaf)
    _show(checkpoint, leaves, found)
    for one, others in alike.items():
        for key in found.of(one):
            found.shown[key] += others
    strays = list(_strays(checkpoint))
    held = [n for n in strays if _may_be_state(n) and not _NO_STATE.search(n)]
    found.unknown = [*unread, *checkpoint.unread, *held]
    _keep_unknown(checkpoint, leaves, found)
    found.texts = [n for n in strays if is_text_of_state(n)]
    return found


def _choose(checkpoint: Checkpoint) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """Return the objects to read, those taken to be like one of them, and those left out."""
    families: dict[str, list[str]] = {}
    for name in checkpoint.objects:
        if not GROUPS.search(name):
            families.setdefault(_RANK.sub(r"\1*", name), []).append(name)
    read: list[str] = []
    alike: dict[str, list[str]] = {}
    unread: list[str] = []
    # What no name explains is read first.
    for names in sorted(families.values(), key=lambda names: about(names[0])[0] != "other"):
        chosen = names[:_RANKS_READ]
        if len(read) + len(chosen) > _MOST_READ:
            unread += names[:1]
            continue
        read += chosen
        if names[_RANKS_READ:]:
            alike[chosen[0]] = names[_RANKS_READ:]
    return read, alike, unread


def _may_be_state(name: str) -> bool:
    return may_hold_tensors(name) or name.endswith(".npy")


def _strays(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the files beside a checkpoint that its format does not open."""
    members = set(checkpoint.members())
    if members:
        yield from (n for n in checkpoint.source.entries if n not in members and not is_own(n))


def _show(checkpoint: Checkpoint, leaves: Sequence[StateValue], found: Found) -> None:
    shown = found.shown
    below: dict[str, set[str]] = {}
    for leaf in leaves:
        name = _full(leaf)
        if GROUPS.search(name) or is_setting(name):
            continue
        if "-" in leaf.form or leaf.form in ("scheduler", "scaler", "data"):
            shown.setdefault(leaf.form, []).append(name)
        elif leaf.form in ("integer", "number") and role_of(name) is StepRole.ITERATION:
            shown.setdefault("step", []).append(name)
        for parent, child in _steps(name):
            below.setdefault(parent, set()).add(child)
    for info in checkpoint.tensors.values():
        if info.dtype.name == "uint8" and info.component not in ("model", "optimizer", "ema"):
            key = GENERATORS.get(info.nbytes)
            if key and len(info.shape) == 1:
                shown.setdefault(key, []).append(info.key)
    for parent, children in below.items():
        for key in _shown_by(children):
            shown.setdefault(key, []).append(parent)
    if not checkpoint.tensors:  # a file of its own may hold a component and nothing else
        tops = {leaf.name.partition(".")[0]: leaf.name for leaf in leaves}
        for key in _shown_by(set(tops)):
            shown.setdefault(key, []).append(next(iter(tops.values())))


def _shown_by(names: set[str]) -> Iterator[str]:
    """Yield the keys of the components that names side by side show."""
    found = {key for key, alone in _ALONE.items() if alone & names}
    found |= {
        key
        for key, first, second in _TOGETHER
        if any((names - {one}) & second for one in first & names)
    }
    yield from sorted(found)


def _keep_unknown(checkpoint: Checkpoint, leaves: Iterable[StateValue], found: Found) -> None:
    """Add the names of unknown content, and of whole numbers that stand for something."""
    used = {name for names in found.shown.values() for name in names}
    for leaf in leaves:
        name = _full(leaf)
        if any(parent in used for parent, _ in _steps(name)) or name in used:
            continue
        if about(leaf.name)[0] != "other" or GROUPS.search(name):
            continue
        if leaf.form == "integer":
            found.numbers.append(name)
        elif leaf.form not in _NO_COMPONENT:
            found.unknown.append(name)
    weights = {(t.name, t.shape) for t in checkpoint.tensors.values() if t.component == "model"}
    found.unknown += [
        info.key for info in checkpoint.tensors.values()
        if info.component.startswith("extra") and info.key not in used
        and about(info.key)[0] == "other" and (info.name, info.shape) not in weights
    ]  # fmt: skip
    found.unknown = list(dict.fromkeys(found.unknown))
    found.numbers = list(dict.fromkeys(found.numbers))


def _plain(name: str) -> str:
    return name.replace(":", ".").replace("/", ".").removeprefix("extra.")


def _full(leaf: StateValue) -> str:
    return leaf.name if leaf.rank is None else f"rank_{leaf.rank}.{leaf.name}"


def _steps(name: str) -> Iterator[tuple[str, str]]:
    """Yield each prefix of a name with its next part: (`a.b`, `c`)."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        yield ".".join(parts[:count]), parts[count]
