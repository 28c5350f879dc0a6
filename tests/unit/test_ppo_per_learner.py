"""The learner of PPO with prioritized replay: exact and repeatable, what it draws and what it reports."""

from dataclasses import replace

import numpy as np
import pytest

from offbeat.algorithms.ppo.rounds import Round
from offbeat.algorithms.ppo_per.items import from_items, item_spec, item_versions, to_items
from offbeat.errors import DivergedError, TrainError
from offbeat.roles import Learner
from offbeat.run.saving import learner_digest
from offbeat.runtime.learning import on_cpu
from offbeat.types import Batch
from tests.unit.ppo_fakes import FakeWorld, collect_batch, ticket, train_rounds
from tests.unit.ppo_per_fakes import (
    LENGTHS,
    Watched,
    flat,
    leaves,
    make_collector,
    make_learner,
    settings,
    spread_priorities,
)
from tests.unit.test_ppo_collector import CASES
from tests.unit.test_ranks import all_ranks, together

METRICS = {
    "learn/loss", "learn/policy_loss", "learn/value_loss", "learn/entropy", "learn/approx_kl",
    "learn/clip_fraction", "learn/grad_norm", "learn/learning_rate", "learn/ess", "learn/behaviour_kl",
    "learn/explained_variance", "learn/first_ratio_max_dev", "learn/num_epochs", "learn/gradient_steps",
    "learn/per_beta", "learn/per_weight_min", "learn/replay_size", "learn/replay_ess", "learn/replay_kl",
    "learn/expired_on_arrival",
    "pace/avg_replayed_age", "pace/max_replayed_age", "pace/p95_replayed_age", "pace/stale_replayed_ratio",
}  # fmt: skip


def start(case="mlp", seed=0, ranks=None, staleness_threshold=0, **options):
    """Collector and learner of a fake world."""
    defaults, observation_space, action_space = CASES[case]
    world = FakeWorld(LENGTHS, observation_space, action_space)
    config = settings(**(defaults | options))
    return make_collector(config, world), make_learner(config, world, seed, ranks, staleness_threshold)


def num_replayed(draw):
    """Segments of a draw that come from the replay."""
    return 0 if draw.handles is None else len(draw.handles.index)


# ---------------------------------------------------------------- the same again


@pytest.mark.parametrize("case", CASES)
def test_same_batches_same_weights_and_replay(case):
    digests = []
    for seed in (0, 0, 1):
        collector, learner = start(case, seed)
        assert isinstance(learner, Learner)
        assert set(train_rounds(collector, learner, 4)) == METRICS
        digests.append(learner_digest(learner.state_dict()))
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("case", CASES)
def test_a_saved_learner_goes_on_exactly(case):
    """Past the end of the ring, with priorities that differ."""
    collector, learner = start(case, buffer_capacity=18)
    train_rounds(collector, learner, 3)
    state = learner.state_dict()
    batches = [collect_batch(collector, learner, version, 2 * version) for version in (3, 4)]
    _, other = start(case, buffer_capacity=18)
    other.train(batches[0])
    other.load_state_dict(state)
    for batch in batches:
        assert learner.train(batch) == other.train(batch)
    assert learner_digest(learner.state_dict()) == learner_digest(other.state_dict())


