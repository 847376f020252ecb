"""FSDP2 around torchao's optimizers: one file a rank, and DCP, of the same jobs.

`make_coded.py` says what the jobs are. With torchao 0.18, FSDP2 loaded what `reshard` writes for
other numbers of ranks, and trained on with the losses of the uninterrupted run.
"""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from zlib import crc32

import pytest
import torch
from safetensors.torch import load_file

from ftckpt import convert, open_checkpoint, reshard, seal
from ftckpt.checkpoint import Box, Extent, Kind
from ftckpt.checkpoint.dtypes import DTYPES
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.errors import CorruptError, ExitCode, FtckptError, UnsafeError, UnsupportedError
from ftckpt.findings import Severity
from ftckpt.formats.dcp.items import Item, ItemWindow, open_item
from ftckpt.formats.dcp.reader import DcpCheckpoint
from ftckpt.formats.pickles.walk import leaves
from ftckpt.formats.state.coded_shards import (
    CodedShard,
    OwnShard,
    ReadMany,
    Refuse,
    is_covered,
    joined,
)
from ftckpt.formats.state.paths import coded_in
from ftckpt.formats.torch_files.inner import InnerPart
from ftckpt.formats.torch_files.stream import parse_stream
from ftckpt.formats.torch_files.values import Composite, StoredStorage, SubclassRef, TensorRef
from ftckpt.inspection import inspect
from ftckpt.inspection.resume import Presence, resume_check
from ftckpt.transfer.content import Content
from ftckpt.verification import Level, VerifyOptions, verify

SAMPLES = Path(__file__).parents[2] / "data" / "ranks" / "coded"
WORLDS = {"adamw8bit": 2, "adamw4bit": 3, "adamwfp8": 3, "float8": 2, "nf4": 2}
TRAINED = ("adamw8bit", "adamw4bit", "adamwfp8")
MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(params=["ranks", "dcp"])
def form(request: pytest.FixtureRequest) -> str:
    """Return which of the two forms of one save is meant."""
    found: str = request.param
    return found


def sample(name: str, form: str, tmp_path: Path) -> Path:
    """Return a copy of one sample."""
    place = tmp_path / "saved"
    tmp_path.mkdir(exist_ok=True)
    if form == "dcp":
        shutil.copytree(SAMPLES / name / "dcp", place)
    else:
        place.mkdir()
        for file in SAMPLES.joinpath(name).glob("rank_*"):
            shutil.copy(file, place)
    return place


def truth(name: str) -> dict[str, bytes]:
    """Return the tensors of live memory by their keys."""
    found = {}
    for path, tensor in load_file(SAMPLES / name / "truth.safetensors").items():
        # The weight that a class holds as it is has the module's name for it.
        parameter, inside, leaf = path.removesuffix("._tensor").partition("/")
        key = f"{leaf}:{parameter}" if leaf in MOMENTS else f"optimizer:{parameter}.{leaf}"
        data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        found[key if inside else parameter] = data
    return found


def classes_in(file: Path) -> set[str]:
    """Return the classes of the tensor subclasses in a file of torch.save."""
    data = file.read_bytes()
    stream = parse_stream(lambda at, n: data[at : at + n], len(data), file=file.name)
    return {one.type_name for _, one in leaves(stream.tree) if type(one) is SubclassRef}


def holds(place: Path, name: str) -> None:
    opened = open_checkpoint(str(place))
    wanted = truth(name)
    for key, data in wanted.items():
        assert read_tensor(opened, key) == data
    rate = {"optimizer:param_groups.0.lr"} if name in TRAINED else set()
    assert opened.tensors.keys() - wanted.keys() == rate


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("to", ["", "safetensors", "dcp", "ranks"])
def test_what_lies_inside_equals_memory(name: str, to: str, form: str, tmp_path: Path) -> None:
    place = sample(name, form, tmp_path)
    if to:
        convert(str(place), str(tmp_path / "written"), to=to)
        place = tmp_path / "written"
    holds(place, name)


