"""GRPO on Ray does what it does everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.test_grpo import check_mixed, plain, run


@pytest.mark.parametrize(("engines", "slots"), [(1, 5), (2, None), (3, 4)])
def test_zero_is_the_plain_loop(engines: int, slots: int | None, shared_ray: None, tmp_path: Path) -> None:
    more = {"runtime.num_workers": engines, "algorithm.engine.slots": slots}
    assert run(tmp_path / "run", "ray", rounds=3, **more) == plain(3)


def test_asynchronous_run_mixes_versions_and_repeats(shared_ray: None, tmp_path: Path) -> None:
    path = tmp_path / "run"
    more = {"algorithm.max_new_tokens": 24, "algorithm.engine.slots": 16, "runtime.num_workers": 1}
    run(path, "ray", degree=2, rounds=30, **more)
    check_mixed(path)
