"""Signatures: model-signing's own are accepted, ours by it, and nothing else is."""

from __future__ import annotations

import base64
import datetime
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import ftckpt
from ftckpt.checkpoint import Checkpoint
from ftckpt.errors import (
    ExitCode,
    MissingPackageError,
    RefusedError,
    UnsupportedError,
    UsageError,
)
from ftckpt.findings import Finding
from ftckpt.manifest.signature import Trust
from ftckpt.storage import open_store
from ftckpt.storage.source import Source
from ftckpt.verification.places import PlaceReport
from ftckpt.verification.signed import check_signed
from ftckpt.workers import ALONE

pytest.importorskip("model_signing")

DATA = Path(__file__).parents[1] / "data"
CORPUS = DATA / "signatures"


def make_key(path: Path, curve: str = "SECP256R1") -> tuple[str, str]:
    """Write a private and a public key; return their paths."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(getattr(ec, curve)())
    private, public = path.with_suffix(".pem"), path.with_suffix(".pub")
    private.write_bytes(
        key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    )
    return str(private), str(public)


def make_certificate(folder: Path, name: str) -> tuple[str, str, str]:
    """Write a root, and a key with a certificate of it; return key, certificate and root."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.UTC)
    root = ec.generate_private_key(ec.SECP256R1())
    private, _ = make_key(folder / name)
    loaded = form.load_pem_private_key(Path(private).read_bytes(), None)
    assert isinstance(loaded, ec.EllipticCurvePrivateKey)

    def certificate(subject: str, of: ec.EllipticCurvePublicKey, ca: bool) -> Path:
        def called(who: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, who)])

        usage = x509.KeyUsage(True, False, False, False, False, ca, ca, False, False)
        made = (
            x509.CertificateBuilder()
            .subject_name(called(subject))
            .issuer_name(called(f"{name} root"))
            .public_key(of)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=9))
            .add_extension(x509.BasicConstraints(ca, None), critical=True)
            .add_extension(usage, critical=True)
            .sign(root, hashes.SHA256())
        )
        path = folder / f"{subject.replace(' ', '-')}.crt"
        path.write_bytes(made.public_bytes(form.Encoding.PEM))
        return path

    top = certificate(f"{name} root", root.public_key(), True)
    return private, str(certificate(name, loaded.public_key(), False)), str(top)


def model_signing(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "model_signing", *words], capture_output=True, text=True
    )


@pytest.fixture
def step(tmp_path: Path) -> Path:
    """A real checkpoint of three files, and a text."""
    shutil.copytree(DATA / "run/step-2", tmp_path / "step-2")
    (tmp_path / "step-2/notes").mkdir()
    (tmp_path / "step-2/notes/card.md").write_text("a model\n")
    return tmp_path / "step-2"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[str, str]:
    return make_key(tmp_path / "lab")


@pytest.fixture
def signed(step: Path, keys: tuple[str, str]) -> Path:
    ftckpt.seal(str(step), sign="beside", private_key=keys[0])
    return step


def check(step: Path, public: str, **more: Any) -> PlaceReport:
    return ftckpt.verify(str(step), signature="beside", public_key=public, **more)


def test_ours_is_accepted_by_model_signing(signed: Path, keys: tuple[str, str]) -> None:
    done = model_signing("verify", "key", str(signed), "--signature", str(signed / "model.sig"),
                         "--public_key", keys[1])  # fmt: skip
    assert done.returncode == 0, done.stderr
    (signed / "notes/card.md").write_text("another\n")
    done = model_signing("verify", "key", str(signed), "--signature", str(signed / "model.sig"),
                         "--public_key", keys[1])  # fmt: skip
    assert done.returncode != 0


def test_ours_is_accepted_by_us(signed: Path, keys: tuple[str, str]) -> None:
    report = check(signed, keys[1])
    assert (report.code, report.evidence, report.bytes_uncovered) == (0, "signature", 0)
    assert keys[1] in report.message
    assert not [f for f in report.findings if f.file in ("model.sig", "ftckpt.manifest.json")]
    assert ftckpt.verify(str(signed)).evidence == "manifest"


