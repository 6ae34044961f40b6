"""What comes home of a job: packed, unpacked, merged; and nothing that a hostile cluster sends."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import zlib
from pathlib import Path

import pytest
from cli_samples import SPACE, make_trial, write_samples

from tuner.engine import job_files
from tuner.engine.fetching import Choice, take_home
from tuner.engine.job_files import (
    JobFiles,
    JobRequest,
    check_id,
    new_request,
    open_folder,
    pack,
    unpack,
)
from tuner.errors import InputError, UnavailableError
from tuner.results.journal import encode, read_journal
from tuner.results.store import ResultsFolder

ID = "tiny-a6000-0123abcd"
CHOICE = Choice(space_name="./tiny.yaml")


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    write_samples(tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    monkeypatch.setenv("TUNER_JOBS", str(tmp_path / "jobs"))
    return tmp_path / "home"


@pytest.fixture
def trials(home):
    return [
        make_trial(home, 10, 100, micro_batch=1),
        make_trial(home, 20, 300, micro_batch=4),
        make_trial(home, 60, 400, micro_batch=2),
    ]


def a_job(home, trials, tail: bytes = b"") -> Path:
    """The folder of a job of these trials, as the cluster has it."""
    request = new_request(
        ID, ["--space", "./tiny.yaml", "--gpu", "a6000"], space="tiny", gpu="a6000"
    )
    folder = open_folder(request, home / "tiny.yaml")
    journal = folder / "results" / "tiny" / "a6000" / "trials.jsonl"
    journal.parent.mkdir(parents=True)
    journal.write_bytes(b"".join(map(encode, trials)) + tail)
    return folder


def files_of(journals, **changes) -> JobFiles:
    request = new_request(ID, ["--space", "./tiny.yaml"], space="tiny", gpu="a6000")
    return dataclasses.replace(JobFiles(request, tuple(journals), space_text=SPACE), **changes)


# -- packed and unpacked ----------------------------------------------------------------------


def test_files_come_through_the_output_of_another_program(home, trials):
    a_job(home, trials)
    lines = ["2026-01-01 INFO something of Ray's", *pack(ID), "more of it"]
    found = unpack(lines, ID)
    assert found is not None
    assert found.request.arguments == ("--space", "./tiny.yaml", "--gpu", "a6000")
    assert found.space_text == SPACE
    assert found.journals == ("".join(encode(t).decode() for t in trials),)


def test_folder_of_a_job_is_its_owners_alone_and_never_used_twice(home, trials):
    folder = a_job(home, trials)
    assert folder.stat().st_mode & 0o077 == 0
    before = (folder / "job.json").read_bytes()
    with pytest.raises(InputError, match="another job"):
        open_folder(new_request(ID, [], space="x", gpu="t4"), None)
    assert (folder / "job.json").read_bytes() == before


def test_jobs_without_a_folder_are_said(home):
    with pytest.raises(InputError, match="no files of a job"):
        list(pack(ID))


@pytest.mark.parametrize(
    "text", ["", ".", "..", "../x", "a/b", "/etc", "-x", "a\nb", "a b", "x" * 200, "a;b", "$(x)"]
)
def test_an_id_is_a_name_and_never_a_path(home, text):
    for use in (check_id, lambda t: list(pack(t)), lambda t: new_request(t, [], space="", gpu="")):
        with pytest.raises(InputError, match="not the id of a job"):
            use(text)


def test_files_that_are_too_large_stay_there(home, trials, monkeypatch):
    a_job(home, trials)
    monkeypatch.setattr(job_files, "MAX_BYTES", 100)
    with pytest.raises(UnavailableError, match="at most"):
        list(pack(ID))


def packed(content, *, size: int | None = None, digest: str | None = None) -> list[str]:
    data = json.dumps(content).encode()
    text = base64.b64encode(zlib.compress(data)).decode()
    size = len(data) if size is None else size
    digest = hashlib.sha256(data).hexdigest() if digest is None else digest
    return [f"tuner-files 1 {size} {digest}", f"tuner-files:{text}", "tuner-files-end"]


def request_dict(**changes) -> dict:
    return {**new_request(ID, [], space="tiny", gpu="t4").to_dict(), **changes}


GOOD = {"request": request_dict(), "space_text": None, "journals": [], "courses": []}


def test_the_form_that_the_next_tests_break_is_right():
    assert unpack(packed(GOOD), ID) == JobFiles(JobRequest.from_dict(GOOD["request"]))


@pytest.mark.parametrize(
    "lines",
    [
        packed(GOOD, digest="0" * 64),
        packed(GOOD, size=10),
        packed(GOOD, size=10**12),
        packed(GOOD, size=-1),
        packed([]),
        packed({**GOOD, "journals": "text"}),
        packed({**GOOD, "journals": [1]}),
        packed({**GOOD, "courses": None}),
        packed({**GOOD, "space_text": 3}),
        packed({**GOOD, "request": None}),
        packed({**GOOD, "request": request_dict(id="other")}),
        packed({**GOOD, "request": request_dict(arguments="--space x")}),
        packed({**GOOD, "request": request_dict(schema=99)}),
        ["tuner-files 2 1 1", "tuner-files-end"],
        ["tuner-files 1", "tuner-files-end"],
        ["tuner-files 1 5 0", "tuner-files:%%%%", "tuner-files-end"],
        ["tuner-files 1 5 0", "tuner-files:AAAA", "tuner-files-end"],
    ],
)
def test_what_is_not_the_files_of_this_job_is_refused(lines):
    with pytest.raises(UnavailableError, match="unusable"):
        unpack(lines, ID)


@pytest.mark.parametrize("lines", [[], ["error: no files"], packed(GOOD)[:-1], ["tuner-files-end"]])
def test_what_broke_off_is_told_apart(lines):
    assert unpack(lines, ID) is None


def test_a_small_text_that_unpacks_to_a_large_one_is_not_unpacked():
    bomb = base64.b64encode(zlib.compress(b"0" * (64 << 20))).decode()
    lines = [f"tuner-files 1 1000 {'0' * 64}", f"tuner-files:{bomb}", "tuner-files-end"]
    with pytest.raises(UnavailableError, match="size is not the announced one"):
        unpack(lines, ID)


# -- at home ----------------------------------------------------------------------------------


def test_results_of_a_job_are_those_that_a_search_here_would_have_written(home, trials):
    a_job(home, trials)
    files = unpack(pack(ID), ID)
    (fetched,) = take_home(files, home / "results", CHOICE)
    assert (fetched.total, fetched.added, fetched.note) == (3, 3, "")
    folder = home / "results" / "tiny" / "a6000"
    assert list(read_journal(folder / "trials.jsonl").records) == trials
    assert fetched.view.best.record.trial_id == trials[1].trial_id
    assert {p.name for p in folder.iterdir()} >= {
        "best.yaml", "pareto.csv", "pareto.png", "report.html", "trials.jsonl",
    }  # fmt: skip


def test_fetching_again_adds_what_is_new_and_overwrites_nothing(home, trials):
    journal = home / "results" / "tiny" / "a6000" / "trials.jsonl"
    own = dataclasses.replace(make_trial(home, 15, 200, micro_batch=4), trial_id="own-1")
    journal.parent.mkdir(parents=True)
    journal.write_bytes(encode(own))
    for until, total, added in [(1, 1, 1), (1, 1, 0), (3, 3, 2), (3, 3, 0)]:
        text = b"".join(map(encode, trials[:until])).decode()
        before = journal.read_bytes()
        (fetched,) = take_home(files_of([text]), home / "results", CHOICE)
        assert (fetched.total, fetched.added) == (total, added)
        assert journal.read_bytes().startswith(before)
    assert list(read_journal(journal).records) == [own, *trials]


def test_a_torn_last_line_of_a_running_job_waits_for_the_next_time(home, trials):
    whole = b"".join(map(encode, trials))
    torn = whole[: -len(encode(trials[-1])) // 2].decode()
    (first,) = take_home(files_of([torn]), home / "results", CHOICE)
    assert (first.total, first.added) == (2, 2)
    (second,) = take_home(files_of([whole.decode()]), home / "results", CHOICE)
    assert (second.total, second.added) == (3, 1)


def test_a_journal_with_anything_else_is_refused_and_nothing_is_written(home, trials):
    text = encode(trials[0]).decode()
    for bad in ('{"schema":1}\n', "<script>\n", "[1]\n"):
        with pytest.raises(UnavailableError, match="holds something that is not a trial"):
            take_home(files_of([text, bad + text]), home / "results", CHOICE)
    assert not (home / "results").exists()


@pytest.mark.parametrize("name", ["../../up", "/etc/x", "a/../../b", "..", ".", "\x00", "\ud800"])
def test_no_name_of_a_hostile_cluster_leads_out_of_the_results(home, trials, name):
    everything = {p for p in home.parent.rglob("*") if "results" not in p.parts}
    evil = dataclasses.replace(trials[0], space=name, gpu=name)
    (fetched,) = take_home(files_of([encode(evil).decode()]), home / "results", CHOICE)
    assert fetched.added == 1
    assert fetched.view is None
    assert fetched.folder.journal.resolve().is_relative_to((home / "results").resolve())
    assert {p for p in home.parent.rglob("*") if "results" not in p.parts} == everything


def test_where_the_space_is_not_known_the_journal_comes_home_alone(home, trials):
    (home / "tiny.yaml").unlink()
    text = encode(trials[0]).decode()
    for files in (
        files_of([text], space_text=None),
        files_of([text], space_text="knobs: ["),
        files_of([text], space_text="\ud800"),
    ):
        (fetched,) = take_home(files, home / "results", CHOICE)
        assert fetched.view is None
        assert fetched.note
    assert len(read_journal(home / "results/tiny/a6000/trials.jsonl").records) == 1


def test_predictions_are_added_to_those_that_are_here(home, trials):
    lines = [encode(trial).decode() for trial in trials[:2]]
    folder = ResultsFolder(home / "results", trials[0].space, trials[0].gpu)
    folder.write_predicted(trials[:1])
    for _ in range(2):
        take_home(files_of(lines[:1], predictions=(lines[1],)), home / "results", CHOICE)
        assert read_journal(folder.predicted).records == tuple(trials[:2])


def test_a_course_of_memory_that_is_none_is_left(home, trials):
    text = encode(trials[0]).decode()
    timelines = ("{}", "nonsense", '{"of": {"gpu": "a6000"}, "course": {}}', "[" * 100_000, "null")
    (fetched,) = take_home(files_of([text], timelines=timelines), home / "results", CHOICE)
    assert fetched.view is not None
    assert not fetched.folder.memory_timeline.exists()
