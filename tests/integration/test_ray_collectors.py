"""Collectors on Ray keep the contract that they keep everywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.integration import test_collectors as contract


@pytest.mark.parametrize(
    "keeps",
    [
        contract.test_collector_of_its_own_kind_holds_many_tickets,
        contract.test_collector_holds_as_many_tickets_as_it_wants,
        contract.test_collector_may_wait_for_something_outside_of_it,
        contract.test_collector_of_its_own_kind_runs_in_a_pipeline,
        contract.test_collector_that_ends_its_process_is_reported,
        contract.test_runtime_that_was_not_started_holds_nothing_and_can_be_closed,
    ],
)
def test_contract_on_ray(keeps: Callable[[str], None], shared_ray: None) -> None:
    keeps("ray")
