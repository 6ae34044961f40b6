"""A recommendation with the ways to apply and export its values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tuner.app.api.values import as_texts
from tuner.app.applying import WAYS, applying
from tuner.app.exporting import export_recommended
from tuner.app.target import Target
from tuner.core.errors import InputError, unknown
from tuner.searches import best as results


@dataclass(frozen=True, slots=True)
class Applied:
    """The changes that `Recommendation.apply` made, or with `dry_run` would make.

    `difference` is a unified diff, `missing` lists values that no file has a key for ("lora_dropout
    = 0.05"), `backups` the dated copy of each old file; empty if nothing was written. As text it is
    the difference.
    """

    difference: str
    missing: tuple[str, ...]
    backups: Mapping[Path, Path]

    def __str__(self) -> str:
        return self.difference


@dataclass(frozen=True, slots=True, repr=False)
class Recommendation(results.BestTrial):
    """The best configuration that fits with its margin, with its numbers.

    `trials` and `fitting` count the configurations that it was chosen from; `conditions` are the
    floors and conditions that they had to meet.
    """

    target: Target = field(kw_only=True, compare=False)

    @classmethod
    def of(cls, best: results.BestTrial, target: Target) -> Recommendation:
        """`best` of a search of `target`."""
        values = {f.name: getattr(best, f.name) for f in dataclasses.fields(results.BestTrial)}
        return cls(**values, target=target)

    def apply(
        self,
        *files: str | Path,
        keys: Mapping[str, str | None] | None = None,
        mappings: str | Sequence[str] = (),
        dry_run: bool = False,
        program: str | Sequence[str] = (),
        check: str = "read",
        force_model: bool = False,
    ) -> Applied:
        """Write the values into your own YAML, JSON, TOML or Python files: `tuner apply`.

        ::

            print(best.apply("train.py", dry_run=True))  # the difference; nothing is written
            best.apply("conf/config.yaml", keys={"micro_batch": "data_loader.batch_size"})

        `keys` says where values belong, as `--map` does: "train.batch_size", ".batch_size"
        (anywhere) or "FILE:KEY"; None leaves a knob out. `mappings` picks mappings of the space, as
        `--as` does. Only the values change, and a dated copy of each file is kept beside it.
        `check` is how values are seen to reach the training, as in `--check`: "read", "emulate" or
        "none"; `program` has the words that start it. Files that train another model than the
        recommendation is for are refused unless `force_model`. If anything cannot be done safely
        or does not arrive, raises one `InputError` with all of it, and writes nothing.
        """
        from tuner.app.arriving import look  # numpy, which takes a while

        if not files:
            raise InputError("apply names no file", hint="name the files to change")
        found = applying(
            self.target.space,
            self,
            [Path(file) for file in files],
            targets=as_texts(mappings),
            maps=[f"{name}={key or ''}" for name, key in (keys or {}).items()],
            words=as_texts(program),
            force_model=force_model,
        )
        if check not in WAYS:
            raise unknown("way to check", check, WAYS)
        look(found.user, found.plan.files, found.wanted, self.target.gpu, way=check).require()
        backups = {} if dry_run or not found.plan.changed else found.write()
        return Applied(found.difference, found.rest, backups)

    def export(self, format_name: str) -> str:
        """The values as the settings of another tool: `tuner export`.

        ::

            print(best.export("trl"))

        Raises `InputError` for an unknown tool, or one that cannot train this.
        """
        return export_recommended(self.target, self, format_name).text
