"""Writes the files of the results of one GPU type or of several, which show each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.app.target import Target
from tuner.core.records import TrialRecord
from tuner.report.memory_timeline_file import TimelineOf
from tuner.report.writing import write_tables, write_view
from tuner.searches.facts import SpaceFacts
from tuner.searches.view import View, build_view


@dataclass(frozen=True, slots=True)
class Contents:
    """What the folder of `target` is written from.

    `how` are the arguments of `build_view` that choose among the records and describe them.
    """

    target: Target
    facts: SpaceFacts
    records: Sequence[TrialRecord]
    how: Mapping[str, Any]
    timeline_of: TimelineOf


def write_results(contents: Sequence[Contents]) -> list[View]:
    """Write every file of each folder, and return what they show.

    The tables of all come first: each report shows the fronts of the other GPU types beside it.
    """
    views = [build_view(one.records, one.facts, one.target.gpu, **one.how) for one in contents]
    folders = [one.target.folder for one in contents]
    if len(contents) > 1:
        for folder, view in zip(folders, views, strict=True):
            write_tables(folder, view)
    together = [folder.path.name for folder in folders]
    for one, folder, view in zip(contents, folders, views, strict=True):
        write_view(folder, view, timeline_of=one.timeline_of, written_together=together)
    return views
