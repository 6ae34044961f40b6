"""Disks that are full, read-only, without locks or gone: the journal stays valid, and it is said.

Where the machine lets a process have mounts of its own, the disks are real ones.
"""

import dataclasses
import errno
import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_samples import write_samples
from results_samples import make_record
from started import run_python

from tuner.app.search import result_files as journals
from tuner.app.search.plan import SearchPlan, make_plan
from tuner.app.target import load_targets
from tuner.core.errors import InputError, UnavailableError
from tuner.searches.journal import JournalWriter, read_journal
from tuner.searches.options import SearchOptions
from tuner.searches.store import ResultsFolder

ROOT = Path(__file__).parents[1]


def own_mounts() -> bool:
    """Whether a process may mount a small disk that nobody else sees."""
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run(
        ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
        capture_output=True,
        check=False,
    )
    return tried.returncode == 0


needs_mounts = pytest.mark.skipif(not own_mounts(), reason="a process may not mount disks here")


def with_disk(folder: Path, options: str, *command: str, before: str = "true"):
    """Run a command in `folder` with a disk of its own at `folder`/results."""
    (folder / "results").mkdir(exist_ok=True)
    script = f'mount -t tmpfs -o {options} tmpfs results && {{ {before}; }} && "$@"; code=$?; ' + (
        "rm -f results/filler; cp -r results left; exit $code"
    )
    return subprocess.run(
        ["unshare", "-Urm", "sh", "-c", script, "sh", *command],
        cwd=folder, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


SEARCH = (
    "-m", "tuner", "search", "--space", "tiny.yaml", "--gpu", "a6000", "--set", "precision=fp16",
    "--set", "lora_rank=8", "--trials", "12", "--workers", "1",
)  # fmt: skip


@needs_mounts
@pytest.mark.proof
def test_a_search_on_a_full_disk_says_so_and_goes_on_when_there_is_room(tmp_path):
    write_samples(tmp_path)
    ended = with_disk(tmp_path, "size=16k", sys.executable, *SEARCH)
    assert ended.returncode == 3, ended.stderr
    assert "no space left on the disk" in ended.stderr
    assert "Traceback" not in ended.stderr
    left = tmp_path / "left" / "tiny" / "a6000"
    kept = read_journal(left / "trials.jsonl")
    assert 0 < len(kept.records) < 12
    assert not kept.notes
    assert [p.name for p in left.iterdir() if p.name.startswith(".")] == []
    shutil.copytree(tmp_path / "left", tmp_path / "results", dirs_exist_ok=True)
    again = run_python(
        *SEARCH, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    )
    assert again.returncode == 0, again.stderr
    whole = read_journal(tmp_path / "results" / "tiny" / "a6000" / "trials.jsonl").records
    assert whole[: len(kept.records)] == kept.records
    assert len({r.configuration.key for r in whole}) == len(whole)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "results" / "trials.jsonl"


def test_a_disk_that_refuses_to_be_mended_too_leaves_a_torn_line_that_is_cut_off(path, monkeypatch):
    whole_write = os.write
    with JournalWriter(path) as journal:
        journal.append(make_record(1.0))
        monkeypatch.setattr(os, "write", lambda fd, data: whole_write(fd, data[:50]))
        monkeypatch.setattr(os, "ftruncate", refusing(errno.EIO))
        with pytest.raises(UnavailableError, match="no space left"):
            journal.append(make_record(2.0))
        monkeypatch.undo()
    assert [len(read_journal(path).records), len(read_journal(path).notes)] == [1, 1]
    with JournalWriter(path) as journal:
        assert "cut off a torn last line" in journal.notes[0]
        journal.append(make_record(3.0))
    assert len(read_journal(path).records) == 2


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE])
def test_what_a_disk_refuses_is_an_answer(path, monkeypatch, number):
    with JournalWriter(path) as journal:
        monkeypatch.setattr(os, "fsync", refusing(number))
        with pytest.raises(UnavailableError, match=os.strerror(number)):
            journal.append(make_record(1.0))
    assert read_journal(path).records == ()


def refusing(number):
    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


