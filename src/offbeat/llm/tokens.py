"""Text to token ids and back: ``tokenizer.json`` with chat templates, and a character tokenizer. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from offbeat.errors import ConfigError
from offbeat.llm.chat import ChatTemplate, checked
from offbeat.llm.shape import Shape
from offbeat.llm.words import WORDS, WordTokenizer
from offbeat.reading import DESCRIPTION_BYTES, parse_json, read_file

Message = Mapping[str, str]
"""One turn of a chat. Example: ``{"role": "user", "content": "2+2="}``."""

CHARACTERS = "characters.json"
_TOKENIZER = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_TOKENIZER_BYTES = 1 << 28
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_INSTALL = "pip install 'offbeat[llm]'"
_UNFINISHED = "�"


class Tokenizer(Protocol):
    """Turns text and chats into token ids, and ids into text."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a text."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, after the id that begins texts where the model has one."""
        ...

    def encode_more(self, text: str) -> list[int]:
        """Return the ids of a text that comes after others, such as the answer of a tool."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        ...

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a chat, up to where the answer begins."""
        ...


class HubTokenizer:
    """A Hugging Face ``tokenizer.json``, run by the package ``tokenizers``, with the folder's chat template.

    Special tokens written out in a text become their ids, as in transformers.
    """

    def __init__(
        self,
        definition: str,
        config: Mapping[str, Any] | None = None,
        template: str | None = None,
        eos_ids: Sequence[int] = (),
    ) -> None:
        """``definition`` and ``config`` are the content of tokenizer.json and tokenizer_config.json."""
        self._tokenizer = _tokenizer(definition)
        self._special = _special_tokens(config or {})
        named = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        self._eos_ids = tuple(dict.fromkeys([*([] if named is None else [named]), *eos_ids]))
        self._vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        source = template if template is not None else _template_of(config or {})
        self._template = None if source is None else ChatTemplate(source)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return self._vocab_size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The id of ``eos_token``, then those of generation_config.json."""
        return self._eos_ids

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the special tokens that tokenizer.json puts around it."""
        return list(self._tokenizer.encode(text).ids)

    def encode_more(self, text: str) -> list[int]:
        """Return the ids of a text without special tokens around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(ids)))

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a chat after the model's template, up to where the answer begins."""
        if self._template is None:
            raise ConfigError(
                f"this tokenizer has no chat template; put one into {_TEMPLATE} beside {_TOKENIZER},"
                " or give the text without a chat to a model that completes text"
            )
        text = self._template.render(messages, self._special)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


class CharTokenizer:
    """One id per character; needs no package. Ids 0, 1 and 2 are padding, begin and end.

    Example: ``CharTokenizer("0123456789+=")`` has 15 ids and encodes ``"1+2="`` as ``[1, 4, 13, 5, 14]``.
    """

    pad_id, bos_id, end_id = 0, 1, 2
    _FIRST = 3

    def __init__(self, characters: str, *, add_bos: bool = True) -> None:
        if not characters or len(set(characters)) < len(characters):
            raise ConfigError(
                f"characters: {characters!r:.80} is empty or repeats one; give each character once"
            )
        self.characters = characters
        self.add_bos = add_bos
        self._ids = {character: self._FIRST + place for place, character in enumerate(characters)}

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""
        return self._FIRST + len(self.characters)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The id that ends a text."""
        return (self.end_id,)

    def encode(self, text: str) -> list[int]:
        """Return an id per character, after the begin id unless ``add_bos`` is False."""
        if strange := next((character for character in text if character not in self._ids), None):
            raise ConfigError(
                f"the character {strange!r} is not in the alphabet {self.characters!r:.80};"
                " add it to `characters`"
            )
        return [self.bos_id] * self.add_bos + [self._ids[character] for character in text]

    def encode_more(self, text: str) -> list[int]:
        """Return an id per character."""
        return self.encode(text)[self.add_bos :]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without padding, begin and end; ids behind the alphabet become U+FFFD."""
        places = [token - self._FIRST for token in ids if token >= self._FIRST]
        return "".join(self.characters[at] if at < len(self.characters) else _UNFINISHED for at in places)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of the messages' contents, joined by newlines; roles have no characters here."""
        return self.encode("\n".join(turn["content"] for turn in checked(messages)))

    def save(self, folder: Path) -> None:
        """Write ``characters.json`` into a folder."""
        path = Path(folder) / CHARACTERS
        temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            temporary.write_text(json.dumps({"characters": self.characters, "add_bos": self.add_bos}) + "\n")
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, folder: Path) -> CharTokenizer:
        """Read ``characters.json`` of a folder."""
        path = Path(folder) / CHARACTERS
        content = _read_json(path)
        characters, add_bos = content.get("characters"), content.get("add_bos", True)
        if not isinstance(characters, str) or not isinstance(add_bos, bool):
            raise ConfigError(f'{path} has to hold {{"characters": "abc", "add_bos": true}}')
        return cls(characters, add_bos=add_bos)


