"""PPO's collector: what it writes, and that it can be stopped and continued anywhere."""

import subprocess
import sys

import cloudpickle
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiDiscrete

from offbeat.algorithms.ppo import ALGORITHM, PPOConfig
from offbeat.config.models import EnvConfig, RunConfig
from offbeat.models.actor import initial_memory, make_actor
from offbeat.models.spec import network_spec
from offbeat.roles import Evaluator, InPlaceCollector, SerialCollector, WorkerContext
from tests.unit.ppo_fakes import FLOATS, FakeWorld, make_collector, make_learner, settings, ticket

IMAGES = Box(0, 1, (10, 10, 2), np.bool_)
CASES = {
    "mlp": ({}, FLOATS, Discrete(3)),
    "gaussian": ({"normalize_obs": True, "normalize_reward": True}, FLOATS, Box(-1, 1, (2,), np.float32)),
    "multi": ({}, FLOATS, MultiDiscrete([2, 3])),
    "gru": ({"network": {"kind": "gru", "hidden": (6, 5)}}, FLOATS, Discrete(3)),
    "cnn": ({"network": {"hidden": (16,)}}, IMAGES, Discrete(3)),
}


def roles(case="mlp", lengths=(3, 5, 100), seed=0):
    options, observation_space, action_space = CASES[case]
    config = settings(**options)
    world = FakeWorld(lengths, observation_space, action_space)
    return make_collector(config, world), make_learner(config, world, seed), world


@pytest.mark.parametrize("case", CASES)
def test_segments_are_as_specified(case):
    collector, learner, _ = roles(case)
    assert isinstance(collector, SerialCollector)
    assert isinstance(collector, InPlaceCollector)
    spec = collector.segment_spec()
    segment = collector.collect(ticket(version=4), learner.weights())
    assert {name: (a.shape, str(a.dtype)) for name, a in segment.data.items()} == {
        name: (s.shape, s.dtype) for name, s in spec.items()
    }
    assert spec["obs"].shape[:2] == (9, 3)
    assert segment.versions.tolist() == [4]
    assert ("memory" in spec) == (case == "gru")
    assert ("discounted_returns" in spec) == (case == "gaussian")


def test_steps_after_an_end_are_not_valid():
    collector, learner, _ = roles(lengths=(3, 5, 100))
    first = collector.collect(ticket(0), learner.weights())
    ended = first.data["terminated"] | first.data["truncated"]
    # Episodes of 3 steps end at steps 2 and 6, of 5 steps at step 4; each is followed by a reset step.
    assert np.argwhere(ended).tolist() == [[2, 0], [4, 1], [6, 0]]
    assert np.argwhere(~first.data["valid"]).tolist() == [[3, 0], [5, 1], [7, 0]]
    assert first.data["terminated"][2, 0]
    assert first.data["truncated"][4, 1]
    assert first.units == {"env_steps": 21}


def test_a_segment_that_begins_after_an_end_begins_with_a_reset_step():
    collector, learner, _ = roles(lengths=(8, 9))
    collector.collect(ticket(0), learner.weights())
    second = collector.collect(ticket(1), learner.weights())
    assert second.data["valid"][:, 0].tolist() == [False] + [True] * 7
    assert second.data["valid"][:, 1].tolist() == [True, False] + [True] * 6


def test_episodes_span_segments():
    collector, learner, _ = roles(lengths=(3, 10))
    segments = [collector.collect(ticket(i), learner.weights()) for i in range(2)]
    assert segments[0].episodes.lengths == (3, 3)
    assert segments[0].episodes.returns == (6.0, 6.0)
    assert sorted(segments[1].episodes.lengths) == [3, 3, 10]
    assert 55.0 in segments[1].episodes.returns


@pytest.mark.parametrize("case", CASES)
def test_log_probs_are_of_the_distribution_sampled_from(case):
    collector, learner, _ = roles(case)
    options, observation_space, action_space = CASES[case]
    spec = network_spec(settings(**options).network, observation_space, action_space)
    data = collector.collect(ticket(), learner.weights()).data
    actor = make_actor(spec)
    actor.load(learner.weights())
    memory = data["memory"] if case == "gru" else initial_memory(spec, 3)
    for t in range(8):
        outputs, memory = actor.outputs(data["obs"][t], memory)
        np.testing.assert_allclose(
            spec.actions.log_prob(outputs, data["actions"][t]), data["logp"][t], atol=1e-5
        )
        memory = memory * data["valid"][t][:, None]


def test_the_environment_gets_clipped_actions_and_the_segment_unclipped_ones():
    collector, learner, world = roles("gaussian")
    data = collector.collect(ticket(), learner.weights()).data
    np.testing.assert_array_equal(np.stack(world.seen), np.clip(data["actions"], -1, 1))
    assert np.abs(data["actions"]).max() > 1


def test_equal_tickets_give_equal_segments_and_others_do_not():
    segments = []
    for number in (0, 0, 1):
        collector, learner, _ = roles()
        segments.append(collector.collect(ticket(number), learner.weights()).data)
    for name in segments[0]:
        np.testing.assert_array_equal(segments[0][name], segments[1][name])
    assert not np.array_equal(segments[0]["obs"], segments[2]["obs"])


