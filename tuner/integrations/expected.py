"""The prediction that a training is compared with: given, or made from its own objects."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.core.environment import own_python, trial_environment
from tuner.core.errors import InputError, UnavailableError
from tuner.core.supervised import ProgramEnd, ProgramTask, Supervised

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

    It has the lowest priority and one thread, nothing of it comes into the training's own process,
    and it ends with that process.
    """

    def __init__(self, config: Mapping[str, Any], gpu: str, knobs: Mapping[str, Any]) -> None:
        settings = [f"--set={name}={_word(value)}" for name, value in knobs.items()]
        asked = json.dumps(config, default=str), gpu, *settings
        kept = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - `close` does
        self._err = tempfile.TemporaryFile()  # noqa: SIM115
        self._program = Supervised(
            ProgramTask(
                command=tuple(own_python("tuner.integrations.expected", *asked)),
                environment={**kept, **trial_environment(1), "HF_HUB_OFFLINE": "1"},
                mark=f"TUNER_ASKED={uuid.uuid4().hex}",
            ),
            self._out,
            self._err,
        )

    def ready(self, wait_s: float = 0.0) -> bool:
        """True if the prediction has ended, after at most `wait_s` seconds."""
        return self._program.has_ended(wait_s)

    def result(self) -> Expected:
        """The prediction. Raises `UnavailableError` with what the command said."""
        end = self._program.end()
        for file in (self._out, self._err):
            file.seek(0)
        if not isinstance(end, ProgramEnd) or end.exit_status:
            said = self._err.read().decode(errors="replace")
            raise UnavailableError(" ".join(said.split())[-500:] or "it said nothing")
        return expected_of(json.load(self._out))

    def close(self) -> None:
        """Have the process end; it isn't waited for."""
        self._program.abandon()
        self._out.close()
        self._err.close()


def _predict() -> int:
    """Print the prediction of the model whose configuration is the first argument.

    Returns its exit code.
    """
    from tuner.app.cli.main import run

    os.nice(19)
    with contextlib.suppress(OSError):  # between sessions, Linux may compare only these
        Path("/proc/self/autogroup").write_text("19")
    config, gpu, *words = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config)
        return run(["estimate", "--model", folder, "--gpu", gpu, "--json", *words])


_OF_RANKS = frozenset(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
"""Variables of the launcher, which would make a rank of it."""


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


if __name__ == "__main__":
    sys.exit(_predict())
