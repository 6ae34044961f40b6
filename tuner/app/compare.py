"""The configuration in use against the recommended one: memory, speed, time and cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.app.predicting import Predicted, Share, SpacePredictor, truncation
from tuner.core.expressions import show
from tuner.core.gpu import Gpu
from tuner.core.records import Configuration, KnobValue, Measurement, Prediction
from tuner.core.units import format_duration, format_size, significant
from tuner.predict.predict import check_supported
from tuner.searches.cost import cost_of
from tuner.searches.facts import SpaceFacts
from tuner.space import SearchSpace

Evidence = Prediction | Measurement


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two configurations with its numbers; None is unknown.

    Times are of training only, with every example at full length.
    """

    configuration: Configuration
    evidence: Evidence
    fits: bool
    free_bytes: int
    stage: str | None = None
    steps_per_epoch: int | None = None
    epoch_s: float | None = None
    run_s: float | None = None
    epoch_usd: float | None = None
    run_usd: float | None = None
    truncated_examples: Share | None = None
    lost_tokens: Share | None = None

    @property
    def batch(self) -> KnobValue | None:
        """Samples of an optimizer step."""
        return self.configuration.get("effective_batch")

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "configuration": self.configuration.to_dict(),
            "source": str(self.evidence.source),
            "fits": self.fits,
            "device_bytes": self.evidence.memory.device_bytes,
            "free_bytes": self.free_bytes,
            "stage": self.stage,
            "samples_per_s": self.evidence.speed.samples_per_s,
            "tokens_per_s": self.evidence.speed.tokens_per_s,
            "step_s": self.evidence.speed.step_s,
            "effective_batch": self.batch,
            "steps_per_epoch": self.steps_per_epoch,
            "epoch_s": self.epoch_s,
            "run_s": self.run_s,
            "epoch_usd": self.epoch_usd,
            "run_usd": self.run_usd,
            "truncated_examples_share": _listed(self.truncated_examples),
            "lost_tokens_share": _listed(self.lost_tokens),
        }


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table."""

    label: str
    current: str
    recommended: str
    change: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both sides, on one GPU, both predicted or both measured.

    `chosen_from` says how the recommended configuration was found.
    """

    space: SearchSpace
    gpu: Gpu
    current: Side
    recommended: Side
    chosen_from: str
    notes: tuple[str, ...] = ()

    @property
    def speedup(self) -> float:
        """Recommended over current samples/s."""
        current, recommended = self.current.evidence.speed, self.recommended.evidence.speed
        return recommended.samples_per_s / current.samples_per_s

    def to_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "space": self.space.name,
            "model": self.space.model,
            "gpu": self.gpu.id,
            "current": self.current.to_dict(),
            "recommended": self.recommended.to_dict(),
            "speedup": self.speedup,
            "saved_bytes": self.current.evidence.memory.device_bytes
            - self.recommended.evidence.memory.device_bytes,
            "chosen_from": self.chosen_from,
            "notes": list(self.notes),
        }

    def rows(self) -> list[Row]:
        """The lines of the table, settings that differ first."""
        return [*self._settings(), *self._numbers()]

    def _settings(self) -> Iterator[Row]:
        now, then = self.current.configuration, self.recommended.configuration
        names = [*self.space.knobs, *(n for n in now if n not in self.space.knobs)]
        for name in names:
            if name != "effective_batch" and now.get(name) != then.get(name):
                yield Row(name, show(now.get(name, "")), show(then.get(name, "")))

    def _numbers(self) -> Iterator[Row]:
        sides = (self.current, self.recommended)
        yield _row("effective batch", [_text(s.batch, str) for s in sides])
        yield _row("fits", ["yes" if s.fits else "no" for s in sides])
        used = [s.evidence.memory.device_bytes for s in sides]
        yield _row("device memory", [format_size(size) for size in used], _difference(used))
        yield _row("free", [format_size(s.free_bytes) for s in sides])
        for label, value, text in _NUMBERS:
            numbers = [value(side) for side in sides]
            if numbers != [None, None]:
                yield _row(label, [_text(n, text) for n in numbers], _factor(numbers))
        for label, shares in (
            ("truncated examples", [s.truncated_examples for s in sides]),
            ("tokens cut off", [s.lost_tokens for s in sides]),
        ):
            if shares != [None, None]:
                yield _row(label, [_text(share, share_text) for share in shares])


