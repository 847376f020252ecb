"""Find the base's tensor that each tensor of an adapter belongs to; refuse what fits none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import NamedTuple

from ftckpt.checkpoint import Checkpoint, Kind, TensorInfo
from ftckpt.errors import CorruptError, UnsupportedError, UsageError
from ftckpt.findings import counted, listed
from ftckpt.formats.huggingface.config import read_config as read_base_config

from .config import AdapterConfig, read_config, require_no_gaps
from .tensors import AdapterTensors, ExpertRows, PackedExperts, Trained, packed, sort_tensors

# Models whose linear layers are stored input first (transformers' Conv1D).
_TURNED = frozenset(("gpt2", "openai-gpt", "imagegpt", "decision_transformer", "gptsan-japanese"))
_COMPUTED = ("float32", "float16", "bfloat16")
_EMBEDDINGS = (
    "embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight",
)  # fmt: skip
_MOST_NESTED = 4  # parameters of one module that are adapted


class LowRank(NamedTuple):
    """`W + scale * B @ A`, and DoRA's magnitude.

    Attributes:
        adapter: that holds the tensors.
        a, b: of shapes [rank x experts, in] and [out, rank x experts].
        scale: the factor.
        rank: of one expert.
        experts: how many matrices the weight has; 1 without a leading axis.
        turned: whether the weight is stored [in, out].
        magnitude: of each output; None without DoRA.
        part: of which expert and rows the weight is; None for all of them.
    """

    adapter: Checkpoint
    a: TensorInfo
    b: TensorInfo
    scale: float
    rank: int
    experts: int = 1
    turned: bool = False
    magnitude: TensorInfo | None = None
    part: ExpertRows | None = None


class Added(NamedTuple):
    """`W + scale * tensor`: the bias of B."""

    adapter: Checkpoint
    info: TensorInfo
    scale: float


class Replaced(NamedTuple):
    """A tensor that was trained whole, in place of the base's."""

    adapter: Checkpoint
    info: TensorInfo


Change = LowRank | Added | Replaced


class ChangedTensor(NamedTuple):
    """A tensor of the result that is computed.

    Attributes:
        info: of the base, from which it is computed.
        name: its own; another where a tied one becomes a tensor of its own.
        changes: in order.
    """

    info: TensorInfo
    name: str
    changes: Sequence[Change]


class AdapterFit(NamedTuple):
    """What all adapters change.

    Attributes:
        targets: the changed tensors, by name.
        untied: the head that was tied to the embedding and is a tensor of its own now; "" for none.
        apart: whether head and embedding differ, so that a configuration must not tie them.
        untouched: modules that an adapter's configuration names and that it holds no tensors of.
    """

    targets: Mapping[str, ChangedTensor]
    untied: str
    apart: bool
    untouched: Sequence[str]


def fit(
    base: Checkpoint, adapters: Sequence[Checkpoint], *, allow_gaps: bool = False
) -> AdapterFit:
    """Return what adapters change in a base.

    Args:
        base: that they are merged into.
        adapters: in order.
        allow_gaps: whether layers without tensors are meant (see `require_no_gaps`).

    Raises:
        RefusedError: an adapter lacks layers that its configuration names.
        UsageError: a module or a shape that the base does not have, or two adapters that replace
            one tensor.
        CorruptError: an adapter contradicts itself, or its tensors were lost.
        UnsupportedError: a variant that is not computed, or a base whose tensors are no floats.
        NotFoundError: what is named as an adapter is none.
    """
    fitting = _Fitting(base, allow_gaps=allow_gaps)
    for adapter in adapters:
        fitting.add(adapter)
    return fitting.done()


