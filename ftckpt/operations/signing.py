"""What `seal` writes for others beside its manifest: the list of SHA-256, and a signature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.manifest import signature as signatures
from ftckpt.storage import StoreOptions
from ftckpt.workers import Work

if TYPE_CHECKING:
    from ftckpt.checkpoint import Checkpoint
    from ftckpt.storage.source import Source


@dataclass(frozen=True, kw_only=True)
class Signing:
    """What is to be written, and by whom it is signed.

    Attributes:
        sums: where the list goes; `signatures.BESIDE` for beside the data, "" for none.
        signature: the same of the signature.
        private_key, certificate, chain, sigstore: see `signatures.Signer`.
        force: replace others.
        stores: how to reach object stores.
        config: of the signer, once it is prepared.
    """

    sums: str
    signature: str
    private_key: str
    certificate: str
    chain: Sequence[str]
    sigstore: bool
    force: bool
    stores: StoreOptions
    config: Any = None

    def begun(self, source: Source) -> Signing:
        """Read the keys and look at the places, before a checkpoint is read.

        Raises:
            UsageError: a key without --sign, or one that cannot be used.
            RefusedError: a signature stands there.
            UnsupportedError: several checkpoints share the directory, or a name cannot be listed.
        """
        if not self.signature:
            if self.private_key or self.certificate or self.chain or self.sigstore:
                raise UsageError(
                    "--private-key, --signing-certificate, --certificate-chain and --sigstore go"
                    " with --sign"
                )
            signatures.signature_place(source, self.sums, self.stores, ".sha256")
            return self
        signer = signatures.Signer(
            private_key=self.private_key, certificate=self.certificate,
            chain=self.chain, sigstore=self.sigstore,
        )  # fmt: skip
        config = signer.prepared()
        for name in signatures.signed_names(source):
            if not name.isprintable():
                raise UnsupportedError(f"a signature cannot list the name {name!r}", file=name)
        store, path = signatures.signature_place(source, self.signature, self.stores)
        signatures.require_absent(store, path, what="a signature", force=self.force)
        return replace(self, config=config)

    def made(self, held: Checkpoint, known: Mapping[str, str], work: Work) -> tuple[str, str]:
        """Write both; return where they are, "" of what was not asked for.

        Args:
            held: sealed.
            known: SHA-256 of its files in hexadecimal digits; others of the folder are read.
            work: threads, rate limit and counter of bytes.

        Raises:
            IncompleteError: a file changed meanwhile.
            RefusedError: others stand there.
        """
        from ftckpt.verification.file_digests import sha256_of

        source = held.source
        names = signatures.signed_names(source)
        others = [name for name in names if name not in known]
        digests = {name: known[name] for name in names if name in known}
        if others:
            digests |= sha256_of(source, others, work=work)
        signatures.require_same(source, names)
        sums = signature = ""
        if self.sums:
            place = signatures.signature_place(source, self.sums, self.stores, ".sha256")
            said = signatures.sums(digests)
            sums = signatures.write(place, said, what="a list of SHA-256", force=self.force)
        if self.signature:
            place = signatures.signature_place(source, self.signature, self.stores)
            links = any(source.entry(name).link is not None for name in names)
            signature = signatures.sign(
                source, self.config, digests, place, links=links, force=self.force
            )
        return sums, signature
