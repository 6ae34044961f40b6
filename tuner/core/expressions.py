"""Small, safe expressions over named values: `effective_batch % micro_batch == 0`.

Derived values, constraints and `--where` are written in them. Arithmetic, comparisons, `and`,
`or`, `not`, `in`, `x if y else z` and a few functions, evaluated by simpleeval: no attributes,
no indexing, no calls of anything else, and nothing that can take long.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
import re
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from simpleeval import EvalWithCompoundTypes

from tuner.core.errors import InputError, nearest

_PARSING = threading.RLock()


def syntax(source: str | bytes, mode: str = "exec") -> Any:
    """The tree of `ast.parse`, which in Python 3.11 fails in two threads at once (gh-106905)."""
    with _PARSING:
        return ast.parse(source, mode=mode)


MAX_LENGTH = 500
"""Characters in one expression: keeps parsing and evaluating it instantaneous."""
MAX_MAGNITUDE = 1e30
"""No quantity of a training run comes near it (an exaFLOP for a century is 3e27)."""
MAX_EXPONENT = 64

_NODES = (
    ast.BinOp, ast.BoolOp, ast.Call, ast.Compare, ast.Constant, ast.IfExp, ast.Name, ast.Tuple,
    ast.UnaryOp, ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip


def _number(value: Any) -> float:
    """`value`, if it is a number of reasonable size (bool is not a number here)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    if not abs(value) <= MAX_MAGNITUDE:  # also true of nan
        raise OverflowError(f"a number is larger than {MAX_MAGNITUDE:g}")
    return value


