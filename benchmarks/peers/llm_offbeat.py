"""offbeat's engine, for ``llm_engine.py``: log-probs and draws that do not depend on other requests included.

Arguments: folder of the model, threads, ``compiled`` or ``eager``. Reads a JSON object per line and answers
each with one: ``{"prompts": [[id, ...], ...], "lengths": [tokens, ...], "slots": n}`` generates, without a
stop; with ``"greedy": true`` the answer holds the tokens. Ends when there is nothing left to read.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import metadata
from typing import Any

from offbeat.llm.engine import Engine
from offbeat.llm.model import Decoder
from offbeat.llm.requests import Request


def main(folder: str, threads: str, kind: str) -> None:
    model, engines = Decoder.read(folder), dict[int, Engine]()
    for line in sys.stdin:
        asked = json.loads(line)
        is_greedy = asked.get("greedy", False)
        requests = [
            Request(key, tuple(prompt), 1, length, 0.0 if is_greedy else 1.0, stop_ids=(), seed=key)
            for key, (prompt, length) in enumerate(zip(asked["prompts"], asked["lengths"], strict=True))
        ]
        slots = asked["slots"]
        if slots not in engines:
            engines[slots] = Engine(
                model, slots=slots, max_length=512, threads=int(threads), compile=kind == "compiled"
            )
        started_s, cpu_s = time.perf_counter(), time.process_time()
        responses = engines[slots].generate(requests)
        answer: dict[str, Any] = {
            "cpu_s": time.process_time() - cpu_s,
            "wall_s": time.perf_counter() - started_s,
            "tokens": sum(len(one.tokens) for one in responses),
            "versions": {"torch": metadata.version("torch")},
        }
        if is_greedy:
            answer["drawn"] = [one.tokens.tolist() for one in responses]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
