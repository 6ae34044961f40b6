"""`memory_course.json`: the recommended configuration's memory over a step, kept for the report.

Working it out takes a trace at full depth, seconds; so it is done once for each
recommendation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.core.errors import InputError
from tuner.core.files import read_file
from tuner.searches.best import BestTrial

if TYPE_CHECKING:
    from tuner.cost.step_details import MemoryTimeline

MAX_BYTES = 64 << 20

TimelineOf = Callable[["BestTrial"], "MemoryTimeline | None"]
"""Works a timeline out; None where nothing is known of the code that trains."""


def load_or_trace(path: Path, best: BestTrial, trace: TimelineOf) -> MemoryTimeline | None:
    """The timeline in `path` where it is of `best`, else a new one. Writes nothing."""
    return _stored(path, best) or trace(best)


def timeline_json(timeline: MemoryTimeline, best: BestTrial) -> str:
    """The text of the file."""
    return json.dumps({"of": _subject(best), "course": timeline.to_dict()}, separators=(",", ":"))


def _subject(best: BestTrial) -> dict[str, Any]:
    return {
        "configuration": best.configuration.to_dict(),
        "gpu": best.gpu.id,
        "gpu_memory_bytes": best.gpu.memory_bytes,
        "versions": dict(best.record.versions),
    }


def _stored(path: Path, best: BestTrial) -> MemoryTimeline | None:
    """What `path` holds, if it is of `best` and whole; None to trace it again."""
    from tuner.cost.step_details import MemoryTimeline

    try:
        found = json.loads(read_file(path, MAX_BYTES))
        return MemoryTimeline.from_dict(found["course"]) if found["of"] == _subject(best) else None
    # None yet, edited, or of another version.
    except (
        OSError, InputError, KeyError, TypeError, ValueError, AttributeError, RecursionError
    ):  # fmt: skip
        return None
