"""Predicts every configuration of a program from a few emulated runs.

Device memory and the time of a micro-step are sums: a constant and a slope over the tokens of a
micro-batch for each way of training (checkpointing, attention, ...), and a slope over each other
number (rank, ...), by least squares. It is a prior: the search learns from its trials.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.app.program_oracle import ProgramRuns
from tuner.core.aliases import PROGRAM_NAMES
from tuner.core.errors import TunerError, UnavailableError
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, KnobValue, Memory, MemoryBudget, Prediction, Speed
from tuner.emulator.emulation import FEW, Emulation
from tuner.space import SearchSpace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_TOKENS = ("micro_batch", "max_length")
"""Activations grow with the product of these knobs."""

_FAR = 4
"""Two runs differ by at most this factor in their micro-batch."""

_MEMORY_SPREAD, _TIME_SPREAD = 0.1, 0.2
"""Half the width of the intervals. In six trials of a TRL script (docs/notebook/settings.md) the
largest errors were 8 % and 4 %."""


@dataclass(frozen=True, slots=True)
class _Ran:
    """One run of the design, with `rounds` micro-batches per step."""

    configuration: Configuration
    rounds: int
    found: Emulation


def program_predictions(
    space: SearchSpace, configurations: Sequence[Configuration], runs: ProgramRuns
) -> list[Prediction]:
    """Predict each of `configurations`, in their order, after a few runs of the program.

    Raises `UnavailableError` when no run came far enough.
    """
    design = _design(space, configurations)
    wanted = [_values(configuration) for configuration in design]
    answers = runs.with_values(wanted, on_larger_gpu=True)
    ran = [
        _Ran(configuration, int(values.get("grad_accum", 1)), found)  # type: ignore[arg-type]
        for configuration, values, found in zip(design, wanted, answers, strict=True)
        if not isinstance(found, TunerError) and found.fits is not None and found.time is not None
    ]
    if not ran:
        missing = (answer for answer in answers if isinstance(answer, UnavailableError))
        raise next(missing, None) or UnavailableError(
            "no run of the program reached an optimizer step",
            hint=f"its last lines: {runs.log_tail[-600:].strip()}",
        )
    return _Model(space, ran, runs.gpu, runs.margin_fraction).predict(configurations)


def _values(configuration: Configuration) -> dict[str, KnobValue]:
    """The values to write into the program, with few micro-batches per step."""
    values = {name: value for name, value in configuration.items() if name in PROGRAM_NAMES}
    rounds = values.get("grad_accum")
    if isinstance(rounds, int):
        values["grad_accum"] = min(rounds, FEW)
    return values


def _numbers(space: SearchSpace) -> list[str]:
    return [
        name
        for name, values in space.choices.items()
        if all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    ]


def _design(space: SearchSpace, configurations: Sequence[Configuration]) -> list[Configuration]:
    """The runs: two micro-batches for each way of training, and the end of each other number."""
    numbers = _numbers(space)
    words = [name for name in space.choices if name not in numbers]
    others = [name for name in numbers if name != "micro_batch"]
    first = min(configurations, key=lambda c: tuple(_order(c[name]) for name in numbers))
    picked: dict[str, Configuration] = {}
    for changed in _ways(space, words, first):
        alike = [c for c in configurations if all(c[n] == changed[n] for n in (*words, *others))]
        sizes = sorted({_order(c.get("micro_batch")) for c in alike})
        far = [size for size in sizes if size <= _FAR * sizes[0]] if sizes else []
        for size in {*far[:1], *far[-1:]}:
            for c in alike:
                if _order(c.get("micro_batch")) == size:
                    picked.setdefault(c.key, c)
                    break
    for name in others:
        ends = [
            c
            for c in configurations
            if all(c[n] == first[n] for n in (*words, *numbers) if n != name)
        ]
        if ends:
            last = max(ends, key=lambda c: _order(c[name]))
            picked.setdefault(last.key, last)
    return list(picked.values())


def _ways(
    space: SearchSpace, words: Sequence[str], first: Configuration
) -> Iterator[Mapping[str, KnobValue]]:
    """The first configuration, and those that differ from it in one word."""
    yield first
    for name in words:
        for value in space.choices[name]:
            if value != first[name]:
                yield {**first, name: value}


def _order(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


class _Model:
    """The contribution of each setting, by least squares over the runs."""

    def __init__(
        self, space: SearchSpace, ran: Sequence[_Ran], gpu: Gpu, margin_fraction: float | None
    ) -> None:
        import numpy as np

        self._space, self._ran, self._gpu = space, ran, gpu
        self._budget = MemoryBudget.of(gpu.memory_bytes, margin_fraction)
        self._numbers = _numbers(space)
        self._words = [name for name in space.choices if name not in self._numbers]
        rows = np.array([self._row(one.configuration) for one in ran])
        self._scale = np.maximum(np.abs(rows).max(axis=0), 1e-9)
        times = [one.found.time for one in ran]
        uses = [one.found.limiting for one in ran]
        targets = np.array(
            [
                [
                    one.found.used_bytes,
                    use.peak_allocated_bytes if use else 0,
                    use.peak_reserved_bytes if use else 0,
                    (time.step_s - time.phases_s.get("optimizer", 0.0)) / one.rounds if time else 0,
                    time.phases_s.get("optimizer", 0.0) if time else 0,
                ]
                for one, time, use in zip(ran, times, uses, strict=True)
            ]
        )
        self._weights, *_ = np.linalg.lstsq(rows / self._scale, targets, rcond=None)

    def _row(self, configuration: Mapping[str, KnobValue]) -> list[float]:
        tokens = math.prod(_order(configuration.get(name)) or 1.0 for name in _TOKENS)
        ways = [1.0]
        for name in self._words:
            ways += [float(configuration[name] == v) for v in self._space.choices[name][1:]]
        others = [_order(configuration[n]) for n in self._numbers if n not in _TOKENS]
        return [*ways, *(way * tokens for way in ways), *others]

    def predict(self, configurations: Sequence[Configuration]) -> list[Prediction]:
        import numpy as np

        rows = np.array([self._row(c) for c in configurations]) / self._scale
        return [
            self._prediction(c, found)
            for c, found in zip(configurations, rows @ self._weights, strict=True)
        ]

    def _prediction(self, configuration: Configuration, found: NDArray[np.float64]) -> Prediction:
        use = self._ran[0].found.limiting
        device, allocated, reserved = (max(0, int(value)) for value in found[:3])
        rounds = int(_order(configuration.get("grad_accum")) or 1)
        micro_s = max(float(found[3]), 1e-6)
        step_s = micro_s * rounds + max(float(found[4]), 0.0)
        samples = self._space.command.samples(configuration) if self._space.command else None
        return Prediction(
            budget=self._budget,
            memory=Memory(
                peak_allocated_bytes=allocated,
                peak_reserved_bytes=reserved,
                device_bytes=device,
                loaded_bytes=use.loaded_bytes if use else 0,
                phase_peak_bytes={},
                peak_phase=use.peak_phase if use else "",
                breakdown={},
            ),
            speed=Speed(
                step_s=step_s,
                it_per_s=1 / step_s,
                samples_per_s=(samples or 1.0) / step_s,
                tokens_per_s=0.0,
                mfu=None,
            ),
            trainable_params=use.trainable_params if use else 0,
            total_params=0,
            gpu=self._gpu.id,
            method=f"least squares over {len(self._ran)} emulated runs of the program",
            intervals={
                "device_bytes": _around(device, _MEMORY_SPREAD),
                "peak_allocated_bytes": _around(allocated, _MEMORY_SPREAD),
                "peak_reserved_bytes": _around(reserved, _MEMORY_SPREAD),
                "step_s": _around(step_s, _TIME_SPREAD),
            },
        )


def _around(value: float, share: float) -> tuple[float, float]:
    return value * (1 - share), value * (1 + share)
