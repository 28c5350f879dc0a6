"""A net of kept runs: what a run does, recorded through public calls and compared with kept files."""
