"""Chat templates: Jinja that comes with a model, rendered in a sandbox with an end. No torch."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from offbeat.errors import ConfigError

_INSTALL = "pip install 'offbeat[llm]'"
_MAX_SOURCE = 1 << 20
_MAX_STEPS = 1_000_000
"""Turns of loops and calls in one rendering; a chat of 1,000 messages takes a few thousand."""
_MAX_TEXT = 1 << 24
"""Characters that one rendering writes, or that one operator makes."""
_MAX_BITS = 1 << 12
_MAX_WIDTH = 1_000
_DEADLINE_S = 10.0
_MISSING_FILTERS = ("format", "pprint", "random", "urlize", "xmlattr")
_WIDE_FILTERS = ("batch", "center", "indent", "slice", "wordwrap")


class ChatTemplate:
    """A model's chat template, as transformers renders it, but without a clock.

    ``strftime_now`` is not defined, so that a chat has the same tokens on every day.
    """

    def __init__(self, source: str) -> None:
        if len(source) > _MAX_SOURCE:
            raise ConfigError(
                f"the chat template has {len(source):,} characters; at most {_MAX_SOURCE:,} are read"
            )
        self._budget = _Budget()
        self._template = _compile(source, self._budget)

    def render(self, messages: Sequence[Mapping[str, str]], special: Mapping[str, str]) -> str:
        """Return the text of a chat up to where the answer begins; ``special`` has tokens by name."""
        turns = checked(messages)
        values = {
            **special,
            "messages": turns,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        self._budget.begin()
        try:
            return str(self._template.render(values))
        except Exception as error:  # a stranger's template may fail in any way
            raise ConfigError(
                f"the chat template does not render this chat ({error!s:.200}); check the messages' roles"
            ) from None


def checked(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Return messages as plain dictionaries; ConfigError for one without the text of a role and a content."""
    turns = [dict(message) for message in messages]
    for turn in turns:
        texts = [*turn.values(), turn.get("role"), turn.get("content")]
        if not all(isinstance(text, str) for text in texts):
            raise ConfigError(f'the message {turn!r:.80} is not like {{"role": "user", "content": "2+2="}}')
    if not turns:
        raise ConfigError("there is no message; give at least one with the role user")
    return turns


class _Budget(threading.local):
    """The budget that one rendering has left, per thread."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.steps, self.text, self.end_s = _MAX_STEPS, _MAX_TEXT, time.monotonic() + _DEADLINE_S

    def step(self, value: object = True) -> object:
        """Count a turn of a loop or a call; returns the value."""
        self.steps -= 1
        if self.steps < 0 or time.monotonic() > self.end_s:
            raise ValueError("it takes too many steps, and may never end")
        return value

    def write(self, value: object) -> str:
        """Count what the template writes."""
        text = str(value)
        self.text -= len(text)
        if self.text < 0:
            raise ValueError(f"it writes more than {_MAX_TEXT:,} characters")
        return text


def _compile(source: str, budget: _Budget) -> Any:
    try:
        import jinja2
    except ImportError:
        raise ConfigError(f"chat templates need the package jinja2: {_INSTALL}") from None
    try:
        return _environment(budget).from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise ConfigError(f"the chat template is not valid Jinja ({error!s:.200})") from None


def _environment(budget: _Budget) -> Any:
    """Return a sandbox with what Hugging Face's templates use, whose loops, calls and text are counted."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.visitor import NodeTransformer

    class Generation(Extension):
        """``{% generation %}`` marks what the model wrote, for training on it; here it is just written."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Counted(NodeTransformer):
        """Puts counters into loops, in front of filtered items, around text, and around joined text."""

        def visit_For(self, node: Any) -> Any:
            self.generic_visit(node)
            turn = _filtered(nodes, nodes.Const(True, lineno=node.lineno), "_step")
            node.body.insert(0, nodes.ExprStmt(turn, lineno=node.lineno))
            if node.test is not None:
                node.test = nodes.And(turn, node.test, lineno=node.lineno)
            return node

        def visit_Output(self, node: Any) -> Any:
            self.generic_visit(node)
            node.nodes = [_filtered(nodes, child, "_write") for child in node.nodes]
            return node

        def visit_Concat(self, node: Any) -> Any:
            self.generic_visit(node)
            return _filtered(nodes, node, "_bounded")

    class Environment(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"+", "*", "**", "%"})

        def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
            tree = Counted().visit(super()._parse(source, name, filename))
            return tree.set_environment(self)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _check_operands(operator, left, right)
            return super().call_binop(context, operator, left, right)

        def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
            budget.step()
            return super().call(__context, __obj, *args, **kwargs)

    # Optimized templates would compute constants, of any size, while they are compiled.
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[Generation, loopcontrols]
    )
    _set_names(environment, budget)
    return environment


def _filtered(nodes: Any, node: Any, name: str) -> Any:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _set_names(environment: Any, budget: _Budget) -> None:
    from jinja2.utils import Namespace

    class SafeNamespace(Namespace):
        """Keeps templates from storing names that Python itself looks up."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            values = dict(*args, **kwargs)
            for name in values:
                _check_name(name)
            super().__init__(values)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    environment.globals |= {"raise_exception": _raise, "namespace": SafeNamespace}
    environment.globals.pop("lipsum")
    filters = environment.filters
    for name in _MISSING_FILTERS:
        del filters[name]
    for name in _WIDE_FILTERS:
        filters[name] = _narrow(filters[name])
    filters |= {
        "_step": budget.step,
        "_write": budget.write,
        "_bounded": _bounded,
        "tojson": _tojson,
        "replace": _replace,
    }


def _raise(message: object) -> NoReturn:
    raise ValueError(str(message))


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise ValueError(f"the name {name!r:.40} begins with an underscore")


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    if (indent or 0) > _MAX_WIDTH:
        raise ValueError(f"an indent of {indent} is too wide")
    known = {key: options[key] for key in ("separators", "sort_keys") if key in options}
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **known)


def _replace(text: Any, old: Any, new: Any, count: int = -1) -> str:
    text, old, new = str(text), str(old), str(new)
    if (text.count(old) + 1) * len(new) + len(text) > _MAX_TEXT:
        raise ValueError("it replaces by too much text")
    replaced: str = text.replace(old, new, -1 if count is None else count)
    return replaced


def _narrow(function: Any) -> Any:
    """Return a filter that refuses widths by which a short template would make a long text."""
    from functools import wraps

    @wraps(function)
    def narrow(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, int) and value > _MAX_WIDTH for value in (*args, *kwargs.values())):
            raise ValueError(f"it asks for a width above {_MAX_WIDTH}")
        return function(*args, **kwargs)

    return narrow


def _bounded(value: Any) -> Any:
    if len(value) > _MAX_TEXT:
        raise ValueError(f"it makes a text of more than {_MAX_TEXT:,} characters")
    return value


def _check_operands(operator: str, left: Any, right: Any) -> None:
    """Refuse operators whose result would be huge."""
    if operator == "%" and isinstance(left, str):
        raise ValueError("it formats with %")
    sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
    factor = next((side for side in (left, right) if isinstance(side, int)), 1)
    if sizes and (sum(sizes) if operator == "+" else sizes[0] * max(factor, 1)) > _MAX_TEXT:
        raise ValueError(f"{operator} makes more than {_MAX_TEXT:,} items")
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if operator in ("*", "**") and bits > _MAX_BITS:
            raise ValueError(f"{operator} makes a number of more than {_MAX_BITS:,} bits")
