"""Signatures in the OpenSSF model-signing format: who says that the files are these.

A signature is a Sigstore bundle: a DSSE envelope around an in-toto statement that lists the digest
of every file of the folder. The package `model-signing` makes it and proves whose it is; digests
are made and compared here, so that a folder is read once, wherever it lies.

Source: sigstore/model-transparency, docs/model_signing_format.md, and
https://github.com/ossf/model-signing-spec (the statement is `https://model_signing/signature/v1.0`;
that of version 0.2, `https://model_signing/Digests/v0.1`, is read too).
"""

from __future__ import annotations

import binascii
import hashlib
import json
import os
from base64 import b64decode
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ftckpt.errors import (
    CorruptError,
    DeniedError,
    ExistsError,
    FtckptError,
    IncompleteError,
    NotFoundError,
    RefusedError,
    UnavailableError,
    UnsafeError,
    UnsupportedError,
    UnverifiedError,
    UsageError,
)
from ftckpt.own_files import FOLDER, MANIFEST
from ftckpt.packages import needing
from ftckpt.storage.source import Source, safe_name
from ftckpt.strict_json import JsonLimits, parse, shown

if TYPE_CHECKING:
    from ftckpt.storage import StoreOptions
    from ftckpt.storage.store import Store

# What model-signing itself calls it.
SIGNATURE = "model.sig"
SUMS = "SHA256SUMS"
BESIDE = "beside"  # the value of an option that names no place

_STATEMENT = "https://in-toto.io/Statement/v1"
_SIGNED = "https://model_signing/signature/v1.0"
_SIGNED_BEFORE = "https://model_signing/Digests/v0.1"
_GIT = (".git", ".gitattributes", ".github", ".gitignore")
_MOST_BYTES = 256 << 20
_BUNDLE = JsonLimits(depth=16, objects=10_000, keys=100_000, items=100_000, naturals=False)
_STATED = JsonLimits(depth=8, objects=4_000_000, keys=20_000_000, items=20_000_000, naturals=False)
WHOLE = "."  # a model that is one file


class SignedPart(NamedTuple):
    """A file, or a range of one, as it was signed.

    Attributes:
        file: name relative to the folder; `.` of a model that is one file.
        start: its first byte.
        end: the byte after its last; None for the end of the file.
        algorithm: `sha256`, `blake2b` or `blake3`.
        digest: in hexadecimal digits.
    """

    file: str
    start: int
    end: int | None
    algorithm: str
    digest: str


class Signed(NamedTuple):
    """What a signature says, after it was proven whose it is.

    Attributes:
        signer: whose it is, in words.
        parts: of every file.
        ignored: names that the signer left out, with all below them.
        where: the signature's path or URL.
        shards: whether files are signed in ranges, of which an empty one has none.
    """

    signer: str
    parts: Sequence[SignedPart]
    ignored: Sequence[str]
    where: str
    shards: bool


