"""Steps of trainers whose store lies in a folder, with files of the same save beside it.

    step-3/weights/                        xtuner: a DCP store
    step-3/dataloader, lr_scheduler        torch.save files without a suffix
    step-3/train_state.json                written after them
    step_3/trainer/                        prime-rl: a DCP store
    step_3/orchestrator/progress.pt        of the process that makes the rollouts
    iter_0000003/model/, optimizer/, lr_scheduler/    miles with FSDP: three DCP stores
    iter_0000003/rng.pt, meta.json         the second is written last (since 2026: rng_rank_0.pt)
    iter_0000003/adapter/                  miles with LoRA: a PEFT adapter
    iter_0000003/adapter/training_state_rank0.pt, adapter_megatron_rank0.pt    of each rank
    iter_0000003/adapter/optimizer_param_state_rank0_optimizer0.pt    gathered
    iter_0000003/adapter/training_state_named_tp0_pp0_dp0.pt, adapter_dp_invariant_tp0_pp0.pt
    global_step_3/actor/dcp_checkpoint/    RLinf: a DCP store
    global_step_3/actor/local_shard_checkpoint/    in its place: one file a rank
    global_step_3/actor/iter_0000003/      in its place: Megatron's store, with its tracker
    global_step_3/actor/model_state_dict/full_weights.pt    the weights a second time
    global_step_3/actor/sac_components/    SAC: a temperature, a target model, replay buffers
    global_step_3/actor/actor_policy/, critic/, value/, iql_components/    IQL: a role each
    global_step_3/critic/                  the same of a critic
    global_step_3/data/data.pt             the position in the data
    step3/model_and_optim/                 OLMo-core: a DCP store
    step3/train/rank0.pt                   of each rank, written before the store
    step3/.metadata.json                   written last; config.json is the run's

Sources, of 2026: xtuner/v1/train/trainer.py (`_maybe_save_dcp`); prime_rl/trainer/ckpt.py and
prime_rl/orchestrator/ckpt.py; miles/backends/fsdp_utils/checkpoint.py and
miles/backends/megatron_utils/lora_utils.py (`save_lora_checkpoint`); of RLinf
hybrid_engines/fsdp/strategy/base.py, hybrid_engines/megatron/megatron_model_manager.py
(`save_checkpoint`), runners/reasoning_runner.py, workers/actor/fsdp_{sac,iql}_policy_worker.py;
olmo_core/train/checkpoint.py (`Checkpointer.save`; `dir_is_checkpoint` asks for all three).

DeepSpeed's tag inside a trainer's directory: which folder it is, and what names it.

Sources: `deepspeed/runtime/engine.py` of DeepSpeed 0.19 (`save_checkpoint` writes `latest` after
the tag; `load_checkpoint` without a tag begins there);
`transformers/integrations/deepspeed.py` (`deepspeed_load_checkpoint`, which names no tag);
`accelerate/accelerator.py` (`save_state`: the tag is `pytorch_model`, and loading names it).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint
from ftckpt.discovery.recognise import Listing
from ftckpt.errors import CorruptError, UnsupportedError
from ftckpt.findings import Finding, finding, listed
from ftckpt.formats.deepspeed.names import deepspeed_files
from ftckpt.own_files import is_own
from ftckpt.storage.source import Source

from .names import POINTER, TAG

_DCP, _SHARDS = "dcp_checkpoint", "local_shard_checkpoint"
_OF_DCP = r"\.metadata(?:\.tmp)?|__\d+_\d+\.distcp"
_ITERATION = r"iter_\d{7,10}"
_ROLES = ("actor", "critic")
_OF_IQL = ("actor_policy", "critic", "value")


class StoreFolder(NamedTuple):
    """One of the folders that hold tensors.

    Attributes:
        place: the folder.
        model: what its model is called beside the trained one; "" for that one.
        beside: the folder whose `Nest.copies` are of its weights, and a slash; "" for the step.
    """

    place: str
    model: str = ""
    beside: str = ""


class Nest(NamedTuple):
    """How one trainer lays a step out.

    `re` compiles the patterns when they are first used: few commands meet such a trainer.

    Attributes:
        trainer: its name.
        stores: folders with a store: the trained model's first.
        state: names of torch.save files that belong to the step.
        copies: names of files with the weights of the store before them, written a second time.
        beside: names of other files that belong to it.
        last: the file that is written last; "" for the store's own marker.
        models: names of torch.save files with a further model, of each rank the same: `name` is
            what it is called.
    """

    trainer: str
    stores: tuple[StoreFolder, ...]
    state: str
    copies: str
    beside: str
    last: str = ""
    models: str = r"(?!)"

    def owns(self, name: str) -> bool:
        """Say whether a file outside the stores belongs to the step."""
        patterns = (self.state, self.copies, self.beside, self.models)
        return name == self.last or any(re.fullmatch(p, name) for p in patterns)


_NONE = r"(?!)"
_XTUNER = Nest(
    "xtuner",
    (StoreFolder("weights"),),
    r"dataloader|lr_scheduler|sft_dataloader",
    _NONE,
    r"trainer_config\.(?:json|bin)|sft_train_state\.json",
    "train_state.json",
)
_PRIME = Nest(
    "prime-rl", (StoreFolder("trainer"),), r"orchestrator/progress\.pt", _NONE, _NONE
)  # fmt: skip
_MILES = Nest(
    "miles",
    (StoreFolder("model"), StoreFolder("optimizer"), StoreFolder("lr_scheduler")),
    r"rng(?:_rank_\d{1,6})?\.pt",
    _NONE,
    r"debug_events/.+",
    "meta.json",
)
_MILES_LORA = Nest(
    "miles",
    (StoreFolder("adapter"),),
    (
        r"adapter/(?:(?:training_state|adapter_megatron)_rank\d{1,6}"
        r"|adapter_dp_invariant_tp\d{1,6}_pp\d{1,6}"
        r"|training_state_named_tp\d{1,6}_pp\d{1,6}_dp\d{1,6}"
        r"|optimizer_param_state_rank\d{1,6}_optimizer\d{1,6})\.pt"
    ),
    _NONE,
    r"debug_events/.+",
)
_OLMO = Nest(
    "OLMo-core",
    (StoreFolder("model_and_optim"),),
    r"train/rank\d{1,6}\.pt",
    _NONE,
    r"config\.json|data_paths\.txt",
    ".metadata.json",
)
_FULL = r"model_state_dict/full_weights\.pt"
_IQL = r"iql_components/"
_SAC = r"(?:sac|dagger)_components/"
# Configuration that is saved with a model, Megatron's tracker, Hugging Face's form of the weights.
_BESIDE = (
    r"(?:[\w.-]+\.(?:json|txt|jinja|model)|hf_checkpoint/.+"
    rf"|{_SAC}replay_buffer/.+|local_shard_checkpoint/(?!checkpoint_rank_)[^/]+)"
)


def _rlinf(stores: tuple[StoreFolder, ...], roles: str) -> Nest:
    """Return the layout of a step, or of one role's folder (`roles` is what leads to one)."""
    return Nest(
        "RLinf",
        stores,
        rf"data/data\.pt|{roles}{_IQL}state\.pt",
        roles + _FULL,
        roles + _BESIDE,
        models=(
            rf"{roles}(?:{_SAC}(?P<ranked>target_model)/checkpoint_rank_\d{{1,6}}"
            rf"|{_IQL}(?P<one>target_critic))\.pt"
        ),
    )


