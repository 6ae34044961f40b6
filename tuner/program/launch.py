"""How a program is started: on how many GPUs, and what its launcher says of the training.

Read from torch.distributed.run (PyTorch 2.13); other launchers are in `tuner.program.trainers`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.core.errors import Problem
from tuner.core.setup.distributed_knobs import (
    DISTRIBUTED,
    GPUS_PER_TRIAL,
    MACHINES,
    REDUCE_BUCKET,
    RESHARD,
)
from tuner.program.arguments import options_of
from tuner.program.program import Program
from tuner.program.trainer import Launch, trainer_named
from tuner.program.trainers import accelerate, deepspeed

_ALL = ("gpu", "auto")
"""In place of a number of processes: one for each GPU."""


def read_launch(program: Program) -> Launch:
    """How `program` is started; what cannot be read is among the problems."""
    words = [Path(word).name for word in program.command]
    end = words.index(Path(program.main).name) if Path(program.main).name in words else len(words)
    for start, word in enumerate(words[:end]):
        module = words[start + 1] if word == "-m" and start + 1 < end else ""
        if word == "torchrun" or module in ("torch.distributed.run", "torch.distributed.launch"):
            return _torchrun(program.command[start + 1 : end])
        is_accelerate = words[start : start + 2] == ["accelerate", "launch"]
        if is_accelerate or module == "accelerate.commands.launch":
            return accelerate.launch(program, options_of(program.command[start + 2 : end]))
        if word == "deepspeed":
            return deepspeed.launch(program.command[start + 1 : end])
    tool = trainer_named(program.trainer)
    return tool.launch(program) if tool and tool.launch else Launch(starts_ranks=False)


def _torchrun(words: Sequence[str]) -> Launch:
    options = options_of(words)
    launch = Launch()
    per_machine = str(options.get("nproc_per_node", 1))
    if per_machine in _ALL:
        launch.processes = None
    else:
        launch.processes = launch.whole("torchrun --nproc-per-node", per_machine)
    launch.set_machines("torchrun --nnodes", str(options.get("nnodes", 1)).rpartition(":")[2])
    return launch


def ranks_and_knobs(launch: Launch, own: Mapping[str, Any], gpus: int | None) -> dict[str, Any]:
    """Knobs of the ranks: those of the launcher, and of the program's `own` where it says more.

    Empty on one GPU. FSDP or ZeRO in one process shares nothing, and is a problem.
    """
    ranks = launch.on(gpus)
    said = {name: own[name] for name in (DISTRIBUTED, RESHARD, REDUCE_BUCKET) if name in own}
    knobs = {**launch.knobs, **said}
    both = own.get("gradient_checkpointing") and knobs.get("gradient_checkpointing")
    if both:
        text = "and the trainer's own checkpointing are both true, which the trainer refuses"
        launch.problems.append(Problem(text, "accelerate's fsdp activation_checkpointing"))
    if ranks > 1:
        several = {MACHINES: launch.machines} if launch.machines > 1 else {}
        strategy = knobs.get(DISTRIBUTED, "ddp")
        return {**knobs, **several, GPUS_PER_TRIAL: ranks, DISTRIBUTED: strategy}
    if DISTRIBUTED in knobs:
        text = "is of one process: start it with torchrun or accelerate launch"
        launch.problems.append(Problem(text, str(knobs[DISTRIBUTED])))
    return {}
