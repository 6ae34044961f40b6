"""Results of a search, for programs and notebooks."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.app import recommendation
from tuner.app.api import as_bytes, as_share, as_texts
from tuner.app.api.display import frame_of, joined, result_html, results_html
from tuner.app.applying import applying, export_recommended
from tuner.app.search.plan import SkippedGpu
from tuner.app.search.run import SearchedGpu
from tuner.app.target import Target, check_conditions, usable
from tuner.core.gpu import Gpu
from tuner.core.records import TrialRecord
from tuner.searches import best as results
from tuner.searches.view import View

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, slots=True)
class Applied:
    """The changes that `Recommendation.apply` made, or with `dry_run` would make.

    `difference` is a unified diff, `left` says which values the program can't be given and why,
    `backups` has the dated copy of each old file; empty if nothing was written. As text it is the
    difference.
    """

    difference: str
    left: tuple[str, ...]
    backups: Mapping[Path, Path]

    def __str__(self) -> str:
        return self.difference


@dataclass(frozen=True, slots=True, repr=False)
class Recommendation(results.BestTrial):
    """The best configuration that fits with its margin, with its numbers.

    `trials` and `fitting` count the configurations that it was chosen from; `conditions` are the
    minimums and conditions that they had to meet.
    """

    target: Target = field(kw_only=True, compare=False)

    @classmethod
    def of(cls, best: results.BestTrial, target: Target) -> Recommendation:
        """`best` of a search of `target`."""
        values = {f.name: getattr(best, f.name) for f in dataclasses.fields(results.BestTrial)}
        return cls(**values, target=target)

    def apply(self, *program: str | Path, dry_run: bool = False) -> Applied:
        """Write the values into the files of your program: `tuner apply`.

        ::

            print(best.apply("train.py", dry_run=True))  # the difference; nothing is written
            best.apply("conf/config.yaml")

        `program` has your settings files, or the words that start your script. A dated copy of each
        file is kept beside it. Raises `InputError`, and writes nothing, where no value can be
        written, or the change can't be proved.
        """
        target, words = self.target, [str(word) for word in program]
        found = applying(target.space, self.configuration, words, target.arguments)
        left = (*found.refused, *found.lacking)
        return Applied(found.change.difference, left, {} if dry_run else found.change.write())

    def export(self, format_name: str) -> str:
        """The values as the settings of another tool: `tuner export`.

        ::

            print(best.export("trl"))

        Raises `InputError` for an unknown tool, or one that cannot train this.
        """
        return export_recommended(self.target, self, format_name).text


Kept = tempfile.TemporaryDirectory[str]


class SearchResult:
    """The result of a search on one GPU type.

    It keeps what it showed when made: a later search in the same folder does not change it.
    Temporary files (`results=None`) are removed with the last reference to it.
    """

    def __init__(
        self,
        target: Target,
        view: View,
        *,
        where: tuple[str, ...] = (),
        found: SearchedGpu | None = None,
        kept: Kept | None = None,
    ) -> None:
        self._target = target
        self._view = view
        self._where = where
        self._found = found
        self._kept = kept

    @classmethod
    def of(cls, found: SearchedGpu | SkippedGpu, *, kept: Kept | None = None) -> SearchResult:
        """The result of a search that ran. Raises the error of one that was refused."""
        if isinstance(found, SkippedGpu):
            raise found.error
        where = found.plan.options.where
        return cls(found.plan.target, found.view, where=where, found=found, kept=kept)

    @classmethod
    def read(cls, target: Target, where: tuple[str, ...] = ()) -> SearchResult:
        """The result in the journal of `target`. Raises `UnavailableError` without one."""
        check_conditions(target, where)  # report invalid conditions first
        return cls(target, target.view(usable(target).comparable, where), where=where)

    @property
    def space(self) -> str:
        """The name of the search space."""
        return self._target.space.name

    @property
    def gpu(self) -> Gpu:
        """The GPU type."""
        return self._target.gpu

    @property
    def records(self) -> tuple[TrialRecord, ...]:
        """The trials, one per configuration, including comparable earlier ones.

        A record's `fits` says whether it fits with its margin, `source` whether it was measured,
        and `outcome` how it ended.
        """
        return self._view.records

    @property
    def front(self) -> tuple[TrialRecord, ...]:
        """The Pareto front: trials that no other beats in every objective, by rising memory."""
        return self._view.front

    @property
    def source(self) -> str:
        """Source of the front's numbers, such as "predicted" or "measured"."""
        return self._view.source

    @property
    def conditions(self) -> tuple[str, ...]:
        """Conditions that front and recommendation meet: minimums, `where`, settings."""
        return self._view.conditions

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the search, as sentences for people."""
        return self._view.notes

    @property
    def interrupted(self) -> bool:
        """True if Ctrl-C ended the search."""
        return self._found is not None and self._found.result.interrupted

    @property
    def stopped_by(self) -> str | None:
        """Why the search ended: "budget", "time_limit", "nothing_left"; None of a journal."""
        return str(self._found.result.stopped_by) if self._found is not None else None

    @property
    def folder(self) -> Path:
        """The results folder."""
        return self._target.known.path

    @property
    def report(self) -> Path:
        """The report, one HTML file to open in a browser."""
        return self._target.folder.report_html

    @property
    def journal(self) -> Path:
        """The journal, from which all other files can be rebuilt."""
        return self._target.known.journal

    def best(
        self,
        *,
        max_memory: int | str | None = None,
        headroom: float | str | None = None,
        where: str | Sequence[str] | None = None,
        objective: str | None = None,
    ) -> Recommendation:
        """The best configuration that fits with its margin: `tuner best`. Nothing is run.

        ::

            result.best(max_memory="40GiB", headroom="10%", objective="epoch_usd").configuration

        `max_memory` limits the memory, in bytes or as text; `headroom` replaces the search's
        margin, a fraction or text; `where` replaces the search's conditions, and `objective` its
        first objective. Raises `NothingFitsError`.

        ::

            print(result.best().apply("train.py", dry_run=True))  # as `tuner apply` would
        """
        best = self._view.best
        given = (max_memory, headroom, where, objective)
        if best is not None and all(value is None for value in given):
            return Recommendation.of(best, self._target)
        if objective is None and self._view.objectives:
            objective = self._view.objectives[0].name
        records = self.records
        if where is None and self._found is not None:  # what was set is a condition too
            records = tuple(r for r in records if self._found.plan.meets(r.configuration))
        criteria = recommendation.Criteria(
            where=self._where if where is None else as_texts(where),
            headroom=as_share(headroom, "headroom"),
            max_memory=as_bytes(max_memory, "max_memory"),
            objectives=() if objective is None else (objective,),
        )
        chosen = recommendation.recommended_of(self._target, records, criteria)
        return Recommendation.of(chosen, self._target)

    def export(self, format_name: str) -> str:
        """The recommended configuration as the settings of another tool: `tuner export`.

        ::

            print(result.export("trl"))

        Raises `InputError` for a tool that is not known or cannot train this.
        """
        return self.best().export(format_name)

    def to_pandas(self) -> pandas.DataFrame:
        """One row per trial: the values of its configuration, its outcome, its numbers.

        Sizes are in bytes, times in seconds. Raises `UnavailableError` without pandas.
        """
        return frame_of(self._view)

    def __repr__(self) -> str:
        best = self._view.best
        speed = f"{best.evidence.speed.samples_per_s:.3g} samples/s" if best else "nothing fits"
        return (
            f"<SearchResult of {self.space} on {self.gpu.id}: {len(self.records):,} "
            f"configurations, {len(self.front)} on the front, {speed} ({self.source})>"
        )

    def _repr_html_(self) -> str:
        return result_html(self._view)


class SearchResults(Mapping[str, SearchResult]):
    """The results of several GPU types by id, in the order given.

    `refused` says why the other types ran no trial.
    """

    def __init__(
        self, results: Mapping[str, SearchResult], refused: Mapping[str, SkippedGpu] | None = None
    ) -> None:
        self._results = dict(results)
        self._refused = dict(refused or {})

    @classmethod
    def of(
        cls, found: Sequence[SearchedGpu | SkippedGpu], *, kept: Kept | None = None
    ) -> SearchResults:
        """The results of a search of several types."""
        return cls(
            {
                one.plan.target.gpu.id: SearchResult.of(one, kept=kept)
                for one in found
                if isinstance(one, SearchedGpu)
            },
            {one.target.gpu.id: one for one in found if isinstance(one, SkippedGpu)},
        )

    def __getitem__(self, gpu: str) -> SearchResult:
        return self._results[gpu]

    def __iter__(self) -> Iterator[str]:
        return iter(self._results)

    def __len__(self) -> int:
        return len(self._results)

    @property
    def refused(self) -> Mapping[str, str]:
        """Why a GPU type ran no trial, by its id."""
        return {gpu: one.reason for gpu, one in self._refused.items()}

    def comparison(self, **choice: Any) -> tuple[recommendation.Recommended, ...]:
        """The recommendation of each type, the cheapest epoch first, then the fastest.

        `choice` are arguments of `SearchResult.best`. Types without a recommendation come last,
        with the reason.
        """
        targets = [result._target for result in self.values()]
        compared = recommendation.answers(
            targets, lambda target: self[target.gpu.id].best(**choice)
        )
        left = [one.answer for one in self._refused.values()]
        return (*compared, *left)

    def best(self, **choice: Any) -> Recommendation:
        """The first of `comparison`. Raises `NothingFitsError` where there is none."""
        found = self.comparison(**choice)
        recommendation.require_an_answer(found)
        best = found[0].best
        assert isinstance(best, Recommendation)  # those that have one come first
        return best

    def to_pandas(self) -> pandas.DataFrame:
        """The rows of all types; see `SearchResult.to_pandas`."""
        return joined([result.to_pandas() for result in self.values()])

    def __repr__(self) -> str:
        lines = [*map(repr, self.values())]
        lines += [f"<{gpu}: not searched: {reason}>" for gpu, reason in self.refused.items()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return results_html(self.comparison(), [one._view for one in self.values()])
