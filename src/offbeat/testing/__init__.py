"""Help for testing runs: environments that misbehave on command."""
