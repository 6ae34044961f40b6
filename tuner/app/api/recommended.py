"""A recommendation with the ways to apply and export its values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tuner.app.applying import applying
from tuner.app.exporting import export_recommended
from tuner.app.target import Target
from tuner.searches import best as results


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
        found = applying(self.target.space, self.configuration, [str(word) for word in program])
        left = (*found.refused, *found.lacking)
        return Applied(found.change.difference, left, {} if dry_run else found.change.write())

    def export(self, format_name: str) -> str:
        """The values as the settings of another tool: `tuner export`.

        ::

            print(best.export("trl"))

        Raises `InputError` for an unknown tool, or one that cannot train this.
        """
        return export_recommended(self.target, self, format_name).text
