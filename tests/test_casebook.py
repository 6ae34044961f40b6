"""docs/notebook/casebook.md is what its script makes of predictions; here of shallow models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from compiled_samples import shallow_model

from benchmarks.casebook import COLUMNS, numbers_of, page
from benchmarks.casebook_cases import SYSTEMS
from tuner.app.predicting import SpacePredictor
from tuner.core.units import format_duration, format_size, significant
from tuner.predict.predict import check_supported
from tuner.space import configure, load_space
from tuner.space.gpus import get_gpu

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/notebook/casebook.md"


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.space)
def test_what_was_used_can_be_predicted_on_its_gpus(system):
    """Complete, valid but for what the space allows, and in formats that the GPU has."""
    space = load_space(system.space)
    for gpu_name, used in system.used.items():
        assert gpu_name in space.gpus
        for settings in (*(one.settings for one in used), *(f.settings for f in system.findings)):
            configuration = configure(space, {**space.baseline, **settings}, strict=False)
            assert (
                configuration["micro_batch"] * configuration["grad_accum"]
                == (configuration["effective_batch"])
            )
            if gpu_name == next(iter(system.used)) or settings in [o.settings for o in used]:
                assert not check_supported(configuration, get_gpu(gpu_name))


@pytest.mark.proof
def test_the_numbers_of_the_page_are_those_of_the_predictor(tmp_path):
    (system,) = (s for s in SYSTEMS if s.space == "cot8b_h100")
    space, gpu = load_space(system.space), get_gpu("h100_sxm")
    model = shallow_model(tmp_path, space.model, 2)
    text = page([system], model=model)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(system.used["h100_sxm"]) + 1  # a header, and the recommended one
    predictor = SpacePredictor(replace(space, model=model), gpu)
    settings = [one.settings for one in system.used["h100_sxm"]]
    found = predictor.trace(
        [configure(space, {**space.baseline, **each}, strict=False) for each in settings]
    )
    for row, one, each in zip(rows[1:], system.used["h100_sxm"], found, strict=False):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        by_name = dict(zip(COLUMNS, cells, strict=True))
        memory, speed = each.prediction.memory, each.prediction.speed
        assert by_name[COLUMNS[0]] == one.label
        assert by_name["device"] == format_size(memory.device_bytes)
        assert by_name["backward"] == format_size(memory.phase_peak_bytes["backward"])
        assert by_name["step"] == format_duration(speed.step_s)
        assert by_name["samples/s"] == significant(speed.samples_per_s)
        assert by_name["fits"] == "yes"
    assert numbers_of(found[0], space)["device"] in text.partition("missed")[2]


def test_the_page_recommends_what_the_committed_results_recommend():
    """After another search of a shipped space the page has to be written again."""
    text = PAGE.read_text()
    for system in SYSTEMS:
        section = text.partition(f"Space [`{system.space}`]")[2].partition("\n## ")[0]
        for gpu_name in system.used:
            gpu = get_gpu(gpu_name)
            table = section.partition(f"**{gpu.name}**")[2].partition("Recommended: ")[0]
            (line,) = (row for row in table.splitlines() if row.startswith("| **recommended**"))
            row = dict(zip(COLUMNS, (cell.strip() for cell in line.split("|")[1:]), strict=False))
            path = ROOT / "results" / system.space / gpu.id / "best.yaml"
            best = yaml.safe_load(path.read_text())
            trials = best["chosen_from"]["trials"]
            assert row["said"] == f"fastest of {trials:,} {best['source']}", (
                system.space,
                gpu_name,
            )
            device_bytes = best["memory"]["peak_device_bytes"]
            assert row["device"].partition(" (")[0] == format_size(device_bytes)
            assert row["samples/s"] == significant(best["speed"]["samples_per_s"])


def test_the_committed_page_shows_every_system_or_says_that_it_does_not():
    text = PAGE.read_text()
    left_out = text.partition("Left out here: ")[2].partition(".")[0].split(", ")
    for system in SYSTEMS:
        shown = f"## {system.title}" in text and f"../search_spaces/{system.space}.yaml" in text
        assert shown != (system.space in left_out), system.space
    assert "{" not in text
