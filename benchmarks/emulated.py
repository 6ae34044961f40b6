"""The oracle: tuner's trace of a training step beside the same step on an emulated GPU.

    python -m benchmarks.emulated [--only NAME] [--quick] [--markdown FILE]

The committed page is docs/notebook/emulated_oracle.md.

Both execute tuner's own training loop: the trace on tensors without data, with its own rules of
what CUDA does; the emulator with PyTorch's CUDA build and its real allocator. Where they differ,
one of them is wrong. One process at a time; a model of 4 billion parameters takes about a minute
and a half, `--quick` cuts each model to three layers. A case that cannot be run stays in the table.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.emulated_cases import QUICK_LAYERS, Case, all_cases
from tuner.app.listener import quiet_libraries
from tuner.app.measuring import emulating
from tuner.app.search.supported import require_supported, trial_job
from tuner.core.errors import TunerError
from tuner.core.records import Configuration, Memory
from tuner.core.units import MIB
from tuner.emulator.toolchain import unavailable
from tuner.predict.predict import predict, resolve_subject
from tuner.space import SearchSpace
from tuner.space.gpus import Gpu, get_gpu
from tuner.trial.factories import EmulatedFactory

ALIKE = 0.005
"""Share by which trace and emulator may differ; beyond it one of them is wrong."""

LEAST_BYTES = 4 * MIB
"""A difference of less does not count: of tiny models it is a large share."""

COLUMNS = ("case", "GPU", "number", "trace MiB", "emulated MiB", "difference")


@dataclass(frozen=True, slots=True)
class Pair:
    """One number of a case, in bytes, as both say it."""

    name: str
    traced: int
    emulated: int

    @property
    def share(self) -> float:
        """By how much the trace's is larger, as a share of the emulator's."""
        return self.traced / self.emulated - 1 if self.emulated else float(self.traced > 0)

    @property
    def differs(self) -> bool:
        """Whether that is more than it may be."""
        return abs(self.share) > ALIKE and abs(self.traced - self.emulated) > LEAST_BYTES


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a case: its numbers, or why there are none."""

    case: Case
    pairs: tuple[Pair, ...] = ()
    failure: str = ""
    seconds: float = 0.0

    @property
    def worst(self) -> Pair | None:
        """The number by which they differ most; those within the limit after all others."""
        return max(self.pairs, key=lambda p: (p.differs, abs(p.share)), default=None)

    @property
    def order(self) -> tuple[bool, bool, float]:
        """Failures first, then the largest difference."""
        worst = self.worst
        return (worst is not None, not (worst and worst.differs), -abs(worst.share if worst else 0))


def pairs_of(traced: Memory, emulated: Memory) -> tuple[Pair, ...]:
    """The numbers that both have, allocated and reserved first."""
    phases = [name for name in traced.phase_peak_bytes if name in emulated.phase_peak_bytes]
    return (
        Pair("allocated", traced.peak_allocated_bytes, emulated.peak_allocated_bytes),
        Pair("reserved", traced.peak_reserved_bytes, emulated.peak_reserved_bytes),
        Pair("loaded", traced.loaded_bytes, emulated.loaded_bytes),
        *(
            Pair(name, traced.phase_peak_bytes[name], emulated.phase_peak_bytes[name])
            for name in phases
        ),
        Pair("paged", traced.paged_bytes, emulated.paged_bytes),
    )


def compare(case: Case, layers: int | None, folder: Path) -> Answer:
    """Trace the case, then emulate it. What goes wrong is its answer."""
    started = time.monotonic()
    try:
        gpu = get_gpu(case.gpu)
        space, configuration = case.opened(layers, folder)
        require_supported(configuration, gpu)
        subject = resolve_subject(space.workload, space.predicted_model())
        traced = predict(subject, configuration, gpu).memory
        emulated = _emulated(space, configuration, gpu)
    except TunerError as error:
        return Answer(case, failure=str(error), seconds=time.monotonic() - started)
    except Exception as error:  # noqa: BLE001 - a fault of ours: the other cases are still compared
        text = f"{type(error).__name__}: {error}"
        return Answer(case, failure=text, seconds=time.monotonic() - started)
    if isinstance(emulated, str):
        return Answer(case, failure=emulated, seconds=time.monotonic() - started)
    return Answer(case, pairs_of(traced, emulated), seconds=time.monotonic() - started)


