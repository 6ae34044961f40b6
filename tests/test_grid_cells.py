"""A grid against `tuner estimate`, cell by cell, and the page of the documentation against both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from shared_cases.tiny_model import CONFIG

from tuner.app.estimate import estimate_configuration, one_configuration
from tuner.app.grid import METHODS, GridGpu, GridQuestion, make_grid
from tuner.core.units import GIB
from tuner.report.grid import Grid, GridCell, GridRun, page_data
from tuner.space.gpus import as_told, get_gpu

# Enough layers for what is compiled and what is traced to differ, and few enough to trace often.
LAYERS = {
    **CONFIG,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "vocab_size": 32_000,
    "max_position_embeddings": 16_384,
}


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LAYERS))
    return str(tmp_path)


def grid_of(*gpus, model, methods=tuple(METHODS), length=512, method=None, **settings) -> Grid:
    return make_grid(
        GridQuestion(
            models=(model,),
            gpus=tuple(map(GridGpu, gpus)),
            methods=tuple(replace(METHODS[name], **(method or {})) for name in methods),
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


def test_cells_say_what_estimate_says(model):
    # So little memory that lengths and micro-batches are limited by it.
    t4, l4 = (as_told(get_gpu(n), memory_bytes=3 * GIB, price_usd_per_hour=1) for n in ("t4", "l4"))
    nf4, refused = grid_of(t4, model=model, methods=("qlora", "full"), effective_batch=1).cells
    assert "bf16" in refused.refused
    assert refused.smallest is None
    (full,) = grid_of(l4, model=model, methods=("full",), effective_batch=2).cells
    for cell, gpu in ((nf4, t4), (full, l4)):
        assert cell.longest is not None
        assert cell.fastest is not None
        check_run(cell, cell.longest, gpu)
        check_run(cell, cell.fastest, gpu)
        longer = {**cell.longest.settings, "max_length": round(cell.longest.tokens * 1.5)}
        assert not estimate_configuration(*one_configuration(None, model, longer), gpu).fits
    # NF4 runs on a T4, in fp16, and the command that shows the cell says so.
    assert "mixed_precision=fp16" in nf4.estimate_command(nf4.longest)
    assert nf4.fastest.cost is not None
    epoch_s = 1000 / nf4.fastest.prediction.speed.samples_per_s
    assert nf4.fastest.cost.epoch_usd == pytest.approx(epoch_s / 3600)


def test_gpu_types_of_a_kind_share_a_trace_and_have_their_own_context(model):
    gpus = [as_told(get_gpu(n), memory_bytes=3 * GIB, price_usd_per_hour=1) for n in ("a10g", "l4")]
    traced = {"tolerance": 0.5}
    grid = grid_of(*gpus, model=model, methods=("full",), method=traced, effective_batch=1)
    first, second = (cell.longest for cell in grid.cells)
    assert first is not None
    assert second is not None
    assert first.traced
    assert second.traced
    for cell, gpu in zip(grid.cells, gpus, strict=True):
        check_run(cell, cell.longest, gpu)


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
    name, gpu = "qwen3-0.6b", "t4"
    model = [m[0] for m in shown["models"]].index(name)
    grid = grid_of(get_gpu(gpu), model=name, methods=methods, length=shown["length"])
    place = (model * len(gpus) + gpus.index(gpu)) * len(methods)
    then = shown["cells"][place : place + len(methods)]
    assert [numbers(cell) for cell in page_data(grid)["cells"]] == [numbers(cell) for cell in then]


def numbers(cell: list[list[object] | object]) -> list[object]:
    """What a cell of the page says of memory and speed, without texts and prices."""
    _refused, _remarks, _settings, smallest, longest, fastest = cell
    return [smallest, *(run and run[:5] for run in (longest, fastest))]


def test_an_interrupted_grid_keeps_the_models_that_are_done(model):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    asked = GridQuestion(
        models=("qwen3-32b", model),
        gpus=(GridGpu(get_gpu("t4")),),
        methods=(METHODS["qlora"],),
        length=512,
        examples=1000,
    )
    grid = make_grid(asked, workers=1, on_model=interrupt)
    assert grid.models == (model,)  # the small one is first
    assert [cell.model for cell in grid.cells] == [model]
