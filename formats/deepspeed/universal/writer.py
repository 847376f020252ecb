"""Lay out a universal checkpoint: what `ds_to_universal.py` makes, for a job of any topology.

A folder of each parameter holds its masters and moments, whole, with what a job needs to cut them
for its tensor slices: the axis, the sub-blocks, whether it is a vocabulary (whose padding is left
out). `zero/optimizer_state.pt` has the form of stages 1 and 2 and that of stage 3 in one file, so
that a job of any stage loads it. The model's files are the source's; DeepSpeed reads counters,
schedulers and the client's state in them.

What the converter makes of buffers, of frozen and of shared parameters (copies, widened to fp32) is
not made: nothing reads it.

`latest_universal` stands in the directory around a checkpoint and is never written.

Sources: `checkpoint/ds_to_universal.py`, `checkpoint/universal_checkpoint.py`,
`runtime/base_optimizer.py` and `runtime/zero/stage3.py` (`load_hp_checkpoint_state_from_…`) of
DeepSpeed 0.19.

Read how a job is to cut a parameter over tensor slices from a universal checkpoint.

The rules are the source's own (`universal_checkpoint_info`, Megatron-DeepSpeed's names) and the
user's. Where there are none DeepSpeed cuts along the first axis, and so says its converter.

Source: `checkpoint/ds_to_universal.py` (`merge_tp_slices`), `checkpoint/universal_checkpoint.py`
(`load_hp_checkpoint_state`) of DeepSpeed 0.19.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ftckpt.checkpoint import Box, Kind, tensor_key
from ftckpt.checkpoint.coverage import intersection
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.findings import Finding, finding
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.job.from_other_format import OtherFormatJob
from ftckpt.formats.deepspeed.job.rank_states import (
    GROUPS,
    PartitionRank,
    RoleStates,
    read_states,
    renamed_content,
    unplaced,
)
from ftckpt.formats.deepspeed.job.read import (
    all_equal,
    read_job,
    stored_content,
    without_params,
    without_weights,
)
from ftckpt.formats.deepspeed.model.files import LayerStates, ModelFiles
from ftckpt.formats.deepspeed.names import STATE, ZERO, FileRole
from ftckpt.formats.deepspeed.slices import CutOf, SliceCut, cuts_of
from ftckpt.formats.deepspeed.states import OPTIMIZER, ModelState
from ftckpt.formats.deepspeed.zero.flat_buffers import RankFlats
from ftckpt.formats.deepspeed.zero.partition import Shape
from ftckpt.formats.families.vocabulary import is_vocabulary
from ftckpt.formats.pickles.write import Call, Global
from ftckpt.formats.torch_files.write_tree import CopiedTree, Tensor, save
from ftckpt.storage.source import safe_name
from ftckpt.transfer.content import Content, Copy, TargetTensor
from ftckpt.transfer.layout import Layout, LayoutRequest, OutputFile

_SUB_SHAPE = Global("deepspeed.checkpoint.universal_checkpoint", "SubparamShape")


class ParameterCuts:
    """How jobs cut the parameters of a source.

    Attributes:
        known: whether any rule says so.
        vocabulary: patterns of the names whose rows are a vocabulary's, as the source records them.
    """

    def __init__(self, state: ModelState | None, request: LayoutRequest) -> None:
        """Take the rules.

        Args:
            state: a model's file of a DeepSpeed source; None for other sources.
            request: may have a table of rules and the true size of the vocabulary.
        """
        self._cut_of: CutOf | None = None
        if state is not None:
            self._cut_of = cuts_of(state, request.rules, with_maps=False)
        self._rules = request.rules
        info = state.info if state is not None else None
        self._info = info if info is not None else {}
        self.known = request.rules is not None or info is not None
        patterns = self._info.get("vocabulary_parameter_patterns")
        texts = patterns if isinstance(patterns, (list, tuple)) else ()
        self.vocabulary = tuple(text for text in texts if isinstance(text, str))
        size = request.true_vocab_size or self._info.get("original_vocab_size")
        self._rows = size if type(size) is int else None

    def how(self, name: str, shape: Shape) -> dict[str, Any]:
        """Return what stands beside a parameter in each of its files."""
        cut = self._cut(name, shape)
        found: dict[str, Any] = {}
        if cut.axis is not None and len(cut.widths or cut.blocks) > 1:
            if cut.axis == 0 and cut.blocks == (1, 1):
                found = {"cat_dim": 0, "param_n_sub_params": 2}
            else:
                found = {"sub_param_shape": _sub_shape(name, cut, shape)}
        elif cut.axis is not None:
            found = {"cat_dim": cut.axis}
        return {**found, **({"vocab_tensor": True} if self._is_vocabulary(name) else {})}

    def _cut(self, name: str, shape: Shape) -> SliceCut:
        if self._cut_of is not None:
            try:  # of two slices: for one there is nothing to cut
                return self._cut_of(name, [shape, shape])
            except UnsupportedError:
                return SliceCut(0)
        rule = None if self._rules is None else self._rules.get(name)
        return SliceCut(0) if rule is None else SliceCut(rule.split.axis, blocks=rule.split.blocks)

    def _is_vocabulary(self, name: str) -> bool:
        return self._rows is not None and any(re.match(text, name) for text in self.vocabulary)

    def padded(self, wanted: TargetTensor, shape: Shape) -> TargetTensor | None:
        """Return a vocabulary's tensor with the padding of another shape; None where it is none.

        Args:
            wanted: with padding of its own, or none.
            shape: that it is to have.
        """
        rows, has = self._rows, wanted.shape
        known = self._is_vocabulary(wanted.name) or is_vocabulary(wanted.name)
        if rows is None or not known or has[1:] != shape[1:]:
            return None
        if not has or not shape or min(has[0], shape[0]) < rows:
            return None
        return (_cut_off(wanted, rows) if has[0] > rows else wanted)._replace(shape=shape)

    def without_padding(self, tensors: Iterable[TargetTensor]) -> Iterator[TargetTensor]:
        """Yield tensors, masters and moments of a vocabulary without the rows of its padding."""
        for wanted in tensors:
            rows = self._rows
            padded = (
                wanted.component == "optimizer"
                and self._is_vocabulary(wanted.name)
                and rows is not None
                and bool(wanted.shape)
                and wanted.shape[0] > rows
            )
            yield _cut_off(wanted, rows) if padded and rows is not None else wanted


def _cut_off(wanted: TargetTensor, rows: int) -> TargetTensor:
    shape = (rows, *wanted.shape[1:])
    kept = []
    for copy in wanted.copies:
        shared = intersection(Box.whole(shape), copy.box)
        if shared is not None and shared.volume:
            source = Box(copy.source.offsets, shared.sizes)  # rows are cut off at the end alone
            kept.append(Copy(shared, copy.key, source))
    return wanted._replace(shape=shape, copies=tuple(kept))


def _sub_shape(name: str, cut: SliceCut, shape: Shape) -> Call:
    """Return DeepSpeed's record of the sub-blocks that an axis packs."""
    axis = cut.axis or 0
    unit = shape[axis] // sum(cut.blocks) if cut.blocks else 0
    sizes = tuple(map(sum, cut.widths)) or tuple(unit * weight for weight in cut.blocks)
    record = (*shape[:axis], sizes, *shape[axis + 1 :])
    state = {"patterns": [re.escape(name)], "shape": record, "partition_dim": axis}
    return Call(_SUB_SHAPE, state=state, new=True)


