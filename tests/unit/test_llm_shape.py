"""The shape of a language model, read from and written as config.json."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import ConfigError
from offbeat.llm.shape import RopeScaling, Shape, config_of, shape_of, tensor_sizes

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "hidden_act": "silu",
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 8}
ROPE = {"rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_a_llama_is_read() -> None:
    assert shape_of(LLAMA) == Shape(
        architecture="LlamaForCausalLM",
        vocab_size=40,
        width=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=4,
        ff_width=24,
        norm_eps=1e-5,
        rope_theta=10_000.0,
        max_positions=64,
        eos_ids=(2,),
        bos_id=1,
    )


def test_biases_and_norms_are_those_of_the_architecture() -> None:
    biased = LLAMA | {"attention_bias": True, "mlp_bias": True}

    llama, qwen2, qwen3 = shape_of(biased), shape_of(QWEN2), shape_of(QWEN3)

    assert (llama.qkv_bias, llama.out_bias, llama.mlp_bias, llama.qk_norm) == (True, True, True, False)
    assert (qwen2.qkv_bias, qwen2.out_bias, qwen2.mlp_bias, qwen2.qk_norm) == (True, False, False, False)
    assert (qwen3.qkv_bias, qwen3.out_bias, qwen3.mlp_bias, qwen3.qk_norm) == (False, False, False, True)
    assert qwen3.head_size == 8
    assert shape_of({key: QWEN3[key] for key in QWEN3 if key != "head_dim"}).head_size == 128


@pytest.mark.parametrize(
    "rope",
    [
        {
            "rope_theta": 5e5,
            "rope_scaling": {**ROPE, "type": "llama3", "original_max_position_embeddings": 32},
        },
        {"rope_parameters": {**ROPE, "rope_type": "llama3", "original_max_position_embeddings": 32}},
        {"rope_parameters": {**ROPE, "rope_type": "llama3"}, "original_max_position_embeddings": 32},
    ],
)
def test_both_layouts_of_rope_are_read(rope: dict[str, Any]) -> None:
    shape = shape_of(LLAMA | rope)

    assert shape.rope_theta == 500_000.0
    assert shape.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 32)


def test_linear_scaling_and_the_default_are_read() -> None:
    linear = shape_of(LLAMA | {"rope_theta": 7.0, "rope_scaling": {"type": "linear", "factor": 2}})

    assert linear.rope_scaling == RopeScaling("linear", 2.0) and linear.rope_theta == 7.0
    assert (
        shape_of(LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 3.0}}).rope_theta == 3.0
    )
    assert shape_of(LLAMA | {"rope_scaling": None}).rope_scaling is None


def test_ids_that_end_a_text_come_from_the_generation_first() -> None:
    assert shape_of(LLAMA | {"eos_token_id": [3, 4, 3]}).eos_ids == (3, 4)
    assert shape_of(LLAMA, {"eos_token_id": [5, 2]}).eos_ids == (5, 2)
    assert shape_of(LLAMA, {"eos_token_id": None}).eos_ids == (2,)
    assert shape_of(LLAMA | {"eos_token_id": None, "bos_token_id": None}).eos_ids == ()
    assert shape_of(LLAMA | {"pad_token_id": -1}).pad_id is None
    assert shape_of(LLAMA | {"pad_token_id": 39}).pad_id == 39


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"architectures": ["MistralForCausalLM"]},
            "architectures: 'MistralForCausalLM' is unknown; LlamaForC",
        ),
        (
            {"architectures": None, "model_type": "gpt2"},
            "model_type: 'gpt2' is unknown; LlamaForCausalLM, Qwen2",
        ),
        ({"model_type": "mistral"}, "model_type: 'mistral' contradicts architectures, LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is unknown; silu is supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: {'bits': 4} needs kernels"),
        ({"num_local_experts": 8}, "num_local_experts: 8 means a mixture of experts; dense"),
        (
            {"use_sliding_window": True, "sliding_window": 64},
            "use_sliding_window: true with sliding_window: 64",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types: .*full_attention in each of 2",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_scaling.rope_type: 'yarn'; default, linear",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic"}},
            "rope_parameters.rope_type: 'dynamic'; default, linear",
        ),
        (
            {"rope_parameters": {"full_attention": {}}},
            "rope_parameters: .* one set of numbers for all layers",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: missing; a number above 0"),
        (
            {"rope_scaling": {**ROPE, "type": "llama3", "low_freq_factor": 4}},
            "high_freq_factor: 4.0; it has to be",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5; rotating the whole head"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads = 4"),
        (
            {"num_attention_heads": 3},
            "num_attention_heads: 3 does not divide hidden_size = 16; give head_dim",
        ),
        ({"head_dim": 5}, "head_dim: 5 is odd; rotary embeddings rotate pairs"),
        ({"hidden_size": None}, "hidden_size: missing; a whole number from 1 to"),
        ({"vocab_size": True}, "vocab_size: True; a whole number from 1 to"),
        ({"num_hidden_layers": 5000}, "num_hidden_layers: 5000; a whole number from 1 to 1,000"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: nan; a number above 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: 1; true and false"),
        ({"eos_token_id": 40}, r"eos_token_id: 40 is outside of the vocabulary; ids from 0 to 39"),
        ({"eos_token_id": ["x"]}, r"eos_token_id: \['x'\] is no token id"),
        ({"bos_token_id": -1}, "bos_token_id: -1 is outside of the vocabulary"),
    ],
)
def test_what_the_network_does_not_compute_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        shape_of(LLAMA | changes)


def test_a_window_that_no_layer_uses_is_no_window() -> None:
    unused = {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}

    assert shape_of(QWEN2 | unused) == shape_of(QWEN2)
    assert shape_of(QWEN2 | unused | {"use_sliding_window": True, "max_window_layers": 2}) == shape_of(QWEN2)
    assert shape_of(QWEN2 | {"layer_types": ["full_attention"] * 2}) == shape_of(QWEN2)


@pytest.mark.parametrize("config", [LLAMA, QWEN2, QWEN3])
@pytest.mark.parametrize(
    "scaling", [None, RopeScaling("linear", 2.0), RopeScaling("llama3", 8.0, 1.0, 4.0, 32)], ids=str
)
def test_what_is_written_is_read_again(config: dict[str, Any], scaling: RopeScaling | None) -> None:
    shape = replace(shape_of(config), rope_scaling=scaling, rope_theta=5e5, eos_ids=(2, 3), tied=True)

    assert shape_of(json.loads(json.dumps(config_of(shape)))) == shape


def test_parameters_are_counted_as_transformers_counts_them() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference")
    for config in (
        LLAMA | {"attention_bias": True, "mlp_bias": True},
        QWEN2 | {"tie_word_embeddings": True},
        QWEN3,
    ):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))

        assert shape_of(config).num_parameters == model.num_parameters()


def test_tensors_have_the_sizes_of_the_fused_matrices() -> None:
    sizes = tensor_sizes(shape_of(QWEN3 | {"attention_bias": True}))

    assert list(sizes)[:3] == ["embed", "layers.0.input_norm", "layers.0.qkv"]
    assert sizes["layers.1.qkv"] == (64, 16) and sizes["layers.1.qkv_bias"] == (64,)
    assert sizes["layers.1.out"] == (16, 32) and sizes["layers.1.k_norm"] == (8,)
    assert sizes["layers.1.gate_up"] == (48, 16) and sizes["layers.1.down"] == (16, 24)
    assert sizes["head"] == (40, 16) and "head" not in tensor_sizes(
        shape_of(LLAMA | {"tie_word_embeddings": True})
    )


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, offbeat, offbeat.llm, offbeat.llm.shape, offbeat.llm.tokens\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'jinja2', 'safetensors', 'gguf'}\n"
        "heavy &= sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert done.returncode == 0, done.stderr
