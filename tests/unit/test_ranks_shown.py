"""What commands and files say of trials on several GPUs, and of ranks that share a processor."""

from dataclasses import replace

import pytest
import yaml
from results_samples import GPU, MARGIN_BYTES, SPACE, make_record

from tuner.app.target import with_margin
from tuner.core.records import MemoryBudget, RankMemory, Source, TrialRecord
from tuner.core.units import GIB
from tuner.report.report import report_html
from tuner.report.table import pareto_csv
from tuner.report.terminal.front import print_recommendation
from tuner.searches.best import best_yaml, recommend
from tuner.searches.cost import trade_text
from tuner.searches.view import build_view

TWO = {**SPACE.baseline, "gpus_per_trial": 2}
CPU = replace(GPU, id="cpu", name="a processor", memory_bytes=16 * GIB)


def measured(size_bytes: int, gpu=GPU, **settings: object) -> TrialRecord:
    """Of two ranks, with `size_bytes` in the larger one."""
    record = make_record(300, size_bytes, settings={**TWO, **settings}, measured=True, gpu=gpu)
    found = record.outcome.measurement
    sizes = (size_bytes, size_bytes - GIB // 2)
    ranks = tuple(replace(RankMemory.of(found.memory), device_bytes=size) for size in sizes)
    outcome = replace(record.outcome, measurement=replace(found, ranks=ranks))
    return replace(record, outcome=outcome, margin_bytes=GIB)


def test_ranks_on_one_processor_have_their_part_of_its_memory():
    assert measured(7 * GIB, CPU).budget.limit_bytes == 8 * GIB
    assert measured(7 * GIB, CPU).budget.margin_bytes == GIB // 2
    assert measured(7 * GIB, CPU).fits
    assert not measured(8 * GIB, CPU).fits  # half of the margin is missing
    assert not measured(9 * GIB, CPU).fits
    assert recommend([measured(9 * GIB, CPU)], SPACE, CPU) is None
    best = recommend([measured(7 * GIB, CPU)], SPACE, CPU)
    assert (best.memory_bytes, best.free_bytes) == (8 * GIB, GIB)
    assert best.to_dict()["memory"]["used_fraction"] == 0.875


def test_what_is_to_stay_free_is_shared_by_predicted_ranks_too():
    record = make_record(300, 6 * GIB, settings=TWO, gpu=CPU)
    half = replace(record.outcome.prediction, budget=MemoryBudget(8 * GIB, MARGIN_BYTES // 2))
    record = replace(record, outcome=replace(record.outcome, prediction=half))
    assert with_margin(record, 4 * GIB).fits
    assert not with_margin(record, 5 * GIB).fits
    assert with_margin(record, 4 * GIB).budget.margin_bytes == 2 * GIB


def test_an_epoch_costs_all_gpus_but_only_one_processor():
    one = make_record(300, 40 * GIB, settings=SPACE.baseline)
    two = make_record(300, 40 * GIB, settings=TWO)
    costs = [recommend([record], SPACE, GPU).cost.epoch_usd for record in (one, two)]
    assert costs[1] == pytest.approx(2 * costs[0])
    processor = recommend([measured(7 * GIB, CPU)], SPACE, CPU).cost
    assert processor.epoch_usd == pytest.approx(processor.epoch_s / 3600 * 0.5)


def test_the_recommendation_says_how_many_gpus_and_what_each_takes(capsys):
    best = recommend([measured(40 * GIB)], SPACE, GPU)
    print_recommendation(best)
    text = " ".join(capsys.readouterr().out.split())
    assert "2 x NVIDIA RTX A6000, all memory is of one of them" in text
    assert "40.00 GiB of 47.40 GiB on each: 7.40 GiB free" in text
    assert "ranks 40.00 GiB, 39.50 GiB" in text
    assert "at 0.5 USD per hour for each of 2 GPUs" in text
    assert "on 2 x a6000" in repr(best)
    assert "GiB each," in repr(best)


def test_the_files_say_it():
    record = measured(40 * GIB)
    view = build_view([record], SPACE, GPU)
    written = best_yaml(view.best, SPACE, GPU, trials=1)
    assert "found for 2 x NVIDIA RTX A6000: it fits with 7.40 GiB to spare on each" in written
    data = yaml.safe_load(written)
    assert data["gpu"]["count"] == data["run"]["gpus"] == 2
    assert data["memory"]["rank_device_bytes"] == [40 * GIB, 40 * GIB - GIB // 2]
    page = report_html(view)
    assert "2 x NVIDIA RTX A6000, all memory is of one of them" in page
    assert "on each, 7.40 GiB free; by rank 40.00 GiB, 39.50 GiB" in page
    assert "USD per hour for each of 2 GPUs" in page
    assert view.best.source is Source.MEASURED
    assert f"{8 * GIB - 7 * GIB}" in pareto_csv(build_view([measured(7 * GIB, CPU)], SPACE, CPU))


def on_gpus(count: int, size_bytes: int, rate: float, **settings: object) -> TrialRecord:
    chosen = {**SPACE.baseline, "gpus_per_trial": count, **settings}
    return make_record(rate, size_bytes, settings=chosen)


def test_each_number_of_gpus_has_its_fastest_and_what_it_costs(capsys):
    records = [
        on_gpus(1, 40 * GIB, 100),
        on_gpus(2, 41 * GIB, 190),
        on_gpus(2, 42 * GIB, 195, micro_batch=4),
        on_gpus(2, 90 * GIB, 300, micro_batch=8),  # does not fit
        on_gpus(2, 30 * GIB, 201, distributed="fsdp2"),
        on_gpus(4, 41 * GIB, 180),  # slower, and dearer
        on_gpus(8, 41 * GIB, 780),
    ]
    best = recommend(records, SPACE, GPU)
    found = {(row.gpus, row.way): row for row in best.by_gpus}
    assert list(found) == [(1, ""), (2, "ddp"), (2, "fsdp2"), (4, "ddp"), (8, "ddp")]
    assert found[2, "ddp"].record == records[2]
    assert [key for key, row in found.items() if row.on_front] == [(2, "fsdp2"), (8, "ddp")]
    price = GPU.price_usd_per_hour
    for (gpus, _), row in found.items():
        rate = row.record.outcome.evidence.speed.samples_per_s
        assert row.epoch_s == pytest.approx(SPACE.examples / rate)
        assert row.epoch_usd == pytest.approx(gpus * price * SPACE.examples / rate / 3600)
    print_recommendation(best)
    printed = capsys.readouterr().out
    assert "on each number of GPUs (predicted)" in printed
    assert "2 GPUs with fsdp2 is the cheapest, 8 GPUs with ddp 3.88 x as fast" in printed
    assert "do not tell costs within 10% apart" in " ".join(printed.split())
    assert "By number of GPUs" in report_html(build_view(records, SPACE, GPU))
    rows = yaml.safe_load(best_yaml(best, SPACE, GPU, trials=7))["by_gpus"]
    assert [row["gpus"] for row in rows] == [1, 2, 2, 4, 8]
    assert {row["source"] for row in rows} == {"predicted"}


def test_without_a_price_the_seconds_of_gpus_decide():
    free = replace(GPU, price_usd_per_hour=None)
    records = [on_gpus(1, 40 * GIB, 100), on_gpus(4, 40 * GIB, 500)]
    best = recommend(records, replace(SPACE, examples=None), free)
    assert [(row.on_front, row.epoch_usd) for row in best.by_gpus] == [(False, None), (True, None)]
    assert trade_text(best.by_gpus) == "4 GPUs with ddp is both the fastest and the cheapest"