class TestLocks:
    @pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
    def test_a_file_system_without_locks_is_refused(self, path, monkeypatch, number):
        """NFS without its lock service says ENOLCK."""
        monkeypatch.setattr(fcntl, "flock", refusing(number))
        with pytest.raises(UnavailableError, match="cannot be locked") as raised:
            JournalWriter(path).__enter__()
        assert "local disk" in str(raised.value)

    def test_where_locks_reach_no_other_machine_the_second_writer_stops(self, path, monkeypatch):
        """NFS that is mounted with local_lock=all, and most file systems on object stores."""
        monkeypatch.setattr(fcntl, "flock", lambda *arguments: None)
        with JournalWriter(path) as here, JournalWriter(path) as there:
            there.append(make_record(1.0))
            with pytest.raises(UnavailableError, match="another program has written to"):
                here.append(make_record(2.0))
            there.append(make_record(3.0))
        assert len(read_journal(path).records) == 2

    @pytest.mark.parametrize("root", ["s3://bucket/runs", "gs://bucket", "abfs://a@b/c", "hdfs:/x"])
    def test_results_in_an_object_store_are_refused(self, root):
        with pytest.raises(InputError, match=f"'{root.split(':')[0]}://.*takes a folder"):
            ResultsFolder(Path(root), "fake", "a6000")
        assert ResultsFolder(Path("a:b/c"), "fake", "a6000").path == Path("a:b/c/fake/a6000")

    def test_a_killed_search_leaves_no_lock(self, path):
        """The kernel lets go of the locks of a process that has ended."""
        program = (
            "import os, signal, sys; from pathlib import Path\n"
            "from tuner.searches.journal import JournalWriter\n"
            "JournalWriter(Path(sys.argv[1])).__enter__(); print(flush=True)\n"
            "signal.pause()"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        process.stdout.readline()
        with pytest.raises(InputError, match="another search"):
            JournalWriter(path).__enter__()
        process.kill()
        process.communicate()
        with JournalWriter(path) as journal:
            journal.append(make_record())

    def test_what_is_locked_is_what_the_path_names(self, path, monkeypatch):
        """Another search with --fresh renames the journal between opening and locking."""
        with JournalWriter(path) as journal:
            journal.append(make_record(1.0))
        lock, renamed = fcntl.flock, path.with_name("trials-old.jsonl")

        def rename_first(descriptor: int, operation: int) -> None:
            if not renamed.exists():
                path.rename(renamed)
            lock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", rename_first)
        with JournalWriter(path) as journal:
            journal.append(make_record(2.0))
        assert [len(read_journal(p).records) for p in (renamed, path)] == [1, 1]


class TestRemoved:
    def test_a_journal_that_was_removed_takes_no_more_records(self, path):
        with JournalWriter(path) as journal:
            journal.append(make_record(1.0))
            shutil.rmtree(path.parent)
            with pytest.raises(UnavailableError, match="was removed while the search ran"):
                journal.append(make_record(2.0))
        assert not path.parent.exists()

    def test_a_journal_that_is_no_file_is_refused_and_not_read_for_ever(self, path):
        path.parent.mkdir()
        path.symlink_to("/dev/zero")
        for use in (read_journal, lambda p: JournalWriter(p).__enter__()):
            with pytest.raises(InputError, match="is not a file"):
                use(path)
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(InputError, match="is not a file"):
            read_journal(path)


@pytest.fixture
def plan(tmp_path, monkeypatch) -> SearchPlan:
    write_samples(tmp_path)
    monkeypatch.chdir(tmp_path)
    return make_plan(load_targets("tiny.yaml", ["a6000"])[0], SearchOptions())


class TestTwoSearches:
    def test_the_second_does_not_take_the_empty_journal_of_the_first(self, plan):
        path = plan.target.folder.journal
        with journals.journal_of(plan) as (first, _):
            with pytest.raises(InputError, match="another search"), journals.journal_of(plan):
                pass
            first.append(make_record())
        assert len(read_journal(path).records) == 1

    def test_a_search_without_a_trial_leaves_nothing(self, plan):
        with journals.journal_of(plan):
            assert plan.target.folder.journal.exists()
        assert not Path("results").exists()

    def test_a_clock_that_was_set_back_replaces_no_older_journal(self, plan, monkeypatch):
        fresh = dataclasses.replace(plan, options=dataclasses.replace(plan.options, fresh=True))
        still = journals.datetime(2026, 1, 1, tzinfo=journals.UTC)

        class Stopped(journals.datetime):
            @classmethod
            def now(cls, tz: object = None) -> journals.datetime:
                return still

        monkeypatch.setattr(journals, "datetime", Stopped)
        for speed in (1.0, 2.0, 3.0):
            with journals.journal_of(fresh) as (writer, _):
                writer.append(make_record(speed))
        found = sorted(plan.target.folder.path.glob("trials*.jsonl"))
        speeds = [read_journal(p).records[0].outcome.evidence.speed.tokens_per_s for p in found]
        assert sorted(speeds) == [1.0, 2.0, 3.0]
