"""A delta is an ordinary checkpoint: every operation on a chain; every way to lose its base."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash

import ftckpt as api
from ftckpt.checkpoint import Checkpoint
from ftckpt.checkpoint.read_tensor import read_tensor
from ftckpt.delta import NAME
from ftckpt.delta.index import MAX_BYTES, ROW, pack_row
from ftckpt.discovery.resolve import open_target
from ftckpt.errors import (
    CorruptError,
    ExitCode,
    FtckptError,
    NoResourceError,
    NotFoundError,
    UnsupportedError,
)
from ftckpt.findings import Severity
from ftckpt.formats.catalog import formats
from ftckpt.formats.delta import chain as delta_chain
from ftckpt.formats.delta.chain import chain
from ftckpt.formats.delta.checkpoint import DeltaCheckpoint
from ftckpt.formats.delta.original import compressed, original_of_delta
from ftckpt.formats.delta.reader import FILES, REST
from ftckpt.storage import StoreOptions, open_store
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import LayoutRequest
from ftckpt.transfer.read.elements import Gatherer
from ftckpt.verification import Level, VerifyOptions, VerifyReport, verify
from ftckpt.workers import Work
from ftckpt.workers.budget import budget, set_budget
from tests.builders.checkpoints import flip, open_checkpoint
from tests.delta.on_disk import (
    index_of,
    pack_delta,
    put,
    run_of,
    save_full,
    state_at,
    training,
    write,
)
from tests.delta.packing import State, pack, trained

CONTENT = VerifyOptions(Level.CONTENT)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A root of a full step 0 and deltas to step 3, each based on the one before."""
    run_of(tmp_path / "run", 4)
    shutil.rmtree(tmp_path / "run" / "whole")
    return tmp_path / "run"


@pytest.fixture
def small_budget() -> Iterator[None]:
    before = budget()
    yield
    set_budget(before)


def kinds(report: VerifyReport) -> set[str]:
    return {f.kind for f in report.findings if f.severity is Severity.ERROR}


def delta_at(path: Path | str) -> DeltaCheckpoint:
    opened = open_checkpoint(path)
    assert isinstance(opened, DeltaCheckpoint)
    return opened


def test_a_chain_of_ten_gives_every_bit_back(tmp_path: Path) -> None:
    states = run_of(tmp_path, 11)
    last = delta_at(tmp_path / "step-10")
    assert len(chain(last)) == 11
    for key, data in states[10].data.items():
        assert read_tensor(last, key) == data
    report = verify(last, CONTENT, work=Work(threads=2))
    assert (report.code, report.evidence) == (ExitCode.OK, "digests")
    assert report.bytes_uncovered == 0


def test_parts_of_tensors_are_read_as_of_any_checkpoint(tmp_path: Path) -> None:
    states = run_of(tmp_path, 3)
    last = open_checkpoint(tmp_path / "step-2")
    gatherer = Gatherer(last)
    shard = Content.of(last).whole("embed.weight")
    for start, stop in ((0, 1), (17, 4000), (4799, 4800)):
        out = memoryview(bytearray(4 * (stop - start)))
        gatherer.fill(shard, start, stop, out)
        assert out == states[2].data["embed.weight"][4 * start : 4 * stop]


def test_predicted_tensors_and_all_threads(tmp_path: Path) -> None:
    before, after = trained(size=(600, 2000))
    pack_delta(tmp_path / "step-1", before, step=1)
    pack_delta(tmp_path / "step-2", after, tmp_path / "step-1", step=2)
    assert any(tensor.helpers for tensor in index_of(tmp_path / "step-2").tensors)
    last = open_checkpoint(tmp_path / "step-2")
    assert verify(last, CONTENT, work=Work(threads=8)).code is ExitCode.OK
    for key, data in after.data.items():
        assert read_tensor(last, key) == data