@pytest.mark.parametrize("name", TRAINED)
def test_its_values_are_sound_and_a_restart_finds_its_moments(
    name: str, form: str, tmp_path: Path
) -> None:
    opened = open_checkpoint(str(sample(name, form, tmp_path)))
    report = verify(opened, VerifyOptions(level=Level.VALUES))
    assert report.code is ExitCode.OK
    assert not [found for found in report.findings if found.kind == "bad-metadata"]
    moments = next(item for item in resume_check(opened) if item.key == "moments")
    assert moments.presence is Presence.PRESENT
    weights = [info for info in opened.tensors.values() if info.kind is Kind.PARAM]
    held = load_file(SAMPLES / name / "truth.safetensors").items()
    assert {info.name: info.shape for info in weights} == {
        path: tuple(tensor.shape) for path, tensor in held if "/" not in path
    }


def test_joined_and_apart(form: str, tmp_path: Path) -> None:
    opened = open_checkpoint(str(sample("adamw8bit", form, tmp_path)))
    shapes = {key: info.shape for key, info in opened.tensors.items()}
    assert shapes["optimizer:short.exp_avg.codes"] == (131, 64)
    assert shapes["optimizer:short.exp_avg.scale"] == (131,)
    assert shapes["optimizer:mixed.exp_avg.0.codes"] == (64, 64)
    assert shapes["optimizer:mixed.exp_avg.1"] == (63, 64)
    assert len(opened.tensors["optimizer:short.exp_avg.qmap"].pieces) == 2


@pytest.mark.parametrize(
    ("name", "world"),
    [("adamw4bit", 1), ("adamw4bit", 2), ("adamwfp8", 1), ("float8", 4), ("nf4", 4)],
)
def test_other_ranks_get_the_same(name: str, world: int, form: str, tmp_path: Path) -> None:
    place = sample(name, form, tmp_path)
    reshard(str(place), str(tmp_path / "other"), dp=world)
    holds(tmp_path / "other", name)
    reshard(str(tmp_path / "other"), str(tmp_path / "back"), dp=WORLDS[name])
    holds(tmp_path / "back", name)


@pytest.mark.parametrize("name", ["adamw4bit", "float8", "nf4"])
def test_torch_save_holds_the_whole_subclass(name: str, form: str, tmp_path: Path) -> None:
    place = sample(name, form, tmp_path)
    convert(str(place), str(tmp_path / "one.pt"), to="torchsave")
    holds(tmp_path / "one.pt", name)
    (found,) = classes_in(tmp_path / "one.pt")
    assert found.startswith("torchao.")


@pytest.mark.parametrize("world", [1, 2])
def test_a_store_of_nothing_but_float8_weights(world: int, tmp_path: Path) -> None:
    """No item is as long as a plain tensor's; the records keep the class and its name inside."""
    convert(str(SAMPLES / "float8" / "dcp"), str(tmp_path / "alone"), to="dcp", drop=["*.bias"])
    place = tmp_path / "alone"
    if world == 1:
        reshard(str(place), str(tmp_path / "one"), dp=1)
        place = tmp_path / "one"
    opened = open_checkpoint(str(place))
    assert opened.tensors.keys() == {"0.weight", "1.weight"}
    assert all(info.kind is Kind.PARAM for info in opened.tensors.values())
    for key in opened.tensors:
        assert read_tensor(opened, key) == truth("float8")[key]
        record = opened.load_object(f"model.{key}")
        assert record.type_name.endswith(".WeightWithDynamicFloat8CastTensor")
        assert "_tensor" in record.state
    assert verify(opened).code is ExitCode.OK
    convert(str(place), str(tmp_path / "one.pt"), to="torchsave")
    assert len(classes_in(tmp_path / "one.pt")) == 1
    convert(str(place), str(tmp_path / "hf"), to="safetensors")
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == {"0.weight", "1.weight"}


def test_in_a_trainers_folder_too(tmp_path: Path) -> None:
    place = tmp_path / "checkpoint-3"
    shutil.copytree(SAMPLES / "adamw4bit" / "dcp", place / "pytorch_model_fsdp_0")
    (place / "trainer_state.json").write_text('{"global_step": 3}')
    holds(place, "adamw4bit")
    convert(str(place), str(tmp_path / "one.pt"), to="torchsave")
    holds(tmp_path / "one.pt", "adamw4bit")
    assert classes_in(tmp_path / "one.pt") == {"torchao.optim.subclass_4bit.OptimState4bit"}


