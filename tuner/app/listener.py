"""What hears of a search while it runs: the command line prints it, a program does otherwise."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tuner.app.device import Notices
from tuner.app.search.plan import SearchPlan, SkippedGpu
from tuner.core.meanwhile import environment, log_level
from tuner.core.records import TrialRecord
from tuner.searches.progress import Progress

Compiling = Callable[[int, int], None]
"""Called with the number of structures that were traced, and of those in all."""
Searching = Callable[[Mapping[str, "Progress"]], None]
"""Called with how far the search of each GPU type is, by its id; those that have begun."""


class Listener(Notices):
    """Hears of a whole search and tells nobody: the base of those that do."""

    def planned(self, plan: SearchPlan, known: tuple[TrialRecord, ...]) -> None:
        """A search was checked and begins; `known` are the trials of earlier ones."""

    def refused(self, refused: SkippedGpu) -> None:
        """No trial is run on a GPU type, where others are searched as well."""

    @contextlib.contextmanager
    def compiling(self) -> Iterator[Compiling]:
        """While a space is predicted; what it yields is called as that goes on."""
        yield lambda done, total: None

    @contextlib.contextmanager
    def searching(self) -> Iterator[Searching]:
        """While trials run; what it yields is called at each change."""
        yield lambda progress: None


SILENT = Listener()


_LOGGERS = ("transformers", "peft", "bitsandbytes", "torch", "huggingface_hub", "accelerate")
_DEPRECATIONS = (FutureWarning, DeprecationWarning)
_MODULES = r"(transformers|peft|bitsandbytes|torch|accelerate|huggingface_hub)(\.|$)"

_ADVICE = r"peft(\.|$)"
"""Whose advice is of what it sets by itself (fan_in_fan_out), or of merging and saving adapters
(tied embeddings): nothing that is done here."""

_UNUSED_PATTERN = "The following (rank|alpha)_pattern keys did not match"
"""Of patterns that peft itself adds for fused experts, where the targets leave some of them out."""


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside, known libraries log errors only, and their deprecations are not shown.

    They concern whoever calls the libraries, which is this program and not its user. Put it
    around the imports too: bitsandbytes and transformers speak while they are imported.
    """
    # Read by transformers when it sets up its logger; a value of the user's stands.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # accelerate imports it, it sets the level of its logger then, and it writes to stdout.
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    with _some_home(), warnings.catch_warnings(), log_level(logging.ERROR, _LOGGERS):
        for category in _DEPRECATIONS:
            warnings.filterwarnings("ignore", category=category, module=_MODULES)
        warnings.filterwarnings("ignore", category=UserWarning, module=_ADVICE)
        warnings.filterwarnings("ignore", message=_UNUSED_PATTERN, module=_ADVICE)
        yield


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


@contextlib.contextmanager
def _some_home() -> Iterator[None]:
    """Inside there is a home directory, for a while, where nobody knows one.

    Ray asks for it while it is imported. In a container, a user id may have no entry.
    """
    try:
        Path.home()
    except RuntimeError:
        with (
            tempfile.TemporaryDirectory(prefix="tuner-home-") as folder,
            environment({"HOME": folder}),
        ):
            yield
        return
    yield