def _row(label: str, cells: Sequence[str], change: str = "") -> Row:
    current, recommended = cells
    return Row(label, current, recommended, change)


def _usd(amount: float) -> str:
    return f"{amount:,.2f} USD" if amount >= 1 else f"{significant(amount)} USD"


_NUMBERS: tuple[tuple[str, Callable[[Side], float | None], Callable[[float], str]], ...] = (
    ("samples/s", lambda s: s.evidence.speed.samples_per_s, significant),
    ("tokens/s", lambda s: s.evidence.speed.tokens_per_s, significant),
    ("optimizer step", lambda s: s.evidence.speed.step_s, format_duration),
    ("steps an epoch", lambda s: s.steps_per_epoch, lambda n: f"{n:,.0f}"),
    ("time of an epoch", lambda s: s.epoch_s, format_duration),
    ("time of the run", lambda s: s.run_s, format_duration),
    ("cost of an epoch", lambda s: s.epoch_usd, _usd),
    ("cost of the run", lambda s: s.run_usd, _usd),
)


def share_text(share: Share) -> str:
    """A share, or its interval."""
    low, high = share
    return f"{low:.1%}" if low == high else f"{low:.0%} to {high:.0%}"


def predicted_best(predictor: SpacePredictor, where: Sequence[str]) -> tuple[Predicted | None, int]:
    """The fastest configuration that is predicted to fit, of how many that the GPU can run."""
    runnable = [
        configuration
        for configuration in predictor.space.configurations(where)
        if not check_supported(configuration, predictor.gpu)
    ]
    found = predictor.predict(runnable)
    fitting = [each for each in found if each.prediction.fits]
    best = min(
        fitting,
        key=lambda each: (
            -each.prediction.speed.samples_per_s,
            each.prediction.memory.device_bytes,
            each.configuration.key,
        ),
        default=None,
    )
    return best, len(runnable)


def side_of(
    predicted: Predicted,
    space: SearchSpace,
    gpu: Gpu,
    measured: Measurement | None = None,
) -> Side:
    """The numbers of a configuration: `measured` ones, else predicted ones."""
    evidence: Evidence = measured or predicted.prediction
    configuration, prediction = predicted.configuration, predicted.prediction
    used_bytes = evidence.memory.device_bytes
    cost = cost_of(evidence, configuration, SpaceFacts.of(space), gpu)
    examples, tokens = truncation(space, configuration)
    return Side(
        configuration=configuration,
        evidence=evidence,
        fits=prediction.budget.fits(used_bytes),
        free_bytes=prediction.budget.limit_bytes - used_bytes,
        stage=predicted.prediction.limiting_stage,
        steps_per_epoch=cost.steps_per_epoch if cost else None,
        epoch_s=cost.epoch_s if cost else None,
        run_s=cost.run_s if cost else None,
        epoch_usd=cost.epoch_usd if cost else None,
        run_usd=cost.run_usd if cost else None,
        truncated_examples=examples,
        lost_tokens=tokens,
    )


def _listed(share: Share | None) -> list[float] | None:
    return None if share is None else list(share)


def _text(value: Any, text: Callable[[Any], str]) -> str:
    return "unknown" if value is None else text(value)


def _difference(sizes: Sequence[int]) -> str:
    more = sizes[1] - sizes[0]
    return f"{'+' if more > 0 else '-'}{format_size(abs(more))}" if more else ""


def _factor(numbers: Sequence[float | None]) -> str:
    now, then = numbers
    if not now or then is None or now == then:
        return ""
    return f"x {then / now:.3g}"
