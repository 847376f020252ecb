"""What torch may be handed: plain data, and what a job has allowed by name."""

from __future__ import annotations

import io
import pickle
import zipfile

import pytest

from ftckpt.errors import UnsafeError
from ftckpt.formats.state.job_settings import ALLOWED, classes_in


def archive(text: bytes) -> bytes:
    """Return an archive of `torch.save` with one pickle."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as zipped:
        zipped.writestr("archive/data.pkl", text)
    return made.getvalue()


@pytest.mark.parametrize(
    "name",
    ["collections.OrderedDict", "builtins.set", "__builtin__.set", "datetime.timedelta",
     "pathlib.PosixPath", "pathlib._local.PosixPath", "numpy._core.multiarray.scalar",
     "numpy.core.multiarray._reconstruct", "torch.FloatStorage", "torch.float8_e4m3fn",
     "torch._utils._rebuild_tensor_v2", "torch.Size", "_io.BytesIO", "torch.uint16"],
)  # fmt: skip
def test_plain_data_is_allowed(name: str) -> None:
    assert ALLOWED.fullmatch(name)


@pytest.mark.parametrize(
    "name",
    ["os.system", "posix.system", "builtins.eval", "builtins.getattr", "builtins.exec",
     "builtins.__import__", "torch.load", "torch.hub.load", "torch.jit.load", "subprocess.Popen",
     "torch.UntypedStorage.from_file", "numpy.load", "functools.partial", "operator.attrgetter",
     "torch._utils._rebuild_wrapper_subclass", "codecs.open", "io.open", "pathlib.Path.unlink",
     "collections.OrderedDict.x", "builtins.list x", "torch.nn.Module", "my.Class"],
)  # fmt: skip
def test_what_runs_is_not(name: str) -> None:
    assert not ALLOWED.fullmatch(name)


def test_names_are_found() -> None:
    assert list(classes_in(archive(pickle.dumps({"a": {1}, "b": 2 + 1j}, 2)))) == [
        "__builtin__.set", "__builtin__.complex",
    ]  # fmt: skip
    # Of a name that is put together on the stack nothing is known by looking at texts.
    with pytest.raises(UnsafeError):
        list(classes_in(archive(pickle.dumps(2 + 1j, 4))))
