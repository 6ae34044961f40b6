"""`docs/extending.md`: each of its blocks, put into the one file that it names, is at work."""

import json
import os
import shutil
from pathlib import Path

import pytest
from documents import ROOT, blocks
from started import run_python

PAGE = "docs/extending.md"
OPTIMIZER, TRAINER, GPU, MODEL = (
    block.text for block in blocks(PAGE) if "test_extending" in (block.said("not run") or "")
)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with all that the page adds to it."""
    folder = tmp_path_factory.mktemp("clone")
    unread = shutil.ignore_patterns("__pycache__", "*.html", "*.png", "device")
    for name in ("tuner", "search_spaces"):
        shutil.copytree(ROOT / name, folder / name, ignore=unread)
    shutil.copytree(ROOT / "results/qlora27b", folder / "results/qlora27b", ignore=unread)
    package = folder / "tuner"
    table = package / "core/setup/common.py"
    head, rows, rest = table.read_text().partition("OPTIMIZERS: Mapping[str, Optimizer] = {\n")
    assert rows
    table.write_text(head + rows + OPTIMIZER + "\n" + rest)
    (package / "program/trainers/notes.py").write_text(TRAINER)
    catalogue = package / "space/gpus.yaml"
    head, gpus, rest = catalogue.read_text().partition("\ngpus:\n")
    assert gpus
    catalogue.write_text(head + gpus + GPU + "\n" + rest)
    (package / "space/models/configs/house-llama.json").write_text(MODEL)
    return folder


def tuner(clone: Path, *arguments: str) -> str:
    return python(clone, "-m", "tuner", *arguments)


def python(clone: Path, *arguments: str) -> str:
    done = run_python(*arguments, cwd=clone, env={**os.environ, "PYTHONPATH": str(clone)})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_an_optimizer_is_traced(clone):
    """And the model and the GPU of the page, in the same run."""
    words = ["--model", "house-llama", "--gpu", "house_a16", "--json"]
    words += ["--set", "optimizer=adagrad", "--set", "max_length=64"]
    found = json.loads(tuner(clone, "estimate", *words))
    assert found["memory"]["breakdown"]["optimizer_state"] > 0


@pytest.mark.slow
def test_a_trainer_is_read_and_written(clone):
    text = tuner(clone, "export", "--space", "qlora27b", "--gpu", "a6000", "--format", "notes")
    assert "# For: notes train FILE" in text
    assert "rank: " in text
    assert "grad_accum" in text.partition("Not representable here")[2]
    (clone / "run.yaml").write_text("notes_model: qwen2.5-0.5b\nrank: 4\nbatch: 2\nseed: 1\nx: 2\n")
    plan = json.loads(tuner(clone, "check", "run.yaml", "--gpu", "a6000", "--predict", "--json"))
    assert plan["program"]["trainer"] == "Notes"
    assert plan["program"]["left_out"] == ["run.yaml:5 x"]


def test_a_gpu_and_a_model_are_known(clone):
    assert "data sheet, one of four GPUs" in tuner(clone, "gpus", "house_a16")
    assert "210,240" in tuner(clone, "models", "house-llama")
