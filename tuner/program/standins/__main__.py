"""Reads a request, runs the program, and writes the record."""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import re
import sys
import threading
import time
import types
from importlib.machinery import SourceFileLoader
from typing import Any

from tuner.program import standins
from tuner.program.standins import NOT_INSTALLED, configs, guard, libraries, models, record
from tuner.program.standins.files import opened
from tuner.program.standins.unknown import (
    ABSENT,
    ENTRIES,
    KEYS,
    MAY_BE_NONE,
    ORACLE,
    Note,
    Text,
    Unknown,
    is_library,
    place,
)

_lock, _MISSING = threading.Lock(), object()


def main() -> None:
    out = int(sys.argv[1]) if len(sys.argv) > 1 else os.dup(1)
    request = json.loads(sys.stdin.buffer.read())
    for descriptor in (0, 1):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    seconds, memory = float(request["seconds"]), int(request["memory_bytes"])
    texts = {"time": f"{seconds:g} s", "memory": f"{memory} bytes"}
    guard.watch(seconds, memory, lambda kind, where: _write(out, _end(kind, texts[kind], where)))
    _write(out, run(request))


def _end(kind: str, text: str, where: dict[str, Any] | None) -> dict[str, Any]:
    return {"kind": kind, "text": text[:400], "where": where}


def run(request: dict[str, Any]) -> dict[str, Any] | None:
    ORACLE.seed, ORACLE.fixed = request.get("seed", 0), request.get("fixed", {})
    ORACLE.order = {what: number for number, what in enumerate(request.get("order", ()))}
    KEYS[:] = request.get("keys", ())
    main = request.get("main") or ""
    os.chdir(request.get("folder") or ".")
    sys.argv = list(request["argv"])
    sys.path.insert(0, os.path.dirname(os.path.abspath(main)) if main else os.getcwd())
    libraries.start(request)
    # Lets an `Unknown` into JSON and regular expressions, which are written in C.
    time.sleep = lambda seconds: None
    builtins.getattr, builtins.setattr, builtins.hasattr = _attribute, _set, _has
    builtins.__dict__.update(__softly__=_softly, __none__=_none)  # of `_softened` programs
    SourceFileLoader.get_code = _code  # type: ignore[assignment,method-assign]
    own, encoded = json.JSONEncoder.default, os.environ.encodevalue
    json.JSONEncoder.default = lambda self, value: (  # type: ignore[assignment,method-assign]
        str(value) if isinstance(value, Unknown) else own(self, value)
    )
    os.environ.encodevalue = lambda value: encoded(_text(value))
    guard.install(request, Unknown)
    try:
        if (parts := request.get("parts")) is not None:
            _cells(parts, _namespace(main))
        elif main:
            with io.open_code(main) as file:
                code = compile(_softened(file.read(), main), main, "exec", dont_inherit=True)
            exec(code, _namespace(main))
        else:
            import runpy

            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        if ENTRIES and not record.TRAININGS and not record.LOOPS:
            ENTRIES.get("local_entrypoint(...)", [*ENTRIES.values()][-1])()
    except SystemExit as end:
        return _end("exit", str(end.code), _last_line(end))
    except BaseException as error:
        kind = {"MemoryError": "memory", "Refused": "refused"}.get(type(error).__name__, "error")
        return _end(kind, f"{type(error).__name__}: {error}", _last_line(error))
    return None


def _namespace(main: str) -> dict[str, Any]:
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__dict__.update(__builtins__=builtins, __cached__=None)
    if main:
        module.__file__ = main
    return module.__dict__


def _cells(parts: list[list[str]], held: dict[str, Any]) -> None:
    """Runs the cells in their order, a statement at a time.

    A statement that fails or takes long is noted, what it would have set is unknown, and the next
    go on. The first error is raised in the end if no training was seen.
    """
    import ast
    import linecache

    errors: list[BaseException] = []
    held.update(get_ipython=Unknown("get_ipython"), display=Unknown("display"))
    for name, text in parts:
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        try:
            statements = _softened(text, name).body
        except SyntaxError as wrong:
            why = f"a cell, which ends with SyntaxError: {wrong.msg}"
            guard.DROPPED.append({"what": why, "where": _last_line(wrong)})
            errors.append(wrong)
            continue
        for each in statements:
            try:
                _run_statement(each, name, held)
            except SystemExit:
                raise
            except BaseException as error:
                errors.append(error)
                why = f"a statement, which ends with {type(error).__name__}: {error}"[:400]
                guard.DROPPED.append({"what": why, "where": _last_line(error)})
                for node in ast.walk(each):
                    if isinstance(getattr(node, "ctx", None), ast.Store):
                        _forget(ast.unparse(node), "\n" * (each.lineno - 1), name, held, why)
    if errors and not record.TRAININGS and not record.LOOPS:
        raise errors[0]


def _forget(target: str, above: str, name: str, held: dict[str, Any], why: str) -> None:
    """Makes unknown what a failed statement sets, unless its object is unknown as well."""
    with contextlib.suppress(Exception):
        held["__unknown__"] = Unknown(f"{target} is of {why}")
        exec(compile(f"{above}{target} = __unknown__", name, "exec", dont_inherit=True), held)


def _run_statement(statement: Any, name: str, held: dict[str, Any]) -> None:
    import ast

    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(ast.Module([statement], []), name, "exec", flags, dont_inherit=True)
    with guard.within(2):
        made = eval(code, held)
        if code.co_flags & 0x80:  # it awaits
            import asyncio

            asyncio.run(made)


