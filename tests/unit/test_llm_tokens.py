"""Tokenizers, chat templates and streams, with transformers as the reference."""

from __future__ import annotations

import builtins
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import ConfigError
from offbeat.llm.chat import ChatTemplate
from offbeat.llm.shape import Shape
from offbeat.llm.tokens import CharTokenizer, HubTokenizer, Stream, check_fits, load_tokenizer, text_after

STORIES = Path(__file__).resolve().parents[2].parent / "shared/data/models/stories260K"
TEXTS = ["Once upon a time", "", "2 + 2 = 4", "  two  spaces ", "naïve café", "你好 😀👍🏽", "a\nb\t<s>c</s>"]
CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}\n"
    "{%- endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_LIKE = (
    "{{- bos_token }}{% set ns = namespace(system='') %}"
    "{% if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages if m.content is defined %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.first and ns.system %}{{ '<<' ~ ns.system ~ '>>' }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% else %}{% generation %}{{ m.content }}{% endgeneration %}{{ eos_token }}{% endif %}"
    "{% if loop.last %}{{ messages | length }}/{{ m | tojson }}{% break %}{% endif %}"
    "{% endfor %}"
)
CHAT = [{"role": "user", "content": " <b>2+2</b>=é "}, {"role": "assistant", "content": "4"}]
SYSTEM = [{"role": "system", "content": "Be short."}, *CHAT, {"role": "user", "content": "3?"}]


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with a handful of merges, special tokens and a begin token."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs offbeat[llm]")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=["<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.enable_truncation(5)
    folder = tmp_path_factory.mktemp("bytes")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "eos_token": "</s>",
        "chat_template": CHATML,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 1]}))
    return folder


def copy(source: Path, target: Path, **changes: Any) -> Path:
    """A folder with another tokenizer_config.json."""
    target.mkdir(exist_ok=True)
    config = json.loads((source / "tokenizer_config.json").read_text()) | changes
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    return target


def test_ids_are_those_of_transformers(byte_folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(byte_folder), load_tokenizer(byte_folder)

    for text in TEXTS:
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.decode(ours.encode(text)) == theirs.decode(
            theirs(text).input_ids, skip_special_tokens=True
        )
    assert ours.encode("a b c d e f g h")[0] == 0 and len(ours.encode("a b c d e f g h")) > 5
    assert ours.vocab_size == len(theirs)
    assert ours.eos_ids == (1, 3)


@pytest.mark.parametrize("template", [CHATML, LLAMA_LIKE], ids=["chatml", "llama"])
@pytest.mark.parametrize("place", ["config", "list", "file"])
@pytest.mark.parametrize("chat", [CHAT, SYSTEM, CHAT[:1]], ids=["two", "system", "one"])
def test_chats_are_those_of_transformers(
    template: str, place: str, chat: Sequence[dict[str, str]], byte_folder: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference")
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": template}]
    folder = copy(
        byte_folder, tmp_path / "m", chat_template={"config": template, "list": named, "file": "no"}[place]
    )
    if place == "file":
        (folder / "chat_template.jinja").write_text(template)

    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    wanted = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)

    assert load_tokenizer(folder).chat(chat) == wanted


def test_a_chat_ends_where_the_answer_begins(byte_folder: Path) -> None:
    tokenizer = load_tokenizer(byte_folder)

    ids = tokenizer.chat([{"role": "user", "content": "hi"}])

    assert ids == tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")[1:]
    assert ids[0] == 2


def test_messages_that_a_template_refuses_have_a_sentence(byte_folder: Path, tmp_path: Path) -> None:
    folder = copy(byte_folder, tmp_path / "m", chat_template=LLAMA_LIKE)
    with pytest.raises(
        ConfigError, match=r"does not render this chat \(roles must alternate\); check the messages"
    ):
        load_tokenizer(folder).chat(CHAT[1:])


@pytest.mark.parametrize(
    "message", [{}, {"content": "x"}, {"role": "user"}, {"role": "user", "content": ["x"]}]
)
def test_messages_that_are_none_have_a_sentence(message: Any, byte_folder: Path) -> None:
    for tokenizer in (load_tokenizer(byte_folder), CharTokenizer("abc")):
        with pytest.raises(ConfigError, match=r"the message .* is not like {\"role\": \"user\", \"content\""):
            tokenizer.chat([message])
        with pytest.raises(ConfigError, match="there is no message; give at least one"):
            tokenizer.chat([])


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}{% endfor %}{% endfor %}",
        "{% macro two(n) %}{% if n %}{{ two(n - 1) }}{{ two(n - 1) }}{% endif %}{% endmacro %}{{ two(90) }}",
        "{% macro forever() %}{{ forever() }}{% endmacro %}{{ forever() }}",
        "{% set n = namespace(x='ab') %}{% for i in range(90) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{% set n = namespace(x='ab') %}{% for i in range(90) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{{ 10 ** 999999 * 10 ** 999999 }}",
        "{% set x = ('a' * 9999) | replace('a', 'b' * 9999) %}",
        "{% set x = 'a' | center(10 ** 9) %}",
        "{% set x = '%999999999d' % 1 %}",
        "{% set x = 'a' * 99999 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
        "{% set y %}{% set x = 'a' * 99999 %}{% for i in range(99999) %}{{ x }}{% endfor %}{% endset %}",
    ],
)
@pytest.mark.timeout(60)
def test_a_template_comes_to_an_end(template: str) -> None:
    pytest.importorskip("jinja2", reason="needs offbeat[llm]")
    with pytest.raises(ConfigError, match="the chat template does not render this chat"):
        ChatTemplate(template).render(CHAT, {})


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace(a=1) %}{% set n.__html__ = 1 %}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% include 'tokenizer.json' %}",
        "{{ strftime_now('%Y') }}",
        "{{ [1, 2] | random }}",
    ],
)
def test_a_template_reaches_nothing_outside(template: str) -> None:
    pytest.importorskip("jinja2", reason="needs offbeat[llm]")
    with pytest.raises(ConfigError, match="the chat template"):
        ChatTemplate(template).render(CHAT, {})


