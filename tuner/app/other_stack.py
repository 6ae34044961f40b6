"""Notes on a prediction whose releases are not those that the program's environment pins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from tuner.core.environment import STACK_VARIABLE
from tuner.core.records import Doubt
from tuner.core.setup.common import QUANTIZED
from tuner.core.setup.distributed_knobs import Parallelism
from tuner.predict import releases
from tuner.program.pins import Pins, pins_near
from tuner.program.planned import ProgramPlan
from tuner.program.program import Program
from tuner.space.models.bounds import EXPERTS
from tuner.space.models.catalogue import get_entry, resolve_config

_SFT = "TRL SFTTrainer"


def stack_notes(program: Program, plan: ProgramPlan) -> tuple[str, ...]:
    """The releases that the environment of `program` pins otherwise than this prediction has them.

    The releases that differ come first, with the option that predicts with the pinned ones, then
    the known breaks between them. Empty where every pin allows the release of the prediction.
    """
    stack = releases.predicted_stack()
    wanted = _wanted(program)
    pinned = {library: specifier for library, (specifier, _) in wanted.items()}
    others = list(releases.other_releases(pinned, stack))
    if not others:
        return ()
    paths = dict.fromkeys(_shown(wanted[name][1].path) for name in others)
    theirs = ", ".join(f"{name}{pinned[name]} (predicted: {stack[name]})" for name in others)
    text = f"{' and '.join(paths)} pins {theirs}"
    if STACK_VARIABLE not in os.environ:
        first, *more = paths
        text = f"add --stack {first}: {' and '.join(['it', *more])} pins {theirs}"
    different = {name: pinned[name] for name in others}
    return text, *releases.breaks_between(different, stack, set(_concerns(plan)))


def stack_doubts(program: Program) -> set[Doubt]:
    """The doubts about memory where the environment of `program` pins other releases."""
    pinned = {library: specifier for library, (specifier, _) in _wanted(program).items()}
    others = list(releases.other_releases(pinned, releases.predicted_stack()))
    if "torch" in others and releases.is_before(pinned["torch"], Version("2")):
        return {Doubt.OLD_RELEASES}
    return {Doubt.RELEASES} if others else set()


def _wanted(program: Program) -> dict[str, tuple[str, Pins]]:
    """Specifiers by library, each with the file or environment nearest to the program."""
    wanted: dict[str, tuple[str, Pins]] = {}
    for pins in pins_near(program, releases.STACK):
        for library, specifier in pins.releases.items():
            wanted.setdefault(library, (specifier, pins))
    return wanted


def _shown(path: Path) -> str:
    """The path as it can be typed here."""
    folder = Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def _concerns(plan: ProgramPlan) -> Iterator[str]:
    configuration = plan.configuration
    if configuration["precision"] in QUANTIZED and _has_experts(plan.model):
        yield releases.EXPERTS
    if plan.trainer == _SFT:
        yield releases.SFT
    if configuration["loss"] == "transformers":
        yield releases.LOGITS
    if Parallelism.of(configuration).is_sharded:
        yield releases.FSDP2


def _has_experts(model: str) -> bool:
    entry = get_entry(model)
    if entry is not None:
        return bool(EXPERTS & entry.text_config.keys())
    return bool(EXPERTS & resolve_config(model).get_text_config().to_dict().keys())
