"""`tuner check` and `tune` on the programs of examples/programs, as they are, with tiny models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.emulating import needs_emulator
from tests.started import run_python
from tuner.space.models.hollow import write_hollow

EXAMPLES = Path(__file__).parents[1] / "examples" / "programs"

pytestmark = needs_emulator

ENCODERS = {
    "bert": {"model_type": "bert", "pad_token_id": 0},
    "roberta": {"model_type": "roberta", "pad_token_id": 1, "type_vocab_size": 1},
}
SMALL = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 514,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, values in ENCODERS.items():
        config = folder / f"config-of-{name}"
        config.mkdir()
        (config / "config.json").write_text(json.dumps({**SMALL, **values}))
        write_hollow(str(config), folder / name)
    write_hollow("tiny-llama-3m", folder / "tiny-llama")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(EXAMPLES, tmp_path / "programs")
    return tmp_path / "programs"


def tuner(folder: Path, *words: str) -> Any:
    """What a command answers with `--json`; its exit code is "exit"."""
    ran = run_python("-m", "tuner", *words, cwd=folder)
    assert ran.stdout.startswith("{"), ran.stderr + ran.stdout
    return {**json.loads(ran.stdout), "exit": ran.returncode}


def check(folder: Path, *words: str) -> Any:
    """What `tuner check` says of a program."""
    return tuner(folder, "check", "--json", "--gpu", "t4", *words)


def values_of(found: Any, *knobs: str) -> list[object]:
    """What the program says of knobs, or why that is not known."""
    settings = found["settings"]
    return [settings[knob]["problem"] or settings[knob]["value"] for knob in knobs]


@pytest.mark.proof
def test_settings_in_a_module_of_the_program_are_changed(folder: Path, models: Path) -> None:
    text = (folder / "semantic_parsing/config.py").read_text()
    found = check(folder, "semantic_parsing/train.py", str(models / "tiny-llama"))

    assert values_of(found, "micro_batch", "grad_accum", "max_length") == [1, 16, 512]
    assert found["settings"]["micro_batch"]["where"] == "semantic_parsing/config.py:19"
    suggestion = found["suggestion"]
    size = suggestion["values"]["micro_batch"]
    assert suggestion["found"]["settings"]["micro_batch"] == size > 1
    lines = suggestion["difference"].splitlines()
    assert lines[0] == "--- semantic_parsing/config.py"
    assert f'+    "per_device_train_batch_size": {size},' in lines
    assert (folder / "semantic_parsing/config.py").read_text() == text


@pytest.mark.proof
def test_settings_in_a_file_that_the_program_opens_are_told(folder: Path, models: Path) -> None:
    found = check(folder, "--no-changes", "multitask/train.py", str(models / "roberta"))

    assert (found["exit"], found["fits"]) == (0, True)
    assert found["settings"]["micro_batch"]["where"] == "multitask/config.yaml:7"


@pytest.mark.proof
def test_an_embedder_reads_yaml_in_folders_of_its_own(folder: Path, models: Path) -> None:
    found = check(folder, "--no-changes", "embedder/train.py", str(models / "bert"))

    assert (found["exit"], found["fits"]) == (0, True)
    assert values_of(found, "micro_batch", "grad_accum", "max_length") == [12, 2, 512]
    assert found["program"]["inputs"][0] == [12, 24]
    assert {tuple(shape) for shape in found["program"]["inputs"]} >= {(12, 512), (12 * 24, 512)}
