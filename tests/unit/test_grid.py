"""`tuner grid`: its files and its errors; tests/test_grid_cells.py predicts some."""

from __future__ import annotations

import csv
import io
import json
import shlex

import pytest
from grid_samples import EVIL, make_grid

from tuner.app.cli.estimate import command as estimate
from tuner.app.cli.main import run
from tuner.app.grid import GPUS, MODELS
from tuner.predict.compiler.structure import LARGEST_GPU_BYTES
from tuner.report.grid import grid_csv, grid_html
from tuner.space.gpus import load_catalogue
from tuner.space.models.catalogue import get_entry
from tuner.space.models.positions import configured_positions


def test_what_is_shown_by_default_is_in_the_catalogues():
    assert len(set(MODELS)) >= 20
    assert len(set(GPUS)) >= 15
    sizes = [load_catalogue()[name].memory_bytes for name in GPUS]
    assert sizes == sorted(sizes)
    for name in MODELS:
        entry = get_entry(name)
        assert entry is not None
        assert entry.id == name
        assert (configured_positions(entry.text_config) or 0) >= 4096


def test_every_gpu_type_is_replayed_to_the_end_of_its_memory():
    assert max(gpu.memory_bytes for gpu in load_catalogue().values()) <= LARGEST_GPU_BYTES


def test_json_says_predicted_and_why_there_is_no_number():
    grid = make_grid()
    found = json.loads(json.dumps(grid.to_dict()))
    assert found["source"] == "predicted"
    cells = {(c["model"], c["gpu"], c["method"]): c for c in found["cells"]}
    assert len(cells) == 18
    refused = cells["small", "t4", "full"]
    assert refused["refused"] == "T4 has no bf16"
    assert not refused["fits"]
    assert refused["fastest"] is refused["longest"] is None
    unpriced = cells["small", "rtx3060", "qlora"]["fastest"]
    assert unpriced["epoch_usd"] is None
    assert unpriced["epoch_s"] == 5000
    assert cells["small", "t4", "qlora"]["remarks"] == "a remark of the trace"
    too_large = cells["large-70b", "t4", "full"]
    assert not too_large["fits"]
    assert too_large["smallest"]["device_bytes"] > 40e9


def test_the_estimate_command_of_a_run_is_one_that_tuner_takes():
    cell = make_grid().cells[0]
    assert cell.fastest is not None
    words = shlex.split(cell.estimate_command(cell.fastest))
    assert words[:2] == ["tuner", "estimate"]
    context = estimate.make_context("estimate", words[2:])
    assert context.params["model"] == "small"
    assert context.params["gpu_name"] == "t4"
    assert context.params["settings"]["gradient_checkpointing"] == "true"


def test_csv_has_a_row_for_each_cell_and_nothing_for_what_is_unknown():
    rows = list(csv.DictReader(io.StringIO(grid_csv(make_grid().cells))))
    assert len(rows) == 18
    assert {row["source"] for row in rows} == {"predicted"}
    first, unpriced = rows[0], rows[2]
    assert (first["longest"], first["fastest_micro_batch"]) == ("4096", "4")
    assert unpriced["gpu"] == "rtx3060"
    assert unpriced["fastest_epoch_usd"] == ""
    assert rows[1]["refused"] == "T4 has no bf16"
    assert rows[1]["fits"] == "false"


def test_page_is_one_file_in_which_names_are_text():
    text = grid_html(make_grid())
    assert EVIL not in text
    assert "://" not in text
    assert text.count("<script") == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "precision=int8"], "the grid sets precision itself"),
        (["--set", "nonsense=1"], "unknown parameter 'nonsense'"),
        (["--method", "qlor"], "did you mean 'qlora'"),
        (["--out", "grid.pdf"], "neither a page (.html) nor a table (.csv)"),
        (["--out", "nowhere/grid.html"], "there is no folder nowhere"),
        (["--model", "no-such-model"], "unknown model 'no-such-model'"),
        (["--gpu", "rtx9999"], "unknown GPU 'rtx9999'"),
        (["--margin", "3"], "margin '3' is not a share of the memory"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_predicted(arguments, said, capsys):
    assert run(["grid", *arguments]) == 2
    assert said in capsys.readouterr().err
