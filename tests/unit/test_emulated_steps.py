"""What ends a step of a training: an optimizer, a write to parameters, or a backward pass."""

from __future__ import annotations

import _thread
import importlib
import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tuner.emulator.inside import follow as follow_module
from tuner.emulator.inside import memory, owners
from tuner.emulator.inside.ends_of_steps import (
    BACKWARD,
    OPTIMIZER,
    PATIENCE,
    REPLACED,
    UPDATES,
    Steps,
)


class Mode(TorchDispatchMode):
    """Passes operators on, as the emulator's mode does."""

    updates: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.updates is not None:
            self.updates.ran(func, args, kwargs or {})
        return out


def addresses(tensor: Any) -> Iterator[int]:
    tensor = owners.unwrapped(tensor)
    if isinstance(tensor, torch.Tensor):
        yield tensor.untyped_storage().data_ptr()


@pytest.fixture
def follow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[int], str, int]]:
    """Runs a training; returns the passes at which its steps ended, their sign, and the rest."""
    monkeypatch.setattr(
        "tuner.emulator.inside.ends_of_steps.addresses", addresses
    )  # on the CPU, too

    def run(train: Callable[[], None]) -> tuple[list[int], str, int]:
        mode, ended, passes = Mode(), [], [0]
        steps = Steps(
            mode,
            owners.Trainers(),
            made=lambda frame: None,
            updating=lambda: None,
            over=lambda: ended.append(passes[0]),
        )
        engine: Any = torch.autograd.graph._engine_run_backward

        def followed(*args: Any, **kwargs: Any) -> Any:
            steps.begin_backward(args)
            passes[0] += 1
            found = engine(*args, **kwargs)
            steps.end_backward(found)
            return found

        for module in (torch.autograd.graph, torch.autograd):
            monkeypatch.setattr(module, "_engine_run_backward", followed)
        optimizer = importlib.import_module("torch.optim.optimizer")
        begin = optimizer.register_optimizer_step_pre_hook(lambda one, *_: steps.begin_update(one))
        end = optimizer.register_optimizer_step_post_hook(
            lambda one, *_: steps.end_update(one, in_backward=False)
        )
        with mode:
            train()
        begin.remove()
        end.remove()
        rest = steps.uncounted()
        return ended, steps.counted_by, rest

    return run


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


def backward(of: Any) -> None:
    of(torch.randn(2, 4)).square().mean().backward()


def by_hand(net: torch.nn.Module) -> None:
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.99)  # reads no gradient
            p.data.add_(p.grad, alpha=-0.1)
    net.zero_grad()


def test_writes_to_all_parameters_after_their_gradients_were_read_end_a_step(follow) -> None:
    net = model()

    def train() -> None:
        for _ in range(3):
            backward(net)
            backward(net)
            by_hand(net)

    assert follow(train) == ([2, 4, 6], UPDATES, 0)


def test_of_several_threads_without_an_optimizer_backward_passes_count(follow) -> None:
    trained, may_end = threading.Event(), threading.Event()
    net = model()

    def train_and_stay() -> None:
        backward(model())
        trained.set()
        may_end.wait()

    def train() -> None:
        other = threading.Thread(target=train_and_stay)
        other.start()
        trained.wait()
        for _ in range(3):
            backward(net)
            by_hand(net)
        may_end.set()
        other.join()

    assert follow(train) == ([], BACKWARD, 4)


def test_updates_in_the_backward_pass_end_it(follow) -> None:
    net = model()

    def update(p: torch.Tensor) -> None:
        with torch.no_grad():
            p.sub_(p.grad)
        p.grad = None

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(update)
    assert follow(lambda: [backward(net) for _ in range(3)]) == ([1, 2, 3], UPDATES, 0)


def test_the_backward_pass_that_a_compiler_traces_is_none_of_the_training(follow) -> None:
    net = model()

    def train() -> None:
        with FakeTensorMode():
            backward(model())
        for _ in range(3):
            backward(net)
            by_hand(net)

    assert follow(train) == ([2, 3, 4], UPDATES, 0)  # the first pass is the traced one


def test_an_optimizer_decides_alone_once_it_is_seen(follow) -> None:
    net = model()
    average = torch.nn.Linear(4, 4)

    def train() -> None:
        optimizer = torch.optim.SGD(net.parameters())
        for _ in range(2):
            for _ in range(3):
                backward(net)
                with torch.no_grad():  # no update: no gradient was read
                    net[0].weight.clamp_(-1, 1)
                    average.weight.lerp_(net[0].weight, 0.1)
            optimizer.step()

    assert follow(train) == ([3, 6], OPTIMIZER, 0)


def test_memory_of_an_input_that_required_gradients_is_no_parameter(follow) -> None:
    """Inputs do so for adapters with checkpointing; other tensors take their memory later."""
    net = model()
    memory = np.zeros((2, 4), dtype=np.float32)

    def train() -> None:
        optimizer = torch.optim.SGD(net.parameters())
        for _ in range(3):
            for _ in range(2):
                given = torch.from_numpy(memory).requires_grad_()
                net(given).square().mean().backward()
                del given
                net[0].weight.grad.norm()
                torch.from_numpy(memory).add_(1)
            optimizer.step()

    assert follow(train) == ([2, 4, 6], OPTIMIZER, 0)


def test_replaced_parameters_count_at_the_end(follow) -> None:
    def train() -> None:
        params = {"w": torch.randn(4, 4)}
        for _ in range(4):
            x = torch.randn(2, 4)
            found = torch.func.grad(lambda p, x=x: (x @ p["w"]).square().mean())(params)
            params = {name: one - 0.1 * found[name] for name, one in params.items()}

    assert follow(train) == ([], REPLACED, 4)


def test_without_any_update_backward_passes_count_late(follow) -> None:
    net = model()
    assert follow(lambda: [backward(net) for _ in range(5)]) == ([], BACKWARD, 5)
    ended, by, _ = follow(lambda: [backward(net) for _ in range(PATIENCE + 2)])
    assert (ended, by) == ([PATIENCE, PATIENCE + 1], BACKWARD)


def test_a_process_that_trains_nothing_counts_by_nothing(follow) -> None:
    assert follow(lambda: model()(torch.randn(2, 4))) == ([], OPTIMIZER, 0)


def test_a_refusal_in_a_thread_without_a_caller_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of PyTorch's threads runs the backward pass; an error there would hide the refusal."""
    told: queue.Queue[dict[str, Any]] = queue.Queue()
    monkeypatch.setattr(follow_module, "send", told.put)
    core = SimpleNamespace(emu_give_up_attempt=lambda: None)
    monkeypatch.setattr(memory, "device_core", lambda: core)
    follower = follow_module.Follower(steps=3)
    follower._phase = follow_module.END
    _thread.start_new_thread(follower._tell_out_of_memory, (0, 8, 0, 0))
    found = told.get(timeout=60)
    assert (found["event"], found["requested_bytes"], found["line"]) == ("out_of_memory", 8, None)
