"""What is beside the wheel: the image and the conda recipe say what pyproject.toml says.

`docs/packaging/try-image.sh` runs the image's commands in a clean root filesystem. It takes minutes
and the network, so that it is not a test of this suite.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "docs" / "packaging"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Packages that conda-forge calls something else.
CONDA = {"xxhash": "python-xxhash", "isal": "python-isal", "torch": "pytorch"}


def containerfile() -> list[tuple[str, str]]:
    lines = (PACKAGING / "Containerfile").read_text().splitlines()
    return [tuple(one.split(" ", 1)) for one in lines if one and one[0] != "#"]  # type: ignore[misc]


def test_the_image_has_no_root_no_shell_and_no_torch() -> None:
    said = containerfile()
    words = dict(said)
    assert words["USER"].split(":")[0].isdecimal()
    assert int(words["USER"].split(":")[0]) > 0
    last = [rest for name, rest in said if name == "FROM"][-1]
    assert last == "scratch"
    assert words["ENTRYPOINT"] == '["/opt/ftckpt/bin/ftckpt"]'
    script = (PACKAGING / "image.sh").read_text()
    assert script.count("pip install ") == 1
    assert '"$source"\n' in script


def test_what_is_tried_are_the_lines_of_the_containerfile() -> None:
    ((_, line),) = [one for one in containerfile() if one[0] == "RUN"]
    tried = (PACKAGING / "try-image.sh").read_text()
    assert f'chroot "$root" {line}\n' in tried
    user = dict(containerfile())["USER"]
    assert f"--userspec={user}" in tried
    assert (ROOT / shlex.split(line)[1].removeprefix("/source/")).is_file()


@pytest.mark.parametrize("script", ["image.sh", "try-image.sh"])
def test_a_script_is_one(script: str) -> None:
    subprocess.run(["sh", "-n", PACKAGING / script], timeout=60, check=True)


def requirement(text: str) -> tuple[str, str]:
    name, bound = re.fullmatch(r"([A-Za-z0-9_.-]+)\s*(>=\S+)?", text.strip()).groups()  # type: ignore[union-attr]
    return CONDA.get(name, name), bound or ""


def recipe() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    text = (PACKAGING / "conda" / "recipe.yaml").read_text()
    version = yaml.safe_load(text)["context"]["version"]
    found = yaml.safe_load(text.replace("${{ version }}", version))
    assert isinstance(found, dict)
    return found


def test_the_conda_recipe_says_what_the_project_says() -> None:
    found = recipe()
    assert found["schema_version"] == 1
    assert found["package"] == {"name": PROJECT["name"], "version": PROJECT["version"]}
    declared = dict(map(requirement, PROJECT["dependencies"]))
    optional = dict(map(requirement, PROJECT["optional-dependencies"]["torch"]))
    python = {"python": PROJECT["requires-python"]}
    runs = dict(map(requirement, found["requirements"]["run"]))
    assert runs == declared | python
    assert dict(map(requirement, found["requirements"]["run_constraints"])) == optional
    # What the build imports to make the man pages is there when it builds without isolation.
    host = dict(map(requirement, found["requirements"]["host"]))
    assert host["typer"] == declared["typer"]
    assert host["setuptools"] == ">=77"
    (entry,) = found["build"]["python"]["entry_points"]
    name, _, target = entry.partition(" = ")
    assert PROJECT["scripts"] == {name: target}
    folder = PACKAGING / "conda" / found["source"]["path"]
    assert folder.resolve() == ROOT
    assert (folder / found["about"]["license_file"]).is_file()
