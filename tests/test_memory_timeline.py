"""The memory of a configuration over a step: against the prediction, in its file, in the report."""

import pytest
from measure_samples import knobs, model_folder
from results_samples import GPU, SPACE, make_search, write_all

from tuner.core.records import MemoryCategory
from tuner.cost.step_details import MemoryTimeline
from tuner.predict.predict import MAX_POINTS, predict, trace_timeline
from tuner.predict.traces import Subject
from tuner.report.memory_timeline import timeline_figure
from tuner.report.report import MEMORY_COLORS
from tuner.searches.store import ResultsFolder
from tuner.space.gpus import get_gpu


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    return Subject("causal_lm", model_folder(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("changes", [{}, {"grad_accum": 1}, {"gradient_checkpointing": False}])
def test_its_peak_and_its_end_are_the_prediction_s(subject, changes):
    gpu, configuration = get_gpu("a6000"), knobs(**changes)
    timeline = trace_timeline(subject, configuration, gpu)
    predicted = predict(subject, configuration, gpu)
    assert max(timeline.totals) == predicted.memory.peak_allocated_bytes
    assert max(timeline.reserved_bytes) == predicted.memory.peak_reserved_bytes
    assert all(h >= a for h, a in zip(timeline.reserved_bytes, timeline.totals, strict=True))
    micro_steps = 2 if configuration["grad_accum"] > 1 else 1
    assert [s.phase for s in timeline.spans] == ["forward", "backward"] * micro_steps + [
        "optimizer"
    ]
    assert timeline.spans[-1].end_s == pytest.approx(predicted.speed.step_s)
    assert list(timeline.times_s) == sorted(timeline.times_s)
    assert len(timeline.times_s) <= MAX_POINTS
    # What is loaded is there at every moment; what the loss takes is not.
    assert len(set(timeline.categories[MemoryCategory.ADAPTERS])) == 1
    assert 0 in timeline.categories[MemoryCategory.LOGITS_AND_LOSS]


def test_its_operators_are_parts_of_the_predicted_step(subject):
    gpu, configuration = get_gpu("a6000"), knobs(grad_accum=8)
    operators = trace_timeline(subject, configuration, gpu).operators
    step_s = predict(subject, configuration, gpu).speed.step_s
    assert [one.seconds for one in operators] == sorted(
        (one.seconds for one in operators), reverse=True
    )
    assert all(one.share == pytest.approx(one.seconds / step_s) for one in operators)
    assert 0 < sum(one.share for one in operators) < 1


def test_it_comes_back_from_json(subject):
    timeline = trace_timeline(subject, knobs(), get_gpu("a6000"))
    written = timeline.to_dict()
    assert MemoryTimeline.from_dict(written) == timeline
    del written["operators"]  # as files of before
    assert MemoryTimeline.from_dict(written).totals == timeline.totals


def test_figure_stacks_the_categories_and_names_the_phases(subject):
    timeline = trace_timeline(subject, knobs(), get_gpu("a6000"))
    figure = timeline_figure(timeline, get_gpu("a6000").memory_bytes, MEMORY_COLORS)
    stacked = [trace for trace in figure["data"] if "stackgroup" in trace]
    assert len(stacked) == len(timeline.categories)
    assert {a["text"] for a in figure["layout"]["annotations"]} >= {"forward", "backward"}


@pytest.mark.proof
def test_results_folder_keeps_the_course_and_traces_only_another_recommendation(subject, tmp_path):
    timeline = trace_timeline(subject, knobs(), get_gpu("a6000"))
    folder, asked = ResultsFolder(tmp_path, SPACE.name, GPU.id), []

    def trace(best):
        asked.append(best.configuration)
        return timeline

    records = make_search(30)
    view = write_all(folder, records, SPACE, GPU, timeline_of=trace)
    assert "Memory over one optimizer step" in folder.report_html.read_text()
    write_all(folder, records, SPACE, GPU, timeline_of=trace)
    assert asked == [view.best.configuration]
    folder.memory_timeline.write_text('{"of": 1}')
    write_all(folder, records, SPACE, GPU, timeline_of=trace)
    assert len(asked) == 2
    fewer = [r for r in records if r.configuration != view.best.configuration]
    write_all(folder, fewer, SPACE, GPU, timeline_of=trace)
    assert len(asked) == 3
    write_all(folder, records, SPACE, GPU)
    assert "Memory over one optimizer step" not in folder.report_html.read_text()
