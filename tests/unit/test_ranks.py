"""A learner of several ranks: the same steps as one rank takes, and what happens when ranks fail."""

import math
import threading
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from offbeat.algorithms.ppo.learner import PPOLearner
from offbeat.algorithms.ppo.minibatches import Cut
from offbeat.errors import ConfigError, DivergedError, LearnerLost, TrainError
from offbeat.models import ranks as ranks_module
from offbeat.models.ranks import choose_backend, choose_device
from offbeat.models.spec import network_spec
from offbeat.roles import Learner, Ranks, SingleRank
from offbeat.runtime.ranks import PeerGone, RankedLearner, checksum_of
from offbeat.types import Batch
from tests.unit.ppo_fakes import FakeWorld, collect_batch, make_collector, settings
from tests.unit.test_ppo_collector import CASES

LENGTHS = (3, 5, 100, 7)


class ThreadRanks:
    """Ranks that are threads of this process; sums are made in the order of ranks."""

    def __init__(self, rank, size, shared):
        self.rank, self.size = rank, size
        self._barrier, self._slots = shared

    def sum_(self, tensor):
        self._slots[self.rank] = tensor.clone()
        self._barrier.wait(30)
        total = sum(self._slots[1:], start=self._slots[0].clone())
        self._barrier.wait(30)
        tensor.copy_(total)


def all_ranks(size):
    shared = (threading.Barrier(size), [None] * size)
    return [ThreadRanks(rank, size, shared) for rank in range(size)] if size > 1 else [SingleRank()]


