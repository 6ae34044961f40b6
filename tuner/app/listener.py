"""Listeners that follow a running search. The command line's listener prints what it hears."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.core.meanwhile import environment, log_level
from tuner.core.records import TrialRecord
from tuner.predict.releases import use_todays_names
from tuner.searches.progress import Progress

if TYPE_CHECKING:
    from tuner.app.search.plan import SearchPlan, SkippedGpu

Compiling = Callable[[int, int], None]
"""Called with the number of structures traced so far, and their total number."""
Searching = Callable[[Mapping[str, "Progress"]], None]
"""Called with the progress of each search that has begun, by the id of its GPU type."""


class Listener:
    """Base class for listeners to a whole search: every method does nothing."""

    def say(self, text: str) -> None:
        """Tell what happened, in one sentence. The answer holds without it."""

    def warn(self, text: str) -> None:
        """Tell what the user should hear even if all other notices are off."""

    def note(self, text: str) -> None:
        """Tell something about the space that its author may want to know."""

    def planned(self, plan: SearchPlan, known: tuple[TrialRecord, ...]) -> None:
        """A checked search begins; `known` are the trials of earlier searches."""

    def refused(self, refused: SkippedGpu) -> None:
        """One of several GPU types is skipped: no trial runs on it."""

    def compiling(self) -> AbstractContextManager[Compiling]:
        """Wraps the prediction of a space. The function that it gives is called as it advances."""
        return contextlib.nullcontext(lambda done, total: None)

    def searching(self) -> AbstractContextManager[Searching]:
        """Wraps the running of trials. The function that it gives is called at each change."""
        return contextlib.nullcontext(lambda progress: None)


SILENT = Listener()


_LOGGERS = ("transformers", "peft", "bitsandbytes", "torch", "huggingface_hub", "accelerate")
_DEPRECATIONS = (FutureWarning, DeprecationWarning)
_MODULES = r"(transformers|peft|bitsandbytes|torch|accelerate|huggingface_hub)(\.|$)"

_ADVICE = r"peft(\.|$)"
"""Modules whose warnings don't apply here: they concern a setting that peft corrects by itself
(fan_in_fan_out), or merging and saving adapters (tied embeddings)."""

_UNUSED_PATTERN = "The following (rank|alpha)_pattern keys did not match"
"""peft's warning about the patterns that it adds for fused experts not among the targets."""


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside, known libraries log errors only, and their deprecations are not shown.

    Older releases of transformers get the names that a trace asks for.

    Deprecations concern the caller of the libraries: tuner, not its user. Put it around
    imports too: bitsandbytes and transformers print messages while they are imported.
    """
    # Read by transformers when it sets up its logger; the user's own value is kept.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # accelerate imports DeepSpeed, which then sets its own log level and writes to stdout.
    logging.getLogger("DeepSpeed").addFilter(lambda one: one.levelno >= logging.ERROR)
    with _some_home(), warnings.catch_warnings(), log_level(logging.ERROR, _LOGGERS):
        for category in _DEPRECATIONS:
            warnings.filterwarnings("ignore", category=category, module=_MODULES)
        warnings.filterwarnings("ignore", category=UserWarning, module=_ADVICE)
        warnings.filterwarnings("ignore", message=_UNUSED_PATTERN, module=_ADVICE)
        use_todays_names()
        yield


@contextlib.contextmanager
def _some_home() -> Iterator[None]:
    """Provide a temporary home directory if the user has none.

    Ray looks it up while it is imported. In a container, a user id may have no entry.
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