class Stream:
    """Turns ids that arrive one by one into text; a character is given when all of its bytes are there.

    ``prompt`` are ids that come before: some tokenizers drop a space at the beginning of a text, and what
    follows a prompt is no beginning.

    Example: ``print(stream.feed([token]), end="")`` after each token, and ``stream.end()`` at the end.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._shown = len(self._ids)

    def feed(self, ids: Sequence[int]) -> str:
        """Take the next ids; returns the text that is certain now, which may be empty."""
        return "".join(self._next(token) for token in ids)

    def end(self) -> str:
        """Return what is left, with U+FFFD in place of bytes that are no UTF-8."""
        return self._show(self._tokenizer.decode(self._ids))

    def _next(self, token: int) -> str:
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        return "" if text.endswith(_UNFINISHED) else self._show(text)

    def _show(self, text: str) -> str:
        """Return what is new, and keep only ids whose text may still decide how the next ones are written."""
        new = text[len(self._tokenizer.decode(self._ids[: self._shown])) :]
        if new:
            # Some tokenizers drop a space before the first token: the last piece stays as that one's context.
            self._ids = self._ids[self._shown :]
            self._shown = len(self._ids)
        return new


def text_after(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text that ids add to a prompt, with the space that begins it."""
    before, whole = tokenizer.decode(prompt), tokenizer.decode([*prompt, *ids])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(ids)


def load_tokenizer(folder: Path) -> HubTokenizer | CharTokenizer | WordTokenizer:
    """Return the tokenizer of a model's folder; ConfigError when there is none that can be read."""
    folder = Path(folder)
    if (folder / _TOKENIZER).exists():
        return _load_hub(folder)
    if (folder / CHARACTERS).exists():
        return CharTokenizer.load(folder)
    if (folder / WORDS).exists():
        return WordTokenizer.load(folder)
    if others := [name for name in ("tokenizer.model", "vocab.json") if (folder / name).exists()]:
        raise ConfigError(
            f"{folder} has {others[0]} but no {_TOKENIZER}; make one with transformers:"
            " AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    raise ConfigError(
        f"{folder} has no tokenizer; it needs {_TOKENIZER}, {CHARACTERS} for one id per character, or {WORDS}"
    )


def check_fits(tokenizer: Tokenizer, shape: Shape) -> None:
    """Refuse a tokenizer with ids for which the model has no embedding."""
    highest = max(tokenizer.vocab_size - 1, *tokenizer.eos_ids, 0)
    if highest >= shape.vocab_size:
        raise ConfigError(
            f"the tokenizer's ids reach {highest}, but the model's vocabulary ends at {shape.vocab_size - 1}"
            " (vocab_size - 1); use the tokenizer of this model's folder"
        )


def _load_hub(folder: Path) -> HubTokenizer:
    config = _read_json(folder / _CONFIG) if (folder / _CONFIG).exists() else {}
    generation = folder / "generation_config.json"
    ends = _read_json(generation).get("eos_token_id") if generation.exists() else None
    ids = ends if isinstance(ends, list) else [ends]
    template = _read(folder / _TEMPLATE) if (folder / _TEMPLATE).exists() else None
    try:
        return HubTokenizer(
            _read(folder / _TOKENIZER, _TOKENIZER_BYTES),
            config,
            template,
            [token for token in ids if isinstance(token, int) and token >= 0],
        )
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None


def _tokenizer(definition: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(f"{_TOKENIZER} needs the package tokenizers: {_INSTALL}") from None
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # tokenizers raises Exception itself, for JSON and for what it describes
        raise ConfigError(
            f"{_TOKENIZER} cannot be read ({error!s:.200}); copy it again from the model"
        ) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return special tokens by their names; they are stored as text or as an object with ``content``."""
    found: dict[str, str] = {}
    for name in _SPECIAL:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _template_of(config: Mapping[str, Any]) -> str | None:
    """Return the chat template of tokenizer_config.json: text, or a list of named ones."""
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, Mapping)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(_read(path, _TOKENIZER_BYTES))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}); copy it again from the model") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} does not hold a JSON object; copy it again from the model")
    return content


def _read(path: Path, limit: int = DESCRIPTION_BYTES) -> str:
    try:
        return read_file(path, limit).decode()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; copy it again from the model") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8; copy it again from the model") from None
