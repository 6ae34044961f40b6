"""The GPU benchmark on the CPU: the same code from end to end, with tiny models."""

from __future__ import annotations

import csv
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
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
def test_both_files_hold_the_same_rows(smoke):
    output, _, rows = smoke
    with (output / "runs.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert [c["name"] for c in cells] == [r["name"] for r in rows]
    assert [c["outcome"] for c in cells] == [r["outcome"] for r in rows]
    assert float(cells[0]["step_s"]) == rows[0]["step_s"]
    assert cells[4]["step_s"] == ""


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
def test_rows_of_an_unknown_device_are_named_and_not_guessed(smoke):
    from compare import compare

    compared, left_out = compare(smoke[2], gpu_name=None, profile_path=None)
    assert compared == []
    assert [reason for _, reason in left_out] == ["device 'cpu' is not in the catalogue"] * 5


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_the_check_gives_a_verdict(start):
    printed = script("run.py", "--device", "cpu", "--check", "--start", start)
    assert "check: good" in printed


@pytest.mark.slow
def test_without_a_device_nothing_is_run(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    output = tmp_path / "none"
    printed = script("run.py", "--device", "cuda:0", "--output", output, code=3)
    assert "no process can use cuda:0" in printed
    assert not output.exists()


def test_time_that_runs_out_leaves_the_rest_out(tmp_path, capsys):
    from cases import smoke_list
    from run import Settings, run_cases

    settings = Settings("cpu", tmp_path, 0.0, 0.1, "fork", tmp_path)
    assert run_cases(smoke_list(), settings, time.monotonic()) == []
    assert capsys.readouterr().out.count("left out") == 5
    assert list(tmp_path.iterdir()) == []


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


def test_a_misspelt_knob_of_a_case_is_refused():
    from cases import case

    with pytest.raises(ValueError, match="lora_rnk"):
        case("qwen2.5-0.5b", "bf16", (1, 256), lora_rnk=8)


def test_rows_are_appended_and_a_cut_off_line_is_left_out(tmp_path):
    import table

    table.append(tmp_path, {"name": "a", "lora_targets": ["q", "v"]})
    table.append(tmp_path, {"name": "b"})
    with (tmp_path / table.JSON_NAME).open("a") as file:
        file.write('{"name": "c')
    assert [row["name"] for row in table.read(tmp_path)] == ["a", "b"]
    assert len((tmp_path / table.CSV_NAME).read_text().splitlines()) == 3
    with pytest.raises(ValueError, match="not columns"):
        table.append(tmp_path, {"nmae": "d"})
    (tmp_path / table.CSV_NAME).write_text("name,other\n")
    with pytest.raises(ValueError, match="other columns"):
        table.append(tmp_path, {"name": "e"})


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def hangs():
    time.sleep(600)


def test_a_child_that_dies_or_hangs_is_told_apart():
    from run import _in_child

    assert _in_child("fork", dies, (), 120.0) == -signal.SIGKILL
    assert _in_child("fork", hangs, (), 0.3) is None
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("log", "outcome", "size"),
    [
        ("Error out of memory at line 380 in file ops.cu", "oom", None),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", "oom", 2**31),
        ("Segmentation fault", "crashed", None),
        ("", "crashed", None),
    ],
)
def test_a_dead_process_is_judged_by_the_end_of_its_log(tmp_path, log, outcome, size):
    from run import _from_log

    path = tmp_path / "log.txt"
    path.write_text("x" * 10_000 + log)
    found = _from_log(path, -11, {})
    assert found["outcome"] == outcome
    assert found["requested_bytes"] == size
    assert "-11" in found["message"]


@pytest.mark.slow
def test_the_warm_parent_touches_no_device():
    """Forked children could not use CUDA otherwise; bitsandbytes must be imported already."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import measure; measure.warm_up()\n"
        "import torch; print(torch.cuda.is_initialized(), 'bitsandbytes' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, FOLDER, FOLDER.parents[1]],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.split() == ["False", "True"]


@pytest.mark.gpu
def test_the_check_is_good_on_cuda():
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert "check: good" in script("run.py", "--device", "cuda:0", "--check")