class _Fitting:
    def __init__(self, base: Checkpoint, *, allow_gaps: bool) -> None:
        self.base = base
        self.allow_gaps = allow_gaps
        self.config = read_base_config(base)
        self.held = {
            info.name: info
            for info in base.tensors.values()
            if info.component == "model" and info.kind in (Kind.PARAM, Kind.BUFFER)
        }
        self.tied = _Tied.of(base, self.held, self.config)
        self.changes: dict[str, list[Change]] = {}
        self.untouched: list[str] = []
        self.keeps_tie = False
        self.packed: dict[str, PackedExperts] = {}

    def add(self, adapter: Checkpoint) -> None:
        config, found = read_config(adapter), sort_tensors(adapter)
        config.require_affordable(one.module for one in found.trained)
        for name, info in found.bases.items():
            self._replace(adapter, name, info)
        lost = [name for name in found.whole if name not in self.held and name != self.tied.head]
        parameters: dict[str, list[Trained]] = {}
        linear: list[Trained] = []
        for one in found.trained:
            if one.level or self._parameters(config, one.module):
                parameters.setdefault(one.module, []).append(one)
            elif self._weight(f"{one.module}.weight") is None:
                lost.append(one.module)
            else:
                linear.append(one)
        if lost:
            raise self._elsewhere(adapter, lost)
        self._require_trained(adapter, config, linear)
        self._require_saved(adapter, config, found)
        for one in linear:
            self._linear(adapter, config, one, linear)
        for module, several in parameters.items():
            self._of_parameters(adapter, config, module, several)
        for name, info in found.whole.items():
            self._replace(adapter, name, info)
        self._require_tie_known(adapter, config, found)
        self._note_untouched(adapter, config, found)

    def done(self) -> AdapterFit:
        tied, changes = self.tied, self.changes
        untied = ""
        moved = bool(changes.keys() & {tied.head, tied.embedding})
        apart = ""
        if tied.head and moved and self.keeps_tie:
            if tied.head in self.held:
                changes[tied.head] = list(changes[tied.embedding])
        elif tied.head and moved:
            apart = tied.head
            if not tied.stored:
                # What replaces the base's own embedding does so for both.
                own = [c for c in changes.get(tied.embedding, ()) if _is_base(c)]
                changes[tied.head] = [*own, *changes.get(tied.head, ())]
                untied = tied.head
        targets = {}
        for name, several in changes.items():
            info = self._weight(name)
            assert info is not None
            if info.dtype.name not in _COMPUTED:
                raise UnsupportedError(
                    f"{info.name} of the base is {info.dtype.name}: an adapter is merged into"
                    " float32, float16 or bfloat16",
                    hint="--dtype bf16 dequantises the base first",
                    tensor=info.key,
                )
            targets[name] = ChangedTensor(info, name, several)
        return AdapterFit(targets, untied, bool(apart), self.untouched)

    def _weight(self, name: str) -> TensorInfo | None:
        """Return the base's tensor of a name; a tied head is the embedding."""
        if name == self.tied.head and not self.tied.stored:
            return self.held[self.tied.embedding]
        return self.held.get(name)

    def _parameters(self, config: AdapterConfig, module: str) -> list[str]:
        """Return the parameters of a module that were trained by themselves."""
        found = []
        for name in self.held:
            if name.rpartition(".")[0] == module and any(
                name == one or name.endswith(f".{one}") for one in config.parameters
            ):
                found.append(name)
        for one in config.parameters if not found else ():
            name = f"{module}.{one.rpartition('.')[2]}"
            if name != one and not name.endswith(f".{one}"):
                continue
            stored = packed(name, self.held, self.config.get("model_type"))
            if stored is not None:
                self.packed[name] = stored
                found.append(name)
        return found

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a parameter that the base stores, whole or in parts."""
        stored = self.packed.get(name)
        return self.held[name].shape if stored is None else stored.shape

    def _elsewhere(self, adapter: Checkpoint, names: Sequence[str]) -> UsageError:
        return UsageError(
            f"{self.base.source.url} lacks {counted(len(names), 'module')} that"
            f" {adapter.source.url} changes: {listed(names)}",
            hint="the adapter is of another base: `ftckpt inspect --tensors` lists the names",
        )

    def _require_trained(
        self, adapter: Checkpoint, config: AdapterConfig, linear: Sequence[Trained]
    ) -> None:
        unused = [one.module for one in linear if not config.trains(one.module)]
        if unused:
            raise CorruptError(
                f"{adapter.source.url} holds tensors of {listed(unused)}, which its target_modules"
                " do not name: PEFT would not use them",
                kind="bad-metadata",
                file="adapter_config.json",
            )

    def _require_saved(
        self, adapter: Checkpoint, config: AdapterConfig, found: AdapterTensors
    ) -> None:
        """Refuse an adapter that has lost a module of the base that it had trained whole."""
        there = {name.rpartition(".")[0] for name in found.whole}
        for one in config.saved:
            named = {
                name.rpartition(".")[0]
                for name in self.held
                if f".{name.rpartition('.')[0]}".endswith(f".{one}")
            }
            if named and not named & there:
                raise CorruptError(
                    f"{adapter.source.url} was trained with {one} whole (modules_to_save), and"
                    " holds no tensor of it: its values were lost",
                    kind="missing-tensor",
                )

    def _replace(self, adapter: Checkpoint, name: str, info: TensorInfo) -> None:
        held = self._weight(name)
        if held is None:
            raise self._elsewhere(adapter, [name])
        if held.shape != info.shape:
            raise self._misfit(adapter, name, held.shape, info.shape)
        if self.changes.get(name):
            raise UsageError(
                f"{name} is replaced by {adapter.source.url} and changed by another too"
            )
        self.changes[name] = [Replaced(adapter, info)]

    def _misfit(
        self, adapter: Checkpoint, name: str, held: Sequence[int], shape: Sequence[int]
    ) -> UsageError:
        return UsageError(
            f"{name} is {list(held)} in the base, and {list(shape)} by {adapter.source.url}",
            hint="the adapter is of another base, or of one with more rows in its vocabulary",
        )

    def _linear(
        self,
        adapter: Checkpoint,
        config: AdapterConfig,
        one: Trained,
        beside: Sequence[Trained],
    ) -> None:
        name = f"{one.module}.weight"
        held = self._weight(name)
        assert held is not None
        embedding = "embedding_A" in one.parts
        a = one.parts["embedding_A" if embedding else "A"]
        b = one.parts["embedding_B" if embedding else "B"]
        rank = config.rank_of(one.module)
        if len(held.shape) != 2 or len(a.shape) != 2 or len(b.shape) != 2:
            raise UnsupportedError(
                f"{one.module} is a convolution: its adapter is not merged by this version"
            )
        self._require_rank(adapter, a, b, one.module, rank)
        shape = (a.shape[1], b.shape[0]) if embedding else (b.shape[0], a.shape[1])
        turned = embedding or self._is_turned(config, one, held, beside)
        stored = shape if embedding or not turned else shape[::-1]
        if held.shape != stored:
            raise self._misfit(adapter, name, held.shape, stored)
        magnitude = one.parts.get("magnitude")
        if config.dora != (magnitude is not None) or (magnitude and magnitude.numel != b.shape[0]):
            raise CorruptError(
                f"{one.module} of {adapter.source.url} has "
                + ("no magnitude" if magnitude is None else "a magnitude")
                + f", and use_dora is {str(config.dora).lower()}",
                kind="bad-metadata",
            )
        scale = config.scale_of(one.module)
        change = LowRank(adapter, a, b, scale, rank, 1, turned, magnitude)
        self.changes.setdefault(name, []).append(change)
        bias = one.parts.get("bias")
        if bias is not None:
            held_bias = self.held.get(f"{one.module}.bias")
            if held_bias is None:
                raise UnsupportedError(
                    f"{one.module} has no bias, and the adapter adds one: PEFT refuses it too"
                )
            if held_bias.shape != bias.shape:
                raise self._misfit(adapter, held_bias.name, held_bias.shape, bias.shape)
            added = Added(adapter, bias, scale)
            self.changes.setdefault(held_bias.name, []).append(added)

    def _require_rank(
        self, adapter: Checkpoint, a: TensorInfo, b: TensorInfo, module: str, rank: int
    ) -> None:
        if a.shape[0] != rank or b.shape[1] != rank:
            raise CorruptError(
                f"{module} of {adapter.source.url} has the rank {a.shape[0]} in A and"
                f" {b.shape[1]} in B, and {rank} by adapter_config.json",
                kind="bad-metadata",
                file="adapter_config.json",
            )

    def _is_turned(
        self,
        config: AdapterConfig,
        one: Trained,
        held: TensorInfo,
        beside: Sequence[Trained],
    ) -> bool:
        """Return whether a linear layer is stored input first.

        Its shape tells. Of a square one the kind of model does: what PEFT writes as
        `fan_in_fan_out` is that of the last layer that it looked at.
        """
        shape = (one.parts["B"].shape[0], one.parts["A"].shape[1])
        if shape[0] != shape[1]:
            return held.shape == shape[::-1]
        if self.config.get("model_type") in _TURNED:
            return one.module.rpartition(".")[2] not in ("lm_head", "score")
        others = [
            o for o in beside if "A" in o.parts and o.parts["A"].shape[1] != o.parts["B"].shape[0]
        ]
        stored = [(self.held.get(f"{o.module}.weight"), o) for o in others]
        elsewhere = any(
            w is not None and w.shape == (o.parts["A"].shape[1], o.parts["B"].shape[0])
            for w, o in stored
        )
        if config.turned or elsewhere:
            raise UnsupportedError(
                f"{one.module} is square: whether it is stored input first is not known",
                hint="the base's config.json names the kind of model: merge into its folder",
            )
        return False

    def _of_parameters(
        self,
        adapter: Checkpoint,
        config: AdapterConfig,
        module: str,
        several: Sequence[Trained],
    ) -> None:
        """Match the adapters of a module's parameters by their shapes: PEFT nests them unnamed."""
        names = self._parameters(config, module)
        if len(names) < len(several):
            raise self._elsewhere(adapter, [f"{module} ({listed(config.parameters)})"])
        if len(names) > len(several) or len(names) > _MOST_NESTED:
            raise CorruptError(
                f"{module} has {len(names)} parameters that {adapter.source.url} names, and tensors"
                f" of {len(several)}",
                kind="missing-tensor",
            )
        ways = []
        for order in permutations(several):
            fits = [self._ways(config, n, one) for n, one in zip(names, order, strict=True)]
            if all(fits):
                ways.append((order, fits))
        if not ways:
            shapes = [n for one in several for p in one.parts.values() for n in p.shape]
            raise self._misfit(adapter, module, self._shape(names[0]), shapes)
        turns = {
            turn for _, fits in ways for ways_of in fits if len(ways_of) == 1 for turn in ways_of
        }
        if len(ways) > 1 or len(turns) != 1:
            raise UnsupportedError(
                f"{listed(names)} are of shapes that do not tell which adapter is whose"
            )
        (order, _), (turned,) = ways[0], turns
        for name, one in zip(names, order, strict=True):
            shape, a, b = self._shape(name), one.parts["A"], one.parts["B"]
            experts = shape[0] if len(shape) == 3 else 1
            rank, scale = config.rank_of(name), config.scale_of(name)
            change = LowRank(adapter, a, b, scale, rank, experts, turned)
            if name not in self.packed:
                self.changes.setdefault(name, []).append(change)
                continue
            for stored, rows in self.packed[name].parts.items():
                self.changes.setdefault(stored, []).append(change._replace(part=rows))

    def _ways(self, config: AdapterConfig, name: str, one: Trained) -> set[bool]:
        """Return in which ways a parameter may be stored (input first or not), by its shape."""
        shape = self._shape(name)
        if set(one.parts) != {"A", "B"} or len(shape) not in (2, 3):
            return set()
        a, b = one.parts["A"].shape, one.parts["B"].shape
        wide = config.rank_of(name) * (shape[0] if len(shape) == 3 else 1)
        if len(a) != 2 or len(b) != 2 or a[0] != wide or b[1] != wide:
            return set()
        found: set[bool] = {False} if shape[-2:] == (b[0], a[1]) else set()
        if len(shape) == 3 and shape[-2:] == (a[1], b[0]):
            found.add(True)
        return found

    def _require_tie_known(
        self, adapter: Checkpoint, config: AdapterConfig, found: AdapterTensors
    ) -> None:
        tied = self.tied
        embeds = any("embedding_A" in one.parts for one in found.trained)
        embeds = embeds or any(name.endswith(_EMBEDDINGS) for name in found.whole)
        if embeds and tied.unknown:
            raise UnsupportedError(
                f"{adapter.source.url} changes the embedding, and nothing says whether the base"
                " uses it for its output too",
                hint="merge into the base's folder: its config.json says it",
            )
        if config.tying and tied.head and self.changes.keys() & {tied.head, tied.embedding}:
            if tied.head in self.changes or tied.stored:
                raise UnsupportedError(
                    f"{adapter.source.url} was trained with ensure_weight_tying and holds"
                    f" or meets {tied.head} too: such an adapter is not merged by this version"
                )
            self.keeps_tie = True

    def _note_untouched(
        self, adapter: Checkpoint, config: AdapterConfig, found: AdapterTensors
    ) -> None:
        if not config.targets:
            return
        has = {one.module for one in found.trained}
        whole = {name.rpartition(".")[0] for name in found.whole}
        modules = [
            name.removesuffix(".weight")
            for name, info in self.held.items()
            if name.endswith(".weight") and len(info.shape) == 2
        ]
        config.require_affordable(modules)
        # The model that was trained has no modules of experts that it packs.
        whole |= {part.removesuffix(".weight") for p in self.packed.values() for part in p.parts}
        lacking = [one for one in modules if one not in has | whole and config.trains(one)]
        if not self.allow_gaps:
            require_no_gaps(adapter, lacking, has, self.config)
        if config.targets != "all-linear":
            self.untouched += [one for one in lacking if ".experts." not in one]