_STEP = "step"


class DeepSpeedUniversalWriter:
    """The writer of the format `deepspeed-universal` (fits `ftckpt.transfer.layout.Writer`)."""

    name = "deepspeed-universal"
    single = False
    supported_options = ("rules", "true_vocab_size")

    def layout(self, content: Content, request: LayoutRequest) -> Layout:
        """Lay out `content`.

        Raises:
            UsageError: the true size of a vocabulary where nothing says which parameters have one.
            UnsupportedError: it has no optimizer state, or some that the loader cannot read.
        """
        checkpoint = content.checkpoint
        if isinstance(checkpoint, DeepSpeedCheckpoint):
            return _of_deepspeed(content, checkpoint, request)
        return _of_other(content, request)


def _of_deepspeed(
    content: Content, checkpoint: DeepSpeedCheckpoint, request: LayoutRequest
) -> Layout:
    if checkpoint.experts.layers.keys() - checkpoint.experts.stacked.keys():
        raise UnsupportedError(
            "DeepSpeed finds an expert in a universal checkpoint by its number on a rank, so that"
            " every rank would load those of the first",
            hint="ftckpt reshard --dp N --ep N writes the job's own form",
        )
    job = read_job(checkpoint).repartitioned(LayoutRequest())
    cuts = _cuts(job.states[0], request)
    content = stored_content(job, content)
    content = content.with_tensors(cuts.without_padding(content.tensors.values()))
    experts = {name: layer.experts for name, layer in checkpoint.experts.stacked.items()}
    if frozen := sorted(experts.keys() - job.trained):
        raise UnsupportedError(
            f"{frozen[0]} is not trained: a universal checkpoint has no frozen experts of AutoEP",
            hint="ftckpt reshard --dp N --ep N writes the job's own form",
            tensor=frozen[0],
        )
    content = without_weights(content, experts.keys())
    flats = RankFlats(content, job.placed)
    models = RoleStates(content, read_states(checkpoint, job.files[FileRole.MODEL]))
    layers = LayerStates(content, job)
    model = ModelFiles(content, flats, job, models, layers)
    optimizer = RoleStates(content, read_states(checkpoint, job.files[FileRole.OPTIMIZER]))
    numbers: dict[str, Any] = {}
    for mp, groups in job.groups.items():
        for group, found in zip(groups, job.numbers[mp], strict=True):
            numbers |= dict.fromkeys(group, found)
    folders = _Folders(content, flats, cuts, numbers, job.called, experts)
    state = optimizer.assign(PartitionRank(0, 0), 0, first=True)
    optimizer.finish()
    # Without groups the loader would restore no state at all; one of no settings changes none.
    empty: list[Any] = [{"params": [number]} for number in range(len(job.groups[0]))]
    base: dict[str, Any] = {GROUPS: empty, **state.base}
    tree = folders.state_tree(state.inner, base, job.version)
    state_file = _state_file(CopiedTree(tree, state.storages))
    files = [*model.files(), *model.layer_files(), *folders.files(), state_file]
    states = (models, optimizer, layers)
    return Layout(
        files=files,
        unplaced=unplaced(content, states),
        notes=[*_notes(cuts, base), *(note for one in states for note in one.notes)],
        content=renamed_content(content, states, renumbered=False),
    )


