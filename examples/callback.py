"""Watch a run from a callback: an alarm, a metric of your own, and a hand on the dial while it runs."""

import argparse

import offbeat
from offbeat.observe.callbacks import CollectorLostInfo, EvalInfo, RoundInfo, RunInfo


class Watch(offbeat.Callback):
    """Starts on-policy, goes asynchronous once the policy is no longer a beginner, and warns."""

    def __init__(self, warm_up_rounds: int, least_ess: float = 0.8) -> None:
        self._warm_up_rounds = warm_up_rounds
        self._least_ess = least_ess
        self._best = float("-inf")

    def on_start(self, info: RunInfo) -> None:
        """Keep the handles that a run gives out."""
        self._turn, self._stop = info.turn, info.stop

    def on_round(self, info: RoundInfo) -> dict[str, float]:
        """Called after each round; what it returns is written wherever the other metrics go."""
        if info.version == self._warm_up_rounds:
            print(f"round {info.version}: turning off_policy_degree from 0 to 2")
            self._turn(2)
        if info.metrics["learn/ess"] < self._least_ess:
            print(f"ALARM round {info.version}: effective sample size {info.metrics['learn/ess']:.2f}")
        self._best = max(self._best, float(info.metrics["rollout/return_mean_100"]))
        return {"mine/best_return": self._best}

    def on_eval(self, info: EvalInfo) -> None:
        """Stop early, cleanly: the run is saved and can be resumed."""
        if info.metrics["eval/return_mean"] >= 475:
            self._stop(f"solved at version {info.version}")

    def on_collector_lost(self, info: CollectorLostInfo) -> None:
        """A place for a message to your phone."""
        print(f"ALARM collector {info.collector} lost: {info.reason}")


def main(rounds):
    settings = {"eval.interval_rounds": 10, "async_training.enable_async_eval": True, "run.name": "watched"}
    # The correction must be the one for stale data although the run starts at off_policy_degree 0.
    settings["algorithm.correction"] = "decoupled"
    watch = Watch(warm_up_rounds=max(1, rounds // 5))
    result = offbeat.train("cartpole-ppo", rounds=rounds, overrides=settings, callbacks=[watch])
    dial, best = (result.metrics[name] for name in ("pace/off_policy_degree", "mine/best_return"))
    print(f"{result.reason} after {result.rounds} rounds; dial at {dial:.0f}, best return {best:.1f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    main(parser.parse_args().rounds)
