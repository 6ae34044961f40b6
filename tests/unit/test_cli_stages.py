"""`tuner estimate` of a space with stages: all of them, and which one limits."""

from __future__ import annotations

import json

import pytest
from encoder_samples import PHASES, TINY_ROBERTA

from tuner.app.cli.main import run
from tuner.predict import cache


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
