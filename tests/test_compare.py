"""`tuner compare`: what people use now, read from their files, against the recommendation."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from cli_samples import SPACE, make_trial, write_samples
from device_fakes import measured
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.app.baseline import read_baseline
from tuner.app.cli.main import run
from tuner.app.compare import predicted_best
from tuner.app.predicting import SpacePredictor
from tuner.core.errors import InputError
from tuner.program.edit.assign import value_of
from tuner.searches.store import ResultsFolder
from tuner.space import configure, load_space
from tuner.space.gpus import get_gpu

APPLY = """\
apply:
  hydra:
    file: config.yaml
    keys:
      data_loader.batch_size: micro_batch
      trainer.accumulate: grad_accum
      trainer.precision: "'16-mixed' if precision == 'fp16' else 'bf16-mixed'"
      trainer.four_bits: precision == 'nf4'
  script:
    file: "*.py"
    keys:
      .lora_r: lora_rank
      .max_length: max_length
"""
CONFIG = """\
data_loader: {{batch_size: {batch}, num_workers: 4}}
trainer:
  accumulate: {accumulate}   # ours
  precision: '{precision}'
  four_bits: false
lr: 2e-4"""
COMPARE = ["compare", "--space", "tiny.yaml", "--gpu", "a6000"]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    write_samples(tmp_path)
    (tmp_path / "tiny.yaml").write_text(SPACE + APPLY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


@pytest.fixture
def space(folder):
    return load_space("tiny.yaml")


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.write_text(text)
    return path


class TestBaseline:
    def test_a_flat_file_has_knobs_and_the_rest_is_the_spaces(self, space):
        path = write("now.yaml", "micro_batch: 2\nprecision: bf16\n")
        found = read_baseline(space, [path])
        expected = configure(space, {"micro_batch": 2, "precision": "bf16"})
        assert found.configuration == expected
        assert found.assumed == ("lora_rank", "max_length")

    def test_without_a_file_it_is_the_spaces_baseline(self, space):
        found = read_baseline(space, [], {"micro_batch": "4"})
        assert found.configuration == configure(space, {"micro_batch": 4})
        assert found.assumed == ()

    def test_the_effective_batch_is_what_the_file_makes_it(self, space):
        path = write("now.yaml", "micro_batch: 2\ngrad_accum: 8\n")
        found = read_baseline(space, [path]).configuration
        assert (found["effective_batch"], found["grad_accum"]) == (16, 8)

    def test_an_effective_batch_that_the_spaces_does_not_divide_is_read(self):
        """12 x 6 beside a space that holds 64: the project's batch is 72."""
        shipped = load_space("dynamo_t4")
        text = "training: {batch_size: 12, gradient_accumulation_steps: 6}\n"
        found = read_baseline(shipped, [write("config.yaml", text)]).configuration
        assert {n: found[n] for n in ("micro_batch", "grad_accum", "effective_batch")} == {
            "micro_batch": 12,
            "grad_accum": 6,
            "effective_batch": 72,
        }

    def test_the_ranks_of_a_trial_count_in_the_effective_batch(self, space):
        path = write("now.yaml", "micro_batch: 2\ngrad_accum: 8\ngpus_per_trial: 2\n")
        found = read_baseline(space, [path]).configuration
        assert (found["effective_batch"], found["grad_accum"]) == (32, 8)

    def test_own_files_are_read_through_the_mapping_backwards(self, space):
        config = write("config.yaml", CONFIG.format(batch=1, accumulate=2, precision="bf16-mixed"))
        script = write("train.py", 'CONFIG = {"lora_r": 4, "max_length": 96}\n')
        found = read_baseline(space, [config, script]).configuration
        assert {n: found[n] for n in ("micro_batch", "grad_accum", "effective_batch")} == {
            "micro_batch": 1,
            "grad_accum": 2,
            "effective_batch": 2,
        }
        assert (found["precision"], found["lora_rank"], found["max_length"]) == ("bf16", 4, 96)

    def test_what_disagrees_with_a_rule_of_the_space_is_a_note(self, space):
        path = write("now.yaml", "lora_rank: 4\nmixed_precision: 'no'\n")
        found = read_baseline(space, [path])
        assert found.configuration["mixed_precision"] == "fp16"
        assert "mixed_precision=no in the file is compared as fp16" in found.notes[0]

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("micro_bach: 2\nprecision: bf16\n", "did you mean 'micro_batch'"),
            ("micro_batch: many\n", "now.yaml:1 micro_batch: micro_batch cannot be 'many'"),
            ("learning_rate: 3\n", "no knob of this space"),
            ("micro_batch: 2\nmicro_batch: 4\n", "micro_batch"),
            ("micro_batch:\n", "micro_batch"),
        ],
    )
    def test_what_is_wrong_is_said_with_its_place(self, space, text, said):
        with pytest.raises(InputError) as caught:
            read_baseline(space, [write("now.yaml", text)])
        assert said in str(caught.value)

    def test_files_that_contradict_each_other_are_refused(self, space):
        one, two = write("a.yaml", "micro_batch: 2\n"), write("b.yaml", "micro_batch: 4\n")
        with pytest.raises(InputError, match=r"micro_batch is 4 here and 2 in a\.yaml:1"):
            read_baseline(space, [one, two])

    @given(data=st.data())
    @settings(max_examples=30)
    def test_what_the_mapping_writes_it_reads_back(self, space, data):
        wanted = data.draw(st.sampled_from(list(space.configurations(use_floors=False))))
        hydra, script = space.apply["hydra"].keys, space.apply["script"].keys
        values = [value_of(space, hydra[key], wanted) for key in list(hydra)[:3]]
        text = CONFIG.format(batch=values[0], accumulate=values[1], precision=values[2])
        config = write("config.yaml", text)
        numbers = {key[1:]: value_of(space, name, wanted) for key, name in script.items()}
        found = read_baseline(space, [config, write("train.py", f"C = {numbers!r}\n")])
        assert found.configuration == wanted


