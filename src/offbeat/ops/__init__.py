"""Pure maths: advantages, targets, losses, statistics, schedules. Only ``losses`` needs torch."""