def test_where_else_helpers_may_lie_is_asked_of_the_last_link_and_for_a_while(
    tmp_path: Path,
) -> None:
    before, after = trained(size=(60, 20))
    pack_delta(tmp_path / "step-1", before, step=1)
    pack_delta(tmp_path / "step-2", after, tmp_path / "step-1", step=2)
    asked: list[str] = []

    def look(key: str, offset: int, view: memoryview) -> bool:
        asked.append(key)
        return False

    delta = delta_at(tmp_path / "step-2")
    assert delta.base is not None
    assert isinstance(delta.base, DeltaCheckpoint)
    assert delta.base.decoding.helpers()
    with delta.decoding.reusing(look):
        assert read_tensor(delta, "w") == after.data["w"]
    needed = {key for several in delta.decoding.helpers().values() for key in several}
    assert sorted(asked) == sorted(needed) == ["exp_avg:w", "exp_avg_sq:w", "master:w"]
    again = delta_at(tmp_path / "step-2")
    with again.decoding.reusing(look):
        asked.clear()
    assert read_tensor(again, "w") == after.data["w"]
    assert not asked


class TestOperations:
    def test_inspect_shows_the_chain(self, run: Path) -> None:
        seen = api.inspect(str(run / "step-3"))
        assert (seen.checkpoint.format, seen.step, seen.tensors.count) == ("delta", 3, 5)
        (note,) = seen.notes
        assert note.message.count("which depends on") == 2
        assert "step-0 (safetensors)" in note.message

    def test_diff_with_the_full_checkpoint_is_empty(self, run: Path, tmp_path: Path) -> None:
        whole = save_full(tmp_path / "whole", training(4)[3])
        assert api.diff(str(run / "step-3"), str(whole)).code is ExitCode.OK
        assert api.diff(str(run / "step-3"), str(run / "step-2")).code is ExitCode.DIFFERENT

    def test_diff_of_deltas_reads_what_their_digests_do_not_say(self, run: Path) -> None:
        found = api.diff(str(run / "step-3"), str(run / "step-2"), trust_recorded=True)
        assert found.evidence["digest"] == 1  # the norm did not change
        assert found.evidence["read"] == 3
        again = api.diff(str(run / "step-3"), str(run / "step-3"), trust_recorded=True)
        assert (again.code, again.evidence["digest"], again.bytes_read) == (ExitCode.OK, 4, 0)

    @pytest.mark.parametrize("to", ["safetensors", "dcp", "torchsave"])
    def test_convert(self, run: Path, tmp_path: Path, to: str) -> None:
        api.convert(str(run / "step-3"), str(tmp_path / "out"), to)
        assert api.diff(str(run / "step-3"), str(tmp_path / "out")).code is ExitCode.OK

    def test_reshard_writes_what_was_packed(self, run: Path, tmp_path: Path) -> None:
        report = api.convert(
            str(run / "step-3"), str(tmp_path / "out"), request=LayoutRequest(dp=4)
        )
        assert report.format == "dcp"
        assert len(list((tmp_path / "out").glob("*.distcp"))) == 4
        assert api.diff(str(run / "step-3"), str(tmp_path / "out")).code is ExitCode.OK

    def test_seal_and_verify_by_the_manifest(self, run: Path) -> None:
        api.seal(str(run / "step-3"))
        report = verify(open_checkpoint(run / "step-3"), CONTENT)
        assert (report.code, report.evidence) == (ExitCode.OK, "manifest")

    def test_latest_and_selectors(self, run: Path) -> None:
        assert api.latest(str(run), level="content").path == str(run / "step-3")
        assert api.open_checkpoint(f"{run}@2").step == 2
        assert api.open_checkpoint(f"{run}@latest").step == 3

    def test_values(self, run: Path) -> None:
        assert verify(open_checkpoint(run / "step-3"), VerifyOptions(Level.VALUES)).code == 0

    def test_objects_of_every_form(self, tmp_path: Path) -> None:
        import io

        import torch

        stream = io.BytesIO()
        torch.save({"lr": 0.5}, stream)
        objects = {"scheduler": stream.getvalue(), "config": b'{"a": 1}', "raw": b"abc"}
        state = State()
        state.add("w", "float32", (2,), bytes(8))
        packed = pack_delta(
            tmp_path / "step-1", state, objects=objects, forms=("torch", "json", "bytes")
        )
        opened = open_checkpoint(packed)
        loaded = [opened.load_object(name) for name in objects]
        assert loaded == [{"lr": 0.5}, {"a": 1}, b"abc"]
        assert verify(opened, CONTENT).code is ExitCode.OK

    def test_an_unknown_form_is_refused(self, tmp_path: Path) -> None:
        packed = pack_delta(tmp_path / "step-1", State(), objects={"a": b"1"}, forms=("xml",))
        with pytest.raises(UnsupportedError, match="'xml'"):
            open_checkpoint(packed)


