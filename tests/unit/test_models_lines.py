"""Pattern tables: gradients, symmetries, and that a ball that moved is no longer where it was."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import offbeat
from offbeat import algorithms
from offbeat.envs.colorlines.env import observation_space
from offbeat.envs.colorlines.moves import Moves
from offbeat.envs.colorlines.rules import find_lines
from offbeat.errors import ConfigError
from offbeat.models.actor import initial_memory, make_actor
from offbeat.models.flat import FlatParameters
from offbeat.models.likelihood import likelihood
from offbeat.models.lines import LinesActorCritic
from offbeat.models.lines_actor import LinesActor
from offbeat.models.lines_kernels import (
    CELLS,
    DIGITS,
    ENTRY,
    ILLEGAL,
    MAX_MOVES,
    NUM_ENTRIES,
    NUM_PATTERNS,
    REACH,
    gather,
    spread,
)
from offbeat.models.moves import MoveActions
from offbeat.models.networks import CRITIC_PREFIX, make_network
from offbeat.models.spec import NetworkConfig, device_for, network_spec
from offbeat.ops import jit
from offbeat.ops.exploration import IMPOSSIBLE
from tests.unit.board_fakes import EMPTY, FULL, as_matrix, boards, symmetries
from tests.unit.colorlines_boards import action, cells

SPEC = network_spec(NetworkConfig(), observation_space(), Moves())


def trained(seed=0):
    """A network with random tables: untrained ones are all 0."""
    network = make_network(SPEC, torch.Generator())
    assert isinstance(network, LinesActorCritic)
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return network


def actor_weights(network):
    named = network.named_parameters()
    return {name: p.numpy().copy() for name, p in named if not name.startswith(CRITIC_PREFIX)}


def judged(network, obs):
    found = network.evaluate(torch.from_numpy(obs))
    return found.outputs.numpy(), found.values.numpy()


def test_moves_on_a_board_get_tables_by_default():
    assert SPEC.kind == "lines"
    assert SPEC.memory_size == 0


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("part", ["outputs", "values"])
def test_gradient_is_that_of_finite_differences(part):
    """Everything is linear in the tables, so that a difference over any step is the derivative."""
    network, obs = trained(), boards(12, seed=1)
    parameters, rng = FlatParameters(network), np.random.default_rng(2)
    outputs, values = judged(network, obs)
    legal = outputs != ILLEGAL
    by_outputs = np.where(legal, rng.normal(size=outputs.shape), 0) * (part == "outputs")
    by_values = rng.normal(size=len(obs)) * (part == "values")
    parameters.sums.zero_()
    evaluation = network.evaluate(torch.from_numpy(obs))
    evaluation.backward(*(torch.from_numpy(array.astype(np.float32)) for array in (by_outputs, by_values)))
    gradient = parameters.grad.numpy().astype(np.float64)
    assert np.count_nonzero(gradient) > 200

    def loss():
        outputs, values = judged(network, obs)
        return float((by_outputs * np.where(legal, outputs, 0)).sum() + (by_values * values).sum())

    here = loss()
    tables = parameters.flat.detach()
    before = tables.clone()
    largest = np.argsort(-np.abs(gradient))[:20]
    for index in [*largest, *rng.choice(np.flatnonzero(gradient), 20)]:
        tables[index] += 1.0
        assert loss() - here == pytest.approx(gradient[index], rel=1e-2, abs=2e-3)
        tables.copy_(before)
    for _ in range(5):
        step = rng.normal(size=len(gradient)).astype(np.float32)
        tables += torch.from_numpy(step)
        assert loss() - here == pytest.approx(float(gradient @ step), rel=1e-3, abs=1e-2)
        tables.copy_(before)


def test_gradients_add_up_over_boards_and_calls():
    network, obs = trained(), boards(6, seed=3)
    parameters = FlatParameters(network)
    legal = judged(network, obs)[0] != ILLEGAL
    by_outputs = torch.from_numpy(np.where(legal, 1.0, 0.0).astype(np.float32))
    by_values = torch.ones(6)
    parameters.sums.zero_()
    network.evaluate(torch.from_numpy(obs)).backward(by_outputs, by_values)
    whole = parameters.grad.clone()
    parameters.sums.zero_()
    for i in range(6):
        one = network.evaluate(torch.from_numpy(obs[i : i + 1]))
        one.backward(by_outputs[i : i + 1], by_values[i : i + 1])
    torch.testing.assert_close(parameters.grad, whole, rtol=1e-4, atol=1e-3)


def test_gradients_by_illegal_moves_do_not_count():
    network, obs = trained(), boards(4, seed=4)
    parameters = FlatParameters(network)
    found = []
    for noise in (0.0, 7.0):
        parameters.sums.zero_()
        evaluation = network.evaluate(torch.from_numpy(obs))
        by_outputs = torch.where(evaluation.outputs == float(ILLEGAL), noise, 1.0)
        evaluation.backward(by_outputs, torch.zeros(4))
        found.append(parameters.grad.clone())
    assert torch.equal(*found)


# ---------------------------------------------------------------- symmetries


@pytest.mark.parametrize("number", range(8))
def test_turning_and_mirroring_the_board_turns_the_moves(number):
    network, obs = trained(), boards(16, seed=5)
    moved = symmetries()[number]
    turned = obs.copy()
    turned[:, :CELLS] = obs[:, moved]
    (plain_outputs, plain_values), (outputs, values) = judged(network, obs), judged(network, turned)
    np.testing.assert_allclose(values, plain_values, atol=1e-3)
    expected = as_matrix(obs, plain_outputs)[:, moved][:, :, moved]
    np.testing.assert_allclose(as_matrix(turned, outputs), expected, atol=1e-4)


def test_swapping_colours_changes_nothing():
    network, obs = trained(), boards(16, seed=6)
    plain_outputs, plain_values = judged(network, obs)
    for seed in range(4):
        permutation = np.concatenate([[0], 1 + np.random.default_rng(seed).permutation(7)]).astype(np.int8)
        outputs, values = judged(network, permutation[obs])
        np.testing.assert_allclose(values, plain_values, atol=1e-3)
        np.testing.assert_allclose(outputs, plain_outputs, atol=1e-4)


def test_a_pattern_and_its_mirror_image_share_an_entry():
    digits = np.arange(NUM_PATTERNS)[:, None] // 3 ** np.arange(DIGITS) % 3
    mirrored = digits[:, ::-1] @ 3 ** np.arange(DIGITS)
    np.testing.assert_array_equal(ENTRY[mirrored], ENTRY)
    assert len(np.unique(ENTRY)) == NUM_ENTRIES == (NUM_PATTERNS + 3 ** (DIGITS // 2)) // 2
    rng = np.random.default_rng(0)
    table, gradient = rng.normal(size=(1, NUM_ENTRIES))[0], rng.normal(size=NUM_PATTERNS).astype(np.float32)
    laid_out, gathered = spread(table, "pattern", 2.0), gather(gradient, "pattern")
    assert laid_out @ gradient == pytest.approx(2 * (table @ gathered), rel=1e-4)


def test_symmetries_are_not_for_free_everywhere():
    """What no symmetry maps to each other is told apart: the test above could fail."""
    network, obs = trained(), boards(2, seed=7, fill=0.5)
    outputs, values = judged(network, obs)
    assert abs(values[0] - values[1]) > 1e-2
    assert np.unique(outputs[0][outputs[0] != ILLEGAL]).size > 50


# ---------------------------------------------------------------- what a move is


def completes_five():
    """A table that is 1 where a ball in the middle would make a line of five or more."""
    digits = np.arange(NUM_PATTERNS)[:, None] // 3 ** np.arange(DIGITS) % 3
    own = digits == 1
    left = np.cumprod(own[:, REACH - 1 :: -1], axis=1).sum(1)
    right = np.cumprod(own[:, REACH:], axis=1).sum(1)
    table = np.zeros(NUM_ENTRIES, np.float32)
    table[ENTRY] = left + right + 1 >= 5
    return table


def lines_network():
    network = make_network(SPEC, torch.Generator())
    network.get_parameter("place").copy_(torch.from_numpy(completes_five()))
    return network


FOUR = """
RRRR.....
.........
R........
"""


def test_moving_the_end_of_a_four_to_its_other_end_is_no_five():
    obs = np.array([[*cells(FOUR), 1, 2, 3]], np.int8)
    scores = as_matrix(obs, judged(lines_network(), obs)[0]).reshape(-1)
    assert scores[action("c1 a5")] == 1.0, "a ball from elsewhere makes it five"
    assert scores[action("a1 a5")] == 0.0, "the ball itself leaves three behind"
    assert scores[action("a4 a5")] == 0.0
    assert scores[action("c1 b5")] == 0.0


@pytest.mark.parametrize("num_colours", [1, 2, 3])
def test_moves_that_make_lines_are_those_of_the_rules(num_colours):
    """All moves of crowded boards: the score counts the lines through the target once the ball is there."""
    obs = boards(6, seed=8, num_colours=num_colours, fill=0.6)
    matrix = as_matrix(obs, judged(lines_network(), obs)[0])
    num_lines = 0
    for board, scores in zip(obs[:, :CELLS].tolist(), matrix, strict=True):
        for source, target in np.argwhere(~np.isnan(scores)):
            after = list(board)
            after[target], after[source] = after[source], 0
            expected = sum(target in line for line in find_lines(after))
            assert scores[source, target] == expected
            num_lines += expected
    assert num_lines > 20


def test_the_critic_counts_what_is_there():
    """Tables by hand: the mean over balls and cells of what their patterns are worth, and the room left."""
    network = make_network(SPEC, torch.Generator())
    network.critic["count"].copy_(torch.arange(CELLS + 1.0))
    obs = boards(5, seed=9)
    np.testing.assert_allclose(judged(network, obs)[1], (obs[:, :CELLS] == 0).sum(1))
    network.critic["ball"].fill_(1.0)
    num_balls = (obs[:, :CELLS] != 0).sum(1)
    np.testing.assert_allclose(judged(network, obs)[1], CELLS - num_balls + 0.1 * 4 * num_balls, rtol=1e-5)


@pytest.mark.parametrize("obs", [FULL, EMPTY], ids=["full", "empty"])
def test_boards_without_a_move_have_something_to_choose(obs):
    network = trained()
    outputs, values = judged(network, obs)
    assert (outputs == 0).all()
    assert np.isfinite(values).all()
    parameters = FlatParameters(network)
    parameters.sums.zero_()
    network.evaluate(torch.from_numpy(obs)).backward(torch.zeros(1, MAX_MOVES), torch.ones(1))
    assert torch.isfinite(parameters.grad).all()


# ---------------------------------------------------------------- acting


def test_actor_and_learner_agree_in_every_bit():
    network, obs = trained(), boards(32, seed=10)
    actor = make_actor(SPEC)
    assert isinstance(actor, LinesActor)
    actor.load(actor_weights(network))
    outputs, memory = actor.outputs(obs, initial_memory(SPEC, 32))
    evaluated, values = judged(network, obs)
    np.testing.assert_array_equal(outputs, evaluated)
    np.testing.assert_array_equal(outputs, network.outputs(torch.from_numpy(obs)).numpy())
    np.testing.assert_array_equal(values, network.values(torch.from_numpy(obs)).numpy())
    np.testing.assert_array_equal(outputs[3:5], actor.outputs(obs[3:5], initial_memory(SPEC, 2))[0])
    assert memory.shape == (32, 0)
    assert outputs.dtype == np.float32 and outputs.shape == (32, MAX_MOVES)


def test_loaded_weights_are_a_copy():
    network, obs = trained(), boards(3, seed=11)
    weights = actor_weights(network)
    actor = make_actor(SPEC)
    actor.load(weights)
    before = actor.outputs(obs, initial_memory(SPEC, 3))[0]
    for array in weights.values():
        array[:] = 0
    np.testing.assert_array_equal(actor.outputs(obs, initial_memory(SPEC, 3))[0], before)


def test_an_untrained_policy_is_uniform():
    outputs, values = judged(make_network(SPEC, torch.Generator()), boards(4, seed=12))
    assert (outputs[outputs != ILLEGAL] == 0).all()
    assert (values == 0).all()


@pytest.mark.parametrize(
    ("kind", "text"),
    [("mlp", "cannot tell legal moves from others; set it to lines or board"), ("cnn", "lines or board")],
)
def test_networks_that_do_not_know_moves_are_refused(kind, text):
    with pytest.raises(ConfigError, match=text):
        network_spec(NetworkConfig(kind=kind), observation_space(), Moves())


@pytest.mark.parametrize("kind", ["lines", "board"])
def test_other_worlds_are_refused(kind):
    from gymnasium.spaces import Discrete

    with pytest.raises(ConfigError, match=r"for moves on a board of 84 numbers.*set it to auto"):
        network_spec(NetworkConfig(kind=kind), observation_space(), Discrete(3))


def test_what_is_illegal_is_impossible():
    """Two literals: code that is compiled and kept does not notice a change in another file."""
    assert ILLEGAL == IMPOSSIBLE and ILLEGAL.dtype == IMPOSSIBLE.dtype


# ---------------------------------------------------------------- where it runs


@pytest.mark.parametrize(("device", "found"), [("cpu", "cpu"), ("auto", "cpu")])
def test_tables_train_on_the_cpu(device, found):
    assert device_for(SPEC, device) == found


def test_other_networks_train_where_they_are_told_to():
    board = network_spec(NetworkConfig(kind="board"), observation_space(), Moves())
    assert [device_for(board, name, 2) for name in ("cpu", "auto", "cuda")] == ["cpu", "auto", "cuda"]


@pytest.mark.parametrize("recipe", ["colorlines-ppo", "colorlines-ppo-per"])
@pytest.mark.parametrize("settings", [("cuda", 1), ("auto", 2)])
def test_a_gpu_is_refused_before_the_run(recipe, settings):
    device, ranks = settings
    config = offbeat.load_config(
        recipe,
        {"trainer.device": device, "learner.num_ranks": ranks, "algorithm.network.kind": "auto"},
    )
    check = algorithms.find(config.algorithm.name).check
    with pytest.raises(ConfigError, match=r"set trainer\.device=cpu, or algorithm\.network\.kind=board"):
        check(config)
    check(config.model_copy(update={"trainer": config.trainer.model_copy(update={"device": "cpu"})}))


# ---------------------------------------------------------------- without numba

IN_PLAIN_PYTHON = """
import sys
import numpy as np
from tests.unit.test_models_lines import everything

