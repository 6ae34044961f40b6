"""Starts the emulator in a process that has just imported PyTorch."""

from __future__ import annotations

import json
import os


def activate() -> None:
    """Push the mode that computes values, and follow the program's steps."""
    from tuner.emulator.inside.guard import end_with_owner
    from tuner.emulator.inside.hollow import install as read_hollow_files
    from tuner.emulator.inside.mode import EmulatorMode

    end_with_owner()
    settings = json.loads(os.environ.get("TUNER_EMULATOR_SETTINGS") or "{}")
    mode = EmulatorMode(settings.get("seed", 0))
    mode.install()
    read_hollow_files(mode.values)
    if "steps" in settings:
        from tuner.emulator.inside.follow import Follower

        Follower(
            steps=settings["steps"], snapshot=settings.get("snapshot"), values=mode.values
        ).install()