class TestMissingBase:
    def test_it_is_found_before_anything_is_written(self, run: Path, tmp_path: Path) -> None:
        shutil.rmtree(run / "step-1")
        for no_proof in (False, True):
            with pytest.raises(NotFoundError, match="step 1, is not at") as raised:
                api.convert(str(run / "step-3"), str(tmp_path / "out"), "dcp", no_proof=no_proof)
            assert raised.value.kind == "missing-base"
            assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]

    def test_verify_and_latest_say_so(self, run: Path) -> None:
        shutil.rmtree(run / "step-1")
        report = verify(open_checkpoint(run / "step-3"), VerifyOptions(Level.STRUCTURE))
        assert (report.code, kinds(report)) == (ExitCode.NOT_FOUND, {"missing-base"})
        chosen = api.latest(str(run))
        assert chosen.path == str(run / "step-0")
        assert [s.code for s in chosen.skipped] == [ExitCode.NOT_FOUND] * 2

    def test_inspect_still_answers(self, run: Path) -> None:
        shutil.rmtree(run / "step-1")
        (note,) = api.inspect(str(run / "step-3")).notes
        assert "what could not be opened" in note.message

    def test_a_moved_root_still_works(self, run: Path, tmp_path: Path) -> None:
        moved = run.rename(tmp_path / "moved")
        assert verify(open_checkpoint(moved / "step-3"), CONTENT).code is ExitCode.OK

    def test_a_renamed_base_is_found_by_its_step(self, run: Path) -> None:
        (run / "step-1").rename(run / "checkpoint-1")
        assert verify(open_checkpoint(run / "step-3"), CONTENT).code is ExitCode.OK

    def test_the_user_says_where_it_is(self, run: Path, tmp_path: Path) -> None:
        away = tmp_path / "away"
        away.mkdir()
        (run / "step-1").rename(away / "one")
        (run / "step-0").rename(away / "zero")
        known = formats(None, [str(away / "one"), str(away / "zero")])
        opened = open_target(str(run / "step-3"), known, StoreOptions()).open()
        assert verify(opened, CONTENT).code is ExitCode.OK

    def test_another_step_of_the_run_is_not_taken_for_it(self, run: Path) -> None:
        shutil.rmtree(run / "step-0")
        save_full(run / "checkpoint-0", training(2)[1])
        with pytest.raises(
            NotFoundError, match=r"checkpoint-0 is another .its .* has other values"
        ):
            open_checkpoint(run / "step-1").decoding.bases()

    def test_what_lies_beside_and_cannot_be_opened_hides_nothing(self, run: Path) -> None:
        shutil.copytree(run / "step-1", run / "iter_0000001")
        (run / "checkpoint-1").mkdir()
        (run / "checkpoint-1" / "model.safetensors").write_bytes(b"\xff" * 99)
        (run / "step-1" / NAME).write_bytes(b"")
        assert verify(open_checkpoint(run / "step-2"), CONTENT).code is ExitCode.OK
        shutil.rmtree(run / "iter_0000001")
        report = verify(open_checkpoint(run / "step-2"), CONTENT)
        assert report.code is ExitCode.CORRUPT
        assert any(str(f.file).endswith(f"step-1/{NAME}") for f in report.findings)


