"""MAPPO of BenchMARL on MPE's simple_spread: prints environment steps per processor second, imports left out.

Usage: ``benchmarl_mappo.py ROUNDS NUM_ENVS FRAMES EPOCHS``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

import torch
from benchmarl.algorithms import MappoConfig
from benchmarl.environments import PettingZooTask
from benchmarl.experiment import Callback, Experiment, ExperimentConfig
from benchmarl.models.mlp import MlpConfig


class Clock(Callback):
    """Notes the processor time when a batch has been collected: one iteration apart each."""

    def __init__(self) -> None:
        super().__init__()
        self.spent_s: list[float] = []

    def on_batch_collected(self, batch: object) -> None:
        self.spent_s.append(time.process_time())


def main() -> None:
    rounds, num_envs, frames, epochs = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    config = ExperimentConfig.get_from_yaml()
    config.sampling_device = config.train_device = config.buffer_device = "cpu"
    config.on_policy_collected_frames_per_batch = frames
    config.on_policy_n_envs_per_worker = num_envs
    config.on_policy_n_minibatch_iters = epochs
    config.on_policy_minibatch_size = frames
    config.max_n_frames = rounds * frames
    config.max_n_iters = rounds
    config.lr = 7e-4
    config.prefer_continuous_actions = False
    config.evaluation = config.render = False
    config.loggers = []
    config.create_json = False
    config.checkpoint_interval = 0
    with tempfile.TemporaryDirectory() as directory:
        config.save_folder = directory
        networks = MlpConfig(num_cells=[64, 64], layer_class=torch.nn.Linear, activation_class=torch.nn.ReLU)
        clock, task = Clock(), PettingZooTask.SIMPLE_SPREAD.get_from_yaml()
        task.config["max_cycles"] = 25
        Experiment(
            task=task,
            algorithm_config=MappoConfig.get_from_yaml(),
            model_config=networks,
            critic_model_config=networks,
            seed=1,
            config=config,
            callbacks=[clock],
        ).run()
    spent_s = clock.spent_s[-1] - clock.spent_s[0]
    print(json.dumps({"steps_per_cpu_s": (len(clock.spent_s) - 1) * frames / spent_s}))


if __name__ == "__main__":
    main()
