"""`tuner report-run`: rows of measured runs, what is private, implausible, and what corrects."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import tomllib
from pathlib import Path

import msgspec
import pytest
from jsonschema import Draft202012Validator

from benchmarks.reported_runs import ROWS, authors, check
from tuner import __version__
from tuner.app import reported
from tuner.app.cli.main import run
from tuner.app.estimate import estimate_configuration, one_configuration
from tuner.app.machine_facts import tested as pinned_versions
from tuner.app.reported import corrected_by_rows, row_of_file, rows_of_trials
from tuner.app.targets import load_targets
from tuner.core.units import GIB
from tuner.report import reported as rows_module
from tuner.report.reported import (
    MeasuredNumbers,
    ReportedRun,
    architecture_of,
    looks_of,
    problems_of,
    public,
    public_configuration,
    public_model,
    public_versions,
    read_rows,
    schema,
)
from tuner.searches.journal import read_journal
from tuner.searches.store import ResultsFolder
from tuner.space.gpus import get_gpu
from tuner.space.models.catalogue import get_entry

ROOT = Path(__file__).resolve().parents[2]
WHERE = ("--space", "tiny_cpu", "--gpu", "cpu")


@pytest.fixture(autouse=True)
def own_reporter(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    reported._reporter.cache_clear()
    yield
    reported._reporter.cache_clear()


def changed(row: ReportedRun, **fields) -> ReportedRun:
    """The row with other fields; those of `measured` and `predicted` by their own names."""
    for part in ("measured", "predicted"):
        old = getattr(row, part)
        new = {
            k: fields.pop(f"{part}_{k}") for k in old.__struct_fields__ if f"{part}_{k}" in fields
        }
        fields[part] = msgspec.structs.replace(old, **new)
    return msgspec.structs.replace(row, **fields)


@pytest.fixture(scope="module")
def estimate():
    space, configuration = one_configuration(None, "tiny-llama-3m", {"lora_rank": 8})
    return estimate_configuration(space, configuration, get_gpu("a6000"))


@pytest.fixture
def row(estimate) -> ReportedRun:
    """A run on an A6000 that took 10 % more memory and 20 % more time than predicted."""
    predicted = reported.predicted_numbers(estimate.prediction)
    factors = {"step_s": 1.2, "device_bytes": 1.1, "peak_reserved_bytes": 1.1}
    return ReportedRun(
        schema=2,
        gpu="a6000",
        workload="causal_lm",
        configuration=public_configuration("causal_lm", estimate.configuration.to_dict()),
        versions={"tuner": __version__, "torch": "2.13.0+cu126", "transformers": "5.23.0"},
        measured=MeasuredNumbers(
            peak_allocated_bytes=predicted.peak_allocated_bytes,
            **{n: type(v := getattr(predicted, n))(v * f) for n, f in factors.items()},
        ),
        predicted=predicted,
        model="tiny-llama-3m",
        device="NVIDIA RTX A6000",
        gpu_memory_bytes=get_gpu("a6000").memory_bytes,
        lengths="full",
        steps=8,
        reporter="00000001",
    )


def test_a_row_has_predicted_beside_measured_and_the_fastest_comes_first(capsys):
    assert run(["report-run", *WHERE]) == 0
    told = capsys.readouterr()
    rows = [json.loads(line) for line in told.out.splitlines()]
    speeds = [row["configuration"]["effective_batch"] / row["measured"]["step_s"] for row in rows]
    assert len(rows) > 5
    assert speeds == pytest.approx(sorted(speeds, reverse=True), rel=0.02)
    assert all(row["measured"].keys() <= row["predicted"].keys() for row in rows)
    assert len({row["reporter"] for row in rows}) == 1
    assert "nothing was sent" in told.err


SECRETS = (
    "/home/jane.doe/acme", "acme/secret-llm-7b", "jane.doe", "gpu-node-17.acme.internal",
    "hf_QmFzZTY0VG9rZW5Gb3JBY21l", "git@github.com:acme/secret.git", "acme_train_2026.jsonl",
    "run-acme-merger", "sk-proj-acmeacmeacme", "acme_head",
)  # fmt: skip


def test_nothing_private_is_in_a_row_of_trials(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "results" / "tiny_cpu", tmp_path / "results" / "tiny_cpu")
    secret = str(tmp_path / "secret")
    folder = ResultsFolder(tmp_path / "results", "tiny_cpu", "cpu")
    records = read_journal(folder.journal).records
    folder.journal.unlink()
    with folder.writer() as writer:
        for record in records:
            private = record.configuration.replace(data=secret, lora_targets=(secret, "q_proj"))
            versions = {
                **record.versions,
                "model": f"{secret} 356d8390dd8725ec",
                "torch": "2.13.0+acme.internal",
                "acme-trainer": "1.0",
            }
            outcome = record.outcome
            if outcome.measurement is not None:
                ran = dataclasses.replace(outcome.measurement, weights=secret, notes=(secret,))
                outcome = dataclasses.replace(outcome, measurement=ran)
            writer.append(
                dataclasses.replace(
                    record,
                    configuration=private,
                    run_id=secret,
                    versions=versions,
                    outcome=outcome,
                )
            )
    monkeypatch.chdir(tmp_path)
    (target,) = load_targets("tiny_cpu", ["cpu"], results=tmp_path / "results")
    target = dataclasses.replace(target, space=dataclasses.replace(target.space, model=secret))
    rows = rows_of_trials(target)
    assert rows
    text = "".join(row.to_json() for row in rows)
    assert secret not in text
    assert "acme" not in text
    assert all(row.architecture == {"digest": "356d8390dd8725ec"} for row in rows)
    assert all(row.configuration["lora_targets"] == ["other", "q_proj"] for row in rows)
    assert {row.weights for row in rows} == {"checkpoint"}


@pytest.mark.parametrize("secret", SECRETS)
def test_nothing_private_is_left_of_a_row_that_was_made_of_secrets(row, tmp_path, secret):
    made = changed(
        row,
        gpu=secret,
        device=secret,
        workload=secret,
        model=secret,
        architecture={"hidden_size": 64, "model_type": secret, secret: 1, "head_dim": secret},
        configuration={
            **row.configuration, secret: 1, "data": secret, "attention": secret,
            "lora_targets": [secret, "q_proj"], "modules_to_save": secret,
        },
        versions={**row.versions, secret: "1.0", "torch": f"2.13.0+{secret}", "trl": secret},
    )  # fmt: skip
    path = tmp_path / "tuner-run.json"
    path.write_text(made.to_json())
    found = row_of_file(path)
    assert secret in made.to_json()
    assert secret not in found.to_json()
    assert not any(part in found.to_json() for part in ("acme", "jane", "hf_", "sk-"))
    assert found.architecture == {"hidden_size": 64}
    assert found.versions["torch"] == "2.13.0"


def test_a_private_model_is_its_numbers_even_under_a_public_name():
    config = dict(get_entry("tiny-llama-3m").config)
    assert public_model("tiny-llama-3m", config)["model"] == "tiny-llama-3m"
    widened = {**config, "hidden_size": 12_345, "_name_or_path": "/home/jane"}
    found = public_model("tiny-llama-3m", widened)
    assert found["model"] is None
    assert found["architecture"]["hidden_size"] == 12_345
    assert found["architecture"]["model_type"] == "llama"
    assert architecture_of({"model_type": "acme", "hidden_size": True}) == {"hidden_size": True}


def test_versions_keep_their_release_and_its_public_build():
    versions = {"torch": "2.13.0+cu126", "peft": "0.21.2+acme", "trl": "1.16.0.dev0+git.1a2b3c"}
    assert public_versions(versions) == {
        "torch": "2.13.0+cu126",
        "peft": "0.21.2",
        "trl": "1.16.0.dev0",
    }


def test_the_file_of_a_row_is_exported_to_one_of_its_own(row, tmp_path, capsys):
    source, folder = tmp_path / "tuner-run.json", tmp_path / "rows"
    source.write_text(changed(row, reporter=None).to_json())
    assert run(["report-run", str(source), "--to", str(folder)]) == 0
    (path,) = folder.iterdir()
    assert str(path) in capsys.readouterr().out
    (written,) = read_rows(folder).values()
    assert written.reporter == (tmp_path / "config/tuner/reporter").read_text()
    assert changed(written, reporter=row.reporter) == row
    assert check(folder) == ([], [])
    source.write_text(changed(row, measured_step_s=0.0).to_json())
    assert run(["report-run", str(source), "--to", str(tmp_path / "none")]) == 1
    assert not (tmp_path / "none").exists()
    source.write_text("{}")
    assert run(["report-run", str(source)]) == 2
    assert run(["report-run"]) == 2


def test_what_was_only_predicted_is_no_run(capsys):
    assert run(["report-run", "--space", "qlora27b", "--gpu", "a6000"]) == 3
    assert "was measured on NVIDIA RTX A6000" in capsys.readouterr().err


# -- the validator --------------------------------------------------------------------------------


def test_the_committed_rows_are_plausible():
    refused, _ = check(ROWS)
    assert refused == []
    assert len(read_rows(ROWS)) >= 36


def test_the_schema_is_current_and_the_rows_meet_it():
    found = json.loads((ROOT / "docs/schemas/reported-run.json").read_text())
    assert found == schema(), "run `python tests/json_schemas.py reported-run`"
    validator = Draft202012Validator(found)
    for row in read_rows(ROWS).values():
        validator.validate(json.loads(row.to_json()))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"measured_step_s": 1e-9}, "the GPU's peak rate needs"),
        ({"measured_step_s": 0.0}, "expected more than 0"),
        ({"measured_step_s": float("inf")}, "expected more than 0"),
        ({"measured_device_bytes": 90 * GIB}, "is above the GPU's memory"),
        ({"measured_peak_allocated_bytes": 40 * GIB}, "is above peak_reserved_bytes"),
        ({"measured_peak_reserved_bytes": 40 * GIB}, "is above device_bytes"),
        ({"measured_device_bytes": None}, "are needed of a GPU"),
        ({"gpu": "rtx9999"}, "unknown GPU 'rtx9999'"),
        ({"versions": {"tuner": "0.1.0"}}, "versions missing: torch, transformers"),
        ({"model": None}, "neither a model nor its architecture"),
        ({"device": "our own box"}, "that tuner has no name for"),
    ],
)
def test_implausible_rows_are_refused(row, changes, said):
    assert list(problems_of(row)) == []
    assert any(said in text for text in problems_of(changed(row, **changes)))


def test_a_row_far_from_its_prediction_is_named_and_not_refused(row, tmp_path):
    far = changed(row, measured_step_s=row.predicted.step_s * 3)
    (tmp_path / far.file_name).write_text(far.to_json())
    assert check(tmp_path) == ([], [f"{far.file_name}: step_s is 3.00 times the predicted one"])
    assert not list(looks_of(row))


def test_copies_and_wrong_names_are_refused(row, tmp_path):
    copy = changed(row, reporter="00000002", steps=9)
    for one in (row, copy):
        (tmp_path / one.file_name).write_text(one.to_json())
    (tmp_path / "mine.json").write_text(changed(row, steps=10, reporter=None).to_json())
    (tmp_path / "notes.md").write_text("no row")
    refused, _ = check(tmp_path)
    assert sum("the same run as" in text for text in refused) == 2
    assert sum("no reporter" in text or "belongs in" in text for text in refused) == 2
    assert any("notes.md is not the row" in text for text in refused)


def test_one_author_is_one_reporter(row, tmp_path):
    def git(*words: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *author, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    for number in (1, 2):
        one = changed(row, reporter=f"0000000{number}", measured_step_s=1.0 * number)
        (tmp_path / one.file_name).write_text(one.to_json())
        git("add", ".")
        git("commit", "-m", "a row")
    (refused,) = [t for t in check(tmp_path)[0] if "reporter" in t]
    assert "its author has rows of reporter 0000000" in refused
    # The oldest commit of a shallow clone seems to add everything.
    git("clone", "--depth", "1", f"file://{tmp_path}", str(tmp_path / "shallow"))
    assert authors(tmp_path / "shallow") == {}


# -- corrections ----------------------------------------------------------------------------------


def of_reporters(row: ReportedRun, *slower: float, **fields) -> list[ReportedRun]:
    """Rows of as many reporters, so many times slower than predicted."""
    predicted = row.predicted.step_s
    return [
        changed(row, reporter=f"{n:08x}", measured_step_s=predicted * factor, **fields)
        for n, factor in enumerate(slower)
    ]


def corrected(estimate, rows):
    how = (estimate.prediction, estimate.space.model, estimate.space.workload)
    return corrected_by_rows(*how, estimate.configuration, rows)


def test_three_reporters_that_agree_correct_the_prediction(estimate, row):
    before = estimate.prediction
    found, count = corrected(estimate, of_reporters(row, 1.20, 1.22, 1.18))
    assert count == 3
    assert before.speed.step_s * 1.05 < found.speed.step_s < before.speed.step_s * 1.22
    assert found.memory.device_bytes > before.memory.device_bytes
    low, high = found.intervals["step_s"]
    assert low < before.speed.step_s * 1.2 < high
    assert "corrected by 3 reported runs" in reported.rows_text(count)


@pytest.mark.parametrize(
    ("slower", "fields"),
    [
        ((1.2, 1.2), {}),
        ((1.0, 1.2, 1.45), {}),
        ((1.2, 1.2, 1.2, 0.8, 0.7), {}),
        ((1.2, 1.2, 1.2), {"disturbed": ["another process"]}),
        ((1.2, 1.2, 1.2), {"gpu": "t4"}),
        ((1.2, 1.2, 1.2), {"model": "tiny-gpt2"}),
        ((1.2, 1.2, 1.2), {"predicted_is_corrected": True}),
        ((1.2, 1.2, 1.2), {"versions": {"tuner": "0.0.1"}}),
        ((1.2, 1.2, 1.2), {"lengths": "data"}),
        ((1.9, 1.9, 1.9), {}),
    ],
)
def test_others_correct_nothing(estimate, row, slower, fields):
    # Only times are reported, so that memory has no say.
    fields = {"measured_device_bytes": None, "measured_peak_reserved_bytes": None,
              "measured_peak_allocated_bytes": None, **fields}  # fmt: skip
    assert corrected(estimate, of_reporters(row, *slower, **fields)) == (estimate.prediction, 0)


def test_one_reporter_has_one_vote_and_one_kind_says_nothing_of_another(estimate, row):
    rows = [changed(one, reporter="00000001") for one in of_reporters(row, 1.2, 1.21, 1.19)]
    assert corrected(estimate, rows)[1] == 0
    other = {**row.configuration, "gradient_checkpointing": False}
    assert corrected(estimate, of_reporters(row, 1.2, 1.2, 1.2, configuration=other))[1] == 0


def test_the_commands_name_the_correction_and_can_leave_it_out(estimate, row, monkeypatch, capsys):
    rows = of_reporters(row, 1.2, 1.2, 1.2)
    monkeypatch.setattr(reported, "shipped_rows", lambda: rows)
    asked = ["estimate", "--model", "tiny-llama-3m", "--gpu", "a6000", "--set", "lora_rank=8"]
    assert run(asked) == 0
    assert "corrected by 3 reported runs of this model" in " ".join(capsys.readouterr().out.split())
    assert run([*asked, "--no-calibration", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["corrected_by_rows"] == 0
    assert run([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["corrected_by_rows"] == 3


def test_a_file_that_is_no_row_stops_no_prediction(monkeypatch, tmp_path, row):
    folder = tmp_path / "reported_runs"
    folder.mkdir()
    (folder / "mine.json").write_text("{}")
    (folder / row.file_name).write_text(row.to_json())
    monkeypatch.setattr(rows_module, "__file__", str(tmp_path / "report" / "reported.py"))
    assert rows_module.shipped_rows.__wrapped__() == (row,)


def test_the_shipped_rows_correct_nothing_yet():
    """Fewer than three reporters share a model, a GPU and a kind of training."""
    rows = list(reported.shipped_rows())
    assert rows
    assert len({row.reporter for row in rows if row.gpu != "cpu"}) < reported.NEEDED


def test_the_pinned_extra_names_the_tested_versions():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    pinned = dict(line.split("==") for line in extras["pinned"] if "==" in line)
    wanted = {line.split(">=")[0] for line in extras["all"]} - {"ray[default,tune]"} | {"ray"}
    assert pinned == {name: pinned_versions()[name] for name in wanted}


def test_public_changes_nothing_that_is_public(row):
    assert public(row) == row
