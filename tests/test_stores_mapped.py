"""Hashing cached files where they lie: the same digests, and where a process fails, reading."""

from __future__ import annotations

import errno
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import xxhash

from ftckpt.digest import BLOCK, Block, BlockDigest
from ftckpt.engine import DaemonThreads
from ftckpt.errors import TruncatedError
from ftckpt.findings import Finding
from ftckpt.hashing import hash_files, hash_run
from ftckpt.limits import RateLimit
from ftckpt.manifest import find
from ftckpt.sealing import seal
from ftckpt.source import Source
from ftckpt.store import Store
from ftckpt.stores import mapped, mapped_processes, mapped_worker, open_store
from ftckpt.stores.local import LocalReader
from ftckpt.stores.mapped import MappedHashing, mapped_hashing
from ftckpt.stores.mapped_processes import Line
from ftckpt.stores.pagecache import has_cachestat, is_cached
from ftckpt.verification import blocks as checking
from ftckpt.verification.content import StopChecking, check_manifest
from tests.checkpoints import flip, open_checkpoint, save_dcp

pytestmark = pytest.mark.skipif(
    not has_cachestat(), reason="this system does not tell what is cached (Linux 6.5 does)"
)
SIZE = (9 << 20) + 4321
DATA = "data.bin"

# The worker as it is, on page caches of any kind, with something done to it when it would hash.
WORKER = """
import importlib.util, os, signal, sys, time, types
spec = importlib.util.spec_from_file_location("worker", {script!r})
worker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(worker)
worker._is_huge = lambda mapped, start: True
sys.path.append(sys.argv[1])
from xxhash import xxh3_128_digest
def hashing(view):
    {deed}
    return xxh3_128_digest(view)
sys.modules["xxhash"] = types.SimpleNamespace(xxh3_128_digest=hashing)
def serving(parent, mine):
    global line
    line = mine
    serve(parent, mine)
serve, worker.serve = worker.serve, serving
worker.main()
"""
DEEDS = {
    "truncated while it is touched": "os.truncate({path!r}, 4096)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "hung": "time.sleep(600)",
    "gone": "os._exit(0)",
    "cut short": "os.write(line, b'x'); os._exit(0)",
    "failing": "raise OSError(5, 'Input/output error')",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / DATA).write_bytes(os.urandom(SIZE))
    return tmp_path / "in"


@pytest.fixture
def source(place: Path) -> Source:
    return Source.directory(open_store(str(place)))


