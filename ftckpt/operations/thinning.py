"""What `gc --thin-after` makes of a milestone: its weights alone, by a proven conversion."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ftckpt.errors import RefusedError, UnsupportedError, error_of
from ftckpt.own_files import WEIGHTS
from ftckpt.progress import NULL
from ftckpt.storage import StoreOptions
from ftckpt.workers import Work, limits

from .opening import STORES, opened

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.manifest import ThinnedFrom
    from ftckpt.operations.writing import LaidOut
    from ftckpt.retention.scan.entry import ScannedEntry
    from ftckpt.transfer.content import Content
    from ftckpt.verification.seen import SeenBytes

# What the weights of a format become. A job of DCP loads a DCP of its model with its own names, for
# any number of ranks. Of any other format they are a folder of safetensors: every framework's
# loader of weights takes one, it needs no grid of ranks, and no pickle is in it.
_SAME = frozenset({"dcp"})
_ELSE = "safetensors"

# A checkpoint that holds less than this share beside its weights is not worth a second writing.
_WORTH = 0.1


class WeightsAlone:
    """Weighs, writes and proves the weights of entries of a root.

    Args:
        stores: how to reach object stores.
        work: how.
    """

    def __init__(self, stores: StoreOptions = STORES, work: Work | None = None) -> None:
        self._stores = stores
        self._work = Work.of() if work is None else work

    def weigh(self, found: ScannedEntry) -> int:
        """Return the bytes that the weights of an entry would take; writes nothing.

        Raises:
            UnsupportedError: it is not thinned, and why.
            FtckptError: it cannot be, and why.
        """
        from ftckpt.transfer.prove.rehearsal import rehearse

        _, laid_out = self._laid_out(found, found.place.path + WEIGHTS)
        target, writer, _, same_objects = laid_out.means
        layout = laid_out.layout
        rehearse(laid_out.content, layout, target, same_objects, single=writer.single)
        nbytes = layout.nbytes
        contents = found.entry.contents
        assert contents is not None
        if nbytes > (1 - _WORTH) * contents.nbytes:
            raise UnsupportedError("there is little in it beside its weights")
        return nbytes

    def take(self, found: ScannedEntry, path: str, record: ThinnedFrom) -> int:
        """Check the whole of an entry, write its weights to a path of its store, and prove them.

        All of it is read once more, because nobody will look at what is left out again: damage
        anywhere in it leaves it whole.

        Raises:
            CorruptError: it is damaged; nothing is visible.
            NoResourceError: the disk is full, and nothing of it was left.
            FtckptError: it could not be read or written; the next run goes on.
        """
        from ftckpt.verification import VerifyOptions, VerifyReport, verify

        checkpoint, laid_out = self._laid_out(found, path)
        record = record._replace(left=tuple(laid_out.content.dropped))

        def check(seen: SeenBytes | None = None) -> VerifyReport:
            report = verify(checkpoint.as_stored, VerifyOptions(seen=seen), work=self._work)
            if report.code:
                raise error_of(report.code, f"it stays whole: {report.message}", hint=report.hint)
            return report

        def write(*, restart: bool) -> int:
            done = laid_out.write(
                check=check, work=self._work, device="cpu", restart=restart, thinned=record
            )
            return done.nbytes

        try:
            return write(restart=False)
        except RefusedError:
            # Weights of an earlier save under this name, half built: nobody else builds here.
            return write(restart=True)

    def differ(self, found: ScannedEntry, path: str) -> str:
        """Compare weights that an earlier run has left at a path with those of an entry, all bits.

        Their manifest says whose they are, and anybody who may write the root can write one.

        Returns:
            what differs, "" if nothing does.

        Raises:
            FtckptError: they could not be compared.
        """
        from ftckpt.comparison import Choice, Reading, compare
        from ftckpt.comparison.read import within_budget
        from ftckpt.formats.families.vocabulary import vocabulary_of
        from ftckpt.transfer.content import Content

        checkpoint, content = self._content(found)
        weights = opened(found.root.store.describe(path), self._stores)
        report = compare(
            content,
            Content.of(weights),
            Reading(),
            fields=lambda _: (),
            vocabulary=vocabulary_of(checkpoint, weights, None),
            choice=Choice(tensors=("*",)),
            work=within_budget(replace(self._work, counter=NULL), (checkpoint, weights)),
        )
        if not report.code:
            return ""
        if report.tensors:
            return f"{report.tensors[0].key} is another"
        return report.findings[0].message

    def _content(self, found: ScannedEntry) -> tuple[Checkpoint, Content]:
        from ftckpt.discovery.listing import open_part
        from ftckpt.transfer.content import Content
        from ftckpt.transfer.request.narrowing import Only, only

        entry, child, store = found.entry, found.child, found.root.store
        assert child is not None
        if entry.bases:
            raise UnsupportedError("it is a delta: it is small as it is")
        if entry.needs:
            raise UnsupportedError("it depends on another checkpoint")
        if child.part.recognition.by_names:
            raise UnsupportedError("it holds its checkpoints in folders")
        if child.candidate.step is None or child.candidate.step != entry.step:
            raise UnsupportedError("its name does not say the step of its content")
        checkpoint = open_part(store, child.part)
        require_weights(checkpoint)
        return checkpoint, only(Content.of(checkpoint), Only.MODEL)

    def _laid_out(self, found: ScannedEntry, path: str) -> tuple[Checkpoint, LaidOut]:
        from ftckpt.operations.writing import prepare
        from ftckpt.transfer.layout import LayoutRequest

        checkpoint, content = self._content(found)
        source = checkpoint.source_format
        name = source if source in _SAME else _ELSE
        laid_out = prepare(
            checkpoint, content, name, LayoutRequest(), found.root.store.describe(path),
            jobs=self._work.threads or limits.jobs(), stores=self._stores,
        )  # fmt: skip
        return checkpoint, laid_out


def require_weights(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose weights are not all in its model: what is left would lack them.

    ZeRO 3 keeps the masters alone; some jobs train several models, or an average of one. Some
    optimizers keep an average (ASGD), or what the weights are made of (schedule-free).

    Raises:
        UnsupportedError: what of it would be lost.
    """
    from ftckpt.checkpoint import Kind
    from ftckpt.checkpoint.optimizer_states import holds_weights, is_numbered, named_state
    from ftckpt.findings import listed

    infos = checkpoint.tensors.values()
    names = {info.name for info in infos if info.component == "model"}
    trained = {Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ}
    inside = {i.name for i in infos if i.component == "optimizer" and i.kind in trained}
    # Some optimizers know parameters by their number: these say how many there are.
    numbers = {name for name in inside if is_numbered(name)}
    lost = sorted(inside - numbers - names) or sorted(numbers)[len(names) :]
    if lost:
        raise UnsupportedError(f"its optimizer alone holds {listed(lost, 3)}")
    states = [
        named_state(i.name, names) for i in infos
        if i.component == "optimizer" and i.kind is Kind.OTHER
    ]  # fmt: skip
    averages = sorted({state.leaf for state in states if holds_weights(state)})
    if averages:
        raise UnsupportedError(
            f"its optimizer holds weights that the model does not: {listed(averages, 3)}"
        )
    weights = {Kind.PARAM, Kind.BUFFER}
    others = sorted(
        {i.component for i in infos if i.component not in ("model", "optimizer")
         and (i.kind in weights or i.component == "ema")}
    )  # fmt: skip
    if others:
        raise UnsupportedError(f"it holds other weights, too: {listed(others, 3)}")