def test_a_template_that_is_no_jinja_has_a_sentence() -> None:
    pytest.importorskip("jinja2", reason="needs offbeat[llm]")
    with pytest.raises(ConfigError, match=r"the chat template is not valid Jinja .*'endfor'"):
        ChatTemplate("{% for a in b %}")
    with pytest.raises(ConfigError, match="has 1,048,577 characters; at most 1,048,576 are read"):
        ChatTemplate("a" * ((1 << 20) + 1))


def test_each_chat_has_the_whole_budget() -> None:
    pytest.importorskip("jinja2", reason="needs offbeat[llm]")
    template = ChatTemplate("{% for i in range(60000) %}{% endfor %}x")
    assert {template.render(CHAT, {}) for _ in range(20)} == {"x"}


def test_no_template_has_a_sentence(byte_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no chat template; put one into chat_template.jinja beside"):
        load_tokenizer(copy(byte_folder, tmp_path / "m", chat_template=None)).chat(CHAT)


def streams(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    stream = Stream(tokenizer)
    return [*(stream.feed([token]) for token in ids), stream.end()]


def test_a_stream_splits_no_character(byte_folder: Path) -> None:
    tokenizer = load_tokenizer(byte_folder)
    for text in [*TEXTS, "😀" * 20, "a�b", "e\u0301"]:
        pieces = streams(tokenizer, tokenizer.encode(text))
        assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text))
        assert all("�" not in piece for piece in pieces) or "�" in text
    ids = tokenizer.encode("😀x")
    assert streams(tokenizer, ids)[-2:] == ["x", ""] and len(ids) > 3
    assert Stream(tokenizer).feed(ids) == "😀x"


def test_a_text_goes_on_where_its_prompt_ends(byte_folder: Path) -> None:
    folders = [byte_folder, STORIES] if STORIES.is_dir() else [byte_folder]
    for tokenizer in map(load_tokenizer, folders):
        prompt, ids = tokenizer.encode("Once"), tokenizer.encode("Once upon a 😀")
        assert ids[: len(prompt)] == prompt
        assert text_after(tokenizer, prompt, ids[len(prompt) :]) == " upon a 😀"
        stream = Stream(tokenizer, prompt)
        assert stream.feed(ids[len(prompt) :]) + stream.end() == " upon a 😀"
        assert Stream(tokenizer, prompt).end() == text_after(tokenizer, prompt, []) == ""


