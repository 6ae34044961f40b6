"""What must hold after each thing that happens to a cluster, and at the end of its searches."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shared_cases.chaos_trials import ChaosSpace, front_of, gate_of, request_of, true_front
from tuner.core.records import Status, TrialRecord
from tuner.searches.journal import JournalWriter, read_journal
from tuner.searches.progress import StoppedBy
from tuner.searches.ray.driver import search_all
from tuner.searches.request import SearchOutcome


@dataclass
class Journals:
    """One journal for each GPU type, and who waits for their records."""

    folder: Path
    gpu_ids: Sequence[str]
    over: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def path(self, gpu_id: str) -> Path:
        """Where the journal of a GPU type is."""
        return self.folder / gpu_id / "trials.jsonl"

    def note(self, gpu_id: str) -> None:
        """A record was written."""
        with self._changed:
            self.counts[gpu_id] += 1
            self._changed.notify_all()

    def end(self) -> None:
        """No record will be written any more."""
        with self._changed:
            self.over = True
            self._changed.notify_all()

    def wait_for(self, gpu_id: str, at_least: int, *, timeout_s: float = 300.0) -> bool:
        """Wait for so many records; False where the searches end with less."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self.over or self.counts[gpu_id] >= at_least, timeout_s
            )
            assert done, f"{self.counts[gpu_id]} records of {gpu_id}, after {timeout_s:.0f} s more"
            return self.counts[gpu_id] >= at_least

    def wait_for_any(self, more: int, *, timeout_s: float = 300.0) -> bool:
        """Wait for so many records more, of any type; False where the searches end before."""
        with self._changed:
            wanted = self.counts.total() + more
            done = self._changed.wait_for(
                lambda: self.over or self.counts.total() >= wanted, timeout_s
            )
            assert done, f"records: {dict(self.counts)}, and no more in {timeout_s:.0f} s"
            return not self.over

    def go_on(self, gpu_id: str) -> None:
        """Let trials go on that were held."""
        gate_of(self.folder, gpu_id).touch()

    def check_valid(self) -> None:
        """Each journal can be read as it is now: whole lines, no trial twice."""
        for gpu_id in self.gpu_ids:
            check_journal(self.path(gpu_id))


def check_journal(path: Path) -> tuple[TrialRecord, ...]:
    """The records of a journal in which no line is torn and nothing stands twice."""
    found = read_journal(path)
    assert not found.notes, found.notes
    for name in ("trial_id", "configuration"):
        often = Counter(getattr(record, name) for record in found.records)
        assert not often or max(often.values()) == 1, f"{path}: {often.most_common(1)}"
    return found.records


def searched(
    journals: Journals, address: str, *, sleep_s: float, seed: int = 0, **changes: object
) -> tuple[SearchOutcome, ...]:
    """Search the whole space for each GPU type, from what the journals hold."""
    folder = journals.folder
    with contextlib.ExitStack() as stack:
        stack.callback(journals.end)
        writers = {
            gpu_id: stack.enter_context(JournalWriter(journals.path(gpu_id)))
            for gpu_id in journals.gpu_ids
        }

        def keep(record: TrialRecord) -> None:
            writers[record.gpu].append(record)
            journals.note(record.gpu)

        requests = [
            request_of(
                gpu_id, folder, sleep_s=sleep_s, seed=seed, address=address,
                resume=read_journal(journals.path(gpu_id)).records, **changes,
            )
            for gpu_id in journals.gpu_ids
        ]  # fmt: skip
        return search_all(requests, on_record=keep)


def check_end(journals: Journals, results: Sequence[SearchOutcome]) -> None:
    """Each search tried its whole space, each configuration once, and found the true front."""
    everything = {configuration.key for configuration in ChaosSpace().configurations()}
    for gpu_id, result in zip(journals.gpu_ids, results, strict=True):
        assert result.failure is None, result.failure
        assert result.stopped_by is StoppedBy.EXHAUSTED
        records = check_journal(journals.path(gpu_id))
        assert [r.trial_id for r in records] == [r.trial_id for r in result.records]
        assert {record.configuration.key for record in records} == everything
        assert {record.gpu for record in records} == {gpu_id}
        assert not [r.outcome.message for r in records if r.outcome.status is Status.CRASHED]
        assert front_of(records) == true_front(gpu_id)
        with JournalWriter(journals.path(gpu_id)):  # nobody holds its lock
            pass


def begun(journals: Journals, gpu_id: str) -> Counter[str]:
    """How often each configuration was begun, by its key."""
    notes = (journals.folder / "log").glob(f"{gpu_id}-*")
    return Counter(note.read_text() for note in notes)


def nodes_used(journals: Journals, gpu_id: str) -> set[str]:
    """The names of the nodes on which trials began."""
    notes = (journals.folder / "log").glob(f"{gpu_id}-*")
    return {note.name.removeprefix(f"{gpu_id}-").split("-")[0] for note in notes}


@contextlib.contextmanager
def meanwhile(events: Callable[[], None]) -> Iterator[None]:
    """`events` happen in a thread; what they raise is raised on leaving."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            events()
        except BaseException as error:  # noqa: BLE001 - raised again below
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(timeout=300)
    assert not thread.is_alive()
    if raised:
        raise raised[0]
