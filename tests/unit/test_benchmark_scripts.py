"""What benchmark scripts do when something is missing or does not end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SESSIONS = sorted((BENCHMARKS / "results").glob("terminal_*.cast"))
STUBBORN = """
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(worker.pid))
time.sleep(600)
"""


def is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until(condition, timeout_s=30.0):
    give_up_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_that_ignores_ctrl_c_is_killed_with_its_workers(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "colorlines", raising=False)
    import colorlines

    place, run_dir = tmp_path / "pid", tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    process = subprocess.Popen([sys.executable, "-c", STUBBORN, str(place)], start_new_session=True)
    try:
        wait_until(lambda: place.exists() and place.read_text())
        worker = int(place.read_text())
        colorlines.stop(process, timeout_s=0.2)
        assert process.poll() is None and is_alive(worker)
        assert "is killed" in capsys.readouterr().out
        colorlines.end(process)
        assert process.returncode == -signal.SIGKILL
        wait_until(lambda: not is_alive(worker))
        colorlines.end(process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_panels_without_results_are_left_out(tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import figures

    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures.colorlines(tmp_path, tmp_path, 1)
    said = capsys.readouterr().out
    assert "colorlines.json is missing" in said and "colorlines_long.json is missing" in said
    assert list(tmp_path.iterdir()) == []

    curve = [{"minutes": 0.0, "score": 1.0}, {"minutes": 1.0, "score": 2.0}]
    results = {
        "runs": {"per": [{"curve": curve}]},
        "baselines": {"greedy": 1.5, "windows": 3.0},
    }
    (tmp_path / "colorlines_long.json").write_text(json.dumps(results))
    figures.colorlines(tmp_path, tmp_path, 1)
    said = capsys.readouterr().out
    assert "colorlines.json is missing" in said and "colorlines_long.json is missing" not in said
    assert (tmp_path / "colorlines-scores.png").stat().st_size > 1000


def test_figures_are_kept_with_the_command_that_made_them(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import common

    kept = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["benchmarks/some.py", "--quick", "--out", str(kept), "--json"])
    options = common.parser("about").parse_args()
    assert common.conclude({"ratio": 1.234567}, True, options) == 0
    written = json.loads(kept.read_text())
    assert written["command"] == "python benchmarks/some.py --quick --json"
    assert (written["ratio"], written["holds"]) == (1.2346, True)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["ratio"] == 1.2346


def test_a_place_that_is_not_there_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import common

    with pytest.raises(SystemExit):
        common.parser("about").parse_args(["--out", str(tmp_path / "nowhere" / "figures.json")])
    assert "make it first" in capsys.readouterr().err


def test_code_lines_leave_out_blanks_comments_and_docstrings(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import driver_cost

    source = tmp_path / "some.py"
    lines = [
        '"""About."""',
        "",
        "# why",
        "class A:",
        '    """Two',
        '    lines."""',
        "",
        "    x = (",
        "        1,  # one",
        "    )",
    ]
    source.write_text("\n".join(lines) + "\n")
    assert driver_cost.code_lines(source) == 4
    assert driver_cost.num_classes(source) == 1