class TestWrongBase:
    def test_a_delta_of_other_content(self, run: Path, tmp_path: Path) -> None:
        shutil.rmtree(run / "step-1")
        other = state_at(open_checkpoint(save_full(tmp_path / "w", training(3)[2])))
        pack_delta(run / "step-1", other, run / "step-0", step=1)
        with pytest.raises(CorruptError, match="its content is") as raised:
            open_checkpoint(run / "step-2").decoding.bases()
        assert raised.value.kind == "wrong-base"

    def test_a_full_one_with_other_tensors(self, run: Path) -> None:
        shutil.rmtree(run / "step-0")
        save_full(run / "step-0", {"other": training(1)[0]["norm.weight"]})
        report = verify(open_checkpoint(run / "step-1"), VerifyOptions(Level.STRUCTURE))
        assert (report.code, kinds(report)) == (ExitCode.CORRUPT, {"wrong-base"})

    def test_a_full_one_with_other_values(self, run: Path, tmp_path: Path) -> None:
        weights = training(1)[0]
        weights["embed.weight"] = weights["embed.weight"] + 1
        shutil.rmtree(run / "step-0")
        save_full(run / "step-0", weights)
        report = verify(open_checkpoint(run / "step-1"), CONTENT)
        assert (report.code, kinds(report)) == (ExitCode.CORRUPT, {"wrong-base"})
        assert {f.tensor for f in report.findings if f.tensor} == {"embed.weight"}
        with pytest.raises(CorruptError, match="nothing was written"):
            api.convert(str(run / "step-1"), str(tmp_path / "out"), "dcp")

    def test_a_sealed_base_is_known_by_its_manifest(self, tmp_path: Path) -> None:
        saves = training(2)
        base = save_full(tmp_path / "step-0", saves[0])
        api.seal(str(base))
        whole = save_full(tmp_path / "whole", saves[1])
        pack_delta(tmp_path / "step-1", state_at(open_checkpoint(whole)), base, step=1)
        name = index_of(tmp_path / "step-1").base
        assert name is not None
        assert len(name.manifest) == 32
        assert f'"digest": "{name.manifest}"' in (base / "ftckpt.manifest.json").read_text()
        assert verify(open_checkpoint(tmp_path / "step-1"), CONTENT).code is ExitCode.OK

    def test_a_damaged_base_is_named(self, run: Path) -> None:
        index = run / "step-1" / NAME
        flip(index, 100)
        report = verify(open_checkpoint(run / "step-2"), VerifyOptions(Level.STRUCTURE))
        assert report.code is ExitCode.CORRUPT
        assert any("base" in f.message and "step-1" in str(f.file) for f in report.findings)

    def test_a_cut_data_file_of_a_base_is_structure(self, run: Path) -> None:
        file = run / "step-1" / "00000.blocks"
        file.write_bytes(file.read_bytes()[:-1])
        report = verify(open_checkpoint(run / "step-3"), VerifyOptions(Level.STRUCTURE))
        assert kinds(report) == {"truncated-file"}
        (found,) = (f for f in report.findings if f.severity is Severity.ERROR)
        assert found.file == str(file)