@pytest.mark.parametrize("dp", [0, 1, 4])
def test_a_shard_that_is_not_in_codes_is_not_joined(dp: int, form: str, tmp_path: Path) -> None:
    place, written = sample("adamw8bit", form, tmp_path), tmp_path / "written"
    act = partial(reshard, dp=dp) if dp else partial(convert, to="torchsave")
    with pytest.raises(UnsupportedError, match=r"mixed\.exp_avg.*plain numbers, as torchao"):
        act(str(place), str(written))
    assert not written.exists()


@pytest.mark.parametrize(
    ("box", "why"),
    [
        (Box((0, 0), (1, 100)), "elements 0 to 100 of 8192 .* inside one of its blocks of 256"),
        (Box((0, 0), (4, 1024)), "columns of rows would be cut"),
    ],
)
def test_a_block_is_not_cut(box: Box, why: str) -> None:
    content = Content.of(open_checkpoint(str(SAMPLES / "adamwfp8" / "dcp")))
    (first, _) = coded_in(content)
    with pytest.raises(UnsupportedError, match=why):
        first.shard(box)


def test_a_tensor_inside_is_not_left_out_alone(form: str, tmp_path: Path) -> None:
    place = sample("adamw4bit", form, tmp_path)
    key = "optimizer:wide.exp_avg.scale"
    with pytest.raises(UnsupportedError, match="cannot be changed or left out alone"):
        convert(str(place), str(tmp_path / "cut"), to="dcp", drop=[key])
    convert(str(place), str(tmp_path / "less"), to="dcp", drop=["optimizer:wide.exp_avg.*"])
    held = open_checkpoint(str(tmp_path / "less"))
    assert {k for k in held.tensors if "wide" in k and "exp_avg" in k} == {
        f"optimizer:wide.exp_avg_sq.{part}" for part in ("codes", "scale", "qmap")
    }


@pytest.mark.parametrize("part", ["codes", "scale", "qmap"])
def test_a_flipped_bit_is_found(part: str, form: str, tmp_path: Path) -> None:
    place = sample("adamw8bit", form, tmp_path)
    opened = open_checkpoint(str(place))
    key = f"optimizer:short.exp_avg.{part}"
    extent = opened.tensors[key].pieces[1].extent
    data = bytearray((place / extent.file).read_bytes())
    data[extent.offset + 5] ^= 1
    (place / extent.file).write_bytes(data)
    report = verify(open_checkpoint(str(place)), VerifyOptions(level=Level.CONTENT))
    assert report.code is ExitCode.CORRUPT
    told = {found.tensor for found in report.findings if found.severity is Severity.ERROR}
    assert told & {key, "optimizer.state.short.exp_avg"}
    seal(str(sample("adamw8bit", form, tmp_path / "sealed")))
    sealed = tmp_path / "sealed" / "saved"
    (sealed / extent.file).write_bytes(data)
    assert verify(open_checkpoint(str(sealed))).code is ExitCode.CORRUPT


def test_code_tables_that_differ_are_found(tmp_path: Path) -> None:
    """All checksums fit: the table of codes of one rank is another's than its neighbour's."""
    place = sample("adamw8bit", "ranks", tmp_path)
    file = place / "rank_1_of_2.pt"
    opened = open_checkpoint(str(place))
    first, second = opened.tensors["optimizer:short.exp_avg.qmap"].pieces
    assert (first.replica, second.replica) == (0, 1)
    data = bytearray(file.read_bytes())
    data[second.extent.offset + 5] ^= 1
    file.write_bytes(data)
    report = verify(open_checkpoint(str(place)), VerifyOptions(level=Level.VALUES))
    assert "replica-differs" in {found.kind for found in report.findings}


