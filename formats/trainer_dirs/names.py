"""The names of the files and folders that a trainer puts into one directory (see `bundle`).

The files that trainers write last, and the signs by which each trainer is known.

A save without its last file did not finish, but only if that trainer wrote the save. One file name
does not show who did: many programs write `optimizer.pt`. So each row asks for two signs that do
not follow from each other, and all of them must be there.

Sources: `transformers/trainer.py` (`_save` writes `training_args.bin` with the weights, before
`_save_optimizer_and_scheduler`, `_save_rng_state` and, last, `trainer_state.json`);
`cosmos_rl/utils/checkpoint.py` (`save_checkpoint`: a marker of each rank since 2026, none before);
`olmo_core/train/checkpoint.py` (`_save_train_state`, then `_save_metadata` last).
The last files of the trainers in `nested` stand there, with the rest of their layouts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from ftckpt.errors import IncompleteError
from ftckpt.findings import Finding, finding
from ftckpt.formats.ranks.names import rank_file
from ftckpt.storage.state_files import parts_among, without_numbers

TRAINER = "the Hugging Face Trainer"
STATE = "trainer_state.json"
ARGUMENTS = "training_args.bin"


class Mark(NamedTuple):
    """What one trainer writes last.

    Attributes:
        trainer: its name.
        signs: patterns of names in the directory, a folder's with a slash; each must be there.
        last: the file that is written last; `{}` stands for a rank.
        of_ranks: pattern of the files of ranks that have such a file each, with the group `rank`;
            "" where one file is for all. Without any mark the save may be of a version that wrote
            none.
    """

    trainer: str
    signs: tuple[str, ...]
    last: str
    of_ranks: str = ""


_RNG = r"rng_state(?:_\d+)?\.pth"
_OF_FSDP = r"(?:pytorch_model_fsdp|optimizer)_\d+/"
MARKS = (
    # Whatever else the Trainer saves comes after its arguments.
    Mark(
        TRAINER,
        (
            re.escape(ARGUMENTS),
            rf"optimizer\.pt|scheduler\.pt|{_RNG}|global_step\d{{1,18}}/|{_OF_FSDP}",
        ),
        STATE,
    ),
    Mark(TRAINER, (r"scheduler\.pt", _RNG), STATE),
    # accelerate's folders, and the schedule as the Trainer spells it: accelerate's is a `.bin`.
    Mark(TRAINER, (_OF_FSDP, r"scheduler\.pt"), STATE),
    Mark(
        "cosmos-rl",
        (r"cosmos_config", r"extra_info_rank_\d{1,7}\.pth"),
        ".rank_{}_complete",
        r"(?:model|optimizer|scheduler|extra_info)_rank_(?P<rank>\d{1,7})\.pth",
    ),
)
# A script's own arguments, which it may save under the Trainer's name.
_OF_SCRIPT = b"argparse\nNamespace"


class MarkedSave(NamedTuple):
    """A save of a trainer that marks its end.

    Attributes:
        trainer: its name.
        lacks: the last file that is not there; "" if the save finished.
        marks: the last files that are there.
        beside: further files of the trainer.
        of_ranks: whether each rank has such a file.
    """

    trainer: str
    lacks: str
    marks: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    of_ranks: bool = False

    @property
    def notes(self) -> list[Finding]:
        """A warning if no rank has marked its end: versions before 2026 write no marks."""
        if self.marks or self.lacks:
            return []
        what = (
            f"no rank has marked the end of its save: {self.trainer} of 2026 does, and takes no"
            " save without; an older one does not"
        )
        return [finding("state-unknown", what)]

    def error(self) -> IncompleteError:
        """Return that it did not finish, as an error."""
        who = self.trainer
        if self.of_ranks:
            who = f"each rank of {who}"
        return IncompleteError(
            f"{self.lacks} is not there: {who} writes it last, so the save did not finish",
            hint="an earlier checkpoint is complete",
            kind="uncommitted",
            file=self.lacks,
        )


def marked(
    files: Collection[str], folders: Collection[str], head: Callable[[str, int], bytes]
) -> MarkedSave | None:
    """Return what the trainer of a directory's save marks; None if no trainer is shown.

    Args:
        files: the names of the files directly in it.
        folders: the names of the directories.
        head: reads up to the first bytes of a file.
    """
    for mark in MARKS:
        if not _shown(mark, files, folders, head):
            continue
        if not mark.of_ranks:
            there = mark.last in files
            return MarkedSave(mark.trainer, "" if there else mark.last, (mark.last,) * there)
        found = (re.fullmatch(mark.of_ranks, name) for name in files)
        ranks = sorted({int(match["rank"]) for match in found if match})
        own = {rank: mark.last.format(rank) for rank in ranks}
        held = tuple(name for name in own.values() if name in files)
        lacking = [name for name in own.values() if name not in files] if held else []
        beside = (name for name in files if any(re.fullmatch(s, name) for s in mark.signs))
        others = tuple(name for name in beside if not re.fullmatch(mark.of_ranks, name))
        return MarkedSave(mark.trainer, lacking[0] if lacking else "", held, others, True)
    return None


def _shown(
    mark: Mark,
    files: Collection[str],
    folders: Collection[str],
    head: Callable[[str, int], bytes],
) -> bool:
    """Say whether a directory has all signs of a trainer (for the arguments, see `marked`)."""
    names = [*files, *(f"{folder}/" for folder in folders)]
    if not all(any(re.fullmatch(sign, name) for name in names) for sign in mark.signs):
        return False
    arguments = re.escape(ARGUMENTS) in mark.signs
    return not (arguments and _OF_SCRIPT in head(ARGUMENTS, 4096))


# Models that a job trains others for: each is the model of its job.
TRAINED = ("actor", "policy", "generator", "student")
OPTIMIZER = re.compile(r"optimizer(?:_\d+)?\.(?:pt|bin)")
OTHER = re.compile(
    r"(?P<label>scheduler(?:_\d+)?|sampler(?:_\d+)?|dl_state_dict(?:_\d+)?|scaler|training_args"
    r"|custom_checkpoint_\d+)\.(?:pt|bin|pkl)"
)
RNG = re.compile(
    r"(?P<label>rng_state(?:_(?P<trainer>\d+))?\.pth|random_states_(?P<rank>\d+)\.pkl)"
)
FOLDER = re.compile(r"(?:pytorch_model_fsdp|optimizer)_\d+")
# NeMo 2: a torch_dist store, and what is needed to make the model and the trainer again.
WEIGHTS, CONTEXT = "weights", "context"
# verl with Megatron: a torch_dist store and side files, or stores and a list of them.
STORE, HUGGING_FACE, TRANSFORMER = "dist_ckpt", "huggingface", "transformer_config.json"
CONTENTS = "ckpt_contents.json"
_OWN = ("model", "optimizer", "extra")
_BESIDE = (f"{HUGGING_FACE}/", f"model/{HUGGING_FACE}/", "adapter_checkpoint/")
# DeepSpeed's tag: the Trainer's has the engine's step, accelerate's is a word. Beside it lie the
# tag's name, and scripts that DeepSpeed copies there with every save.
TAG = r"global_step(?P<step>\d{1,18})|pytorch_model(?:_\d{1,5})?"
POINTER = "latest"
SCRIPT = r"zero_to_\w+\.py"
# FSDP's gathered weights; the Trainer saves them a second time as model.safetensors.
FULL = "pytorch_model_fsdp.bin"
# accelerate's own files of ranks, where FSDP saves without torch's distributed checkpoints.
OF_RANK = re.compile(r"(?:pytorch_model_fsdp|optimizer)(?:_(?P<number>\d{1,5}))?_rank\d+\.bin")
# accelerate numbers the models and the optimizers that it prepared; the first has no number, or 0.
_OF_MODEL = (
    r"(?P<what>optimizer|model|pytorch_model(?:_fsdp)?)_(?P<number>[1-9]\d{0,4})"
    r"(?:_rank\d+\.bin|-\d+-of-\d+\.\w+|\.(?:bin|pt|safetensors)(?:\.index\.json)?)?"
)
_OF_FIRST = (
    r"(?:model|pytorch_model(?:_fsdp)?)(?:_0)?"
    r"(?:_rank\d+\.bin|-\d+-of-\d+\.\w+|\.(?:bin|pt|safetensors)(?:\.index\.json)?)?"
)
# What the Trainer saves beside the weights; other programs write files of these names too.
_OF_TRAINER = r"optimizer\.pt|scheduler\.pt|rng_state(?:_\d+)?\.pth"
# What accelerate alone writes; a program of one's own may write any one of the others.
_OF_ACCELERATE = r"random_states_\d+\.pkl"
_ALSO_OF_ACCELERATE = (
    r"(?P<what>optimizer|scheduler|sampler|dl_state_dict|custom_checkpoint)(?:_\d+)?\.(?:bin|pkl)"
)


def folder_of_store(files: Iterable[str], directories: Iterable[str]) -> str:
    """Return the folder with the one store of NeMo or verl; empty if there is none."""
    names, folders = set(files), set(directories)
    if {WEIGHTS, CONTEXT} <= folders:
        return WEIGHTS
    if STORE in folders and (HUGGING_FACE in folders or TRANSFORMER in names):
        return STORE
    return ""


def lists_stores(files: Iterable[str], directories: Iterable[str]) -> bool:
    """Say whether verl's list of contents lies beside the stores that it names."""
    return CONTENTS in set(files) and not set(_OWN).isdisjoint(directories)