def _of_other(content: Content, request: LayoutRequest) -> Layout:
    source = OtherFormatJob(content)
    cuts = _cuts(None, request)
    holdings = RankFlats(source.content, {})
    numbers: dict[str, dict[str, Any]] = {name: {} for name in source.trained}
    folders = _Folders(source.content, holdings, cuts, numbers, {}, {})
    tree = folders.state_tree(source.optimizer, source.base, source.version)
    files = [source.model_file(), *folders.files(), _state_file(tree)]
    return Layout(
        files=files,
        unplaced=source.unplaced,
        notes=[*_notes(cuts, source.base), *source.notes],
        content=source.content,
    )


def _cuts(state: ModelState | None, request: LayoutRequest) -> ParameterCuts:
    cuts = ParameterCuts(state, request)
    if request.true_vocab_size is not None and not cuts.vocabulary:
        raise UsageError(
            "--true-vocab-size has no meaning here: no universal_checkpoint_info of the source says"
            " which parameters have a vocabulary's rows",
            hint="leave it out",
        )
    return cuts


class _Folders:
    """The folders of parameters.

    Args:
        content: what they hold.
        holdings: of that content.
        cuts: how jobs cut parameters.
        numbers: the names of parameters, each with the states of it that are no tensors.
        called: name -> folder, where that is another.
        experts: name -> number of experts, of those that AutoEP stacks.
    """

    def __init__(
        self,
        content: Content,
        holdings: RankFlats,
        cuts: ParameterCuts,
        numbers: Mapping[str, Mapping[str, Any]],
        called: Mapping[str, str],
        experts: Mapping[str, int],
    ) -> None:
        self._content, self._states, self._cuts = content, holdings.states, cuts
        self._numbers, self._called, self._experts = numbers, called, experts

    def files(self) -> Iterator[OutputFile]:
        """Yield the files of all parameters.

        Raises:
            UnsupportedError: a state that DeepSpeed's loader takes for a parameter's and is not.
            UnsafeError: a name that is not a path below the checkpoint.
        """
        tensors = self._content.tensors
        for name, numbers in self._numbers.items():
            safe_name(name, named_by="the list of parameters")
            master = tensor_key("optimizer", Kind.MASTER, name)
            if master not in tensors:
                raise UnsupportedError(
                    f"{master} is not there: a job starts from it", tensor=master
                )
            shape = tensors[master].shape
            how, folder = self._how(name, shape), self._called.get(name, name)
            yield _file(folder, "fp32", {**how, "param": self._tensor(master)})
            for leaf, key in self._states.get(name, {}).items():
                if leaf == _STEP and tensors[key].shape == ():
                    yield _file(folder, leaf, self._tensor(key))
                elif tensors[key].shape == shape:
                    yield _file(folder, leaf, {**how, "param": self._tensor(key)})
                else:
                    raise _unread(key, "is not of its parameter's shape")
            for leaf, value in numbers.items():
                if leaf != _STEP:
                    raise _unread(f"{name}.{leaf}", "is not a tensor")
                yield _file(folder, leaf, value)

    def _how(self, name: str, shape: Shape) -> dict[str, Any]:
        """Return what stands beside a parameter in each of its files."""
        if name in self._experts:
            return {"cat_dim": 0, "is_expert_param": True, "ep_num_experts": self._experts[name]}
        return self._cuts.how(name, shape)

    def _tensor(self, key: str) -> Tensor:
        return Tensor.of(self._content.whole(key))

    def state_tree(
        self, inner: Mapping[str, Any], base: Mapping[str, Any], version: Any
    ) -> dict[str, Any]:
        """Return the tree of `optimizer_state.pt`, as stages 1 and 2 and as stage 3 look for it.

        Args:
            inner: what the optimizer keeps beside the base optimizer's state.
            base: the base optimizer's parameter groups.
            version: of DeepSpeed.
        """
        state: dict[int, Any] = {}
        first = next(iter(self._numbers), "")
        step = self._states.get(first, {}).get(_STEP)
        if step is not None:
            state[0] = {_STEP: self._tensor(step)}
        elif _STEP in self._numbers.get(first, {}):
            state[0] = {_STEP: self._numbers[first][_STEP]}
        return {"ds_version": version, **inner, **base, OPTIMIZER: {"state": state, **base}}


