"""Lay out a pipeline layer's state besides weights (a module's extra state).

Each slice of a layer has a file of its own. Laid out anew by the job that saved it, a file keeps
what it had. As an example, it gets what the source has under the same name; the example's own value
stays where the source has none, and is said.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from ftckpt.errors import UnsupportedError
from ftckpt.findings import finding, listed
from ftckpt.formats.deepspeed.checkpoint import DeepSpeedCheckpoint
from ftckpt.formats.deepspeed.job import DeepSpeedJob
from ftckpt.formats.deepspeed.job.objects import name_in_layer
from ftckpt.formats.deepspeed.job.rank_states import RANK_COMPONENT, OtherState
from ftckpt.formats.deepspeed.names import DeepSpeedFile, FileRole, deepspeed_files
from ftckpt.formats.pickles.walk import Path, leaves
from ftckpt.formats.state.nested import NestedState
from ftckpt.formats.state.objects import StateObjects
from ftckpt.formats.state.paths import RecordedPaths, recorded_paths
from ftckpt.formats.torch_files.values import TensorRef
from ftckpt.transfer.content import Content, TargetTensor


class LayerStates(OtherState):
    """The other state of the files of a pipeline's layers.

    Args:
        content: what is to be written.
        job: whose files they are.

    Attributes:
        claimed: names of objects that belong here if anywhere.
    """

    def __init__(self, content: Content, job: DeepSpeedJob) -> None:
        super().__init__(content)
        self._job = job
        self._taken: set[str] = set()
        self._placed: set[str] = set()
        self._parts: dict[str, list[tuple[str, Path]]] = defaultdict(list)
        self._lacking: list[str] = []
        self._inside: dict[str, list[str]] = defaultdict(list)
        self.claimed = frozenset(self._claimed())

    @cached_property
    def _recorded(self) -> RecordedPaths:
        return recorded_paths(self._content.checkpoint)

    @cached_property
    def _objects(self) -> StateObjects:
        return StateObjects(self._content, self._recorded.objects)

    def _claimed(self) -> set[str]:
        source, objects = self._content.checkpoint, self._content.objects
        found: set[str] = set()
        if self._job.is_example:
            paths = self._recorded.nested_objects()
            trees = ((file, self._job.checkpoint.tree(file.path)) for file in self._job.layers)
            names = {name_in_layer(file, key) for file, tree in trees for key in tree}
            for name in objects:
                # All of it, or a part where a format takes state apart.
                path = paths.get(name, (name,))
                if path and path[0] in names:
                    self._parts[str(path[0])].append((name, path))
                    found.add(name)
        if isinstance(source, DeepSpeedCheckpoint):
            files = deepspeed_files(source.streams)
            own = {file.path for file in files if file.role is FileRole.LAYER}
            found |= {name for name, info in objects.items() if info.extent.file in own}
            for info in source.tensors.values():
                if info.component.startswith(RANK_COMPONENT) and info.pieces[0].extent.file in own:
                    self._inside[info.pieces[0].extent.file].append(info.key)
        return found & objects.keys()

    def fields(self, file: DeepSpeedFile, tree: Mapping[Any, Any]) -> Mapping[Any, Any]:
        """Return what is not a tensor in a file of the result, by its key in the state_dict.

        Args:
            file: of the job that is laid out, or of the example.
            tree: the state_dict in it.

        Raises:
            UnsupportedError: a value of the example that the source does not have holds a tensor.
        """
        others = {key: value for key, value in tree.items() if not isinstance(value, TensorRef)}
        if self._job.is_example:
            return {key: self._of_source(file, key, value) for key, value in others.items()}
        return {key: value for key, value in others.items() if self._keeps(file, key)}

    def _keeps(self, file: DeepSpeedFile, key: Any) -> bool:
        """Note a value of the source that stays where it is; say whether none of it was dropped."""
        name, held = name_in_layer(file, key), self._content
        label = f"module.{file.layer}.{key}"
        inside = [
            own
            for own in self._inside.get(file.path, ())
            if f"{held.checkpoint.tensors[own].name}.".startswith(f"{label}.")
        ]
        gone = name in held.checkpoint.objects and name not in held.objects
        if gone or any(own not in held.tensors for own in inside):
            return False
        self.same.add(name)
        self.tensors += (self._moved(held.tensors[own], file) for own in inside)
        self._placed.update(inside)
        return True

    def _moved(self, wanted: TargetTensor, file: DeepSpeedFile) -> TargetTensor:
        """Return a tensor as the reader of the result calls it: by the first rank that has it."""
        before, grid = self._job.checkpoint.grid, self._job.grid
        stage = int(wanted.component.removeprefix(RANK_COMPONENT)) // (before.tp * before.dp)
        return wanted._replace(
            component=f"{RANK_COMPONENT}{grid.rank(stage * grid.tp + file.mp, None)}"
        )

    def _of_source(self, file: DeepSpeedFile, key: Any, example: Any) -> Any:
        name, state = name_in_layer(file, key), NestedState()
        own = self._parts.get(name, ())
        parts = [part for of, path in own for part in self._objects.nested(of, path)]
        if parts and all(state.put(part.path, part.value) for part in parts):
            self._taken.update(of for of, _ in own)
            if own == [(name, (name,))]:
                self.same.add(name)
            return state.settled(lambda path: True)[name]
        if example is not None:
            self._lacking.append(name)
        if any(isinstance(leaf, TensorRef) for _, leaf in leaves(example)):
            raise UnsupportedError(
                f"{key} in {file.path} of the example holds a tensor, of which the source has no"
                " values",
                file=file.path,
            )
        return example

    def inside(self) -> Iterator[Sequence[str]]:
        """Yield the keys of the source's tensors that lie in files of layers."""
        yield from self._inside.values()

    def finish(self) -> None:
        """List what has no place, after all files were laid out."""
        own = {key for keys in self._inside.values() for key in keys}
        left = (own & self._content.tensors.keys()) - self._placed
        self.unplaced = [*sorted(self.claimed - self.same - self._taken), *sorted(left)]
        if self._lacking:
            what = (
                f"the source has no {listed(self._lacking)}, which the example's layer files have:"
                " the example's is kept"
            )
            self.notes.append(finding("note", what))