assert "numba" not in sys.modules
np.savez(sys.argv[1], **everything())
"""


def everything():
    """All that kernels compute for a few boards, by name."""
    network, obs, rng = trained(), boards(5, seed=21), np.random.default_rng(3)
    parameters, head = FlatParameters(network), MoveActions()
    evaluation = network.evaluate(torch.from_numpy(obs))
    outputs = evaluation.outputs.numpy()
    chosen = head.sample(outputs, head.noise(rng, 1, len(obs))[0])
    policy = likelihood(head, evaluation.outputs, torch.from_numpy(chosen))
    parameters.sums.zero_()
    by_outputs = policy.backward(torch.ones(len(obs)), torch.full((len(obs),), 0.5))
    evaluation.backward(by_outputs, torch.ones(len(obs)))
    moves = head.to_env(chosen, obs)
    return {
        "legal": outputs != ILLEGAL,
        "pairs": ~np.isnan(as_matrix(obs, outputs)),
        "outputs": np.where(outputs == ILLEGAL, 0, outputs),
        "values": evaluation.values.numpy(),
        "chosen": chosen,
        "moves": moves,
        "numbers": head.from_env(moves, obs),
        "logp": head.log_prob(outputs, chosen),
        "entropy": policy.entropy.numpy(),
        "gradient": parameters.grad.numpy(),
    }


@pytest.mark.skipif(not jit.IS_COMPILED, reason="there is nothing to compare with")
def test_without_numba_scores_and_gradients_are_the_same(tmp_path):
    path = tmp_path / "found.npz"
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", IN_PLAIN_PYTHON, str(path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OFFBEAT_NUMBA": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert "network.kind lines runs in plain Python" in done.stderr
    plain, compiled = np.load(path), everything()
    for name in ("legal", "pairs", "chosen", "moves", "numbers"):
        np.testing.assert_array_equal(plain[name], compiled[name], err_msg=name)
    for name in ("outputs", "values", "logp", "entropy", "gradient"):
        np.testing.assert_allclose(plain[name], compiled[name], rtol=1e-5, atol=1e-5, err_msg=name)
