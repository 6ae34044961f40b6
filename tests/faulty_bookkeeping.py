"""A program in which each part of tuner's bookkeeping raises in turn; it prints what each did.

Run under the emulator. The program's own steps, values and errors must be as ever.
"""

from typing import Any

import torch

from tuner.emulator.inside import faults, follow, memory
from tuner.emulator.inside.arrived import Arrived
from tuner.emulator.inside.made_up import MadeUp
from tuner.emulator.inside.memory import MemoryWatch
from tuner.emulator.inside.mode import EmulatorMode
from tuner.emulator.inside.owners import Owners
from tuner.emulator.inside.pricing import Pricer
from tuner.emulator.inside.readbacks import Readbacks, Reading
from tuner.emulator.inside.settling import Settling
from tuner.emulator.inside.transfers import Transfers
from tuner.emulator.inside.values import Values, _WithValues

ENTRIES: list[tuple[Any, str]] = [
    (Settling, "_is_uniform"),
    (Settling, "_computed"),
    (Settling, "_put"),
    (Settling, "_leave"),
    (Settling, "_note_written"),
    (Reading, "tensor"),
    (Transfers, "_to_device"),
    (Transfers, "_to_host"),
    (Transfers, "_item"),
    (Readbacks, "counted"),
    (MadeUp, "write_finite"),
    (Values, "_handler"),
    (Pricer, "begin"),
    (Pricer, "_count"),
    (MemoryWatch, "mark"),
    (MemoryWatch, "note_backward"),
    (MemoryWatch, "look"),
    (memory, "addresses"),
    (Owners, "memory"),
    (Owners, "note_update"),
    (MemoryWatch, "_keep_peaks"),
    (Arrived, "_note_input"),
    (follow.Follower, "_enter"),
    (follow, "program_line"),
    (follow, "send"),
]

model = torch.nn.Sequential(torch.nn.Embedding(100, 64), torch.nn.Linear(64, 100)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
(mode,) = (mode for mode in modes if isinstance(mode, EmulatorMode))


def step(*, counts: bool = True) -> None:
    """One training step with something of all that the emulator looks at.

    An operator that reads a count which nobody found (without `counts`) would end the program.
    """
    tokens = torch.tensor([[1, 2, 3], [4, 5, 0]]).to("cuda")
    host = torch.ones(3)
    assert host.add_(1).tolist() == [2.0, 2.0, 2.0]  # once, whatever went wrong
    chosen = tokens[tokens > 0] if counts else None
    loss = model(tokens).square().mean() + torch.rand(200, 600, device="cuda").sum()
    (torch.rand(300, 300, device="cuda") > 2).any()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.zeros(5, device="cuda").add_(1)
    assert isinstance(loss.item(), float)
    loss.detach().cpu()
    torch.cuda.reset_peak_memory_stats()
    message = "none"
    # A product whose shapes do not match is the program's own mistake.
    try:
        torch.ones(2, 3, device="cuda") @ torch.ones(2, 3, device="cuda")
    except RuntimeError as error:
        message = str(error)
    assert "cannot be multiplied" in message, message
    del chosen


def broken(*args: Any, **kwargs: Any) -> Any:
    raise LookupError("a fault of ours")


def take() -> str:
    """What was noted since the last time."""
    noted = faults.NOTED.pop() if faults.NOTED else None
    return f"{noted['message']}, reading {noted['reading']}" if noted else "nothing"


step()
assert take() == "nothing", take()
for owner, name in ENTRIES:
    whole = getattr(owner, name)
    is_guarded = hasattr(whole, "__wrapped__")
    setattr(owner, name, faults.guarded("an entry")(broken) if is_guarded else broken)
    if name == "_handler":
        mode._known.clear()
    step(counts=name != "_handler")
    setattr(owner, name, whole)
    print(getattr(owner, "__name__", owner), name, take(), sep="; ")


class Graph:
    """A compiled graph whose values cannot be worked out."""

    values = kept_inputs = write = broken


assert _WithValues(lambda inputs: [len(inputs)], Graph())([1, 2]) == [2]
print("_CompiledGraph", "values", take(), sep="; ")
Settling._put = broken
step()
print("all steps done", flush=True)
