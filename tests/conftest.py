"""What holds for every test: the user's own cache and device profiles are left alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Timelines that the tests compile are kept for the tests, in a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TUNER_CACHE", str(tmp_path_factory.mktemp("timelines")))
        # What a processor computes is measured once, for the tests too.
        patch.setenv("TUNER_PROFILES", str(tmp_path_factory.mktemp("profiles")))
        yield