def as_json(capfd, *arguments: str):
    assert run([*COMPARE, *arguments, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


class TestCommand:
    @pytest.mark.slow
    def test_without_results_the_best_of_the_predicted_space_is_recommended(self, space, capfd):
        found = as_json(capfd, "--set", "micro_batch=1")
        predictor = SpacePredictor(space, get_gpu("a6000"))
        best, number = predicted_best(predictor, ())
        everything = predictor.predict(list(space.configurations()))
        fastest = max(each.prediction.speed.samples_per_s for each in everything)
        assert number == len(everything)
        assert found["recommended"]["samples_per_s"] == pytest.approx(fastest)
        assert found["recommended"]["configuration"] == best.configuration.to_dict()
        assert "no search was run" in found["chosen_from"]
        assert found["current"]["source"] == found["recommended"]["source"] == "predicted"

    def test_numbers_follow_from_each_other(self, folder, capfd):
        found = as_json(capfd, "--price", "2")
        for side in (found["current"], found["recommended"]):
            assert side["epoch_s"] == pytest.approx(1000 / side["samples_per_s"])
            assert side["run_s"] == pytest.approx(2 * side["epoch_s"])
            assert side["epoch_usd"] == pytest.approx(side["epoch_s"] / 3600 * 2)
            assert side["steps_per_epoch"] == 1000 / side["effective_batch"]
            assert side["device_bytes"] + side["free_bytes"] == get_gpu("a6000").memory_bytes
        assert found["speedup"] == pytest.approx(
            found["recommended"]["samples_per_s"] / found["current"]["samples_per_s"]
        )

    def test_lengths_that_are_cut_are_said(self, folder, capfd):
        found = as_json(capfd, "--set", "max_length=16")
        low, high = found["current"]["truncated_examples_share"]
        assert 0 < low < high <= 1  # the mean is 20 and the longest 30: nothing else is known
        recommended = found["recommended"]["configuration"]["max_length"]
        if recommended >= 30:
            assert found["recommended"]["truncated_examples_share"] == [0, 0]

    def test_a_search_is_taken_where_there_was_one(self, folder, capfd):
        with ResultsFolder(Path("results"), "tiny", "a6000").writer() as writer:
            writer.append(make_trial(folder, 20, 100, micro_batch=1))
            writer.append(make_trial(folder, 40, 300, micro_batch=2, precision="bf16"))
        found = as_json(capfd)
        assert found["recommended"]["configuration"]["precision"] == "bf16"
        assert found["recommended"]["configuration"]["micro_batch"] == 2
        assert "best of 2 that fit" in found["chosen_from"]

    def test_both_sides_are_measured_or_none(self, folder, capfd):
        one = measured(make_trial(folder, 20, 100, micro_batch=1), device="NVIDIA RTX A6000")
        two = measured(make_trial(folder, 30, 300, micro_batch=2), device="NVIDIA RTX A6000")
        with ResultsFolder(Path("results"), "tiny", "a6000").writer() as writer:
            writer.append(one)
            writer.append(two)
        found = as_json(capfd)
        assert found["current"]["source"] == found["recommended"]["source"] == "measured"
        assert found["speedup"] == pytest.approx(3)
        found = as_json(capfd, "--set", "micro_batch=4")
        assert found["current"]["source"] == found["recommended"]["source"] == "predicted"
        assert any("only one of the two was measured" in note for note in found["notes"])

    def test_trials_that_ran_correct_what_is_predicted(self, folder, capfd):
        with ResultsFolder(Path("results"), "tiny", "a6000").writer() as writer:
            for size in (1, 2):
                trial = make_trial(folder, 20 * size, 100 * size, micro_batch=size)
                writer.append(measured(trial, device="NVIDIA RTX A6000", factor=1.2))
        found = as_json(capfd, "--set", "micro_batch=4")
        assert any("corrected by 2 trials of this space" in note for note in found["notes"])
        plain = as_json(capfd, "--set", "micro_batch=4", "--no-calibration")
        assert not any("corrected" in note for note in plain["notes"])
        assert found["current"]["step_s"] > 1.05 * plain["current"]["step_s"]

    def test_markdown_is_a_table_and_the_notes_are_a_list(self, folder, capfd):
        write("config.yaml", CONFIG.format(batch=1, accumulate=2, precision="bf16-mixed"))
        assert run([*COMPARE, "--baseline", "config.yaml", "--format", "markdown"]) == 0
        lines = capfd.readouterr().out.splitlines()
        rows = [line for line in lines if line.startswith("|")]
        assert all(row.count("|") == 5 for row in rows)
        assert rows[1] == "|---|---:|---:|---:|"
        labels = {row.split("|")[1].strip() for row in rows}
        assert {"device memory", "samples/s", "time of the run", "cost of an epoch"} <= labels
        assert {"effective batch", "truncated examples", "micro_batch"} <= labels
        assert any(line.startswith("- the effective batches differ") for line in lines)

    def test_text_fits_the_screen(self, folder, capfd):
        assert run([*COMPARE, "--set", "micro_batch=1"]) == 0
        lines = capfd.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 100
        assert any(line.startswith("micro_batch") for line in lines)

    def test_nothing_fits(self, folder, capfd):
        assert run([*COMPARE, "--gpu-memory", "330MiB"]) == 1
        assert "nothing to compare with" in capfd.readouterr().err.replace("\n", " ")


def test_stages_give_the_time_of_all(folder):
    text = SPACE.replace("name: tiny", "name: staged").replace(
        "data:",
        "stages:\n  - {name: a, set: {lora_dropout: 0.0}}\n"
        "  - {name: b, set: {lora_dropout: 0.5}, examples: 500, epochs: 4}\ndata:",
    )
    write("staged.yaml", text)
    space = load_space("staged.yaml")
    predictor = SpacePredictor(space, get_gpu("a6000"))
    (found,) = predictor.predict([configure(space, {"micro_batch": 2})])
    plain = dataclasses.replace(space, stages=())
    each = [
        SpacePredictor(plain, get_gpu("a6000")).predict([c])[0].prediction.speed.samples_per_s
        for c in space.stage_configurations(found.configuration).values()
    ]
    assert found.staged.epoch_s == pytest.approx(1000 / each[0] + 500 / each[1])
    assert found.staged.run_s == pytest.approx(2 * 1000 / each[0] + 4 * 500 / each[1])