_Names = Callable[[str], Collection[str]]


def nest_of(held: _Names, folders: _Names) -> Nest | None:
    """Return how a directory is laid out, by its names alone; None if no trainer does so.

    Args:
        held: the names of the files directly in a folder below, or in the directory itself ("").
        folders: the same of directories.
    """
    top = folders("")
    files = {name for name in held("") if not is_own(name)}
    if "weights" in top and (_XTUNER.last in files or {"dataloader", "lr_scheduler"} & files):
        return _XTUNER
    if "trainer" in top and _by_prime(files, top, held, folders):
        return _PRIME
    if _by_miles(files, top, held, folders):
        return _MILES
    if _by_olmo(files, top, held):
        return _OLMO
    # A PEFT adapter alone may be of any trainer: it is the checkpoint, its folder a root.
    lora = "adapter" in top and not files and set(top) <= {"adapter", "debug_events"}
    if lora and any(re.fullmatch(_MILES_LORA.state, f"adapter/{name}") for name in held("adapter")):
        return _MILES_LORA
    return _of_rlinf(top, held, folders)


def _by_prime(files: Collection[str], top: Collection[str], held: _Names, folders: _Names) -> bool:
    """Say whether prime-rl wrote a step: by its two folders, or by one with a DCP's data files.

    A folder called `trainer` may hold anything: Trainers' steps, logs, files of ranks. What lies
    beside the two, such as notes and results, decides nothing.
    """
    if "orchestrator" in top:
        return True
    store = {name for name in held("trainer") if not is_own(name)}
    return (
        not files
        and any(name.endswith(".distcp") for name in store)
        and all(re.fullmatch(_OF_DCP, name) for name in store)
        and set(folders("trainer")) <= {"dataloader"}
    )


