import errno
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from offbeat.checkpoint import CheckpointManager, digest, files, pack
from offbeat.errors import CheckpointError


def weights_of(version: int) -> dict[str, np.ndarray]:
    return {"actor.weight": np.full((2, 3), version, np.float32), "actor.bias": np.arange(3.0) + version}


def parts_of(version: int) -> dict[str, object]:
    return {
        "learner": {"params": weights_of(version), "step": version, "moments": [np.zeros((0, 2)), (1, None)]},
        "coordinator": {"version": version, "nothing": float("nan")},
    }


def save(manager: CheckpointManager, version: int, score: float | None = None) -> Path:
    return manager.save(version, parts_of(version), weights_of(version), score)


def visible(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(timeout=60)
    return process.pid


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = save(CheckpointManager(tmp_path / "checkpoints"), 7, score=1.5)
    loaded = CheckpointManager(tmp_path / "checkpoints").load()
    assert (loaded.version, loaded.path, loaded.score, loaded.warnings) == (7, path, 1.5, ())
    assert path == tmp_path / "checkpoints" / "step_00000007"
    assert loaded.parts["learner"]["params"]["actor.bias"].tolist() == [7, 8, 9]
    assert loaded.parts["learner"]["moments"][1] == (1, None)
    assert np.isnan(loaded.parts["coordinator"]["nothing"])
    assert digest(loaded.weights) == digest(weights_of(7))


def test_the_files_are_those_the_manifest_names(tmp_path: Path) -> None:
    path = save(CheckpointManager(tmp_path), 3)
    manifest = json.loads((path / "manifest.json").read_text())
    assert visible(path) == sorted([*manifest["files"], "manifest.json"])
    assert set(manifest["files"]) == {
        *("weights.safetensors", "learner.json", "learner.safetensors"),
        *("coordinator.json", "coordinator.safetensors"),
    }
    assert manifest["version"] == 3
    assert manifest["weights_digest"] == digest(weights_of(3))


def test_looking_into_a_run_without_checkpoints_makes_nothing(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path / "checkpoints")
    assert (manager.versions(), manager.best()) == ((), None)
    with pytest.raises(CheckpointError, match="offbeat train"):
        manager.load()
    assert not (tmp_path / "checkpoints").exists()


def test_newest_and_best_are_kept(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=2)
    kept = []
    for version, score in [(1, 5.0), (2, 9.0), (3, None), (4, 7.0), (5, float("nan"))]:
        save(manager, version, score)
        kept.append(manager.versions())
    assert kept == [(1,), (1, 2), (2, 3), (2, 3, 4), (2, 4, 5)]
    assert manager.best() == 2
    assert manager.load().version == 5
    assert manager.load(2).score == 9.0
    save(manager, 6, 9.0)
    assert manager.versions() == (5, 6)


def test_without_keep_best_only_the_newest_stay(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=1, keep_best=False)
    save(manager, 1, 9.0)
    save(manager, 2, 1.0)
    assert manager.versions() == (2,)


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="at least 1"):
        CheckpointManager(tmp_path, keep=0)


def test_a_late_score_is_recorded_and_decides_the_best(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for version in (1, 2, 3):
        save(manager, version, float(version))
    assert manager.set_score(2, 50.0)
    assert not manager.set_score(1, 99.0)
    assert manager.best() == 2
    assert manager.load(2).score == 50.0
    assert not [name for name in visible(manager.path(2)) if name.startswith(".")]


def test_a_score_that_cannot_be_written_leaves_the_checkpoint_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    before = visible(save(manager, 1, 2.0))

    def half_written(path: Path, data: bytes) -> None:
        path.write_bytes(data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write_bytes", half_written)
    with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)):
        manager.set_score(1, 3.0)
    assert visible(manager.path(1)) == before
    assert manager.load(1).score == 2.0


