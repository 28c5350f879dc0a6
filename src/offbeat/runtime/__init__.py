"""Where roles live: inline, threads, processes. All drive the same coordinator with the same roles."""
