"""What is searched for one stage alone: `stage1.n_negatives` beside the knobs of all stages."""

import json
import pickle

import pytest
from encoder_samples import PHASES, TINY_ROBERTA

from tuner.app.cli.main import run
from tuner.core.errors import InputError
from tuner.predict import cache
from tuner.searches.facts import SpaceFacts
from tuner.space import configure, pin
from tuner.space.load import read_space

TEXT = """\
name: curriculum
workload: contrastive
model: all-minilm-l6-v2
knobs: {micro_batch: [2, 4]}
fixed: {effective_batch: 8}
constraints: [micro_batch * n_negatives <= 64]
stages:
  - {name: first, set: {n_positives: 64, n_negatives: [8, 16, 24]}, examples: 1000}
  - {name: second, set: {n_positives: 16, n_negatives: 4}, examples: 500, epochs: 2}
"""


def space(text: str = TEXT):
    return read_space(text, "curriculum.yaml")


def test_a_list_in_a_stage_is_a_knob_of_that_stage():
    found = space()
    assert found.choices == {"micro_batch": (2, 4), "first.n_negatives": (8, 16, 24)}
    # 4 * 24 is more than the constraint allows, in the first stage only.
    chosen = [(c["micro_batch"], c["first.n_negatives"]) for c in found.configurations()]
    assert sorted(chosen) == [(2, 8), (2, 16), (2, 24), (4, 8), (4, 16)]
    assert found.count() == 5
    assert pickle.loads(pickle.dumps(found)).choices == found.choices


def test_each_stage_is_a_plain_configuration():
    configuration = configure(space(), {"first.n_negatives": "16"})
    stages = space().stage_configurations(configuration)
    assert [stages[n]["n_negatives"] for n in ("first", "second")] == [16, 4]
    assert all("." not in name for values in stages.values() for name in values)
    assert configuration["n_negatives"] == 8  # of no stage: the default


def test_conditions_and_settings_name_it():
    found = space()
    assert found.count(["first.n_negatives >= 16"]) == 3
    assert pin(found, {"first.n_negatives": "24"}).count() == 1
    assert "first.n_negatives" in SpaceFacts.of(found).capacity
    with pytest.raises(InputError, match=r"first\.n_negatives=9 is not in search space"):
        configure(found, {"first.n_negatives": "9"})
    with pytest.raises(InputError, match=r"not allowed in an expression"):
        found.count(["micro_batch.real >= 1"])


def test_a_baseline_has_it_too():
    baseline = "baseline: {micro_batch: 2, first.n_negatives: 24}\n"
    assert configure(space(TEXT + baseline))["first.n_negatives"] == 24
    with pytest.raises(InputError) as caught:
        space(TEXT + "baseline: {micro_batch: 2}\n")
    assert "first.n_negatives missing" in str(caught.value.problems)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[8, 16, 24]", "[]", "empty"),
        ("[8, 16, 24]", "[8, many]", "many"),
        ("name: first", "name: stage-1", "knobs of its own"),
        ("[8, 16, 24]", "[64, 128]", "no configuration is left"),
    ],
)
def test_what_cannot_be_searched_is_said_with_its_line(old, new, message):
    with pytest.raises(InputError) as caught:
        space(TEXT.replace(old, new))
    assert message in str(caught.value.problems)


# -- `tuner estimate` of a space with stages --------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(cache.FOLDER_VARIABLE, str(tmp_path / "timelines"))
    TINY_ROBERTA.save_pretrained("tiny-roberta")
    (tmp_path / "phases.yaml").write_text(PHASES)
    return tmp_path


def test_every_stage_is_predicted_and_the_hardest_named(folder, capfd):
    asked = ["estimate", "--space", "phases.yaml", "--gpu", "t4"]
    assert run([*asked, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    stages = found["stages"]
    assert list(stages) == ["first", "second"]
    sizes = {name: stage["memory"]["device_bytes"] for name, stage in stages.items()}
    assert found["limiting_stage"] == max(sizes, key=sizes.__getitem__)
    assert found["memory"]["device_bytes"] == max(sizes.values())
    assert found["misfits"] == []
    times = {name: stage["samples_per_s"] for name, stage in stages.items()}
    assert found["epoch_s"] == pytest.approx(100 / times["first"] + 50 / times["second"])
    assert found["run_s"] == pytest.approx(100 / times["first"] + 200 / times["second"])

    assert run(asked) == 0
    assert f"stage   {found['limiting_stage']} needs the most" in capfd.readouterr().out
    assert run([*asked, "--verbose"]) == 0
    text = capfd.readouterr().out
    assert "Stages (predicted)" in text
    assert "* needs the most memory" in text
    assert "one epoch of each" in text
    assert run([*asked, "--gpu-memory", "160MiB", "--verbose"]) == 0
    assert "! does not fit" in capfd.readouterr().out
