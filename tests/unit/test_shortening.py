"""The batches that a shortened loader serves, and checkpoints that take no disk."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from started import run_python
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tuner.emulator.inside import row_sizes as reading
from tuner.emulator.inside import shortening as shortening_module
from tuner.emulator.inside.memory import MemoryWatch
from tuner.emulator.inside.row_sizes import row_sizes
from tuner.emulator.inside.shortening import Budget, Shortening

LENGTHS = [10] * 40
LENGTHS[25], LENGTHS[33] = 500, 90


def shortening(
    told: list[dict[str, Any]],
    *,
    evaluates: bool = False,
    accumulation: int = 1,
    launches: int = 1_000_000,
) -> Shortening:
    """Loaders that are shortened, because the budget is used up by default."""
    budget = Budget()
    budget.launch_count = lambda: launches
    return Shortening(
        3,
        budget,
        report=told.append,
        stop=lambda: None,
        before_training=lambda: None,
        after_training=lambda: None,
        accumulation=lambda: accumulation,
        evaluates=lambda: evaluates,
        waits=lambda: False,
        memory=MemoryWatch(3),
    )


def rows() -> datasets.Dataset:
    return datasets.Dataset.from_list([{"input_ids": [1] * n, "text": "a"} for n in LENGTHS])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_serves_the_first_steps_the_largest_batch_and_the_last(accumulation: int) -> None:
    told: list[dict[str, Any]] = []
    short = shortening(told)
    loader = DataLoader(rows(), batch_size=2)
    served = []
    for batch in short.chosen(loader.batch_sampler, loader):
        served.append(batch)
        short.note_backward()
        if len(served) % accumulation == 0:
            short.note_step()
    first = [[2 * n, 2 * n + 1] for n in range(3 * accumulation)]
    # Results of the one before the largest are still there, and no gradients: a step begins.
    then = [11, 12, 18, 19] if accumulation == 1 else [10, 11, 12, 17, 18, 19]
    assert served == [*first, *([2 * n, 2 * n + 1] for n in then)]
    (data,) = told
    assert (data["row"], data["size"], data["unit"], data["rows"]) == (25, 500, "tokens", 2)
    assert (data["batch"], data["batches"], data["of"]) == (13, 20, 40)
    assert (data["step"], data["accumulation"]) == (13 if accumulation == 1 else 7, accumulation)
    assert data["longer"][128] == 1 / 40


@given(
    st.lists(st.integers(0, 199), min_size=1, max_size=4, unique=True),
    st.integers(0, 100),
    st.integers(1, 9),
    st.booleans(),
)
def test_a_batch_is_the_first_of_its_step_where_it_is_in_the_epoch(
    numbers: list[int], served: int, accumulation: int, is_trainer: bool
) -> None:
    short = shortening([], accumulation=accumulation if is_trainer else 1)
    places = list(short._at_their_places(sorted({*numbers, 199}), served, accumulation, 200))
    for number in {*numbers, 199}:
        if number >= served:
            place = places.index(number) + served
            assert (place % accumulation == 0) is (number % accumulation == 0)
    assert places[-1] == 199
    left = 0 if is_trainer and accumulation > 1 else 200 % accumulation
    assert (served + len(places)) % accumulation == left


@pytest.mark.parametrize("is_followed", [True, False])
def test_a_loader_that_is_asked_without_an_end_stops_the_program_unless_its_loop_ends(
    is_followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, stopped = shortening([]), []
    short._stop = lambda: stopped.append(1)
    loops = SimpleNamespace(enclose=lambda frame: is_followed)
    monkeypatch.setattr(shortening_module, "loops", lambda: loops)
    loader = DataLoader(rows(), batch_size=2)
    for _ in range(1100):
        for _ in short.chosen(loader.batch_sampler, loader):
            short.note_backward()
            short.note_step()
    assert bool(stopped) is not is_followed


def test_an_evaluation_serves_two_batches_the_largest_and_the_last() -> None:
    loader = DataLoader(rows(), batch_size=4)
    served = list(shortening([], evaluates=True).chosen(loader.batch_sampler, loader))
    assert served[:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [24, 25, 26, 27] in served
    assert served[-1] == [36, 37, 38, 39]
    assert len(served) == 6


@pytest.mark.parametrize("trained", [True, False])
def test_lightning_validates_and_stops_where_a_shortened_loader_ends(trained: bool) -> None:
    """Lightning counts batches up to the length of the loader, which a shortened one never has."""

    class Loop:
        min_steps = 1000
        trainer = SimpleNamespace(
            check_val_every_n_epoch=5, fit_loop=SimpleNamespace(min_epochs=3), should_stop=False
        )
        validated = False

        def advance(self, fetcher: Any) -> None:
            next(fetcher)

        def on_advance_end(self, fetcher: Any) -> None:
            self.validated = (
                self.trainer.should_stop and self.trainer.check_val_every_n_epoch is None
            )

    short = shortening([])
    short._end_lightning_epochs(SimpleNamespace(_TrainingEpochLoop=Loop))
    for _ in range(3 if trained else 1):
        short.note_step()
    loop, fetcher = Loop(), iter([1])
    loop.advance(fetcher)
    assert not loop.trainer.should_stop
    with pytest.raises(StopIteration):
        loop.advance(fetcher)
    assert loop.validated is trained


def test_a_round_that_the_budget_affords_is_served_whole() -> None:
    loader = DataLoader(rows(), batch_size=2)
    short = shortening([], launches=0)
    served = []
    for batch in short.chosen(loader.batch_sampler, loader):
        served.append(batch)
        short.note_backward()
        short.note_step()
    assert served == [[2 * n, 2 * n + 1] for n in range(20)]
    assert not short.has_cut


def test_the_largest_batch_is_found_by_each_field_of_a_row() -> None:
    class Pictures(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            pixels = torch.zeros(1, 8).expand(10 if index != 25 else 5_000, 8)
            return {"input_ids": torch.zeros(20 if index != 33 else 90), "pixel_values": pixels}

    loader = DataLoader(Pictures(), batch_size=2)
    served = list(shortening([], evaluates=True).chosen(loader.batch_sampler, loader))
    assert [24, 25] in served
    assert [32, 33] in served


@pytest.mark.parametrize("of_table", [True, False])
def test_numbers_of_a_row_may_be_lengths(of_table: bool) -> None:
    """A batch is found by how often a row is repeated, and by the durations of its sounds."""
    rows: Any = [{"ids": [1] * 9, "times": 2, "durations": torch.tensor([1, 2])} for _ in range(40)]
    rows[25]["times"], rows[33]["durations"] = 900, torch.tensor([1, 700])
    if of_table:
        rows = datasets.Dataset.from_list(
            [{"ids": one["ids"], "times": one["times"]} for one in rows]
        )
    loader = DataLoader(rows, batch_size=2)
    served = list(shortening([], evaluates=True).chosen(loader.batch_sampler, loader))
    assert [24, 25] in served
    assert ([32, 33] in served) is not of_table


def test_a_loader_goes_on_until_one_beside_it_has_served_its_largest_batch() -> None:
    short = shortening([])
    first, second = (DataLoader(data, batch_size=2) for data in (range(400), rows()))  # type: ignore[arg-type]
    beside, served = None, []
    for number, _ in enumerate(short.chosen(first.batch_sampler, first)):
        short.note_backward()
        short.note_step()
        if number % 10 == 0:
            beside = beside or short.chosen(second.batch_sampler, second)
            served.append(next(beside))
    assert [24, 25] in served
    assert number < 100


@pytest.mark.parametrize("named", [True, False])
def test_rows_that_are_ids_are_made_into_batches_to_see_the_largest(named: bool) -> None:
    def together(rows: list[Any]) -> Any:
        ids = [int(one["image"][:-4]) if named else one for one in rows]
        return torch.zeros(sum(100 if one != 25 else 9_000 for one in ids))

    told: list[dict[str, Any]] = []
    data = [{"input_ids": [1] * 9, "image": f"{one}.png"} if named else one for one in range(40)]
    loader: Any = DataLoader(data, batch_size=2, collate_fn=together)  # type: ignore[arg-type]
    served = list(shortening(told, evaluates=True).chosen(loader.batch_sampler, loader))
    assert [24, 25] in served
    assert (told[0]["size"], told[0]["batch"], told[0]["row"]) == (9_100, 13, None)


def test_of_a_stream_nothing_is_known_beyond_what_was_read() -> None:
    class Stream(IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return iter(range(1000))

    told: list[dict[str, Any]] = []
    loader = DataLoader(Stream(), batch_size=2)
    short = shortening(told, evaluates=True)
    assert len(list(short.chosen(loader._index_sampler, loader))) == 2
    assert told == [{"event": "data", "trains": False, "read": 2, "of": None}]


def test_lengths_of_a_table_are_those_of_the_rows_as_they_are_ordered() -> None:
    chosen = rows().select([33, 0, 25])
    found = row_sizes(chosen)
    assert (found.by_row, found.unit) == ({0: 90, 1: 10, 2: 500}, "tokens")
    assert row_sizes(rows().remove_columns("input_ids")).unit == "characters"


def test_other_rows_are_read_up_to_a_number_and_random_numbers_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Drawn:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> Any:
            return {"pixels": torch.rand(3, 8, 8), "label": int(random.random())}

    torch.manual_seed(0)
    random.seed(0)
    expected = (torch.rand(1).item(), random.random())
    torch.manual_seed(0)
    random.seed(0)
    monkeypatch.setattr(reading, "MOST_ROWS", 7)
    found = row_sizes(Drawn())
    assert (len(found.by_row), found.rows, found.by_row[0]) == (7, 100, 3 * 8 * 8 + 1)
    assert (torch.rand(1).item(), random.random()) == expected
    monkeypatch.undo()
    assert row_sizes(TensorDataset(torch.zeros(5, 7))).by_row == dict.fromkeys(range(5), 7)


SAVED = """\
import torch
from pathlib import Path
from tuner.emulator.inside.hollow import save_sparsely
save_sparsely()
torch.save({"a": torch.zeros(1000, 1000)}, "model.pt")
print(torch.load("model.pt")["a"].shape)
file = Path("model.pt").stat()
print(file.st_size > 4e6, file.st_blocks * 512 < 1e6)
"""


def test_a_saved_checkpoint_has_its_size_and_takes_no_disk(tmp_path: Path) -> None:
    ran = run_python("-c", SAVED, cwd=tmp_path)
    assert ran.stdout.splitlines() == ["torch.Size([1000, 1000])", "True True"], ran.stderr
