"""Searches whose trials are no trials: what is predicted is what they come to, at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from shared_cases.tiny_model import CONFIG

from tuner.app import measuring
from tuner.app.search.plan import SearchPlan
from tuner.core.errors import TunerError
from tuner.core.records import (
    Memory,
    MemoryBudget,
    Outcome,
    Phase,
    Prediction,
    Speed,
    Status,
    TrialRecord,
)
from tuner.searches.progress import Progress, StoppedBy
from tuner.searches.ray import driver
from tuner.searches.request import SearchOutcome, SearchRequest

WIDE = """\
name: wide
workload: causal_lm
model: ./wide-model
knobs:
  micro_batch: [8, 10]
  max_length: [1024, 1100]
  precision: [fp16, bf16]
fixed: {effective_batch: 80, lora_rank: 8}
derived: {grad_accum: effective_batch // micro_batch}
data: {examples: 100000, epochs: 1, token_lengths: {mean: 500, max: 1024}, padding: longest}
baseline: {micro_batch: 8, max_length: 1024, precision: fp16}
"""
"""Two layers and a vocabulary whose logits are too large for 24 GB."""


def let_emulate(monkeypatch: pytest.MonkeyPatch) -> InProcess:
    """Have searches run as if anything could be emulated here; returns what runs their trials."""
    fake = InProcess()
    monkeypatch.setattr(driver, "search_all", fake)
    monkeypatch.setattr(measuring, "unavailable", lambda: None)
    return fake


def prediction_of(plan: SearchPlan, device_bytes: int, samples_per_s: float) -> Prediction:
    """A prediction of any configuration of a plan; all of its memory is reserved."""
    budget = MemoryBudget.of(plan.target.gpu.memory_bytes, plan.margin_fraction)
    return Prediction(
        budget=budget,
        memory=Memory(device_bytes, device_bytes, device_bytes, 0, {}, Phase.BACKWARD, {}),
        speed=Speed(1 / samples_per_s, samples_per_s, samples_per_s, samples_per_s, None),
        trainable_params=1,
        total_params=2,
        gpu=plan.target.gpu.id,
        method="made up",
    )


def write_wide(folder: Path) -> None:
    """`wide-model/config.json` and `wide.yaml` in `folder`."""
    config = {**CONFIG, "vocab_size": 300_000, "max_position_embeddings": 2048}
    (folder / "wide-model").mkdir()
    (folder / "wide-model" / "config.json").write_text(json.dumps(config))
    (folder / "wide.yaml").write_text(WIDE)


class InProcess:
    """Stands in for `tuner.searches.ray.driver.search_all` in searches with `--mode emulate`.

    Tries configurations in the space's order and keeps the requests of each call. `stops` says by
    GPU id how a search ends otherwise: interrupted after its first trial, or failed before it.
    """

    def __init__(self) -> None:
        self.calls: list[list[SearchRequest]] = []
        self.stops: dict[str, StoppedBy | TunerError] = {}
        self.lost: TunerError | None = None
        """What is raised once all trials have ended, as where Ray itself is lost."""

    def __call__(
        self,
        requests: Sequence[SearchRequest],
        *,
        on_progress: Callable[[Sequence[Progress]], None] = lambda progress: None,
        on_record: Callable[[TrialRecord], None] = lambda record: None,
    ) -> tuple[SearchOutcome, ...]:
        self.calls.append(list(requests))
        done = {request.gpu.id: 0 for request in requests}
        results = []
        for request in requests:
            known = [record for record in request.resume if request.is_known(record)]
            new = []
            for configuration in self._to_try(request, len(known)):
                new.append(_record(request, configuration, len(known) + len(new) + 1))
                on_record(new[-1])
                done[request.gpu.id] += 1
                on_progress([_progress(r, done[r.gpu.id]) for r in requests])
            results.append(self._result(request, known, new))
        if self.lost is not None:
            raise self.lost
        return tuple(results)

    def _to_try(self, request, known):
        left = max(0, request.options.trials - known)
        stop = self.stops.get(request.gpu.id)
        if stop is not None:
            left = 0 if isinstance(stop, TunerError) else min(left, 1)
        return request.candidates[known : known + left]

    def _result(self, request, known, new):
        stop = self.stops.get(request.gpu.id, StoppedBy.BUDGET)
        return SearchOutcome(
            records=(*known, *new),
            reused=len(known),
            candidates=len(request.candidates),
            stopped_by=stop if isinstance(stop, StoppedBy) else StoppedBy.INTERRUPTED,
            duration_s=1.0,
            failure=stop if isinstance(stop, TunerError) else None,
        )


def _record(request: SearchRequest, configuration, number: int) -> TrialRecord:
    prediction = request.predictions[configuration.key]
    fits = prediction.memory.device_bytes <= request.gpu.memory_bytes
    return TrialRecord(
        trial_id=f"run-{number:03}",
        space=request.space.name,
        gpu=request.gpu.id,
        gpu_memory_bytes=request.gpu.memory_bytes,
        configuration=configuration,
        outcome=Outcome(Status.OK if fits else Status.OOM, prediction=prediction),
        seed=request.options.seed,
        started_at="2026-05-01T12:00:00+00:00",
        versions=request.versions,
        searcher=request.options.searcher,
        run_id="run",
        emulated_device=request.trial_device.device,
        margin_bytes=request.margin_bytes,
    )


def _progress(request: SearchRequest, done: int) -> Progress:
    return Progress(
        done=done, running=0, oom=0, failed=0, reused=0, total=request.options.trials,
        best=None, elapsed_s=1.0, eta_s=None,
    )  # fmt: skip
