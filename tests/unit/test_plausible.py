"""Records of a journal that cannot be: set aside, counted and named, never recommended."""

import dataclasses

import pytest
from cli_samples import make_trial, write_samples

from tuner.app.cli.main import run
from tuner.app.target import excluded_text, sorted_out
from tuner.searches.store import ResultsFolder
from tuner.space import load_space

GOOD = {"micro_batch": 2}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_samples(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_journal(folder, *records):
    with ResultsFolder(folder / "results", "tiny", "a6000").writer() as writer:
        for record in records:
            writer.append(record)


def with_prediction(record, **changes):
    changed = dataclasses.replace(record.outcome.prediction, **changes)
    outcome = dataclasses.replace(record.outcome, prediction=changed)
    return dataclasses.replace(record, outcome=outcome)


def with_speed(record, **changes):
    speed = record.outcome.prediction.speed
    return with_prediction(record, speed=dataclasses.replace(speed, **changes))


def with_value(record, **values):
    return dataclasses.replace(record, configuration=record.configuration.replace(**values))


BAD = {
    "samples": lambda r: with_speed(r, samples_per_s=1e30),
    "no samples": lambda r: with_speed(r, samples_per_s=0.0),
    "step": lambda r: with_speed(r, step_s=5e-324),
    "tokens": lambda r: with_speed(r, tokens_per_s=1e29),
    "interval": lambda r: with_prediction(r, intervals={"step_s": (8.0, -0.0)}),
    "huge": lambda r: with_value(r, micro_batch=1e300),
    "word": lambda r: with_value(r, micro_batch="x' + __import__('os')"),
    "half": lambda r: with_value(r, micro_batch=2.5),
    "true": lambda r: with_value(r, micro_batch=True),
    "none": lambda r: dataclasses.replace(r, configuration=type(r.configuration)({})),
    "choice": lambda r: with_value(r, precision="rm -rf"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_is_set_aside(folder, kind):
    space = load_space("tiny.yaml")
    good = make_trial(folder, 10, 100, **GOOD)
    kept, excluded = sorted_out((good, BAD[kind](good)), space)
    assert kept == [good]
    assert len(excluded) == 1
    assert excluded_text(excluded).startswith("1 impossible record set aside (")


def test_a_value_that_was_set_on_the_command_line_stays(folder):
    good = with_value(make_trial(folder, 10, 100, **GOOD), micro_batch=3)
    assert sorted_out((good,), load_space("tiny.yaml")) == ([good], [])


@pytest.mark.parametrize("command", ["best", "show", "report"])
def test_nothing_impossible_is_recommended_and_it_is_said(folder, capsys, caplog, command):
    good = make_trial(folder, 10, 100, **GOOD)
    bad = with_speed(make_trial(folder, 10, 100, micro_batch=4), samples_per_s=1e20)
    write_journal(folder, good, bad)
    assert run([command, "--space", "tiny.yaml", "--gpu", "a6000"]) == 0
    assert "1 impossible record set aside" in caplog.text
    assert run(["best", "--space", "tiny.yaml", "--gpu", "a6000", "--json"]) == 0
    assert '"micro_batch": 2' in capsys.readouterr().out


def test_a_journal_of_nothing_else_is_an_answer(folder, capsys):
    write_journal(folder, with_value(make_trial(folder, 10, 100, **GOOD), micro_batch=1e300))
    assert run(["best", "--space", "tiny.yaml", "--gpu", "a6000"]) == 3
    assert "has no usable record: 1 impossible record" in capsys.readouterr().err


def test_of_a_processor_too_whose_memory_is_another(folder, capsys):
    bad = with_value(make_trial(folder, 10, 100, **GOOD), micro_batch=1e300)
    with ResultsFolder(folder / "results", "tiny", "cpu").writer() as writer:
        writer.append(dataclasses.replace(bad, gpu="cpu"))
    assert run(["best", "--space", "tiny.yaml", "--gpu", "cpu"]) == 3
    assert "has no usable record: 1 impossible record" in capsys.readouterr().err
