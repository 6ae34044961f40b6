"""What a type checker knows of the Python API: mypy reads this file, and nothing runs it."""

from typing import assert_type

import tuner
from tuner.app.api.result import SearchResult, SearchResults
from tuner.core.records import Configuration

assert_type(tuner.search("s", gpu="t4", trials=3), SearchResult)
assert_type(tuner.search("s", gpu=["t4"]), SearchResults)
assert_type(tuner.load_results("s", gpu="t4").best().configuration, Configuration)
assert_type(tuner.estimate("s", gpu="t4", micro_batch=4).fits, bool)
tuner.search("s", gpu="t4", trails=3)  # type: ignore[call-overload]
