"""Calls a function in a process on emulated GPUs; its value or its exception comes back.

Both processes are the same program of the same user, so both messages are pickles, in files that
only this user can read. `python -m tuner.emulator.calls FOLDER` is the emulated process.
"""

from __future__ import annotations

import importlib.util
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tuner.core.environment import search_path, your_python
from tuner.core.errors import InputError, UnavailableError
from tuner.emulator.emulation import EmulatedDeviceUse, Emulation
from tuner.emulator.ending import Ended

Value = TypeVar("Value")
Run = Callable[[Sequence[str], dict[str, str]], Emulation]
"""Runs a command with additional variables on an emulated machine."""

_FUNCTION, _ANSWER = "function", "answer"
"""The files of a call: (module, its file, the pickled function), and (value, exception)."""


@dataclass(frozen=True, slots=True)
class Called(Generic[Value]):
    """The `value` that a function returned, and the *emulated* use of the GPU by its process.

    The peaks are those of the device that had most. They raise `InputError` if the function used
    no GPU, and `UnavailableError` if values that are not computed decided the size of a tensor.
    """

    value: Value
    emulation: Emulation

    @property
    def peak_allocated_bytes(self) -> int:
        """The most memory that tensors had, as `torch.cuda.max_memory_allocated` shows it."""
        return self._use.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most memory that PyTorch's allocator had, as `max_memory_reserved` shows it."""
        return self._use.peak_reserved_bytes

    @property
    def phase_peak_bytes(self) -> dict[str, int]:
        """The most allocated memory in "load", "forward", "backward" and "optimizer"."""
        return dict(self._use.phase_peak_bytes)

    @property
    def _use(self) -> EmulatedDeviceUse:
        use = self.emulation.limiting
        if use is None:
            raise InputError("the function used no GPU", hint='does it create tensors on "cuda"?')
        if self.emulation.sizes == "unknown":
            first = self.emulation.unknown_values[0]
            raise UnavailableError(
                f"{first.line}: the size of a tensor depends on values that are not computed"
                f" ({first.operator}), so its memory is unknown",
                hint="give the function a size that does not depend on them",
            )
        return use


def call(run: Run, function: Callable[..., Value], *args: Any, **kwargs: Any) -> Called[Value]:
    """The result of `function(*args, **kwargs)` in a process that `run` starts."""
    try:
        called = pickle.dumps((function, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise InputError(
            f"the function cannot be sent to the emulated process: {error}",
            hint="call a function at the top level of a module, with arguments that can be pickled",
        ) from None
    module = sys.modules.get(function.__module__)
    if function.__module__ == "__main__":
        raise InputError(
            f"{function.__qualname__}: functions of a script cannot be called on an emulated GPU",
            hint="move the function to a module, such as a test file, and import it",
        )
    with tempfile.TemporaryDirectory(prefix="tuner-call-") as folder:
        place = (function.__module__, getattr(module, "__file__", None), called)
        Path(folder, _FUNCTION).write_bytes(pickle.dumps(place))
        command = your_python(__spec__.name, folder)
        emulation = run(command, {"PYTHONPATH": search_path()})
        answer = Path(folder, _ANSWER)
        content = answer.read_bytes() if answer.exists() else None
    _check(emulation, answered=content is not None)
    value, raised = pickle.loads(content or b"")  # noqa: S301 - of the process started above
    if raised is not None:
        raise raised
    return Called(value, emulation)


def _check(emulation: Emulation, *, answered: bool) -> None:
    """Raise `UnavailableError` if the emulated process gave no answer, or none to rely on."""
    if emulation.own_fault is not None:
        raise UnavailableError(str(emulation.own_fault))
    if emulation.ended is Ended.UNSUPPORTED or not answered:
        error = emulation.error
        text = "" if error is None else f": {error.message}{f' at {error.line}' * bool(error.line)}"
        raise UnavailableError(
            f"the emulated process ended ({emulation.ended}, exit status"
            f" {emulation.exit_status}) before the function did{text}"
        )


def _answer(folder: Path) -> None:
    """Call the function that lies in `folder`, and write its value or its exception there."""
    value = error = None
    try:
        name, file, called = pickle.loads((folder / _FUNCTION).read_bytes())  # noqa: S301
        _load(name, file)
        function, args, kwargs = pickle.loads(called)  # noqa: S301
        value = function(*args, **kwargs)
    except BaseException as raised:  # noqa: BLE001 - pytest's own outcomes are no `Exception`
        raised.add_note(f"In the emulated process:\n{traceback.format_exc()}")
        error = raised
    try:
        content = pickle.dumps((value, error))
        pickle.loads(content)  # noqa: S301 - some exceptions can be written and not read
    except Exception as unsent:  # noqa: BLE001 - whatever `__reduce__` raises
        text = f"a value cannot be sent back: {unsent}"
        if error is not None:
            text = "\n".join((f"{type(error).__qualname__}: {error}", *error.__notes__))
        content = pickle.dumps((None, RuntimeError(text)))
    (folder / _ANSWER).write_bytes(content)


def _load(name: str, file: str | None) -> None:
    """Import the module; by its file if its name doesn't lead to it (pytest's importlib mode)."""
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its package
        found = None
    if file is None or (found is not None and found.origin == file):
        return
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is not None and spec.loader is not None:
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