class Workers:
    """Puts a script in the place of the worker's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._script = folder / "worker.py"
        self._real = mapped_worker.__file__
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(mapped, "WORTH", 0)
        monkeypatch.setattr(mapped, "WAIT", 60.0)

    def do(self, deed: str, **names: object) -> None:
        text = WORKER.format(script=self._real, deed=deed.format(**names))
        self._script.write_text(text)
        self._monkeypatch.setattr(mapped_worker, "__file__", str(self._script))


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workers:
    return Workers(tmp_path, monkeypatch)


@pytest.fixture
def hashing(source: Source) -> Iterator[MappedHashing]:
    with mapped_hashing(source.store, mapped.WORTH, 2) as made:
        assert made is not None
        yield made


def first(hashing: MappedHashing) -> subprocess.Popen[bytes]:
    """Return the process that makes the others."""
    assert hashing._processes is not None
    return hashing._processes._process


def expected(place: Path) -> bytes:
    return xxhash.xxh3_128_digest((place / DATA).read_bytes())


def digest(hashing: MappedHashing, file: str, offset: int, length: int) -> bytes | None:
    (answer,) = hashing.digests([(file, offset, length)])
    return answer


def refuse(*args: object) -> None:
    raise AssertionError("it was read")


@pytest.mark.parametrize(("offset", "length"), [(0, SIZE), (2 << 20, 4 << 20), (4 << 20, 4321987)])
def test_a_cached_range_is_hashed_without_reading_it(
    place: Path, source: Source, workers: Workers, hashing: MappedHashing,
    offset: int, length: int,
) -> None:  # fmt: skip
    workers.do("pass")
    data = (place / DATA).read_bytes()[offset : offset + length]
    for _ in range(3):  # one process answers again and again
        assert digest(hashing, DATA, offset, length) == xxhash.xxh3_128_digest(data)
    assert first(hashing).poll() is None


def test_several_ranges_are_asked_for_at_once(
    place: Path, workers: Workers, hashing: MappedHashing, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.do("pass")
    (place / "small").write_bytes(bytes(1000))
    data = (place / DATA).read_bytes()
    asked: list[int] = []
    real = Line.ask

    def counting(line: Line, requests: Sequence[bytes]) -> list[bytes | None]:
        asked.append(len(requests))
        return real(line, requests)

    monkeypatch.setattr(Line, "ask", counting)
    whole = [(DATA, start << 20, 4 << 20) for start in (0, 4, 2, 0)]
    answers = hashing.digests(
        [*whole[:2], ("gone", 0, SIZE), ("small", 0, 1000), (DATA, 1, 8 << 20), *whole[2:]]
    )
    digests = [xxhash.xxh3_128_digest(data[at : at + n]) for _, at, n in whole]
    assert answers == [*digests[:2], None, None, None, *digests[2:]]
    assert hashing.useful
    assert hashing.digests(whole[:1] * hashing.most) == digests[:1] * hashing.most
    assert hashing.digests([("gone", 0, SIZE)]) == [None]
    assert not hashing.useful
    assert asked == [4, hashing.most]


def test_files_are_hashed_so_by_as_many_processes_as_jobs(
    place: Path, source: Source, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.do("time.sleep(0.05)")
    for number in range(8):
        (place / f"more{number}").write_bytes(os.urandom(4 << 20))
    source = Source.directory(source.store)
    sizes = {name: entry.size for name, entry in source.entries.items()}
    plain = hash_files(source, sizes, jobs=2, limiter=RateLimit(1e12))
    monkeypatch.setattr(LocalReader, "readinto", refuse)
    assert hash_files(source, sizes, jobs=2) == plain


@pytest.mark.parametrize("deed", DEEDS)
def test_what_becomes_of_a_process_is_what_reading_says(
    place: Path, source: Source, workers: Workers, monkeypatch: pytest.MonkeyPatch, deed: str
) -> None:
    monkeypatch.setattr(mapped_processes, "PATIENCE", 0.5)
    workers.do(DEEDS[deed], path=str(place / DATA))
    if "truncated" in deed:
        with pytest.raises(TruncatedError) as caught:
            hash_files(source, {DATA: SIZE}, jobs=2)
        assert caught.value.file == DATA
    else:
        assert hash_files(source, {DATA: SIZE}, jobs=2) == {DATA: expected(place)}


def test_a_process_dies_of_a_file_that_is_cut_and_not_we(
    place: Path, source: Source, workers: Workers
) -> None:
    workers.do(DEEDS["truncated while it is touched"], path=str(place / DATA))
    with mapped_hashing(source.store, mapped.WORTH, 1) as hashing:
        assert hashing is not None
        assert digest(hashing, DATA, 0, SIZE) is None
        assert first(hashing).wait(60) == -signal.SIGBUS


def test_while_processes_are_being_started_nobody_waits_for_them(
    place: Path, source: Source, workers: Workers, hashing: MappedHashing,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(mapped_worker, "__file__", str(tmp_path / "slow.py"))
    monkeypatch.setattr(mapped, "WAIT", 0.0)
    for _ in range(2 * mapped.ENOUGH):
        assert digest(hashing, DATA, 0, SIZE) is None
        assert not hashing.useful
    assert first(hashing).poll() is None
    hashing.close()
    assert first(hashing).returncode == -signal.SIGKILL
    # Once they are there they are asked, however often they were not.
    workers.do("pass")
    monkeypatch.setattr(mapped, "WAIT", 0.0)
    with mapped_hashing(source.store, mapped.WORTH, 2) as another:
        assert another is not None
        while (found := digest(another, DATA, 0, SIZE)) is None:
            assert first(another).poll() is None
    assert found == expected(place)


ASK_TWICE = """
import sys, threading
from ftckpt.stores import open_store, mapped
from ftckpt.stores.mapped import mapped_hashing
mapped.mapped_worker.__file__ = sys.argv[1]
mapped.WAIT = 60.0
with mapped_hashing(open_store(sys.argv[2]), mapped.WORTH, 3) as hashing:
    for number in range(3):
        asked = [(sys.argv[3], 0, {length})]
        threading.Thread(target=hashing.digests, args=[asked], daemon=True).start()
    sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["returns", "killed"])