@dataclass(frozen=True, kw_only=True)
class Signer:
    """Who signs.

    Attributes:
        private_key: PEM file of an elliptic curve key.
        certificate: PEM file of the certificate of this key; "" signs with the key alone.
        chain: PEM files of the certificates between that and a root.
        sigstore: sign with an identity of Sigstore instead, over the network.
    """

    private_key: str = ""
    certificate: str = ""
    chain: Sequence[str] = ()
    sigstore: bool = False

    def prepared(self) -> Any:
        """Return the configuration of model-signing; keys are read, and files are not.

        Raises:
            MissingPackageError: model-signing is not installed.
            UsageError: no key, or one that cannot be used.
            UnavailableError: Sigstore cannot be reached.
        """
        if bool(self.private_key) is self.sigstore:
            raise UsageError(
                "--sign needs one of --private-key and --sigstore",
                hint="openssl ecparam -name prime256v1 -genkey -noout -out key.pem makes a key",
            )
        if self.chain and not self.certificate:
            raise UsageError("--certificate-chain goes with --signing-certificate")
        if self.certificate and not self.private_key:
            raise UsageError("--signing-certificate needs the --private-key that it is of")
        with needing("signing"):
            from model_signing import signing
        config = signing.Config()
        if self.sigstore:
            with _reaching("sign"):
                return config.use_sigstore_signer(identity_token=_token())
        files = {"--private-key": [self.private_key], "--signing-certificate": [self.certificate],
                 "--certificate-chain": self.chain}  # fmt: skip
        _require_files(files)
        if not self.certificate:
            password = os.environ.get("FTCKPT_KEY_PASSWORD")
            with _usable(self.private_key):
                return config.use_elliptic_key_signer(
                    private_key=self.private_key, password=password and password.encode()
                )
        with _usable(f"{self.private_key} and {self.certificate}"):
            return config.use_certificate_signer(
                private_key=self.private_key,
                signing_certificate=self.certificate,
                certificate_chain=list(self.chain) or [self.certificate],  # one there must be
            )


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Whose signature is accepted, and where it lies.

    Attributes:
        place: path or URL of the signature; `BESIDE` for the one beside the data.
        public_key: PEM file of the key that must have signed.
        chain: PEM files of the certificates that may vouch for the signer's.
        identity: of Sigstore, whose signature it must be.
        provider: of that identity.
        stores: how to reach object stores.
    """

    place: str
    public_key: str = ""
    chain: Sequence[str] = ()
    identity: str = ""
    provider: str = ""
    stores: StoreOptions | None = None

    def require(self) -> None:
        """Look for the package, and at the keys, before anything is read.

        Raises:
            MissingPackageError: model-signing is not installed.
            UsageError: it does not say whose signature is accepted, or a key cannot be used.
        """
        given = [bool(self.public_key), bool(self.chain), bool(self.identity or self.provider)]
        if sum(given) != 1 or bool(self.identity) is not bool(self.provider):
            raise UsageError(
                "--signature needs to know whose it must be: --public-key, --certificate-chain, or"
                " --identity with --identity-provider",
                hint="without it a signature says no more than a manifest",
            )
        with needing("checking a signature"):
            from model_signing import verifying  # noqa: F401
        _require_files({"--public-key": [self.public_key], "--certificate-chain": self.chain})
        if not self.identity:
            self._prepared()

    def _prepared(self) -> Any:
        from model_signing import verifying

        config = verifying.Config()
        if self.public_key:
            with _usable(self.public_key):
                return config.use_elliptic_key_verifier(public_key=self.public_key)
        if self.chain:
            with _usable(" and ".join(self.chain)):
                return config.use_certificate_verifier(certificate_chain=list(self.chain))
        with _reaching("check a signature of"):
            return config.use_sigstore_verifier(identity=self.identity, oidc_issuer=self.provider)

    def read(self, source: Source) -> Signed:
        """Return what the signature of a checkpoint says, after it was proven whose it is.

        Raises:
            UnverifiedError: there is none.
            CorruptError: it is cut, or not a signature.
            UnsafeError: it is not by whom it must be, or is ambiguous or abusive.
            UnsupportedError: its statement is of another kind.
            UnavailableError: Sigstore cannot be reached.
        """
        store, path = signature_place(source, self.place, self.stores)
        where = store.describe(path)
        try:
            entry = store.stat(path)
        except NotFoundError as error:
            raise UnverifiedError(
                f"{where}, the signature, is not there",
                hint="ftckpt seal --sign --private-key KEY makes one",
            ) from error
        if entry.size > _MOST_BYTES:
            raise UnsafeError(
                f"the signature {where} has {entry.size} bytes", kind="unsafe-signature", file=path
            )
        raw = store.read(path)
        stated = _stated(raw, where)
        parts, ignored, shards = _parts_of(stated, where)
        signer = self._proven(raw, stated, where)
        return Signed(signer, parts, ignored, where, shards)

    def _proven(self, raw: bytes, stated: Mapping[str, Any], where: str) -> str:
        """Prove whose a signature is, and that it is over this very statement; return the signer.

        What is known of the files plays no part: model-signing is given the digests that the
        statement itself says. They are equal only if it reads the same statement.
        """
        import tempfile

        config = self._prepared().set_hashing_config(_Known(stated))
        with tempfile.TemporaryDirectory(prefix="ftckpt-signature-") as folder:
            copy = Path(folder, SIGNATURE)
            copy.write_bytes(raw)
            try:
                with _quiet():
                    config.verify(Path(folder, "model"), copy)
            except OSError as error:
                raise UnavailableError(f"{where} could not be checked: {error}") from error
            except Exception as error:  # of half a dozen packages
                reason = " ".join(str(error).split())[:300]
                raise UnsafeError(
                    f"{where} is not a signature of {self._whose()}"
                    + (f" ({reason})" if reason else ""),
                    hint="another one signed it, or it was changed: do not load it",
                    kind="unsafe-signature",
                    file=where,
                ) from error
        return self._whose(_subject(raw) if self.chain else "")

    def _whose(self, subject: str = "") -> str:
        if self.public_key:
            return f"the key {self.public_key}"
        if self.chain:
            by = ", ".join(self.chain)
            return f"{subject}, certified by {by}" if subject else f"a certificate of {by}"
        return f"{self.identity} ({self.provider})"


class _Known:
    """Stands for model-signing's configuration of hashing: the digests are known.

    Args:
        stated: a statement (`_statement`) with them.
    """

    def __init__(self, stated: Mapping[str, Any]) -> None:
        self._stated = stated

    def add_ignored_paths(self, **_: object) -> None:
        """Ignore nothing: what is left out, the statement says."""

    def hash(self, model: object, *, files_to_hash: object = None) -> Any:
        """Return the manifest of the statement."""
        from model_signing._signing.signing import dsse_payload_to_manifest

        return dsse_payload_to_manifest(dict(self._stated))


def signature_place(
    source: Source, place: str, options: StoreOptions | None = None, suffix: str = ".sig"
) -> tuple[Store, str]:
    """Return store and path of the signature of a checkpoint, or of its list of SHA-256.

    Raises:
        UnsupportedError: several checkpoints lie in its directory.
    """
    from ftckpt.storage import StoreOptions as Options
    from ftckpt.storage import open_store
    from ftckpt.storage.remotes import split

    _require_alone(source)
    if place != BESIDE:
        above, name = split(place)
        return open_store(above, options or Options()), name
    if source.single:
        return source.store, source.path(next(iter(source.entries)) + suffix)
    return source.store, source.path(SIGNATURE if suffix == ".sig" else SUMS)


def _require_alone(source: Source) -> None:
    if source.named:
        raise UnsupportedError(
            f"{source.url} shares its directory with other checkpoints, and a signature is of all"
            " files of a directory",
            hint="give it a directory of its own",
        )


def signed_names(source: Source, *left_out: str) -> list[str]:
    """Return the files that a signature lists: all but ftckpt's own, git's, and those named."""
    if source.single:
        return list(source.entries)
    ignored = (*own_names(), *left_out)
    return sorted(name for name in source.entries if not is_below(name, ignored))


def own_names() -> tuple[str, ...]:
    """Return what a signature of ours leaves out.

    The manifest is written anew where the checkpoint is copied or sealed again, and the list of
    SHA-256 says what the signature itself says.
    """
    return (SIGNATURE, SUMS, MANIFEST, FOLDER, *_GIT)


def is_below(name: str, places: Sequence[str]) -> bool:
    """Say whether a name is one of some, or lies below it."""
    return any(name == place or name.startswith(f"{place}/") for place in places)


def require_absent(store: Store, path: str, *, what: str, force: bool) -> None:
    """Refuse to replace a file, before anything is read.

    Raises:
        RefusedError: it is there, and `force` is not given.
    """
    with suppress(NotFoundError):
        store.stat(path)
        if not force:
            raise RefusedError(
                f"{what} {store.describe(path)} stands there",
                hint="check it with verify --signature; seal --force replaces it",
            )


def sign(
    source: Source, config: Any, digests: Mapping[str, str], place: tuple[Store, str], *,
    links: bool, force: bool,
) -> str:  # fmt: skip
    """Sign the digests of a checkpoint's files; return the path or URL of the signature.

    Args:
        source: of the checkpoint.
        config: of `Signer.prepared`.
        digests: name -> SHA-256 in hexadecimal digits, of every file of `signed_names`.
        place: store and path of the signature.
        links: whether a file is a symbolic link, which was followed.
        force: replace another one.

    Raises:
        RefusedError: another signature stands there.
        UnavailableError: Sigstore cannot be reached.
        DeniedError: the place cannot be written.
    """
    import tempfile

    stated = _statement(source, digests, links=links)
    config.set_hashing_config(_Known(stated))
    name = Path(source.name)
    with tempfile.TemporaryDirectory(prefix="ftckpt-signature-") as folder:
        made = Path(folder, SIGNATURE)
        with _reaching("sign"), _quiet():
            config.sign(name, made)
        raw = made.read_bytes()
    return write(place, raw, what="a signature", force=force)


def write(place: tuple[Store, str], raw: bytes, *, what: str, force: bool) -> str:
    """Write a signature, or a list of digests, by one atomic act; return its path or URL.

    Raises:
        RefusedError: another one stands there, and `force` is not given.
        DeniedError: the place cannot be written.
    """
    store, path = place
    try:
        store.create(path, raw)
    except ExistsError as error:
        if store.read(path) == raw:
            return store.describe(path)
        if not force:
            raise RefusedError(
                f"{what} of other content stands there: {store.describe(path)}",
                hint="seal --force replaces it",
            ) from error
        store.put(path, raw)
    except DeniedError as error:
        error.hint = error.hint or "--sign=FILE and --sha256=FILE write to another place"
        raise
    return store.describe(path)


def sums(digests: Mapping[str, str]) -> bytes:
    """Return digests as `sha256sum` prints them, so that `sha256sum -c` checks them."""
    lines = []
    for name, digest in sorted(digests.items()):
        escaped = name.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
        lines.append(f"{'' if escaped == name else chr(92)}{digest}  {escaped}\n")
    return "".join(lines).encode("utf-8", "surrogateescape")


def _statement(source: Source, digests: Mapping[str, str], *, links: bool) -> dict[str, Any]:
    """Return what is signed; model-signing orders and writes it itself."""
    names = sorted(digests, key=lambda name: name.split("/"))
    resources = [
        {
            "name": WHOLE if source.single else name,
            "algorithm": "sha256",
            "digest": digests[name],
        }
        for name in names
    ]
    root = hashlib.sha256(b"".join(bytes.fromhex(digests[name]) for name in names))
    return {
        "_type": _STATEMENT,
        "subject": [{"name": source.name, "digest": {"sha256": root.hexdigest()}}],
        "predicateType": _SIGNED,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": links,
                "ignore_paths": sorted(own_names()),
            },
            "resources": resources,
        },
    }


def _stated(raw: bytes, where: str) -> dict[str, Any]:
    """Return the statement of a signature; nothing is proven of it yet.

    Raises:
        CorruptError: it is cut, or not a signature.
        UnsafeError: it is ambiguous or abusive.
    """
    kinds = {"bad": "bad-signature", "unsafe": "unsafe-signature"}
    bundle = parse(raw, _BUNDLE, file=where, what="bundle", **kinds)
    try:
        envelope = bundle["dsseEnvelope"]
        payload = b64decode(envelope["payload"], validate=True)
        envelope["signatures"][0]["sig"]
    except (KeyError, TypeError, IndexError, ValueError, binascii.Error) as error:
        raise CorruptError(
            f"{where} is not a signature: a Sigstore bundle with a signed statement is expected",
            kind="bad-signature",
            file=where,
        ) from error
    stated = parse(payload, _STATED, file=where, what="statement", **kinds)
    if not isinstance(stated, dict):
        raise CorruptError(f"{where} signs no statement", kind="bad-signature", file=where)
    return stated


def _parts_of(
    stated: Mapping[str, Any], where: str
) -> tuple[Sequence[SignedPart], Sequence[str], bool]:
    """Return the files of a statement, what it leaves out, and whether it lists ranges.

    Raises:
        CorruptError: it lacks what its kind has.
        UnsafeError: a name leaves the folder, or stands twice.
        UnsupportedError: it is of another kind.
    """
    kind = stated.get("predicateType")
    if stated.get("_type") != _STATEMENT or kind not in (_SIGNED, _SIGNED_BEFORE):
        raise UnsupportedError(
            f"{where} signs a statement of kind {shown(kind)}, and not the files of a model",
            kind="newer-writer",
            file=where,
        )
    try:
        if kind == _SIGNED_BEFORE:
            listed = [(s["name"], "sha256", s["digest"]["sha256"]) for s in stated["subject"]]
            method, ignored = "files", []
        else:
            said = stated["predicate"]["serialization"]
            method, ignored = said["method"], said.get("ignore_paths", [])
            listed = [
                (one["name"], one["algorithm"], one["digest"])
                for one in stated["predicate"]["resources"]
            ]
        if method not in ("files", "shards"):
            raise UnsupportedError(
                f"{where} lists {shown(method)}, and not files", kind="newer-writer", file=where
            )
        parts = [_part(*one, method == "shards", where) for one in listed]
        left_out = [safe_name(name, named_by=where) for name in ignored]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptError(
            f"the statement of {where} lacks what names the files: {error!r}",
            kind="bad-signature",
            file=where,
        ) from error
    if len({(one.file, one.start) for one in parts}) < len(parts):
        raise UnsafeError(f"{where} lists a file twice", kind="unsafe-signature", file=where)
    return parts, left_out, method == "shards"


def _part(name: str, algorithm: str, digest: str, shards: bool, where: str) -> SignedPart:
    start, end = 0, None
    if shards:
        name, first, last = name.split(":")
        start, end = int(first), int(last)
        if not 0 <= start < end:
            raise ValueError(f"{first}:{last}")
    if name != WHOLE:
        safe_name(name, named_by=where)
    hashed = algorithm.split("-sharded-")[0]
    if hashed not in ("sha256", "blake2b", "blake3"):
        raise UnsupportedError(
            f"{where} has digests of {shown(algorithm)}", kind="newer-writer", file=where
        )
    return SignedPart(name, start, end, hashed, bytes.fromhex(digest).hex())


def hasher(algorithm: str) -> Any:
    """Return what makes a digest by one of the algorithms of `SignedPart`."""
    if algorithm == "blake3":
        with needing("a signature with BLAKE3"):
            import blake3

        return blake3.blake3()
    made: Callable[[], Any] = getattr(hashlib, algorithm)
    return made()


def ranges_of(signed: Signed) -> Mapping[str, Sequence[SignedPart]]:
    """Return the signed parts of each file, in their order."""
    found: dict[str, list[SignedPart]] = defaultdict(list)
    for one in signed.parts:
        found[one.file].append(one)
    return {name: sorted(parts, key=lambda one: one.start) for name, parts in found.items()}


def require_same(source: Source, names: Sequence[str]) -> None:
    """Refuse to sign files that changed while they were read.

    Raises:
        IncompleteError: one did.
    """
    for name in source.changed(names):
        raise IncompleteError(
            f"{name} changed while it was being read", kind="changed-file", file=name
        )


def _subject(raw: bytes) -> str:
    """Return the name in the certificate of a proven signature; "" where it has none."""
    from cryptography import x509

    material = json.loads(raw)["verificationMaterial"]
    first = material["x509CertificateChain"]["certificates"][0]["rawBytes"]
    return x509.load_der_x509_certificate(b64decode(first)).subject.rfc4514_string()[:300]


def _require_files(files: Mapping[str, Sequence[str]]) -> None:
    for option, paths in files.items():
        for path in filter(None, paths):
            if not os.path.isfile(path):
                raise UsageError(f"{option} {path}: no such file")


def _token() -> str:
    """Return the identity token of this process: of the environment, or of the service it runs on.

    Raises:
        UsageError: there is none; no browser is opened, because nobody may sit there.
    """
    token = os.environ.get("SIGSTORE_ID_TOKEN")
    if not token:
        from sigstore.oidc import detect_credential

        token = detect_credential()
    if not token:
        raise UsageError(
            "--sigstore found no identity of this process",
            hint="set SIGSTORE_ID_TOKEN, or run where the CI service gives one",
        )
    return token


@contextmanager
def _usable(key: str) -> Iterator[None]:
    try:
        with _quiet():
            yield
    except FtckptError:
        raise
    except OSError as error:
        raise DeniedError(f"{key} cannot be read: {error.strerror or error}") from error
    except Exception as error:  # of half a dozen packages
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"{key} cannot be used: {reason}",
            hint="keys are of the curves P-256, P-384 or P-521, in PEM; FTCKPT_KEY_PASSWORD opens"
            " an encrypted one",
        ) from error


@contextmanager
def _reaching(purpose: str) -> Iterator[None]:
    try:
        yield
    except FtckptError:
        raise
    except Exception as error:  # of half a dozen packages
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnavailableError(
            f"could not {purpose} Sigstore: {reason}"
            if purpose != "sign"
            else f"could not sign: {reason}",
            hint="Sigstore needs the network; keys and certificates do not",
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep what packages print and warn of out of the answer."""
    import contextlib
    import io
    import logging
    import warnings

    before = logging.root.manager.disable
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
