"""mctx's searches on one CPU, for ``search.py``.

Reads a JSON object per line and answers each with one: ``{"kind": k, "batch": b, "simulations": s,
"actions": a}`` makes and compiles a search; ``{"seconds": t}`` runs it for about that long. All seconds are
those of the processor, of all threads. Ends when there is nothing left to read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before jax counts the processors
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import mctx  # noqa: E402
import numpy as np  # noqa: E402

DISCOUNT = 0.997


def make(kind: str, batch: int, simulations: int, actions: int) -> Callable[[], Any]:
    """A compiled search over a table, whose rows are found by a node's depth."""
    rng = np.random.default_rng(0)
    shape = (simulations + 1, batch)
    tables = {
        "logits": jnp.asarray(rng.normal(size=(*shape, actions)), jnp.float32),
        "values": jnp.asarray(rng.normal(size=shape), jnp.float32),
        "rewards": jnp.asarray(rng.normal(size=shape), jnp.float32),
    }
    lanes = jnp.arange(batch)

    def step(params: Any, key: Any, action: Any, depth: Any) -> Any:
        del key, action
        below = depth + 1
        output = mctx.RecurrentFnOutput(
            reward=params["rewards"][below, lanes],
            discount=jnp.full(batch, DISCOUNT, jnp.float32),
            prior_logits=params["logits"][below, lanes],
            value=params["values"][below, lanes],
        )
        return output, below

    policy = mctx.gumbel_muzero_policy if kind == "gumbel" else mctx.muzero_policy

    @jax.jit
    def run(params: Any, key: Any) -> Any:
        root = mctx.RootFnOutput(
            prior_logits=params["logits"][0],
            value=params["values"][0],
            embedding=jnp.zeros(batch, jnp.int32),
        )
        found = policy(params, key, root, step, num_simulations=simulations)
        return found.action, found.action_weights

    key = jax.random.PRNGKey(0)
    jax.block_until_ready(run(tables, key))
    return lambda: jax.block_until_ready(run(tables, key))


def run_for(search: Callable[[], Any], seconds: float) -> dict[str, Any]:
    """Search again and again."""
    started_s = time.process_time()
    searches, spent_s = 0, 0.0
    while spent_s < seconds:
        search()
        searches, spent_s = searches + 1, time.process_time() - started_s
    return {"searches": searches, "seconds": spent_s}


def main() -> None:
    search: Callable[[], Any] | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if "kind" in request:
            search = make(request["kind"], request["batch"], request["simulations"], request["actions"])
            answer: dict[str, Any] = {"versions": {name: metadata.version(name) for name in ("mctx", "jax")}}
        else:
            assert search is not None
            answer = run_for(search, request["seconds"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