def test_all_the_processes_end_with_who_started_them(
    place: Path, workers: Workers, tmp_path: Path, end: str
) -> None:
    told = tmp_path / "told"
    told.mkdir()
    # What hangs is killed where we can; where we are killed it ends when it has answered.
    deed = "open({path!r} + str(os.getpid()), 'w').close(); time.sleep({seconds})"
    workers.do(deed, path=f"{told}/", seconds=600 if end == "returns" else 1)
    words = [str(tmp_path / "worker.py"), str(place), DATA]
    with subprocess.Popen(
        [sys.executable, "-c", ASK_TWICE.format(length=SIZE), *words],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdin=subprocess.PIPE,
    ) as process:  # fmt: skip
        while len(names := os.listdir(told)) < 3:
            assert process.poll() is None
        working = [os.pidfd_open(int(name)) for name in names]
        if end == "killed":
            process.kill()
    for number in working:
        ended = select.poll()
        ended.register(number, select.POLLIN)
        assert ended.poll(60_000)
        os.close(number)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_line_is_open_in_one_process_alone(count: int) -> None:
    """Or the end of a process would be seen only when all have ended."""
    pairs = [os.pipe() for _ in range(count)]
    answers, told = os.pipe()
    ours = [two for _, two in pairs]
    # Forked by a process of its own, since this one has threads.
    script = (
        "import os, sys\nfrom ftckpt.stores.mapped_worker import share\n"
        "told, *lines = map(int, sys.argv[1:])\nmine = share(lines)\n"
        "has = [line for line in lines if os.path.exists(f'/proc/self/fd/{line}')]\n"
        "os.write(told, f'{mine} {has}\\n'.encode())\n"
    )
    subprocess.run(
        [sys.executable, "-c", script, *map(str, [told, *ours])],
        pass_fds=[told, *ours], check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    os.close(told)
    with os.fdopen(answers) as file:
        found = file.read().splitlines()
    assert sorted(found) == sorted(f"{line} [{line}]" for line in ours)
    for pair in pairs:
        for number in pair:
            os.close(number)


def test_a_file_that_is_short_by_now_is_refused(
    place: Path, source: Source, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.do("pass")
    monkeypatch.setattr(mapped, "is_cached", lambda *args: True)
    os.truncate(place / DATA, 100)
    with pytest.raises(TruncatedError):
        hash_files(source, {DATA: SIZE}, jobs=1)


def test_a_descriptor_that_leads_to_another_file_is_refused(
    place: Path, workers: Workers, hashing: MappedHashing, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.do("pass")
    (place / "other").write_bytes(bytes(SIZE))
    assert digest(hashing, DATA, 0, SIZE) == expected(place)
    another = os.stat(place / "other")
    monkeypatch.setattr(os, "fstat", lambda fd: another)
    assert digest(hashing, DATA, 0, SIZE) is None


def test_each_process_dies_once_and_none_takes_its_place(
    place: Path, source: Source, workers: Workers, hashing: MappedHashing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(mapped_processes, "PATIENCE", 3600.0)
    workers.do(DEEDS["killed"])
    block = Block(source.store, DATA, DATA, 0, SIZE)
    for _ in range(5):
        (found,) = hash_run([block], hashing)
        assert isinstance(found, BlockDigest)
        assert found.digest == expected(place)
    assert hashing._processes is not None
    assert [line.fileno() for line in hashing._processes.lines] == [-1, -1]


def test_what_the_page_cache_holds_by_pages_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "WAIT", 60.0)
    with (tmp_path / DATA).open("wb", buffering=0) as file:
        for _ in range(2048):
            file.write(os.urandom(4096))
    with mapped_hashing(open_store(str(tmp_path)), mapped.WORTH, 2) as hashing:
        assert hashing is not None
        for _ in range(mapped.ENOUGH):
            assert digest(hashing, DATA, 0, 8 << 20) is None
        assert hashing._processes is not None
        for line in hashing._processes.lines:
            line.close()  # and is not asked any more
        assert digest(hashing, DATA, 0, 8 << 20) is None


def test_what_was_written_in_large_pieces_has_the_same_digest_either_way(
    source: Source, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "WAIT", 60.0)
    (place / DATA).write_bytes(os.urandom(32 << 20))
    with mapped_hashing(source.store, mapped.WORTH, 1) as hashing:
        (found,) = hash_run([Block(source.store, DATA, DATA, 0, 32 << 20)], hashing)
        assert hashing is not None
        assert first(hashing).poll() is None
    assert isinstance(found, BlockDigest)
    assert found.digest == expected(place)


def test_what_is_not_cached_starts_nothing(
    place: Path, source: Source, workers: Workers, hashing: MappedHashing
) -> None:
    workers.do("pass")
    with (place / DATA).open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), 1, 5000)
        if is_cached(file.fileno(), 0, SIZE):
            pytest.skip("this filesystem keeps everything cached")
        assert is_cached(file.fileno(), 5000, 1)
    assert digest(hashing, DATA, 0, SIZE) is None
    assert hashing._processes is None


def test_where_no_process_can_be_started_files_are_read(
    place: Path, source: Source, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.do("pass")

    def full(*args: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", full)
    assert hash_files(source, {DATA: SIZE}, jobs=2) == {DATA: expected(place)}


def test_where_descriptors_are_few_little_is_asked_for_at_once(
    place: Path, source: Source, workers: Workers
) -> None:
    workers.do("pass")
    used = len(os.listdir("/proc/self/fd"))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + mapped.SPARE + 2 * 4, before[1]))
    try:
        with mapped_hashing(source.store, 0, 2) as hashing:
            assert hashing is not None
            assert hashing.most == 3
            asked = [(DATA, 0, SIZE)] * hashing.most
            assert hashing.digests(asked) == [expected(place)] * hashing.most
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_readers_are_left_descriptors(
    place: Path, source: Source, workers: Workers, hashing: MappedHashing
) -> None:
    workers.do("pass")
    used = len(os.listdir("/proc/self/fd"))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + mapped.SPARE, before[1]))
    try:
        assert digest(hashing, DATA, 0, SIZE) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert hashing._processes is None
    with mapped_hashing(source.store, 0, 2) as another:
        assert another is not None
        assert digest(another, DATA, 0, SIZE) == expected(place)