def test_code_tables_that_differ_are_all_kept(tmp_path: Path) -> None:
    """The codes of each rank mean numbers by its own table; all checksums are right."""
    place = sample("adamw8bit", "ranks", tmp_path)
    file = place / "rank_1_of_2.pt"
    table = open_checkpoint(str(place)).tensors["optimizer:short.exp_avg.qmap"].pieces[1].extent
    other = bytes(reversed(file.read_bytes()[table.offset : table.offset + table.length]))
    with zipfile.ZipFile(file) as archive:
        held = {entry.header_offset: entry for entry in archive.infolist()}
        (name,) = (e.filename for at, e in held.items() if 0 < table.offset - at < 200)
        records = {entry.filename: archive.read(entry) for entry in held.values()}
    with zipfile.ZipFile(file, "w") as archive:
        for one, data in records.items():
            archive.writestr(one, other if one == name else data)
    report = verify(open_checkpoint(str(place)))
    assert [f.tensor for f in report.findings if f.kind == "replica-differs"] == ["exp_avg:short"]
    convert(str(place), str(tmp_path / "written"), to="safetensors")
    opened = open_checkpoint(str(tmp_path / "written"))
    tables = [read_tensor(opened, f"optimizer:short.exp_avg.{rank}.qmap") for rank in (0, 1)]
    assert tables == [truth("adamw8bit")["optimizer:short.exp_avg.qmap"], other]
    with pytest.raises(UnsupportedError, match=r"short\.exp_avg.*different tables of codes"):
        reshard(str(place), str(tmp_path / "one"), dp=1)


def test_a_lost_rank_and_a_rank_of_another_job_are_found(form: str, tmp_path: Path) -> None:
    place = sample("adamw4bit", form, tmp_path)
    file = place / ("__1_0.distcp" if form == "dcp" else "rank_1_of_3.pt")
    file.unlink()
    assert verify(open_checkpoint(str(place))).code in (ExitCode.CORRUPT, ExitCode.INCOMPLETE)
    other = sample("adamw8bit", form, tmp_path / "other")
    shutil.copy(other / ("__1_0.distcp" if form == "dcp" else "rank_1_of_2.pt"), file)
    assert verify(open_checkpoint(str(place))).code is ExitCode.CORRUPT


def test_a_rank_of_another_step_is_found(tmp_path: Path) -> None:
    """Its archive is whole, and all checksums are right."""
    place = sample("adamw8bit", "ranks", tmp_path)
    assert verify(open_checkpoint(str(place))).code is ExitCode.OK
    file = place / "rank_1_of_2.pt"
    with zipfile.ZipFile(file) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    (pickle,) = (name for name in held if name.endswith("data.pkl"))
    assert held[pickle].count(b"K\x03s.") + held[pickle].count(b"K\x03u.") == 1
    held[pickle] = held[pickle].replace(b"K\x03u.", b"K\x04u.").replace(b"K\x03s.", b"K\x04s.")
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in held.items():
            archive.writestr(name, data)
    assert verify(open_checkpoint(str(place))).code is ExitCode.CORRUPT


