"""A network with its optimizer."""

import pytest
import torch
from torch import nn

from offbeat.errors import DivergedError
from offbeat.models.trainee import Trainee


def trainee():
    return Trainee("model", nn.Linear(3, 2), eps=1e-8)


def test_weights_decay_by_themselves():
    trained = trainee()
    before = trained.parameters.flat.detach().clone()
    trained.zero()
    trained.step(0.1, 1.0, weight_decay=0.5)
    torch.testing.assert_close(trained.parameters.flat.detach(), 0.95 * before)
    trained.step(0.1, 1.0)
    torch.testing.assert_close(trained.parameters.flat.detach(), 0.95 * before)


def test_a_gradient_that_is_not_finite_is_not_followed():
    trained = trainee()
    before = trained.parameters.flat.detach().clone()
    trained.grad.fill_(float("nan"))
    with pytest.raises(DivergedError, match="gradient of the model has norm nan"):
        trained.step(0.1, 1.0, weight_decay=0.5)
    torch.testing.assert_close(trained.parameters.flat.detach(), before)