def test_theirs_is_accepted_and_a_seal_after_it(step: Path, keys: tuple[str, str]) -> None:
    model_signing("sign", "key", str(step), "--signature", str(step / "model.sig"),
                  "--private_key", keys[0])  # fmt: skip
    assert check(step, keys[1]).code == 0
    ftckpt.seal(str(step))
    assert check(step, keys[1]).code == 0


def test_what_the_signer_left_out_may_change(step: Path, keys: tuple[str, str]) -> None:
    model_signing("sign", "key", str(step), "--signature", str(step / "model.sig"),
                  "--private_key", keys[0], "--ignore-paths", str(step / "notes"))  # fmt: skip
    (step / "notes/more.md").write_text("later\n")
    assert check(step, keys[1]).code == 0


def change_a_byte(step: Path) -> None:
    raw = bytearray((step / "notes/card.md").read_bytes())
    raw[0] ^= 1
    (step / "notes/card.md").write_bytes(raw)


@pytest.mark.parametrize(
    ("harm", "kind", "code"),
    [
        (change_a_byte, "bad-digest", 4),
        (lambda step: (step / "notes/card.md").unlink(), "missing-file", 4),
        (lambda step: (step / "modeling.py").write_text("evil"), "unsigned-file", 7),
        (lambda step: (step / "notes/card.md").write_text("a model\nand more\n"), "bad-digest", 4),
        (lambda step: (step / "model.sig").unlink(), "no-evidence", 6),
    ],
)  # fmt: skip
def test_a_folder_that_is_not_what_was_signed(
    signed: Path, keys: tuple[str, str], harm: Callable[[Path], None], kind: str, code: int
) -> None:
    harm(signed)
    report = check(signed, keys[1])
    assert report.code == code
    assert kind in [f.kind for f in report.findings]


def restate(step: Path, old: bytes, new: bytes) -> None:
    """Change the signed statement, and keep the signature over the old one."""
    bundle = json.loads((step / "model.sig").read_text())
    stated = base64.b64decode(bundle["dsseEnvelope"]["payload"])
    assert old in stated
    bundle["dsseEnvelope"]["payload"] = base64.b64encode(stated.replace(old, new)).decode()
    (step / "model.sig").write_text(json.dumps(bundle))


@pytest.mark.parametrize(
    ("harm", "kind"),
    [
        (lambda sig: sig.write_bytes(sig.read_bytes()[:-40]), "bad-signature"),
        (lambda sig: sig.write_bytes(b""), "bad-signature"),
        (lambda sig: sig.write_text("{}"), "bad-signature"),
        (lambda sig: sig.write_text("[" * 100_000 + "]" * 100_000), "unsafe-signature"),
        (lambda sig: sig.write_text('{"a": [' + "0," * 9_000_000 + "0]}"), "unsafe-signature"),
        (lambda sig: sig.write_text('{"dsseEnvelope": {}, "dsseEnvelope": {}}'),
         "unsafe-signature"),
        (lambda sig: restate(sig.parent, b"notes/card.md", b"notes/evil.md"), "unsafe-signature"),
        (lambda sig: restate(sig.parent, b"notes/card.md", b"../../etc/pwd"), "unsafe-path"),
        (lambda sig: restate(sig.parent, b"signature/v1.0", b"signature/v9.0"), "newer-writer"),
    ],
)  # fmt: skip
def test_a_signature_that_is_none(
    signed: Path, keys: tuple[str, str], harm: Callable[[Path], None], kind: str
) -> None:
    harm(signed / "model.sig")
    report = check(signed, keys[1])
    assert [f.kind for f in report.findings if f.code is not ExitCode.OK] == [kind]
    assert report.code == {"bad-signature": 4, "newer-writer": 13}.get(kind, 7)


def test_another_key_is_another_signer(signed: Path, tmp_path: Path) -> None:
    for curve in ("SECP256R1", "SECP384R1"):
        _, public = make_key(tmp_path / "other", curve)
        report = check(signed, public)
        assert (report.code, [f.kind for f in report.findings if f.code]) == (
            7, ["unsafe-signature"],
        )  # fmt: skip