def is_beside_store(name: str) -> bool:
    """Say whether verl wrote a file beside its stores."""
    return name in (TRANSFORMER, CONTENTS) or name.startswith(_BESIDE)


def is_state(name: str) -> bool:
    """Say whether a file holds state beside the weights: the optimizer's, the scheduler's, RNG."""
    return name == STATE or any(p.fullmatch(name) for p in (OPTIMIZER, OTHER, RNG))


def states_of_ranks(names: Iterable[str]) -> list[str]:
    """Return the files in which each rank keeps its optimizer, or its own state.

    AReaL saves verl's `optim_world_size_W_rank_R.pt` beside gathered weights. None where files of
    ranks may hold the model: then the weights beside them are an export. accelerate's are others.
    """
    files = [file for file in map(rank_file, names) if file is not None]
    if any(file.may_hold_model for file in files):
        return []
    return sorted(file.path for file in files if not OF_RANK.fullmatch(file.path))


def parts_of(files: Iterable[str], directories: Iterable[str]) -> tuple[str, ...]:
    """Return the names that every step of a series has; folders have a slash behind them.

    Other folders may be results of somebody's. A job that goes on with more ranks, more shards or a
    newer library saves the same under names with a number or without: `rng_state.pth`,
    `rng_state_0.pth`, and the weights.
    """
    found = {re.sub(r"[-_]#(?:-of-#)?\.", ".", name) for name in parts_among(files)}
    folders = [n for n in directories if FOLDER.fullmatch(n) or re.fullmatch(TAG, n)]
    found = {"model.safetensors" if one == "pytorch_model.bin" else one for one in found}
    return tuple(sorted(found | {without_numbers(name) + "/" for name in folders}))


