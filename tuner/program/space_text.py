"""The search space of a program, as a file to keep and to edit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from tuner.core.aliases import PROGRAM_NAMES, meanings
from tuner.core.errors import InputError, Problem, unknown
from tuner.core.records import KnobValue
from tuner.core.setup.distributed_knobs import GPUS_PER_TRIAL
from tuner.program.arguments import typed
from tuner.program.launch import read_launch
from tuner.program.settings import Settings

SAME_RESULT = ("micro_batch", "gradient_checkpointing")
"""Knobs that change neither what is trained nor on how much of the data at once."""

_MOST_VALUES = 12


def knobs_of(
    settings: Settings, arrived: Mapping[str, KnobValue], asked: Sequence[str]
) -> dict[str, list[KnobValue]]:
    """The values to try of each parameter.

    The parameters are those `asked` for ("lora_rank=16,32"), else those that keep the training's
    result. `arrived` are settings as they reached the training. Raises one `InputError` with all
    parameters that cannot be varied.
    """
    wanted: dict[str, list[KnobValue]] = {}
    if not asked:
        wanted = {name: [] for name in SAME_RESULT if settings.can_change(name)}
    for text in asked:
        word, _, values = text.partition("=")
        known = next((each for each in (word, *meanings(word)) if each in PROGRAM_NAMES), None)
        if known is None:
            raise unknown("parameter", word, PROGRAM_NAMES)
        wanted[known] = [typed(part.strip(), known) for part in values.split(",") if part]
    problems = []
    found: dict[str, list[KnobValue]] = {}
    for name, said in wanted.items():
        if not settings.can_change(name):
            setting = settings.get(name)
            why = f"it {setting.problem}" if setting else "the program does not set it"
            if setting is None or not setting.is_given:
                why += f"; set {PROGRAM_NAMES[name][0]} in the program first"
            problems.append(Problem(f"{name} cannot be varied: {why}"))
            continue
        own = _own(settings, arrived, name)
        proposed = said or _proposed(name, own, _batch(settings, arrived))
        if not proposed:
            problems.append(Problem(f"no values of {name} are known: write --knob {name}=A,B"))
            continue
        found[name] = proposed
    if problems:
        raise InputError("not every parameter can be searched", problems=problems)
    if not found:
        reasons = [f"{n} {settings[n].problem}" for n in SAME_RESULT if n in settings]
        raise InputError(
            "; ".join(["the program sets nothing that can be varied", *reasons]),
            hint="`tuner check` says which settings were found, and where; any option of its "
            "command can be searched with a space of its own (docs/reference/own-code.md)",
        )
    return found


def _own(settings: Settings, arrived: Mapping[str, KnobValue], knob: str) -> KnobValue | None:
    """The present value of a parameter."""
    return arrived.get(knob, settings[knob].value if knob in settings else None)


def _batch(settings: Settings, arrived: Mapping[str, KnobValue]) -> int | None:
    size, rounds = (_own(settings, arrived, name) for name in ("micro_batch", "grad_accum"))
    if not isinstance(size, int) or not settings.can_change("grad_accum"):
        return None
    return size * (rounds if isinstance(rounds, int) else 1)


def _proposed(name: str, own: KnobValue | None, batch: int | None) -> list[KnobValue]:
    if name in {"gradient_checkpointing", "packing", "fused_kernels"}:
        return [True, False]
    if name == "optimizer" and isinstance(own, str):
        return list(dict.fromkeys((own, "adamw_8bit", "paged_adamw_8bit")))
    if not isinstance(own, int) or isinstance(own, bool):
        return []
    if name == "micro_batch" and batch is not None:
        divisors = [size for size in range(1, batch + 1) if batch % size == 0]
        while len(divisors) > _MOST_VALUES:  # the ends stay
            divisors = [*divisors[:-1:2], divisors[-1]]
        return list(divisors)
    return sorted({max(1, own // 2), own, own * 2})


def space_text(
    name: str,
    words: Sequence[str],
    settings: Settings,
    arrived: Mapping[str, KnobValue],
    knobs: Mapping[str, list[KnobValue]],
    *,
    fits: bool,
) -> str:
    """The file of a space that varies `knobs` of the program that `words` start.

    The present values are its baseline if the program `fits`.
    """
    space: dict[str, object] = {
        "name": name,
        "description": f"settings of {Path(settings.program.main or words[0]).name}",
        "program": list(words),
        "knobs": {knob: list(dict.fromkeys(values)) for knob, values in knobs.items()},
    }
    batch, ranks = _batch(settings, arrived), read_launch(settings.program).processes or 1
    fixed = {} if ranks == 1 else {GPUS_PER_TRIAL: ranks}
    if "micro_batch" in knobs and "grad_accum" not in knobs and batch is not None:
        fixed["effective_batch"] = batch * ranks
        step = "micro_batch" if ranks == 1 else f"(micro_batch * {GPUS_PER_TRIAL})"
        space["derived"] = {"grad_accum": f"effective_batch // {step}"}
        space["constraints"] = [f"effective_batch % {step} == 0"]
    if fixed:
        space["fixed"] = fixed
    own = {knob: _own(settings, arrived, knob) for knob in knobs}
    if fits and all(own[knob] in values for knob, values in knobs.items()):
        space["baseline"] = own
    said = [settings[knob] for knob in knobs if knob in settings and settings[knob].is_given]
    given = {setting.knob: f"{setting.name}, {setting.where}" for setting in said}
    places = [f"#   {knob}: {given.get(knob, 'left out by the program')}" for knob in knobs]
    head = ["# What `tuner tune` varies of this program, and where its files say it.", *places]
    return "\n".join(head) + "\n" + yaml.safe_dump(space, sort_keys=False, width=100)
