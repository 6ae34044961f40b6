"""The prediction that a training is compared with: given, or made from its own objects."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.core.environment import own_python
from tuner.core.errors import InputError, UnavailableError

Prediction = Any
"""A file that `tuner check --json` or `tuner estimate --json` wrote, its content, or the object
that `tuner.check` or `tuner.estimate` returns."""

_SIZES = ("device_bytes", "peak_reserved_bytes", "peak_allocated_bytes")


@dataclass(frozen=True, slots=True)
class Numbers:
    """The peaks of one GPU in bytes, and seconds per optimizer step; None is unknown."""

    step_s: float | None = None
    device_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Expected:
    """A prediction and its settings; `gpu` is None if it isn't said."""

    source: str
    numbers: Numbers
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    configuration: Mapping[str, Any] = field(default_factory=dict)
    own_words: Mapping[str, Any] = field(default_factory=dict)
    """The settings as the trainer has them: DPO's micro-batch is of pairs, not of sequences."""
    gpu: str | None = None


def expected_of(given: Prediction) -> Expected:
    """The prediction in a file, a mapping or an object. Raises `InputError` for anything else."""
    if isinstance(given, str | Path):
        try:
            given = json.loads(Path(given).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(
                f"file not found: {given}",
                hint="write it: tuner check --predict --json --gpu rtx4090 train.py > check.json",
            ) from None
        except (OSError, ValueError) as error:
            raise InputError(f"prediction {str(given)!r} can't be read: {error}") from None
    given = getattr(given, "found", given)  # of `tuner.check`
    own = dict(getattr(given, "settings", {}))
    if hasattr(given, "to_dict"):
        given = given.to_dict()
    data = given.get("program", given) if isinstance(given, Mapping) else None
    if data is not given and isinstance(data, Mapping):
        settings = given.get("settings") or {}
        own = {k: s["arrived"] for k, s in settings.items() if s.get("arrived") is not None}
    if not isinstance(data, Mapping):
        raise InputError(
            "prediction is nothing that tuner predicted",
            hint="give what `tuner check --json` prints, or the result of tuner.check",
        )
    try:
        read = _emulated if data.get("source") == "emulated" else _predicted
        found = read(data)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"prediction lacks {error}: expected `tuner check --json`") from None
    return replace(found, own_words={**found.configuration, **own})


def _predicted(data: Mapping[str, Any]) -> Expected:
    return Expected(
        "predicted",
        Numbers(data["step_s"], **{name: data["memory"][name] for name in _SIZES}),
        {name: tuple(ends) for name, ends in data.get("intervals", {}).items()},
        data.get("configuration", {}),
        gpu=data.get("gpu"),
    )


def _emulated(data: Mapping[str, Any]) -> Expected:
    most = max(data["devices"], key=lambda one: one["device_bytes"])
    step_s = (data.get("time") or {}).get("step_s")
    return Expected(
        "emulated",
        Numbers(step_s, **{name: most[name] for name in _SIZES}),
        configuration=data.get("settings") or {},
        gpu=data.get("gpu"),
    )


class Asked:
    """A process that predicts `knobs` of a model's `config` meanwhile, by `tuner estimate`.

    It has the lowest priority, and nothing of it comes into the training's own process.
    """

    def __init__(self, config: Mapping[str, Any], gpu: str, knobs: Mapping[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="tuner-", ignore_cleanup_errors=True)
        folder = Path(self._folder.name)
        (folder / "config.json").write_text(json.dumps(config, default=str))
        settings = [f"--set={name}={_word(value)}" for name, value in knobs.items()]
        command = own_python("tuner", "estimate", "--model", str(folder), "--gpu", gpu)
        with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
            self._process = subprocess.Popen(  # noqa: S603 - tuner itself
                [*command, "--json", *settings],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                # The launcher's variables would make it a rank.
                env={k: v for k, v in os.environ.items() if k not in _OF_RANKS}
                | {"HF_HUB_OFFLINE": "1"},
            )
        _yield_to_others(self._process.pid)

    def ready(self, wait_s: float = 0.0) -> bool:
        """True if the prediction has ended, after at most `wait_s` seconds."""
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def result(self) -> Expected:
        """The prediction. Raises `UnavailableError` with what the command said."""
        folder = Path(self._folder.name)
        text = (folder / "out").read_text(encoding="utf-8")
        said = (folder / "err").read_text(encoding="utf-8").strip()
        self.close()
        if self._process.returncode:
            raise UnavailableError(" ".join(said.split())[-500:] or "it said nothing")
        return expected_of(json.loads(text))

    def close(self) -> None:
        """End the process, and remove its files."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


_OF_RANKS = frozenset(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))


def _yield_to_others(pid: int) -> None:
    import psutil

    try:
        psutil.Process(pid).nice(19)
    except (psutil.Error, OSError):
        return  # it has ended, or priorities are not for this user to set


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
