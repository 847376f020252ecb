"""A seventh attack: two writers on a local disk, plug-ins that misbehave, planted words."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ftckpt
from ftckpt.errors import ExitCode
from ftckpt.guard.supervise import KEEPER
from ftckpt.retention.trash import local as local_trash
from ftckpt.retention.trash import remote as remote_trash
from tests.builders.checkpoints import save_dcp
from tests.first_contact.lines import printed
from tests.first_contact.test_sixth_attack import KEEP, once, root, three  # noqa: F401
from tests.packaging.test_extending import ftckpt as run_with
from tests.packaging.test_extending import install


def test_the_guards_keeper_needs_the_standard_library_alone() -> None:
    """It runs without site-packages: with an import of ours guard starts no command at all."""
    line = [sys.executable, "-I", "-S", "-c", f"import runpy; runpy.run_path({str(KEEPER)!r})"]
    assert subprocess.run(line, capture_output=True, check=False).stderr == b""


@pytest.mark.parametrize("claim", ["promote", "link", "tracker"])
def test_gc_looks_for_pointers_after_it_has_dropped_what_they_mean(
    root: str,  # noqa: F811
    claim: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who points to a step between gc's last look at it and its drop has it back."""
    here = Path(root)
    if claim != "promote" and not here.is_dir():
        pytest.skip("made by the filesystem")

    def point() -> None:
        if claim == "promote":
            ftckpt.promote(f"{root}/step-1")
        elif claim == "link":
            os.symlink("step-1", here / "best")
        else:
            (here / "latest").write_text("step-1")

    at_once = once(point)
    for trash in (local_trash.LocalTrash, remote_trash.RemoteTrash):
        drop = trash.discard

        def discard(self: object, *given: object, _drop: object = drop, **more: object) -> object:
            at_once()
            return _drop(self, *given, **more)  # type: ignore[operator]

        monkeypatch.setattr(trash, "discard", discard)
    done = printed("gc", root, *KEEP, "--purge-now", "--yes")
    assert done.code == ExitCode.PARTIAL, done.err
    assert "step-1 stays" in done.err
    assert printed("verify", f"{root}/step-1").code == 0


QUANTISED = Path(__file__).parents[1] / "data/quantised"


@pytest.mark.parametrize(
    ("of", "said", "flipped", "code"),
    [
        ("ct-int8", '"quant_method"', '"quant_mgthod"', ExitCode.CORRUPT),
        ("ct-int8", '"num_bits"', '"num_bids"', ExitCode.CORRUPT),
        ("ct-int8", '"channel"', '"channdl"', ExitCode.CORRUPT),
        ("ct-nvfp4", '"nvfp4-pack-quantized"', '"nvfp4-pick-quantized"', ExitCode.CORRUPT),
        ("bnb-nf4", '"bitsandbytes"', '"bitsandjytes"', ExitCode.CORRUPT),
        ("bnb-nf4", '"nf4"', '"nd4"', ExitCode.CORRUPT),
        ("fp8-block", '"activation_scheme"', '"activetion_scheme"', ExitCode.CORRUPT),
        # Another version's word, and a field that somebody adds.
        ("fp8-block", '"fp8"', '"fp9"', ExitCode.OK),
        ("ct-int8", '"quant_method"', '"bitz": 8, "quant_method"', ExitCode.OK),
    ],
)
def test_a_flipped_bit_of_how_weights_are_quantised_is_damage(
    of: str, said: str, flipped: str, code: ExitCode, tmp_path: Path
) -> None:
    """transformers refuses it, or passes over it and reads the codes by its defaults."""
    folder = Path(shutil.copytree(QUANTISED / of, tmp_path / of))
    text = (folder / "config.json").read_text()
    assert said in text
    (folder / "config.json").write_text(text.replace(said, flipped))
    done = printed("verify", str(folder))
    assert done.code == code, done.out + done.err


FORMAT = """
import sys
print("a greeting")
class Theirs:
    name = "theirs"
    def recognise(self, listing):
        {recognise}
    def open(self, source):
        sys.exit(0)
"""


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("raise SystemExit(0)", "SystemExit"),
        (FORMAT.format(recognise="sys.exit(0)"), "SystemExit"),
        (FORMAT.format(recognise="return True"), "not a Recognition"),
    ],
    ids=["exit", "exit-later", "another-type"],
)
def test_a_format_of_others_ends_no_verb_and_says_nothing_on_stdout(
    module: str, said: str, tmp_path: Path
) -> None:
    site = install(tmp_path / "site", "[ftckpt.formats]\ntheirs = theirs:Theirs\n", "theirs")
    (site / "theirs" / "__init__.py").write_text(module)
    save_dcp(tmp_path / "root/step-1", step=1)
    (tmp_path / "root/step-2").mkdir()
    (tmp_path / "root/step-2/a.qq").write_text("x")
    done = run_with(site, "verify", tmp_path / "root/step-2")
    assert done.returncode == ExitCode.NOT_FOUND, done.stderr
    assert said in done.stderr
    (tmp_path / "root/step-2/a.qq").unlink()
    done = run_with(site, "latest", tmp_path / "root")
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "root/step-1")), done.stderr


def test_a_greeting_of_a_package_is_no_answer(tmp_path: Path) -> None:
    site = install(tmp_path / "site", "[ftckpt.formats]\ntheirs = theirs:Theirs\n", "theirs")
    (site / "theirs" / "__init__.py").write_text(FORMAT.format(recognise="return None"))
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2/a.qq").write_text("x")
    done = run_with(site, "verify", tmp_path / "step-2")
    assert "a greeting" in done.stderr
    assert "a greeting" not in done.stdout
