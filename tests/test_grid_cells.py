"""A grid against `tuner estimate`, cell by cell, and the page of the documentation against both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_samples import CONFIG

from tuner.engine.estimate import estimate_configuration, one_configuration
from tuner.engine.grid import METHODS, GridGpu, GridQuestion, make_grid
from tuner.gpus import as_told, get_gpu
from tuner.results.grid import Grid, GridCell, GridRun
from tuner.results.grid_page import page_data
from tuner.units import GIB

MODEL = "smollm2-135m"  # 30 layers: what is compiled and what is traced differ


def grid_of(*gpus, model=MODEL, methods=("qlora", "lora", "full"), length=512, **settings) -> Grid:
    return make_grid(
        GridQuestion(
            models=(model,),
            gpus=tuple(map(GridGpu, gpus)),
            methods=tuple(METHODS[name] for name in methods),
            length=length,
            examples=1000,
            settings=settings,
        ),
        workers=1,
        on_model=lambda *_: None,
    )


def check_run(cell: GridCell, run: GridRun, gpu) -> None:
    """The numbers of a run are those of `tuner estimate`: memory exactly where it was traced."""
    alone = estimate_configuration(*one_configuration(None, cell.model, run.settings), gpu)
    told = run.prediction
    assert alone.fits
    assert told.fits
    assert told.speed.samples_per_s == pytest.approx(alone.speed.samples_per_s, rel=0.01)
    nearly = 1e-9 if run.traced else METHODS[cell.method].tolerance
    assert told.memory.device_bytes == pytest.approx(alone.memory.device_bytes, rel=nearly)


def test_cells_say_what_estimate_says():
    # So little memory that lengths and micro-batches are limited by it.
    gpus = [as_told(get_gpu(n), memory_bytes=3 * GIB, price_usd_per_hour=1) for n in ("t4", "l4")]
    grid = grid_of(*gpus, methods=("qlora", "full"))
    turing, ada = grid.cells[:2], grid.cells[2:]
    assert "bf16" in turing[1].refused
    assert turing[1].smallest is None
    # NF4 runs there, in fp16; the command that shows the cell says so.
    assert turing[0].longest is not None
    assert "mixed_precision=fp16" in turing[0].estimate_command(turing[0].longest)
    for cell, gpu in ((turing[0], gpus[0]), *((cell, gpus[1]) for cell in ada)):
        assert cell.longest is not None
        assert cell.fastest is not None
        check_run(cell, cell.longest, gpu)
        check_run(cell, cell.fastest, gpu)
        assert cell.fastest.cost is not None
        epoch_s = 1000 / cell.fastest.prediction.speed.samples_per_s
        assert cell.fastest.cost.epoch_usd == pytest.approx(epoch_s / 3600)
        longer = {**cell.longest.settings, "max_length": round(cell.longest.tokens * 1.5)}
        assert not estimate_configuration(*one_configuration(None, MODEL, longer), gpu).fits


def test_lengths_end_with_the_positions_and_a_held_knob_is_not_varied(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    grid = grid_of(
        get_gpu("l4"), model=str(tmp_path), methods=("lora",), length=256, effective_batch=4,
        gradient_checkpointing=True,
    )  # fmt: skip
    (cell,) = grid.cells
    assert cell.longest is not None
    assert cell.longest.tokens == 512
    assert cell.fastest is not None
    assert cell.fastest.recomputes
    assert cell.fastest.micro_batch == 4  # all of the effective batch
    beyond = grid_of(get_gpu("l4"), model=str(tmp_path), methods=("lora",), length=1024)
    assert beyond.cells[0].fastest is None
    assert beyond.cells[0].longest is not None


@pytest.mark.slow
def test_the_page_of_the_documentation_is_what_is_predicted_now():
    text = (Path(__file__).parents[1] / "docs" / "grid.html").read_text("utf-8")
    data = text.partition('<script type="application/json" id="page">')[2].partition("</script>")[0]
    shown = json.loads(data)
    gpus, methods = [g[0] for g in shown["gpus"]], [m[0] for m in shown["methods"]]
    for name, gpu in (("qwen3-0.6b", "t4"), ("llama-3.1-8b", "rtx4090"), ("gpt-oss-20b", "h200")):
        model = [m[0] for m in shown["models"]].index(name)
        grid = grid_of(get_gpu(gpu), model=name, methods=methods, length=shown["length"])
        place = (model * len(gpus) + gpus.index(gpu)) * len(methods)
        then = shown["cells"][place : place + len(methods)]
        assert [numbers(cell) for cell in page_data(grid)["cells"]] == [
            numbers(cell) for cell in then
        ]


def numbers(cell: list[list[object] | object]) -> list[object]:
    """What a cell of the page says of memory and speed, without texts and prices."""
    _refused, _remarks, _settings, smallest, longest, fastest = cell
    return [smallest, *(run and run[:5] for run in (longest, fastest))]
