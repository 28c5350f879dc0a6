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
        everywhere.test_wide_collectors_that_join_and_leave_are_repeated,
    ],
)
def test_above_zero_on_ray(keeps: Callable[[str, Path], None], shared_ray: None, tmp_path: Path) -> None:
    keeps("ray", tmp_path)


@pytest.mark.slow
def test_all_tickets_of_a_killed_actor_are_issued_again_and_trained_once(
    shared_ray: None, tmp_path: Path
) -> None:
    everywhere.check_killed_collector("ray", tmp_path / "run")


@pytest.mark.slow
def test_killed_run_goes_on_with_every_ticket_and_what_was_begun(shared_ray: None, tmp_path: Path) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address  # a Ray of its own would outlive the killed run
    everywhere.check_killed_run("ray", tmp_path / "run", address)