@pytest.mark.parametrize("deed", ["os.write(1, bytes(1000))", "os.write(line, b'1' * 145)"])
def test_only_an_answer_to_what_was_asked_is_one(
    place: Path, source: Source, workers: Workers, deed: str
) -> None:
    """Whatever else is loaded into the process may write, to its output most likely."""
    workers.do(deed)
    with mapped_hashing(source.store, 0, 1) as hashing:
        assert hashing is not None
        answers = [digest(hashing, DATA, 0, SIZE) for _ in range(3)]
    assert answers == [None if "(line" in deed else expected(place)] * 3


DEAF = """
import os, signal, sys
from ftckpt.stores import open_store, mapped
from ftckpt.stores.mapped import mapped_hashing
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
mapped.mapped_worker.__file__ = sys.argv[1]
mapped.WORTH, mapped.WAIT = 0, 60.0
asked = [(sys.argv[3], 0, {length})]
with mapped_hashing(open_store(sys.argv[2]), 0, 1) as hashing:
    print(hashing.digests(asked) != [None])
    hashing._processes._process.kill()
    hashing._processes._process.wait()
    print(hashing.digests(asked) != [None])
"""


def test_a_process_that_has_died_does_not_end_who_leaves_a_broken_pipe_to_the_system(
    place: Path, workers: Workers, tmp_path: Path
) -> None:
    workers.do("pass")
    words = [str(tmp_path / "worker.py"), str(place), DATA]
    done = subprocess.run(
        [sys.executable, "-c", DEAF.format(length=SIZE), *words],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE, check=True, text=True,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "False"]