def _by_olmo(files: Collection[str], top: Collection[str], held: _Names) -> bool:
    """Say whether OLMo-core wrote a step: two of its store, its ranks' files and its last file."""
    ranks = "train" in top and any(re.fullmatch(_OLMO.state, f"train/{n}") for n in held("train"))
    return ("model_and_optim" in top) + ranks + (_OLMO.last in files) > 1


def _by_miles(files: Collection[str], top: Collection[str], held: _Names, folders: _Names) -> bool:
    """Say whether miles with FSDP wrote a step, finished or not.

    Many programs save a DCP in model/ and another in optimizer/. miles makes its three folders
    before it writes anything, and the states of the random generators before its last file.
    """
    places = [store.place for store in _MILES.stores]
    rng = any(re.fullmatch(_MILES.state, name) for name in files)
    if _MILES.last in files:
        return bool({"optimizer", "lr_scheduler"} & set(top)) and (rng or "model" in top)
    if not set(places) <= set(top):
        return False
    stores = [{name for name in held(place) if not is_own(name)} for place in places]
    if any(folders(place) for place in places) or any(
        not re.fullmatch(_OF_DCP, name) for names in stores for name in names
    ):
        return False
    return rng or any(".metadata" not in names for names in stores)


def _of_rlinf(top: Collection[str], held: _Names, folders: _Names) -> Nest | None:
    if store := _store(top):
        return _rlinf((StoreFolder(store), *_alpha("", folders, top)), "")
    if _OF_IQL[0] in top:
        found = tuple(s for role in _OF_IQL for s in _of_role(role, role, folders))
        return _rlinf(found, r"(?:\w+/)?") if found else None
    stores: list[StoreFolder] = []
    for role in _ROLES:
        if role not in top:
            continue
        inner = folders(role)
        iterations = [name for name in inner if re.fullmatch(_ITERATION, name)]
        if iterations and not _store(inner):
            # Two roots of Megatron's side by side look so too, but for the position in the data.
            if len(iterations) > 1 or "data" not in top or "data.pt" not in held("data"):
                return None
            model = "" if role == _ROLES[0] else role
            stores.append(StoreFolder(f"{role}/{iterations[0]}", model, f"{role}/"))
            continue
        if _OF_IQL[0] in inner:
            for part in _OF_IQL:
                stores += _of_role(f"{role}/{part}", part, folders)
        else:
            stores += _of_role(role, role, folders)
            stores += _alpha(f"{role}/", folders, inner)
    return _rlinf(tuple(stores), r"(?:actor|critic)/(?:\w+/)?") if stores else None


def _store(names: Collection[str]) -> str:
    """Return the folder with the store of a role that FSDP trains; "" if there is none."""
    return next((name for name in (_DCP, _SHARDS) if name in names), "")


def _of_role(place: str, role: str, folders: _Names) -> tuple[StoreFolder, ...]:
    store = _store(folders(place))
    model = "" if role in (_ROLES[0], _OF_IQL[0]) else role
    return (StoreFolder(f"{place}/{store}", model, f"{place}/"),) if store else ()


