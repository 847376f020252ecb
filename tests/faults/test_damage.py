"""Damage at rest and hostile content (rows F9, F10, F18 to F22)."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from ftckpt import open_checkpoint
from ftckpt.digests.blocks import file_digest
from tests.data.hostile.make_pickles import CANARY, PICKLES
from tests.data.hostile.make_safetensors import HEADERS, INDEXES, SHARDS
from tests.data.hostile.make_zips import ZIPS
from tests.faults.cli import here
from tests.faults.place import MANIFEST, VERBS, Place
from tests.servers.s3 import upload_tree

HOSTILE = Path(__file__).parents[1] / "data" / "hostile"
# Each kind of trick once in the service; every file is tried on disk.
SOME = 5


def middle_of_a_weight(place: Place) -> tuple[str, int]:
    checkpoint = open_checkpoint(place.newest)
    info = max(checkpoint.tensors.values(), key=lambda info: info.nbytes)
    extent = checkpoint.payload(info.pieces[0]).extent
    return extent.file, extent.offset + extent.length // 2


@pytest.mark.parametrize("verb", VERBS)
def test_f9_a_flipped_bit_in_a_tensor(place: Place, verb: str) -> None:
    file, at = middle_of_a_weight(place)
    place.flip(f"step-2/{file}", at)
    done = place.run(verb, {"verify": 4, "inspect": 0, "latest": 0, "seal": 4}[verb])
    if verb == "latest":
        assert done.document["step"] == 1
        assert [s["code"] for s in done.document["skipped"]] == [4]
    elif verb == "verify":
        assert done.kinds & {"bad-crc"}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("file", "at"), [(".metadata", 0), (".metadata", -1), ("__0_0.distcp", 0)])
def test_f10_a_flipped_bit_in_a_header(place: Place, verb: str, file: str, at: int) -> None:
    place.flip(f"step-2/{file}", at)
    done = here(*place.words(verb))
    if verb == "latest":
        # An archive that two readers would see differently stops the search.
        assert (done.code, done.document["step"]) == (0, 1) or done.code == 7
    elif verb == "inspect" and file != ".metadata":
        assert done.code in (0, 4, 7)
    else:
        assert done.code in (4, 7), done.stderr
    assert MANIFEST not in place.names()


@pytest.mark.parametrize("file", ["__0_0.distcp", "__0_1.distcp"])
def test_f10_a_lost_page_is_damage_and_no_attack(local: Place, file: str) -> None:
    """What a disk loses, it loses by pages; `latest` must walk back over that at night."""
    data = local.read(f"step-2/{file}")
    for at in range(0, len(data), 4096):
        page = len(data[at : at + 4096])
        local.write(f"step-2/{file}", data[:at] + bytes(page) + data[at + page :])
        done = here("verify", local.newest)
        assert done.code == 4, (at, done.stderr)
        if at % 16384 == 0:
            assert here(*local.words("latest")).document["step"] == 1


def hostile_manifest(name: str) -> bytes:
    """A manifest that is whole in itself and names a file elsewhere."""
    row = f'{{"path": "{name}", "size": 0, "digest": "{file_digest(b"").hex()}", "blocks": ""}}'
    topology = '{"world_size": null, "tp": null, "pp": null, "dp": null, "ep": null}'
    body = (
        '{\n"schema": "ftckpt.manifest/1",\n"note": "",\n"tool": "",\n"created": "",\n'
        f'"format": "dcp",\n"step": 2,\n"topology": {topology},\n"checks": [],\n'
        f'"block_size": 67108864,\n"files": [\n{row}\n],\n"unmanaged": [],\n'
    ).encode()
    return body + f'"digest": "{file_digest(body).hex()}"\n}}\n'.encode()


@pytest.mark.parametrize("name", ["../step-1/.metadata", "/etc/passwd", "a/../../b", "c:x", "~/x"])
def test_f19_a_hostile_manifest(place: Place, name: str) -> None:
    place.write(f"step-2/{MANIFEST}", hostile_manifest(name))
    assert "unsafe-path" in place.run("verify", 7).kinds
    place.run("latest", 7)
    # What inspect reads are headers alone; what seal finds there is not its own.
    place.run("inspect", 0)
    assert here(*place.words("seal")).code == 8


def test_f19_half_of_a_surrogate_pair_is_no_name(local: Place) -> None:
    local.write(f"step-2/{MANIFEST}", hostile_manifest("\\ud800"))
    assert here(*local.words("verify")).code in (4, 7)


def put_folder(place: Place, folder: Path, name: str) -> str:
    """Put a local folder into the place; return its path or URL."""
    if place.service is None:
        return str(shutil.copytree(folder, Path(place.root, name)))
    upload_tree(folder, f"{place.root}/{name}")
    return f"{place.root}/{name}"


def chosen(names: list[str], place: Place) -> list[str]:
    return names if place.service is None else names[:: -(-len(names) // SOME)]


def test_f19_hostile_indexes(place: Place, tmp_path: Path) -> None:
    for name in chosen(sorted(INDEXES), place):
        folder = tmp_path / "index" / name
        folder.mkdir(parents=True)
        for file, content in SHARDS.items():
            (folder / file).write_bytes(content)
        shutil.copy(HOSTILE / "index" / f"{name}.json", folder / "model.safetensors.index.json")
        url = put_folder(place, folder, name)
        case = INDEXES[name]
        assert here("verify", url).code == case.code, name
        assert here("inspect", url).code in (0, case.code), name
        if case.code:
            assert here("seal", url).code == case.code, name


def test_f20_hostile_headers(place: Place, tmp_path: Path) -> None:
    for name in chosen(sorted(HEADERS), place):
        folder = tmp_path / "header" / name
        folder.mkdir(parents=True)
        kept = HOSTILE / "safetensors" / f"{name}.safetensors"
        shutil.copy(kept, folder / "model.safetensors")
        url = put_folder(place, folder, name)
        for verb in ("verify", "inspect", "seal"):
            assert here(verb, url).code == HEADERS[name].code, (verb, name)


def test_f21_hostile_archives(place: Place) -> None:
    for name in chosen(sorted(ZIPS), place):
        place.write(f"zip/{name}.pt", (HOSTILE / "zip" / f"{name}.pt").read_bytes())
        url = f"{place.root}/zip/{name}.pt"
        assert here("verify", url).code == ZIPS[name].code, name
        assert here("seal", url).code == ZIPS[name].code, name
        assert here("inspect", url).code in (0, ZIPS[name].code), name


def test_f22_hostile_pickles(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    for name in chosen(sorted(PICKLES), place):
        # As the marker of a checkpoint that a job script would restart from.
        place.write("step-2/.metadata", (HOSTILE / "pickle" / f"{name}.pkl").read_bytes())
        for verb in VERBS if PICKLES[name].live else ("verify", "latest"):
            done = here(*place.words(verb))
            # What calls nothing may be no more than damage, which `latest` walks back over.
            damaged = 0 if verb == "latest" else 4
            expected = {7} if PICKLES[name].live else {7, damaged}
            assert done.code in expected, (verb, name, done.stderr)
    assert list(work.iterdir()) == []
    assert not (work / CANARY).exists()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [fifo, listening, to_a_device, to_nothing])
@pytest.mark.parametrize("name", ["__0_1.distcp", ".metadata", MANIFEST])
def test_f18_no_regular_file(
    local: Place, make: Callable[[Path], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(local.newest)  # a socket's path is short
    Path(local.newest, name).unlink(missing_ok=True)
    make(Path(name))
    for verb in VERBS:
        done = here(*local.words(verb))
        if name == MANIFEST:
            # Nothing hangs, and seal does not write through it.
            expected = {"inspect": 0, "seal": 8}.get(verb, 7)
            assert done.code == expected, (verb, done.stderr)
        elif make is to_nothing:
            # A hub's cache without the blob looks so: a file is missing, and nothing is hostile.
            # latest walks back over it, and inspect may need nothing of the file.
            shown = verb == "inspect" and name == "__0_1.distcp"
            codes = {0} if verb == "latest" else {0, 4} if shown else {4}
            assert done.code in codes, (verb, done.stderr)
            assert "is empty" not in done.stderr
        elif name == "__0_1.distcp" and verb == "inspect":
            assert done.code in (0, 7)
        else:
            assert done.code == 7, (verb, done.stderr)
    assert not Path(name).is_file()


def test_f18_a_link_is_read_and_never_written_through(local: Place, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    Path(local.newest, "__0_1.distcp").rename(moved / "data")
    Path(local.newest, "__0_1.distcp").symlink_to(moved / "data")
    precious = moved / "precious"
    precious.write_bytes(b"precious")
    Path(local.newest, MANIFEST).symlink_to(precious)
    local.run("inspect", 0)
    assert here(*local.words("seal")).code == 8
    assert here(*local.words("seal"), "--force").code == 0
    assert precious.read_bytes() == b"precious"
    assert not Path(local.newest, MANIFEST).is_symlink()
    assert "link-followed" in here("verify", local.newest).kinds
    assert here("verify", local.newest, "--strict").code == 7


def test_f18_a_link_in_the_place_of_the_temporary_name(
    local: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    Path(local.newest, ".ftckpt-tmp-guessed").symlink_to(precious)
    assert here(*local.words("seal")).code != 0
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize("text", ["../../etc", "/etc", "a\x1b[2J", "x" * 5000, "\0", "", "\xff"])
def test_f19_a_hostile_pointer(place: Place, text: str) -> None:
    place.write("latest", text.encode("latin-1"))
    done = place.run("latest", 0)
    assert done.document["step"] == 2
    assert "pointer-dangling" in done.kinds
    assert here("verify", place.root).code == 4