def test_a_process_is_told_no_secrets(
    place: Path, source: Source, workers: Workers, hashing: MappedHashing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/python/lib")
    workers.do("pass")
    assert digest(hashing, DATA, 0, SIZE) == expected(place)
    told = Path(f"/proc/{first(hashing).pid}/environ").read_bytes()
    assert told == b"LD_LIBRARY_PATH=/opt/python/lib\0"


def test_where_it_cannot_pay_or_work_it_is_not_begun(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, enough = source.store, mapped.WORTH

    def is_begun(*args: object, **options: object) -> bool:
        with mapped_hashing(*args, **options) as hashing:  # type: ignore[arg-type]
            return hashing is not None

    assert is_begun(store, enough, 2)
    assert not is_begun(store, enough - 1, 2)
    assert not is_begun(open_store("memory://mapped"), enough, 2)
    assert not is_begun(store, enough, 2, executor=DaemonThreads(1))
    assert not is_begun(store, enough, 2, limiter=RateLimit(1e12))
    for name, value in (
        ("executable", "/usr/bin/uwsgi"), ("executable", ""), ("frozen", True), ("platform", "mac")
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(sys, name, value, raising=False)
            assert not is_begun(store, enough, 2)


def test_the_end_ends_the_processes_and_who_waits_for_them(
    place: Path, source: Source, workers: Workers
) -> None:
    workers.do("open({path!r}, 'w').close(); time.sleep(600)", path=str(place / "asked"))
    answers: list[object] = []
    tasks = [Block(source.store, DATA, DATA, 0, SIZE)] * 3
    with mapped_hashing(source.store, 0, 2) as hashing:
        assert hashing is not None
        thread = threading.Thread(target=lambda: answers.append(hash_run(tasks, hashing)))
        thread.start()
        while not (place / "asked").exists():
            assert thread.is_alive()
    thread.join(60)
    assert answers == [[]]  # nobody waits for what reading would say
    assert first(hashing).returncode == -signal.SIGKILL
    assert digest(hashing, DATA, 0, SIZE) is None


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    path = save_dcp(tmp_path / "step-7")
    (path / "long").write_bytes(os.urandom(BLOCK + SIZE))
    checkpoint = open_checkpoint(path)
    members = [*checkpoint.members(), "long"]
    checkpoint.members = lambda: members  # type: ignore[method-assign]
    seal(checkpoint)
    return path


def test_a_flipped_bit_is_found_as_by_reading(
    sealed: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(sealed / "long", BLOCK + 5)

    def found() -> list[Finding]:
        heard: list[Finding] = []
        source = Source.directory(open_store(str(sealed)))
        manifest = find(source)
        assert manifest is not None
        assert not check_manifest(source, manifest, emit=heard.append, jobs=2).ok
        return heard

    workers.do("pass")
    by_mapping = found()
    monkeypatch.setattr(mapped, "WORTH", 1 << 60)
    assert [f.kind for f in by_mapping] == ["bad-digest"]
    assert by_mapping == found()


def test_a_check_that_stops_leaves_no_process(
    sealed: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers.do("pass")
    flip(sealed / "long", 5)
    made: list[MappedHashing] = []

    class Remembered(MappedHashing):
        def __init__(self, store: Store, jobs: int) -> None:
            super().__init__(store, jobs)
            made.append(self)

    def stop(found: Finding) -> None:
        raise StopChecking

    monkeypatch.setattr(mapped, "MappedHashing", Remembered)
    source = Source.directory(open_store(str(sealed)))
    manifest = find(source)
    assert manifest is not None
    with pytest.raises(StopChecking):
        checking.check_manifest(source, manifest, emit=stop, jobs=2)
    (hashing,) = made
    assert first(hashing).returncode is not None


INTERRUPTED = """
import sys
from ftckpt.stores import mapped, mapped_worker
mapped.WORTH, mapped.WAIT = 0, 60.0
mapped_worker.__file__ = sys.argv.pop(1)
from ftckpt.commands.app import main
main()
"""


def test_an_interrupt_does_not_wait_for_a_process_that_hangs(
    sealed: Path, workers: Workers, tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    deed = "pid = str(os.getpid()); open({path!r} + pid, 'w').write(pid)"
    deed += "; os.rename({path!r} + pid, {path!r}); time.sleep(600)"
    workers.do(deed, path=str(asked))
    words = [str(tmp_path / "worker.py"), "verify", str(sealed)]
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *words],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        try:
            while not asked.exists():
                assert process.poll() is None
            hung = os.pidfd_open(int(asked.read_text()))
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
            assert process.returncode == 130
        finally:
            process.kill()
    ended = select.poll()
    ended.register(hung, select.POLLIN)
    assert ended.poll(60_000)
    os.close(hung)
