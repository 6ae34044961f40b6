"""Which process runs which tests: long files first, and the tests of some files each by itself.

A file stays in one process, so that its cluster or model is made once. Where one file takes minutes
and its tests share nothing, that leaves the other process idle at the end.
"""

from collections.abc import Sequence

import pytest
from xdist.scheduler import LoadFileScheduling

APART = (
    "tests/test_docs.py",
    "tests/test_cli_search_stages.py",
    "tests/test_emulated_trials.py",
    "tests/test_emulated_check.py",
    "tests/test_emulate.py",
    "tests/test_emulator_libraries.py",
    "tests/test_emulated_pairs.py",
    "tests/test_workload_contrastive.py",
    "tests/test_memory_order.py",
    "tests/test_emulated_settings.py",
    "tests/test_faults_terminal.py",
    "tests/test_shipped_spaces.py",
)
"""Files whose tests share nothing that takes long to make; the longest first."""

TOGETHER = (
    "tests/test_extending.py",
    "tests/test_tune_killed.py",
    "tests/test_ray_jobs.py",
    "tests/test_tune_search.py",
    "tests/test_report_browser.py",
    "tests/test_tune_nodes.py",
    "tests/test_tune_metrics.py",
    "tests/test_mixed_search.py",
    "tests/test_predictor.py",
    "tests/test_import_context.py",
    "tests/test_fine_tuned_models.py",
    "tests/test_emulator_pricing.py",
    "tests/test_emulated_examples.py",
)
"""Other long files, the longest first. All that are named nowhere come after these."""

_ORDER = {path: place for place, path in enumerate((*APART, *TOGETHER))}


def file_of(nodeid: str) -> str:
    """The file of a test."""
    return nodeid.partition("::")[0]


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Long files first; within a file, and among short ones, the order stays."""
    return sorted(items, key=lambda item: _ORDER.get(file_of(item.nodeid), len(_ORDER)))


class LongestFirst(LoadFileScheduling):
    """A file to a process in the order of `in_order`, but each test of `APART` by itself."""

    def _split_scope(self, nodeid: str) -> str:
        path = file_of(nodeid)
        return nodeid if path in APART else path