def test_a_saved_state_does_not_change_with_the_learner():
    collector, learner = start()
    train_rounds(collector, learner, 2)
    state = on_cpu(learner.state_dict(), copy=True)
    digest = learner_digest(state)
    train_rounds(collector, learner, 2, first=2)
    assert learner_digest(state) == digest


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_take_the_steps_of_a_learner_alone(case, size):
    collector, alone = start(case)
    team = [start(case, ranks=ranks)[1] for ranks in all_ranks(size)]
    for version in range(3):
        batch = collect_batch(collector, alone, version, 2 * version, num_segments=2)
        expected = alone.train(batch)
        found = together([lambda learner=learner: learner.train(batch) for learner in team])
    assert all(metrics == found[0] for metrics in found)
    for name, value in expected.items():
        assert found[0][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    for learner in team:
        np.testing.assert_allclose(flat(learner), flat(alone), rtol=1e-3, atol=1e-5)
        np.testing.assert_array_equal(flat(learner), flat(team[0]))
        np.testing.assert_array_equal(leaves(learner), leaves(team[0]))


# ---------------------------------------------------------------- what is drawn


@pytest.mark.parametrize(("share", "num_fresh"), [(0.0, 0), (0.5, 3), (1.0, 6)])
def test_a_share_of_each_batch_has_just_arrived(share, num_fresh):
    collector, learner = start(fresh_fraction=share)
    train_rounds(collector, learner, 1)
    watched = Watched(learner)
    train_rounds(collector, learner, 2, first=1)
    for version, draw in enumerate(watched.draws, start=1):
        assert len(draw.chosen) == len(set(draw.chosen)) == num_fresh, "no fresh segment twice"
        assert draw.data.valid.shape == (8, 6)
        assert (draw.versions[:num_fresh] == version).all()
        assert num_replayed(draw) == 6 - num_fresh


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("per_for", ["critic", "both"])
def test_the_first_round_trains_on_what_has_arrived(share, per_for):
    """Nothing else is there: up to a whole batch of it, whatever its share is later."""
    for num_segments, expected in ((1, 4), (2, 6)):
        collector, learner = start(fresh_fraction=share, per_for=per_for)
        watched = Watched(learner)
        learner.train(collect_batch(collector, learner, num_segments=num_segments))
        (draw,) = watched.draws
        assert len(set(draw.chosen)) == expected and draw.handles is None
        assert (draw.shares.policy == 1).all() and (draw.shares.critic == 1).all()


@pytest.mark.parametrize("per_for", ["critic", "both"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_no_segment_is_drawn_from_the_replay_in_the_round_it_came_in(share, per_for):
    """Not even by the round's later updates, when its priority is known."""
    collector, learner = start(
        fresh_fraction=share, per_for=per_for, updates_per_round=3, buffer_capacity=12, per_alpha=1.0
    )
    train_rounds(collector, learner, 1)
    for version in range(1, 5):
        watched, written = Watched(learner), learner._replay._num_written
        train_rounds(collector, learner, 1, first=version)
        for draw in watched.draws:
            turns = draw.handles.generation - 1
            assert (12 * turns + draw.handles.index).max() < written, "written before this round"
            assert (draw.versions[len(draw.chosen) :] < version).all()
        watched.stop()


def test_fresh_segments_that_do_not_fill_their_share_leave_it_to_the_replay():
    collector, learner = start(fresh_fraction=1.0, batch_size=7)
    watched = Watched(learner)
    train_rounds(collector, learner, 1)
    learner.train(collect_batch(collector, learner, 1, 2))
    assert [(len(draw.chosen), num_replayed(draw)) for draw in watched.draws] == [(7, 0), (4, 3)]
    assert watched.draws[1].data.valid.shape == (8, 7)
    assert watched.draws[1].versions.tolist() == [1] * 4 + [0] * 3


def test_fresh_segments_are_what_was_collected():
    collector, learner = start(fresh_fraction=1.0, batch_size=8)
    watched = Watched(learner)
    batch = collect_batch(collector, learner, num_segments=2)
    learner.train(batch)
    for name in ("obs", "actions", "logp", "rewards", "terminated", "truncated", "valid"):
        both = np.concatenate([segment.data[name] for segment in batch.segments], axis=1)
        np.testing.assert_array_equal(getattr(watched.draws[0].data, name), both)


@pytest.mark.parametrize("case", CASES)
def test_replayed_segments_are_what_was_stored(case):
    collector, learner = start(case, fresh_fraction=0.0, buffer_capacity=64)
    watched, stored = Watched(learner), []
    for version in range(3):
        batch = collect_batch(collector, learner, version, version)
        stored.append(Round.of(batch.segments))
        learner.train(batch)
    everything = Round.side_by_side(stored)
    assert [num_replayed(draw) for draw in watched.draws] == [0, 6, 6]
    for draw in watched.draws[1:]:
        expected = everything.columns(draw.handles.index)
        for name in ("obs", "actions", "logp", "rewards", "terminated", "truncated", "valid"):
            np.testing.assert_array_equal(getattr(draw.data, name), getattr(expected, name))
        if case == "gru":
            np.testing.assert_array_equal(draw.data.memory, expected.memory)
            assert np.abs(stored[1].memory).max() > 0
        np.testing.assert_array_equal(draw.versions, draw.handles.index // 4)


@pytest.mark.parametrize("updates", [1, 2])
def test_segments_are_stored_after_their_round_each_once(updates):
    """First those that were trained on, then those that no batch had."""
    collector, learner = start(updates_per_round=updates, fresh_fraction=0.5, buffer_capacity=64)
    watched = Watched(learner)
    for version in range(3):
        batch = collect_batch(collector, learner, version, 2 * version, num_segments=2)
        learner.train(batch)
        trained = np.unique(np.concatenate([draw.chosen for draw in watched.draws[-updates:]]))
        order = [*trained, *np.setdiff1d(np.arange(8), trained)]
        assert 0 < len(trained) <= 8
        replay = learner.state_dict()["replay"]
        assert len(learner._replay) == 8 * version + 8
        for name in ("rewards", "obs", "logp"):
            arrived = np.concatenate([segment.data[name] for segment in batch.segments], axis=1)
            stored = replay["items"][name][8 * version : 8 * version + 8]
            np.testing.assert_array_equal(stored, arrived.swapaxes(0, 1)[order])
        assert (replay["versions"][8 * version : 8 * version + 8] == version).all()


def test_of_more_segments_than_the_replay_holds_the_newest_untrained_stay():
    """Above k = 0 a round takes in all that has arrived, which may be several rounds' worth."""
    collector, learner = start(buffer_capacity=6, fresh_fraction=1.0)
    watched = Watched(learner)
    batch = collect_batch(collector, learner, num_segments=4)
    learner.train(batch)
    stored = learner.state_dict()["replay"]["items"]["rewards"]
    arrived = np.concatenate([segment.data["rewards"] for segment in batch.segments], axis=1).T
    (draw,) = watched.draws
    assert len(draw.chosen) == 6 == len(learner._replay)
    untrained = np.setdiff1d(np.arange(16), draw.chosen)
    slots = np.arange(10, 16) % 6
    np.testing.assert_array_equal(stored[slots], arrived[untrained[-6:]])
    learner.train(collect_batch(collector, learner, 1, 9))


def test_segments_become_items_and_come_back():
    collector, learner = start("gru")
    batch = collect_batch(collector, learner, 5, num_segments=2, of_version=3)
    data = Round.of(batch.segments)
    spec, items = item_spec(collector.segment_spec()), to_items(data)
    assert {name: (8, *array.shape) for name, array in spec.items()} == {
        name: array.shape for name, array in items.items()
    }
    assert items["memory"].shape == (8, 5) and items["obs"].shape == (8, 9, 3)
    back = from_items(items)
    np.testing.assert_array_equal(back.obs, data.obs)
    np.testing.assert_array_equal(back.memory, data.memory)
    assert item_versions(batch.segments).tolist() == [3] * 8


def test_critic_only_gives_the_policy_no_share_of_what_priority_drew():
    collector, learner = start(per_for="critic", batch_size=8, fresh_fraction=0.25, per_beta_start=1.0)
    train_rounds(collector, learner, 2)
    watched = Watched(learner)
    train_rounds(collector, learner, 2, first=2)
    for draw in watched.draws:
        policy, critic = draw.shares.policy, draw.shares.critic
        # Two fresh ones, three drawn evenly, three by priority.
        assert (policy[5:] == 0).all()
        np.testing.assert_allclose(policy[:5], 8 / 5)
        assert policy.mean() == pytest.approx(1.0)
        assert (critic[:5] == 1).all()
        assert critic[5:].mean() == pytest.approx(1.0)
        assert critic[5:].min() < 1 < critic[5:].max()


def test_both_give_policy_and_critic_the_same_shares():
    collector, learner = start(per_for="both", fresh_fraction=0.5, per_beta_start=1.0)
    train_rounds(collector, learner, 2)
    watched = Watched(learner)
    train_rounds(collector, learner, 1, first=2)
    (draw,) = watched.draws
    np.testing.assert_array_equal(draw.shares.policy, draw.shares.critic)
    assert (draw.shares.policy[:3] == 1).all() and draw.shares.policy.min() < 1
    assert draw.shares.policy[3:].mean() == pytest.approx(1.0)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5])
@pytest.mark.parametrize("per_for", ["critic", "both"])
def test_the_replay_counts_by_its_share_of_the_batch(share, per_for):
    """However uneven the importance weights are: those of rare draws do not make the others count less."""
    collector, learner = start(
        per_for=per_for, fresh_fraction=share, batch_size=16, per_alpha=1.0, per_beta_start=1.0
    )
    train_rounds(collector, learner, 2)
    spread_priorities(learner)
    watched = Watched(learner)
    train_rounds(collector, learner, 1, first=2)
    (draw,) = watched.draws
    num_fresh, policy, critic = len(draw.chosen), draw.shares.policy, draw.shares.critic
    assert num_fresh == 16 * share and np.ptp(critic[num_fresh:]) > 0.1
    assert critic[num_fresh:].sum() / critic.sum() == pytest.approx(1 - share, rel=1e-5)
    trained = 16 if per_for == "both" else num_fresh + (16 - num_fresh) // 2
    assert policy.sum() == pytest.approx(16, rel=1e-5)
    assert policy[:num_fresh].sum() / policy.sum() == pytest.approx(num_fresh / trained, rel=1e-5)


def test_what_the_policy_has_no_share_of_does_not_move_it():
    """Spoiling the actions' probabilities of critic-only segments changes no weight of the actor."""
    results = []
    for spoil in (0.0, 0.2):
        collector, learner = start(
            per_for="critic", correction="vtrace", c_bar=0.5, rho_bar=0.5, ent_coef=0.1
        )
        keep = learner._draw

        def draw(*args, keep=keep, spoil=spoil):
            found = keep(*args)
            unused = found.shares.policy == 0
            assert unused.any() == (found.handles is not None)
            found.data.logp[:, unused] -= spoil  # all ratios stay above their bound
            return found

        learner._draw = draw
        train_rounds(collector, learner, 3)
        results.append(learner.weights())
    for name, array in results[0].items():
        np.testing.assert_array_equal(array, results[1][name])


def test_alpha_zero_draws_evenly_and_without_weights():
    collector, learner = start(per_alpha=0.0, per_for="both", fresh_fraction=0.0)
    watched = Watched(learner)
    train_rounds(collector, learner, 3)
    assert all((draw.shares.critic == 1).all() for draw in watched.draws)


# ---------------------------------------------------------------- age


def old_batch(collector, learner, version, of_version):
    """One segment by the weights of now that claims to be of another version."""
    return collect_batch(collector, learner, version, version, of_version=of_version)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_nothing_older_than_max_age_is_trained(share):
    """Neither from the replay nor from what arrives, which may be old where weights are published rarely."""
    collector, learner = start(max_age=2, fresh_fraction=share, buffer_capacity=64)
    watched, late_ones = Watched(learner), []
    for version in range(8):
        segments = collect_batch(collector, learner, version, 2 * version).segments
        late = collector.collect(ticket(2 * version + 1, max(0, version - 4)), learner.weights())
        metrics = learner.train(Batch(version, (*segments, late), 0))
        assert (version - watched.draws[-1].versions).max() <= 2
        assert metrics["pace/max_replayed_age"] <= 2
        late_ones.append(metrics["learn/expired_on_arrival"])
    ages = {int(age) for version, draw in enumerate(watched.draws) for age in version - draw.versions}
    assert ages == {0, 1, 2}
    assert late_ones == [0.0] * 3 + [4.0] * 5
    assert metrics["learn/replay_size"] == 3 * 4, "late ones are let go too"


def test_max_age_that_leaves_nothing_says_what_to_do():
    collector, learner = start(max_age=1)
    train_rounds(collector, learner, 1)
    learner.train(Batch(1, (), 0))
    before = flat(learner)
    with pytest.raises(TrainError, match=r"round 2 was not trained.*max_age 1; raise algorithm\.max_age"):
        learner.train(Batch(2, (), 0))
    np.testing.assert_array_equal(flat(learner), before)


def test_ages_are_told():
    collector, learner = start(staleness_threshold=1, fresh_fraction=0.5, buffer_capacity=64)
    watched = Watched(learner)
    for version in range(5):
        metrics = learner.train(collect_batch(collector, learner, version, version))
    ages = np.sort(4 - watched.draws[-1].versions)
    assert metrics["pace/avg_replayed_age"] == pytest.approx(ages.mean())
    assert metrics["pace/max_replayed_age"] == ages[-1] > 1
    assert metrics["pace/p95_replayed_age"] == ages[5]
    assert metrics["pace/stale_replayed_ratio"] == pytest.approx(np.mean(ages > 1))


def test_old_samples_cost_effective_size():
    collector, learner = start(lr=0.05, num_epochs=4, fresh_fraction=1.0)
    fresh = train_rounds(collector, learner, 4)
    old = [collector.collect(ticket(90, 0), start()[1].weights())]
    stale = learner.train(Batch(4, tuple(old), 4))
    assert stale["learn/ess"] < fresh["learn/ess"] - 0.01
    assert stale["learn/behaviour_kl"] > 0.01


def test_what_age_costs_is_told_of_fresh_and_of_replayed_samples():
    collector, learner = start(lr=0.05, num_epochs=4, fresh_fraction=0.5)
    assert train_rounds(collector, learner, 1)["learn/replay_kl"] == 0, "nothing was replayed"
    metrics = train_rounds(collector, learner, 3, first=1)
    assert metrics["learn/ess"] == pytest.approx(1.0) and metrics["learn/behaviour_kl"] < 1e-6
    assert metrics["learn/replay_ess"] < 0.99 and metrics["learn/replay_kl"] > 0.01
    watched = Watched(learner)
    metrics = train_rounds(collector, learner, 1, first=4)
    lesson = watched.lessons[0]
    ratios = np.exp(lesson.behaviour_log_ratios[:, 3:][lesson.data.valid[:, 3:]])
    expected = ratios.sum() ** 2 / (ratios**2).sum() / len(ratios)
    assert metrics["learn/replay_ess"] == pytest.approx(expected, rel=1e-4)


def test_targets_are_computed_with_the_critic_of_the_moment():
    """The same segments, drawn before and after the critic was told to expect 1 more everywhere."""
    collector, learner = start(
        batch_size=4, fresh_fraction=0.0, per_for="both", norm_adv=False, gamma=0.9, gae_lambda=0.0, lr=1e-12
    )
    watched = Watched(learner)
    learner.train(collect_batch(collector, learner))
    state = learner.state_dict()
    *_, last_bias = [name for name in state["parameters"] if name.startswith("critic")]
    state["parameters"][last_bias] += 1.0
    learner.load_state_dict(state)
    learner.train(Batch(1, (), 0))
    # The first round trained on what had arrived, and stored it in that order.
    slots = [watched.draws[0].chosen, watched.draws[1].handles.index]
    assert slots[0].tolist() == [0, 1, 2, 3]
    places = [{slot: at for at, slot in enumerate(some.tolist())} for some in slots]
    common = places[0].keys() & places[1].keys()
    assert common
    for slot in common:
        before, after = (
            (lesson.targets.values[:, place[slot]], lesson.targets.advantages[:, place[slot]])
            for lesson, place in zip(watched.lessons, places, strict=True)
        )
        data, column = watched.lessons[0].data, places[0][slot]
        goes_on = np.where(data.terminated[:, column], 0.0, 0.9)
        valid = data.valid[:, column]
        np.testing.assert_allclose((after[0] - before[0])[valid], goes_on[valid], atol=1e-4)
        np.testing.assert_allclose((after[1] - before[1])[valid], (goes_on - 1)[valid], atol=1e-4)


# ---------------------------------------------------------------- rounds


@pytest.mark.parametrize("updates", [1, 3])
def test_a_round_draws_and_trains_several_batches(updates):
    collector, learner = start(updates_per_round=updates, num_epochs=2, minibatch_size=10_000)
    train_rounds(collector, learner, 1)
    watched = Watched(learner)
    metrics = train_rounds(collector, learner, 1, first=1)
    assert len(watched.draws) == updates
    assert metrics["learn/gradient_steps"] == 2 * updates
    assert learner.state_dict()["version"] == 2
    if updates > 1:
        for drawn in ([d.chosen for d in watched.draws], [d.handles.index for d in watched.draws]):
            assert len({tuple(one) for one in drawn}) > 1
        assert not np.array_equal(watched.lessons[0].values, watched.lessons[1].values)


def test_a_round_without_new_segments_trains_on_the_replay():
    collector, learner = start(normalize_obs=True, fresh_fraction=0.5)
    train_rounds(collector, learner, 2)
    watched, before, seen = Watched(learner), flat(learner), learner.weights()["normalizer.mean"]
    metrics = learner.train(Batch(2, (), 0))
    (draw,) = watched.draws
    assert len(draw.chosen) == 0 and draw.data.valid.shape == (8, 6)
    assert (draw.versions < 2).all()
    assert metrics["pace/avg_replayed_age"] >= 1
    assert not np.array_equal(flat(learner), before)
    np.testing.assert_array_equal(learner.weights()["normalizer.mean"], seen)


def test_samples_are_measured_once_when_they_come():
    """Running statistics are those of all that was collected, however often it is drawn again."""
    collector, learner = start("gaussian", updates_per_round=3)
    seen, streams = [], []
    for version in range(3):
        batch = collect_batch(collector, learner, version, version)
        data = batch.segments[0].data
        seen.append(data["obs"][:-1][data["valid"]])
        streams.append(data["discounted_returns"][data["valid"]])
        learner.train(batch)
    state = learner.state_dict()
    np.testing.assert_allclose(state["obs_moments"]["mean"], np.concatenate(seen).mean(0), rtol=1e-5)
    assert state["obs_moments"]["count"] == len(np.concatenate(seen))
    np.testing.assert_allclose(state["return_moments"]["var"], np.concatenate(streams).var(), rtol=1e-5)


def test_replayed_samples_are_normalised_as_of_now():
    collector, learner = start(normalize_obs=True, normalize_reward=True, fresh_fraction=0.0)
    watched = Watched(learner)
    train_rounds(collector, learner, 3)
    before = learner.state_dict()
    learner.train(Batch(3, (), 0))
    draw, lesson = watched.draws[-1], watched.lessons[-1]
    scale = 1 / np.sqrt(before["obs_moments"]["var"] + 1e-8)
    expected = ((draw.data.obs - before["obs_moments"]["mean"]) * scale).clip(-10, 10)
    np.testing.assert_allclose(lesson.data.obs, expected, atol=1e-4)
    scale = 1 / np.sqrt(before["return_moments"]["var"] + 1e-8)
    np.testing.assert_allclose(lesson.data.rewards, (draw.data.rewards * scale).clip(-10, 10), rtol=1e-4)
    assert np.abs(draw.data.rewards).max() > 3, "the replay keeps rewards as they were"


@pytest.mark.parametrize("case", ["mlp", "gru"])
def test_reset_steps_are_not_trained_on(case):
    results = []
    for spoil in (False, True):
        collector, learner = start(case)
        for version in range(3):
            batch = collect_batch(collector, learner, version, version)
            if spoil:
                data = batch.segments[0].data
                for name, value in (("rewards", 1e6), ("logp", -50.0), ("actions", 1)):
                    data[name][~data["valid"]] = value
            learner.train(batch)
        results.append((flat(learner), leaves(learner)))
    for left, right in zip(*results, strict=True):
        np.testing.assert_array_equal(left, right)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(("field", "place"), [("rewards", (2, 1)), ("logp", (4, 3)), ("obs", (8, 2, 0))])
def test_non_finite_samples_do_not_even_reach_the_replay(field, place):
    collector, learner = start()
    train_rounds(collector, learner, 1)
    digest = learner_digest(learner.state_dict())
    batch = collect_batch(collector, learner, 1, 9)
    batch.segments[0].data[field][place] = np.nan
    with pytest.raises(TrainError, match=f"round 1 was not trained.* in {field}; check the env"):
        learner.train(batch)
    assert learner_digest(learner.state_dict()) == digest


def test_a_diverging_step_is_not_applied():
    collector, learner = start()
    state = learner.state_dict()
    state["parameters"]["critic.0.weight"][0] = np.nan
    learner.load_state_dict(state)
    before = flat(learner)
    with pytest.raises(DivergedError, match=r"round 0 diverged"):
        learner.train(collect_batch(collector, learner))
    np.testing.assert_array_equal(flat(learner), before)


# ---------------------------------------------------------------- learning


class Wanted(FakeWorld):
    """Rewards the action that the observation asks for."""

    def reset(self, seed):
        self._obs = super().reset(seed)
        return self._obs

    def step(self, actions):
        wanted = self._obs[:, 0] > 2
        result = super().step(actions)
        self._obs = result.obs
        return replace(result, rewards=(actions == wanted).astype(np.float64))


@pytest.mark.parametrize(
    "options",
    [
        {"per_for": "critic"},
        {"per_for": "both"},
        {"per_for": "both", "fresh_fraction": 0.0, "updates_per_round": 2},
        {"correction": "vtrace"},
        {"explore_epsilon": 0.3, "explore_temperature": 1.5},
    ],
    ids=["critic", "both", "replay only", "vtrace", "exploring"],
)
def test_it_learns(options):
    world = Wanted((20,) * 16)
    config = settings(
        num_steps=16, batch_size=16, buffer_capacity=64, num_epochs=4, minibatch_size=64, lr=0.01,
        lr_schedule="constant", gamma=0.0, ent_coef=0.0, normalize_obs=True, network={"hidden": (16,)},
        rounds=25, **options,
    )  # fmt: skip
    collector, learner = make_collector(config, world), make_learner(config, world)
    rewards = []
    for version in range(25):
        batch = collect_batch(collector, learner, version, version)
        rewards.append(batch.segments[0].data["rewards"].mean())
        learner.train(batch)
    assert np.mean(rewards[:2]) < 0.65
    assert np.mean(rewards[-3:]) > 0.8
