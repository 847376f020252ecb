"""What schedulers and launchers say of a process, and what of it is believed."""

from __future__ import annotations

import pytest

from ftckpt.errors import UsageError
from ftckpt.parts import as_array, parse_part
from ftckpt.parts.environment import part_of


def array(number: int, first: int, count: int, step: int = 1) -> dict[str, str]:
    return {
        "SLURM_ARRAY_TASK_ID": str(number),
        "SLURM_ARRAY_TASK_MIN": str(first),
        "SLURM_ARRAY_TASK_COUNT": str(count),
        "SLURM_ARRAY_TASK_STEP": str(step),
    }


@pytest.mark.parametrize(
    ("environment", "parts", "wanted", "named"),
    [
        (array(3, 0, 12), None, (3, 12), "SLURM_ARRAY_TASK_ID"),
        (array(3, 1, 12), None, (2, 12), "SLURM_ARRAY_TASK_ID"),  # --array=1-12
        (array(10, 0, 6, 2), None, (5, 6), "SLURM_ARRAY_TASK_ID"),  # --array=0-10:2
        # The tasks that were missing, as an array of their own: --array=3,17-19, auto/20.
        (array(17, 3, 4), 20, (17, 20), "SLURM_ARRAY_TASK_ID"),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, None, (1, 4), "SLURM_PROCID"),
        # `srun` of one process inside of an array task.
        (array(3, 0, 12) | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None, (3, 12), "ARRAY"),
        ({"JOB_COMPLETION_INDEX": "2"}, 5, (2, 5), "JOB_COMPLETION_INDEX"),
        ({"JOB_COMPLETION_INDEX": "2", "JOB_COMPLETIONS": "5"}, None, (2, 5), "JOB_COMPLETION"),
        ({"RANK": "7", "WORLD_SIZE": "8"}, None, (7, 8), "RANK and WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, None, (0, 2), "OMPI"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, None, (1, 2), "PMI_RANK"),
        # Open MPI under srun: both say the same.
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
            None, (1, 2), "SLURM_PROCID",
        ),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None, (0, 1), "RANK"),
    ],
)  # fmt: skip
def test_the_part_that_was_found_is_named(
    environment: dict[str, str], parts: int | None, wanted: tuple[int, int], named: str
) -> None:
    found = part_of(environment, parts)
    assert (found.number, found.of) == wanted
    assert named in found.found


@pytest.mark.parametrize(
    ("environment", "parts", "says"),
    [
        ({}, None, "no scheduler"),
        ({"RANK": "3"}, None, "no scheduler"),
        # torchrun on each of two nodes that srun started.
        (
            {"RANK": "9", "WORLD_SIZE": "16", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
            None, "ambiguous",
        ),
        (array(3, 0, 12) | {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}, None, "ambiguous"),
        (array(17, 3, 4), None, "part 14/4"),  # and nobody said of how many
        ({"SLURM_ARRAY_TASK_ID": "3"}, None, "SLURM_ARRAY_TASK_COUNT"),
        ({"JOB_COMPLETION_INDEX": "2"}, None, "how many completions"),
        ({"JOB_COMPLETION_INDEX": "5"}, 5, "part 5/5"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, None, "not a number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, None, "not a number"),
        ({"RANK": "1", "WORLD_SIZE": "0"}, None, "0 parts"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, 12, "12 were named"),
    ],
)  # fmt: skip
def test_nobody_guesses(environment: dict[str, str], parts: int | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        part_of(environment, parts)


@pytest.mark.parametrize("text", ["", "3", "3/", "/3", "a/b", "3/3", "-1/3", "1/0", "³/4", "1/2/3"])
def test_what_is_no_part(text: str) -> None:
    with pytest.raises(UsageError):
        parse_part(text)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3, 17, 18, 19], "3,17-19"), ([0], "0"), ([5, 1, 0], "0-1,5"), ([], "")],
)
def test_an_array_of_what_is_missing(numbers: list[int], text: str) -> None:
    assert as_array(numbers) == text
