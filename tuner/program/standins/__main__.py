"""Reads a request, runs the program, and writes the record."""

from __future__ import annotations

import builtins
import io
import json
import os
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, cast

from tuner.program.standins import guard, libraries, record
from tuner.program.standins.files import opened
from tuner.program.standins.unknown import ORACLE, Unknown, is_library, place

_lock = threading.Lock()
_STATEMENT_S = 2.0
"""Time of one statement of a notebook."""


def main() -> None:
    out = int(sys.argv[1]) if len(sys.argv) > 1 else os.dup(1)
    request = json.loads(sys.stdin.buffer.read())
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    seconds, memory = float(request["seconds"]), int(request["memory_bytes"])
    texts = {"time": f"{seconds:g} s", "memory": f"{memory} bytes"}
    guard.watch(
        seconds,
        memory,
        lambda kind, where: _write(out, {"kind": kind, "text": texts[kind], "where": where}),
    )
    _write(out, run(request))


def run(request: dict[str, Any]) -> dict[str, Any] | None:
    ORACLE.start(request.get("seed", 0))
    main, module = request.get("main") or "", request.get("module") or ""
    os.chdir(request.get("folder") or ".")
    sys.argv = list(request["argv"])
    first = os.path.dirname(os.path.abspath(main)) if main else os.getcwd()
    sys.path.insert(0, first)
    libraries.start(request)
    _soften()
    guard.install(request, Unknown)
    try:
        if (parts := request.get("parts")) is not None:
            _cells(parts, main)
        elif main:
            _script(main)
        else:
            import runpy

            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return {"kind": "exit", "text": str(end.code), "where": _last_line(end)}
    except BaseException as error:
        kind = {"MemoryError": "memory", "Refused": "refused"}.get(type(error).__name__, "error")
        text = f"{type(error).__name__}: {error}"[:400]
        return {"kind": kind, "text": text, "where": _last_line(error)}
    return None


def _namespace(main: str) -> dict[str, Any]:
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    module.__dict__.update(__file__=main, __builtins__=builtins, __cached__=None)
    if not main:
        del module.__dict__["__file__"]
    return module.__dict__


def _script(main: str) -> None:
    with io.open_code(main) as file:
        text = file.read()
    exec(compile(text, main, "exec", dont_inherit=True), _namespace(main))


def _cells(parts: list[list[str]], main: str) -> None:
    """Runs the cells in their order, a statement at a time.

    A statement that fails or takes long is noted, what it would have set is unknown, and the next
    go on. The first error is raised in the end if no training was seen.
    """
    import ast
    import linecache

    held, errors = _namespace(main), list[BaseException]()
    held.update(get_ipython=Unknown("get_ipython"), display=Unknown("display"))
    for name, text in parts:
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        try:
            statements = ast.parse(text, name).body
        except SyntaxError as wrong:
            errors.append(wrong)
            statements = []
        for each in statements:
            if error := _failed(each, name, held):
                errors.append(error)
                _forget(each, name, held)
    if errors and not record.TRAININGS and not record.LOOPS:
        raise errors[0]


def _failed(statement: Any, name: str, held: dict[str, Any]) -> BaseException | None:
    """Runs a statement; returns and notes the error that ends it."""
    import ast

    late = threading.Timer(_STATEMENT_S, _interrupt, (threading.get_ident(),))
    late.daemon = True
    late.start()
    try:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code = compile(ast.Module([statement], []), name, "exec", flags, dont_inherit=True)
        made = eval(code, held)
        if code.co_flags & 0x80:  # it awaits
            import asyncio

            asyncio.run(made)
    except SystemExit:
        raise
    except BaseException as error:
        why = f"a statement, which ends with {type(error).__name__}: {error}"[:400]
        guard.DROPPED.append({"what": why, "where": _last_line(error)})
        return error
    finally:
        late.cancel()
    return None


def _forget(statement: Any, name: str, held: dict[str, Any]) -> None:
    """Makes all unknown that a failed statement sets."""
    import ast

    for node in ast.walk(statement):
        if isinstance(getattr(node, "ctx", None), ast.Store) and not isinstance(
            node, (ast.Tuple, ast.List, ast.Starred)
        ):
            of = ast.unparse(node)
            value = ast.copy_location(ast.Name("unknown here", ast.Load()), statement)
            assign = ast.copy_location(ast.Assign([cast(Any, node)], value), statement)
            held["unknown here"] = Unknown(of)
            try:
                exec(compile(ast.Module([assign], []), name, "exec", dont_inherit=True), held)
            except Exception:  # its object is unknown as well
                continue
    held.pop("unknown here", None)


class TooLong(BaseException):
    """Ends a statement of a notebook."""


def _interrupt(thread: int) -> None:
    import ctypes

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TooLong))


def _last_line(error: BaseException) -> dict[str, Any] | None:
    found = None
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not is_library(code.co_filename):
            found = place(code, trace.tb_lasti, trace.tb_lineno)
        trace = trace.tb_next
    if found is None and isinstance(error, SyntaxError) and error.filename:
        line = error.lineno or 1
        found = {"file": error.filename, "line": line, "end": line, "column": 0, "end_column": 0}
    return found


def _soften() -> None:
    """Libraries written in C that an `Unknown` goes into: JSON and regular expressions."""
    import re
    import time

    time.sleep = lambda seconds: None

    named = getattr

    def get(value: Any, name: Any, *default: Any) -> Any:
        if not isinstance(name, Unknown):
            return named(value, name, *default)
        module: Any = sys.modules.get("transformers")
        if value is module is not None:  # one of its models, as a config names it
            return module.PreTrainedModel
        return Unknown(f"getattr(..., {name._what})")

    builtins.getattr = get
    own: Callable[..., Any] = json.JSONEncoder.default

    def default(self: Any, value: Any) -> Any:
        return str(value) if isinstance(value, Unknown) else own(self, value)

    json.JSONEncoder.default = default  # type: ignore[method-assign,assignment]
    for name in ("search", "match", "fullmatch", "sub", "subn", "split", "findall", "finditer"):
        _asks(re, name)
    for name in ("loads", "load"):
        _asks(json, name)


def _asks(module: Any, name: str) -> None:
    own = getattr(module, name)

    def either(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(each, Unknown) for each in args):
            return Unknown(f"{module.__name__}.{name}(...)")
        return own(*args, **kwargs)

    setattr(module, name, either)


def _files() -> list[str]:
    for module in list(sys.modules.values()):
        path = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(path, str) and path.endswith(".py"):
            opened[os.path.abspath(path)] = None
    roots = {os.path.dirname(os.path.abspath(sys.argv[0])) if sys.argv else "", os.getcwd()}
    return [
        path
        for path in opened
        if not is_library(path)
        and not path.endswith(".pyc")
        and any(path.startswith(root) for root in roots if root)
    ]


def _write(out: int, ended: dict[str, Any] | None) -> None:
    with _lock:
        if ended is not None:
            ended.setdefault("where", None)
        done = {
            "trainings": record.TRAININGS,
            "loops": [loop for loop in record.LOOPS.values() if loop["backwards"]],
            "asked": ORACLE.asked,
            "ended": ended,
            "files": _files(),
            "standins": list(record.STANDINS),
            "absent": list(record.ABSENT),
            "dropped": guard.DROPPED,
        }
        data = json.dumps(done).encode() + b"\n"
        while data:
            data = data[os.write(out, data) :]
        guard.leave(0)


if __name__ == "__main__":
    main()
