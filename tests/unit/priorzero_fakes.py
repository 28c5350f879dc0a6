"""Small models, a game on three numbers, and priors that know something."""

from __future__ import annotations

import numpy as np

from offbeat.envs.text import Scene
from offbeat.llm.model import Decoder
from offbeat.llm.shape import Shape
from offbeat.llm.words import WordTokenizer

ACTIONS = ("go north", "go up", "take rope", "take lamp", "use rope on well")
PROMPT = "You want water.\nYou are at a well.\n>"


def make_tokenizer():
    return WordTokenizer.of([PROMPT + "".join(f" {action}\n" for action in ACTIONS)] * 2)


def make_model(tokenizer, seed=0):
    shape = Shape("Qwen3ForCausalLM", tokenizer.vocab_size, 16, 1, 2, 2, 8, 16, qk_norm=True, tied=True)
    model = Decoder(shape).initialize(seed)
    for weight in model.weights().values():
        weight.mul_(4.0)  # fresh weights hold all labels for nearly equally likely
    return model


class CountingGame:
    """Says a number from 0 up; ``plus`` adds one and scores, others lead back to 0. Over at ``length``."""

    name = "counting"

    def __init__(self, length=4, num_others=3):
        self.length, self.num_others, self.at = length, num_others, 0
        self.num_steps = 0

    @property
    def max_score(self):
        return float(self.length)

    def start(self):
        self.at = 0
        return self.scene()

    def scene(self):
        room = f"The number is {self.at}."
        return Scene("", room, "", "Count.", float(self.at), self.at == self.length, room)

    def actions(self):
        return () if self.at == self.length else (*(f"reset {i}" for i in range(self.num_others)), "plus")

    def step(self, command):
        self.num_steps += 1
        self.at = self.at + 1 if command == "plus" else 0
        return self.scene()

    def save(self):
        return bytes([self.at])

    def restore(self, state):
        self.at = state[0]

    def close(self):
        pass

    def expert(self):
        raise AssertionError("nobody may ask for the solution")


class KnowingPrior:
    """Holds what ``answers`` says of a prompt for right, with this probability."""

    def __init__(self, answers, probability=0.9):
        self.answers, self.probability = answers, probability
        self.version = "knowing"
        self.asked = []

    def log_probs(self, prompts, actions):
        self.asked += prompts
        return [self._one(prompt, own) for prompt, own in zip(prompts, actions, strict=True)]

    def _one(self, prompt, own):
        right = [action == self.answers(prompt) for action in own]
        if not any(right) or len(own) == 1:
            return np.full(len(own), -np.log(len(own)))
        rest = (1 - self.probability) / (len(own) - 1)
        return np.log(np.where(right, self.probability, rest))
