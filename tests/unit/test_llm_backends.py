"""Both engines give the same answers: ours, and whole requests through transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from offbeat.errors import ConfigError
from offbeat.llm.backend import Backend
from offbeat.llm.engine import Engine
from offbeat.llm.files import split
from offbeat.llm.requests import Request, Response
from offbeat.llm.shape import Shape
from offbeat.types import Piece, Span
from tests.unit.llm_fakes import STORIES, TINY, requests, stories, tiny

transformers = pytest.importorskip("transformers")

from offbeat.llm.reference import TransformersBackend  # noqa: E402

SHAPES = {
    "llama": TINY,
    "qwen2": Shape(
        "Qwen2ForCausalLM", 64, 32, 2, 4, 1, 8, 48, qkv_bias=True, tied=True, max_positions=512, eos_ids=(2,)
    ),
    "qwen3": Shape(
        "Qwen3ForCausalLM", 64, 48, 1, 6, 3, 16, 40, qk_norm=True, max_positions=512, eos_ids=(2,)
    ),
}
PROMPT = (5, 9, 30, 7)


def answers(backend: Backend, asked: list[Request]) -> dict[tuple[int, int], Response]:
    for request in asked:
        backend.submit(request)
    found: list[Response] = []
    while backend.is_busy:
        found += backend.step()
    return {(one.key, one.sample): one for one in found}


def assert_alike(ours: dict[tuple[int, int], Response], theirs: dict[tuple[int, int], Response]) -> None:
    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        other = theirs[name]
        assert one.tokens.tolist() == other.tokens.tolist()
        assert np.abs(one.log_probs - other.log_probs).max() <= 1e-5
        assert one.piece == other.piece
        assert one.is_own.tolist() == other.is_own.tolist()


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_requests_have_the_same_tokens_and_log_probs(name: str) -> None:
    model = tiny(1, SHAPES[name])
    asked = [replace(one, temperature=0.0, stop_ids=None) for one in requests(8, most=60)]
    assert_alike(
        answers(Engine(model, slots=8, max_length=256), asked),
        answers(TransformersBackend(model, max_length=256), asked),
    )


def test_drawn_tokens_are_the_same_too() -> None:
    model = tiny(2)
    asked = [replace(one, stop_ids=(2, 3)) for one in requests(6, seed=1, most=40)]
    asked += [replace(asked[0], key=10, top_k=5), replace(asked[1], key=11, top_p=0.8, temperature=1.5)]
    assert_alike(
        answers(Engine(model, slots=8, max_length=256), asked),
        answers(TransformersBackend(model, max_length=256, batch_size=3), asked),
    )


def test_only_the_samples_asked_for_are_made() -> None:
    model, asked = tiny(), Request(0, PROMPT, num_samples=5, max_new_tokens=8, samples=(1, 4), stop_ids=())
    ours = answers(Engine(model, slots=8, max_length=64), [asked])
    assert ours.keys() == {(0, 1), (0, 4)}
    assert_alike(ours, answers(TransformersBackend(model, max_length=64), [asked]))


def test_folder_of_a_trained_model_is_answered_alike() -> None:
    model, asked = stories(), [replace(one, temperature=0.0) for one in requests(3, 512)]
    assert_alike(
        answers(Engine(model, slots=8, max_length=256), asked),
        answers(TransformersBackend(STORIES, max_length=256), asked),
    )


@pytest.mark.parametrize("name", SHAPES)
def test_weights_loaded_between_two_requests_change_both_alike(name: str) -> None:
    old, new = tiny(0, SHAPES[name]), tiny(1, SHAPES[name])
    first = Request(0, PROMPT, max_new_tokens=12, temperature=0.0, stop_ids=())
    found: list[dict[tuple[int, int], Response]] = []
    backends: list[Backend] = [Engine(old, slots=8, max_length=64), TransformersBackend(old, max_length=64)]
    for backend in backends:
        before = answers(backend, [first])
        backend.load(5, new.weights())
        after = answers(backend, [replace(first, key=1)])
        assert backend.version == 5
        assert before[0, 0].tokens.tolist() != after[1, 0].tokens.tolist()
        assert after[1, 0].versions.tolist() == [5] * 12
        found.append(before | after)
    assert_alike(*found)


def test_weights_reach_the_reference_between_two_batches_only() -> None:
    backend = TransformersBackend(tiny(0), batch_size=1, max_length=64)
    backend.submit(Request(0, PROMPT, num_samples=2, max_new_tokens=6, stop_ids=()))
    found = backend.step()
    backend.load(1, tiny(1).weights())
    assert backend.version == 0
    found += backend.step()
    assert [one.spans for one in found] == [(Span(0, 6),), (Span(1, 6),)]


def test_a_network_that_is_not_ours_is_loaded_by_its_own_names() -> None:
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
    )
    torch.manual_seed(0)
    one, other = (transformers.AutoModelForCausalLM.from_config(config) for _ in range(2))
    backend = TransformersBackend(one)
    request = Request(0, PROMPT, max_new_tokens=8, stop_ids=())
    before = answers(backend, [request])[0, 0]
    backend.load(3, dict(other.named_parameters()))
    after = answers(backend, [request])[0, 0]
    expected = answers(TransformersBackend(other), [request])[0, 0]
    assert after.log_probs.tobytes() == expected.log_probs.tobytes() != before.log_probs.tobytes()
    with pytest.raises(ConfigError, match="another network"):
        backend.load(4, tiny().weights())


def test_hugging_face_names_are_taken_for_our_architectures_too() -> None:
    backend = TransformersBackend(tiny(0), max_length=64)
    backend.load(1, split(TINY, tiny(1).weights()))
    request = Request(0, PROMPT, max_new_tokens=8, stop_ids=())
    assert_alike(
        answers(backend, [request]),
        answers(Engine(tiny(1), slots=8, max_length=64, version=1), [request]),
    )


def test_response_that_waits_for_a_tool_goes_on_alike() -> None:
    model, ended = tiny(3), []
    backends: list[Backend] = [
        Engine(model, slots=8, max_length=96),
        TransformersBackend(model, max_length=96),
    ]
    for backend in backends:
        request = Request(0, PROMPT, max_new_tokens=40, stop_ids=tuple(range(40, 48)), seed=4, hold=True)
        (first,) = answers(backend, [request]).values()
        assert first.end == "stop"
        assert not backend.is_busy
        assert len(backend.under_way()) == 1
        backend.extend(0, 0, [11, 12, 13], max_new_tokens=5)
        found: list[Response] = []
        while not found:
            found = backend.step()
        (last,) = found
        size = len(first.tokens)
        assert last.tokens[size : size + 3].tolist() == [11, 12, 13]
        assert last.is_own[size : size + 3].tolist() == [False] * 3
        ended.append(last)
    ours, theirs = ended
    assert ours.tokens.tolist() == theirs.tokens.tolist()
    assert np.abs(ours.log_probs - theirs.log_probs).max() <= 1e-5
    assert ours.versions.tolist() == theirs.versions.tolist()


def test_aborted_and_late_requests_return_what_there_is() -> None:
    now_s = 0.0
    backend = TransformersBackend(tiny(0), max_length=64, clock=lambda: now_s)
    backend.submit(Request(0, PROMPT, num_samples=2))
    backend.submit(Request(1, PROMPT, time_limit_s=5.0))
    assert [one.end for one in backend.abort(0)] == ["cut", "cut"]
    now_s = 6.0
    (late,) = backend.step()
    assert (late.key, late.end, len(late.tokens)) == (1, "timeout", 0)
    assert not backend.is_busy


def test_begun_responses_go_on_where_they_were() -> None:
    model, request = tiny(0), Request(0, PROMPT, max_new_tokens=20, stop_ids=(), seed=9)
    whole = answers(TransformersBackend(model, max_length=64), [request])[0, 0]
    begun = Response(0, 0, whole.tokens[:7], whole.log_probs[:7], whole.is_own[:7], (Span(0, 7),))
    again = answers(TransformersBackend(model, max_length=64), [replace(request, begun=(begun,))])[0, 0]
    assert again.tokens.tolist() == whole.tokens.tolist()
    assert again.spans == (Span(0, 7), Span(0, 13, rebuilt=True))


def test_what_the_reference_cannot_do_is_refused(tmp_path: Path) -> None:
    backend = TransformersBackend(tiny(0), max_length=64)
    with pytest.raises(ConfigError, match="are repeated by"):
        backend.submit(Request(0, PROMPT, scripts=(Piece((Span(0, 3),), "eos"),)))
    with pytest.raises(ConfigError, match="not held"):
        backend.release(0, 0)
    with pytest.raises(ConfigError, match="is not a folder"):
        TransformersBackend(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="max_length is 513"):
        TransformersBackend(tiny(0), max_length=513)
    backend.submit(Request(0, PROMPT))
    with pytest.raises(ConfigError, match="is under way"):
        backend.submit(Request(0, PROMPT))


def test_sequences_end_at_the_limit_alike() -> None:
    request = Request(0, PROMPT, max_new_tokens=500, stop_ids=())
    model = tiny(1)
    ours = answers(Engine(model, slots=8, max_length=32), [request])
    theirs = answers(TransformersBackend(model, max_length=32), [request])
    assert len(ours[0, 0].tokens) == 28
    assert_alike(ours, theirs)
