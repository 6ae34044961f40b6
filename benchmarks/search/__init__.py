"""Searches replayed where the truth is known; `play` is the door for worlds of your own."""

import os

# Before numpy is imported. The matrices are small, and threads only get into each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.search.tables import load_table
from benchmarks.search.worlds import play, scenario_of

__all__ = ["load_table", "play", "scenario_of"]
