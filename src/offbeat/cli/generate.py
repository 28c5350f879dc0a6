"""``offbeat generate``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from offbeat.cli.output import Report, reporting
from offbeat.cli.waiting import telling_progress
from offbeat.errors import ConfigError
from offbeat.progress import report_progress

if TYPE_CHECKING:
    from offbeat.llm import Engine, Request, Response, Tokenizer

_MOST_SLOTS = 64
_MOST_SAMPLES, _MOST_THREADS = 65_536, 256  # those of offbeat.llm.requests, which imports numpy
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@dataclass(frozen=True, slots=True)
class _Asked:
    """The prompt, as text and as ids."""

    prompt: str
    request: Request
    tokenizer: Tokenizer


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder in the layout of Hugging Face.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads stdin.")],
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the most likely token.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Draw among so many likely tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Draw among likely tokens of this probability in all.")
    ] = 1.0,
    num_samples: Annotated[int, typer.Option(min=1, max=_MOST_SAMPLES, help="Texts to generate.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each.")] = 128,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same texts.")] = 0,
    chat: Annotated[
        bool, typer.Option("--chat", help="Make the prompt a user's message by the model's chat template.")
    ] = False,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Samples computed at a time; at most 64 when not given.")
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(min=2, help="Most tokens with the prompt; as many as are needed when not given."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, max=_MOST_THREADS, help="Threads that compute.")] = 1,
    dtype: Annotated[Literal["fp32", "bf16", "fp16"], typer.Option(help="Of weights and caches.")] = "fp32",
    device: Annotated[str, typer.Option(help="Where torch computes, such as cpu.")] = "cpu",
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print one JSON object per sample to stdout; the rest goes to stderr."),
    ] = False,
) -> None:
    """Generate text with a language model."""
    with reporting(as_json) as report:
        text, folder = _text(prompt), Path(model)
        with telling_progress(f"reading {model}"):
            from offbeat.llm import Request
            from offbeat.llm.loading import open_engine, read_description

            shape, tokenizer = read_description(folder)
            ids = _encode(tokenizer, text, chat)
            request = Request(
                0, tuple(ids), num_samples, max_new_tokens, temperature, top_k=top_k, top_p=top_p, seed=seed
            )
            most = shape.max_positions if max_length is None else max_length
            _check_length(len(ids), most, shape.max_positions)
            report_progress(f"{shape.num_parameters / 1e6:,.1f} million parameters")
            engine = open_engine(
                folder,
                shape,
                slots=slots or min(num_samples, _MOST_SLOTS),
                max_length=min(most, len(ids) + max_new_tokens) if max_length is None else max_length,
                threads=threads,
                dtype=dtype,
                device=device,
            )
        _show(engine, _Asked(text, request, tokenizer), report, is_quiet=as_json)


def _text(prompt: str) -> str:
    """Return the prompt; that of stdin without its last line break."""
    try:
        if prompt != "-":
            prompt.encode()
            return prompt
        return sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeError:
        raise ConfigError("the prompt is not UTF-8: convert it, with iconv for one") from None


def _encode(tokenizer: Tokenizer, text: str, chat: bool) -> list[int]:
    if not chat:
        if ids := tokenizer.encode(text):
            return ids
        raise ConfigError("the prompt is empty, and this model has no token that begins texts: write a word")
    try:
        return tokenizer.chat([{"role": "user", "content": text}])
    except ConfigError as error:
        raise ConfigError(f"--chat: {error}") from None


def _check_length(num_tokens: int, limit: int, most: int) -> None:
    """Refuse a prompt that leaves no room, with the limit that can be changed from here."""
    if num_tokens < limit:
        return
    fix = "shorten it" if limit >= most else f"shorten it, or raise --max-length to at most {most}"
    raise ConfigError(
        f"the prompt has {num_tokens} tokens, and a sequence at most {min(limit, most)} with the response: "
        f"{fix}"
    )


# ---------------------------------------------------------------- output


def _show(engine: Engine, asked: _Asked, report: Report, is_quiet: bool) -> None:
    """Generate, and show the samples: one as it grows, several as they end, in order."""
    started_s = time.perf_counter()
    engine.submit(asked.request)
    streams = asked.request.num_samples == 1 and not is_quiet
    num_tokens = 0
    try:
        for response in _stream(engine, asked) if streams else _in_order(engine, asked, is_quiet):
            seconds = time.perf_counter() - started_s
            report.records.append(_record(asked, response, seconds))
            num_tokens += len(response.tokens)
            if not streams and not is_quiet:
                print(_block(asked, response), flush=True)
    except KeyboardInterrupt:
        report.records += [
            _record(asked, one, time.perf_counter() - started_s) for one in engine.abort(asked.request.key)
        ]
        print(flush=True)
        raise
    seconds = time.perf_counter() - started_s
    ends = ", ".join(dict.fromkeys(str(record["end"]) for record in report.records))
    rate = f"{num_tokens / seconds:,.0f} tokens/s"
    print(f"{num_tokens} tokens in {seconds:.1f} s, {rate}; ended by {ends}", file=sys.stderr)


def _stream(engine: Engine, asked: _Asked) -> Iterator[Response]:
    """Print the text of the one sample while it is made; whole characters only."""
    from offbeat.llm import Stream

    stream, num_shown = Stream(asked.tokenizer, asked.request.prompt), 0
    with telling_progress("feeding the prompt"):
        found = engine.step()
    while True:
        tokens = found[0].tokens if found else engine.tokens_of(asked.request.key)
        print(_visible(stream.feed(tokens[num_shown:].tolist())), end="", flush=True)
        num_shown = len(tokens)
        if found:
            break
        found = engine.step()
    print(_visible(stream.end()), flush=True)
    yield from found


def _in_order(engine: Engine, asked: _Asked, is_quiet: bool) -> Iterator[Response]:
    """Yield the samples in order, each as soon as it and those before it have ended."""
    ended: dict[int, Response] = {}
    num_samples, what = asked.request.num_samples, "generating"
    # Samples that are printed show the progress themselves, but for the time in which none is.
    with telling_progress(what) if is_quiet else nullcontext():
        for sample in range(num_samples):
            with nullcontext() if is_quiet else telling_progress(what):
                while sample not in ended:
                    report_progress(f"{sample + len(ended)} of {num_samples} samples have ended")
                    ended |= {one.sample: one for one in engine.step()}
            yield ended.pop(sample)


def _block(asked: _Asked, response: Response) -> str:
    text = _visible(_text_of(asked, response))
    count = f"{len(response.tokens)} tokens, {response.end}"
    return f"--- {response.sample + 1} of {asked.request.num_samples} ({count})\n{text}"


def _text_of(asked: _Asked, response: Response) -> str:
    from offbeat.llm import text_after

    return text_after(asked.tokenizer, asked.request.prompt, response.tokens.tolist())


def _visible(text: str) -> str:
    """Return the text as a terminal may have it: a model can write what would control the terminal."""
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text


def _record(asked: _Asked, response: Response, seconds: float) -> dict[str, object]:
    tokens: Sequence[int] = response.tokens.tolist()
    return {
        "sample": response.sample,
        "prompt": asked.prompt,
        "prompt_tokens": list(asked.request.prompt),
        "text": _text_of(asked, response),
        "tokens": tokens,
        "log_probs": response.log_probs.tolist(),
        "end": response.end,
        "seed": asked.request.seed,
        "seconds": seconds,
        "tokens_per_s": len(tokens) / seconds if seconds > 0 else None,
    }
