"""The recommendation: the fastest configuration that fits, and the time and cost of using it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from tuner.core.expressions import settings_text
from tuner.core.gpu import Gpu
from tuner.core.kinds import LOST
from tuner.core.records import Configuration, Measurement, Prediction, Source, Status, TrialRecord
from tuner.core.units import format_duration, format_gib, format_size
from tuner.searches import facts, front
from tuner.searches.cost import (
    MEASURED_PERCENT,
    PREDICTED_PERCENT,
    ByGpus,
    RunCost,
    ShownInterval,
    by_gpus,
    interval_dict,
    run_cost,
)


@dataclass(frozen=True, slots=True)
class _Gain:
    """The recommended configuration compared with the space's baseline.

    `speedup` is the ratio of samples/s, `saved_bytes` the device memory that becomes free
    (negative when more is used); each is None if the baseline has no such number.
    """

    baseline: TrialRecord
    baseline_fits: bool
    speedup: float | None
    saved_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "configuration": self.baseline.configuration.to_dict(),
            "status": str(self.baseline.outcome.status),
            "fits": self.baseline_fits,
            "speedup": round(self.speedup, 4) if self.speedup is not None else None,
            "saved_bytes": self.saved_bytes,
        }


@dataclass(frozen=True, slots=True, repr=False)
class BestTrial:
    """The fastest trial that fits with its margin, with its cost, gain and rivals.

    `trials` and `fitting` count the configurations that it was chosen from; `conditions`
    are the minimums and `--where` texts that they had to meet.
    """

    record: TrialRecord
    gpu: Gpu
    space: facts.SpaceFacts
    cost: RunCost | None
    gain: _Gain | None
    trials: int
    fitting: int
    conditions: tuple[str, ...] = ()
    objective: front.Objective = front.THROUGHPUT
    rivals: tuple[TrialRecord, ...] = ()
    """Others that fit and may be as fast, within the prediction error; the fastest first."""
    not_measured: tuple[TrialRecord, ...] = ()
    """Trials that were killed or lost, of configurations that are predicted to be faster."""
    by_gpus: tuple[ByGpus, ...] = ()
    """The fastest that fits on each number of GPUs; empty if all use the same number."""

    def __repr__(self) -> str:
        """A short form: the space and all evidence would fill the screen."""
        return (
            f"<Recommendation for {self.space.name} on {facts.times_text(self.gpus, self.gpu.id)}: "
            f"{settings_text(self.configuration, self.names)}, "
            f"{format_size(self.evidence.memory.device_bytes)} of "
            f"{format_size(self.memory_bytes)}{' each' * (self.gpus > 1)}, "
            f"{self.evidence.speed.samples_per_s:.3g} samples/s ({self.source})>"
        )

    @property
    def chosen_from(self) -> str:
        """The trial, and the number of fitting ones of which it is the best; for people."""
        of = f"best of {self.fitting:,} that fit"
        if self.source is Source.PREDICTED:
            return f"{of}, of {self.trials:,} predicted"
        return f"trial {self.record.trial_id}, {of}"

    @property
    def title(self) -> str:
        """A title such as "fastest that fits with 1.42 GiB headroom", for people."""
        margin = self.record.budget.margin_bytes
        is_speed = self.objective.name == front.THROUGHPUT.name
        first = "fastest" if is_speed else f"best in {self.objective.label}"
        return f"{first} that fits" + (f" with {format_size(margin)} headroom" if margin else "")

    @property
    def to_measure(self) -> tuple[Configuration, ...]:
        """The recommended configuration and the rivals that are worth measuring against it."""
        return tuple(r.configuration for r in front.worth_measuring(self.record, self.rivals))

    @property
    def evidence(self) -> Prediction | Measurement:
        """Its numbers."""
        return front.evidence_of(self.record)

    @property
    def configuration(self) -> Configuration:
        """The recommended settings."""
        return self.record.configuration

    @property
    def names(self) -> tuple[str, ...]:
        """The settings to show: the knobs of the space, or all of the configuration."""
        return self.space.knobs or tuple(self.configuration)

    @property
    def source(self) -> Source:
        """The source of the numbers: predicted, emulated or measured."""
        return self.evidence.source

    @property
    def gpus(self) -> int:
        """Number of GPUs, or ranks on a processor, that train together."""
        return facts.counted_gpus(self.configuration)

    @property
    def memory_bytes(self) -> int:
        """Memory of one rank in bytes: that of a GPU, or its share of a processor's."""
        return front.room_bytes(self.record, self.gpu.memory_bytes)

    @property
    def free_bytes(self) -> int:
        """Memory that stays free on a rank at the peak, in bytes, the margin included."""
        return self.memory_bytes - self.evidence.memory.device_bytes

    @property
    def device_bytes_interval(self) -> ShownInterval | None:
        """The interval of the peak device memory in bytes; None if unknown."""
        ends = self.evidence.intervals.get("device_bytes")
        return ShownInterval(*ends, PREDICTED_PERCENT) if ends else None

    @property
    def samples_per_s_interval(self) -> ShownInterval | None:
        """The interval of the throughput in samples/s; None if unknown.

        For predicted and emulated trials it follows from the interval of the step time: every step
        has the same number of samples.
        """
        if self.source is Source.MEASURED and isinstance(self.evidence, Measurement):
            ends = self.evidence.samples_per_s_interval
            return ShownInterval(*ends, MEASURED_PERCENT) if ends else None
        low_s, high_s = self.evidence.intervals.get("step_s", (0.0, 0.0))
        if not 0 < low_s <= high_s:
            return None
        samples = self.evidence.speed.samples_per_s * self.evidence.speed.step_s
        return ShownInterval(samples / high_s, samples / low_s, PREDICTED_PERCENT)

    @property
    def limit_text(self) -> str:
        """The stage that needs most memory, for people; empty where there are no stages."""
        return facts.limit_text(self.evidence, self.configuration, self.space)

    @property
    def verified_text(self) -> str:
        """The verification of the configuration and the memory that stayed free, for people."""
        check = self.record.verified_by or self.record
        found = check.outcome.ran
        if found is None:
            said = f", and the emulated trial {_ended_text(check)}"
            return f"no: predicted only{said if self.record.verified_by else ''}"
        if not self.record.verified:
            return f"no: {check.source} in a short trial"
        done = f"{found.steps} step{'s' * (found.steps != 1)}, the longest sequences"
        done += ", an evaluation" if found.evaluation_peak_bytes is not None else ""
        if found.checkpoint_bytes is not None:
            done += f", a checkpoint of {format_size(found.checkpoint_bytes)} saved"
        used_bytes = found.memory.device_bytes
        free = f"{format_size(self.memory_bytes - used_bytes)} free"
        if check.source is Source.EMULATED:
            return f"emulated: {format_size(used_bytes)}, {free} ({done})"
        return f"{done}: {free}"

    def to_dict(self) -> dict[str, Any]:
        """JSON types, as in `best.yaml` and `tuner best --json`."""
        verified, knobs = self.record.verified_source, self.space.knobs
        by_gpus = [row.to_dict(self.names) for row in self.by_gpus]
        return {
            "space": self.space.name,
            "model": self.space.model,
            "gpu": {**_gpu_dict(self.gpu), "count": self.gpus},
            "source": str(self.source),
            # True where a device verified it.
            "verified": str(verified) if verified is Source.EMULATED else verified is not None,
            "verification": self.verified_text,
            "configuration": self.configuration.to_dict(),
            "memory": self._memory_dict(),
            "speed": self._speed_dict(),
            **facts.stages_dict(self.record, self.space),
            "run": self.cost.to_dict() if self.cost else None,
            **({"by_gpus": by_gpus} if by_gpus else {}),
            "baseline": self.gain.to_dict() if self.gain else None,
            "trainable_params": self.evidence.trainable_params,
            "total_params": self.evidence.total_params,
            "chosen_from": {
                "trials": self.trials,
                "fitting": self.fitting,
                "conditions": list(self.conditions),
                "objective": self.objective.name,
            },
            "undecided": {
                "may_be_as_fast": len(self.rivals),
                "measure": [
                    {"settings": {n: v for n, v in c.to_dict().items() if n in knobs or not knobs}}
                    for c in self.to_measure
                ],
                **({"not_measured": text} if (text := not_measured_text(self)) else {}),
            },
            "trial": {
                "id": self.record.trial_id,
                "run_id": self.record.run_id,
                "started_at": self.record.started_at,
                "seed": self.record.seed,
                "searcher": self.record.searcher,
                "versions": dict(self.record.versions),
            },
        }

    def _memory_dict(self) -> dict[str, Any]:
        memory = self.evidence.memory
        margin = self.record.budget.margin_bytes
        ranks = [rank.device_bytes for rank in self.evidence.ranks]
        return {
            "peak_device_memory": format_size(memory.device_bytes),
            "peak_device_bytes": memory.device_bytes,
            **interval_dict("peak_device_bytes", self.device_bytes_interval),
            "peak_reserved_bytes": memory.peak_reserved_bytes,
            "peak_allocated_bytes": memory.peak_allocated_bytes,
            "peak_phase": memory.peak_phase,
            "free": format_gib(self.free_bytes),
            "free_bytes": self.free_bytes,
            "margin": format_gib(margin),
            "margin_bytes": margin,
            "used_fraction": round(memory.device_bytes / self.memory_bytes, 4),
            "breakdown_bytes": {str(k): v for k, v in memory.breakdown.items()},
            **({"rank_device_bytes": ranks} if ranks else {}),
        }

    def _speed_dict(self) -> dict[str, Any]:
        speed = self.evidence.speed
        return {
            "samples_per_s": facts.rounded(speed.samples_per_s),
            **interval_dict("samples_per_s", self.samples_per_s_interval),
            "tokens_per_s": facts.rounded(speed.tokens_per_s),
            "step": format_duration(speed.step_s),
            "step_s": facts.rounded(speed.step_s),
            "it_per_s": facts.rounded(speed.it_per_s),
            "mfu": facts.rounded(speed.mfu) if speed.mfu is not None else None,
        }


