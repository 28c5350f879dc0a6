"""Folders of Hugging Face's layout, in both directions, with transformers as the reference."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from offbeat.errors import ConfigError, OffbeatError
from offbeat.llm.files import read_folder, read_shape, write_folder
from offbeat.llm.shape import Shape, shape_of, tensor_sizes

TINY: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "llama-linear": ("llama", {"head_dim": 8, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 8, "eos_token_id": [2, 3]}),
}
STORIES = Path(__file__).resolve().parents[2].parent / "shared/data/models/stories260K"


def hub_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A random model of transformers, whose biases and norms are not what they begin with."""
    transformers = pytest.importorskip("transformers", reason="transformers is the reference")
    kind, changes = MODELS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(TINY | changes))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model.to(dtype)


def own_model(**changes: Any) -> tuple[Shape, dict[str, torch.Tensor]]:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | TINY | changes
    shape = shape_of(config)
    generator = torch.Generator().manual_seed(0)
    return shape, {name: torch.randn(size, generator=generator) for name, size in tensor_sizes(shape).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small Llama that we wrote."""
    write_folder(tmp_path / "model", *own_model())
    return tmp_path / "model"


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_saved_is_read(name: str, tmp_path: Path) -> None:
    model = hub_model(name)
    model.save_pretrained(tmp_path)

    shape, tensors = read_folder(tmp_path)

    assert shape == shape_of(model.config.to_dict() | {"architectures": [type(model).__name__]})
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == tensor_sizes(shape)
    theirs, layer = model.state_dict(), model.model.layers[1]
    attention, mlp = layer.self_attn, layer.mlp
    assert torch.equal(tensors["embed"], theirs["model.embed_tokens.weight"])
    assert torch.equal(tensors["norm"], theirs["model.norm.weight"])
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    assert torch.equal(tensors["layers.1.qkv"], torch.cat([part.weight for part in projections]))
    assert torch.equal(tensors["layers.1.gate_up"], torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))
    assert torch.equal(tensors["layers.1.out"], attention.o_proj.weight)
    assert torch.equal(tensors["layers.1.down"], mlp.down_proj.weight)
    assert torch.equal(tensors["layers.1.post_norm"], layer.post_attention_layernorm.weight)
    if shape.qkv_bias:
        assert torch.equal(tensors["layers.1.qkv_bias"], torch.cat([part.bias for part in projections]))
    if shape.mlp_bias:
        assert torch.equal(
            tensors["layers.1.gate_up_bias"], torch.cat([mlp.gate_proj.bias, mlp.up_proj.bias])
        )
        assert torch.equal(tensors["layers.1.down_bias"], mlp.down_proj.bias)
        assert torch.equal(tensors["layers.1.out_bias"], attention.o_proj.bias)
    if shape.qk_norm:
        assert torch.equal(tensors["layers.1.k_norm"], attention.k_norm.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_what_was_written(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = hub_model(name, dtype)
    model.save_pretrained(tmp_path / "theirs")

    write_folder(tmp_path / "ours", *read_folder(tmp_path / "theirs"))

    transformers = pytest.importorskip("transformers")
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(info.values()), info
    theirs, ours = model.state_dict(), loaded.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[key], ours[key]) and ours[key].dtype == dtype for key in theirs)
    ids = torch.arange(12)[None]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert torch.equal(again(ids).logits, loaded(ids).logits)
    assert loaded.generation_config.eos_token_id == MODELS[name][1].get("eos_token_id", 2)


def test_shards_are_read(tmp_path: Path) -> None:
    model = hub_model("qwen3")
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="6KB")

    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    (_, one), (_, many) = read_folder(tmp_path / "one"), read_folder(tmp_path / "many")
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_a_dtype_may_be_asked_for(tmp_path: Path) -> None:
    shape, tensors = own_model()
    write_folder(tmp_path / "half", shape, {name: tensor.bfloat16() for name, tensor in tensors.items()})

    assert {tensor.dtype for tensor in read_folder(tmp_path / "half")[1].values()} == {torch.bfloat16}
    wide = read_folder(tmp_path / "half", torch.float32)[1]
    assert all(torch.equal(wide[name], tensors[name].bfloat16().float()) for name in wide)


def test_mixed_weights_become_the_dtype_that_holds_all(folder: Path) -> None:
    change(
        folder, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"].bfloat16()})
    )

    assert {tensor.dtype for tensor in read_folder(folder)[1].values()} == {torch.float32}


def test_an_output_layer_stored_twice_is_the_embedding(tmp_path: Path) -> None:
    shape, tensors = own_model(tie_word_embeddings=True)
    write_folder(tmp_path / "m", shape, tensors)
    change(
        tmp_path / "m",
        lambda held: held.update({"lm_head.weight": held["model.embed_tokens.weight"].clone()}),
    )

    assert "head" not in read_folder(tmp_path / "m")[1]

    change(tmp_path / "m", lambda held: held["lm_head.weight"].mul_(2))
    with pytest.raises(
        ConfigError, match=r"lm_head.weight differs from .*; set tie_word_embeddings to false"
    ):
        read_folder(tmp_path / "m")


def test_buffers_of_older_llamas_are_passed_over(folder: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change(folder, lambda tensors: tensors.update({name: torch.ones(2)}))

    assert read_folder(folder)[1].keys() == own_model()[1].keys()


def test_what_is_read_does_not_depend_on_the_file(folder: Path) -> None:
    _, tensors = read_folder(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-4000, os.SEEK_END)
        file.write(bytes(4000))

    assert all(torch.equal(tensors[name], wanted) for name, wanted in own_model()[1].items())


def test_tokenizer_files_are_copied(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source/tokenizer.json").write_text("{}")
    (tmp_path / "source/code.py").write_text("raise SystemExit")

    write_folder(tmp_path / "copy", *read_folder(folder), tokenizer_files_from=tmp_path / "source")

    written = {path.name for path in (tmp_path / "copy").iterdir()}
    assert written == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    with pytest.raises(
        ConfigError, match=r"has no tokenizer files; give the folder that holds tokenizer.json"
    ):
        write_folder(tmp_path / "other", *read_folder(folder), tokenizer_files_from=folder)


def test_a_folder_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("offbeat.llm.files.config_of", fail)
    with pytest.raises(OffbeatError, match=r"model cannot be written \(no space left\); make room there"):
        write_folder(tmp_path / "model", *own_model())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_gets_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "model", tmp_path / "file"):
        with pytest.raises(OffbeatError, match=r"(make room there|exists and is not empty)"):
            write_folder(folder, *own_model())


def test_weights_are_as_readable_as_the_rest(tmp_path: Path) -> None:
    write_folder(tmp_path / "model", *own_model())
    assert len({path.stat().st_mode for path in (tmp_path / "model").iterdir()}) == 1


def test_a_folder_with_something_in_it_is_left_alone(folder: Path, tmp_path: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(ConfigError, match="exists and is not empty; give a new folder, or remove it first"):
        write_folder(folder, *own_model())
    assert (folder / "model.safetensors").stat().st_mtime_ns == before

    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "empty", *own_model())
    assert read_shape(tmp_path / "empty") == own_model()[0]


def test_weights_that_do_not_fit_are_not_written(tmp_path: Path) -> None:
    shape, tensors = own_model()
    changes: list[tuple[dict[str, torch.Tensor], str]] = [
        ({**tensors, "more": torch.zeros(1)}, "missing nothing; superfluous more"),
        (
            {name: tensor for name, tensor in tensors.items() if name != "norm"},
            "missing norm; superfluous nothing",
        ),
        (tensors | {"norm": torch.zeros(3)}, r"norm has the size \(3,\); the shape needs \(16,\)"),
        (tensors | {"norm": tensors["norm"].half()}, "weights are float16 and float32; give all as"),
        (
            {name: tensor.double() for name, tensor in tensors.items()},
            "weights are float64; give all as float32",
        ),
    ]
    for changed, sentence in changes:
        with pytest.raises(ConfigError, match=sentence):
            write_folder(tmp_path / "model", shape, changed)
    assert not list(tmp_path.iterdir())


def test_missing_files_have_a_sentence(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none does not exist; give the folder that holds config.json"):
        read_folder(tmp_path / "none")
    with pytest.raises(ConfigError, match="is not a folder; give the folder"):
        read_folder(folder / "config.json")
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"has no weights; it needs model.safetensors, or model.safetensors.index"
    ):
        read_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config.json; give a folder of Hugging Face's layout"):
        read_folder(folder)
    (folder / "model.gguf").touch()
    with pytest.raises(ConfigError, match=r"convert model.gguf to one: offbeat convert"):
        read_folder(folder)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("exploded"),))


def test_pickles_are_never_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    (folder / "model.safetensors").unlink()

    with pytest.raises(
        ConfigError, match=r"weights as pickle only \(pytorch_model.bin\), which could run code; save"
    ):
        read_folder(folder)
    assert not (folder / "exploded").exists()


def test_torn_files_have_a_sentence(folder: Path) -> None:
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    for torn in (b"", whole[:5], whole[:200], whole[:-1], b"\xff" * 100):
        weights.write_bytes(torn)
        with pytest.raises(ConfigError, match=r"missing, torn or no safetensors file .*; copy or download"):
            read_folder(folder)
    for text in ("{", "[]", "[" * 100_000, '"x"'):
        (folder / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config.json (is not JSON|does not hold a JSON object)"):
            read_folder(folder)


@pytest.mark.timeout(20)
def test_only_regular_files_are_opened(folder: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(ConfigError, match="not a regular file"):
            read_folder(folder)


def test_links_to_regular_files_are_followed(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "model.safetensors", tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")

    assert read_folder(folder)[0] == own_model()[0]


def test_tensors_that_do_not_fit_have_a_sentence(folder: Path) -> None:
    whole = load_file(folder / "model.safetensors")
    norm, head = "model.norm.weight", "lm_head.weight"
    changes: list[tuple[dict[str, torch.Tensor], str]] = [
        (
            {norm: whole[norm][:3].clone()},
            r"model.norm.weight has the size \(3,\), but config.json makes it \(16,\)",
        ),
        (
            {norm: whole[norm].to(torch.int8)},
            "model.norm.weight is stored as I8; F32, F16, BF16 are supported",
        ),
        (
            {"adapter": torch.zeros(2)},
            "has 1 tensors that LlamaForCausalLM does not use: adapter; check archi",
        ),
        (without(whole, norm), "lacks 1 of 21 tensors: model.norm.weight; copy or download"),
        (without(whole, head), "lacks 1 of 21 tensors: lm_head.weight; set tie_word_embeddings to true"),
        (without(whole, *list(whole)[:5]), "lacks 5 of 21 tensors: .* and 2 more"),
    ]
    for change_, sentence in changes:
        held = change_ if len(change_) > 2 else whole | change_
        save_file(held, folder / "model.safetensors", {"format": "pt"})
        with pytest.raises(ConfigError, match=sentence):
            read_folder(folder)


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("../blob.safetensors", "only .safetensors files beside it are read"),
        ("/etc/passwd", "only .safetensors files beside it are read"),
        ("sub\\blob.safetensors", "only .safetensors files beside it are read"),
        ("model.bin", "only .safetensors files beside it are read"),
        (7, "only .safetensors files beside it are read"),
        ("gone.safetensors", "gone.safetensors is missing, torn or no safetensors file"),
    ],
)
def test_an_index_stays_inside_of_the_folder(place: object, sentence: str, folder: Path) -> None:
    shutil.copy(folder / "model.safetensors", folder.parent / "blob.safetensors")
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, place)})
    )

    with pytest.raises(ConfigError, match=sentence):
        read_folder(folder)


def test_an_index_that_is_wrong_has_a_sentence(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    index = folder / "model.safetensors.index.json"
    for content in ({}, {"weight_map": {}}, {"weight_map": ["x"]}):
        index.write_text(json.dumps(content))
        with pytest.raises(ConfigError, match="has no weight_map of tensors and their files"):
            read_folder(folder)
    index.write_text(json.dumps({"weight_map": {"strange": "part.safetensors"}}))
    with pytest.raises(
        ConfigError, match=r"part.safetensors lacks strange, which model.safetensors.index.json expects"
    ):
        read_folder(folder)


def test_a_refused_shape_names_the_file(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"hidden_act": "gelu"}
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(ConfigError, match=r"config.json: hidden_act: 'gelu' is unknown; silu is supported"):
        read_folder(folder)


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs shared/data/models/stories260K beside the checkout")
def test_stories_are_read_and_written(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference")
    shape, tensors = read_folder(STORIES)

    write_folder(tmp_path / "copy", shape, tensors, STORIES)

    assert (shape.num_layers, shape.num_kv_heads, shape.tied, shape.eos_ids) == (5, 4, True, (2,))
    assert shape.num_parameters == 260_032
    theirs = transformers.AutoModelForCausalLM.from_pretrained(STORIES).state_dict()
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "copy").state_dict()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def change(folder: Path, what: Any) -> None:
    """Change the tensors of a folder in place."""
    tensors = load_file(folder / "model.safetensors")
    what(tensors)
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def without(tensors: dict[str, torch.Tensor], *names: str) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}
