"""Compiled predictions against full-depth traces: random configurations of two models."""

from __future__ import annotations

import itertools
import os
import random

import pytest
from compiled_samples import (
    DEPTHS,
    configurations,
    differences,
    gpu_for,
    shallow_model,
    structures,
)

from tuner.predict.predict import predict, resolve_subject
from tuner.predict.predictor import METHOD, PredictionJob, Predictor
from tuner.space.models.catalogue import architecture

SEED = 20260
STRUCTURES, SIZES = 10, 6
"""For each model: so many structures, each at so many sizes."""


ALLOWED = {
    "peak_allocated": 0.005,
    # Phases are compared in parts of the peak: what is far from it decides nothing.
    "load_peak": 0.005,
    "forward_peak": 0.005,
    "backward_peak": 0.005,
    "optimizer_peak": 0.005,
    "loaded": 0.005,
    "step_s": 0.01,
}


@pytest.mark.proof
@pytest.mark.parametrize("model", DEPTHS)
def test_compiled_predictions_are_those_of_full_traces(model, tmp_path):
    folder = shallow_model(tmp_path, model, DEPTHS[model])
    subject, predictor = (
        resolve_subject("causal_lm", folder),
        Predictor(PredictionJob("causal_lm", folder)),
    )
    source, window = random.Random(f"{SEED} {model}"), architecture(folder).sliding_window
    problems, reached = [], dict.fromkeys(ALLOWED, 0.0)
    number, sizes = STRUCTURES, SIZES
    if "CI" in os.environ:
        number, sizes = number // 5, 2
    for structure in itertools.islice(structures(SEED + len(model)), number):
        chosen = configurations(structure, source, window=window, number=sizes)
        gpu = gpu_for(chosen[0], source)
        for configuration, ours in zip(chosen, predictor.predict(chosen, gpu), strict=True):
            full = predict(subject, configuration, gpu)
            apart = differences(ours, full)
            reached = {name: max(apart[name], value) for name, value in reached.items()}
            wrong = {n: f"{apart[n]:.4%}" for n, limit in ALLOWED.items() if apart[n] > limit}
            if not ours.method.startswith(METHOD):
                wrong["method"] = ours.method
            if (ours.trainable_params, ours.total_params) != (
                full.trainable_params,
                full.total_params,
            ):
                wrong["params"] = f"{ours.trainable_params}, {full.trainable_params}"
            for each in (ours, full):
                if sum(each.memory.breakdown.values()) != each.memory.device_bytes:
                    wrong["breakdown"] = str(each.memory)
            if wrong:
                problems.append(f"{wrong} on {gpu.id}: {configuration.to_dict()}")
    worst = ", ".join(f"{name} {value:.4%}" for name, value in reached.items())
    assert not problems, f"largest differences: {worst}\n" + "\n".join(problems)
