from __future__ import annotations

import numpy as np
import torch
from torch import nn

from offbeat.models.flat import FlatAdam, FlatParameters


def test_adam_takes_the_steps_of_torchs_own() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(7, 5), nn.Linear(7, 5)
    theirs.load_state_dict(ours.state_dict())
    flat = FlatParameters(ours)
    adam = FlatAdam(flat, eps=1e-5)
    reference = torch.optim.Adam(theirs.parameters(), eps=1e-5)
    for step in range(50):
        gradients = [torch.randn_like(p) for p in theirs.parameters()]
        for mine, other, grad in zip(ours.parameters(), theirs.parameters(), gradients, strict=True):
            assert mine.grad is not None
            mine.grad.copy_(grad)
            other.grad = grad
        lr = 1e-2 / (1 + step)
        reference.param_groups[0]["lr"] = lr
        adam.step(lr)
        reference.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-7)


def test_adam_goes_on_exactly_from_its_state() -> None:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    flat = FlatParameters(module)
    adam = FlatAdam(flat, eps=1e-8)
    for _ in range(3):
        flat.grad.normal_()
        adam.step(1e-2)
    copy = nn.Linear(3, 2)
    flat_copy = FlatParameters(copy)
    flat_copy.load(flat.arrays())
    adam_copy = FlatAdam(flat_copy, eps=1e-8)
    adam_copy.load_state_dict(adam.state_dict())
    flat.grad.normal_()
    flat_copy.grad.copy_(flat.grad)
    adam.step(1e-2)
    adam_copy.step(1e-2)
    for name, array in flat.arrays().items():
        np.testing.assert_array_equal(flat_copy.arrays()[name], array)


def test_learner_does_not_import_the_compiler() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from offbeat import load_config; from offbeat.algorithms import find;"
        "from offbeat.roles import SingleRank;"
        "find('ppo').build(load_config('cartpole-ppo')).learner(SingleRank());"
        "assert 'torch' in sys.modules and not {'torch._dynamo', 'sympy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
