"""An optimizer's settings by parameter, for jobs that group their parameters in another way.

A job numbers its own groups, and their members are its own (`params` is never loaded). What a
group's learning rate is follows from what the checkpoint says of the group's members: all must
agree. Where a checkpoint does not say which parameters a group has (Megatron), what all its groups
agree on holds for every parameter.

Values that are no tensors, as bytes that a job may hand to `torch.load`.

torch executes the pickle that it is handed. So nothing of a file is handed over: a value is read
as inert data and written anew, and what is written may name the classes of `ALLOWED` alone, and
those that the job itself has allowed.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ftckpt.checkpoint.computed import ComputedCheckpoint
from ftckpt.errors import CorruptError, FtckptError, NotFoundError, UnsafeError, UnsupportedError
from ftckpt.formats.pickles.walk import dotted
from ftckpt.formats.torch_files.write_tree import CopiedTree, save
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Checksums, Elements, Literal, Segment, Stored, Zeros

from .job_names import SettingName, bare, setting_of
from .objects import StateObjects
from .paths import LEAVES
from .stored_names import is_common, is_group_settings

if TYPE_CHECKING:
    from ftckpt.transfer.read.elements import Gatherer


_GROUPS = "param_groups"
_OWN = frozenset({"params", "param_names"})  # the members, and not a setting
_ALL = ""  # stands for every parameter that no group names


@runtime_checkable
class KnowsMembers(Protocol):
    """A checkpoint whose files say elsewhere which parameters each of its groups has."""

    def group_members(self) -> Sequence[Collection[str]]:
        """Return the names of the parameters of each group; none where they are not known."""


@dataclass
class _Group:
    """One group: how to load each setting, and its members; None where they are not known."""

    fields: dict[str, Any] = field(default_factory=dict)
    members: list[str] | None = None


@dataclass(frozen=True)
class LoadedSettings:
    """The settings that a job has asked for; it can be sent to other processes.

    Attributes:
        groups: of each group, setting -> what is handed to torch.
        of: parameter -> number of its group, without the prefixes of wrappers.
        rest: the groups whose members are not known.
    """

    groups: Sequence[Mapping[str, bytes]]
    of: Mapping[str, int]
    rest: Sequence[int]

    def value(self, asked: SettingName, members: Sequence[str]) -> bytes:
        """Return one setting of one group of the job.

        Args:
            asked: which.
            members: the parameters of the job's group, as `AskedNames.parameter` calls them.

        Raises:
            NotFoundError: the checkpoint does not say it.
            UnsupportedError: its members have different ones in the checkpoint.
        """
        found: dict[bytes, str] = {}
        for member in members or [_ALL]:
            number = self.of.get(member)
            groups = self.rest if number is None else [number]
            if not groups and not self.of:
                groups = range(len(self.groups))
            for one in groups:
                value = self.groups[one].get(asked.field)
                if value is not None:
                    found.setdefault(value, member)
            if not groups:
                raise NotFoundError(
                    f"the checkpoint has no settings of {member}, which the job's optimizer trains",
                    hint=f"leave {asked.field} out of the state that is loaded",
                    tensor=asked.members,
                )
        if len(found) > 1:
            names = [name or "some parameters" for name in found.values()]
            raise UnsupportedError(
                f"{asked.field} of the job's group {asked.group} differs in the checkpoint:"
                f" {names[0]} has another one than {names[1]}",
                hint="group the parameters as the job that saved them did, or leave the setting out"
                " of the state that is loaded",
                tensor=asked.members,
            )
        if not found:
            raise NotFoundError(
                f"no group of the checkpoint has {asked.field}",
                hint="an optimizer of another release has other settings",
                tensor=asked.members,
            )
        return next(iter(found))


class JobSettings:
    """The groups of one optimizer's settings in a checkpoint.

    Args:
        content: what is loaded.
        trees: its objects.
    """

    def __init__(self, content: Content, trees: StateObjects) -> None:
        self._content = content
        self._trees = trees
        self._groups: list[_Group] = []
        self.owners: set[str] = set()
        flat: dict[str, _Group] = {}
        for name, info in content.objects.items():
            setting = setting_of(name)
            if setting is not None:
                self._add_flat(flat, name, setting)
            elif info.rank in (None, 0) and (name == _GROUPS or name.endswith(f".{_GROUPS}")):
                self._add_tree(name)
        if not self._groups:
            self._add_common()
        self._groups += flat.values()
        known = content.checkpoint.as_stored
        if isinstance(known, KnowsMembers) and len(known.group_members()) == len(self._groups):
            for group, members in zip(self._groups, known.group_members(), strict=True):
                group.members = sorted(members)

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def fields(self) -> set[str]:
        """The settings that some group has."""
        return {name for group in self._groups for name in group.fields} - _OWN

    def step(self) -> float | None:
        """Return the step that all groups say, where the optimizer keeps it in them."""
        said = set()
        for group in self._groups:
            value = group.fields.get("step")
            if value is None:
                return None
            tree = value() if callable(value) else value
            tree = tree.value if isinstance(tree, CopiedTree) else tree
            said.add(float(tree) if type(tree) in (int, float) else None)
        return said.pop() if len(said) == 1 else None

    def load(self, fields: Iterable[str], save: Any) -> LoadedSettings:
        """Return some settings, ready to be sent.

        Args:
            fields: which.
            save: makes bytes of a value and a name.

        Raises:
            FtckptError: one cannot be read, or holds what torch must not be handed.
        """
        wanted = sorted(set(fields) - _OWN)
        groups: list[Mapping[str, bytes]] = []
        of: dict[str, int] = {}
        rest: list[int] = []
        for number, group in enumerate(self._groups):
            values = {}
            for name in wanted:
                if name in group.fields:
                    value = group.fields[name]
                    values[name] = save(value() if callable(value) else value, f"{_GROUPS}.{name}")
            groups.append(values)
            members = group.members
            if members is None:
                rest.append(number)
                continue
            for member in members:
                if of.setdefault(bare(member), number) != number:
                    raise CorruptError(
                        f"{member} stands in two of the optimizer's groups",
                        kind="bad-metadata",
                        tensor=member,
                    )
        return LoadedSettings(groups, self._renamed(of), rest)

    def _renamed(self, of: Mapping[str, int]) -> dict[str, int]:
        """Return the groups by the names of the content too, where these are translated.

        A parameter that is made of several is of a group only where all of them are.
        """
        found = dict(of)
        checkpoint = self._content.checkpoint
        tensors = {**checkpoint.as_stored.tensors, **checkpoint.tensors} if of else {}
        made: Mapping[str, Sequence[str]] = {}
        if isinstance(checkpoint, ComputedCheckpoint):
            made = checkpoint.made_of
        for wanted in self._content.tensors.values() if of else ():
            name = bare(wanted.name)
            if name in found or not (wanted.component == "model" or wanted.kind in LEAVES):
                continue
            keys = {key for copy in wanted.copies for key in made.get(copy.key, (copy.key,))}
            groups = {of.get(bare(tensors[key].name)) for key in keys if key in tensors}
            group = groups.pop() if len(groups) == 1 else None
            if group is not None:
                found[name] = group
        return found

    def _add_flat(self, flat: dict[str, _Group], name: str, setting: SettingName) -> None:
        """Take one value of a state that is flattened: by the group's number, or a parameter."""
        self.owners.add(setting.owner)
        group = flat.setdefault(f"{setting.owner}:{setting.group}", _Group())
        if setting.field not in _OWN:
            group.fields[setting.field] = lambda: self._value(name)
        if not setting.group.isdecimal():
            group.members = [setting.group]
        elif setting.field == "params":
            tree = self._content.checkpoint.load_object(name)
            if isinstance(tree, list) and all(type(one) is str for one in tree):
                group.members = tree

    def _value(self, name: str) -> Any:
        leaves = list(self._trees.nested(name))
        return leaves[0].value if len(leaves) == 1 else self._content.checkpoint.load_object(name)

    def _add_tree(self, name: str) -> None:
        """Take the list of an optimizer's `state_dict`."""
        self.owners.add(name.rpartition(_GROUPS)[0].rstrip("."))
        for leaf in self._trees.named(name):
            groups = leaf.value.value
            if dotted(leaf.path).endswith(_GROUPS) and isinstance(groups, list):
                self._add_list(groups, leaf.value)

    def _add_list(self, groups: Sequence[Any], of: CopiedTree | None) -> None:
        for one in groups:
            if not isinstance(one, dict):
                continue
            named = one.get("params")
            known = isinstance(named, list) and all(type(member) is str for member in named)
            fields = {
                str(key): value if of is None else of._replace(value=value)
                for key, value in one.items()
                if key not in _OWN
            }
            self._groups.append(_Group(fields, list(named) if known and named else None))

    def _add_common(self) -> None:
        """Look for groups inside the common state of Megatron, or a rank's whole optimizer."""
        seen = set()
        for name, info in self._content.objects.items():
            last = name.rpartition(".")[2]
            if not (is_common(name) or is_group_settings(name) or last in ("optimizer", "optim")):
                continue
            try:
                tree = self._content.checkpoint.load_object(name)
            except FtckptError:
                continue
            for groups in _lists(tree):
                text = repr(groups)
                if info.rank in (None, 0) or text not in seen:
                    self._add_list(groups, None)
                seen.add(text)