def _alpha(place: str, folders: _Names, top: Collection[str]) -> tuple[StoreFolder, ...]:
    """Return the store of the temperature that SAC trains beside its policy."""
    below = f"{place}sac_components"
    if "sac_components" not in top or "alpha" not in folders(below):
        return ()
    store = _store(folders(f"{below}/alpha"))
    return (StoreFolder(f"{below}/alpha/{store}", "alpha", f"{below}/alpha/"),) if store else ()


def nest_in(listing: Listing) -> Nest | None:
    """Return how a listed directory is laid out (see `nest_of`)."""

    def inside(name: str) -> Listing | None:
        return at(listing, name) if name else listing

    def held(name: str) -> Collection[str]:
        return inner.files if (inner := inside(name)) is not None else ()

    def folders(name: str) -> Collection[str]:
        return inner.directories if (inner := inside(name)) is not None else ()

    return nest_of(held, folders)


def nest_among(names: Collection[str]) -> Nest | None:
    """Return how a directory is laid out, by the names of all files below it."""

    def inside(name: str) -> list[str]:
        return [n[len(name) + 1 :] if name else n for n in names
                if not name or n.startswith(f"{name}/")]  # fmt: skip

    def held(name: str) -> Collection[str]:
        return [n for n in inside(name) if "/" not in n]

    def folders(name: str) -> Collection[str]:
        return {n.partition("/")[0] for n in inside(name) if "/" in n}

    return nest_of(held, folders)


def at(listing: Listing, folder: str) -> Listing | None:
    """Return the listing of a folder some levels below; None if it is not there."""
    for name in folder.split("/"):
        if name not in listing.directories:
            return None
        listing = listing.inside(name)
    return listing


_MOST = 4096


def tags_in(source: Source) -> list[str]:
    """Return the folders that hold files of DeepSpeed, under names that a trainer gives them."""
    inside: dict[str, list[str]] = {}
    for name in source.entries:
        folder, slash, rest = name.partition("/")
        if slash and re.fullmatch(TAG, folder):
            inside.setdefault(folder, []).append(rest)
    return sorted(folder for folder, names in inside.items() if deepspeed_files(names))


def pointed_at(source: Source) -> str | None:
    """Return the name in `latest`; None without such a file.

    Raises:
        CorruptError: it holds no name.
    """
    if POINTER not in source.entries:
        return None
    raw = source.read(POINTER, 0, min(_MOST, source.size(POINTER)))
    name = raw.decode("utf-8", "replace").strip()
    if not name or not name.isprintable():
        raise CorruptError(f"{POINTER} holds no name of a tag", kind="bad-index", file=POINTER)
    return name


def choose_tag(source: Source, tags: Sequence[str], *, trainer: bool) -> tuple[str, list[Finding]]:
    """Return the tag that the trainer would load, and what is wrong with its name.

    Raises:
        UnsupportedError: there are several, and nothing says which.
        CorruptError: see `pointed_at`.
    """
    named = pointed_at(source)
    found: list[Finding] = []
    if named is not None and named not in tags and (trainer or re.fullmatch(TAG, named)):
        what = f"{POINTER} names {named!r}, which is not there"
        found.append(finding("pointer-dangling", what, file=POINTER))
    if named is None and trainer:
        what = f"{POINTER} is missing: DeepSpeed takes the name of the tag from it"
        found.append(finding("missing-file", what, file=POINTER))
    if named in tags:
        return str(named), found
    if len(tags) > 1:
        raise UnsupportedError(
            f"{source.url} holds {listed(tags)}, and {POINTER} names none of them",
            hint="each is a checkpoint of its own: name one",
            file=tags[0],
        )
    return tags[0], found


def step_of_tag(tag: str, found: Checkpoint) -> Iterator[Finding]:
    """Yield a tag whose name has another step than its content: the Trainer never renames one."""
    match = re.fullmatch(TAG, tag)
    if match is None or match["step"] is None or found.step is None:
        return
    if int(match["step"]) != found.step:
        what = f"{tag} is of step {found.step}: the files in it are of another save than their tag"
        yield finding("mixed-steps", what, file=f"{tag}/{next(iter(found.members()))}")
