"""Steps of an epoch, against transformers' Trainer and accelerate's loaders."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.space.lengths import steps_per_epoch

accelerate = pytest.importorskip("accelerate.data_loader")
Trainer = pytest.importorskip("transformers").Trainer


def loader(case: dict[str, Any], rank: int = 0) -> Any:
    """The loader of one rank, as `Trainer._get_dataloader` makes it."""
    from torch.utils.data import DataLoader

    made = DataLoader(
        list(range(case["rows"])), batch_size=case["micro_batch"], drop_last=case["drop_last"]
    )
    return accelerate.prepare_data_loader(
        made,
        num_processes=case["ranks"],
        process_index=rank,
        split_batches=case["split_batches"],
        put_on_device=False,
    )


def by_trainer(case: dict[str, Any]) -> int:
    """Steps of an epoch by `Trainer.set_initial_training_values`."""
    arguments = SimpleNamespace(
        max_steps=-1, num_train_epochs=3, gradient_accumulation_steps=case["accumulation"]
    )
    trainer = SimpleNamespace(
        get_total_train_batch_size=lambda args: 1,
        get_sp_size=lambda: 1,
        num_examples=lambda loader: case["rows"],
    )
    found = Trainer.set_initial_training_values(trainer, arguments, loader(case))
    return int(found[1])


def cases() -> list[dict[str, Any]]:
    """Every pair of ways, with sizes drawn around the edges of batches."""
    draw = random.Random(34)
    found = []
    for drop_last, split, ranks in itertools.product((False, True), (False, True), (1, 2, 3, 8)):
        for _ in range(6):
            micro_batch = ranks * draw.randint(1, 4) if split else draw.randint(1, 9)
            case = {
                "micro_batch": micro_batch,
                "ranks": ranks,
                "accumulation": draw.choice((1, 2, 3, 7)),
                "drop_last": drop_last,
                "split_batches": split,
            }
            edge = micro_batch * ranks * case["accumulation"] * draw.randint(1, 5)
            case["rows"] = max(micro_batch * ranks, edge + draw.choice((-1, 0, 1, 2)))
            found.append(case)
    return found


@pytest.mark.parametrize("case", cases())
def test_steps_are_those_of_the_trainer(case):
    per_epoch = steps_per_epoch(**case)
    assert per_epoch == by_trainer(case)
    # Every rank gets the batches that the length of its loader promises.
    batches = {len(list(loader(case, rank))) for rank in range(case["ranks"])}
    assert {-(-n // case["accumulation"]) for n in batches} == {per_epoch}


def test_nothing_is_left_of_less_than_a_batch():
    assert steps_per_epoch(7, 8, drop_last=True) == 0
    case = {"rows": 7, "micro_batch": 8, "ranks": 1, "accumulation": 1, "drop_last": True}
    with pytest.raises(ValueError, match="max_steps must be set"):
        by_trainer({**case, "split_batches": False})
