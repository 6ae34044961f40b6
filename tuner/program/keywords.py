"""The arguments of a call in a program, each with the one value that it has."""

from __future__ import annotations

import ast
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.program.arguments import COMMAND_LINE, Argument, Found
from tuner.program.edit.python_file import ANY, Key, last_name, unrolled
from tuner.program.filled import RELEASED, fields_of, parsed_classes, said_values
from tuner.program.linked import End, Environment, Literal, OptionValue, OutsideKeys, Unclear
from tuner.program.names import CONVERSIONS, Script
from tuner.program.program import Program
from tuner.program.setting import typed

DTYPES: Mapping[str, str] = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
}
"""By the names that PyTorch has for them: tuner's."""


def place_in(script: Script, node: ast.AST) -> str:
    """For people: "train.py:12", or "cell 4, line 7"."""
    return script.place_of(node).where(script.source.path)


IsDead = Callable[[Script, ast.AST], bool | None]
"""True for an expression that never runs, None where that is unknown."""


def _unless_conditional(script: Script, node: ast.AST) -> bool | None:
    return None if script.is_conditional(node) else False


def items_of(
    script: Script, node: ast.expr, left: int = 8, is_dead: IsDead = _unless_conditional
) -> dict[str, ast.AST] | None:
    """The values of a dictionary that the program writes out; None if one is unknown.

    After `left` nested dictionaries they are taken for a circle.
    """
    ends = script.ends(node) if left > 0 else []
    made = ends[0].node if len(ends) == 1 and isinstance(ends[0], Unclear) else None
    if made is None:
        return None
    home = script.home_of(made)
    if isinstance(made, ast.Call) and last_name(made.func) in ("asdict", "vars") and made.args:
        return _fields_made(home, made.args[0])
    is_dict = isinstance(made, ast.Call) and last_name(made.func) == "dict"
    if not (is_dict or isinstance(made, ast.Dict)):
        return None
    found: dict[str, ast.AST] = {}
    for key, value in (*_parts_of(made), *_assigned_to(script, node)):
        dead = is_dead(home, value) if key != "" else False
        if dead:
            continue
        inner = {key: value} if isinstance(key, str) and key else None
        if key == "" and isinstance(value, ast.expr):
            inner = items_of(home, value, left - 1, is_dead)
        if inner is None or dead is None:
            return None
        found |= inner
    return found


def _fields_made(script: Script, node: ast.expr) -> dict[str, ast.AST] | None:
    """The fields of a dataclass's object, each with its value or its default."""
    ends = script.ends(node)
    made = ends[0].node if len(ends) == 1 and isinstance(ends[0], Unclear) else None
    if not isinstance(made, ast.Call) or made.args:
        return None
    _, definition = script.definition_of(made)
    if not isinstance(definition, ast.ClassDef):
        return None
    fields = {name: value for name, value in fields_of(definition) if value is not None}
    given = {k.arg: k.value for k in made.keywords if k.arg is not None}
    return {**fields, **given} if len(given) == len(made.keywords) else None


def _parts_of(made: ast.AST) -> Iterator[tuple[Key, ast.AST]]:
    """The items of `{...}` and `dict(...)`: "" for a dictionary whose items are spread into it."""
    if isinstance(made, ast.Dict):
        for key, value in zip(made.keys, made.values, strict=True):
            text = getattr(key, "value", None)
            yield "" if key is None else text if isinstance(text, str) else ANY, value
    elif isinstance(made, ast.Call):
        yield from (("", argument) for argument in made.args)
        yield from ((keyword.arg or "", keyword.value) for keyword in made.keywords)


def _assigned_to(script: Script, node: ast.expr) -> Iterator[tuple[Key, ast.AST]]:
    base, path = unrolled(node)
    if not isinstance(base, ast.Name):
        return
    home = script.scopes[base].find(base.id)
    for name, where, keys, value in script.assigned:
        if name == base.id and keys[:-1] == path and where.find(base.id) == home:
            yield keys[-1] if isinstance(keys[-1], str) else ANY, value


def written_in(script: Script, call: ast.Call) -> Iterator[tuple[str, str, str]]:
    """The arguments that a call names: the name, where that stands, and its value as written."""
    for keyword in call.keywords:
        if keyword.arg is not None:
            yield keyword.arg, place_in(script, keyword.value), script.shown(keyword.value)
            continue
        for name, value in (items_of(script, keyword.value) or {}).items():
            home = script.home_of(value)
            yield name, place_in(home, value), home.shown(value)


