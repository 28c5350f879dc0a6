"""A tokenizer of words and pieces."""

import json

import pytest

from offbeat.errors import ConfigError
from offbeat.llm.tokens import check_fits, load_tokenizer
from offbeat.llm.words import WordTokenizer

TEXTS = [f"Take the rope of {name}.\n> take rope\n" for name in ("balan", "balor", "belan", "kelor", "balek")]


def test_texts_come_back_whole():
    tokenizer = WordTokenizer.of(TEXTS)
    text = "Take the  BALKOR of 12 ropes, (or) else!\n\n> take it ~"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_common_words_have_one_id_and_others_are_spelled_with_pieces():
    tokenizer = WordTokenizer.of(TEXTS, pieces_in=3)
    assert len(tokenizer.encode(" rope")) == 1
    spelled = [tokenizer.decode([token]) for token in tokenizer.encode(" balun")]
    assert spelled[0] == " bal"
    assert "".join(spelled) == " balun"


def test_a_name_that_no_text_had_needs_no_unknown_id():
    tokenizer = WordTokenizer.of(TEXTS)
    assert tokenizer.unknown_id not in tokenizer.encode(" zyxquin")
    assert tokenizer.encode("é") == [tokenizer.unknown_id]


def test_a_label_behind_a_prompt_has_the_ids_of_the_whole_text():
    tokenizer = WordTokenizer.of(TEXTS)
    prompt, label = "Take the rope of balan.\n>", " take rope\n"
    assert tokenizer.encode(prompt) + tokenizer.encode(label) == tokenizer.encode(prompt + label)


def test_the_same_texts_make_the_same_tokenizer_in_any_order():
    first, second = WordTokenizer.of(TEXTS), WordTokenizer.of(TEXTS[::-1])
    assert (first.words, first.merges) == (second.words, second.merges)


def test_a_folder_gives_the_tokenizer_back(tmp_path):
    made = WordTokenizer.of(TEXTS)
    made.save(tmp_path)
    found = load_tokenizer(tmp_path)
    assert isinstance(found, WordTokenizer)
    assert found.encode(TEXTS[0] + "balquin") == made.encode(TEXTS[0] + "balquin")
    assert found.vocab_size == made.vocab_size


@pytest.mark.parametrize("content", ["[]", "{", json.dumps({"words": [1], "merges": []}), '{"words": ["a"]}'])
def test_a_damaged_file_is_refused(tmp_path, content):
    (tmp_path / "words.json").write_text(content)
    with pytest.raises(ConfigError, match=r"words\.json"):
        load_tokenizer(tmp_path)


def test_a_model_with_a_smaller_vocabulary_is_refused():
    from offbeat.llm.shape import Shape

    tokenizer = WordTokenizer.of(TEXTS)
    shape = Shape("LlamaForCausalLM", tokenizer.vocab_size - 1, 8, 1, 1, 1, 8, 8)
    with pytest.raises(ConfigError, match="vocabulary"):
        check_fits(tokenizer, shape)