def recommend(
    records: Sequence[TrialRecord],
    space: facts.SpaceFacts,
    gpu: Gpu,
    *,
    where: Callable[[Configuration], bool] | None = None,
    conditions: Sequence[str] = (),
    objective: front.Objective = front.THROUGHPUT,
) -> BestTrial | None:
    """The fastest of `records` that fits `gpu` with its margin; None if none fits.

    With another `objective`, the best record in it; records without that number are ignored.

    If a measured record fits, only measured ones are considered; otherwise, if an emulated one
    fits, only emulated ones.
    `where` returns True for the configurations to consider, and `conditions` are its texts, for
    people. Among equally fast ones the one with less memory wins, then the smaller configuration
    key. The baseline is looked up among all records, whether it meets `where` or not.
    """
    meeting = (r for r in records if where is None or where(r.configuration))
    allowed = front.trusted(meeting, gpu.memory_bytes)
    fitting = [r for r in allowed if front.fits_within(r, gpu.memory_bytes)]
    return best_of(
        fitting,
        space,
        gpu,
        trials=len(allowed),
        baseline=find_baseline(records, space.baseline),
        conditions=conditions,
        objective=objective,
        gone=[r for r in records if where is None or where(r.configuration)],
    )


def best_of(  # noqa: PLR0913 - what a recommendation is made from
    fitting: Sequence[TrialRecord],
    space: facts.SpaceFacts,
    gpu: Gpu,
    *,
    trials: int,
    baseline: TrialRecord | None,
    conditions: Sequence[str] = (),
    objective: front.Objective = front.THROUGHPUT,
    gone: Iterable[TrialRecord] = (),
) -> BestTrial | None:
    """As `recommend`, from the records that fit; `trials` counts all that were considered.

    Among `gone` are trials that were killed or lost.
    """
    ranked = [(gain, r) for r in fitting if (gain := objective.gain(r)) is not None]
    if not ranked:
        return None
    best = min(ranked, key=lambda pair: (-pair[0], *front.fastest_first(pair[1])))[1]
    # With the same values of the space's capacity knobs (rank, length).
    level, *levels = (r.configuration.values_of(space.capacity) for r in (best, *fitting))
    alike = [record for record, its in zip(fitting, levels, strict=True) if its == level]
    return BestTrial(
        record=best,
        gpu=gpu,
        space=space,
        cost=run_cost(best, space, gpu),
        gain=_gain(best, baseline, gpu),
        trials=trials,
        fitting=len(fitting),
        conditions=tuple(conditions),
        objective=objective,
        rivals=front.rivals(best, alike) if objective.name == front.THROUGHPUT.name else (),
        not_measured=_faster_but_lost(best, gone)
        if objective.name == front.THROUGHPUT.name
        else (),
        by_gpus=by_gpus(fitting, space, gpu),
    )