def test_a_stream_gives_bytes_that_are_no_text_too(byte_folder: Path) -> None:
    tokenizer = load_tokenizer(byte_folder)
    chance = random.Random(0)
    for _ in range(200):
        ids = [chance.randrange(tokenizer.vocab_size) for _ in range(chance.randrange(30))]
        assert "".join(streams(tokenizer, ids)) == tokenizer.decode(ids)
    part = tokenizer.encode("😀")[1:3]
    assert streams(tokenizer, part) == ["", "", tokenizer.decode(part)] and tokenizer.decode(part)


@pytest.mark.skipif(not STORIES.is_dir(), reason="needs shared/data/models/stories260K beside the checkout")
def test_the_tokenizer_of_stories_is_that_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(STORIES), load_tokenizer(STORIES)
    for text in ["Once upon a time, there was a girl.", " x  y", "é你"]:
        ids = ours.encode(text)
        assert ids == theirs(text).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert "".join(streams(ours, ids)) == ours.decode(ids)
    assert (ours.vocab_size, ours.eos_ids) == (512, (2,))


def test_characters_have_ids_of_their_own(tmp_path: Path) -> None:
    tokenizer = CharTokenizer("0123456789+=")

    assert tokenizer.vocab_size == 15 and tokenizer.eos_ids == (2,)
    assert tokenizer.encode("1+2=") == [1, 4, 13, 5, 14]
    assert CharTokenizer("ab", add_bos=False).encode("ba") == [4, 3]
    assert tokenizer.decode([1, 4, 0, 13, 2, 99]) == "1+�"
    assert tokenizer.chat([{"role": "user", "content": "1+"}]) == tokenizer.encode("1+")
    assert "".join(streams(tokenizer, tokenizer.encode("12+3"))) == "12+3"


def test_a_character_outside_of_the_alphabet_has_a_sentence() -> None:
    with pytest.raises(
        ConfigError, match="the character 'x' is not in the alphabet '01'; add it to `characters`"
    ):
        CharTokenizer("01").encode("0x1")
    for wrong in ("", "aa"):
        with pytest.raises(ConfigError, match="is empty or repeats one; give each character once"):
            CharTokenizer(wrong)


def test_characters_are_saved_and_loaded(tmp_path: Path) -> None:
    CharTokenizer("aé\n ", add_bos=False).save(tmp_path)

    loaded = load_tokenizer(tmp_path)

    assert isinstance(loaded, CharTokenizer)
    assert (loaded.characters, loaded.add_bos) == ("aé\n ", False)
    assert [path.name for path in tmp_path.iterdir()] == ["characters.json"]
    (tmp_path / "characters.json").write_text('{"characters": 3}')
    with pytest.raises(ConfigError, match=r'characters.json has to hold \{"characters": "abc"'):
        load_tokenizer(tmp_path)


def test_folders_without_a_tokenizer_have_a_sentence(byte_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer; it needs tokenizer.json, characters.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(
        ConfigError, match=r"has tokenizer.model but no tokenizer.json; make one with transformers"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer.json cannot be read .*; copy it again"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"tokenizer.json is not UTF-8; copy it again"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config.json is not JSON .*; copy it again"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, byte_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == package:
            raise ImportError(name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=rf"package {package}: pip install 'offbeat\[llm\]'"):
        load_tokenizer(byte_folder)


def test_a_tokenizer_that_does_not_fit_is_refused(byte_folder: Path) -> None:
    def shape(vocab_size: int) -> Shape:
        return Shape("LlamaForCausalLM", vocab_size, 8, 1, 2, 2, 4, 8)

    tokenizer = CharTokenizer("0123456789+=")
    check_fits(tokenizer, shape(15))
    with pytest.raises(
        ConfigError, match=r"ids reach 14, but the model's vocabulary ends at 13 .*; use the tokenizer"
    ):
        check_fits(tokenizer, shape(14))
    definition = (byte_folder / "tokenizer.json").read_text()
    with pytest.raises(ConfigError, match="ids reach 700"):
        check_fits(HubTokenizer(definition, eos_ids=[700]), shape(400))