def _lists(tree: Any, depth: int = 0) -> Iterable[list[Any]]:
    """Yield the lists of groups in a tree."""
    if depth > 4:
        return
    if isinstance(tree, list) and len(tree) <= 4:
        for one in tree:
            yield from _lists(one, depth + 1)
    elif isinstance(tree, dict):
        groups = tree.get(_GROUPS)
        if isinstance(groups, list):
            yield groups
        for key in ("optimizer", *range(8)):
            if key in tree:
                yield from _lists(tree[key], depth + 1)


# What holds numbers, texts, times, paths, arrays and tensors, and does nothing when it is made.
ALLOWED = re.compile(
    r"(?:__builtin__|builtins)\.(?:bool|bytearray|bytes|complex|dict|float|frozenset|int|list|long"
    r"|object|range|set|slice|str|tuple|unicode|xrange)"
    r"|collections\.(?:Counter|OrderedDict|defaultdict|deque)"
    r"|datetime\.(?:date|datetime|timedelta|timezone)|decimal\.Decimal|fractions\.Fraction"
    r"|uuid\.UUID|argparse\.Namespace|types\.SimpleNamespace|_?io\.BytesIO|_?codecs\.encode"
    r"|(?:copy_reg|copyreg)\._reconstructor"
    r"|pathlib\.(?:_local\.)?(?:Pure)?(?:Posix|Windows)?Path"
    r"|numpy\.(?:ndarray|dtype|dtypes\.\w+DType|_?core\.(?:multiarray\.(?:_reconstruct|scalar)"
    r"|numeric\._frombuffer))"
    r"|torch\.(?:\w*Storage|Size|device|storage\.\w*Storage|torch_version\.TorchVersion"
    r"|serialization\._get_layout|_utils\._rebuild_(?:tensor(?:_v2|_v3)?|parameter)"
    r"|(?:q?u?int|float|bfloat|complex|bool|half|double|long)\w*)"
)


