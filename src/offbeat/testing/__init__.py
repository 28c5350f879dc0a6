"""Help for testing runs: environments that misbehave on command, and a wide collector with its learner."""

from offbeat.testing.token_machine import TokenMachine
from offbeat.testing.token_model import TokenLearner

__all__ = ["TokenLearner", "TokenMachine"]
