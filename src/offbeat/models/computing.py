"""Numeric precision and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import ParamSpec, TypeVar

import torch
from torch import nn

from offbeat.models.world_spec import Computing
from offbeat.roles import report_progress

P = ParamSpec("P")
R = TypeVar("R")


def autocast(how: Computing, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a network computes: torch.autocast for bfloat16, else nothing."""
    if how.precision == "bfloat16":
        return torch.autocast(device.type, torch.bfloat16)
    return nullcontext()


def enable_tf32(how: Computing) -> None:
    """Allow TF32 in matrix products, in the whole process, where the settings ask for it."""
    if how.precision == "tf32":
        torch.set_float32_matmul_precision("high")


def cast_weights(network: nn.Module, how: Computing) -> None:
    """Cast the weight matrices of a network that only infers to the precision that it computes in."""
    if how.precision == "bfloat16":
        for module in network.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.to(torch.bfloat16)


def compiled(function: Callable[P, R], how: Computing, device: torch.device) -> Callable[P, R]:
    """Compile the function where asked for and there is a GPU; its first call reports "compiling"."""
    if not how.compiled or device.type != "cuda":
        return function
    fast, is_first = torch.compile(function, dynamic=False), True

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal is_first
        if not is_first:
            return fast(*args, **kwargs)
        is_first = False
        report_progress("compiling")
        try:
            return fast(*args, **kwargs)
        finally:
            report_progress("")

    return call