def together(jobs):
    """Run each job in a thread; return what they returned or raised."""
    results = [None] * len(jobs)

    def run(index):
        try:
            results[index] = jobs[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


class Team:
    """A collector and the ranks of one learner."""

    def __init__(self, size, case="mlp", lengths=LENGTHS, **options):
        defaults, observation_space, action_space = CASES[case]
        world = FakeWorld(lengths, observation_space, action_space)
        config = settings(**(defaults | options))
        spec = network_spec(config.network, world.single_observation_space, world.single_action_space)
        self.collector = make_collector(config, world)
        self.learners = [PPOLearner(config, spec, seed=0, ranks=ranks) for ranks in all_ranks(size)]

    def batch(self, version):
        return collect_batch(self.collector, self.learners[0], version, 2 * version, num_segments=2)

    def train(self, version=0, batch=None):
        batch = batch or self.batch(version)
        return together([lambda learner=learner: learner.train(batch) for learner in self.learners])


def flat(learner):
    return np.concatenate([array.ravel() for array in learner.state_dict()["parameters"].values()])


def same_batches(alone, team, rounds):
    """Train both on the batches that the first one collects; return the last metrics of each."""
    for version in range(rounds):
        batch = alone.batch(version)
        expected, found = alone.train(version, batch), team.train(version, batch)
    return expected[0], found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_take_the_steps_of_a_learner_alone(case, size):
    alone, team = Team(1, case), Team(size, case)
    expected, found = same_batches(alone, team, rounds=3)
    for learner, metrics in zip(team.learners, found, strict=True):
        np.testing.assert_allclose(flat(learner), flat(alone.learners[0]), rtol=1e-4, atol=1e-6)
        assert metrics == found[0]
        assert set(metrics) == set(expected)
    for name, value in expected.items():
        assert found[0][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    digests = {learner.checksum() for learner in team.learners}
    assert len(digests) == 1
    assert all(np.array_equal(flat(learner), flat(team.learners[0])) for learner in team.learners)


def test_each_rank_differentiates_only_its_share():
    """Without the other's part, a rank's gradient would be that of half a minibatch."""
    team = Team(2)
    counts = []
    for learner in team.learners:
        evaluate = learner._backward
        seen = []
        counts.append(seen)

        def counting(network, samples, ent_coef, share, evaluate=evaluate, seen=seen):
            seen.append(len(samples))
            return evaluate(network, samples, ent_coef, share)

        learner._backward = counting
    batch = team.batch(0)
    team.train(0, batch)
    valid = sum(int(segment.data["valid"].sum()) for segment in batch.segments)
    assert sum(counts[0]) + sum(counts[1]) == 2 * valid, "two epochs over all samples, between the two"
    assert abs(sum(counts[0]) - sum(counts[1])) <= 2 * len(counts[0])


@pytest.mark.parametrize("case", ["mlp", "gru"])
def test_minibatches_with_fewer_samples_than_ranks(case):
    options = {"minibatch_size": 8, "lengths": (3, 5)} if case == "gru" else {"minibatch_size": 2}
    alone, team = Team(1, case, **options), Team(4, case, **options)
    same_batches(alone, team, rounds=2)
    for learner in team.learners:
        np.testing.assert_allclose(flat(learner), flat(alone.learners[0]), rtol=1e-3, atol=1e-5)


def test_gradient_accumulation_with_ranks():
    alone, team = (
        Team(1, grad_accumulation=3, minibatch_size=24),
        Team(2, grad_accumulation=3, minibatch_size=24),
    )
    same_batches(alone, team, rounds=2)
    np.testing.assert_allclose(flat(team.learners[1]), flat(alone.learners[0]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", ["mlp", "gru"])
def test_log_ratios_of_all_ranks_are_reported(case):
    """With steps so large that the policy moves: each rank alone knows only its own samples' ratios."""
    options = {"lr": 0.03, "num_epochs": 2, "minibatch_size": 24}
    expected, found = same_batches(Team(1, case, **options), Team(3, case, **options), rounds=1)
    assert expected["learn/approx_kl"] > 1e-3
    for name in ("approx_kl", "clip_fraction", "ess", "behaviour_kl"):
        assert found[2][f"learn/{name}"] == pytest.approx(expected[f"learn/{name}"], rel=1e-3, abs=1e-7), name


def test_all_ranks_end_a_round_at_the_same_epoch():
    options = {"lr": 0.1, "num_epochs": 10, "target_kl": 0.01}
    alone, team = Team(1, **options), Team(2, **options)
    expected, found = same_batches(alone, team, rounds=1)
    assert [metrics["learn/num_epochs"] for metrics in found] == [expected["learn/num_epochs"]] * 2
    assert found[0]["learn/num_epochs"] < 10


def test_all_ranks_notice_divergence_and_none_applies_the_step():
    team = Team(2)
    state = team.learners[0].state_dict()
    state["parameters"]["critic.0.weight"][0] = np.nan
    for learner in team.learners:
        learner.load_state_dict(state)
    before = flat(team.learners[0])
    errors = team.train()
    assert all(isinstance(error, DivergedError) for error in errors)
    for learner in team.learners:
        np.testing.assert_array_equal(flat(learner), before)


def test_divergence_in_one_rank_s_share_is_seen_by_all():
    team = Team(2, num_epochs=1, minibatch_size=1000)
    batch = team.batch(0)
    judged = team.learners[1]._backward

    def spoilt(network, samples, ent_coef, share):
        terms = judged(network, samples, ent_coef, share)
        return replace(terms, value=terms.value * math.nan)

    team.learners[1]._backward = spoilt
    errors = team.train(0, batch)
    assert [type(error) for error in errors] == [DivergedError, DivergedError]


def test_shares_cover_a_minibatch():
    for size in (1, 2, 3, 7):
        for start, end in ((0, 10), (5, 7), (3, 3), (0, 1)):
            shares = [Cut(rank, size, 1).share(start, end) for rank in range(size)]
            assert shares[0][0] == start and shares[-1][1] == end
            assert all(left[1] == right[0] for left, right in pairwise(shares))
            widths = [stop - begin for begin, stop in shares]
            assert max(widths) - min(widths) <= 1


def test_pieces_of_a_share():
    assert Cut(0, 1, 3).pieces(0, 9) == [(0, 3), (3, 6), (6, 9)]
    assert Cut(0, 2, 3).pieces(0, 4) == [(0, 2), (2, 4)], "half of the samples in half of the pieces"
    assert Cut(0, 2, 1).pieces(4, 4) == []


# ---------------------------------------------------------------- rank 0 and its peers


class FakePeer:
    """Answers as it is told; each entry is an answer, None for silence or an exception."""

    def __init__(self, number, *answers):
        self.name, self.pid = f"learner_rank_{number}", 1000 + number
        self.answers, self.told, self.ended = list(answers), [], None
        self.illness = None

    def send(self, packed):
        self.told.append(packed)

    def receive(self, timeout_s):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def failure_reason(self):
        return self.illness

    def stack(self):
        return "File exchange.py, line 7"

    def kill(self):
        pass

    def end(self, timeout_s):
        self.ended = timeout_s


class FakeLauncher:
    closed = False

    def pack(self, request):
        return request[0]

    def close(self):
        self.closed = True


class FakeRanks:
    rank, size, is_nccl = 0, 3, False

    def abort(self):
        raise AssertionError("gloo needs no abort")

    def close(self):
        pass


class Counter:
    """A learner whose parameters are the number of rounds; ``error`` is raised instead."""

    def __init__(self, error=None):
        self.rounds, self.error = 0, error

    def train(self, batch):
        if self.error is not None:
            raise self.error
        self.rounds += 1
        return {"learn/loss": 1.0}

    def checksum(self):
        return self.rounds

    def weights(self):
        return {"rounds": np.array([self.rounds])}

    def state_dict(self):
        return {"rounds": self.rounds}

    def load_state_dict(self, state):
        self.rounds = state["rounds"]


@pytest.fixture
def ranked():
    made = []

    def make(*peers, error=None):
        made.append(RankedLearner(Counter(error), FakeRanks(), FakeLauncher(), peers, timeout_s=5.0))
        return made[-1]

    yield make
    for learner in made:
        learner.close()


BATCH = Batch(4, (), 0)


def test_a_round_is_told_to_all_ranks_and_compared(ranked):
    peers = FakePeer(1, ("done", 1), ("done", 7)), FakePeer(2, ("done", 1), ("done", 7))
    learner = ranked(*peers)
    assert isinstance(learner, Learner)
    assert learner.train(BATCH) == {"learn/loss": 1.0}
    learner.load_state_dict({"rounds": 7})
    assert peers[0].told == peers[1].told == ["train", "load"]
    assert learner.state_dict() == {"rounds": 7}
    assert learner.weights()["rounds"] == 7
    assert learner.pids() == {"learner_rank_1": 1001, "learner_rank_2": 1002}
    learner.close()
    assert all(peer.ended > 0 for peer in peers), "healthy ranks are asked to stop"
    assert learner._launcher.closed
    with pytest.raises(LearnerLost):
        learner.train(BATCH)


def test_ranks_that_come_apart_are_named(ranked):
    learner = ranked(FakePeer(1, ("done", 1)), FakePeer(2, ("done", 99)))
    with pytest.raises(
        TrainError, match=r"came apart in round 4: learner_rank_2 has checksum 99, rank 0 has 1"
    ):
        learner.train(BATCH)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            PeerGone("learner_rank_2 (pid 9) was killed by SIGKILL"),
            r"round 4: learner_rank_2 \(pid 9\) was killed",
        ),
        (
            ("error", "in the request 'train'", "ValueError: no"),
            r"round 4: learner_rank_2 raised:\nValueError: no",
        ),
        (
            None,
            r"learner_rank_2 did not answer within 5 s \(learner.timeout_s\), it was here:\nFile exchange",
        ),
    ],
)
@pytest.mark.parametrize("is_noticed", [False, True], ids=["after the round", "in an exchange"])
def test_a_lost_rank_is_named(ranked, answer, text, is_noticed):
    """The other rank is only cut off: it is not to blame."""
    error = LearnerLost("connection closed by peer") if is_noticed else None
    victim = FakePeer(1, ("cut off", "waited in vain") if is_noticed else ("done", 1))
    peers = victim, FakePeer(2, answer)
    learner = ranked(*peers, error=error)
    with pytest.raises(LearnerLost, match=text):
        learner.train(BATCH)
    assert list(learner.lost) == ["learner_rank_2"]
    with pytest.raises(LearnerLost, match="started again"):
        learner.train(BATCH)
    learner.close()
    assert [peer.ended for peer in peers] == [0.0, 0.0], "ranks that may hang are killed"


def test_what_the_watch_found_explains_a_lost_rank(ranked):
    peer = FakePeer(1, PeerGone("learner_rank_1 was killed by SIGKILL"))
    learner = ranked(peer)
    peer.illness = "learner_rank_1 gave no sign of life"
    for _ in range(600):
        if learner._watch.failures:
            break
        time.sleep(0.05)
    with pytest.raises(LearnerLost, match="round 4: learner_rank_1 gave no sign of life"):
        learner.train(BATCH)


def test_a_learner_that_refuses_a_round_can_go_on(ranked):
    peer = FakePeer(1, ("refused", "NaN"), ("done", 1))
    learner = ranked(peer, error=TrainError("the samples hold NaN"))
    with pytest.raises(TrainError, match="the samples hold NaN"):
        learner.train(BATCH)
    learner._own.error = None
    learner.train(BATCH)


def test_an_exception_of_rank_0_is_its_own(ranked):
    learner = ranked(FakePeer(1), error=ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        learner.train(BATCH)


def test_checksum_of_any_learner():
    class Plain:
        def __init__(self, value):
            self._value = value

        def weights(self):
            return {"w": np.full(5, self._value)}

    assert checksum_of(Plain(1.0)) == checksum_of(Plain(1.0)) != checksum_of(Plain(1.0 + 1e-12))
    team = Team(1)
    before = team.learners[0].checksum()
    team.train()
    assert team.learners[0].checksum() != before


# ---------------------------------------------------------------- devices


@pytest.fixture
def gpus(monkeypatch):
    def have(count):
        monkeypatch.setattr(ranks_module.torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(ranks_module.torch.cuda, "device_count", lambda: count)

    return have


def test_ranks_take_gpus_in_turn(gpus):
    gpus(2)
    assert [choose_device("cuda", rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert choose_device("auto", 3) == torch.device("cuda:1")
    assert choose_device("cpu", 1).type == "cpu"
    gpus(0)
    assert choose_device("auto", 1).type == "cpu"
    with pytest.raises(ConfigError, match=r"trainer\.device is cuda, but torch sees no GPU"):
        choose_device("cuda")


def test_nccl_only_where_each_rank_has_a_gpu(gpus):
    gpus(2)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert choose_backend("auto", cuda, ranks_per_node=2, gpus_per_node=0) == "nccl"
    assert choose_backend("auto", cuda, ranks_per_node=4, gpus_per_node=0) == "gloo"
    assert choose_backend("auto", cuda, ranks_per_node=4, gpus_per_node=4) == "nccl"
    assert choose_backend("gloo", cuda, ranks_per_node=1, gpus_per_node=0) == "gloo"
    assert choose_backend("auto", cpu, ranks_per_node=1, gpus_per_node=0) == "gloo"
    with pytest.raises(ConfigError, match="a GPU for each of the 4 ranks"):
        choose_backend("nccl", cuda, ranks_per_node=4, gpus_per_node=0)


def test_alone_is_the_ranks_of_one():
    ranks: Ranks = SingleRank()
    tensor = torch.ones(2)
    ranks.sum_(tensor)
    assert (ranks.rank, ranks.size, tensor.tolist()) == (0, 1, [1.0, 1.0])


def test_ranks_whose_connection_is_closed_while_it_is_made_meet_again(monkeypatch):
    distributed = torch.distributed
    prefixed, group = distributed.PrefixStore, distributed.ProcessGroupGloo

    class Shaky:
        _Options, create_device = group._Options, group.create_device

        def __new__(cls, named, *rest):
            name, store = named
            if name == "first":
                raise RuntimeError("Connection closed by peer")
            return group(store, *rest)

    monkeypatch.setattr(distributed, "PrefixStore", lambda name, store: (name, prefixed(name, store)))
    monkeypatch.setattr(distributed, "ProcessGroupGloo", Shaky)
    point = ranks_module.RendezvousHost(ranks_module.THIS_MACHINE, 2, "gloo", 20.0, 20.0)
    sums = {}

    def meet(rank):
        store = point.store if rank == 0 else None
        ranks = ranks_module.TorchRanks(point.rendezvous, rank, torch.device("cpu"), store)
        both = torch.tensor([1.0 + rank])
        ranks.sum_(both)
        sums[rank] = both.item()
        ranks.close()

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sums == {0: 3.0, 1: 3.0}