def test_collecting_in_place_writes_the_same():
    (one, learner, _), (other, _, _) = roles(), roles()
    expected = one.collect(ticket(), learner.weights())
    out = {name: np.zeros(spec.shape, spec.dtype) for name, spec in other.segment_spec().items()}
    segment = other.collect_into(ticket(), learner.weights(), out)
    assert segment.data is out
    for name, array in expected.data.items():
        np.testing.assert_array_equal(out[name], array)


@pytest.mark.parametrize("case", CASES)
def test_a_saved_collector_goes_on_where_it_was(case):
    collector, learner, _ = roles(case)
    weights = learner.weights()
    collector.collect(ticket(0), weights)
    state = collector.state_dict()
    expected = collector.collect(ticket(1), weights)
    other, _, _ = roles(case)
    other.load_state_dict(state)
    segment = other.collect(ticket(1), weights)
    for name, array in expected.data.items():
        np.testing.assert_array_equal(segment.data[name], array)
    assert segment.episodes == expected.episodes
    # The state must not have been changed by going on from it.
    again, _, _ = roles(case)
    again.load_state_dict(state)
    np.testing.assert_array_equal(again.collect(ticket(1), weights).data["obs"], expected.data["obs"])


def test_a_collector_saved_before_its_first_segment_starts_afresh():
    collector, learner, _ = roles()
    state = collector.state_dict()
    expected = collector.collect(ticket(0), learner.weights())
    collector.load_state_dict(state)
    again = collector.collect(ticket(0), learner.weights())
    np.testing.assert_array_equal(again.data["obs"], expected.data["obs"])


def test_a_world_without_state_makes_a_collector_without_state():
    collector, learner, world = roles()
    world.state_dict = lambda: None
    collector.collect(ticket(), learner.weights())
    assert collector.state_dict() is None


def test_weights_may_be_overwritten_after_the_segment():
    (one, learner, _), (other, _, _) = roles(), roles()
    weights = learner.weights()
    shared = {name: array.copy() for name, array in weights.items()}
    one.collect(ticket(0), shared)
    for array in shared.values():
        array.fill(np.nan)
    other.collect(ticket(0), weights)
    np.testing.assert_array_equal(
        one.collect(ticket(1), weights).data["logp"], other.collect(ticket(1), weights).data["logp"]
    )


def test_the_running_return_restarts_with_the_episode():
    config = settings(normalize_reward=True, gamma=0.5)
    world = FakeWorld((3,))
    collector = make_collector(config, world)
    data = collector.collect(ticket(), make_learner(config, world).weights()).data
    # Rewards are 1, 2, 3, then 0 at the reset step, then 1, 2, ...
    expected = [1, 2.5, 4.25, 0, 1, 2.5, 4.25, 0]
    np.testing.assert_allclose(data["discounted_returns"][:, 0], expected)


def test_makers_travel_by_pickle():
    algorithm = PPOConfig(num_steps=4, network={"hidden": (8,)})
    built = ALGORITHM.build(RunConfig(algorithm=algorithm, env=EnvConfig(id="CartPole-v1", num_envs=4)))
    context = WorkerContext(collector=1, num_collectors=2, seed=0)
    collector = cloudpickle.loads(cloudpickle.dumps(built.collect)).make(context)
    evaluator = cloudpickle.loads(cloudpickle.dumps(built.evaluate)).make(context)
    assert isinstance(collector, SerialCollector)
    assert isinstance(evaluator, Evaluator)
    assert collector.segment_spec()["obs"].shape == (5, 2, 4)
    assert (built.mode, built.segments_per_round) == ("stream", 2)


@pytest.mark.parametrize("kind", ["mlp", "gru"])
def test_workers_need_no_torch(kind):
    script = f"""
import sys, numpy as np
from offbeat.algorithms.ppo import ALGORITHM, PPOConfig
from offbeat.config.models import EnvConfig, RunConfig
from offbeat.roles import WorkerContext
from offbeat.types import Ticket
network = {{"kind": "{kind}", "hidden": (8, 4)}}
algorithm, env = PPOConfig(num_steps=4, network=network), EnvConfig(id="CartPole-v1", num_envs=4)
config = RunConfig(algorithm=algorithm, env=env)
roles = ALGORITHM.build(config)
context = WorkerContext(0, 2, 0)
shapes = {{"mlp": {{"actor.0": (8, 4), "actor.1": (4, 8), "actor.2": (2, 4)}},
          "gru": {{"encoder.0": (8, 4), "memory.input": (12, 8), "memory.recurrent": (12, 4),
                  "actor": (2, 4)}}}}
weights = {{}}
for name, shape in shapes["{kind}"].items():
    weights[name + ".weight"] = np.full(shape, 0.1, np.float32)
    weights[name + ".bias"] = np.zeros(shape[0], np.float32)
segment = roles.collect.make(context).collect(Ticket(0, 0, 0, 0, 1), weights)
metrics = roles.evaluate.make(context).evaluate(weights, 3)
assert metrics["eval/episodes"] == 10 and segment.data["obs"].shape == (5, 2, 4)
roles.policy(weights).act(np.zeros(4))
assert "torch" not in sys.modules
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