def _faster_but_lost(best: TrialRecord, records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Trials that ended by something else than themselves, by prediction faster than `best`."""
    found = []
    for record in records:
        lost = record.outcome.status is Status.INTERRUPTED or LOST in record.outcome.message
        prediction = record.outcome.prediction
        if record.source is best.source and lost and prediction is not None and prediction.fits:
            rate = prediction.speed.samples_per_s
            if rate > (front.samples_per_s(best) or 0.0):
                found.append((rate, record))
    return tuple(record for _, record in sorted(found, key=lambda pair: -pair[0]))


def not_measured_text(best: BestTrial) -> str:
    """Faster configurations whose trials were killed or lost; empty if there are none."""
    if not best.not_measured:
        return ""
    first, *others = best.not_measured
    assert first.outcome.prediction is not None
    values = settings_text(first.configuration, best.space.knobs or None)
    more = f", and {len(others)} more" if others else ""
    return (
        f"{values}, predicted at {first.outcome.prediction.speed.samples_per_s:.3g} samples/s: "
        f"{first.outcome.message.partition(chr(10))[0]}{more}; the same search tries it again"
    )


def find_baseline(
    records: Iterable[TrialRecord], settings: Mapping[str, Any] | None
) -> TrialRecord | None:
    """The trial whose configuration has all of `settings`.

    None when there is no such trial, or when `settings` leave open which of several is meant.
    """
    if not settings:
        return None
    wanted = Configuration(settings)
    matches = [
        r
        for r in records
        if all(r.configuration.get(name) == value for name, value in wanted.items())
    ]
    return matches[0] if len({r.configuration.key for r in matches}) == 1 else None


def best_yaml(
    best: BestTrial | None,
    space: facts.SpaceFacts,
    gpu: Gpu,
    *,
    trials: int,
    command: str = "",
    notes: Sequence[str] = (),
) -> str:
    """The text of `best.yaml`: two lines for people, then `BestTrial.to_dict` as YAML.

    Below that, `search` holds the command of the search and its notes.

    When nothing fits, `configuration` is null and the text says so, so that the file replaces the
    answer of an earlier search.
    """
    if best is None:
        comment = (
            f"# None of the {trials:,} configurations of {_one_line(space.name)} "
            f"fits {_one_line(gpu.name)} with its headroom.\n"
            "# Lower the minimums (--where), widen the search space, or take a larger GPU.\n"
        )
        data: dict[str, Any] = {"space": space.name, "gpu": _gpu_dict(gpu), "configuration": None}
    else:
        source = str(best.source).upper()
        device = _one_line(getattr(best.evidence, "device", "a GPU"))
        how = {
            Source.PREDICTED: "no GPU was used; verify it before you rely on it",
            Source.EMULATED: f"on an emulated {device}; times are estimates",
            Source.MEASURED: f"on {device}",
        }[best.source]
        comment = (
            f"# The fastest configuration of {_one_line(space.name)} found for "
            f"{_one_line(facts.times_text(best.gpus, gpu.name))}: it fits with "
            f"{format_gib(best.free_bytes)} to spare{' on each' * (best.gpus > 1)}.\n"
            + (f"# It needs most memory {_one_line(best.limit_text)}.\n" if best.limit_text else "")
            + (f"# NOT MEASURED: {_one_line(gone)}.\n" if (gone := not_measured_text(best)) else "")
            + f"# Every number of memory, speed, time and cost below is {source} ({how}).\n"
        )
        data = best.to_dict()
    if command or notes:
        data["search"] = {"command": command, "notes": list(notes)}
    body = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)
    return comment + body


def _gain(best: TrialRecord, baseline: TrialRecord | None, gpu: Gpu) -> _Gain | None:
    if baseline is None or baseline.source is not best.source:
        return None
    old_speed, new_speed = front.samples_per_s(baseline), front.samples_per_s(best)
    old_bytes, new_bytes = front.device_bytes(baseline), front.device_bytes(best)
    return _Gain(
        baseline=baseline,
        baseline_fits=front.fits_within(baseline, gpu.memory_bytes),
        speedup=new_speed / old_speed if old_speed and new_speed else None,
        saved_bytes=old_bytes - new_bytes if old_bytes and new_bytes else None,
    )


def _gpu_dict(gpu: Gpu) -> dict[str, Any]:
    return {
        "id": gpu.id,
        "name": gpu.name,
        "memory": format_gib(gpu.memory_bytes),
        "memory_bytes": gpu.memory_bytes,
    }


def close_calls_text(best: BestTrial) -> str:
    """The number of rivals and the configurations to measure; empty if none is worth measuring."""
    chosen = best.to_measure
    if not chosen:
        return ""
    differing = [n for n in best.names if len({c.get(n) for c in chosen}) > 1]
    each = (settings_text(c, differing) for c in chosen)
    several = len(best.rivals) != 1
    others = f"{len(best.rivals):,} other{'s are' if several else ' is'}"
    return f"{others} within prediction error; measure these {len(chosen)}: {'; '.join(each)}"


def check_text(record: TrialRecord) -> str:
    """The result of the emulated verification of a prediction, in short; empty without one."""
    check = record.verified_by
    if check is None:
        return ""
    ran = check.outcome.ran
    if ran is None:
        return f"emulated: {_ended_text(check)}"
    fits = "" if check.fits else ", does not fit"
    return f"emulated: {format_size(ran.memory.device_bytes)}{fits} (trial {check.trial_id})"


def _ended_text(check: TrialRecord) -> str:
    """The end of a verification that ran no steps: its status and message."""
    message = check.outcome.message.partition("\n")[0]
    return f"ended as {check.outcome.status}" + (f": {message}" if message else "")


def _one_line(text: str) -> str:
    """`text` for a comment: a line break in a name must not end the comment."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())
