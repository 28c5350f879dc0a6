"""Losses and advantages of verl, values and gradients, for arrays in a file.

    python verl_losses.py IN.npz OUT.npz CASES.json

Runs in an environment of verl's own (tests/integration/test_verl.py makes it); no GPU, no offbeat. IN holds
padded arrays ``NAME/BATCH`` ``[R, T]``; CASES lists what to compute from each; OUT gets ``CASE/BATCH/NAME``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config.actor import ActorConfig

Arrays = dict[str, torch.Tensor]


def policy(case: dict[str, Any], data: Arrays) -> dict[str, torch.Tensor]:
    """A policy loss, with or without corrections, and its gradient by the log-probs."""
    mask, log_probs = data["mask"], data["log_probs"].clone().requires_grad_()
    is_bypass = case.get("bypass", True)
    old = data["behaviour"] if is_bypass else data["proximal"]
    weights, kept = None, mask
    if "correction" in case:
        newer = log_probs.detach() if is_bypass else old
        found, kept, _ = compute_rollout_correction_and_rejection_mask(
            newer, data["behaviour"], mask, **case["correction"]
        )
        weights = None if found is None else found.batch["rollout_is_weights"]
    # Denominators of all tokens and responses, whatever is masked.
    counts = {"batch_num_tokens": mask.sum(), "global_batch_size": int((mask.sum(-1) > 0).sum())}
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=case["clip_low"],
        clip_ratio_high=case["clip_high"],
        clip_ratio_c=case.get("dual_clip", 1e9),
        global_batch_info={**counts, "loss_scale_factor": case["longest"]},
    )
    loss, _ = core_algos.get_policy_loss_fn(case["mode"])(
        old_log_prob=old,
        log_prob=log_probs,
        advantages=data["advantages"],
        response_mask=kept,
        loss_agg_mode=case["aggregation"],
        config=config,
        rollout_is_weights=weights,
    )
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return {"loss": loss, "gradient": gradient}


def kl(case: dict[str, Any], data: Arrays) -> dict[str, torch.Tensor]:
    """A KL penalty in the loss."""
    log_probs = data["log_probs"].clone().requires_grad_()
    each = core_algos.kl_penalty(log_probs, data["reference"], case["estimator"])
    loss = core_algos.agg_loss(each, data["mask"], case["aggregation"], loss_scale_factor=case["longest"])
    (gradient,) = torch.autograd.grad(loss, log_probs)
    return {"loss": loss, "gradient": gradient}


def value(case: dict[str, Any], data: Arrays) -> dict[str, torch.Tensor]:
    """The clipped loss of values."""
    values = data["values"].clone().requires_grad_()
    loss, _ = core_algos.compute_value_loss(
        values, data["targets"], data["old_values"], data["mask"], case["clip"], case["aggregation"]
    )
    (gradient,) = torch.autograd.grad(loss, values)
    return {"loss": loss, "gradient": gradient}


def advantages(case: dict[str, Any], data: Arrays) -> dict[str, torch.Tensor]:
    """Advantages of each token; with values, their targets, too."""
    estimate = core_algos.get_adv_estimator_fn(case["estimator"])
    settings = case.get("settings", {})
    if case["estimator"] == "gae":
        found, targets = estimate(data["token_rewards"], data["old_values"], data["mask"], **settings)
        return {"advantages": found * data["mask"], "targets": targets * data["mask"]}
    index = data["groups"].numpy()
    found, _ = estimate(data["token_rewards"].clone(), data["mask"], index=index, **settings)
    return {"advantages": found * data["mask"]}


def rewards(case: dict[str, Any], data: Arrays) -> dict[str, torch.Tensor]:
    """Rewards of tokens with a KL penalty."""
    each = core_algos.kl_penalty(data["behaviour"], data["reference"], case["estimator"])
    return {"rewards": (data["token_rewards"] - case["coef"] * each) * data["mask"]}


KINDS = {"policy": policy, "kl": kl, "value": value, "advantages": advantages, "rewards": rewards}


def main() -> None:
    """Compute every case of every batch."""
    source, target, cases = sys.argv[1], sys.argv[2], json.loads(Path(sys.argv[3]).read_text())
    torch.set_num_threads(1)
    with np.load(source) as file:
        arrays = {name: torch.from_numpy(file[name]) for name in file.files}
    batches = sorted({name.partition("/")[2] for name in arrays}, key=int)
    out = {}
    for batch in batches:
        data = {name.partition("/")[0]: one for name, one in arrays.items() if name.endswith(f"/{batch}")}
        for name, case in cases.items():
            for key, found in KINDS[case["kind"]](case, data).items():
                out[f"{name}/{batch}/{key}"] = found.detach().numpy()
    np.savez(target, **out)


if __name__ == "__main__":
    main()