def _is_base(change: Change) -> bool:
    return isinstance(change, Replaced) and ".base_layer." in change.info.name


class _Tied(NamedTuple):
    """An output head that is the embedding.

    Attributes:
        head: its name; "" where it is none.
        embedding: the name of the embedding.
        unknown: whether nothing says if there is one.
        stored: whether it is a tensor of its own all the same, and nothing says that it is tied.
    """

    head: str = ""
    embedding: str = ""
    unknown: bool = False
    stored: bool = False

    @classmethod
    def of(
        cls, base: Checkpoint, held: Mapping[str, TensorInfo], config: Mapping[str, object]
    ) -> _Tied:
        found = sorted(_embeddings(held))
        for alias, owner in base.aliases.items():
            pair = {base.tensors[alias].name, base.tensors[owner].name}
            heads = pair & {"lm_head.weight"}
            if heads and (other := pair - heads):
                return cls("lm_head.weight", other.pop())
        says = config.get("tie_word_embeddings")
        if "lm_head.weight" in held and says is not False and len(found) == 1:
            # The model's class may tie them where its configuration says nothing.
            return cls("lm_head.weight", found[0], stored=says is not True)
        if "lm_head.weight" in held or not found:
            return cls()
        if not config:
            return cls(unknown=True)
        named = config.get("architectures")
        kinds = [str(one) for one in named] if isinstance(named, list) else []
        has_head = any("LMHead" in k or k.endswith("ForCausalLM") for k in kinds)
        if not kinds:
            return cls(unknown=True)
        if not has_head or says is False:
            return cls()
        return cls("lm_head.weight", found[0]) if len(found) == 1 else cls(unknown=True)


def _embeddings(held: Mapping[str, TensorInfo]) -> Iterator[str]:
    for name, info in held.items():
        if name.endswith(_EMBEDDINGS) and len(info.shape) == 2:
            yield name
