"""A directory that a trainer fills with several files: weights, optimizer, scheduler, RNG.

- Hugging Face Trainer, `checkpoint-N/`: the weights in any Hugging Face layout, `optimizer.pt`,
  `scheduler.pt`, `rng_state[_R].pth`, `scaler.pt`, `training_args.bin`, and `trainer_state.json`,
  which is written last.
- accelerate, any directory: weights, `optimizer.bin`, `scheduler.bin`, `sampler.bin`,
  `dl_state_dict.bin`, `scaler.pt`, `random_states_R.pkl`; under FSDP the weights and the optimizer
  are DCP folders `pytorch_model_fsdp_0/` and `optimizer_0/`, or with `use_dcp=False` one file a
  rank: `pytorch_model_fsdp_0_rank0.bin`, `optimizer_0_rank0.bin`.
- The same two with DeepSpeed: its tag `global_stepN/` (accelerate: `pytorch_model/`), `latest` with
  the tag's name, and `zero_to_fp32.py`. DeepSpeed keeps optimizer and scheduler; the weights that
  lie beside are written from the same model a second time.
- Weights in folders of such a directory, and folders that `modules.json` or `model_index.json` name
  as parts of one model (see `weight_folders`).
- NeMo 2, `MODEL--step=N…/`: Megatron-Core's torch_dist in `weights/`, and in `context/` the
  configuration of model and trainer (`io.json`, `model.yaml`, a tokenizer).
- xtuner, prime-rl, miles and RLinf: stores in folders and files beside them (see `nested`).
- verl with Megatron, `actor/` and `critic/`: one such store or several, listed in
  `ckpt_contents.json` (see `verl`).

Each part is opened by its own format and the whole reads as one checkpoint.
Sources: `transformers/trainer.py` (`_save_checkpoint`), `accelerate/checkpointing.py`,
`accelerate/utils/fsdp_utils.py`; NeMo's `nemo/lightning/io/pl.py` (2.0 to 2.6).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ftckpt.checkpoint import CommitState
from ftckpt.discovery.recognise import Format, Listing, Recognition
from ftckpt.discovery.step_names import set_around
from ftckpt.formats.deepspeed import DeepSpeed
from ftckpt.formats.huggingface.declared_folders import DeclaredFolder, folders_of
from ftckpt.formats.state.side_by_side import saves_beside
from ftckpt.storage.source import Source
from ftckpt.storage.state_files import without_numbers

from .names import (
    ARGUMENTS,
    CONTENTS,
    FOLDER,
    STATE,
    TAG,
    fits_here,
    folder_of_store,
    is_state,
    lists_stores,
    marked,
    parts_of,
    states_of_ranks,
    without_weights,
)  # fmt: skip
from .nested import at, nest_in
from .weight_folders import weight_folders

if TYPE_CHECKING:
    from ftckpt.checkpoint import Described

    from .checkpoint import BundleCheckpoint


class Bundle:
    """The format `bundle` (see the module's docstring)."""

    name = "bundle"

    def __init__(
        self,
        formats: Sequence[Format],
        tags: Format | None = None,
        described: Described | None = None,
    ) -> None:
        """Keep the formats that read the parts, in the order in which they are asked.

        Args:
            formats: `dcp` for folders; what reads weights lying in the directory itself.
            tags: what reads DeepSpeed's tags; None for the reader without a user's rules.
            described: what holds weights to their `config.json`; None for nothing.
        """
        self._formats = tuple(formats)
        self._tags = tags or DeepSpeed()
        self._described = described

    def recognise(self, listing: Listing) -> Recognition | None:
        """Know it by state files beside weights, by accelerate's FSDP folders, or by state alone.

        Without its weights it must not be taken for a root of single files.
        """
        if listing.single:
            member = set_around(listing.single, listing.beside)
            if member is None:
                return None
            reason = f"is a file of step {member.step}"
            return Recognition(self.name, reason, CommitState.NO_MARKER, shares=True)
        found = self._in_directory(listing)
        if found is None:
            return None
        parts = {*parts_of(listing.files, listing.directories), *found.parts}
        return found._replace(parts=tuple(sorted(parts)))

    def _in_directory(self, listing: Listing) -> Recognition | None:
        if lists_stores(listing.files, listing.directories):
            return Recognition(self.name, f"has {CONTENTS}", CommitState.COMMITTED)
        nest = nest_in(listing)
        if nest is not None:
            inside = [one for store in nest.stores if (one := at(listing, store.place)) is not None]
            stores = [r for one in inside if (r := self._in(one)) is not None]
            if not inside:  # what lies beside them shows the trainer
                lost = nest.last in listing.files
                commit = CommitState.COMMITTED if lost else CommitState.UNCOMMITTED
                reason = f"has files of a step of {nest.trainer} and no store"
                return Recognition(self.name, reason, commit)
            if stores:
                commits = {r.commit for r in stores}
                lacks = nest.last and nest.last not in listing.files
                commit = CommitState.UNCOMMITTED if lacks else stores[0].commit
                if CommitState.UNCOMMITTED in commits:
                    commit = CommitState.UNCOMMITTED
                return Recognition(self.name, f"has a store in a step of {nest.trainer}", commit)
        store = folder_of_store(listing.files, listing.directories)
        if store:
            part = self._of(listing.inside(store))
            if part is not None:
                return Recognition(self.name, f"{store}/ {part.reason}", part.commit)
        folders = sorted(d for d in listing.directories if FOLDER.fullmatch(d))
        folders = [d for d in folders if self._of(listing.inside(d)) is not None]
        state = sorted(n for n in listing.files if is_state(n) and not n.startswith("training"))
        state += states_of_ranks(listing.files)
        weights = self._of(listing)
        tags: list[str] = []
        if state or ARGUMENTS in listing.files:
            tags = sorted(d for d in listing.directories if re.fullmatch(TAG, d))
            tags = [d for d in tags if self._tags.recognise(listing.inside(d)) is not None]
        declared = folders_of(listing.files, listing.head)
        below = self._below(listing, declared) if state or any(d.path for d in declared) else {}
        whole = weights is not None or without_weights(state) or below
        named = any(d.path for d in declared)
        if not (folders or tags or named or (state and whole)):
            return None
        if weights is None and not (folders or tags or named) and saves_beside(listing):
            return None  # the state is that of the newest of them
        commit = CommitState.NO_MARKER
        if STATE in listing.files:
            commit = CommitState.COMMITTED
        elif (by := marked(listing.files, listing.directories, listing.head)) and by.lacks:
            commit = CommitState.UNCOMMITTED
        parts = [r for d in folders if (r := self._of(listing.inside(d))) is not None]
        if commit is CommitState.NO_MARKER and parts:
            commit = parts[0].commit
        if weights is not None:
            parts.append(weights)
        parts += below.values()
        if any(part.commit is CommitState.UNCOMMITTED for part in parts):
            commit = CommitState.UNCOMMITTED
        seen = [*tags, *folders, *below, *state, *(d.by for d in declared[:1])]
        if weights is not None:
            seen.insert(0, weights.reason[4:])
        reason = f"has {' and '.join(seen[:3])}"
        models = tuple(without_numbers(name) + "/" for name in below)
        return Recognition(self.name, reason, commit, parts=models)

    def _below(
        self, listing: Listing, declared: Sequence[DeclaredFolder]
    ) -> Mapping[str, Recognition]:
        """Return the folders with weights: those that a file names, else all beside the state."""
        named = {one.path.partition("/")[0] for one in declared} & set(listing.directories)
        return weight_folders(named or listing.directories, listing.inside, self._formats)

    def _in(self, listing: Listing) -> Recognition | None:
        """Recognise a store, whose folder has nothing else in it."""
        return next((r for f in self._formats if (r := f.recognise(listing)) is not None), None)

    def _of(self, listing: Listing) -> Recognition | None:
        fitting = (f for f in self._formats if fits_here(f.name, listing.files))
        return next((r for f in fitting if (r := f.recognise(listing)) is not None), None)

    def open(self, source: Source) -> BundleCheckpoint:
        """Open every part.

        Raises:
            IncompleteError: a part is not committed, or the Trainer's last file is not there.
            UnsupportedError: a part is of a layout that is not read.
            CorruptError, UnsafeError: see the parts' formats.
        """
        from .reader import open_bundle

        checkpoint = open_bundle(source, self._formats, self._tags)
        checkpoint.described = self._described
        return checkpoint
