"""Without the extra `[all]`: what answers all the same, and what the others say."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from dataclasses import replace
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_architecture import FILES, imports

from tuner.app.cli.main import run
from tuner.core.errors import DISTRIBUTION, MODULES, install_command
from tuner.predict.shipped import shipped
from tuner.predict.traces import Traces
from tuner.searches.journal import read_journal
from tuner.trial.base import OUTCOME_LIBRARIES

ROOT = Path(__file__).parents[1]

# A process in which the modules of the extra are not found runs each command line.
WITHOUT = """
import contextlib, io, json, sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in MODULES:
            return self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

MODULES = json.loads(sys.argv[1])
sys.meta_path[:] = map(Without, sys.meta_path)
from tuner.app.cli.main import run

found = []
for line in json.loads(sys.argv[2]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(line)
    found.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""

RESULTS = ("--space", "qlora27b", "--gpu", "a6000")
ANSWER = (
    ("best", *RESULTS),
    ("best", *RESULTS, "--where", "max_length >= 2048"),
    ("show", *RESULTS),
    ("export", *RESULTS, "--format", "trl"),
    ("gpus",),
    ("gpus", "a6000"),
    ("models",),
    ("models", "qwen3-8b"),
    ("spaces",),
    ("spaces", "qlora27b"),
)
SCRIPT = str(ROOT / "examples" / "programs" / "sft.py")
ANSWER += tuple(
    ("check", "--predict", "--gpu", "a6000", "--largest", name, SCRIPT, "qwen3-8b")
    for name in ("max_length", "lora_rank")  # the largest rank that ships fits
)
KEPT = Path("results") / "qwen7b_lora" / "a6000"
FROM_WHAT_SHIPS = (
    ("check", "--gpu", "rtx4090", SCRIPT, "llama-3.2-1b"),
    ("check", "--gpu", "all", SCRIPT, "llama-3.2-1b"),
    ("estimate", "--model", "qwen3-0.6b", "--gpu", "rtx4090", "--qlora", "--batch-size", "2"),
    ("estimate", *RESULTS),
    ("tune", "--predict", "--gpu", "rtx4090", SCRIPT, "qwen3-0.6b"),
)
ASK = (
    ("estimate", "--model", "olmo-2-7b", "--gpu", "rtx4090"),
    ("estimate", *RESULTS, "--model", "qwen3-8b"),
    ("estimate", "--model", "someone/a-model", "--gpu", "rtx4090"),
    ("estimate", "--model", "folder", "--gpu", "rtx4090"),
    ("search", *RESULTS, "--mode", "measure"),
    ("search", *RESULTS, "--mode", "emulate"),
    ("search", *RESULTS, "--address", "auto"),
    ("search", "--space", "tiny_cpu", "--gpu", "cpu"),
    ("search", "--space", "qwen7b_lora", "--gpu", "a6000", "--fresh"),
    ("search", "--space", "own.yaml", "--gpu", "rtx4090", "--model", "olmo-2-7b"),
    ("calibrate",),
    ("models", "hollow", "tiny-llama-3m", "hollow"),
)


def test_the_extra_has_the_packages_of_these_modules():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {
        line.partition(">=")[0].partition("[")[0]
        for line in project["optional-dependencies"]["all"]
    }
    assert project["name"] == DISTRIBUTION
    assert DISTRIBUTION in project["scripts"]
    assert names == set(MODULES.values())
    assert not names & {line.partition(">=")[0] for line in project["dependencies"]}


def test_every_module_that_a_base_install_lacks_is_known():
    """But for those of other extras, and of programs, which are asked for before their import."""
    elsewhere = (
        "anyio deepspeed grpc jsonschema liger_kernel mcp mcp_types pandas pytest safetensors trl"
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    base = {canonicalize_name(Requirement(one).name) for one in project["dependencies"]}
    brought = packages_distributions()
    imported = {name.partition(".")[0] for path in FILES for name, _ in imports(path)}
    unknown = imported - {*MODULES, *elsewhere.split(), *sys.stdlib_module_names, "tuner"}
    unknown -= {"markupsafe"}  # of jinja2
    assert {one for one in unknown if not base & {*map(canonicalize_name, brought[one])}} == set()


OWN = """
name: own
description: all of its configurations have compiled timelines
workload: causal_lm
model: qwen3-0.6b
gpus: [rtx4090]
knobs:
  micro_batch: [1, 2, 4]
  lora_rank: [16, 24]
  optimizer: [adamw_torch_fused, paged_adamw_8bit]
fixed:
  max_length: 8192
  effective_batch: 16
  precision: nf4
  compute_dtype: bf16
  mixed_precision: bf16
  adapter_dtype: bf16
  kbit_preparation: none
  gradient_checkpointing: true
  training_loop: trainer
  loss: chunked
derived: {grad_accum: effective_batch // micro_batch}
objectives: [samples_per_s, device_bytes]
"""
OWN_RESULTS = ("--space", "own.yaml", "--gpu", "rtx4090")
SEARCHED = (
    ("search", *OWN_RESULTS),
    ("search", *OWN_RESULTS, "--json", "--fresh"),
    ("best", *OWN_RESULTS),
    ("show", *OWN_RESULTS),
    ("report", *OWN_RESULTS),
    ("export", *OWN_RESULTS, "--format", "trl"),
    ("apply", *OWN_RESULTS, "--yes", "train.py", "qwen3-0.6b"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "own.yaml").write_text(OWN)
    shutil.copy(SCRIPT, folder / "train.py")
    kept = folder / KEPT
    kept.mkdir(parents=True)
    shutil.copy(ROOT / KEPT / "trials.jsonl", kept)
    (folder / "folder").mkdir()
    (folder / "folder" / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture(scope="module")
def answers(folder):
    lines = [*ASK, *ANSWER, *SEARCHED]
    arguments = [sys.executable, "-c", WITHOUT, json.dumps([*MODULES]), json.dumps(lines)]
    done = subprocess.run(
        arguments,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(zip(lines, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("line", [*ANSWER, *SEARCHED], ids=" ".join)
def test_what_is_read_needs_no_extra(answers, line):
    code, out, err = answers[line]
    assert code == 0, err
    assert out


@pytest.mark.parametrize("line", ASK, ids=" ".join)
def test_what_predicts_or_searches_says_what_to_install(answers, line):
    code, _, err = answers[line]
    assert code == 3
    assert "not installed" in err or "not answered without PyTorch" in err
    assert install_command("all") in err


def test_what_needs_the_extra_says_so_before_it_writes(answers, folder):
    """Not even a journal is renamed for `--fresh`."""
    results = folder / "results"
    assert {path.name for path in results.iterdir()} == {"own", "qwen7b_lora"}
    assert [path.name for path in (folder / KEPT).iterdir()] == ["trials.jsonl"]


def test_a_search_says_which_releases_its_predictions_speak_of(answers, folder):
    _, out, _ = answers["search", *OWN_RESULTS]
    said = ", ".join(f"{name} {shipped().versions[name]}" for name in OUTCOME_LIBRARIES)
    assert f"{said}, of the timelines that come with tuner" in " ".join(out.split())
    best = yaml.safe_load((folder / "results/own/rtx4090/best.yaml").read_text())
    assert shipped().versions.items() <= best["trial"]["versions"].items()


@pytest.mark.slow
def test_a_search_answers_as_with_pytorch(answers, folder, tmp_path, monkeypatch):
    """Every number is equal where all timelines are traced here."""
    monkeypatch.setenv("TUNER_CACHE", "off")
    monkeypatch.setattr(Traces, "_takes_shipped", False)
    monkeypatch.chdir(folder)
    assert run(["search", *OWN_RESULTS, "--results", str(tmp_path)]) == 0
    ours, theirs = (root / "own" / "rtx4090" for root in (folder / "results", tmp_path))
    assert numbers(ours) == numbers(theirs)
    assert answer(ours) == answer(theirs)


def numbers(results):
    """The predictions and versions of all configurations, which say in their method who traced."""
    records = read_journal(results / "predicted.jsonl.gz").records
    return {
        one.configuration.key: (replace(one.outcome.prediction, method=""), one.versions)
        for one in records
    }


def answer(results):
    """The front and the recommendation, without the time and the name of the search."""
    best = yaml.safe_load((results / "best.yaml").read_text())
    for name in ("id", "run_id", "started_at"):
        del best["trial"][name]
    del best["search"]["command"]
    rows = (results / "pareto.csv").read_text().splitlines()
    return best, [row.rpartition(",")[0] for row in rows]


@pytest.mark.slow
def test_the_wheel_answers_in_an_environment_of_its_own(tmp_path):
    """Built, installed with nothing but what it names, and small."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    place = tmp_path / "venv"
    venv.create(place, with_pip=True)
    python, program = place / "bin" / "python", place / "bin" / "tuner"
    constraints = ROOT / "constraints.txt"
    subprocess.run([python, "-m", "pip", "-q", "install", "-c", constraints, wheel], check=True)
    size_bytes = sum(f.lstat().st_size for f in place.rglob("*") if f.is_file())
    assert size_bytes < 400e6
    for line in (*ANSWER, *FROM_WHAT_SHIPS):
        done = subprocess.run(
            [program, *line], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout
