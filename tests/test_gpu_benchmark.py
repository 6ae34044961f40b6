"""The GPU benchmark on the CPU: the same code from end to end, with tiny models."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks" / "gpu"


@pytest.fixture(scope="module", autouse=True)
def _on_the_path():
    sys.path.insert(0, str(FOLDER))
    yield
    sys.path.remove(str(FOLDER))


def script(name, *arguments, code=0):
    """Run a script of the benchmark as people do: in a process that has done nothing else."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", FOLDER / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        cwd=FOLDER.parent,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    output = tmp_path_factory.mktemp("measured")
    printed = script("run.py", "--device", "cpu", "--smoke", "--calibrate", "--output", output)
    rows = [json.loads(line) for line in (output / "runs.jsonl").read_text().splitlines()]
    return output, printed, rows


@pytest.mark.slow
def test_every_smoke_case_ends_as_it_must(smoke):
    _, printed, rows = smoke
    assert [row["outcome"] for row in rows] == ["ok", "ok", "ok", "ok", "oom"]
    assert "5 of 5 cases: 4 ok, 1 oom" in printed


@pytest.mark.slow
def test_a_row_holds_what_the_case_took(smoke):
    for row in smoke[2][:4]:
        assert row["finite"] is True
        assert row["timed_steps"] >= 3
        samples = row["micro_batch"] * row["grad_accum"]
        assert row["tokens_per_s"] == pytest.approx(samples * row["max_length"] / row["step_s"])
        assert row["it_per_s"] == pytest.approx(row["grad_accum"] / row["step_s"])
        peaks = [row[f"peak_{p}_bytes"] for p in ("load", "forward", "backward", "optimizer")]
        assert row["peak_allocated_bytes"] >= max(peaks)
        assert 0 < row["loaded_bytes"] <= row["peak_forward_bytes"]
        assert 0 < row["trainable_params"] <= row["total_params"]
        assert row["torch"]
        assert row["transformers"]


@pytest.mark.slow
def test_out_of_memory_says_where_and_how_much(smoke):
    row = smoke[2][4]
    assert row["oom_phase"] in ("forward", "backward")
    assert row["requested_bytes"] > 2**20
    assert row["limit_bytes"] == round(0.05 * 2**30)
    assert row["step_s"] is None


@pytest.mark.slow
def test_the_comparison_predicts_every_row(smoke, tmp_path):
    output, _, rows = smoke
    errors = tmp_path / "errors.csv"
    printed = script(
        "compare.py", output, "--gpu", "h200", "--profile", output / "profile.yaml", "--csv", errors
    )
    assert "right for 5 of 5 rows" in printed
    with errors.open(newline="") as file:
        compared = list(csv.DictReader(file))
    assert [row["name"] for row in compared] == [row["name"] for row in rows]
    first = compared[0]
    predicted, measured = (float(first[f"allocated_{what}"]) for what in ("predicted", "measured"))
    # The processor's own profile predicts a slower step than an H200's peaks do.
    assert float(first["step_s_profile_predicted"]) != float(first["step_s_predicted"])
    assert float(first["allocated_error"]) == pytest.approx(predicted / measured - 1)


@pytest.mark.slow
def test_the_check_gives_a_verdict():
    printed = script("run.py", "--device", "cpu", "--check")
    assert "check: good" in printed


def test_the_list_is_long_covers_the_field_and_fits_its_time():
    from cases import A6000_GIB, T4_GIB, TITAN_GIB, full_list
    from run import DEFAULT_BUDGET_S

    cases = full_list()
    assert len(cases) >= 30
    assert len({case.name for case in cases}) == len(cases)
    assert sum(case.expected_s for case in cases) <= DEFAULT_BUDGET_S - 30 < 510

    def values(knob):
        return {case.settings[knob] for case in cases}

    assert values("precision") == {"nf4", "int8", "bf16", "fp16", "fp32", "tf32"}
    assert {8, 16, 64, 128, 0} <= values("lora_rank")
    assert {1, 2, 4, 8} <= values("micro_batch")
    assert {256, 512, 1024, 2048, 4096} <= values("max_length")
    assert values("gradient_checkpointing") == {True, False}
    assert values("attention") == {"eager", "sdpa"}
    assert {"adamw_torch", "adamw_8bit", "paged_adamw_8bit"} <= values("optimizer")
    assert {T4_GIB, TITAN_GIB, A6000_GIB} <= {case.limit_gib for case in cases}
    assert len({case.model for case in cases}) >= 8


def test_every_case_is_one_that_the_h200_can_run():
    from cases import full_list

    from tuner.core.records import Configuration
    from tuner.predict.predict import check_supported
    from tuner.space.gpus import get_gpu
    from tuner.space.models.catalogue import get_entry

    for case in full_list():
        assert get_entry(case.model) is not None, case.model
        assert check_supported(Configuration(case.settings), get_gpu("h200")) == []


@pytest.mark.gpu
def test_the_check_is_good_on_cuda():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert "check: good" in script("run.py", "--device", "cuda:0", "--check")
