"""The commands that a recommendation is printed with, each to be copied as it stands."""

from __future__ import annotations

import shlex
from pathlib import Path

from tuner.app.recommendation import ANY_THAT_FITS, Criteria
from tuner.app.target import Target
from tuner.core.expressions import show
from tuner.core.records import Source
from tuner.program.edit.source import PYTHON, READERS
from tuner.program.export import FORMATS
from tuner.report.terminal.render import size_text
from tuner.searches.best import BestTrial
from tuner.space import SearchSpace
from tuner.space.settings import default_values


def measure_command(target: Target, best: BestTrial) -> str:
    """The search whose trials decide between the recommendation and its rivals; empty without."""
    chosen = best.to_measure
    words: list[str] = []
    for name, knob in target.space.knobs.items():
        values = list(dict.fromkeys(c[name] for c in chosen if name in c))
        if len(knob.values) == 1 or any(isinstance(value, tuple) for value in values[1:]):
            continue  # nothing to choose, or lists, which no condition can name
        if len(values) == 1 and values[0] != "":
            words += ["--set", f"{name}={show(values[0])}"]
        elif values:
            # A word of an expression stands in quotes.
            among = ", ".join(f'"{v}"' if isinstance(v, str) else show(v) for v in values)
            is_one_of = f"in ({among})" if len(values) > 1 else f"== {among}"
            words += ["--where", f"{name} {is_one_of}"]
    return target.command("search", *words) if chosen else ""


def verify_command(target: Target, best: BestTrial) -> str:
    """The trial of the recommendation on an emulated GPU; "" where one has been, or cannot be."""
    is_tried = best.source is not Source.PREDICTED or best.record.verified_by is not None
    if is_tried or target.gpu.id == "cpu":
        return ""
    taken = ("--space", "--model", "--gpu", "--gpu-memory")
    words = [w for name, value in _pairs(target.arguments) if name in taken for w in (name, value)]
    usual = default_values(target.space)
    values = {n: best.configuration.get(n) for n in target.space.knobs}
    values = {n: value for n, value in values.items() if value != usual[n]}
    if any(value in ("", None) for value in values.values()):
        return ""  # which no command line can say
    words += [word for n, value in values.items() for word in ("--set", f"{n}={show(value)}")]
    return shlex.join(["tuner", "trial", *words, "--mode", "emulate"])


def _pairs(arguments: tuple[str, ...]) -> list[tuple[str, str]]:
    """Options that all have a value."""
    return list(zip(arguments[::2], arguments[1::2], strict=True))


def use_commands(target: Target, criteria: Criteria = ANY_THAT_FITS) -> tuple[str, ...]:
    """What brings the recommendation by `criteria` into one's own file, and to another tool."""
    words = [word for text in criteria.where for word in ("--where", text)]
    if criteria.max_memory is not None:
        words += ["--max-memory", size_text(criteria.max_memory)]
    words += ["--headroom", criteria.headroom] if criteria.headroom is not None else []
    words += [word for name in criteria.objectives for word in ("--objective", name)]
    command = target.space.command
    if command is None:
        file = _file_of(target.space)
        apply = [target.command("apply", *words, "--to", file)] if file is not None else []
        trained = FORMATS["trl"].workloads
        able = "trl" if target.space.workload in trained else "accelerate"
        return (*apply, target.command("export", *words, "--format", able))
    if not command.is_program:
        return (target.command("export", *words, "--format", "command"),)
    named = [Path(command.cwd, word) for word in command.argv if Path(word).suffix in READERS]
    # A launcher's file may stand before the script.
    named.sort(key=lambda path: path.suffix not in PYTHON)
    return tuple(target.command("apply", *words, "--to", str(path)) for path in named[:1])


def _file_of(space: SearchSpace) -> str | None:
    """A file that the mappings of a space are for; None where it has none."""
    for mapping in space.apply.values():
        if not mapping.files or "*.py" in mapping.files:
            return "train.py"
        plain = [name for name in mapping.files if "*" not in name]
        if plain:
            return plain[0]
    return None