def _last_line(error: BaseException) -> dict[str, Any] | None:
    found, trace = None, error.__traceback__
    if isinstance(error, SyntaxError) and error.filename:
        line = error.lineno or 1
        found = {"file": error.filename, "line": line, "end": line, "column": 0, "end_column": 0}
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_library(code.co_filename):
            found = place(code, trace.tb_lasti, trace.tb_lineno)
        trace = trace.tb_next
    return found


def _softly(function: Any) -> Any:
    """The function; one of a text, a file or Python's own takes what is unknown as well."""
    owner = getattr(function, "__self__", None)
    if type(owner) in (io.TextIOWrapper, io.StringIO) and function.__name__ == "write":
        return lambda text: function(_text(text))
    of_text = type(owner) in (str, bytes, re.Pattern)
    home = owner if type(owner) is types.ModuleType else function
    name = getattr(home, "__name__" if home is owner else "__module__", None)
    return _unless_unknown(function) if of_text or name in standins.NAMES["soft"] else function


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, Unknown) else value


def _code(self: Any, name: str, own: Any = SourceFileLoader.get_code) -> Any:
    """The code of an imported module: one of the program's own is `_softened`, too."""
    if is_library(self.path):
        return own(self, name)
    text = _softened(self.get_data(self.path), self.path)
    return compile(text, self.path, "exec", dont_inherit=True)


def _softened(text: Any, name: str) -> Any:
    """The program's tree, which calls each method `softly`, and asks for what may be None."""
    import ast

    def through(function: str, node: Any) -> Any:
        made = ast.Call(ast.Name(function, ast.Load()), [node], [])
        return ast.fix_missing_locations(ast.copy_location(made, node))

    tree = ast.parse(text, name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node.func = through("__softly__", node.func)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
            is_asked = ast.unparse(node.comparators[0]) == "None"
            node.left = through("__none__", node.left) if is_asked else node.left
    return tree


def _none(value: Any) -> Any:
    """The value that a line compares with None; the oracle says if what was read is that."""
    is_read = type(value) is Unknown and value._is_read
    return None if is_read and ORACLE.truth(f"{value._what} is None") else value


def _attribute(value: Any, name: Any, *default: Any, get: Any = getattr) -> Any:
    """`getattr`, also of a name that is unknown; whether one that is made up is there is asked."""
    if not isinstance(name, (Unknown, Text)):
        made = get(value, name, *default)
        is_made_up = type(made) in (Unknown, models.Part) and made._what.endswith(f".{name}")
        if default and is_made_up and isinstance(value, configs.ConfigMeta) and not value._open:
            return default[0]  # no field of the class
        of_release = isinstance(value, (type, types.ModuleType))
        asks = default and is_made_up and name not in MAY_BE_NONE and not of_release
        missing = asks and not ORACLE.truth(f"{getattr(value, '_what', value)} has {name}")
        return default[0] if missing else made
    module: Any = sys.modules.get("transformers")
    if value is module is not None:  # one of its models, as a config names it
        return module.PreTrainedModel
    return Unknown(f"getattr(..., {getattr(name, '_what', name)})")


def _has(value: Any, name: Any) -> bool:
    """`hasattr`, also of a name that is unknown."""
    return _attribute(value, name, _MISSING) is not _MISSING


def _set(value: Any, name: Any, new: Any, put: Any = setattr) -> None:
    """`setattr`, also of a name that is unknown: any setting of the object may have changed."""
    if not isinstance(name, (Unknown, Text)):
        put(value, name, new)
    elif isinstance(note := getattr(value, "_note", None), Note):
        note.assign("**", Unknown(f"setattr(..., {getattr(name, '_what', name)}, ...)"))


def _unless_unknown(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple([*each] if isinstance(each, types.GeneratorType) else each for each in args)
        inner = [each for some in args if isinstance(some, (list, tuple)) for each in some]
        if any(isinstance(each, Unknown) for each in (*args, *kwargs.values(), *inner)):
            return Unknown(f"{function.__name__}(...)")
        return function(*args, **kwargs)

    return call


def _write(out: int, ended: dict[str, Any] | None) -> None:
    allocators = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # the first one counts first
    with _lock:
        for module in list(sys.modules.values()):
            path = getattr(module, "__dict__", {}).get("__file__")
            if isinstance(path, str) and path.endswith(".py"):
                opened[os.path.abspath(path)] = None
        roots = *(os.path.dirname(os.path.abspath(word)) for word in sys.argv[:1]), os.getcwd()
        texts = [path for path in opened if path.startswith(roots) and not path.endswith(".pyc")]
        done = {
            "trainings": record.TRAININGS,
            "loops": [loop for loop in record.LOOPS.values() if loop["backwards"]],
            "asked": ORACLE.asked,
            "branches": list(ORACLE.branches),
            "numbers": list(ORACLE.numbers.values()),
            "ended": ended,
            "models": list(models.NAMED),
            "files": [path for path in texts if not is_library(path)],
            "standins": list(record.STANDINS),
            "absent": list(ABSENT),
            "dropped": [
                *guard.DROPPED,
                *({"what": f"{k}{NOT_INSTALLED}", "where": v} for k, v in ABSENT.items() if v),
            ],
            "allocators": [*filter(None, map(os.environ.get, allocators))][:1],
        }
        data = json.dumps(done).encode() + b"\n"
        while data:
            data = data[os.write(out, data) :]
        guard.leave(0)


if __name__ == "__main__":
    main()
