"""The values of a training in stages into a project's own files: one for all, one for each."""

from pathlib import Path

import pytest

from tuner.app.applying import _Applying, applying
from tuner.core.records import Configuration
from tuner.space import SearchSpace, configure, load_space

SPACES = Path(__file__).parents[2] / "search_spaces"

CONFIG = """\
# @package _global_
defaults:
  - data: naics   # four channels
  - _self_

experiment: ${now:%Y-%m-%d}
data_loader:
  batch_size: 8        # 12 ran out of memory
  num_workers: ${oc.env:WORKERS,4}
  batch_key: anchor
training:
  learning_rate: 2e-4
  trainer:
    precision: "32-true"
    accumulate_grad_batches: 2  # a\ttab
    max_epochs: 10
    gradient_clip_val: 1.0
  notes: first
  notes: second
output: ${experiment}/run"""  # no line end

STAGE = """\
# curriculum, {name}
name: {name}
sampling: {{ n_positives: {positives}, n_negatives: {negatives} }}  # pairs
lr: 1e-5
parent: ${{experiment}}"""


@pytest.fixture
def project(tmp_path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text(CONFIG)
    for number, (positives, negatives) in enumerate([(1024, 24), (768, 24), (16, 8)], start=1):
        text = STAGE.format(name=f"s{number}", positives=positives, negatives=negatives)
        (tmp_path / "conf" / f"stage_{number}.yaml").write_text(text)
    return tmp_path / "conf"


def made(space: SearchSpace, chosen: Configuration, folder: Path) -> _Applying:
    return applying(space, chosen, [str(path) for path in sorted(folder.iterdir())])


def after(found: _Applying) -> dict[str, str]:
    """What the files that change would hold."""
    return {path.name: data.decode() for path, (_, data) in found.change.files.items()}


def test_one_command_writes_the_configuration_and_every_stage(project):
    space = load_space(str(SPACES / "naics_embedder.yaml"))
    chosen = configure(space, {"micro_batch": 12, "mixed_precision": "fp16"})
    found = made(space, chosen, project)
    changed = after(found)
    assert sorted(changed) == ["config.yaml", "stage_1.yaml", "stage_2.yaml"]

    # Byte for byte the same but for the values.
    expected = CONFIG.replace("batch_size: 8 ", "batch_size: 12 ").replace(
        '"32-true"', '"16-mixed"'
    )
    assert changed["config.yaml"] == expected
    first, second = (changed[f"stage_{n}.yaml"] for n in (1, 2))
    assert first == STAGE.format(name="s1", positives=64, negatives=24)
    assert second == STAGE.format(name="s2", positives=16, negatives=8)

    # Two stages have no file here: their values are named, and nothing else is.
    lacking = {text for text in found.lacking if " in stage" in text}
    assert lacking == {
        f"{name} in {stage} = {value}"
        for name, value in (("n_positives", 16), ("n_negatives", 8))
        for stage in ("stage4", "stage5")
    }
    before = {path.name: path.read_text() for path in project.iterdir()}
    backups = found.change.write()
    assert {path.name: copy.read_text() for path, copy in backups.items()} == {
        name: before[name] for name in changed
    }
    for copy in backups.values():
        copy.unlink()
    assert not made(space, chosen, project).change.files


@pytest.fixture
def numbered(project):
    """The same files by the names that the numbers of stages often get: 01_stage.yaml."""
    for number in (1, 2, 3):
        (project / f"stage_{number}.yaml").rename(project / f"0{number}_stage.yaml")
    return project


def test_a_stage_gets_what_was_searched_for_it_alone(project):
    text = (SPACES / "naics_embedder.yaml").read_text()
    text = text.replace("n_negatives: 24}, examples", "n_negatives: [16, 24, 32]}, examples")
    text = text.replace("  optimizer: adamw_torch\n", "  optimizer: adamw_torch\n"
                        "  stage1.n_negatives: 24\n", 1)  # fmt: skip
    path = project.parent / "naics_embedder.yaml"
    path.write_text(text)
    space = load_space(str(path))
    chosen = configure(space, {"stage1.n_negatives": 32})
    assert after(made(space, chosen, project))["stage_1.yaml"] == STAGE.format(
        name="s1", positives=64, negatives=32
    )


def test_the_phases_of_dynamo_share_one_file(tmp_path):
    before = (
        "model: {backbone: roberta-base}\n"
        "data:\n  max_input_length: 512  # tokens\n  num_workers: 4\n"
        "training:\n  batch_size: 32\n  gradient_accumulation_steps: 2\n  lr: 2e-4\n"
        "  output_dir: ${paths.out}"
    )
    path = tmp_path / "config.yaml"
    path.write_text(before)
    space = load_space(str(SPACES / "dynamo_t4.yaml"))
    chosen = configure(space, {"micro_batch": 8, "max_length": 256})
    found = made(space, chosen, tmp_path)
    assert after(found)["config.yaml"] == (
        before.replace("512", "256").replace("size: 32", "size: 8").replace("steps: 2", "steps: 8")
    )
