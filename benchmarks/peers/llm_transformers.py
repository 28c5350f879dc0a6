"""``generate`` of transformers and its continuous batching, for ``llm_engine.py``; neither makes log-probs.

Arguments: folder of the model, threads, ``generate`` or ``continuous``. Requests and answers are those of
``llm_offbeat.py``. ``generate`` takes ``slots`` requests at a time, and each batch runs to its longest.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from itertools import count
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM

Generate = Callable[[dict[str, Any]], list[list[int]]]
ANSWER_S = 120.0


def in_batches(model: LlamaForCausalLM, asked: dict[str, Any]) -> list[list[int]]:
    prompts, lengths, found = asked["prompts"], asked["lengths"], []
    # Without top-k, which is 50 unless it is set, no processor of logits is called.
    drawing = {"do_sample": False} if asked.get("greedy") else {"do_sample": True, "top_k": 0, "top_p": 1.0}
    for begin in range(0, len(prompts), asked["slots"]):
        ids = torch.tensor(prompts[begin : begin + asked["slots"]])
        own = lengths[begin : begin + asked["slots"]]
        with torch.inference_mode():
            drawn = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max(own),
                eos_token_id=None,
                pad_token_id=0,
                **drawing,
            )[:, ids.shape[1] :].tolist()
        found += [tokens[:length] for tokens, length in zip(drawn, own, strict=True)]
    return found


def continuously(model: LlamaForCausalLM, slots: int) -> Generate:
    """A manager that goes on between calls: its start takes seconds."""
    # Pages that hold the longest request: smaller ones are slower, as is sharing what no two requests share.
    kept = ContinuousBatchingConfig(
        page_size=256,
        num_blocks=4 * slots,
        max_batch_tokens=1024,
        max_requests_per_batch=slots,
        allow_block_sharing=False,
    )
    drawing = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0
    )
    manager = model.init_continuous_batching(drawing, continuous_batching_config=kept)
    manager.start()
    names = count()

    def generate(asked: dict[str, Any]) -> list[list[int]]:
        order = [str(next(names)) for _ in asked["prompts"]]
        for name, prompt, length in zip(order, asked["prompts"], asked["lengths"], strict=True):
            manager.add_request(prompt, request_id=name, max_new_tokens=length)
        found: dict[str, list[int]] = {}
        while len(found) < len(order):
            result = manager.get_result(timeout=ANSWER_S)
            if result is None or result.error:
                raise SystemExit(f"continuous batching: {result and result.error}")
            found[result.request_id] = result.generated_tokens
        return [found[name] for name in order]

    return generate


def main(folder: str, threads: str, kind: str) -> None:
    torch.set_num_threads(int(threads))
    # Scaled dot products and the dynamic cache: eager attention and the static cache are slower on a CPU.
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32).eval()
    continuous: Generate | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if kind == "continuous" and continuous is None:
            continuous = continuously(model, asked["slots"])
        started_s, cpu_s = time.perf_counter(), time.process_time()
        drawn = in_batches(model, asked) if continuous is None else continuous(asked)
        answer: dict[str, Any] = {
            "cpu_s": time.process_time() - cpu_s,
            "wall_s": time.perf_counter() - started_s,
            "tokens": sum(map(len, drawn)),
            "versions": {name: metadata.version(name) for name in ("transformers", "torch")},
        }
        if asked.get("greedy"):
            answer["drawn"] = drawn
        print(json.dumps(answer), flush=True)
    if continuous is not None:
        os._exit(0)  # the manager's thread does not end by itself


if __name__ == "__main__":
    main(*sys.argv[1:])