def _numeric(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` restricted to numbers, in its arguments and in its result."""

    @functools.wraps(function)
    def restricted(*arguments: Any) -> float:
        return _number(function(*(_number(a) for a in arguments)))

    return restricted


def _power(base: float, exponent: float) -> Any:
    if abs(exponent) > MAX_EXPONENT:
        raise OverflowError(f"the exponent {exponent} is larger than {MAX_EXPONENT}")
    return base**exponent


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: _numeric(operator.add),
    ast.Sub: _numeric(operator.sub),
    ast.Mult: _numeric(operator.mul),
    ast.Div: _numeric(operator.truediv),
    ast.FloorDiv: _numeric(operator.floordiv),
    ast.Mod: _numeric(operator.mod),
    ast.Pow: _numeric(_power),
    ast.USub: _numeric(operator.neg),
    ast.UAdd: _numeric(operator.pos),
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, container: operator.contains(container, item),
    ast.NotIn: lambda item, container: not operator.contains(container, item),
}

# `round` is checked to have one argument: round(x, -10**9) would take for ever.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": _numeric(abs),
    "ceil": _numeric(math.ceil),
    "floor": _numeric(math.floor),
    "max": _numeric(lambda *numbers: max(numbers)),
    "min": _numeric(lambda *numbers: min(numbers)),
    "round": _numeric(round),
}


class Expression:
    """A checked expression. Built by `compile_expression`; picklable."""

    __slots__ = ("_evaluator", "_tree", "names", "text")

    def __init__(self, text: str, tree: ast.expr) -> None:
        self.text = text
        self.names: frozenset[str] = frozenset(_value_names(tree))
        """The names whose values the expression needs."""
        self._tree = tree
        self._evaluator = EvalWithCompoundTypes(
            operators=_OPERATORS, functions=dict(FUNCTIONS), names={}
        )

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """The value of the expression for `values`, which must hold every one of `names`.

        Raises `InputError`, naming the values, where it has none (a division by zero).
        """
        self._evaluator.names = values
        try:
            return self._evaluator.eval(self.text, previously_parsed=self._tree)
        except (ArithmeticError, TypeError, ValueError, RecursionError) as error:
            raise InputError(
                f"cannot evaluate {self.text!r}{self.at(values)}: {_reason(error)}"
            ) from None

    def holds(self, values: Mapping[str, Any]) -> bool:
        """True if the condition holds. Raises `InputError` if it is not a condition."""
        result = self.evaluate(values)
        if not isinstance(result, bool):
            raise InputError(
                f"{self.text!r} is not a condition: it gives {result!r}{self.at(values)}, "
                "not true or false",
                hint="compare it with something, for example == 0",
            )
        return result

    def at(self, values: Mapping[str, Any]) -> str:
        """' (micro_batch=4, ...)': the values this expression reads, or nothing."""
        shown = settings_text(values, sorted(self.names), between=", ")
        return f" ({shown})" if shown else ""

    def compared_words(self) -> list[tuple[str, str]]:
        """(name, word) for each name compared with a quoted word, as in `precision == 'nf4'`."""
        found: list[tuple[str, str]] = []
        for node in ast.walk(self._tree):
            if not isinstance(node, ast.Compare):
                continue
            sides = [node.left, *node.comparators]
            names = [side.id for side in sides if isinstance(side, ast.Name)]
            words = [w for side in sides for w in _words(side)]
            if len(names) == 1:
                found.extend((names[0], word) for word in words)
        return found

    def __reduce__(self) -> tuple[Any, ...]:
        return compile_expression, (self.text, self.names)

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"


def compile_expression(
    text: str, names: Collection[str], *, words: Collection[str] = ()
) -> Expression:
    """`text` as an `Expression` over `names`.

    `words` are values that people forget to quote (`precision == nf4`); they only improve the
    message. Raises `InputError` for what is no expression, for a name that is not in `names`
    (with the nearest spelling) and for anything that is not allowed in an expression.
    """
    tree = _parse(text, names)
    for node in ast.walk(tree):
        _check_node(node, text)
    for name in _value_names(tree):
        if name not in names:
            close = nearest(name, names)
            if name in words:
                hint = f"a word needs quotes: '{name}'"
            elif close:
                hint = f"did you mean {close!r}?"
            else:
                hint = f"allowed: {', '.join(sorted(names))}"
            raise InputError(f"unknown name {name!r} in {text!r}", hint=hint)
    return Expression(text, tree)


def show(value: object) -> str:
    """A value as people type it: true, nf4, [q_proj,v_proj], '' for empty text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{','.join(show(item) for item in value)}]"
    return str(value) or "''"


def settings_text(
    values: Mapping[str, Any], names: Iterable[str] | None = None, *, between: str = " "
) -> str:
    """`micro_batch=4 precision=nf4`: what can be typed after --set; by default of all values."""
    chosen = values if names is None else names
    return between.join(f"{n}={show(values[n])}" for n in chosen if n in values)


def all_of(conditions: Iterable[str]) -> str:
    """Conditions as one, each that has an "or" or "if" of its own in parentheses."""
    return " and ".join(f"({c})" if _LOOSE.search(c) else c for c in conditions)


_LOOSE = re.compile(r"\b(or|if)\b")


def _parse(text: str, names: Collection[str]) -> ast.expr:
    if len(text) > MAX_LENGTH:
        raise InputError(
            f"the expression {text[:40]!r}... has {len(text)} characters; "
            f"at most {MAX_LENGTH} are allowed"
        )
    if not text.strip():
        raise InputError("the expression is empty", hint="write for example lora_rank >= 128")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of odd literals; they are refused below
            tree = syntax(text.strip(), "eval")
            plain: ast.Expression = _AsInYaml(names).visit(tree)
            return ast.fix_missing_locations(plain).body
    except SyntaxError as error:
        raise InputError(
            f"{text!r} is not an expression: {error.msg}", hint=_syntax_hint(text)
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{text!r} is not an expression: {_reason(error)}") from None


class _AsInYaml(ast.NodeTransformer):
    """Reads `true`, `false` and `[a, b]` as YAML does: as booleans and as the tuple (a, b).

    A name may have a dot in it, as `stage1.n_negatives`.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        name = f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else ""
        return ast.Name(name, ast.Load()) if name in self._names else node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in ("true", "false"):
            return ast.Constant(node.id == "true")
        return node

    def visit_List(self, node: ast.List) -> ast.expr:
        return ast.Tuple([self.visit(item) for item in node.elts], ast.Load())


def _syntax_hint(text: str) -> str:
    if "&&" in text or "||" in text:
        return "write `and` and `or`"
    close = text.replace(" ", "")
    if "=" in close and not any(sign in close for sign in ("==", "<=", ">=", "!=")):
        return "to compare, write =="
    return "write for example lora_rank >= 128 or precision == 'nf4'"


def _check_node(node: ast.AST, text: str) -> None:
    """Refuse what is not arithmetic, comparison or logic over names and plain values."""
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name not in FUNCTIONS or node.keywords:
            raise InputError(
                f"{text!r} calls something that is not allowed in an expression",
                hint=f"allowed: {', '.join(f'{f}(...)' for f in FUNCTIONS)}",
            )
        if not node.args or (len(node.args) > 1 and name not in ("max", "min")):
            raise InputError(f"{text!r} gives {name}() {len(node.args)} values; it takes one")
    allowed = isinstance(node, _NODES)
    if isinstance(node, ast.operator | ast.unaryop | ast.cmpop):
        allowed = type(node) in _OPERATORS
    if isinstance(node, ast.Constant):
        allowed = isinstance(node.value, bool | int | float | str)
    if not allowed:
        raise InputError(
            f"{text!r} uses {_describe(node)}, which is not allowed in an expression",
            hint="allowed: + - * / // % **, comparisons, and, or, not, in, x if y else z, "
            f"{', '.join(FUNCTIONS)}",
        )


def _describe(node: ast.AST) -> str:
    known = {
        ast.Attribute: "an attribute (a dot)",
        ast.Subscript: "an index ([...])",
        ast.JoinedStr: "an f-string",
        ast.Lambda: "a lambda",
        ast.Is: "`is` (write ==)",
        ast.IsNot: "`is not` (write !=)",
    }
    if isinstance(node, ast.Constant):
        return f"the value {node.value!r}"[:60]
    return known.get(type(node), type(node).__name__)


def _value_names(tree: ast.AST) -> list[str]:
    """The names that stand for values, in order of appearance, functions left out."""
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return [n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in called]


def _words(node: ast.expr) -> list[str]:
    items = node.elts if isinstance(node, ast.Tuple) else [node]
    return [i.value for i in items if isinstance(i, ast.Constant) and isinstance(i.value, str)]


def _reason(error: BaseException) -> str:
    if isinstance(error, ZeroDivisionError):
        return "division by zero"
    if isinstance(error, RecursionError | MemoryError):
        return "it is nested too deeply"
    return str(error)