def _emulated(space: SearchSpace, configuration: Configuration, gpu: Gpu) -> Memory | str:
    """What the real training takes on the emulated device, or why it did not end."""
    trials_on = emulating(gpu)
    make = EmulatedFactory(trial_job(space, gpu, None, None), trials_on.options())
    with contextlib.closing(make()) as runner:
        outcome = runner.run(configuration)
        if outcome.emulation is None:
            return f"{outcome.status}: {outcome.message or runner.last_log[-300:]}"
        return outcome.emulation.memory


def rows(answers: Sequence[Answer]) -> Iterator[tuple[str, ...]]:
    """The cells of the table, by difference: each case with its first two numbers and its worst."""
    for answer in sorted(answers, key=lambda a: a.order):
        case, worst = answer.case, answer.worst
        if worst is None:
            yield (
                case.name,
                case.gpu,
                f"failed: {' '.join(answer.failure.split())[:200]}",
                "",
                "",
                "",
            )
            continue
        shown = [p for p in answer.pairs if p.name in ("allocated", "reserved") or p.differs]
        for number, pair in enumerate(shown if worst in shown else [*shown, worst]):
            mark = " **differs**" if pair.differs else ""
            yield (
                case.name if number == 0 else "",
                case.gpu if number == 0 else "",
                pair.name,
                f"{pair.traced / MIB:,.1f}",
                f"{pair.emulated / MIB:,.1f}",
                f"{pair.share:+.2%}{mark}",
            )


def page(answers: Sequence[Answer], layers: int | None) -> str:
    """The table and what it stands for, in Markdown."""
    compared = [a for a in answers if a.pairs]
    apart = [a for a in compared if any(p.differs for p in a.pairs)]
    depth = "at full depth" if layers is None else f"cut to {layers} layers"
    failed = len(answers) - len(compared)
    lines = [
        "# Trace and emulator side by side",
        "",
        f"Written by `python -m benchmarks.emulated`: tuner's own training loop, models {depth}, "
        f"traced and emulated. {len(compared)} cases were compared, {failed} failed, and "
        f"{len(apart)} differ somewhere by more than {ALIKE:.1%} and {LEAST_BYTES // MIB} MiB. "
        "Beside allocated and reserved stand the numbers that differ so, or the one that differs "
        "most. No number here is measured.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * 3 + "---:|" * 3,
        *("| " + " | ".join(row) + " |" for row in rows(answers)),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Compare what was asked for, and print each case as it ends. 1 where any differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--markdown", type=Path, help="write the table there")
    parser.add_argument("--only", metavar="NAME", help="cases whose name or GPU has this in it")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_LAYERS} layers of each model")
    options = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        print(f"nothing can be emulated here: {reason}", file=sys.stderr)
        return 3
    warnings.simplefilter("ignore", FutureWarning)
    layers = QUICK_LAYERS if options.quick else None
    only = options.only or ""
    answers: list[Answer] = []
    with tempfile.TemporaryDirectory() as folder, quiet_libraries():
        for case in all_cases():
            if only not in f"{case.name} {case.gpu}":
                continue
            answers.append(compare(case, layers, Path(folder)))
            for row in rows(answers[-1:]):
                print("  ".join(row), flush=True)
            if options.markdown:
                options.markdown.write_text(page(answers, layers), encoding="utf-8")
    return int(any(a.failure or any(p.differs for p in a.pairs) for a in answers))


if __name__ == "__main__":
    raise SystemExit(main())
