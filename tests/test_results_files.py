"""The files of a results folder: real pictures and pages, whole or not there at all."""

import dataclasses
import hashlib
import os
import re
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pages import Page
from results_samples import GPU, SPACE, make_record, make_search, write_all
from started import run_python

from tuner.core.errors import UnavailableError
from tuner.core.records import Outcome, Status
from tuner.core.units import GIB, printable, significant
from tuner.report.plot import pareto_png
from tuner.report.report import SHA256, VERSION, plotlyjs, report_html
from tuner.searches import store
from tuner.searches.facts import SpaceFacts
from tuner.searches.store import ResultsFolder, safe_name, write_atomically
from tuner.searches.view import build_view

FILES = {"trials.jsonl", "pareto.csv", "best.yaml", "pareto.png", "report.html"}
COMMAND = "tuner search --space qlora27b --gpu a6000"
EVIL = "<img src=x onerror=alert(1)></script><script>alert(2)</script>\"'&$x_y$%{y}\x00\x07"


def render(records, space=SPACE, gpu=GPU, **facts) -> Page:
    return Page(report_html(build_view(records, space, gpu, command=COMMAND, **facts)))


@pytest.fixture
def folder(tmp_path: Path) -> ResultsFolder:
    return ResultsFolder(tmp_path / "results", "qlora27b", "a6000")


def test_a_search_leaves_five_files(folder):
    records = make_search(60)
    folder.check_writable()
    with folder.writer() as journal:
        for record in records:
            journal.append(record)
    view = write_all(folder, folder.read().records, SPACE, GPU, command=COMMAND)
    assert {path.name for path in folder.path.iterdir()} == FILES
    assert folder.path.relative_to(folder.root).as_posix() == "qlora27b/a6000"
    best = yaml.safe_load(folder.best_yaml.read_text())
    assert best["configuration"] == view.best.configuration.to_dict()
    assert folder.pareto_png.read_bytes().startswith(b"\x89PNG")
    assert folder.report_html.read_text().startswith("<!doctype html>")


