"""Losses, advantages, aggregation and corrections against verl's, values and gradients.

verl runs in an environment of its own, ``.venvs/verl``, made on first use; nothing of it is imported here.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.algorithms.grpo.config import GRPOConfig
from offbeat.algorithms.grpo.objective import make_token_loss, policy_loss
from offbeat.algorithms.grpo.samples import Samples
from offbeat.ops.aggregation import Aggregation, aggregation_weights
from offbeat.ops.group_advantages import group_advantages, token_gae, whiten
from offbeat.ops.token_losses import TokenBatch, clipped_value_loss, kl_estimate
from offbeat.types import Array, Piece, Segment, Span, Ticket

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_600)]
ROOT = Path(__file__).resolve().parents[2]
VERL = "verl==0.9.1"
NEEDS = ("numpy", "packaging", "tensordict", "omegaconf", "transformers", "ray", "codetiming", "orjson")
NUM_BATCHES, GROUP_SIZE, LONGEST = 200, 4, 30
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
AGGREGATIONS: dict[Aggregation, str] = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}
MODES = {
    "clip": ("vanilla", {"loss": "dapo"}),
    "dual clip": ("vanilla", {"loss": "dapo", "dual_clip": 3.0}),
    "gspo": ("gspo", {"loss": "gspo", "clip_low": 0.02, "clip_high": 0.03}),
    "cispo": ("cispo", {"loss": "cispo", "clip_low": 0.3, "clip_high": 0.4}),
}
# Geometric means of behaviour over proximal there, of proximal over behaviour here: 1 / 1.1 and 1 / 0.9.
MASK = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": f"{1 / 1.1}_{1 / 0.9}"}
OWN_MASK = {"mask_low": 0.9, "mask_high": 1.1}
DECOUPLED = {"proximal": "round_start"}
CORRECTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bypass": ({}, {}),
    "bypass masked": ({"correction": MASK}, OWN_MASK),
    "decoupled": ({"bypass": False}, DECOUPLED),
    "decoupled token": (
        {"bypass": False, "correction": {"rollout_is": "token", "rollout_is_threshold": 1.2}},
        {**DECOUPLED, "weight": "token", "weight_cap": 1.2},
    ),
    "decoupled sequence masked": (
        {"bypass": False, "correction": {"rollout_is": "sequence", "rollout_is_threshold": 2.0, **MASK}},
        {**DECOUPLED, "weight": "sequence", "weight_cap": 2.0, **OWN_MASK},
    ),
}
ESTIMATES: dict[str, dict[str, Any]] = {
    "group": {"estimator": "grpo"},
    "centred": {"estimator": "grpo", "settings": {"norm_adv_by_std_in_grpo": False}},
    "leave one out": {"estimator": "rloo"},
    "batch": {"estimator": "reinforce_plus_plus_baseline"},
    "gae": {"estimator": "gae", "settings": {"gamma": 0.99, "lam": 0.9}},
}


def policy_cases() -> dict[str, tuple[dict[str, Any], GRPOConfig]]:
    """Every loss with every aggregation and correction: what verl is asked for, and our settings."""
    cases = {}
    for mode, (their_mode, settings) in MODES.items():
        for aggregation, their_aggregation in AGGREGATIONS.items():
            for correction, (theirs, ours) in CORRECTIONS.items():
                config = GRPOConfig(**settings, aggregation=aggregation, correction=ours)  # type: ignore[arg-type]
                parts = config.choices
                case = {"kind": "policy", "mode": their_mode, "aggregation": their_aggregation, **theirs}
                case |= {"clip_low": parts.clip_low, "clip_high": parts.clip_high, "longest": LONGEST}
                case |= {"dual_clip": config.dual_clip} if config.dual_clip else {}
                cases[f"{mode}, {aggregation}, {correction}"] = (case, config)
    return cases


def asked() -> dict[str, dict[str, Any]]:
    """All cases for verl."""
    cases = {name: case for name, (case, _) in policy_cases().items()}
    for ours, theirs in AGGREGATIONS.items():
        for estimator in ("k1", "k2", "k3"):
            case = {"kind": "kl", "estimator": estimator, "aggregation": theirs, "longest": LONGEST}
            cases[f"kl {estimator}, {ours}"] = case
    cases["value"] = {"kind": "value", "clip": 0.2, "aggregation": "token-mean"}
    cases |= {f"advantages {name}": {"kind": "advantages", **case} for name, case in ESTIMATES.items()}
    return cases | {"rewards": {"kind": "rewards", "estimator": "k3", "coef": 0.1}}


def batch(seed: int) -> dict[str, Array]:
    """A ragged batch with gaps: groups of responses of 1 to 30 tokens, some of them given ones."""
    draw = np.random.default_rng(seed)
    num = GROUP_SIZE * int(draw.integers(1, 5))
    sizes = draw.integers(1, LONGEST + 1, num)
    steps = np.arange(LONGEST)
    mask = (steps < sizes[:, None]) & ((draw.random((num, LONGEST)) > 0.2) | (steps == sizes[:, None] - 1))
    shape = (num, LONGEST)
    behaviour = -draw.exponential(1.5, shape)
    proximal = behaviour + draw.normal(0, 0.15, shape)
    token_rewards = np.zeros(shape)
    token_rewards[np.arange(num), sizes - 1] = draw.integers(0, 2, num) + draw.normal(0, 0.1, num)
    whole = {
        "mask": mask,
        "behaviour": behaviour,
        "proximal": proximal,
        "log_probs": proximal + draw.normal(0, 0.3, shape),
        "reference": behaviour + draw.normal(0, 0.5, shape),
        "advantages": draw.normal(0, 1, shape),
        "values": draw.normal(0, 1, shape),
        "old_values": draw.normal(0, 1, shape),
        "targets": draw.normal(0, 1, shape),
        "token_rewards": token_rewards,
    }
    floats = {name: one.astype(np.float32) for name, one in whole.items()}
    return {**floats, "groups": np.repeat(np.arange(num // GROUP_SIZE), GROUP_SIZE)}


@pytest.fixture(scope="module")
def python() -> str:
    """The Python of verl's environment."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    common = importlib.import_module("common")
    monkeypatch.undo()
    try:
        return str(common.peer_python("verl", NEEDS, alone=(VERL,)))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{VERL} cannot be installed: {error}")