def test_a_damaged_checkpoint_takes_no_score(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    damage(save(manager, 1) / "manifest.json", "truncated")
    assert not manager.set_score(1, 3.0)


def test_saving_the_same_weights_again_keeps_their_score(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 4, 8.0)
    save(manager, 4)
    assert manager.load(4).score == 8.0
    manager.save(4, parts_of(4), weights_of(5))
    assert manager.load(4).score is None
    assert visible(tmp_path) == ["step_00000004"]


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "truncated":
        data = data[: len(data) // 2]
    elif how == "empty":
        data = bytearray()
    elif how == "flipped":
        data[len(data) // 2] ^= 1
    elif how == "longer":
        data += b"\0"
    path.write_bytes(data)


FILES = ["manifest.json", "weights.safetensors", "learner.json", "learner.safetensors", "coordinator.json"]


@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "flipped", "longer"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, name: str, how: str) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    damage(save(manager, 2) / name, how)
    loaded = manager.load()
    assert loaded.version == 1
    assert len(loaded.warnings) == 1
    assert loaded.warnings[0].startswith("checkpoint 2 was not used: ")
    assert name in loaded.warnings[0]
    with pytest.raises(CheckpointError, match=r"checkpoint 2 cannot be used.*besides it: 1"):
        manager.load(2)


def test_no_flipped_bit_of_the_manifest_goes_unseen(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    path = save(manager, 1, 2.5) / "manifest.json"
    good = path.read_bytes()
    for index in range(len(good)):
        path.write_bytes(good[:index] + bytes([good[index] ^ 4]) + good[index + 1 :])
        with pytest.raises(CheckpointError):
            manager.load(1)
    path.write_bytes(good)
    assert manager.load(1).score == 2.5


@pytest.mark.parametrize("data", [b"\xff" * 5000, b"\0" * 5000, b"[]", b"{}", b'"x"'])
def test_a_manifest_of_anything_is_refused_in_a_line(tmp_path: Path, data: bytes) -> None:
    manager = CheckpointManager(tmp_path)
    (save(manager, 1) / "manifest.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"manifest\.json is torn or not one of ours") as caught:
        manager.load(1)
    assert len(str(caught.value)) < 300, "the file itself is no part of the message"


def test_a_file_that_changes_after_it_was_verified_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    damage(save(manager, 2) / "learner.json", "truncated")
    monkeypatch.setattr("offbeat.checkpoint.manager._verify", lambda path, size, sha: None)
    loaded = manager.load()
    assert (loaded.version, len(loaded.warnings)) == (1, 1)
    assert "learner.json is not JSON" in loaded.warnings[0]


def test_when_none_is_whole_every_reason_is_told(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for version in (1, 2):
        damage(save(manager, version) / "learner.json", "truncated")
    with pytest.raises(CheckpointError) as caught:
        manager.load()
    assert "checkpoint 1" in str(caught.value)
    assert "checkpoint 2" in str(caught.value)
    assert "offbeat train" in str(caught.value)


def test_a_version_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    with pytest.raises(CheckpointError, match="no checkpoint 9; available versions: 1"):
        manager.load(9)


def test_a_checkpoint_under_another_name_is_refused(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1).rename(tmp_path / "step_00000002")
    with pytest.raises(CheckpointError, match="belongs to version 1"):
        manager.load(2)


def test_going_on_from_an_older_one_gives_up_the_future(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=2)
    for version in (10, 20, 30):
        save(manager, version)
    damage(manager.path(30) / "learner.safetensors", "flipped")
    assert manager.load().version == 20
    save(manager, 21)
    assert manager.versions() == (20, 21)


def test_a_damaged_one_does_not_count_among_those_kept(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, keep=2)
    save(manager, 1)
    damage(save(manager, 2) / "manifest.json", "truncated")
    save(manager, 3)
    assert manager.versions() == (1, 3)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
@pytest.mark.parametrize("seam", ["write_bytes", "write_arrays", "sync"])
def test_a_failed_write_leaves_the_old_ones_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seam: str, code: int
) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    real, calls = getattr(files, seam), []

    def fail_second(path: Path, *data: object) -> None:
        calls.append(path)
        if len(calls) == 2:
            raise OSError(code, os.strerror(code))
        real(path, *data)

    monkeypatch.setattr(files, seam, fail_second)
    with pytest.raises(CheckpointError, match=os.strerror(code)) as caught:
        save(manager, 2)
    assert "Free disk space" in str(caught.value)
    assert visible(tmp_path) == ["step_00000001"]
    assert manager.load().version == 1


def test_a_real_write_error_of_the_system_is_a_checkpoint_error(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            manager.save(2, {"store": np.zeros(10_000)}, weights_of(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert visible(tmp_path) == ["step_00000001"]


def test_a_failed_replacement_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1, 3.0)
    real = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name.startswith(".writing"):
            raise OSError(errno.EIO, "Input/output error")
        return real(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError):
        manager.save(1, parts_of(1), weights_of(2))
    assert visible(tmp_path) == ["step_00000001"]
    assert manager.load().score == 3.0


def test_a_state_that_cannot_be_packed_leaves_nothing_behind(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    with pytest.raises(CheckpointError, match=r"learner\['env'\] is a builtins.object"):
        manager.save(2, {"learner": {"env": object()}}, weights_of(2))
    assert visible(tmp_path) == ["step_00000001"]


@pytest.mark.parametrize("name", ["weights", "manifest", "../up", "", "A b"])
def test_part_names_are_file_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="cannot name a part"):
        CheckpointManager(tmp_path).save(1, {name: {}}, weights_of(1))
    assert visible(tmp_path) == []


@pytest.mark.parametrize("weights", [{"__metadata__": np.zeros(1)}, {3: np.zeros(1)}, {"x": np.array(["s"])}])
def test_weights_that_safetensors_cannot_hold_are_refused(tmp_path: Path, weights: dict) -> None:
    with pytest.raises(CheckpointError):
        CheckpointManager(tmp_path).save(1, {}, weights)
    assert visible(tmp_path) == []


def test_a_checkpoint_without_weights_or_arrays_is_fine(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.save(0, {"meter": {"count": 1}}, {})
    loaded = manager.load()
    assert (loaded.version, loaded.parts, loaded.weights) == (0, {"meter": {"count": 1}}, {})


def test_leftovers_of_dead_writers_go_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    dead, parent = dead_pid(), os.getppid()
    for name in (f".writing-{dead}-step_00000003", f".retired-{dead}-step_00000001"):
        (tmp_path / name).mkdir()
    (tmp_path / f".writing-{parent}-step_00000004").mkdir()
    (tmp_path / f".writing-{os.getpid()}-step_00000005").mkdir()
    manager = CheckpointManager(tmp_path)
    alive = f".writing-{parent}-step_00000004"
    assert visible(tmp_path) == sorted([alive, f".writing-{os.getpid()}-step_00000005"])
    save(manager, 5)
    assert visible(tmp_path) == [alive, "step_00000005"]


@pytest.mark.parametrize("pid_of", [dead_pid, os.getpid])
def test_a_writer_killed_between_two_renames_loses_nothing(tmp_path: Path, pid_of: Callable[[], int]) -> None:
    save(CheckpointManager(tmp_path), 1, 4.0).rename(tmp_path / f".aside-{pid_of()}-step_00000001")
    assert CheckpointManager(tmp_path).load().score == 4.0
    assert visible(tmp_path) == ["step_00000001"]


KILLED = """
import os, signal, sys
import numpy as np
from pathlib import Path
from offbeat.checkpoint import CheckpointManager, files

manager = CheckpointManager(sys.argv[1])
state = {"learner": {"w": np.arange(1000.0)}}
manager.save(1, state, {"w": np.zeros(3)})
calls, stop_at = 0, int(sys.argv[2])

def counting(real):
    def call(*args):
        global calls
        calls += 1
        if calls == stop_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)
    return call

for name in ("write_bytes", "write_arrays", "sync", "sha256"):
    setattr(files, name, counting(getattr(files, name)))
Path.rename = counting(Path.rename)
manager.save(int(sys.argv[3]), state, {"w": np.ones(3)})
print(calls)
"""


def run_killed(directory: Path, stop_at: int, version: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", KILLED, str(directory), str(stop_at), str(version)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


@pytest.mark.parametrize("version", [1, 2])
def test_a_writer_killed_at_any_step_leaves_a_whole_checkpoint(tmp_path: Path, version: int) -> None:
    complete = run_killed(tmp_path / "complete", -1, version)
    assert complete.returncode == 0, complete.stderr
    steps = int(complete.stdout)
    assert steps > 8
    for stop_at in range(1, steps + 1):
        directory = tmp_path / f"{stop_at}"
        assert run_killed(directory, stop_at, version).returncode == -signal.SIGKILL
        manager = CheckpointManager(directory)
        loaded = manager.load()
        assert loaded.warnings == ()
        assert loaded.weights["w"].tolist() in ([0, 0, 0], [1, 1, 1])
        assert all(name.startswith("step_") for name in visible(directory))


# ---------------------------------------------------------------- nothing saved twice


def test_arrays_of_the_learner_that_are_weights_too_are_stored_once(tmp_path: Path) -> None:
    big = np.arange(100_000, dtype=np.float32)
    learner = {"net": {"w": big.copy(), "b": np.ones(3)}, "moments": [big + 1.0], "empty": np.zeros(0)}
    weights = {"actor.w": big, "actor.b": np.ones(3), "log_std": np.zeros(2), "empty": np.zeros(0)}
    manager = CheckpointManager(tmp_path)
    path = manager.save(1, {"learner": learner, "other": {"w": big}}, weights)
    sizes = {name: (path / f"{name}.safetensors").stat().st_size for name in ("weights", "learner", "other")}
    assert big.nbytes < sizes["learner"] < big.nbytes + 500, "its moments alone"
    assert sizes["other"] > big.nbytes
    saved = manager.load()
    assert digest(pack(saved.parts["learner"])[1]) == digest(pack(learner)[1])
    assert digest(saved.weights) == digest(weights)
    saved.parts["learner"]["net"]["w"][:] = 0.0
    assert saved.weights["actor.w"][1] == 1.0, "what is stored once is loaded twice"


def test_weights_that_are_tensors_are_shared_too(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(64, 64).to(torch.bfloat16)
    learner = {"net": dict(net.state_dict()), "step": 3}
    path = CheckpointManager(tmp_path).save(1, {"learner": learner}, dict(net.state_dict()))
    assert (path / "learner.safetensors").stat().st_size < 200
    saved = CheckpointManager(tmp_path).load()
    for found in (saved.parts["learner"]["net"], saved.weights):
        assert all(torch.equal(found[name], tensor) for name, tensor in net.state_dict().items())


def test_arrays_that_differ_in_a_sign_a_bit_or_their_dtype_are_not_shared(tmp_path: Path) -> None:
    zeros = np.zeros(5000)
    last = zeros.copy()
    last[-1] = -0.0
    learner = {
        "zeros": -zeros,
        "last": last,
        "ints": np.zeros(5000, np.int64),
        "shape": zeros.reshape(2, 2500),
    }
    path = CheckpointManager(tmp_path).save(1, {"learner": learner}, {"w": zeros})
    assert (path / "learner.safetensors").stat().st_size > 4 * zeros.nbytes
    assert digest(pack(CheckpointManager(tmp_path).load().parts["learner"])[1]) == digest(pack(learner)[1])


def test_checkpoints_of_format_1_are_loaded_and_newer_ones_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = CheckpointManager(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("offbeat.checkpoint.manager.FORMAT", 1)
        patch.setattr("offbeat.checkpoint.manager._in_both", lambda arrays, shared: ())
        assert '"format": 1' in (save(manager, 1) / "manifest.json").read_text()
    assert manager.load().parts["learner"]["params"]["actor.bias"].tolist() == [1, 2, 3]
    manager.set_score(1, 5.0)
    assert manager.load().score == 5.0
    with monkeypatch.context() as patch:
        patch.setattr("offbeat.checkpoint.manager.FORMAT", 3)
        patch.setattr("offbeat.checkpoint.manager._READABLE", (1, 2, 3))
        save(manager, 2)
    loaded = manager.load()
    assert loaded.version == 1
    assert "it has format 3, this offbeat reads formats up to 2" in loaded.warnings[0]


@pytest.mark.parametrize(
    "body", [[], {}, [{"a0": "no such"}, {"dict": []}], [[1], None], [{"a0": []}, None], [{}]]
)
def test_forged_references_to_the_weights_are_refused(tmp_path: Path, body: object) -> None:
    manager = CheckpointManager(tmp_path)
    path = save(manager, 1)
    (path / "learner.json").write_text(json.dumps({"shared": body}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offbeat.checkpoint.manager._verify", lambda path, size, sha: None)
        with pytest.raises(CheckpointError):
            manager.load(1)


# ---------------------------------------------------------------- files


def test_files_are_those_that_safetensors_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "b": rng.normal(size=(3, 5)).astype(np.float32),
        "ä": np.array(True),
        "a": np.arange(7, dtype=np.uint16),
        "half": np.ones(3, np.float16),
        "none": np.zeros((0, 2), np.int64),
        'q"': np.arange(3, dtype=np.int8),
    }
    listed: dict[str, tuple[int, str]] = {}
    files.write_arrays(tmp_path / "x.safetensors", arrays, listed)
    loaded = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert digest(loaded) == digest(arrays)
    data = (tmp_path / "x.safetensors").read_bytes()
    assert listed == {"x.safetensors": (len(data), hashlib.sha256(data).hexdigest())}
    same = {name: array for name, array in arrays.items() if array.dtype == np.float32}
    files.write_arrays(tmp_path / "y.safetensors", same)
    assert (tmp_path / "y.safetensors").read_bytes() == safetensors.numpy.save(same)


def test_files_are_hashed_in_pieces_as_they_are_written(tmp_path: Path) -> None:
    big = np.random.default_rng(0).integers(0, 255, 20_000_001, np.uint8)
    manager = CheckpointManager(tmp_path)
    path = manager.save(1, {"learner": {"w": big}}, {"w": big, "a": big[::2], "x": np.ones(2, np.float64)})
    listed = json.loads((path / "manifest.json").read_text())["files"]
    assert {name: entry["sha256"] for name, entry in listed.items()} == {
        name: files.sha256(path / name) for name in listed
    }
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["weights_digest"] == digest({"w": big, "a": big[::2], "x": np.ones(2)})


def test_abandoned_write_leaves_nothing_and_the_older_one(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    save(manager, 1)
    manager.abandon()
    with pytest.raises(CheckpointError, match="given up"):
        save(manager, 2)
    assert visible(tmp_path) == ["step_00000001"]
