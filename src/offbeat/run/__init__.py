"""One run: the driver with its tables, and the ways to start, continue and repeat it."""