@pytest.fixture(scope="module")
def theirs(python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Array]:
    """What verl makes of all batches."""
    folder = tmp_path_factory.mktemp("verl")
    arrays = {f"{name}/{seed}": one for seed in range(NUM_BATCHES) for name, one in batch(seed).items()}
    np.savez(folder / "in.npz", **arrays)  # type: ignore[arg-type]
    (folder / "cases.json").write_text(json.dumps(asked()))
    script = ROOT / "benchmarks" / "peers" / "verl_losses.py"
    command = [python, str(script), "in.npz", "out.npz", "cases.json"]
    environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=3_000)
    assert done.returncode == 0, done.stderr
    with np.load(folder / "out.npz") as file:
        return {name: file[name] for name in file.files}


class Packed:
    """The tokens of a batch that count, one behind the other."""

    def __init__(self, seed: int) -> None:
        self.arrays = batch(seed)
        self.mask = self.arrays["mask"] > 0
        self.sizes = self.mask.sum(-1)
        self.rows = torch.from_numpy(np.repeat(np.arange(len(self.sizes)), self.sizes))

    def of(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.arrays[name][self.mask])

    def weights(self, kind: Aggregation) -> torch.Tensor:
        return torch.from_numpy(aggregation_weights(self.sizes, kind, longest=LONGEST))

    def check(
        self, theirs: dict[str, Array], case: str, seed: int, loss: torch.Tensor, by: torch.Tensor
    ) -> None:
        """Compare a loss and its gradient."""
        np.testing.assert_allclose(loss.item(), theirs[f"{case}/{seed}/loss"], err_msg=case, **CLOSE)
        (gradient,) = torch.autograd.grad(loss, by)
        expected = theirs[f"{case}/{seed}/gradient"]
        np.testing.assert_allclose(gradient.numpy(), expected[self.mask], err_msg=case, **CLOSE)
        assert not expected[~self.mask].any()