def test_certificates(step: Path, tmp_path: Path) -> None:
    key, certificate, root = make_certificate(tmp_path, "lab")
    done = ftckpt.seal(str(step), sign="beside", private_key=key, signing_certificate=certificate)
    assert done.signature == str(step / "model.sig")
    report = ftckpt.verify(str(step), signature="beside", certificate_chain=[root])
    assert (report.code, "CN=lab" in report.message) == (0, True)
    theirs = model_signing("verify", "certificate", str(step), "--signature",
                           str(step / "model.sig"), "--certificate_chain", root)  # fmt: skip
    assert theirs.returncode == 0, theirs.stderr
    *_, other = make_certificate(tmp_path, "stranger")
    assert ftckpt.verify(str(step), signature="beside", certificate_chain=[other]).code == 7


def test_a_certificate_of_another_key_does_not_sign(step: Path, tmp_path: Path) -> None:
    _, certificate, _ = make_certificate(tmp_path, "lab")
    key, _ = make_key(tmp_path / "mine")
    with pytest.raises(UsageError, match="does not match"):
        ftckpt.seal(str(step), sign="beside", private_key=key, signing_certificate=certificate)
    assert not (step / "ftckpt.manifest.json").exists()


def test_one_file_is_signed_beside_it(tmp_path: Path, keys: tuple[str, str]) -> None:
    file = tmp_path / "alone" / "model.safetensors"
    file.parent.mkdir()
    head = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    file.write_bytes(len(head).to_bytes(8, "little") + head + b"\0\0\0\0")
    done = ftckpt.seal(str(file), sign="beside", private_key=keys[0], sha256="beside")
    assert done.signature == f"{file}.sig"
    theirs = model_signing("verify", "key", str(file), "--signature", f"{file}.sig",
                           "--public_key", keys[1])  # fmt: skip
    assert theirs.returncode == 0, theirs.stderr
    assert ftckpt.verify(str(file), signature="beside", public_key=keys[1]).code == 0
    sums = subprocess.run(["sha256sum", "-c", f"{file}.sha256"], cwd=file.parent)
    assert sums.returncode == 0


def test_links_are_followed_and_said(step: Path, keys: tuple[str, str]) -> None:
    blob = step.parent / "blob"
    shutil.move(step / "notes/card.md", blob)
    (step / "notes/card.md").symlink_to(blob)
    ftckpt.seal(str(step), sign="beside", private_key=keys[0])
    assert check(step, keys[1]).code == 0
    theirs = model_signing("verify", "key", str(step), "--signature", str(step / "model.sig"),
                           "--public_key", keys[1], "--allow_symlinks")  # fmt: skip
    assert theirs.returncode == 0, theirs.stderr
    blob.write_text("other\n")
    assert check(step, keys[1]).code == 4


def test_ranges_of_files_and_other_digests(step: Path, keys: tuple[str, str]) -> None:
    import model_signing
    from model_signing import hashing

    (step / "empty").write_bytes(b"")
    for how in (
        hashing.Config().use_shard_serialization(shard_size=10_000),
        hashing.Config().use_file_serialization(hashing_algorithm="blake2"),
        hashing.Config().use_file_serialization(hashing_algorithm="blake3"),
    ):
        how.set_ignored_paths(paths=["model.sig"])
        config = model_signing.signing.Config().set_hashing_config(how)
        config.use_elliptic_key_signer(private_key=keys[0]).sign(step, step / "model.sig")
        assert check(step, keys[1]).code == 0
        with (step / "__0_1.distcp").open("ab") as file:
            file.write(b"x")
        assert check(step, keys[1]).code == 4
        with (step / "__0_1.distcp").open("rb+") as file:
            file.truncate((step / "__0_1.distcp").stat().st_size - 1)


def test_a_signature_is_never_replaced_unasked(signed: Path, keys: tuple[str, str]) -> None:
    before = (signed / "model.sig").read_bytes()
    with pytest.raises(RefusedError):
        ftckpt.seal(str(signed), sign="beside", private_key=keys[0])
    assert (signed / "model.sig").read_bytes() == before
    ftckpt.seal(str(signed), sign="beside", private_key=keys[0], force=True)
    assert check(signed, keys[1]).code == 0


