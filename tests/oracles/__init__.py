"""Slow and simple implementations that fast ones are compared with."""