@pytest.mark.parametrize("case", policy_cases())
def test_policy_losses(case: str, theirs: dict[str, Array]) -> None:
    _, config = policy_cases()[case]
    token_loss, num_masked = make_token_loss(config), 0
    for seed in range(NUM_BATCHES):
        packed = Packed(seed)
        log_probs = packed.of("log_probs").requires_grad_()
        is_bypass = config.correction.proximal == "behaviour"
        proximal = packed.of("behaviour" if is_bypass else "proximal")
        tokens = TokenBatch(log_probs, proximal, packed.of("behaviour"), packed.of("advantages"), packed.rows)
        weights = packed.weights(config.choices.aggregation)
        loss, corrections = policy_loss(config, token_loss, tokens, weights)
        num_masked += 0 if corrections is None else int((corrections == 0).sum())
        packed.check(theirs, case, seed, loss, log_probs)
    assert (num_masked > 0) == case.endswith("masked"), "the mask did something"


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_kl_penalties(estimator: Any, kind: Aggregation, theirs: dict[str, Array]) -> None:
    for seed in range(NUM_BATCHES):
        packed = Packed(seed)
        log_probs = packed.of("log_probs").requires_grad_()
        each = kl_estimate(log_probs, packed.of("reference"), estimator)
        packed.check(theirs, f"kl {estimator}, {kind}", seed, (each * packed.weights(kind)).sum(), log_probs)


def test_value_losses(theirs: dict[str, Array]) -> None:
    for seed in range(NUM_BATCHES):
        packed = Packed(seed)
        values = packed.of("values").requires_grad_()
        each = clipped_value_loss(values, packed.of("old_values"), packed.of("targets"), 0.2)
        packed.check(theirs, "value", seed, (each * packed.weights("token_mean")).sum(), values)


def own_advantages(name: str, packed: Packed) -> tuple[Array, Array | None]:
    if name == "gae":
        rewards, values = packed.of("token_rewards").numpy(), packed.of("old_values").numpy()
        advantages, targets = token_gae(rewards, values, packed.sizes, gamma=0.99, gae_lambda=0.9)
        return whiten(advantages), targets
    totals = packed.arrays["token_rewards"].sum(-1, dtype=np.float64)
    norm: Any = {"group": "group", "batch": "batch"}.get(name, "none")
    baseline: Any = "leave_one_out" if name == "leave one out" else "group"
    groups = totals.reshape(-1, GROUP_SIZE)
    each = [group_advantages(one, baseline=baseline, norm=norm, eps=1e-6) for one in groups]
    repeated = np.repeat(np.concatenate(each), packed.sizes)
    return (whiten(repeated) if name == "batch" else repeated), None


@pytest.mark.parametrize("name", ESTIMATES)
def test_advantages(name: str, theirs: dict[str, Array]) -> None:
    for seed in range(NUM_BATCHES):
        packed = Packed(seed)
        advantages, targets = own_advantages(name, packed)
        expected = theirs[f"advantages {name}/{seed}/advantages"]
        np.testing.assert_allclose(advantages, expected[packed.mask], **CLOSE)
        if targets is not None:
            expected = theirs[f"advantages {name}/{seed}/targets"]
            np.testing.assert_allclose(targets, expected[packed.mask], **CLOSE)


def test_kl_in_rewards(theirs: dict[str, Array]) -> None:
    """Whole samples of a round, with the penalty taken off: their targets at lambda 1 are sums of rewards."""
    kl = {"coef": 0.1, "place": "reward", "estimator": "k3"}
    config = GRPOConfig(loss="ppo", kl=kl)  # type: ignore[arg-type]
    for seed in range(0, NUM_BATCHES, 10):
        packed = Packed(seed)
        samples = Samples([segment_of(packed)], config, longest=LONGEST)
        samples.own["reference"] = packed.of("reference").numpy()
        samples.own["values"] = np.zeros(int(packed.sizes.sum()), np.float32)
        samples.set_advantages()
        expected = theirs[f"rewards/{seed}/rewards"][:, ::-1].cumsum(-1)[:, ::-1]
        np.testing.assert_allclose(samples.own["targets"], expected[packed.mask], rtol=1e-5, atol=5e-5)


def segment_of(packed: Packed) -> Segment:
    """The batch as one group."""
    totals = packed.arrays["token_rewards"].sum(-1)
    lasts = [int(np.flatnonzero(row)[-1]) + 1 for row in packed.mask]
    is_response = np.arange(LONGEST) < np.array(lasts)[:, None]
    data = {
        "prompt": np.array([1], np.int32),
        "sizes": np.array(lasts),
        "tokens": np.zeros(sum(lasts), np.int32),
        "log_probs": packed.arrays["behaviour"][is_response],
        "is_own": packed.mask[is_response],
        "rewards": totals.astype(np.float64),
    }
    pieces = tuple(Piece((Span(0, int(size)),), "eos") for size in packed.sizes)
    return Segment(Ticket(0, 0, 0, 0, 0), data, np.zeros(1, np.int64), pieces=pieces)