def further_models(names: Iterable[str]) -> frozenset[int]:
    """Return the numbers of the models after the first, by the files and folders of weights."""
    found = (re.fullmatch(_OF_MODEL, name) for name in names)
    return frozenset(int(m["number"]) for m in found if m and m["what"] != "optimizer")


def model_of(name: str, models: Collection[int]) -> str:
    """Return the component of a file or folder that is numbered as a further model's; or "".

    An optimizer is the model's of its number where there are such weights: accelerate saves FSDP's
    so, and prepares models and optimizers in one order. Else it is one more optimizer.
    """
    match = re.fullmatch(_OF_MODEL, name)
    if match is None:
        return ""
    number = int(match["number"])
    return f"model_{number}" if number in models else f"{match['what']}_{number}"


def fits_here(form: str, names: Iterable[str]) -> bool:
    """Say whether a format reads weights among the files of a trainer's directory.

    Rank files of other trainers have their state inside, and files beside them mean other things.
    """
    return form != "ranks" or any(OF_RANK.fullmatch(name) for name in names)


def without_weights(state: Iterable[str]) -> bool:
    """Say whether state files are of one checkpoint, whatever lies beside them."""
    names = set(state)
    ranked = any(OPTIMIZER.fullmatch(n) for n in names) and any(RNG.fullmatch(n) for n in names)
    return ranked or (STATE in names and any(re.fullmatch(_OF_TRAINER, n) for n in names))


def by_accelerate(names: Iterable[str]) -> bool:
    """Say whether two signs show accelerate: its random states, its folders, or two of its files.

    Args:
        names: of files and folders at the top of the directory.
    """
    own = False
    words: set[str] = set()
    for name in names:
        if match := re.fullmatch(_ALSO_OF_ACCELERATE, name):
            words.add(match["what"])
        elif (
            re.fullmatch(_OF_ACCELERATE, name)
            or OF_RANK.fullmatch(name)
            or FOLDER.fullmatch(name)
            or name == FULL
        ):
            own = True
    return own or len(words) > 1


