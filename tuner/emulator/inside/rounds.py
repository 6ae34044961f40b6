"""Ends the loops of a program that train, after enough steps, so that it comes to its own end.

As one of its own files is compiled, each loop that trains asks here for its next round. One over a
range goes on with the numbers at which a branch is taken that was not, and with the last one.

`sitecustomize` runs this file in every process before the program. It never imports `tuner`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import itertools
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, cast

_NAME = "__tuner_rounds__"
"""The name in `builtins` of the one `Rounds` of a process."""

_TRAINS = re.compile(r"backward|step|fit|_?train(?!ing)\w*|\w*_(train|epoch|step)")
"""Calls by which a loop trains, if no function of the same file tells it."""

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MOST_CALLS = 4
"""Functions through which a call that trains, a counter or a size is followed."""

MOST_VISITS = 16
"""Rounds with which a loop goes on after enough steps: numbers of a range at which a branch waits,
or the next items of others, so that all settings of a sweep have their turn."""

PROBES = 4
"""Parts of what a loop leaves out, whose beginnings have their turn, too: what a round takes may
depend on its number in a way that isn't seen."""

MOST_DRAWN = 100_000
"""Numbers and texts that are drawn to find the largest, and the last."""


class Training(Protocol):
    """The training in this process, as its loops see it."""

    @property
    def steps_done(self) -> int:
        """The steps so far."""

    @property
    def is_spent(self) -> bool:
        """True if the running training has had enough steps."""

    def waits(self) -> bool:
        """True if a branch waits that comes with the next rounds."""

    def begin_rounds(self) -> None:
        """A loop begins that has trained before."""

    def cut(self, frame: FrameType, left: range) -> int | None:
        """Note that a loop leaves out rounds; of the numbers `left`, it has to go on with this."""

    def end_rounds(self) -> None:
        """A loop ends that left out rounds."""