def _file(folder: str, leaf: str, tree: Any) -> OutputFile:
    return OutputFile(f"{ZERO}/{folder}/{leaf}.pt", save(tree, folder=leaf))


def _state_file(tree: Any) -> OutputFile:
    path = f"{ZERO}/{STATE}"
    return OutputFile(path, save(tree, folder=STATE.removesuffix(".pt")))


def _unread(key: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{key} {what}: DeepSpeed's loader would take it for one of the parameter's own states",
        hint="--drop leaves it out",
        tensor=key,
    )


def _notes(cuts: ParameterCuts, base: Mapping[str, Any]) -> Iterator[Finding]:
    yield finding(
        "note",
        "DeepSpeed finds a universal checkpoint by the file `latest_universal` in the directory"
        " around it, which is not written: `echo NAME > latest_universal` there",
    )
    yield finding(
        "note",
        "DeepSpeed restores what its optimizer trains from a universal checkpoint: buffers and"
        " frozen parameters stay as the job that loads it has made them",
    )
    groups = base.get(GROUPS)
    if isinstance(groups, list) and not all_equal(
        [without_params(g) for g in groups if isinstance(g, dict)]
    ):
        what = (
            "a job of stage 3 takes the settings of the first parameter group for all that it has:"
            " give the others their own (lr, weight_decay, …) again after loading, or"
            " reshard to the job's own form instead"
        )
        yield finding("note", what)
    if not cuts.known:
        what = (
            "nothing says how parameters are cut over tensor slices: jobs of more than one would"
            " cut all along the first axis; --rules says how"
        )
        yield finding("note", what)