def test_an_interrupt_leaves_whole_files(folder, monkeypatch):
    write_all(folder, make_search(20), SPACE, GPU)
    before = folder.report_html.read_bytes()

    def interrupt(self, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(folder.report_html, b"half")
    assert folder.report_html.read_bytes() == before
    assert {path.name for path in folder.path.iterdir()} == FILES - {"trials.jsonl"}


def test_a_disk_that_refuses_is_an_answer(folder, monkeypatch):
    def refuse(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", refuse)
    with pytest.raises(UnavailableError, match=r"best\.yaml.*No space left"):
        write_atomically(folder.best_yaml, b"text")
    assert list(folder.path.iterdir()) == []


@given(st.text(max_size=100))
def test_no_name_leads_out_of_the_folder(name):
    root = Path("results").resolve()
    path = ResultsFolder(root, name, name).report_html
    assert path.resolve().relative_to(root).parts[2:] == ("report.html",)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,80}", safe_name(name))


@pytest.mark.parametrize("name", ["..", ".", "", "/etc", "../../x", "a/b", "a\\b", "a\x00b", "-x"])
def test_names_that_are_paths_are_changed_and_stay_apart(name):
    assert safe_name(name) != name
    assert safe_name(name) != safe_name(name + "/")
    assert safe_name("rtx6000_ada") == "rtx6000_ada"


def test_the_picture_leaves_pyplot_alone():

    code = (
        "import sys; from results_samples import *; from tuner.searches.view import build_view;"
        "from tuner.report.plot import pareto_png;"
        "pareto_png(build_view(make_search(5), SPACE, GPU));"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    here = Path(__file__).parent
    done = run_python("-c", code, cwd=here)
    assert done.stdout.strip() == "False", done.stderr


def test_the_report_asks_nothing_of_the_network():
    page = render(make_search(40))
    assert not {"link", "iframe", "img", "object", "embed", "base"} & set(page.tags)
    assert not [value for name, value in page.attributes if name in ("src", "href", "action")]
    policy = next(v for _, v in page.attributes if v and "default-src" in v)
    assert "default-src 'none'" in policy
    assert "http" not in policy
    assert "plotly.js" in page.scripts[1][:200]


def test_the_report_says_predicted_at_the_top_and_on_the_axes():
    page = render(make_search(40))
    assert "predicted" in " ".join("".join(page.texts).split())[:120]
    layout = page.data["figures"]["front"]["layout"]
    assert "predicted" in layout["xaxis"]["title"]["text"]
    assert "predicted" in layout["yaxis"]["title"]["text"]
    assert layout["yaxis"]["title"]["text"].endswith("samples/s")
    measured = render([make_record(measured=True)])
    assert "Nothing was measured" not in "".join(measured.texts)
    assert "measured" in measured.data["figures"]["front"]["layout"]["xaxis"]["title"]["text"]


def test_every_trial_is_a_point_and_a_row():
    records = [*make_search(50), make_record(settings={"micro_batch": 99}, status=Status.CRASHED)]
    crashed = dataclasses.replace(records[-1], outcome=Outcome(Status.CRASHED, message="boom"))
    page = render([*records[:-1], crashed])
    rows = page.data["trials"]["rows"]
    traces = page.data["figures"]["front"]["data"]
    drawn = sorted(i for trace in traces for i in trace.get("customdata", []))
    assert drawn == list(range(50))  # the crashed one has no numbers: a row, and no point
    assert len(rows) == 51
    columns = page.data["trials"]["columns"]
    speed = columns.index("samples/s")
    assert [columns[i] for i in page.data["trials"]["rates"]] == ["samples/s", "tokens/s"]
    for trace in traces:
        for index, y in zip(trace.get("customdata", []), trace["y"], strict=False):
            assert rows[index][speed] == pytest.approx(y, rel=1e-4)


def test_each_parameter_has_a_point_for_what_fits_at_each_of_its_values():
    records = [
        make_record(speed, size, settings={"optimizer": value, "micro_batch": batch})
        for value, batch, speed, size in (
            ("adamw_8bit", 1, 300, 40 * GIB),
            ("paged_adamw_8bit", 1, 250, 30 * GIB),
            ("paged_adamw_8bit", 2, 200, 30 * GIB),
            ("adamw_torch", 4, 900, 90 * GIB),  # does not fit
        )
    ]
    view = build_view(records, SPACE, GPU)
    figure = render(records).data["figures"]["knobs"]
    optimizer, batch = (trace for trace in figure["data"])
    assert sorted(figure["layout"]["yaxis"]["ticktext"]) == ["micro_batch", "optimizer"]
    if figure["layout"]["yaxis"]["ticktext"][0] == "micro_batch":
        optimizer, batch = batch, optimizer
    assert optimizer["hovertext"] == ["paged_adamw_8bit", "adamw_8bit"]
    assert batch["hovertext"] == ["2", "1"]
    fastest = view.best.evidence.speed.samples_per_s
    for trace in (optimizer, batch):
        assert trace["x"][1] == pytest.approx(fastest, rel=1e-4)
        assert trace["marker"]["symbol"] == ["circle", "star"]


def test_nothing_to_compare_is_no_figure_of_parameters():
    assert "knobs" not in render([make_record(300, settings={"micro_batch": 1})]).data["figures"]
    assert "knobs" not in render([]).data["figures"]


def test_memory_speed_and_verdict_are_the_first_columns_of_all_configurations():
    records = make_search(30)
    view = build_view(records, SPACE, GPU)
    table = render(records).data["trials"]
    assert table["columns"][:3] == ["device GiB", "samples/s", "verdict"]
    for row, kind in zip(table["rows"], table["kinds"], strict=True):
        assert len(row) == len(table["columns"])
        assert row[2] == table["labels"][kind]
    best = table["rows"][table["kinds"].index("best")]
    assert best[0] == pytest.approx(view.best.evidence.memory.device_bytes / GIB, abs=0.01)


SAID = {"command": COMMAND, "use": ("tuner apply --space s --gpu a6000 train.py",)}


def test_the_report_answers_with_the_best_and_how_to_repeat_it():
    records = make_search(50)
    view = build_view(records, SPACE, GPU, conditions=["lora_rank >= 128"], **SAID)
    text = " ".join("".join(Page(report_html(view)).texts).split())
    best = view.best
    assert f"{significant(best.evidence.speed.samples_per_s)} samples/s" in text
    assert f"{significant(best.evidence.speed.tokens_per_s)} tokens/s" in text
    assert f"{best.evidence.memory.device_bytes / GIB:.2f} GiB" in text
    assert "lora_rank >= 128" in text
    assert COMMAND in text
    assert SAID["use"][0] in text
    assert "2.13.0" in text
    assert "activations" in text


def test_a_report_of_nothing_that_fits_says_so():
    for records in ([], [make_record(500, 90 * GIB)]):
        assert "No configuration fits" in "".join(render(records).texts)
        assert build_view(records, SPACE, GPU, **SAID).use == ()


def test_names_are_shown_as_text():
    space = SpaceFacts(EVIL, EVIL, model=EVIL, knobs=(EVIL, "plain"), examples=10, epochs=1)
    records = [
        make_record(
            100.0 + i,
            settings={EVIL: f"{EVIL}{i}", "plain": i, "fixed": EVIL},
            space=EVIL,
            trial_id=EVIL,
            searcher=EVIL,
            versions={EVIL: EVIL},
        )
        for i in range(4)
    ]
    gpu = dataclasses.replace(GPU, name=EVIL)
    view = build_view(records, space, gpu, conditions=[EVIL], command=EVIL)
    page = Page(report_html(view))
    assert "img" not in page.tags
    assert page.tags.count("script") == 3
    assert page.handlers == []
    assert EVIL[:20] in "".join(page.texts)
    assert page.data["trials"]["rows"][0][-1] == printable(EVIL) != EVIL
    knobs = page.data["figures"]["knobs"]
    texts = knobs["layout"]["yaxis"]["ticktext"]
    texts += [text for trace in knobs["data"] for text in (*trace["text"], *trace["hovertext"])]
    assert not [text for text in texts if "<" in text or "$" in text]  # plotly reads both
    assert pareto_png(view).startswith(b"\x89PNG")


@pytest.mark.proof
def test_five_thousand_trials_are_reported():
    text = report_html(build_view(make_search(5000), SPACE, GPU))
    assert len(text) < 8_000_000
    page = Page(text)
    assert len(page.data["trials"]["rows"]) == 5000
    for name, figure in page.data["figures"].items():
        points = sum(len(trace["x"]) for trace in figure["data"])
        assert points <= (5100 if name == "front" else 2500)


def test_a_link_that_is_planted_for_a_draft_is_not_followed(tmp_path, monkeypatch):
    """Whoever may write into the folder cannot have other files overwritten."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = tmp_path / "results"
    folder.mkdir()
    for number in (os.getpid(), 0):
        (folder / f".report.html.{number}.tmp").symlink_to(victim)
    monkeypatch.setattr("secrets.token_hex", lambda size: "0")
    (folder / "other.html").symlink_to(victim)
    with pytest.raises(UnavailableError, match="cannot write"):
        write_atomically(folder / "report.html", b"new")
    monkeypatch.undo()
    write_atomically(folder / "report.html", b"new")
    write_atomically(folder / "other.html", b"new")
    assert victim.read_text() == "precious"
    assert (folder / "report.html").read_bytes() == (folder / "other.html").read_bytes() == b"new"


def test_the_bundle_is_the_published_one_and_comes_with_its_licence():
    vendored = files("tuner.report") / "page/vendor"
    data = (vendored / "plotly-basic.min.js").read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256
    assert f"plotly.js (basic - minified) v{VERSION}" in plotlyjs()[:200]
    assert "Permission is hereby granted" in (vendored / "LICENSE").read_text("utf-8")


def test_the_bundle_is_of_the_version_that_figures_are_made_for():
    from plotly.offline import get_plotlyjs_version

    assert VERSION.split(".")[0] == get_plotlyjs_version().split(".")[0]
