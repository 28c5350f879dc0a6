"""Small models and requests for tests of the engine."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

from offbeat.llm.engine import Engine
from offbeat.llm.model import Decoder
from offbeat.llm.requests import Request, Response
from offbeat.llm.shape import Shape

STORIES = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "models" / "stories260K"
TINY = Shape("LlamaForCausalLM", 64, 48, 2, 6, 2, 8, 64, max_positions=512, eos_ids=(2,))
Bits = dict[tuple[int, int], tuple[list[int], bytes]]


def tiny(seed: int = 0, shape: Shape = TINY) -> Decoder:
    """A random model whose next token depends on what came before."""
    model = Decoder(shape).initialize(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith("norm"):
                weight.mul_(8.0)
    return model


def stories() -> Decoder:
    if not STORIES.exists():
        pytest.skip(f"needs {STORIES.name} in the shared data beside the checkout")
    return Decoder.read(STORIES)


def requests(count: int, vocab_size: int = 64, seed: int = 0, most: int = 100) -> list[Request]:
    """Requests with prompts and limits of several lengths, some of several samples."""
    draw = random.Random(seed)
    return [
        Request(
            key=key,
            prompt=tuple(draw.randrange(3, vocab_size) for _ in range(draw.choice([1, 3, 16, 40, 70, 130]))),
            num_samples=draw.choice([1, 3]),
            max_new_tokens=draw.randrange(1, most),
            seed=1000 + key,
            stop_ids=(),
        )
        for key in range(count)
    ]


def bits(responses: Sequence[Response]) -> Bits:
    return {(one.key, one.sample): (one.tokens.tolist(), one.log_probs.tobytes()) for one in responses}


def repeated(
    engine: Engine, asked: Sequence[Request], found: Sequence[Response], weights: Mapping[int, Decoder]
) -> list[Response]:
    """Repeat responses from their records alone."""
    by_name = {(one.key, one.sample): one for one in found}
    for request in asked:
        pieces = tuple(by_name[request.key, sample].piece for sample in range(request.num_samples))
        engine.submit(
            Request(
                request.key,
                request.prompt,
                request.num_samples,
                request.max_new_tokens,
                request.temperature,
                stop_ids=request.stop_ids,
                seed=request.seed,
                scripts=pieces,
            )
        )
    again: list[Response] = []
    while len(again) < len(found):
        if not engine.is_busy:
            version = engine.needs
            assert version is not None, "nothing goes on, and nothing waits for weights"
            engine.load(version, weights[version].weights())
            assert engine.is_busy, "weights came, and nobody goes on"
        again += engine.step()
    return again
