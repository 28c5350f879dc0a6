"""The engine: the same bits whatever else is there, weights that change in flight, ends and limits."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from offbeat.errors import ConfigError
from offbeat.llm.engine import Engine
from offbeat.llm.model import Decoder, Packing
from offbeat.llm.reference import TransformersBackend
from offbeat.llm.requests import MOST_SAMPLES, MOST_THREADS, Request, Response
from offbeat.llm.scoring import Scorer
from offbeat.llm.shape import Shape
from offbeat.llm.step import Group, Slots, decode
from offbeat.types import Piece, Span
from tests.unit.llm_fakes import TINY, bits, repeated, requests, stories, tiny


def learner_log_probs(model: Decoder, request: Request, response: Response) -> np.ndarray:
    tokens = torch.tensor([*request.prompt, *response.tokens.tolist()])
    with torch.no_grad():
        found = model.log_probs(tokens, Packing.of([len(tokens)]), request.temperature or 1.0)
    return found[len(request.prompt) :].numpy()


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize(
    ("slots", "bucket", "threads"),
    [
        (8, 64, 1),
        (16, 32, 2),
        (24, 448, 1),
        pytest.param(48, 64, 2, marks=pytest.mark.slow),
        pytest.param(40, 128, 1, marks=pytest.mark.slow),
    ],
)
def test_tokens_and_log_probs_do_not_depend_on_what_else_is_there(
    slots: int, bucket: int, threads: int
) -> None:
    model, asked = tiny(), requests(14)
    alone = {}
    for request in asked:
        alone |= bits(Engine(model, slots=8, max_length=256).generate([request]))
    for seed in range(3):
        order = random.Random(seed).sample(asked, len(asked))
        engine = Engine(model, slots=slots, max_length=256, bucket=bucket, threads=threads)
        assert bits(engine.generate(order)) == alone


@pytest.mark.parametrize(
    "shape",
    [
        Shape("LlamaForCausalLM", 40, 32, 2, 4, 4, 8, 48, max_positions=256),
        Shape("Qwen2ForCausalLM", 100, 32, 2, 4, 1, 8, 48, qkv_bias=True, tied=True, max_positions=256),
        Shape("Qwen3ForCausalLM", 64, 48, 1, 6, 3, 16, 40, qk_norm=True, max_positions=256),
    ],
)
def test_other_architectures_have_the_same_bits_in_any_company(shape: Shape) -> None:
    model, asked = tiny(3, shape), requests(6, shape.vocab_size, most=30)
    together = bits(Engine(model, slots=16, max_length=192).generate(asked))
    alone = {}
    for request in asked:
        alone |= bits(Engine(model, slots=8, max_length=192, bucket=32).generate([request]))
    assert together == alone


def test_limits_of_one_request_do_not_change_what_others_draw() -> None:
    model, asked = tiny(), requests(8, most=40)
    alone = bits(Engine(model, slots=16, max_length=256).generate(asked))
    limited = [replace(asked[0], key=100, top_k=5), replace(asked[1], key=101, top_p=0.7)]
    together = bits(Engine(model, slots=16, max_length=256).generate([*limited, *asked]))
    assert {name: one for name, one in together.items() if name[0] < 100} == alone


def test_engine_and_learner_agree() -> None:
    model, asked = stories(), requests(5, 512, seed=3)
    for one in Engine(model, slots=16, max_length=300).generate(asked):
        expected = learner_log_probs(model, asked[one.key], one)
        assert np.abs(expected - one.log_probs).max() <= 1e-4


def test_samples_of_a_group_differ_and_their_prompt_is_fed_once() -> None:
    engine = Engine(tiny(), slots=8, max_length=128)
    request = Request(key=0, prompt=tuple(range(3, 43)), num_samples=20, max_new_tokens=12, stop_ids=())
    found = engine.generate([request])
    assert len({tuple(one.tokens.tolist()) for one in found}) == 20
    assert engine.num_prefilled == len(request.prompt)


# ---------------------------------------------------------------- weights that change


def run_with_swaps(engine: Engine, asked: list[Request], weights: list[Decoder], seed: int) -> list[Response]:
    draw, found, version = random.Random(seed), list[Response](), 0
    for request in asked:
        engine.submit(request)
    while engine.is_busy:
        if version + 1 < len(weights) and draw.random() < 0.08:
            version += 1
            engine.load(version, weights[version].weights())
        found += engine.step()
    return found


@pytest.mark.parametrize("on_swap", ["keep", "recompute"])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_swaps_in_flight_are_repeated_bit_for_bit_from_spans(on_swap: str, seed: int) -> None:
    weights, asked = [tiny(number) for number in range(6)], requests(10, seed=seed)
    found = run_with_swaps(Engine(weights[0], slots=8, max_length=256, on_swap=on_swap), asked, weights, seed)
    assert sum(len(one.spans) > 1 for one in found) >= 3, "no response has two versions"
    if on_swap == "recompute":
        assert any(span.rebuilt for one in found for span in one.spans)
    engine = Engine(weights[0], slots=24, max_length=256, bucket=32)
    again = repeated(engine, asked, found, dict(enumerate(weights)))
    assert bits(again) == bits(found)
    assert {one.key: one.piece for one in again} == {one.key: one.piece for one in found}


def test_recomputed_caches_are_those_of_the_new_weights() -> None:
    old, new = tiny(0), tiny(1)
    request = Request(key=0, prompt=(5, 9, 30, 7), max_new_tokens=40, seed=3, stop_ids=())
    differences = {}
    for on_swap in ("keep", "recompute"):
        engine = Engine(old, slots=8, max_length=128, on_swap=on_swap)
        engine.submit(request)
        for _ in range(10):
            engine.step()
        engine.load(1, new.weights())
        (found,) = [one for _ in range(60) for one in engine.step()]
        assert [span.version for span in found.spans] == [0, 1]
        differences[on_swap] = np.abs(learner_log_probs(new, request, found) - found.log_probs)[
            found.spans[0].size :
        ]
    assert differences["recompute"].max() <= 1e-4
    assert differences["keep"].max() > 1e-2


def test_a_stale_cache_of_a_prompt_would_be_noticed() -> None:
    """The same run with caches that survive a swap, as if they were not of one version."""
    weights, asked = [tiny(0), tiny(1)], [replace(requests(1)[0], num_samples=12, max_new_tokens=20)]

    def run(is_poisoned: bool) -> list[Response]:
        engine = Engine(weights[0], slots=8, max_length=256)
        engine.submit(asked[0])
        found = [*engine.step(), *engine.step()]
        engine.load(1, weights[1].weights())
        assert engine._prefill.kept is not None
        if is_poisoned:
            engine._prefill.kept = engine._prefill.kept._replace(version=1)
        return found + engine_results(engine)

    healthy, poisoned = run(is_poisoned=False), run(is_poisoned=True)
    again = repeated(Engine(weights[0], slots=8, max_length=256), asked, healthy, dict(enumerate(weights)))
    assert bits(again) == bits(healthy)
    poisoned_again = repeated(
        Engine(weights[0], slots=8, max_length=256), asked, poisoned, dict(enumerate(weights))
    )
    assert bits(poisoned_again) != bits(poisoned)


def test_more_threads_than_torch_can_start_are_refused() -> None:
    for made in (Engine, TransformersBackend, Scorer):
        for threads in (0, MOST_THREADS + 1):
            with pytest.raises(ConfigError, match=f"threads is {threads}: use 1 to {MOST_THREADS}"):
                made(tiny(), threads=threads)


def test_a_key_that_is_used_again_gets_its_own_prompt() -> None:
    engine = Engine(tiny(), slots=8, max_length=64)
    engine.submit(Request(0, (5, 6, 7), num_samples=20, max_new_tokens=5, stop_ids=()))
    engine.step()
    engine.abort(0)
    other = Request(0, (9, 10, 11), max_new_tokens=5, stop_ids=(), seed=3)
    assert bits(engine.generate([other])) == bits(Engine(tiny(), slots=8, max_length=64).generate([other]))


def test_prompts_of_aborted_groups_are_not_kept() -> None:
    engine = Engine(tiny(), slots=8, max_length=64)
    for key in range(4):
        engine.submit(Request(key, (5 + key,), num_samples=9, max_new_tokens=9, stop_ids=()))
    engine.step()
    assert engine._prefill.kept is not None
    engine.abort(0, sample=8)
    engine.step()
    assert engine._prefill.kept is None


def test_weights_of_another_network_are_refused() -> None:
    engine = Engine(tiny(), slots=8, max_length=64)
    for wrong in ({"norm": torch.ones(3)}, {**tiny(1).weights(), "norm": torch.ones(3)}):
        with pytest.raises(ConfigError, match="another network"):
            engine.load(1, wrong)
    engine.step()
    assert engine.version == 0
    assert all(
        torch.equal(weight, tiny().weights()[name]) for name, weight in engine._model.weights().items()
    )


# ---------------------------------------------------------------- open responses


def test_responses_under_way_continue_in_another_engine() -> None:
    model, asked = tiny(), requests(6, most=60)
    engine = Engine(model, slots=16, max_length=256)
    for request in asked:
        engine.submit(request)
    found = [one for _ in range(15) for one in engine.step()]
    begun = engine.under_way()
    assert begun
    assert any(len(one.tokens) for one in begun)
    other = Engine(model, slots=8, max_length=256)
    for request in asked:
        mine = tuple(one for one in begun if one.key == request.key)
        if len(mine) == request.num_samples:
            other.submit(replace(request, begun=mine))
            continue
        for one in mine:  # what is finished is not asked for again
            other.submit(replace(request, begun=(one,)))
            for sample in set(range(request.num_samples)) - {two.sample for two in mine}:
                other.abort(request.key, sample)
            break
    continued = []
    while other.is_busy:
        continued += other.step()
    whole = {name: tokens for name, (tokens, _) in bits(engine_results(engine)).items()}
    for one in continued:
        assert one.tokens.tolist() == whole[one.key, one.sample]
        if len(begun_of(begun, one).tokens):
            assert one.spans[-1].rebuilt
    del found


def engine_results(engine: Engine) -> list[Response]:
    found = []
    while engine.is_busy:
        found += engine.step()
    return found


def begun_of(begun: list[Response], one: Response) -> Response:
    return next(other for other in begun if (other.key, other.sample) == (one.key, one.sample))


def held_turn(**changes: object) -> tuple[Engine, Request, Response]:
    """An engine that holds a response, which ended its turn at a stop token."""
    request = Request(0, (5, 6, 7), max_new_tokens=20, stop_ids=tuple(range(8)), hold=True)
    for seed in range(50):
        engine = Engine(tiny(), slots=8, max_length=128, **changes)
        asked = replace(request, seed=seed)
        (turn,) = engine.generate([asked])
        if turn.end == "stop" and len(turn.tokens) > 2:
            return engine, asked, turn
    raise AssertionError("none of 50 ended at a stop token")


def test_held_response_goes_on_after_the_answer_of_a_tool() -> None:
    model = tiny()
    engine, asked, turn = held_turn()
    assert engine.num_held == 1
    assert not engine.is_busy
    engine.extend(0, 0, [10, 11, 12], max_new_tokens=9)
    (whole,) = engine_results(engine)
    first = len(turn.tokens)
    assert whole.tokens[:first].tolist() == turn.tokens.tolist()
    assert whole.tokens[first : first + 3].tolist() == [10, 11, 12]
    assert whole.is_own.tolist() == [True] * first + [False] * 3 + [True] * (len(whole.tokens) - first - 3)
    assert sum(span.size for span in whole.spans) == whole.is_own.sum()
    expected = learner_log_probs(model, asked, whole)
    assert np.abs(expected - whole.log_probs)[whole.is_own].max() <= 1e-4
    if whole.end == "stop":
        engine.release(0, 0)
    assert engine.num_free == 8


def test_extension_that_cannot_be_fed_is_refused() -> None:
    engine, _, _ = held_turn()
    for tokens, most, text in ([64], 5, "token 64"), ([3], 0, "max_new_tokens"), ([3] * 128, 5, "no room"):
        with pytest.raises(ConfigError, match=text):
            engine.extend(0, 0, tokens, most)
    engine.extend(0, 0, [3], 5)
    assert engine_results(engine)


def test_generate_leaves_responses_to_other_requests() -> None:
    engine = Engine(tiny(), slots=8, max_length=64)
    engine.submit(Request(0, (5,), max_new_tokens=5, stop_ids=()))
    assert [one.key for one in engine.generate([Request(1, (6,), max_new_tokens=20, stop_ids=())])] == [1]
    assert [one.key for one in engine_results(engine)] == [0]
    with pytest.raises(ConfigError, match="version 1"):
        engine.generate([Request(2, (5,), scripts=(Piece((Span(1, 3),), "length"),))])


def test_held_response_is_held_in_another_engine() -> None:
    engine, asked, turn = held_turn()
    other = Engine(tiny(), slots=8, max_length=128)
    other.submit(replace(asked, begun=tuple(engine.under_way())))
    (again,) = engine_results(other)
    assert (again.tokens.tolist(), again.end) == (turn.tokens.tolist(), "stop")
    assert other.num_held == 1
    assert other.num_prefilled == 0
    for one in (engine, other):
        one.extend(0, 0, [10, 11, 12], max_new_tokens=9)
    (whole,), (moved,) = engine_results(engine), engine_results(other)
    assert moved.tokens.tolist() == whole.tokens.tolist()
    assert np.abs(moved.log_probs - whole.log_probs).max() < 1e-5
    assert moved.spans[-1].rebuilt


def test_begun_response_that_has_all_its_tokens_gets_no_more() -> None:
    request = Request(0, (5, 6, 7), max_new_tokens=6, stop_ids=())
    (whole,) = Engine(tiny(), slots=8, max_length=64).generate([request])
    (again,) = Engine(tiny(), slots=8, max_length=64).generate([replace(request, begun=(whole,))])
    assert (again.tokens.tolist(), again.end, again.spans) == (whole.tokens.tolist(), "length", whole.spans)


def test_time_limit_ends_a_held_response() -> None:
    now = [0.0]
    engine, asked, turn = held_turn(clock=lambda: now[0])
    engine.release(0, 0)
    engine.submit(replace(asked, time_limit_s=3.0))
    engine_results(engine)
    assert not engine.is_busy
    now[0] = 4.0
    (late,) = engine_results(engine)
    assert (late.end, len(late.tokens)) == ("timeout", len(turn.tokens))
    assert engine.num_free == 8


@pytest.mark.parametrize("rebuilt", [False, True])
def test_held_response_is_repeated_from_its_record(rebuilt: bool) -> None:
    """Weights come between `extend` and the next step."""
    _, asked, turn = held_turn()
    piece = Piece((Span(0, len(turn.tokens)), Span(1, 1, rebuilt)), "length")
    engine = Engine(tiny(), slots=8, max_length=128)
    engine.submit(replace(asked, scripts=(piece,)))
    engine_results(engine)
    assert engine.needs is None, "it waits for a tool, not for weights"
    engine.extend(0, 0, [10, 11], max_new_tokens=9)
    assert engine.needs == 1
    engine.load(1, tiny(1).weights())
    (whole,) = engine_results(engine)
    assert (whole.piece, len(whole.tokens)) == (piece, len(turn.tokens) + 3)


def test_records_without_further_tokens_end_at_once() -> None:
    _, asked, turn = held_turn()
    engine = Engine(tiny(), slots=8, max_length=128)
    (empty,) = engine.generate([Request(1, (5,), scripts=(Piece((), "cut"),))])
    assert (len(empty.tokens), empty.piece) == (0, Piece((), "cut"))
    engine.submit(replace(asked, scripts=(Piece(turn.spans, "timeout"),)))
    engine_results(engine)
    engine.extend(0, 0, [10, 11], max_new_tokens=9)
    (late,) = engine_results(engine)
    assert (late.tokens[-2:].tolist(), late.is_own[-2:].tolist()) == ([10, 11], [False, False])
    assert late.piece == Piece(turn.spans, "timeout")
    assert engine.num_free == 8


def test_records_are_repeated_with_fewer_slots() -> None:
    """Responses that wait for the next version have all slots, others wait for the first one."""
    weights = {version: tiny(version) for version in range(2)}
    asked = [Request(key, (5 + key,), max_new_tokens=10, stop_ids=(), seed=key) for key in range(16)]
    engine = Engine(weights[0], slots=16, max_length=64)
    for request in asked:
        engine.submit(request)
    engine.step()
    engine.load(1, weights[1].weights())
    found = engine_results(engine)
    again = repeated(Engine(weights[0], slots=8, max_length=64), asked, found, weights)
    assert bits(again) == bits(found)


def test_extending_what_is_not_held_is_refused() -> None:
    engine = Engine(tiny(), slots=8, max_length=64)
    with pytest.raises(ConfigError, match="hold=True"):
        engine.extend(0, 0, [1], 5)


# ---------------------------------------------------------------- ends and limits


def test_stop_token_in_the_middle_of_a_group() -> None:
    request = Request(0, (5, 6, 7), num_samples=16, max_new_tokens=50, seed=1, stop_ids=(9, 33))
    found = Engine(tiny(), slots=8, max_length=128).generate([request])
    assert {one.end for one in found} == {"stop", "length"}
    for one in found:
        at = [token in (9, 33) for token in one.tokens.tolist()]
        assert at == [False] * (len(at) - 1) + [one.end == "stop"]
    long = Engine(tiny(), slots=32, max_length=128).generate([replace(request, stop_ids=())])
    for short, whole in zip(found, long, strict=True):
        assert whole.tokens[: len(short.tokens)].tolist() == short.tokens.tolist()


def test_the_models_own_end_is_named() -> None:
    request = Request(0, (5, 6, 7), num_samples=16, max_new_tokens=90, seed=1)
    ends = {one.end for one in Engine(tiny(), slots=16, max_length=128).generate([request])}
    assert "eos" in ends
    assert "stop" not in ends


def test_prompt_at_the_limit_gets_one_token() -> None:
    engine = Engine(tiny(), slots=8, max_length=64)
    found = engine.generate([Request(0, (5,) * 63, max_new_tokens=10), Request(1, (5,) * 60, stop_ids=())])
    assert [len(one.tokens) for one in found] == [1, 4]
    assert found[1].end == "length"


@pytest.mark.parametrize("length", range(120, 161, 5))
def test_prompts_of_any_length_fit_below_the_limit(length: int) -> None:
    engine = Engine(tiny(), slots=8, max_length=161, bucket=32)
    (found,) = engine.generate([Request(0, (5,) * length, stop_ids=())])
    assert len(found.tokens) == 161 - length


def begun(size: int, sample: int = 0, token: int = 5) -> Response:
    tokens, is_own = np.full(size, token, np.int32), np.ones(size, np.bool_)
    return Response(0, sample, tokens, np.zeros(size, np.float32), is_own, (Span(0, size),))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"prompt": (5,) * 64}, "64 tokens"),
        ({"prompt": ()}, "no tokens"),
        ({"prompt": (64,)}, "token 64"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": MOST_SAMPLES + 1}, "use several requests"),
        ({"stop_ids": tuple(range(9))}, "stop_ids"),
        ({"time_limit_s": 0.0}, "time_limit_s"),
        ({"num_samples": 4, "samples": (4,)}, "0 to 3"),
        ({"num_samples": 4, "samples": (1, 1)}, "different"),
        ({"begun": (begun(64),)}, "max_length of 65"),
        ({"begun": (begun(3, sample=1),)}, "sample 1 is not"),
        ({"begun": (begun(3, token=64),)}, "token 64"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(change: dict[str, object], text: str) -> None:
    engine = Engine(tiny(), slots=8, max_length=64)
    with pytest.raises(ConfigError, match=text):
        engine.submit(replace(Request(0, (5,)), **change))


def test_model_with_too_many_ends_needs_stop_ids() -> None:
    engine = Engine(tiny(0, replace(TINY, eos_ids=tuple(range(9)))), slots=8, max_length=64)
    with pytest.raises(ConfigError, match="them with stop_ids"):
        engine.submit(Request(0, (5,)))
    assert engine.generate([Request(1, (5,), max_new_tokens=3, stop_ids=())])[0].end == "length"


def test_a_key_that_is_under_way_is_refused() -> None:
    engine = Engine(tiny(), slots=8, max_length=64)
    engine.submit(Request(0, (5,)))
    with pytest.raises(ConfigError, match="another key"):
        engine.submit(Request(0, (6,)))


def test_a_key_is_under_way_while_any_of_its_samples_is() -> None:
    engine = Engine(tiny(), slots=8, max_length=64)
    engine.submit(Request(0, (5,), num_samples=3))
    engine.abort(0, sample=0)
    with pytest.raises(ConfigError, match="another key"):
        engine.submit(Request(0, (6,)))


def test_engine_that_needs_more_memory_than_there_is_says_so() -> None:
    shape = replace(TINY, max_positions=1 << 20)
    with pytest.raises(ConfigError, match="lower slots or max_length"):
        Engine(Decoder(shape, device="meta"), slots=1 << 16, max_length=1 << 20, device="cpu")


def test_abort_returns_what_there_is_and_frees_the_slot() -> None:
    engine = Engine(tiny(), slots=8, max_length=128)
    asked = [Request(key, (5 + key,), num_samples=4, max_new_tokens=60, stop_ids=()) for key in range(4)]
    for request in asked:
        engine.submit(request)
    for _ in range(5):
        engine.step()
    cut = engine.abort(0)
    assert [(one.end, len(one.tokens)) for one in cut] == [("cut", 6)] * 4
    waiting = engine.abort(3, sample=2)
    assert [(one.end, len(one.tokens)) for one in waiting] == [("cut", 0)]
    rest = engine_results(engine)
    assert len(rest) == 16 - 4 - 1
    whole = bits(Engine(tiny(), slots=16, max_length=128).generate(asked))
    assert all(bits([one])[one.key, one.sample] == whole[one.key, one.sample] for one in rest)
    assert cut[0].tokens.tolist() == whole[0, 0][0][:6]
    assert engine.num_free == 8


def test_time_limit_ends_a_response() -> None:
    now = [0.0]
    engine = Engine(tiny(), slots=8, max_length=256, clock=lambda: now[0])
    engine.submit(Request(0, (5,), max_new_tokens=200, stop_ids=(), time_limit_s=3.0))
    engine.submit(Request(1, (6,), max_new_tokens=30, stop_ids=()))
    found = []
    while engine.is_busy:
        found += engine.step()
        now[0] += 0.5
    assert {one.key: one.end for one in found} == {0: "timeout", 1: "length"}
    assert 0 < len(next(one for one in found if one.key == 0).tokens) < 10


# ---------------------------------------------------------------- ready for a device


def test_the_host_reads_one_tensor_per_step() -> None:
    engine = Engine(tiny(), slots=16, max_length=128)
    for request in requests(4, most=50):
        engine.submit(request)
    engine.step()
    while engine.is_busy:
        before = engine.num_reads
        engine.step()
        assert engine.num_reads - before <= 1 + (engine.num_waiting > 0)


def test_decoding_compiles_without_a_break() -> None:
    model, slots = tiny(), Slots(TINY, 16, 128, "cpu", torch.float32)
    compiled = torch.compile(decode, fullgraph=True, backend="eager")
    with torch.inference_mode():
        rotation = model.rotation(torch.arange(128))
        for groups in ([Group(0, 8, 64)], [Group(0, 8, 128), Group(8, 16, 64)]):
            for is_filtered in (False, True):
                expected = decode(model, slots, rotation, groups, is_filtered=is_filtered)
                found = compiled(model, slots, rotation, groups, is_filtered=is_filtered)
                assert torch.equal(found, expected)


def test_compiled_engine_takes_any_number_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        shapes.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    asked = [Request(key, (5,), max_new_tokens=6 * key, stop_ids=(), seed=key) for key in range(1, 41)]
    found = Engine(tiny(), slots=40, max_length=256, bucket=32, compile=True).generate(asked)
    assert len(shapes) > 8, "as many as torch compiles by itself"
    assert bits(found) == bits(Engine(tiny(), slots=40, max_length=256, bucket=32).generate(asked))


def test_decoding_runs_on_the_meta_device() -> None:
    """Nothing is asked of the host: there are no values to ask for."""
    model = Decoder(TINY, device="meta")
    slots = Slots(TINY, 16, 128, "meta", torch.float32)
    with torch.inference_mode():
        rotation = model.rotation(torch.arange(128, device="meta"))
        found = decode(model, slots, rotation, [Group(0, 8, 128), Group(8, 16, 64)], is_filtered=True)
    assert found.shape == (3, 16)
    assert found.device.type == "meta"


def test_bf16_runs() -> None:
    found = Engine(tiny(), slots=8, max_length=64, dtype=torch.bfloat16).generate(requests(2, most=20)[:1])
    assert len(found[0].tokens)
    assert np.isfinite(found[0].log_probs).all()


def test_tokens_carry_the_time_at_which_they_were_made() -> None:
    """Those of a response that goes on keep theirs; what was not drawn, and older work, has none."""
    begin_s = time.time()
    one = Engine(tiny(), slots=2, max_length=64)
    (whole,) = one.generate([Request(0, (5, 6, 7), max_new_tokens=12, stop_ids=())])
    assert len(whole.made_s) == len(whole.tokens) == 12
    assert (np.diff(whole.made_s) >= 0).all()
    assert begin_s <= whole.made_s[0] <= whole.made_s[-1] <= time.time()
    begun = replace(whole, tokens=whole.tokens[:5], log_probs=whole.log_probs[:5], is_own=whole.is_own[:5])
    begun = replace(begun, spans=(Span(0, 5),), end="", made_s=np.full(5, 77.0))
    for former, first in ((begun, [77.0] * 5), (replace(begun, made_s=np.empty(0)), [np.nan] * 5)):
        asked = Request(1, (5, 6, 7), max_new_tokens=12, stop_ids=(), begun=(former,))
        (later,) = Engine(tiny(), slots=2, max_length=64).generate([asked])
        np.testing.assert_array_equal(later.made_s[:5], first)
        assert (later.made_s[5:] >= whole.made_s[-1]).all()
