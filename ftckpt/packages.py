"""Python packages that only some work needs: their absence is an answer, and no bug.

`needing` stands around the import of one, where a sentence can say what for. The command line
turns every other failed import of a package below into the same error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import MissingPackageError

# What to install, by the name that is imported. No extra of ftckpt stands here: what was installed
# from a checkout or an image is not found under ftckpt's name.
REQUIREMENTS = {
    "torch": "torch",
    "numpy": "numpy",
    "xxhash": "xxhash",
    "zstandard": "zstandard",
    "fsspec": "fsspec",
    **dict.fromkeys(("s3fs", "aiobotocore", "botocore", "aiohttp"), "s3fs"),
    "gcsfs": "gcsfs",
    "adlfs": "adlfs",
    "lz4": "lz4",
    "matplotlib": "matplotlib",
    "isal": "isal",
    "distributed": "distributed",
    "dask_jobqueue": "dask-jobqueue",
    "ray": "ray",
    "grpc": "'ray[client]'",
    **dict.fromkeys(("model_signing", "blake3", "sigstore"), "model-signing"),
    "cryptography": "cryptography",
    "OpenSSL": "pyOpenSSL",  # model-signing needs it and does not say so
    "rich": "rich",
    "typer": "typer",
    "click": "click",
}


@contextmanager
def needing(purpose: str, instead: str = "") -> Iterator[None]:
    """Give an import its words for when the package is not installed.

    Args:
        purpose: what cannot be done without it, as the subject of "needs".
        instead: what the user can do without the package.

    Raises:
        MissingPackageError: the package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = missing_package(error, purpose, instead)
        if missing is None:
            raise
        raise missing from error


def missing_package(
    error: BaseException, purpose: str = "this", instead: str = ""
) -> MissingPackageError | None:
    """Return the error for a failed import; None where no package of `REQUIREMENTS` is absent."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if name not in REQUIREMENTS:
        return None
    return MissingPackageError(
        f"{purpose} needs the Python package {name}, which is not installed",
        hint=f"pip install {REQUIREMENTS[name]}" + (f", or {instead}" if instead else ""),
    )
