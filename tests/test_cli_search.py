"""`tuner search` as people run it: a process of its own, a local Ray, a real if tiny model."""

import dataclasses
import json
from pathlib import Path

import pytest
import yaml
from cli_samples import make_trial, write_samples
from device_fakes import A6000, pretend
from started import start

from tuner.app.cli.main import run
from tuner.app.listener import Listener
from tuner.app.measuring import Measuring, Predicting
from tuner.app.search.plan import make_plan
from tuner.app.search.prepare import prepare
from tuner.app.target import load_targets
from tuner.core.errors import InputError, UnavailableError, install_command
from tuner.core.units import GIB
from tuner.searches.journal import read_journal
from tuner.searches.options import Mode, SearchOptions
from tuner.space import configure

ROOT = Path(__file__).parents[1]
SEARCH = ["search", "--space", "tiny.yaml", "--workers", "1"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_samples(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def options(**changes) -> SearchOptions:
    values = {"trials": 4, "seed": 0, "time_limit_s": None, "margin": None, "searcher": "tpe",
              "workers": None, "fresh": False, "address": None, "where": (),
              "settings": {}}  # fmt: skip
    return SearchOptions(**{**values, **changes})


@pytest.mark.slow
def test_search_then_best_then_show_then_again(folder, capsys):
    process = start(*SEARCH, "--gpu", "t4", "--trials", "4", "--price", "0.5")
    out, err = process.communicate(timeout=600)
    assert (process.returncode, err) == (0, "")
    # A command is on one line, to be copied.
    assert max(len(line) for line in out.splitlines() if " tuner " not in line) <= 80
    text = " ".join(out.split())
    # Half of the 30 configurations within the floors are bf16, which a T4 has not.
    assert "all 15 configurations" in text
    assert "15 configurations that the GPU cannot run: precision bf16" in text
    for part in ("lora_rank >= 8 (minimums of the space", "predicted, not measured", " done, ",
                 "Pareto front (predicted)", "Recommended (predicted)", "14.56 GiB",
                 "headroom", "an epoch of 1,000 examples", "USD an epoch, ",
                 "tuner show --space tiny.yaml --gpu t4"):  # fmt: skip
        assert part in text, part

    results = folder / "results" / "tiny" / "t4"
    names = ["best.yaml", "memory_course.json", "pareto.csv", "pareto.png",
             "predicted.jsonl.gz", "report.html", "trials.jsonl"]  # fmt: skip
    assert sorted(path.name for path in results.iterdir()) == names
    traced = read_journal(results / "trials.jsonl").records
    assert 1 <= len(traced) <= 4
    records = read_journal(results / "predicted.jsonl.gz").records
    assert len(records) == 15
    assert {r.configuration["precision"] for r in records} == {"fp16"}
    assert records[0].versions["model"].startswith("./tiny-model ")

    target = ["--space", "tiny.yaml", "--gpu", "t4"]
    assert run(["best", *target, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)
    fastest = max(r.outcome.prediction.speed.samples_per_s for r in records)
    assert best["speed"]["samples_per_s"] == pytest.approx(fastest, rel=1e-4)
    written = yaml.safe_load((results / "best.yaml").read_text())
    assert written["configuration"] == best["configuration"]
    assert run(["show", *target, "--json"]) == 0
    assert best["trial"]["id"] in [
        r["trial_id"] for r in json.loads(capsys.readouterr().out)["front"]
    ]

    # Another margin is taken into account everywhere, and nothing is traced again for that.
    before = (results / "trials.jsonl").read_text()
    again = start(*SEARCH, "--gpu", "t4", "--headroom", "99%", "--json")
    out, err = again.communicate(timeout=600)
    assert again.returncode == 1
    assert f"{len(traced)} traces from results/tiny/t4/trials.jsonl" in " ".join(err.split())
    assert "none of the 15 configurations is predicted to fit" in " ".join(err.split())
    lines = (results / "trials.jsonl").read_text()
    assert lines.startswith(before)
    assert len(lines.splitlines()) == 2 * len(traced)
    assert run(["best", *target]) == 1


class TestPlan:
    def target(self, gpu: str = "a6000", **changes):
        return load_targets("tiny.yaml", [gpu], **changes)[0]

    def test_other_model_has_results_of_its_own(self, folder):
        own, other = self.target(), self.target(model="gpt2")
        assert own.folder.path != other.folder.path
        assert other.space.model == "gpt2"
        assert "--model gpt2" in other.command("show")
        assert self.target(model="./tiny-model").folder == own.folder

    def test_settings_hold_a_knob_and_drop_its_floor(self, folder):
        plan = make_plan(self.target(), options(settings={"lora_rank": "4", "micro_batch": 2}))
        assert plan.conditions == ()
        assert {c["lora_rank"] for c in plan.part.supported} == {4}
        found = {c["micro_batch"]: plan.meets(c) for c in plan.target.space.configurations()}
        assert found == {2: True}
        other = configure(load_targets("tiny.yaml", ["a6000"])[0].space, {"micro_batch": 1})
        assert not plan.meets(other)

    def test_space_without_anything_the_gpu_can_run(self, folder):
        with pytest.raises(InputError, match="can run no configuration") as caught:
            make_plan(self.target("t4"), options(where=("precision == 'bf16'",)))
        assert "Turing" in str(caught.value)

    def test_a_gpu_here_is_predicted_where_a_library_of_trials_is_missing(
        self, folder, monkeypatch
    ):
        pretend(monkeypatch, A6000)
        assert isinstance(make_plan(self.target(), options()).trials_on, Measuring)
        monkeypatch.setattr("tuner.app.search.plan.find_spec", {"torch": True}.get)
        found = make_plan(self.target(), options()).trials_on
        assert found == Predicting(f"transformers is not installed ({install_command('all')})")
        with pytest.raises(UnavailableError, match="needs transformers, which is not installed"):
            make_plan(self.target(), options(mode=Mode.MEASURE))

    def test_nothing_is_written(self, folder):
        before = sorted(folder.rglob("*"))
        make_plan(self.target(), options())
        assert sorted(folder.rglob("*")) == before

    def test_fresh_keeps_the_journal_of_before(self, folder):
        from tuner.app.search.run import journal_of

        target = self.target()
        with target.folder.writer() as writer:
            writer.append(make_trial(folder, 20, 100, micro_batch=1))
        plan = make_plan(target, options(fresh=True))
        with journal_of(plan) as (writer, known):
            assert known == ()
            writer.append(make_trial(folder, 30, 200, micro_batch=2))
        kept = [read_journal(p).records for p in sorted(target.folder.path.glob("*.jsonl"))]
        assert [len(records) for records in kept] == [1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--min-gain", "1"], "'1' is not a share"),
        (["--min-gain", "1%", "--searcher", "tpe"], "does not estimate its gain"),
        (["--gpu-hours", "nan"], "'nan' is not a number above 0"),
        (["--study", "nowhere/study.log"], "folder that does not exist"),
        (["--study", "tiny.yaml"], "not an Optuna study"),
        (["--study", "tiny-model"], "is a folder"),
    ],
)
def test_impossible_option_is_refused(folder, capsys, arguments, message):
    assert run([*SEARCH, "--gpu", "a6000", "--mode", "predict", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_number_time_and_cost_are_said_before_the_first_trial(folder):
    heard = Listener()
    heard.say = (said := []).append
    gpu = Measuring("cuda:0", ("NVIDIA RTX A6000",), (48 * GIB,), {"CPU": 1, "GPU": 1}, (0,))
    for changes, at_most in (({}, "12.00"), ({"max_cost_usd": 1.5}, "1.50")):
        asked = options(mode=Mode.PREDICT, trials=5, **changes)
        plan = make_plan(load_targets("tiny.yaml", ["a6000"], price=2.0)[0], asked)
        prepare(dataclasses.replace(plan, trials_on=gpu), (), heard)
        # Each starts for 8 s, and is timed for 20 s at most.
        expected = "to run on a6000: 5 trials, about 2 min 20 s and 0.08 USD; at most"
        assert said[-1] == f"{expected} {at_most} USD"
    emulated = dataclasses.replace(gpu, emulated=True)
    prepare(dataclasses.replace(plan, trials_on=emulated), (), heard)
    assert said[-1] == "to run on a6000: 5 trials"
