"""Settings as options: ``--num_workers 4`` and ``--num-workers=4`` are ``num_workers=4``."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from typer.core import TyperGroup, TyperOption


def as_settings(arguments: Sequence[str], own: Mapping[str, bool]) -> list[str]:
    """Write options that are not a verb's ``own`` as settings, behind the other arguments.

    ``own`` says for each of the verb's options if it takes a value. An option without a value is true.
    Without an argument before them, the recipe or run, they are left out:
    that mistake is the one to report.
    """
    words: list[str] = []
    settings: list[str] = []
    rest, has_subject = deque(arguments), False
    while rest:
        word = rest.popleft()
        name, equals, value = word.partition("=")
        if word == "--":
            words += [word, *rest]
            break
        if name in own or not name.startswith("--"):
            words.append(word)
            has_subject |= not name.startswith("-")
            if own.get(name) and not equals and rest:
                words.append(rest.popleft())
            continue
        if not equals:
            has_value = bool(rest) and not rest[0].startswith("--") and "=" not in rest[0]
            value = rest.popleft() if has_value else "true"
        settings.append(f"{name[2:].replace('-', '_')}={value}")
    return words + settings if has_subject else words


def with_settings(group: TyperGroup, arguments: Sequence[str]) -> list[str]:
    """Write the options of a command line as settings where its verb takes settings."""
    verb = group.commands.get(arguments[0]) if arguments else None
    if verb is None or not any(param.name == "overrides" for param in verb.params):
        return list(arguments)
    options = [param for param in verb.params if isinstance(param, TyperOption)]
    own = {name: not option.is_flag for option in options for name in option.opts}
    return [arguments[0], *as_settings(arguments[1:], {**own, "--help": False})]