def saved(value: Any, gatherer: Gatherer, *, name: str, allow: Collection[str] = ()) -> bytes:
    """Return what `torch.save` would write of a value.

    Args:
        value: inert data, or a `CopiedTree` of it.
        gatherer: reads the tensors inside.
        name: of the value, for messages.
        allow: classes that the job has allowed, by qualified name.

    Raises:
        UnsafeError: it names a class that is not allowed.
        UnsupportedError: it cannot be written anew.
    """
    try:
        data = _bytes(save(value), gatherer)
    except UnsupportedError as error:
        error.message = f"{name}: {error.message}"
        error.tensor = error.tensor or name
        raise
    foreign = sorted({one for one in classes_in(data) if not ALLOWED.fullmatch(one)} - {*allow})
    if foreign:
        raise UnsafeError(
            f"{name} holds a {foreign[0]}, and torch.load would call it",
            kind="unsafe-pickle",
            hint=f"Reader(..., allow=[{foreign[0]!r}]) if you trust it; or leave {name} out of the"
            " state that is loaded",
            tensor=name,
        )
    return data


def classes_in(data: bytes) -> Iterator[str]:
    """Yield the names that the pickle of a `torch.save` archive refers to.

    Raises:
        UnsafeError: it refers to one in a way that is not known.
    """
    import pickletools

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickle = next(one for one in archive.namelist() if one.endswith("/data.pkl"))
        text = archive.read(pickle)
    for opcode, argument, _ in pickletools.genops(text):
        if opcode.name == "GLOBAL":
            yield str(argument).replace(" ", ".", 1)
        elif opcode.name in ("STACK_GLOBAL", "INST", "EXT1", "EXT2", "EXT4"):
            # Which name that is depends on what lies on the stack.
            raise UnsafeError(
                "a value names a class inside another one, which is not handed to torch",
                kind="unsafe-pickle",
            )


def _bytes(segments: Collection[Segment], gatherer: Gatherer) -> bytes:
    """Return the bytes of a file that is laid out; small enough to be held."""
    import zlib

    made = bytearray()
    for segment in segments:
        if isinstance(segment, Literal):
            made += segment.data
        elif isinstance(segment, Zeros):
            made += bytes(segment.nbytes)
        elif isinstance(segment, Checksums):
            made += segment.build([zlib.crc32(made[a:b]) for a, b in segment.ranges])
        else:
            part = bytearray(segment.nbytes)
            if isinstance(segment, Elements):
                gatherer.fill(segment.shard, segment.start, segment.stop, memoryview(part))
            elif isinstance(segment, Stored):
                gatherer.copy(segment.extent, memoryview(part))
            made += part
    return bytes(made)
