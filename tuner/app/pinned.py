"""Notes on a prediction whose releases are not those that the program's environment pins."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.version import Version

from tuner.app.cause import has_experts
from tuner.core.records import Doubt
from tuner.core.setup.common import QUANTIZED
from tuner.core.setup.distributed_knobs import Parallelism
from tuner.predict import releases
from tuner.program.pins import Pins, pins_near
from tuner.program.planned import ProgramPlan
from tuner.program.program import Program

_SFT = "TRL SFTTrainer"

OLDEST = {"torch": "2.11", "bitsandbytes": "0.48", "transformers": "4.45", "trl": "0.12"}
"""The oldest releases that can be traced (but for TRL, the bounds of the extra `predict`)."""

_REPLACED = ("torch", "bitsandbytes")
"""Libraries of which a newer release stands for one that can't be traced: they change the kernels,
not what the other libraries allocate."""


Wanted = Mapping[str, tuple[str, Pins]]
"""Specifiers by library, each with the file or environment nearest to the program."""


def pinned_notes(wanted: Wanted, plan: ProgramPlan) -> tuple[str, ...]:
    """The releases that the environment of a program pins otherwise than its prediction has them.

    The releases that differ come first, then the known breaks between them. Empty where every pin
    allows the release of the prediction.
    """
    stack = releases.predicted_stack()
    different = _different(wanted)
    if not different:
        return ()
    paths = " and ".join(dict.fromkeys(_shown(wanted[name][1].path) for name in different))
    theirs = ", ".join(f"{name}{pin} (predicted: {stack[name]})" for name, pin in different.items())
    breaks = releases.breaks_between(different, stack, set(_concerns(plan)))
    return f"{paths} pins {theirs}", *breaks


def with_pinned(wanted: Wanted) -> tuple[str, ...]:
    """The words before `tuner` of a command that predicts with the pinned releases.

    Empty where every pin allows the release of the prediction, or a pinned one can't be traced.
    """
    pinned = {library: specifier for library, (specifier, _) in sorted(wanted.items())}
    old = {
        library
        for library, oldest in OLDEST.items()
        if releases.is_before(pinned.get(library, ""), Version(oldest))
    }
    if not _different(wanted).keys() - old or old - {*_REPLACED}:
        return ()
    needed = [f"{name}{pin}" for name, pin in pinned.items() if name not in old]
    packages = (*needed, f"tuner-fit[predict]{_origin()}")
    return "uv", "run", "--no-project", *(w for name in packages for w in ("--with", name))


def _origin() -> str:
    """The folder that this tuner was installed from; empty for the package index."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        installed = metadata.distribution("tuner-fit").read_text("direct_url.json")
        url = json.loads(installed or "{}").get("url", "")
        return f" @ {url}" if url.startswith("file:") else ""
    return ""


def pinned_doubts(wanted: Wanted) -> set[Doubt]:
    """The doubts about memory where the environment of a program pins other releases."""
    different = _different(wanted)
    if releases.is_before(different.get("torch", ""), Version("2")):
        return {Doubt.OLD_RELEASES}
    return {Doubt.RELEASES} if different else set()


def wanted_releases(program: Program) -> Wanted:
    """The releases that the environment of `program` pins. Lock files are large: ask once."""
    wanted: dict[str, tuple[str, Pins]] = {}
    for pins in pins_near(program, releases.STACK):
        for library, specifier in pins.releases.items():
            wanted.setdefault(library, (specifier, pins))
    return wanted


def _different(wanted: Wanted) -> dict[str, str]:
    """The specifiers that don't allow the release of the prediction."""
    pinned = {library: specifier for library, (specifier, _) in wanted.items()}
    return {
        name: pinned[name] for name in releases.other_releases(pinned, releases.predicted_stack())
    }


def _shown(path: Path) -> str:
    """The path as it can be typed here."""
    folder = Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _concerns(plan: ProgramPlan) -> Iterator[str]:
    configuration = plan.configuration
    if configuration["precision"] in QUANTIZED and has_experts(plan.model):
        yield releases.EXPERTS
    if plan.trainer == _SFT:
        yield releases.SFT
    if configuration["loss"] == "transformers":
        yield releases.LOGITS
    if Parallelism.of(configuration).is_sharded:
        yield releases.FSDP2