class TestChains:
    def test_a_loop(self, tmp_path: Path) -> None:
        state = state_at(open_checkpoint(save_full(tmp_path / "w", training(1)[0])))
        pack_delta(tmp_path / "a", state)
        pack_delta(tmp_path / "b", state, tmp_path / "a", place="../a")
        shutil.rmtree(tmp_path / "a")
        shutil.copytree(tmp_path / "b", tmp_path / "a")  # names ../a, which it is itself
        with pytest.raises(CorruptError, match="depends on itself") as raised:
            chain(delta_at(tmp_path / "b"))
        assert raised.value.kind == "bad-delta"
        assert verify(open_checkpoint(tmp_path / "b")).code is ExitCode.CORRUPT

    def test_states_that_come_back_are_no_loop(self, tmp_path: Path) -> None:
        """A state may equal one further down; with places given, any of the two may be offered."""
        one, two = (state_at(open_checkpoint(save_full(tmp_path / f"w{n}", w)))
                    for n, w in enumerate(training(2)))  # fmt: skip
        full = save_full(tmp_path / "full", training(1)[0])
        below = full
        for name, state in (("a", two), ("b", one), ("c", one), ("d", two)):
            below = pack_delta(tmp_path / name, state, below)
        known = formats(None, [str(tmp_path / name) for name in "dcba"])
        opened = open_target(str(tmp_path / "d"), known, StoreOptions()).open()
        assert isinstance(opened, DeltaCheckpoint)
        assert [Path(link.source.url).name for link in chain(opened)] == [*"dcba", "full"]
        assert verify(opened, CONTENT).code is ExitCode.OK

    def test_too_long(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(delta_chain, "MOST_LINKS", 2)
        assert len(chain(delta_at(run / "step-2"))) == 3
        with pytest.raises(UnsupportedError, match="more than 2 deltas") as raised:
            chain(delta_at(run / "step-3"))
        assert "rebase" in raised.value.hint

    def test_the_longest_that_is_allowed_is_read(self, tmp_path: Path) -> None:
        before, after = trained()
        pack_delta(tmp_path / "step-0", before, step=0)
        for step in range(1, delta_chain.MOST_LINKS + 1):
            target = (before, after)[step % 2]
            pack_delta(tmp_path / f"step-{step}", target, tmp_path / f"step-{step - 1}", step=step)
        last = open_checkpoint(tmp_path / f"step-{delta_chain.MOST_LINKS}")
        assert verify(last, CONTENT).code is ExitCode.OK

    @pytest.mark.usefixtures("small_budget")
    def test_memory_is_asked_for_before_it_is_taken(self, run: Path) -> None:
        set_budget(100_000)
        with pytest.raises(NoResourceError) as raised:
            read_tensor(open_checkpoint(run / "step-3"), "norm.weight")
        assert raised.value.hint.startswith("--max-memory")
        set_budget(1 << 20)
        assert verify(open_checkpoint(run / "step-3"), CONTENT).code is ExitCode.OK


class TestElsewhere:
    def test_a_base_in_memory(self, run: Path) -> None:
        store = open_store("memory://delta-base")
        put(store, run / "step-0", "step-0")
        target = state_at(open_checkpoint(run / "step-1"))
        pack_delta(run / "step-9", target, run / "step-0", place="memory://delta-base/step-0")
        shutil.rmtree(run / "step-0")
        assert verify(open_checkpoint(run / "step-9"), CONTENT).code is ExitCode.OK

    def test_a_chain_on_an_object_store(self, run: Path) -> None:
        store = open_store("memory://delta-chain")
        for step in range(4):
            put(store, run / f"step-{step}", f"root/step-{step}")
        assert verify(open_checkpoint("memory://delta-chain/root/step-3"), CONTENT).code == 0

    @pytest.mark.s3
    def test_a_base_on_s3_and_a_local_delta(self, run: Path, s3_url: str) -> None:
        put(open_store(s3_url), run / "step-0", "step-0")
        target = state_at(open_checkpoint(run / "step-1"))
        pack_delta(run / "step-9", target, run / "step-0", place=f"{s3_url}/step-0")
        shutil.rmtree(run / "step-0")
        assert verify(open_checkpoint(run / "step-9"), CONTENT).code is ExitCode.OK

    @pytest.mark.s3
    def test_options_reach_the_base(
        self, run: Path, s3_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        endpoint = os.environ["AWS_ENDPOINT_URL"]
        put(open_store(s3_url), run / "step-0", "step-0")
        target = state_at(open_checkpoint(run / "step-1"))
        pack_delta(run / "step-9", target, run / "step-0", place=f"{s3_url}/step-0")
        shutil.rmtree(run / "step-0")
        monkeypatch.delenv("AWS_ENDPOINT_URL")
        opened = api.open_checkpoint(str(run / "step-9"), StoreOptions(endpoint=endpoint))
        assert verify(opened, CONTENT).code is ExitCode.OK


class TestDamage:
    def flipped(self, path: Path, offset: int, tmp_path: Path) -> VerifyReport | FtckptError:
        damaged = path.parent / "damaged"
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(path.parent / path.name, damaged)
        file = damaged / ("00000.blocks" if offset < 0 else NAME)
        flip(file, -offset - 1 if offset < 0 else offset)
        try:
            return verify(open_checkpoint(damaged), CONTENT)
        except FtckptError as error:
            return error

    def test_every_section_of_the_index(self, run: Path, tmp_path: Path) -> None:
        size = (run / "step-3" / NAME).stat().st_size
        for offset in (0, 9, 14, 20, 28, 40, 500, size - 60, size - 30, size - 1):
            found = self.flipped(run / "step-3", offset, tmp_path)
            assert isinstance(found, FtckptError)
            assert (found.exit_code, found.kind) == (ExitCode.CORRUPT, "bad-delta"), offset

    def test_any_bit_of_the_data(self, run: Path, tmp_path: Path) -> None:
        size = (run / "step-3" / "00000.blocks").stat().st_size
        for offset in (0, 1, size // 3, size // 2, size - 1):
            found = self.flipped(run / "step-3", -offset - 1, tmp_path)
            assert isinstance(found, VerifyReport)
            assert (found.code, kinds(found)) == (ExitCode.CORRUPT, {"bad-digest"}), offset
            (error,) = (f for f in found.findings if f.severity is Severity.ERROR)
            assert error.tensor
            assert error.offset is not None
            assert error.length
            assert error.offset <= offset < error.offset + error.length

    def test_of_an_object(self, tmp_path: Path) -> None:
        path = pack_delta(tmp_path / "step-1", State(), objects={"rng": b"state"})
        flip(path / "00000.blocks", 2)
        report = verify(open_checkpoint(path), CONTENT)
        assert (report.code, kinds(report)) == (ExitCode.CORRUPT, {"bad-digest"})
        assert [f.tensor for f in report.findings if f.severity is Severity.ERROR] == ["rng"]

    def test_of_sealed_data_names_the_tensor(self, run: Path) -> None:
        api.seal(str(run / "step-3"))
        flip(run / "step-3" / "00000.blocks", 1)
        report = verify(open_checkpoint(run / "step-3"), CONTENT)
        (block,) = (f for f in report.findings if f.severity is Severity.ERROR and f.offset == 0
                    and "differs from the manifest" in f.message)  # fmt: skip
        assert block.tensor in open_checkpoint(run / "step-3").tensors

    def test_of_a_base_deep_in_the_chain(self, run: Path) -> None:
        file = run / "step-1" / "00000.blocks"
        flip(file, file.stat().st_size // 2)
        report = verify(open_checkpoint(run / "step-3"), CONTENT)
        assert (report.code, kinds(report)) == (ExitCode.CORRUPT, {"bad-digest"})
        assert {f.file for f in report.findings if f.severity is Severity.ERROR} == {str(file)}

    def test_a_sample_is_the_same_in_every_run(self, run: Path) -> None:
        sampled = VerifyOptions(Level.CONTENT, sample=0.5)
        first, second = (verify(open_checkpoint(run / "step-3"), sampled) for _ in range(2))
        assert first.bytes_read == second.bytes_read > 0
        assert (first.code, first.sampled) == (ExitCode.OK, 0.5)


class TestHostile:
    def test_a_base_that_lacks_what_is_decoded_upon_it(self, run: Path) -> None:
        index = index_of(run / "step-2")
        embed = next(t for t in index.tensors if t.name == "embed.weight")
        assert embed.base is not None
        for other in ("nothing", "count"):  # the content that is named is the right one
            tensors = [
                replace(t, base=embed.base._replace(key=other)) if t is embed else t
                for t in index.tensors
            ]
            (run / "step-2" / NAME).write_bytes(replace(index, tensors=tensors).dump())
            report = verify(open_checkpoint(run / "step-2"), VerifyOptions(Level.STRUCTURE))
            assert (report.code, kinds(report)) == (ExitCode.CORRUPT, {"wrong-base"})
            with pytest.raises(CorruptError, match=other):
                read_tensor(open_checkpoint(run / "step-2"), "embed.weight")

    def test_damage_that_decoding_finds_in_a_base_is_the_base_s(self, run: Path) -> None:
        index = index_of(run / "step-1")
        file = run / "step-1" / index.files[0].name
        tensor = next(t for t in index.tensors if t.name == "embed.weight")
        block = index.block(tensor, 0)
        data = bytearray(file.read_bytes())
        data[block.offset : block.offset + block.length] = b"\xff" * block.length
        file.write_bytes(data)
        stored = xxhash.xxh3_64_digest(b"\xff" * block.length)
        row = pack_row(block._replace(stored=stored))
        at = tensor.first * ROW.size
        rows = index.rows[:at] + row + index.rows[at + ROW.size :]
        (run / "step-1" / NAME).write_bytes(replace(index, rows=rows).dump())
        report = verify(open_checkpoint(run / "step-2"), CONTENT)
        assert (report.code, kinds(report)) == (ExitCode.CORRUPT, {"bad-delta"})
        assert {f.file for f in report.findings if f.severity is Severity.ERROR} == {str(file)}

    def test_a_list_of_files_that_fills_the_memory_is_not_read(
        self, tmp_path: Path, small_budget: None
    ) -> None:
        bomb = compressed(b"[" * (64 << 20))
        objects = {"ftckpt.files": bomb, "ftckpt.rest": compressed(b"")}
        path = pack_delta(tmp_path / "step-1", State(), objects=objects, forms=(FILES, REST))
        set_budget(128 << 20)
        with pytest.raises(NoResourceError):
            original_of_delta(delta_at(path))

    def test_an_index_that_fills_the_memory_is_not_read(self, run: Path) -> None:
        with (run / "step-3" / NAME).open("r+b") as index:
            index.truncate(MAX_BYTES + 1)
        with pytest.raises(CorruptError, match="is most") as raised:
            open_checkpoint(run / "step-3")
        assert raised.value.kind == "bad-delta"

    def test_a_base_that_is_a_pipe_does_not_block(self, run: Path) -> None:
        target = state_at(open_checkpoint(run / "step-1"))
        pack_delta(run / "step-9", target, run / "step-0", place="../pipe")
        os.mkfifo(run / "pipe")
        report = verify(open_checkpoint(run / "step-9"))
        assert (report.code, kinds(report)) == (ExitCode.UNSAFE, {"special-file"})

    @pytest.mark.parametrize(
        "place", ["", "nowhere://x/y", "a::b", "../" * 99 + "etc", "/dev/zero"]
    )
    def test_places_that_name_no_checkpoint(self, run: Path, place: str) -> None:
        target = state_at(open_checkpoint(run / "step-1"))
        pack_delta(run / "step-9", target, run / "step-0", place=place)
        shutil.rmtree(run / "step-0")
        with pytest.raises(FtckptError) as raised:
            open_checkpoint(run / "step-9").decoding.bases()
        assert raised.value.exit_code not in (ExitCode.OK, ExitCode.INTERNAL)


def test_latest_walks_over_a_corrupt_chain(run: Path) -> None:
    file = run / "step-2" / "00000.blocks"
    flip(file, file.stat().st_size // 2)
    chosen = api.latest(str(run), level="content")
    assert chosen.path == str(run / "step-1")


def test_a_full_delta_stands_alone(tmp_path: Path) -> None:
    state, _ = trained()
    opened: Checkpoint = open_checkpoint(pack_delta(tmp_path / "alone", state, step=4))
    assert opened.notes == ()
    assert opened.dialect.startswith("full, of dcp")
    assert verify(opened, CONTENT).evidence == "digests"
    api.seal(opened)
    assert verify(open_checkpoint(tmp_path / "alone"), CONTENT).evidence == "manifest"


def test_a_written_index_may_be_newer(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    write(path, pack(trained()[0]))
    data = bytearray((path / NAME).read_bytes())
    data[8] = 9
    (path / NAME).write_bytes(data)
    with pytest.raises(CorruptError):  # the digest tells damage from a newer version
        open_checkpoint(path)