def test_the_files_of_the_core_are_there(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import driver_cost

    core = [
        driver_cost.SOURCE / folder / f"{name}.py"
        for folder, names in driver_cost.CORE_NEW.items()
        for name in names.split()
    ]
    assert [str(path) for path in core if not path.exists()] == []
    assert driver_cost.records(True)["records: forms"] == 1


def test_costs_of_the_driver_are_compared_with_their_aims(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import driver_cost

    before, after = (
        {"messages": 40.0, "records": 48},
        {"messages": 10.0, "records": 30, "instant 10,000": None},
    )
    assert driver_cost.show(before, after) == ["records", "instant 10,000"]
    table = capsys.readouterr().out
    assert "0.25" in table and "–" in table
    assert driver_cost.middle([1.0, 3.0, 2.0]) == 2.0
    assert driver_cost.middle([1.0, None]) is None
    grown = {"instant 64": 20.0, "instant 10,000": 30.0}
    driver_cost.with_ratios(grown)
    assert grown["instant 10,000 / 64"] == 1.5


def test_a_count_of_calls_grows_with_the_segments_of_a_round(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import driver_cost

    calls = driver_cost.calls_by_function(0)
    assert sum(calls.values()) > 10
    assert not any(name.startswith("driver_cost.py") for name in calls)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize("plain", [False, True])
def test_a_terminal_session_is_recorded_with_its_silences(plain, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import terminal

    code = "import sys; print(sys.stdout.isatty(), flush=True); sys.stdin.read(); print('end'); sys.exit(3)"
    session = terminal.record([sys.executable, "-c", code], plain)
    assert session.exit_code == 3
    assert "".join(piece.text for piece in session.pieces).split() == [str(not plain), "end"]
    header, *events = map(json.loads, session.to_cast().splitlines())
    assert header["version"] == 2
    assert [event[1] for event in events] == ["o"] * len(session.pieces)


def test_silences_are_those_before_between_and_after_the_output(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from terminal import Piece, Session, Silence

    pieces = [Piece(2.0, "\x1b[1mstarting\x1b[0m\r\n"), Piece(3.0, "one\ntwo\n\x1b[?25h"), Piece(7.0, "end")]
    assert Session([], pieces, 7.5).silences() == [
        Silence(3.0, 4.0, "two"),
        Silence(0.0, 2.0, ""),
        Silence(2.0, 1.0, "starting"),
        Silence(7.0, 0.5, "end"),
    ]


def test_sessions_of_the_first_commands_are_kept():
    titles = {json.loads(file.read_text(encoding="utf-8").partition("\n")[0])["title"] for file in SESSIONS}
    assert titles >= {"make run", "offbeat train cartpole-unizero run.rounds=3"}


@pytest.mark.parametrize("file", SESSIONS, ids=lambda file: file.stem)
def test_kept_sessions_are_never_silent_for_long(file):
    header, *events = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    times_s = [0.0, *(time_s for time_s, _, _ in events)]
    assert header["version"] == 2 and events
    assert max(later_s - sooner_s for sooner_s, later_s in pairwise(times_s)) <= 3.0
    shown = "".join(text for _, _, text in events)
    assert "finished" in shown, "it was recorded to its end"
    assert not re.search(r"/(tmp|opt|home|root|Users)/", shown), "a place of the machine that recorded it"


def test_several_settings_can_be_named_after_only(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import argparse

    import seeds

    options = argparse.ArgumentParser()
    seeds.add_options(options, ["one", "two", "three"])
    assert options.parse_args(["--only", "one", "two", "--only", "three"]).only == ["one", "two", "three"]


def test_the_kept_figures_of_the_dial_have_every_setting(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import dial

    kept = json.loads((BENCHMARKS / "results" / "dial.json").read_text())
    settings = {**dial.JUDGED, **dial.COMPARED}
    assert kept["summary"].keys() == kept["runs"].keys() == settings.keys()
    for name, runs in kept["runs"].items():
        assert [run["settings"] for run in runs] == [list(settings[name])] * kept["seeds"], name


def test_a_model_with_padded_heads_computes_the_same(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    torch = pytest.importorskip("torch")
    import llm_engine

    from offbeat.llm.model import Decoder, Packing
    from offbeat.llm.shape import Shape

    shape = Shape("LlamaForCausalLM", 64, 48, 2, 6, 2, 8, 64, tied=True, max_positions=128)
    model, folder = Decoder(shape).initialize(0), tmp_path / "padded"
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not name.endswith("norm"):
                weight.mul_(8.0)
    folder.mkdir()
    model.write(tmp_path / "plain")
    llm_engine.pad_heads(tmp_path / "plain", folder)
    padded = Decoder.read(folder)
    assert padded.shape.head_size == 32
    tokens = torch.randint(0, 64, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own, other = (one.log_probs(tokens, Packing.of([40])) for one in (model, padded))
    assert own.std() > 0.1
    torch.testing.assert_close(own, other, rtol=0.0, atol=1e-4)


def test_multiply_adds_of_a_token_are_weights_and_what_it_attends_to(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    pytest.importorskip("torch")
    import llm_engine

    from offbeat.llm.model import Decoder

    model = Decoder(llm_engine.SMALL, device="meta")
    matrices = sum(weight.numel() for weight in model.parameters() if weight.ndim == 2)
    assert llm_engine.multiply_adds(llm_engine.SMALL, 0) == matrices
    assert llm_engine.multiply_adds(llm_engine.SMALL, 10) - matrices == 4 * 2 * 96 * 10
