"""What blocks of memory are taken for, and which parameters are trained: without a device."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch

from tuner.emulator.inside.arrived import Arrived
from tuner.emulator.inside.owners import (
    FROZEN,
    GRADIENT,
    LOGITS,
    STATE,
    TRAINED,
    Owners,
    Parts,
    Sightings,
)

PHASES = ((0, "load"), (100, "forward"), (200, "backward"), (300, "optimizer"), (400, "forward"))


def phase_of(time_us: int) -> str:
    return next(name for start, name in reversed(PHASES) if start <= time_us)


def ends(time_us: int) -> int:
    return next((start for start, _ in PHASES if start > time_us), sys.maxsize)


def block(born_us: int, died_us: int = sys.maxsize, address: int = 1, **fields: Any) -> Any:
    return {"addr": address, "time_us": born_us, "died_us": died_us, "size": 512, "frames": []} | (
        fields
    )


def named(one: Any, peak_us: int, *seen: tuple[int, str], adapters: bool = False) -> str:
    sightings = Sightings()
    for time_us, kind in seen:
        sightings.add(time_us, one["addr"], kind)
    parts = Parts(sightings, phase_of, ends, trains_adapters=adapters)
    parts.learn([one])
    return parts.of(one, peak_us)


@pytest.mark.parametrize(
    ("born_us", "seen", "name"),
    [
        (150, (160, STATE), "optimizer_state"),  # in a closure, in the forward phase
        (310, (350, STATE), "optimizer_state"),
        (150, (160, FROZEN), "weights"),  # a model that is made after another one ran
        (250, (300, GRADIENT), "gradients"),
        (250, (260, LOGITS), "logits_and_loss"),
        (150, (140, STATE), "activations"),  # of another block, which had this address before
    ],
)
def test_a_block_is_what_was_seen_at_its_address_in_its_life(
    born_us: int, seen: tuple[int, str], name: str
) -> None:
    assert named(block(born_us, 500), 320, seen) == name


@pytest.mark.parametrize(("adapters", "name"), [(True, "adapters"), (False, "weights")])
def test_what_is_trained_is_adapters_beside_a_frozen_model_only(adapters: bool, name: str) -> None:
    assert named(block(50), 250, (100, TRAINED), adapters=adapters) == name


@pytest.mark.parametrize(
    ("born_us", "died_us", "peak_us", "name"),
    [
        (50, 500, 250, "activations"),  # the first batch
        (50, 60, 55, "temporary"),  # what loading needs for a moment
        (50, sys.maxsize, 250, "other"),  # nobody's, and it stays
        (150, 260, 250, "activations"),
        (150, 160, 155, "temporary"),
        (250, 260, 255, "temporary"),
    ],
)
def test_what_nobody_owns_is_told_by_its_phase(
    born_us: int, died_us: int, peak_us: int, name: str
) -> None:
    assert named(block(born_us, died_us), peak_us) == name


def test_buckets_and_whole_parameters_are_known_by_who_allocates_them() -> None:
    torchs = "/v/site-packages/torch/"
    frames = [{"filename": f"{torchs}nn/parallel/distributed.py", "name": "_ddp_init_helper"}]
    assert named(block(50, frames=frames), 250) == "gradient_buckets"
    file = f"{torchs}distributed/fsdp/_fully_shard/_fsdp_collectives.py"
    for function, name in (("foreach_reduce", "gradients"), ("foreach_all_gather", "weights")):
        assert named(block(250, frames=[{"filename": file, "name": function}]), 260) == name
    frames = [{"filename": file.replace("collectives", "param"), "name": _CAST}]
    assert named(block(250, frames=frames), 260) == "unsharded_gradients"


_CAST = "to_accumulated_grad_if_needed"


@pytest.fixture
def owners() -> Owners:
    """Those of modules that are given to it; nothing of PyTorch is patched."""
    return Owners()


def followed(owners: Owners, model: Any) -> Any:
    for module in model.modules():
        owners._follow(module)
    return model


def test_frozen_parameters_that_the_optimizer_is_handed_are_not_trained(owners: Owners) -> None:
    model = followed(owners, torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    owners.note_update(optimizer)
    assert owners.trainable_params == 8 * 2 + 2
    model.requires_grad_(True)  # a later stage of the training
    owners.note_update(optimizer)
    assert owners.trainable_params == 8 * 2 + 2 + 8 * 8 + 8


def test_tied_parameters_and_those_of_two_optimizers_count_once(owners: Owners) -> None:
    first, second = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    second.weight = first.weight
    optimizers = [torch.optim.SGD([layer.weight]) for layer in (first, second)]
    for optimizer in optimizers:
        owners.note_update(optimizer)
    assert owners.trainable_params == 64


def test_of_an_optimizer_with_copies_the_model_says_what_is_trained(owners: Owners) -> None:
    model = followed(owners, torch.nn.Linear(8, 8))
    model.bias.requires_grad_(False)
    shard = torch.nn.Parameter(model.weight.detach().flatten()[:32].clone())
    owners.note_update(torch.optim.AdamW([shard]))
    assert owners.trainable_params == 64


def test_what_was_freed_is_not_kept_alive(owners: Owners) -> None:
    model = followed(owners, torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters())
    owners.note_update(optimizer)
    del model, optimizer
    assert list(owners.modules()) == []
    assert len(owners._optimizers) == 0


def test_gradients_of_a_thread_that_trains_are_read_by_no_other(
    owners: Owners, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tuner.emulator.inside.owners.addresses", lambda one: () if one is None else (id(one),)
    )
    models = [followed(owners, torch.nn.Linear(4, 4, bias=False)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    trained, may_end = threading.Event(), threading.Event()

    def train(number: int) -> None:
        owners.trainers.note()
        models[number](torch.randn(2, 4)).sum().backward()
        owners.note_update(optimizers[number])

    def train_and_stay() -> None:
        train(0)
        trained.set()
        may_end.wait()

    def gradients() -> set[int]:
        return {address for address, kind in owners.memory() if kind == GRADIENT}

    first, second = threading.Thread(target=train_and_stay), models[1].weight
    first.start()
    trained.wait()
    train(1)
    assert gradients() == {id(second.grad)}
    may_end.set()
    first.join()
    assert gradients() == {id(models[0].weight.grad), id(second.grad)}


def test_a_layer_that_takes_all_samples_of_a_micro_batch_together_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    for trains in (False, True):
        arrived = Arrived()
        arrived.note_model(model.train(trains))
        assert arrived.compares == ("BatchNorm1d" if trains else "")