@dataclass(slots=True)
class CallReader:
    """Reads calls of one program; defaults of the environment that count are noted in `found`.

    `absent` are functions that return None in this program. `has_bf16` is what its GPU answers.
    """

    program: Program
    found: Found
    absent: frozenset[str] = frozenset()
    has_bf16: bool = True
    _tests: list[ast.expr] = field(default_factory=list)
    """The tests and products that are being decided, which may not ask for themselves."""

    def keywords(
        self, script: Script, call: ast.Call, only: Sequence[str] = ()
    ) -> Iterator[tuple[str, Argument]]:
        """The arguments of a call by name; those in a dictionary as "its name.its key"."""
        for number, value in enumerate(call.args if not only else ()):
            yield str(number), self.argument(script, value)
        for keyword in call.keywords:
            if keyword.arg is not None:
                if not only or keyword.arg in only:
                    yield from self.named(script, keyword.arg, keyword.value)
                continue
            items = items_of(script, keyword.value, is_dead=self.is_dead)
            if items is None and not only:
                text = f"has **{script.shown(keyword.value)}, whose keys are not known"
                yield "**", Argument(None, place_in(script, keyword.value), text)
            for key in items or ():
                if not only or key in only:
                    yield from self._item(script, keyword.value, key)

    def argument(self, script: Script, node: ast.expr) -> Argument:
        """The one value that an expression has."""
        if (decided := self._decided(script, node)) is not None:
            return decided
        if _makes(node):
            # What an object is made with is read where it is made.
            return Argument(script.shown(node), place_in(script, node), is_made=True)
        return self._one(script, node, script.ends(node))

    def named(self, script: Script, name: str, node: ast.expr) -> Iterator[tuple[str, Argument]]:
        """The value of `node` as argument `name`, and its items as `name.key`."""
        for key in items_of(script, node, is_dead=self.is_dead) or ():
            yield f"{name}.{key}", self._one(script, node, script.ends_at(node, key))
        yield name, self.argument(script, node)

    def _item(self, script: Script, node: ast.expr, key: str) -> Iterator[tuple[str, Argument]]:
        ends = script.ends_at(node, key)
        made = ends[0].node if len(ends) == 1 and isinstance(ends[0], Unclear) else None
        if isinstance(made, ast.expr):
            yield from self.named(script.home_of(made), key, made)
        else:
            yield key, self._one(script, node, ends)

    def _one(self, script: Script, node: ast.expr, ends: Sequence[End]) -> Argument:
        if len(ends) > 1:
            nodes = [e.option.call if isinstance(e, OptionValue) else e.node for e in ends]
            alive = [not self.is_dead(script.home_of(n), n) for n in nodes]
            ends = [end for end, lives in zip(ends, alive, strict=True) if lives] or ends
        values = [self._end(script, end) for end in ends]
        distinct = {repr(value.value): value for value in values}
        if len(distinct) == 1:
            return next(iter(distinct.values()))
        shown = script.shown(node)
        text = f"is {shown}, which is set in several places"
        return Argument(None, place_in(script, node), text)

    def _end(self, script: Script, end: Any) -> Argument:  # noqa: PLR0911 - one for each kind
        node = end.option.call if isinstance(end, OptionValue) else end.node
        script = script.home_of(node)  # which another one may import
        where = place_in(script, node)
        if isinstance(end, Literal):
            try:
                return Argument(ast.literal_eval(end.node), where)
            except ValueError:
                return Argument(None, where, f"is {script.shown(end.node)}, which is computed")
        if isinstance(end, OptionValue):
            return self._option(script, end, where)
        if isinstance(end, Environment):
            return self._variable(script, end, where)
        if isinstance(end, Unclear) and isinstance(end.node, ast.expr):
            decided = self._decided(script, end.node)
            if decided is not None:
                return decided
        keys = end.keys if isinstance(end, OutsideKeys) else ("",)
        if keys[0] == "argv" and isinstance(keys[-1], int):
            return self._word(keys[-1], where)
        said = self._parsed(script, end.node, str(keys[0])) if len(keys) == 1 else None
        if said is not None:
            return said
        if str(keys[-1]) in DTYPES:
            return Argument(str(keys[-1]), where)
        if isinstance(end.node, ast.Call | ast.Dict):
            return Argument(str(keys[-1]) or script.shown(end.node), where, is_made=True)
        return Argument(None, where, f"is {script.shown(end.node)}, which cannot be read")

    def _variable(self, script: Script, end: Environment, where: str) -> Argument:
        text = os.environ.get(end.name)
        if text is not None:
            return Argument(typed(text, ""), f"the environment variable {end.name}")
        if end.default is None:
            return Argument(None, where, f"is the environment variable {end.name}, which is unset")
        default = self.argument(script, end.default)
        value = default.value
        value = typed(value, "") if isinstance(value, str) and not default.is_made else value
        if default.problem is None:
            self.found.assumed.append(f"{end.name}={value}, as this variable is not set")
        return Argument(value, where, default.problem)

    # -- what a program decides ------------------------------------------------------------

    def is_dead(self, script: Script, node: ast.AST) -> bool | None:
        """True for an expression that never runs; None where that is unknown."""
        conditions = script.conditions(node)
        if conditions is None:
            return None
        held = [self.truth(script, test) for test, _ in conditions]
        wanted = [outcome for _, outcome in conditions]
        if any(h is not None and h is not w for h, w in zip(held, wanted, strict=True)):
            return True
        return None if None in held else False

    def truth(self, script: Script, test: ast.expr) -> bool | None:
        """The outcome of a test; None where it is unknown."""
        if test in self._tests:
            return None
        self._tests.append(test)
        try:
            return self._truth(script, test)
        finally:
            self._tests.pop()

    def _truth(self, script: Script, test: ast.expr) -> bool | None:
        match test:
            case ast.UnaryOp(op=ast.Not()):
                inner = self.truth(script, test.operand)
                return None if inner is None else not inner
            case ast.BoolOp():
                held = [self.truth(script, value) for value in test.values]
                decides = isinstance(test.op, ast.Or)
                if decides in held:
                    return decides
                return None if None in held else not decides
            case ast.Compare(ops=[comparison], comparators=[other]):
                return self._compared(script, test.left, comparison, other)
        argument = self.argument(script, test)
        if argument.problem is not None or argument.is_made:
            return None
        return bool(argument.value)

    def _compared(
        self, script: Script, left: ast.expr, comparison: ast.cmpop, right: ast.expr
    ) -> bool | None:
        one, other = self.argument(script, left), self.argument(script, right)
        compare = COMPARED.get(type(comparison))
        if compare is None or one.problem is not None or other.problem is not None:
            return None
        if one.is_made or other.is_made:
            absent = None in (one.value, other.value)
            return isinstance(comparison, ast.IsNot) if absent else None
        try:
            return bool(compare(one.value, other.value))
        except TypeError:
            return None

    def _decided(self, script: Script, node: ast.expr) -> Argument | None:
        """The value of a choice, a test or a product; None for other expressions."""
        where = place_in(script, node)
        match node:
            case ast.IfExp():
                holds = self.truth(script, node.test)
                if holds is not None:
                    return self.argument(script, node.body if holds else node.orelse)
            case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                holds = self.truth(script, node)
                return None if holds is None else Argument(holds, where)
            case ast.BinOp(op=ast.Mult() | ast.FloorDiv()) if node not in self._tests:
                self._tests.append(node)
                one, other = self.argument(script, node.left), self.argument(script, node.right)
                self._tests.pop()
                if isinstance(one.value, int) and isinstance(other.value, int) and other.value:
                    is_product = isinstance(node.op, ast.Mult)
                    made = one.value * other.value if is_product else one.value // other.value
                    return Argument(made, where)
            case ast.Call():
                return self._answered(script, node, where)
        return None

    def _answered(self, script: Script, call: ast.Call, where: str) -> Argument | None:
        name = last_name(call.func) or ""
        if name in self.absent:
            return Argument(None, where)
        if name in ("is_bf16_supported", "is_bfloat16_supported", "is_torch_bf16_gpu_available"):
            return Argument(self.has_bf16, where)
        if name == "getattr" and len(call.args) == 2 and last_name(call.args[0]) == "torch":
            return self.argument(script, call.args[1])
        return None

    def _parsed(self, script: Script, node: ast.AST, name: str) -> Argument | None:
        """The value of a field of a dataclass that a parser fills; None for no such field."""
        scripts = [script, *script.others.values()]
        if next(parsed_classes(scripts), None) is None:
            return None
        said = said_values(self.program).get(name)
        if said is not None:
            return said
        defaults = [(one, literal) for one in scripts for literal in one.class_values(name)]
        found = {
            (one.source.path, literal.node): self._end(one, literal) for one, literal in defaults
        }
        if not found and isinstance(node, ast.Name) and script.is_parsed(node):
            return Argument(RELEASED.get(name), "the default of its class")
        return next(iter(found.values())) if len(found) == 1 else None

    def _word(self, number: int, where: str) -> Argument:
        command, main = self.program.command, self.program.main
        at = command.index(main) + number if main in command else len(command)
        if at < len(command):
            return Argument(typed(command[at], ""), COMMAND_LINE)
        return Argument(None, where, f"is word {number} behind the script, and there is none")

    def _option(self, script: Script, end: OptionValue, where: str) -> Argument:
        command, option = self.program.command, end.option
        for number, word in enumerate(command):
            head, equals, text = word.partition("=")
            if head in option.names:
                following = command[number + 1] if number + 1 < len(command) else ""
                return Argument(typed(text if equals else following, option.dest), COMMAND_LINE)
        if option.default is None or option.is_positional:
            return Argument(None, where, f"is the option {option.names[0]}, which has no default")
        return self.argument(script, option.default)


def _makes(node: ast.expr) -> bool:
    if isinstance(node, ast.Dict):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = last_name(node.func)
    is_looked_up = name in ("get", "getenv") and bool(node.args)
    return name not in CONVERSIONS and not is_looked_up


COMPARED: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.In: lambda one, other: one in other,
    ast.NotIn: lambda one, other: one not in other,
}
