"""Wide collectors on Ray do what they do everywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration import test_wide_collectors as everywhere


@pytest.fixture(scope="module")
def digest() -> str:
    """The weights of the runs at k = 0, reached inline."""
    return everywhere.digest_at_zero()


@pytest.mark.parametrize(("num_collectors", "slots"), [(1, 2), (3, 1)])
def test_at_zero_weights_are_those_of_other_runtimes(
    num_collectors: int, slots: int, digest: str, shared_ray: None
) -> None:
    everywhere.test_at_zero_weights_do_not_depend_on_collectors_slots_or_runtime(
        "ray", num_collectors, slots, digest
    )


@pytest.mark.parametrize(
    "keeps",
    [
        everywhere.test_a_run_whose_segments_mix_versions_is_repeated_bit_for_bit,
        everywhere.test_tools_groups_and_drops_are_repeated,
        everywhere.test_a_run_with_stragglers_that_are_cut_is_repeated,
    ],
)
def test_above_zero_on_ray(keeps: Callable[[str, Path], None], shared_ray: None, tmp_path: Path) -> None:
    keeps("ray", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [everywhere.check_killed_collector, everywhere.check_killed_run])
def test_losses_on_ray(keeps: Callable[[str, Path], None], shared_ray: None, tmp_path: Path) -> None:
    keeps("ray", tmp_path / "run")
