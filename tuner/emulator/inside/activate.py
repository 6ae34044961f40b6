"""Starts the emulator in a process that has just imported PyTorch."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

ACTIVE: dict[str, Any] = {}
"""The active parts of the emulator in this process: "reads", "unknowns", and "pricer" if
there is one."""


def activate() -> None:
    """Push the mode that computes values, price operators, and follow the program's steps."""
    import torch

    from tuner.emulator.inside.host_memory import anonymous_bytes

    before_bytes = anonymous_bytes()
    from tuner.emulator.inside.hollow import install as read_hollow_files
    from tuner.emulator.inside.made_up import draw_once
    from tuner.emulator.inside.mode import EmulatorMode, follow_python_kernels
    from tuner.emulator.inside.one_rank import launch_without_others, stand_for_all_ranks
    from tuner.emulator.inside.process import end_with_owner
    from tuner.emulator.inside.readbacks import HostReads
    from tuner.emulator.inside.triton_launches import price_operators

    end_with_owner()
    settings = json.loads(os.environ.get("TUNER_EMULATOR_SETTINGS") or "{}")
    if settings.get("plain"):
        return  # only the stand-in libraries, to measure the host's time per launch
    if settings.get("one_rank"):
        stand_for_all_ranks()
    if settings.get("machines", 1) > 1:
        launch_without_others()
    mode = EmulatorMode(settings.get("seed", 0))
    mode.install()
    ACTIVE["unknowns"] = mode.values.unknowns
    reads = ACTIVE["reads"] = HostReads(
        EmulatorMode.__torch_dispatch__.__code__, mode.values.unknowns
    )
    reads.install()
    mode.values.transfers.refuse = reads.refuse
    reads.told = mode.note_read
    follow_python_kernels(mode)
    read_hollow_files(mode.values)
    draw_once(torch.nn.init)
    if "rates" in settings:
        ACTIVE["pricer"] = price_operators(mode, settings["rates"])
    if "steps" in settings:
        from tuner.emulator.inside.follow import Follower

        follower = Follower(
            steps=settings["steps"],
            whole=settings.get("whole", False),
            pricer=ACTIVE.get("pricer"),
            mode=mode,
        )
        follower.install(before_bytes)
        reads.end = follower.end_unsupported

        def refuse(allocator: Any) -> None:
            reads.refuse(
                "an allocator of the program's own",
                sys._getframe(1),
                "takes the place of PyTorch's",
            )

        torch.cuda.memory.change_current_allocator = refuse
