"""Damaged files of people: an answer comes, and no traceback, no hang and no write.

The inputs are always the same; TUNER_FUZZ_INPUTS=10000 draws more. Below are defects found before.
"""

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from shared_cases.hostile import WHOLE_FILES, bomb
from shared_cases.targets import TARGETS, Target
from started import run_python

from tuner.core.errors import InputError, TunerError
from tuner.cost.speed.profile import load_profile
from tuner.searches.journal import encode, read_journal

ROOT = Path(__file__).parents[1]
INPUTS = int(os.environ.get("TUNER_FUZZ_INPUTS", "25"))


def answers(target: Target, path: Path, data: bytes) -> None:
    path.write_bytes(data)
    try:
        target.check(path)
    except TunerError as error:
        answer = str(error)
    else:
        answer = "a value"
    assert answer.strip()
    assert path.read_bytes() == data


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_damaged_file_is_answered(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    path = tmp_path / target.file

    @settings(
        max_examples=INPUTS,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(target.inputs())
    def feed(data: bytes) -> None:
        answers(target, path, data)

    feed()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([target.file, "scratch"])


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_file_that_is_something_else_is_answered(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    for data in WHOLE_FILES:
        if len(data) <= 1000:  # the long ones take a while, and are below where they matter
            answers(target, tmp_path / target.file, data)


class TestFoundBefore:
    def test_thousands_of_brackets_in_a_gpu_file(self, tmp_path):
        """libyaml overflowed the stack of the process (SIGSEGV)."""
        (tmp_path / "gpus.yaml").write_bytes(b"[" * 100_000)
        program = (
            "from pathlib import Path; from tuner.space.gpus import load_catalogue; "
            "load_catalogue(Path('gpus.yaml'))"
        )
        ended = run_python("-c", program, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
        assert ended.returncode == 1, ended.stderr
        assert "nested too deeply" in ended.stderr

    @pytest.mark.parametrize(
        "text",
        ["2026-13-45", '!!int ""', "!!bool x", "!!timestamp x", "? " * 50_000, "[" * 50_000,
         bomb(30), "schema: &a [*a]", "schema: 1\nlaunch_s: &a [*a]\nversions: {a: *a}",
         "schema: 1\nmemory_bytes: 1" + "0" * 400, "x" * 5_000_000],
        ids=range(11),
    )  # fmt: skip
    def test_a_profile_that_pyyaml_or_a_float_cannot_take(self, text, tmp_path):
        (tmp_path / "a6000.yaml").write_text(text)
        with pytest.raises(InputError) as raised:
            load_profile(tmp_path / "a6000.yaml")
        assert len(str(raised.value)) < 10_000

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"configuration": {"micro_batch": float("nan")}}, "not JSON"),
            ({"configuration": {"micro_batch": {"a": 1}}}, "configuration"),
            ({"configuration": {"names": [["q_proj"]]}}, "configuration"),
            ({"gpu_memory_bytes": 10**400}, "gpu_memory_bytes"),
            ({"predicted.stages": {"a": {"device_bytes": None, "samples_per_s": 1.0,
                                         "step_s": 1.0}}}, "stages"),
            ({"predicted.samples_per_s": 1e300}, "samples_per_s"),
        ],
    )  # fmt: skip
    def test_a_journal_with_a_wrong_value_names_its_field(self, change, field, tmp_path):
        journal = next(iter(sorted(ROOT.glob("results/dynamo_t4/*/trials.jsonl"))))
        record = read_journal(journal).records[0]
        line = json.loads(encode(record))
        for path, value in change.items():
            *outer, last = path.split(".")
            inner = line
            for name in outer:
                inner = inner[name]
            inner[last] = value
        path = tmp_path / "trials.jsonl"
        path.write_text(json.dumps(line) + "\n")
        with pytest.raises(InputError, match=field):
            read_journal(path)