def test_elsewhere(step: Path, tmp_path: Path, keys: tuple[str, str]) -> None:
    place = str(tmp_path / "kept.sig")
    ftckpt.seal(str(step), sign=place, private_key=keys[0], sha256=str(tmp_path / "sums"))
    assert not (step / "model.sig").exists()
    assert ftckpt.verify(str(step), signature=place, public_key=keys[1]).code == 0
    assert len((tmp_path / "sums").read_text().splitlines()) == 4


@pytest.mark.parametrize("level", ["auto", "structure"])
def test_sums_are_what_sha256sum_says(step: Path, level: str) -> None:
    (step / "notes/a\nb").write_text("odd")
    done = ftckpt.seal(str(step), sha256="beside", level=level)
    assert done.sha256 == str(step / "SHA256SUMS")
    checked = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=step, capture_output=True)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.count(b"OK") == 5
    assert ftckpt.verify(str(step)).code == 0
    again = ftckpt.seal(str(step), sha256="beside")
    assert (again.written, again.sha256) == (False, done.sha256)


def test_both_digests_come_from_one_reading(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ftckpt.storage.local.store import LocalReader

    read: list[int] = []
    whole = LocalReader.readinto

    def counted(self: LocalReader, offset: int, view: memoryview) -> None:
        read.append(len(view))
        whole(self, offset, view)

    again = shutil.copytree(step, step.parent / "again/step-2")
    monkeypatch.setattr(LocalReader, "readinto", counted)
    ftckpt.seal(str(step))
    once = sum(read)
    read.clear()
    ftckpt.seal(str(again), sha256="beside")
    assert sum(read) == once + len("a model\n")


@pytest.mark.parametrize(
    "flags",
    [
        {"signature": "beside"},
        {"public_key": "lab.pub"},
        {"signature": "beside", "identity": "a@b"},
        {"signature": "beside", "public_key": "/nowhere.pub"},
        {"signature": "beside", "public_key": "LAB", "sample": "5%"},
        {"signature": "beside", "public_key": "LAB", "level": "structure"},
    ],
)
def test_who_is_asked_for(signed: Path, keys: tuple[str, str], flags: dict[str, str]) -> None:
    given = {name: keys[1] if value == "LAB" else value for name, value in flags.items()}
    with pytest.raises(UsageError):
        ftckpt.verify(str(signed), **cast(Any, given))


def test_without_the_package(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "model_signing", None)
    with pytest.raises(MissingPackageError) as failed:
        ftckpt.seal(str(step), sign="beside", private_key="key.pem")
    assert failed.value.hint == "pip install model-signing"
    with pytest.raises(MissingPackageError):
        ftckpt.verify(str(step), signature="beside", public_key="key.pub")
    assert not (step / "ftckpt.manifest.json").exists()
    ftckpt.seal(str(step), sha256="beside")


def test_a_name_that_no_statement_can_hold(step: Path, keys: tuple[str, str]) -> None:
    (step / "notes/a\nb").write_text("odd")
    with pytest.raises(UnsupportedError):
        ftckpt.seal(str(step), sign="beside", private_key=keys[0])


def of_corpus(name: str) -> tuple[Source, Trust]:
    folder = CORPUS / name
    store = open_store(str(folder))
    one = name in ("v0.3.1-elliptic-key", "v1.0.0-elliptic-key")
    source = Source.file(store, store.stat("signme-1")) if one else Source.directory(store)
    place = str(folder / "model.sig")
    if name.endswith("key"):
        return source, Trust(place=place, public_key=str(CORPUS / "signing-key-pub.pem"))
    return source, Trust(place=place, chain=[str(CORPUS / "ca-cert.pem")])


@pytest.mark.parametrize("name", sorted(one.name for one in CORPUS.iterdir() if one.is_dir()))
def test_what_releases_of_model_signing_made(name: str, tmp_path: Path) -> None:
    source, trust = of_corpus(name)
    found: list[Finding] = []
    held = cast(Checkpoint, SimpleNamespace(source=source, members=lambda: source.entries))
    result = check_signed(held, trust, emit=found.append, work=ALONE)
    assert (result.ok, found, result.evidence) == (True, [], "signature")
    _, other = make_key(tmp_path / "other")
    stranger = Trust(place=trust.place, public_key=other)
    assert not check_signed(held, stranger, emit=found.append, work=ALONE).ok
    assert found[0].kind == "unsafe-signature"