class Rounds:
    """The followed loops of this process: all call this object, by the name that it has there."""

    def __init__(self) -> None:
        self.training: Training | None = None
        self._cut: set[tuple[str, int]] = set()
        self._whiles: dict[tuple[int, int], int] = {}
        self._running: dict[int, int] = {}
        self.ahead: dict[tuple[int, int], int] = {}
        """By the frame and the line of a loop: the rounds by which it counts on."""
        self.larger: dict[tuple[str, int], bool] = {}
        """By the place of a loop in a generator: true if it is over a list with larger numbers."""
        self.decided: set[tuple[str, int, bool]] = set()
        """The places of branches in loops that train, with each outcome of their tests."""

    def __call__(self, iterable: Iterable[Any]) -> Iterable[Any]:
        """The rounds of a `for` loop."""
        if self.training is None:
            return iterable
        frame = sys._getframe(1)
        if (frame.f_code.co_filename, frame.f_lineno) in self._cut:
            self.training.begin_rounds()
        return _Loop(self, self.training, iterable)

    def yields(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a `for` loop in a generator, which trains where they are used."""
        if not (isinstance(items, list | tuple) and all(map(_is_plain, items))):
            yield from items
            return
        frame = sys._getframe(1)
        sizes = [sum(map(_size, _parts(one))) for one in items]
        largest, most = max(sizes, default=0), 0.0
        for number, item in enumerate(items):  # the list may get more
            most = max(most, 0, *sizes[number : number + 1])
            self.larger[frame.f_code.co_filename, frame.f_lineno] = most < largest
            yield item

    def decides(self, line: int, test: Any) -> bool:
        """The outcome of the test of a branch."""
        outcome = bool(test)
        self.decided.add((sys._getframe(1).f_code.co_filename, line, outcome))
        return outcome

    def enters(self, line: int) -> None:
        """A `while` loop begins: what it did before it was left does not count."""
        self._whiles.pop((id(sys._getframe(1)), line), None)

    def goes_on(self, line: int) -> bool:
        """True if a `while` loop may have another round."""
        training, frame = self.training, sys._getframe(1)
        if training is None:
            return True
        key = id(frame), line
        before = self._whiles.get(key)
        self._whiles[key] = training.steps_done
        is_early = before is None or before == training.steps_done or not training.is_spent
        if is_early or training.waits():
            return True
        del self._whiles[key]
        training.cut(frame, range(0))
        training.end_rounds()
        return False

    def enclose(self, frame: FrameType | None) -> bool:
        """True if a loop that is followed runs in this frame or its callers."""
        running = {*self._running, *(key[0] for key in self._whiles)}
        while frame is not None and id(frame) not in running:
            frame = frame.f_back
        return frame is not None

    def note(self, frame: FrameType) -> None:
        """Remember where a loop was cut."""
        self._cut.add((frame.f_code.co_filename, frame.f_lineno))

    def runs(self, frame: int, more: int) -> None:
        """Count the loops that run in a frame."""
        self._running[frame] = self._running.get(frame, 0) + more
        if self._running[frame] <= 0:
            del self._running[frame]


class _Loop:
    """The rounds of one `for` loop. It keeps no item, whose memory would stay."""

    def __init__(self, rounds: Rounds, training: Training, iterable: Iterable[Any]) -> None:
        self._rounds, self._training = rounds, training
        of = getattr(iterable, "iterable", iterable)  # of a progress bar
        self._of, self._values = of, of if isinstance(of, range) else None
        self._is_kept = _is_kept(of)
        self._more = 0 if self._values is not None else MOST_VISITS
        self._following: Iterator[Any] = iter(iterable)
        self._served = self._visits = self._ahead = 0
        self._is_plain = False
        self._rest: Sequence[Any] = ()
        """The items that are left out, of which those at the places `_due` have their turn."""
        self._due: list[int] = []
        self._before: int | None = None
        self._frame: int | None = None

    def __iter__(self) -> _Loop:
        return self

    def __next__(self) -> Any:
        frame, done = sys._getframe(1), self._training.steps_done
        if self._frame is None:
            self._frame = id(frame)
            self._rounds.runs(self._frame, 1)
        trained = self._before is not None and done > self._before
        self._before = done
        is_spent = trained and self._training.is_spent and not self._training.waits()
        if self._visits or is_spent:
            self._more -= 1
            if self._more < 0:
                return self._next_of_few(frame)
        self._served += 1
        try:
            item = next(self._following)
        except StopIteration:
            for items, at in _lists_in(self._of):  # beside a loader that was shortened
                sizes = [max(map(_size, _parts(one)), default=0) for one in items]
                is_larger = max(sizes[at:], default=0) > max(sizes[:at], default=0)
                self._rounds.larger[frame.f_code.co_filename, frame.f_lineno] = is_larger
            self._end()
            raise
        self._is_plain = self._is_kept or _is_plain(item)
        self._ahead += self._rounds.ahead.pop((self._frame, frame.f_lineno), 0)
        return (item[0] + self._ahead, *item[1:]) if self._ahead else item  # numbered

    def _next_of_few(self, frame: FrameType) -> Any:
        if not self._visits:
            self._rest = self._left_out()
            self._due = _deciding(self._rest)
        left = self._rest if isinstance(self._rest, range) else range(0)
        left = left[self._served :]
        if left or (not self._visits and self._values is None):
            self._rounds.note(frame)
            visited = left if self._visits < MOST_VISITS else left[-1:]
            value = self._training.cut(frame, visited)
            if value is not None:
                self._due.append(self._rest.index(value))
        self._visits += 1
        self._due = [at for at in self._due if at >= self._served]
        if not self._due:
            self._end()
            if self._rest or self._values is None:
                self._training.end_rounds()
            raise StopIteration
        at = min(self._due)
        self._served = at + 1
        return self._rest[at]

    def _left_out(self) -> Sequence[Any]:
        """The items that follow, as far as they can be drawn."""
        served, self._served = self._served, 0
        if self._values is not None:
            return self._values[served:]
        return [*itertools.islice(self._following, MOST_DRAWN)] if self._is_plain else ()

    def _end(self) -> None:
        if self._frame is not None:
            self._rounds.runs(self._frame, -1)
            self._frame, self._of, self._following = None, None, iter(())

    def __del__(self) -> None:
        self._end()


def _is_kept(iterable: Any) -> bool:
    """True if the items lie in a list, also if they are numbered, or go beside those of others."""
    if isinstance(iterable, enumerate | zip | type(iter([]))):
        return all(isinstance(one, int) or _is_kept(one) for one in iterable.__reduce__()[1])
    return isinstance(iterable, list | tuple)


def _lists_in(iterable: Any) -> Iterator[tuple[Sequence[Any], int]]:
    """The lists of items beside each other, with the number of those that had their turn."""
    if isinstance(iterable, enumerate | zip):
        for one in iterable.__reduce__()[1]:
            yield from _lists_in(one)
    elif isinstance(iterable, type(iter([]))):
        _, (items,), *at = cast(tuple[Any, ...], iterable.__reduce__())
        yield items, at[0] if at else len(items)


def _is_plain(item: Any) -> bool:
    """True for numbers and texts, and for several of them, as in settings."""
    return all(isinstance(one, int | float | str | None) for one in _parts(item))


def _parts(item: Any, depth: int = 3) -> list[Any]:
    """The values in a tuple, a dictionary or an object with attributes; others by themselves."""
    inner = item if isinstance(item, dict) else getattr(item, "__dict__", None)
    inner = item if isinstance(item, tuple) else inner and inner.values()
    if not inner or not depth:
        return [item]
    return [part for one in inner for part in _parts(one, depth - 1)]


def _deciding(items: Sequence[Any]) -> list[int]:
    """The places of the last item, of the beginnings of parts, and of the largest by each part.

    They are the largest at their place in each item, of which those of a range only count.
    """
    found = {len(items) * part // PROBES for part in range(1, PROBES)} | {len(items) - 1}
    known = [] if isinstance(items, range) else [[*map(_size, _parts(one))] for one in items]
    for sizes in itertools.zip_longest(*known, fillvalue=0):
        found.add(max(range(len(sizes)), key=lambda number: (sizes[number], number)))
    return sorted(found) if items else []


def _size(value: Any) -> float:
    found = value if isinstance(value, float) else size_of(value)
    return found if isinstance(found, int | float) else 0


def size_of(value: Any) -> int | None:
    """The number itself, or the elements of rows when padded; None for others, such as texts."""
    if isinstance(value, bool | str | float) or value is None:
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, dict):
        sizes = [size_of(one) or 0 for one in value.values() if not isinstance(one, int)]
        return sum(sizes) or None
    if isinstance(value, list | tuple):
        if not value or isinstance(value[0], int | float):
            return len(value)
        return len(value) * max((size_of(one) or 0 for one in value), default=0)
    numel = getattr(value, "numel", None)
    return int(numel()) if callable(numel) else getattr(value, "size", None)


# -- the program's files ------------------------------------------------------------------------


class _Followed(ast.NodeTransformer):
    """Has loops that train ask for their rounds; all places stay."""

    def __init__(self, trains: Callable[[ast.AST], bool]) -> None:
        self._trains = trains
        self._around = 0
        """The loops around a node that train."""

    def _visit_loop(self, node: ast.For | ast.While) -> bool:
        trains = self._trains(node)
        self._around += trains
        self.generic_visit(node)
        self._around -= trains
        return trains

    def visit_If(self, node: ast.If) -> Any:
        """A branch whose outcome is noted."""
        self.generic_visit(node)
        if self._around:
            node.test = _told("decides", node, node.test)
        return node

    def visit_For(self, node: ast.For) -> Any:
        """A loop over `rounds(items)`."""
        trains = self._visit_loop(node)
        asked: ast.expr = ast.Name(_NAME, ast.Load())
        if trains or any(isinstance(one, ast.Yield) for one in ast.walk(node)):
            asked = asked if trains else ast.Attribute(asked, "yields", ast.Load())
            node.iter = _placed(ast.Call(asked, [node.iter], []), node.iter)
        return node

    def visit_While(self, node: ast.While) -> Any:
        """A loop while `test and rounds.goes_on()`, which is told that it begins."""
        if self._visit_loop(node):
            asked = _told("goes_on", node)
            node.test = _placed(ast.BoolOp(ast.And(), [node.test, asked]), node.test)
            enters = ast.copy_location(ast.Expr(_told("enters", node)), node)
            return [ast.fix_missing_locations(enters), node]
        return node


def _told(name: str, node: ast.If | ast.While, *given: ast.expr) -> ast.expr:
    """A call of the followed loops with the line of a node."""
    called = ast.Attribute(ast.Name(_NAME, ast.Load()), name, ast.Load())
    return _placed(ast.Call(called, [ast.Constant(node.lineno), *given], []), node.test)


def _placed(node: ast.expr, place: ast.expr) -> ast.expr:
    return ast.fix_missing_locations(ast.copy_location(node, place))


def followed(tree: ast.Module, folder: Path) -> ast.Module:
    """The program in which loops that train ask for their rounds.

    A loop trains if it calls what does, or functions of other files in the `folder`. Loops of
    models are left as they are: torch.compile may compile them.
    """
    functions = [one for one in ast.walk(tree) if isinstance(one, _FUNCTIONS)]
    called = {one: set(called_in(one)) for one in functions}
    others = set(_from_other_files(tree, folder))
    training: set[str] = set()
    for _ in range(MOST_CALLS):
        training |= {
            one.name
            for one, names in called.items()
            if names & training or any(map(_TRAINS.fullmatch, names))
        }
    models = {
        one
        for model in ast.walk(tree)
        if isinstance(model, ast.ClassDef)
        and "forward" in {getattr(one, "name", "") for one in model.body}
        for one in ast.walk(model)
    }

    def trains(loop: ast.AST) -> bool:
        names = {*called_in(loop)}
        is_plain = bool(names & training) or any(map(_TRAINS.fullmatch, names))
        used = {getattr(one, "id", "") for one in ast.walk(loop)}
        return is_plain or (loop not in models and not others.isdisjoint(used))

    return _Followed(trains).visit(tree)  # type: ignore[no-any-return]


def _from_other_files(tree: ast.Module, folder: Path) -> Iterator[str]:
    """The names that a file imports from others in its folder."""
    for one in ast.walk(tree):
        if isinstance(one, ast.Import | ast.ImportFrom):
            source = getattr(one, "module", None)
            for alias in one.names:
                path = folder / (source or alias.name).partition(".")[0]
                if getattr(one, "level", 0) or path.is_dir() or path.with_suffix(".py").exists():
                    yield alias.asname or alias.name.partition(".")[0]


def last_name(node: ast.AST) -> str:
    """The last part of a name with dots: "step" of `optimizer.step`."""
    if isinstance(node, ast.Subscript):
        return last_name(node.value)
    return str(getattr(node, "attr", None) or getattr(node, "id", ""))


def called_in(node: ast.AST) -> Iterator[str]:
    """The last names of the functions that are called in a part of a program."""
    return (last_name(one.func) for one in ast.walk(node) if isinstance(one, ast.Call))


def follow_loops(package_of: Callable[[str], str | None]) -> None:
    """Compile the files of the program, outside of all packages, with followed loops."""
    setattr(builtins, _NAME, Rounds())
    read, compiled = SourceFileLoader.get_code, SourceFileLoader.source_to_code

    def code(loader: Any, name: str) -> Any:
        path = loader.get_filename(name)
        if package_of(path) is not None:
            return read(loader, name)
        return loader.source_to_code(loader.get_data(path), path)  # what is cached has none

    def source_to_code(loader: Any, data: Any, path: Any, **how: Any) -> Any:
        if package_of(str(path)) is not None:
            return compiled(loader, data, path, **how)
        tree: Any = compile(data, path, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        with contextlib.suppress(RecursionError):  # then its loops are as they are
            data = followed(tree, Path(path).parent)
        return compiled(loader, data, path, **how)

    SourceFileLoader.get_code = code  # type: ignore[method-assign,assignment]
    SourceFileLoader.source_to_code = source_to_code  # type: ignore[method-assign,assignment]
    if _is_script(sys.argv[0]) and package_of(sys.argv[0]) is None:
        sys.path_hooks.insert(0, _Script)


_RUN = """\
__spec__ = __package__ = __cached__ = None
exec(__loader__.source_to_code(__loader__.get_data(__file__), __file__))
"""
"""Code that runs the script as `python train.py` does."""


def _is_script(path: str) -> bool:
    script = Path(sys.argv[0])
    return script.is_file() and Path(path).is_file() and script.samefile(path)


class _Script:
    """Finds the script of the command as `python folder.zip` finds what is in the archive."""

    def __init__(self, path: str) -> None:
        if not _is_script(path):
            raise ImportError(path)
        self._entry, self._path = path, os.path.abspath(path)  # noqa: PTH100 - links stay

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The script, for which Python looks as `__main__`, once."""
        if name != "__main__":
            return None
        sys.path_hooks.remove(_Script)
        sys.path_importer_cache.pop(self._entry, None)
        is_safe = getattr(sys.flags, "safe_path", False)
        sys.path[:1] = [] if is_safe else [str(Path(self._path).resolve().parent)]
        return spec_from_file_location(name, self._path, loader=_Starter(name, self._path))


class _Starter(SourceFileLoader):
    """Loads the script of the command."""

    def get_code(self, fullname: str) -> Any:
        return compile(_RUN, "<tuner>", "exec")


def loops() -> Rounds:
    """The followed loops of this process."""
    found: Rounds = getattr(builtins, _NAME, None) or Rounds()
    return found