@pytest.mark.parametrize("error", [None, UnsafeError("deep", kind="unsafe-pickle")])
def test_what_is_wrong_with_every_shard_is_told(
    error: FtckptError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a store whose other tensors are read."""

    def none(
        _: object, dtype: object, shards: Sequence[CodedShard], refuse: Refuse, read: object
    ) -> tuple[None, list[InnerPart]]:
        if error:
            raise error
        for shard in shards:
            refuse(shard, "has no scale in")
        return None, []

    monkeypatch.setattr("ftckpt.formats.state.coded_shards.joined", none)
    opened = open_checkpoint(str(SAMPLES / "adamwfp8" / "dcp"))
    report = verify(opened)
    assert report.code is (error.exit_code if error else ExitCode.CORRUPT)
    told = {found.tensor for found in report.findings if found.kind == "bad-metadata"}
    assert error or told == {"exp_avg:wide", "exp_avg_sq:wide"}
    key = next(k for k, info in opened.tensors.items() if info.kind is Kind.PARAM)
    assert read_tensor(opened, key) == truth("adamwfp8")[key]


class TestShardsThatAreNotReadAtOpening:
    """Of four alike, the records of the first and the last are read, and the others compared."""

    KEY = "optimizer:wide.exp_avg.codes"
    NAME = "optimizer.state.wide.exp_avg"

    @pytest.fixture(scope="class")
    @classmethod
    def written(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Return a store of four shards, each of its own row."""
        place = tmp_path_factory.mktemp("written") / "four"
        reshard(str(SAMPLES / "adamw4bit" / "dcp"), str(place), dp=4)
        (place / "ftckpt.manifest.json").unlink()
        return place

    @pytest.fixture
    def four(self, written: Path, tmp_path: Path) -> Path:
        """Return a copy of it."""
        shutil.copytree(written, tmp_path / "four")
        return tmp_path / "four"

    @staticmethod
    def record(place: Path, name: str, row: int) -> Extent:
        """Return where the record of one shard is."""
        opened = open_checkpoint(str(place))
        assert isinstance(opened, DcpCheckpoint)
        (item,) = [c.item for c in opened.meta.tensors[name].chunks if c.offsets[0] == row]
        assert item is not None
        return Extent(item.path, item.offset, item.length)

    def change(self, place: Path, old: bytes, new: bytes, row: int = 1) -> None:
        """Put other bytes into the record of one shard, which is the second."""
        at = self.record(place, self.NAME, row)
        data = bytearray((place / at.file).read_bytes())
        record = bytes(data[at.offset : at.end])
        assert record.count(old)
        data[at.offset : at.end] = record.replace(old, new)
        assert len(data) == (place / at.file).stat().st_size
        (place / at.file).write_bytes(data)

    def change_table(self, place: Path, row: int) -> bytes:
        """Give one shard a table of its own, which is returned."""
        pieces = open_checkpoint(str(place)).tensors["optimizer:wide.exp_avg.qmap"].pieces
        at = pieces[row].extent
        table = (place / at.file).read_bytes()[at.offset : at.end]
        changed = bytes([table[0] ^ (row + 1)]) + table[1:]
        for old, new in ((table, changed), (crc_bytes(table), crc_bytes(changed))):
            self.change(place, old, new, row)
        return changed

    def test_two_of_four_records_are_read(
        self, four: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        names: list[str] = []
        parse = ItemWindow.parse

        def counted(window: ItemWindow) -> object:
            names.append(window.item.name)
            return parse(window)

        monkeypatch.setattr(ItemWindow, "parse", counted)
        opened = open_checkpoint(str(four))
        assert names.count(self.NAME) == 2
        assert opened.tensors[self.KEY].shape == (4096,)
        assert read_tensor(opened, self.KEY) == truth("adamw4bit")[self.KEY]
        assert names.count(self.NAME) == 4
        read_tensor(opened, "optimizer:wide.exp_avg.scale")
        assert names.count(self.NAME) == 4

    def test_records_that_the_checks_compared_are_not_read_again(
        self, four: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = open_checkpoint(str(four))
        assert isinstance(opened, DcpCheckpoint)
        list(opened.check())
        monkeypatch.setattr(ItemWindow, "parse", None)
        assert read_tensor(opened, self.KEY) == truth("adamw4bit")[self.KEY]

    @pytest.mark.parametrize("inside", [False, True])
    def test_inspect_tells_what_was_not_read(
        self, four: Path, tmp_path: Path, inside: bool
    ) -> None:
        """Also of a part of a trainer's directory; `verify`, which reads all, does not."""
        place = four
        if inside:
            place = tmp_path / "run" / "checkpoint-5"
            place.mkdir(parents=True)
            (place / "trainer_state.json").write_text('{"global_step": 5}')
            four.rename(place / "pytorch_model_fsdp_0")
        opened = open_checkpoint(str(place))
        told = "4 of 8 records of shards were taken to be as others of their tensors"
        assert sum(told in note.message for note in inspect(opened).notes) == 1
        assert not any(told in found.message for found in verify(opened).findings)

    def test_records_of_one_file_are_compared_together(
        self, four: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Those of the moment behind it; damage of one is told when its own elements are wanted."""
        at = self.record(four, self.NAME + "_sq", 1)
        with (four / at.file).open("r+b") as file:
            file.seek(at.end - 22)
            file.write(bytes(22))
        read: list[str] = []
        parse = ItemWindow.parse

        def counted(window: ItemWindow) -> object:
            read.append(window.item.name)
            return parse(window)

        opened = open_checkpoint(str(four))
        monkeypatch.setattr(ItemWindow, "parse", counted)
        assert read_tensor(opened, self.KEY) == truth("adamw4bit")[self.KEY]
        assert sorted(read) == 2 * [self.NAME] + 2 * [self.NAME + "_sq"]
        for _ in range(2):
            with pytest.raises(CorruptError):
                read_tensor(opened, "optimizer:wide.exp_avg_sq.codes")

    def refused(self, place: Path, error: type[FtckptError], code: ExitCode, kind: str) -> None:
        opened = open_checkpoint(str(place))
        with pytest.raises(error):
            read_tensor(opened, self.KEY)
        with pytest.raises(error):
            convert(str(place), str(place.parent / "out"), to="safetensors")
        assert not (place.parent / "out").exists()
        report = verify(open_checkpoint(str(place)))
        assert report.code is code
        assert (kind, self.NAME) in {(f.kind, f.tensor) for f in report.findings}

    def test_other_settings(self, four: Path) -> None:
        """Those of `exp_avg_sq`, whose codes have no sign."""
        at = self.record(four, self.NAME + "_sq", 1)
        other = (four / at.file).read_bytes()[at.offset : at.end]
        here = self.record(four, self.NAME, 1)
        own = (four / here.file).read_bytes()[here.offset : here.end]
        self.change(four, own, other)
        self.refused(four, UnsupportedError, ExitCode.UNSUPPORTED, "unsupported")

    def test_another_table(self, four: Path) -> None:
        """Nothing is damaged; the codes that were joined at opening are not one tensor."""
        self.change_table(four, 1)
        self.refused(four, UnsupportedError, ExitCode.UNSUPPORTED, "unsupported")

    def test_another_table_of_a_shard_that_keeps_its_own(self, four: Path) -> None:
        """As where one of the shards is plain: each decodes by the table beside it."""
        self.change_table(four, 1)
        opened = open_checkpoint(str(four))
        assert isinstance(opened, DcpCheckpoint)
        cut, place = opened.cut[self.NAME], self.record(four, self.NAME, 1)
        window = open_item(opened.source, Item(self.NAME, place, (), 1))
        assert isinstance(window, ItemWindow)
        with pytest.raises(UnsupportedError, match="another table"):
            cut.require(window.parse(), window.item, opened.source)
        own = tuple(OwnShard(box, f".{n}", coded=True) for n, box in enumerate(cut.tensor.boxes))
        apart = cut._replace(tensor=cut.tensor._replace(own=own))
        apart.require(window.parse(), window.item, opened.source)

    @pytest.mark.parametrize("rows", [(1, 2, 3), (1, 3), (3,)])
    def test_tables_of_their_own(self, four: Path, tmp_path: Path, rows: Sequence[int]) -> None:
        """Every shard keeps its parts, as where every rank quantised what it had."""
        pristine = shutil.copytree(four, tmp_path / "pristine")
        tables = {}
        for row in reversed(rows):
            shutil.rmtree(tmp_path / "one", ignore_errors=True)
            shutil.copytree(pristine, tmp_path / "one")
            tables[row] = self.change_table(tmp_path / "one", row)
            at = self.record(four, self.NAME, row)
            shutil.copy(tmp_path / "one" / at.file, four / at.file)
        opened = open_checkpoint(str(four))
        assert isinstance(opened, DcpCheckpoint)
        assert not opened.cut[self.NAME].supposed
        report = verify(opened, VerifyOptions(level=Level.VALUES))
        assert report.code is ExitCode.OK
        assert "replica-differs" in {found.kind for found in report.findings}
        codes = b""
        for row in range(4):
            codes += read_tensor(opened, f"optimizer:wide.exp_avg.{row}.codes")
            table = read_tensor(opened, f"optimizer:wide.exp_avg.{row}.qmap")
            assert table == tables.get(row, table)
        assert codes == truth("adamw4bit")[self.KEY]

    def test_tensors_that_lie_elsewhere(self, four: Path) -> None:
        """Its pickle takes the scale and the table from each other's place."""
        self.change(four, b"data/1", b"data/9")
        self.change(four, b"data/2", b"data/1")
        self.change(four, b"data/9", b"data/2")
        self.refused(four, CorruptError, ExitCode.CORRUPT, "bad-metadata")

    def test_a_record_that_is_damaged(self, four: Path) -> None:
        self.change(four, b"OptimState4bit", b"OptimState5bit")
        self.refused(four, CorruptError, ExitCode.CORRUPT, "bad-crc")


def crc_bytes(data: bytes) -> bytes:
    """Return a CRC-32 as an archive holds it."""
    return crc32(data).to_bytes(4, "little")


def no_bytes(extents: Sequence[Extent]) -> list[bytes]:
    """Stand for a source that nothing is to be read from."""
    raise AssertionError(extents)


class TestShards:
    """Records that contradict themselves."""

    @staticmethod
    def shard(rows: int, start: int, **other: object) -> CodedShard:
        """Return a shard of rows of 4 elements in blocks of 8."""
        numel = rows * 4
        sizes = {"codes": (rows, 4), "scale": (numel // 8,), "qmap": (16,)}
        refs = {
            part: TensorRef(part, 0, size, tuple(4**n for n in range(len(size)))[::-1], _U8)
            for part, size in sizes.items()
        }
        record = SubclassRef()
        record.type_name = "torchao.optim.subclass_8bit.OptimState8bit"
        record.base = Composite("wrapper", {"shape": (rows, 4), "dtype": _F32})
        record.state = {**refs, "signed": True, "block_size": 8, **other}
        place = Extent("a.pt", 0, 10**6)
        storages = {part: StoredStorage(place, _U8, 10**6, 5) for part in sizes}
        return CodedShard(Box((start, 0), (rows, 4)), record, storages, None, "a.pt")

    def with_table(self, start: int, crc: int | None, **other: object) -> CodedShard:
        """Return a shard whose table of codes has this checksum."""
        shard = self.shard(4, start, **other)
        table = shard.storages["qmap"]._replace(crc32=crc)
        return shard._replace(storages={**shard.storages, "qmap": table})

    def joined(
        self, *shards: CodedShard, rows: int = 8, read: ReadMany = no_bytes
    ) -> tuple[str, list[str]]:
        """Return why shards are apart, or "", and what was refused of them."""
        told: list[str] = []
        tensor, parts = joined((rows, 4), _F32, shards, lambda _, what: told.append(what), read)
        assert tensor is None or parts
        return ("none" if tensor is None else tensor.why), told

    def test_whole_blocks_are_joined(self) -> None:
        assert self.joined(self.shard(4, 0), self.shard(4, 4)) == ("", [])

    def test_a_shard_that_begins_inside_a_block_is_not(self) -> None:
        why, told = self.joined(self.shard(4, 1), self.shard(4, 5), rows=9)
        assert "begins inside a block" in why
        assert not told

    @pytest.mark.parametrize(("starts", "whole"), [((0, 4), True), ((0, 1), False)])
    def test_own_shards_cover_the_tensor_once(self, starts: tuple[int, int], whole: bool) -> None:
        coded, plain = self.shard(4, starts[0]), self.shard(4, starts[1])
        numbers = TensorRef("codes", 0, (4, 4), (4, 1), _F32)
        shards = [coded, plain._replace(value=numbers)]
        tensor, parts = joined((8, 4), _F32, shards, lambda _, what: None, no_bytes)
        assert tensor is not None
        assert [part.suffix for part in parts] == [".0.codes", ".0.scale", ".0.qmap", ".1"]
        assert is_covered(tensor) is whole

    def test_wrong_blocks_are_refused(self) -> None:
        why, told = self.joined(self.shard(4, 0, block_size=16), self.shard(4, 4))
        assert not why
        assert told == ["of [4, 4] cannot have a scale of [2], in"]

    def test_other_settings_are_refused(self) -> None:
        with pytest.raises(UnsupportedError, match="different settings"):
            self.joined(self.shard(4, 0, signed=False), self.shard(4, 4))

    def test_another_shape_is_refused(self) -> None:
        why, told = self.joined(self.shard(4, 0)._replace(box=Box((0, 0), (3, 4))))
        assert (why, told) == ("none", ["needs a shard of [3, 4] and has [4, 4] in"])

    def test_a_missing_scale_is_refused(self) -> None:
        assert self.joined(self.shard(4, 0, scale=None)) == ("none", ["has no scale in"])

    @pytest.mark.parametrize(
        ("crcs", "held", "why"),
        [
            ((5, 5), [], ""),
            ((5, 6), [b"a", b"b"], "its shards have different tables of codes (qmap)"),
            ((5, 6), [b"a", b"a"], ""),
            ((None, None), [b"a", b"b"], "its shards have different tables of codes (qmap)"),
            ((None, None), [b"a", b"a"], ""),
        ],
    )
    def test_different_tables_of_codes_are_kept(
        self, crcs: tuple[int | None, int | None], held: list[bytes], why: str
    ) -> None:
        """Of joined shards one table is kept; the bytes are read if no checksums tell."""
        shards = [self.with_table(n, crc) for n, crc in zip((0, 4), crcs, strict=True)]
        assert self.joined(*shards, read=lambda extents: held[: len(extents)]) == (why, [])

    def test_a_long_table_is_not_read(self) -> None:
        long = TensorRef("qmap", 0, (5000,), (1,), _U8)
        shards = [self.with_table(0, 5, qmap=long), self.with_table(4, 6, qmap=long)]
        assert "different tables" in self.joined(*shards)[0]

    @pytest.mark.parametrize("place", [0, 1])
    def test_a_plain_shard_of_another_type_is_refused(self, place: int) -> None:
        """A replica, or another shard."""
        coded, first = self.shard(4, 0), self.shard(4, 4)
        plain = [
            first._replace(value=TensorRef("codes", 0, (4, 4), (4, 1), _F32)),
            self.shard(4, 4 + 4 * place)._replace(
                value=TensorRef("codes", 0, (4, 4), (4, 1), DTYPES["bfloat16"])
            ),
        ]
        told = self.joined(coded, *plain, rows=12)[1]
        assert told == ["is float32 on another rank and bfloat16 in"]

    def test_a_replica_with_other_tensors_inside_is_refused(self) -> None:
        """Its blocks are smaller."""
        scales = TensorRef("scale", 0, (4,), (1,), _U8)
        other = self.shard(4, 0, scale=scales, block_size=4)
        why, told = self.joined(self.shard(4, 0), other, self.shard(4, 4))
        assert why == "its shards have blocks of different sizes"
        assert told == ["has tensors of another shape or type inside than its replica, in"]

    def test_many_own_shards_take_one_pass(self) -> None:
        """Each box is compared with few others, or 3000 ranks would take a second a state."""
        counted = [self.shard(2, 2 * n)._replace(box=_CountedBox((2 * n, 0), (2, 4)))
                   for n in range(300)]  # fmt: skip
        numbers = TensorRef("codes", 0, (2, 4), (4, 1), _F32)
        _CountedBox.compared = 0
        self.joined(*counted[:-1], counted[-1]._replace(value=numbers), rows=600)
        assert _CountedBox.compared < 3000

    def test_another_tensor_inside_is_unknown(self) -> None:
        more = TensorRef("codes", 0, (1,), (1,), _U8)
        with pytest.raises(UnsupportedError, match="another tensor inside: more"):
            self.joined(self.shard(4, 0, more=more))


class _CountedBox(Box):
    """A box that counts how often any is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        _CountedBox.compared += 1
        return super().__eq__(other)

    __hash__ = Box.__hash__


_U8, _F32 = DTYPES["uint8"], DTYPES["float32"]
