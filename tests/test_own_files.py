"""What paths a record of ftckpt's may hold."""

from __future__ import annotations

import pytest

from ftckpt.errors import ExitCode, UnsafeError
from ftckpt.own_files import own_path


@pytest.mark.parametrize(
    "path", ["run/step-50", "run/step-50/a/b", "run/step-50.ftckpt.json", "run/step-50/.metadata"]
)
def test_an_entry_and_what_lies_below_it_are_its_own(path: str) -> None:
    assert own_path(path, "run/step-50", named_by="record") == path


@pytest.mark.parametrize(
    "path",
    [
        "run/step-500/.metadata", "run/step-400", "run", "", "step-50/a", "other", None, 7, b"x",
        "run/step-50/../step-400/a", "run/step-50//a", "run/step-50/", "run/step-50/./a",
        "/run/step-50/a", "run/step-50/\0", "run/step-50/a.ftckpt.json/..",
    ],
)  # fmt: skip
def test_everything_else_is_refused(path: object) -> None:
    with pytest.raises(UnsafeError, match="record names") as caught:
        own_path(path, "run/step-50", named_by="record")
    assert caught.value.exit_code is ExitCode.UNSAFE


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../b", "", "a//b"])
def test_without_an_entry_a_path_may_still_not_climb(path: str) -> None:
    assert own_path("a/b", "", named_by="record") == "a/b"
    with pytest.raises(UnsafeError):
        own_path(path, "", named_by="record")
