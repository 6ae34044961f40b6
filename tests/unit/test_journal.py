"""The journal: what is appended comes back, whatever a kill or an editor did to the file."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results_samples import make_record

from tuner.core.errors import InputError, UnavailableError
from tuner.core.records import Configuration, Status, TrialRecord
from tuner.searches.journal import (
    MAX_LINES,
    MAX_PROBLEMS,
    JournalWriter,
    check_writable,
    encode,
    latest,
    read_journal,
)

texts = st.text(max_size=20)
values = st.one_of(
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    texts,
    st.lists(texts, max_size=3),
)
records_ = st.builds(
    lambda settings, speed, size, message, status: dataclasses.replace(
        (record := make_record(speed, size, settings=settings)),
        outcome=dataclasses.replace(record.outcome, message=message, status=status),
    ),
    st.dictionaries(texts, values, min_size=1, max_size=5),
    st.floats(min_value=0.1, max_value=1e6),
    st.integers(min_value=1, max_value=10**12),
    texts,
    st.sampled_from(Status),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "space" / "gpu" / "trials.jsonl"


def append(path: Path, *records: TrialRecord) -> None:
    with JournalWriter(path) as journal:
        for record in records:
            journal.append(record)


@given(st.lists(records_, max_size=4))
def test_what_is_appended_is_read_back(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("journal") / "trials.jsonl"
    append(path, *records)
    contents = read_journal(path)
    assert list(contents.records) == records
    assert contents.notes == ()
    assert path.read_bytes().count(b"\n") == len(records)


@given(st.data())
def test_a_torn_last_line_costs_only_itself(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("journal") / "trials.jsonl"
    first, second = make_record(1.0), make_record(2.0, settings={"micro_batch": 2})
    torn = encode(second)[: data.draw(st.integers(1, len(encode(second)) - 2))]
    path.write_bytes(encode(first) + torn)

    contents = read_journal(path)
    assert contents.records == (first,)
    assert "trials.jsonl:2" in contents.notes[0]

    with JournalWriter(path) as journal:  # the next search continues on a whole line
        assert "torn" in journal.notes[0]
        journal.append(second)
    assert read_journal(path).records == (first, second)


def test_a_whole_last_line_without_its_end_is_kept(path):
    first, second = make_record(1.0), make_record(2.0)
    path.parent.mkdir(parents=True)
    path.write_bytes(encode(first).rstrip(b"\n"))
    assert read_journal(path).records == (first,)
    append(path, second)
    assert read_journal(path).records == (first, second)


def broken(**changes: object) -> bytes:
    return json.dumps({**make_record().to_dict(), **changes}).encode()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{nonsense", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1, 2]", "not a trial record"),
        (b"{}", "schema None"),
        (broken(schema=99), "schema 99"),
        (broken(status="fine"), "'fine'"),
        (broken(configuration=[1]), "not a trial record"),
        (broken(predicted=5), "not a trial record"),
        (broken(seed="seven"), "field seed: expected int, got str"),
        (broken(duration_s=float("inf")), "not JSON"),
        (broken(duration_s=1e31), "field duration_s: expected float <= 1e+30"),
        (broken(gpu_memory_bytes=-999643693875), "field gpu_memory_bytes: expected int >= 0"),
        (broken(message="\ud800"), "half of a surrogate pair"),
        (broken(message="x").replace(b'"x"', b'"\xed\xa0\x80"'), "bytes that are no UTF-8"),
        (json.dumps({"schema": 1, "trial_id": "x"}).encode(), "missing required field status"),
    ],
)
def test_a_malformed_line_is_named_with_its_file(path, line, said):
    path.parent.mkdir(parents=True)
    path.write_bytes(encode(make_record()) + line + b"\n" + encode(make_record()))
    with pytest.raises(InputError) as error:
        read_journal(path)
    assert f"{path}:2" in str(error.value)
    assert said in str(error.value)
    assert error.value.exit_code == 2


def test_a_wrong_number_inside_a_prediction_is_named(path):
    data = make_record().to_dict()
    data["predicted"]["memory"]["device_bytes"] = "much"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(data) + "\n")
    with pytest.raises(InputError, match=r"field memory\.device_bytes: expected int, got str"):
        read_journal(path)


def test_all_malformed_lines_are_listed_up_to_a_screenful(path):
    path.parent.mkdir(parents=True)
    path.write_text("x\n" * 100)
    with pytest.raises(InputError) as error:
        read_journal(path)
    assert "100 line(s)" in str(error.value)
    assert len(error.value.problems) == MAX_PROBLEMS


def test_not_a_number_is_not_written(path):
    append(path, make_record(1.0))
    with JournalWriter(path) as journal, pytest.raises(ValueError, match="JSON"):
        journal.append(make_record(float("nan")))
    assert len(read_journal(path).records) == 1


def test_a_full_disk_leaves_the_journal_as_it_was(path, monkeypatch):
    append(path, make_record(1.0))
    whole_write = os.write
    with JournalWriter(path) as journal:
        monkeypatch.setattr(os, "write", lambda fd, data: whole_write(fd, data[:50]))
        with pytest.raises(UnavailableError, match="no space left"):
            journal.append(make_record(2.0))
        monkeypatch.undo()
        journal.append(make_record(3.0))
    speeds = [r.outcome.evidence.speed.tokens_per_s for r in read_journal(path).records]
    assert speeds == [1.0, 3.0]


def test_a_second_writer_is_refused_until_the_first_is_done(path):
    with JournalWriter(path), pytest.raises(InputError, match="another search"):
        JournalWriter(path).__enter__()
    append(path, make_record())
    assert len(read_journal(path).records) == 1


def test_a_writable_folder_is_accepted_and_nothing_is_created(tmp_path):
    check_writable(tmp_path / "a" / "b")
    check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_is_refused_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError) as error:
        check_writable(tmp_path / "file" / "results")
    assert "file/results" in str(error.value)
    assert error.value.exit_code == 2
    assert error.value.hint


def test_a_read_only_disk_is_refused(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(InputError, match="Read-only file system"):
        check_writable(tmp_path)


def test_the_latest_record_stands_for_a_configuration():
    old, new = make_record(1.0), make_record(2.0)
    other = make_record(3.0, settings={"micro_batch": 8})
    assert latest([old, other, new]) == (new, other)
    assert latest([]) == ()


def test_an_interrupted_trial_never_replaces_a_finished_one():
    finished, interrupted = make_record(1.0), make_record(2.0, status=Status.INTERRUPTED)
    assert latest([finished, interrupted]) == (finished,)


def test_other_memory_is_another_question():
    small = dataclasses.replace(make_record(), gpu_memory_bytes=10**10)
    assert len(latest([make_record(), small])) == 2
    assert make_record().configuration == Configuration({"lora_rank": 128, "micro_batch": 4})


def test_more_lines_than_any_search_writes_are_refused(path):
    path.parent.mkdir(parents=True)
    path.write_bytes(encode(make_record()) + b"\n" * (MAX_LINES + 1))
    with pytest.raises(InputError, match="more than 2,000,000 lines"):
        read_journal(path)