# Files that count up from one without a number (custom objects: from 0); `sampler` may skip one.
_COUNTED = (
    r"(?:(?P<word>optimizer|scheduler)(?:_(?P<number>\d{1,5}))?\.(?:bin|pt)"
    r"|(?P<custom>custom_checkpoint)_(?P<object>\d{1,5})\.pkl)"
)
_WORDS = ("optimizer", "scheduler")


def gaps(names: Iterable[str]) -> Iterator[Finding]:
    """Yield the files whose successors are there: `optimizer.bin` beside `optimizer_1.bin`."""
    held: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if match := re.fullmatch(_COUNTED, name):
            series = match["word"] or match["custom"], name.rpartition(".")[2]
            held.setdefault(series, set()).add(int(match["number"] or match["object"] or 0))
    for (word, suffix), numbers in sorted(held.items()):
        for number in sorted(set(range(max(numbers))) - numbers):
            bare = word in _WORDS and not number
            name = f"{word}.{suffix}" if bare else f"{word}_{number}.{suffix}"
            what = f"{name} is missing: the files of this name count to {max(numbers)}"
            yield finding("missing-file", what, file=name)


def lost_models(names: Collection[str]) -> Iterator[Finding]:
    """Yield the models whose successors are there, and warn of optimizers without a model.

    accelerate numbers models without a gap. A model may have several optimizers, so an optimizer
    whose model is not there proves no loss.
    """
    models = set(further_models(names))
    last = max(models, default=0)
    if last and any(re.fullmatch(_OF_FIRST, name) for name in names):
        models.add(0)
    for number in sorted(set(range(last)) - models):
        what = "the first model's" if not number else f"model_{number}'s"
        yield finding("missing-file", f"{what} weights are missing: those of model_{last} are here")
    found = (re.fullmatch(_OF_MODEL, name) for name in names)
    for number in sorted({int(m["number"]) for m in found if m and m["what"] == "optimizer"}):
        if number > last:
            yield finding(
                "state-unknown",
                f"optimizer_{number} is here and model_{number} is not: it was lost, or one model "
                "has several optimizers, and nothing records which",
            )


def not_there(
    names: Iterable[str], *, trainer: bool, weights: bool, tag: bool = False
) -> Iterator[Finding]:
    """Yield a warning of each kind of state that is saved with what is there, and is not.

    Nothing is said of a program that is neither the Trainer nor accelerate.

    The Trainer saves the optimizer, the scheduler and random states together, or none of them;
    accelerate saves random states always, and no schedule without its optimizer. Trainers that
    replace these methods may save less, and so it is not damage.

    Args:
        names: at the top of the directory.
        trainer: whether the Trainer wrote it, and not accelerate alone.
        weights: whether any part holds the model.
        tag: whether DeepSpeed keeps optimizer and schedule, in a tag.
    """
    names = set(names)
    if not (trainer or tag or by_accelerate(names)):
        return
    held = {
        "optimizer": tag
        or any(
            p.fullmatch(n)
            for n in names
            for p in (OPTIMIZER, FOLDER, OF_RANK)
            if n.startswith("optimizer")
        ),
        "scheduler": tag or any(n.startswith("scheduler") and OTHER.fullmatch(n) for n in names),
        "rng": any(RNG.fullmatch(n) for n in names),
    }
    if trainer:
        asked = list(held) if any(held.values()) else []
    else:
        files = any(is_state(n) and not n.startswith("training_args") for n in names)
        asked = ["rng"] * (files or tag) + ["optimizer"] * held["scheduler"]
    who = "the Trainer" if trainer else "accelerate"
    if held["optimizer"] and not weights:
        what = f"the model is not there: {who} saves it with its optimizer, and nothing records it"
        yield finding("state-unknown", what)
    for word in asked:
        if not held[word]:
            name = _EXAMPLES[trainer][word]
            what = f"{name} is not there: {who} saves it with what is here, and nothing records it"
            yield finding("state-unknown", what, file=name)


_EXAMPLES = {
    True: {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "rng": "rng_state.pth"},
    False: {"optimizer": "optimizer.bin", "scheduler": "scheduler.bin",
            "rng": "random_states_0.pkl"},
}  # fmt: skip
