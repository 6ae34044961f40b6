"""Reads what classes and functions of a library take from its source, without importing it."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_CONFIGS = r"[A-Z]\w*(Config|Arguments)"
SOURCES: Mapping[str, Mapping[str, str]] = {
    "transformers": {
        "training_args*.py": r"(Seq2Seq)?TrainingArguments",
        "trainer*.py": r"(Seq2Seq)?Trainer",
        "utils/quantization_config.py": _CONFIGS,
        "modeling_utils.py": r"PreTrainedModel\.(from_pretrained|\w+_checkpointing_enable)",
    },
    "trl": {
        "trainer/*.py": r"[A-Z]\w*(Config|Trainer|Arguments)",
        "experimental/*/*.py": r"[A-Z]\w*(Config|Trainer|Arguments)",
        "scripts/utils.py": _CONFIGS,
        "*utils.py": _CONFIGS,
    },
    "peft": {
        "config.py": _CONFIGS,
        "tuners/*/config.py": _CONFIGS,
        "tuners/*.py": _CONFIGS,
        "mapping*.py": r"get_peft_model",
        "utils/other.py": r"prepare_model_for_kbit_training",
    },
    "accelerate": {
        "accelerator.py": r"Accelerator",
        "utils/dataclasses.py": r"[A-Z]\w*(Config|Configuration|Kwargs|Plugin)",
        "parallelism_config.py": _CONFIGS,
        "commands/launch.py": r"launch_command_parser",
    },
    "torch": {
        "__init__.py": r"compile",
        "utils/data/dataloader.py": r"DataLoader",
        "optim/*.py": r"(?!Optimizer|Averaged|\w+LR)[A-Z]\w+",
    },
    "bitsandbytes": {"optim/*.py": r"(?!Optimizer|Global|Mock)[A-Z]\w+"},
    "sentence_transformers": {
        "training_args.py": r"\w+TrainingArguments",
        "trainer.py": r"\w+Trainer",
        "*/training_args.py": r"\w+TrainingArguments",
        "*/trainer.py": r"\w+Trainer",
    },
    "unsloth": {
        "models/loader.py": r"Fast\w+\.from_pretrained",
        "models/*.py": r"Fast(Llama|Base)Model\.(from_pretrained|get_peft_model)",
        "trainer.py": r"Unsloth\w+",
    },
}
"""By library: the files that define what programs call, the most certain first, and its names."""

LOADERS = ("from_pretrained", "from_dict", "get_config_dict", "_get_config_dict", "_from_config")
"""Functions that look for names among their `**kwargs`."""

Function = ast.FunctionDef
_DEFINED = re.compile(r"^ *(?:def|class) (\w+)", re.MULTILINE)

_NOT = re.compile(r"self\.(\w+) = not self\.(\w+) if self\.\1 is None else self\.\1")
"""In `__post_init__`: a switch that is the contrary of another where nothing is set."""


def _options(node: ast.AST) -> list[str]:
    """The options of `add_argument`, with underscores."""
    words = [
        str(argument.value)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("add_argument")
        for argument in call.args
        if isinstance(argument, ast.Constant)
    ]
    return sorted({w.lstrip("-").replace("-", "_") for w in words if w.startswith("--")})


Value = Any  # plain JSON, {"$name": ...}, {"$object": ...} or {"$unknown": ...}

_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow,
    ast.Div: operator.truediv, ast.BitOr: operator.or_,
}  # fmt: skip


@dataclass(eq=False)
class Source:
    """One module of a library, parsed; `names` are its classes, functions and imports."""

    path: Path
    tree: ast.Module
    names: dict[str, ast.stmt] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in _flat(self.tree.body):
            if isinstance(node, ast.ClassDef | Function):
                self.names[node.name] = node
            elif isinstance(node, ast.Import | ast.ImportFrom):
                self.names |= {alias.asname or alias.name: node for alias in node.names}


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            for part in ("body", "orelse", "handlers", "finalbody"):
                yield from _flat(getattr(node, part, ()))


def _named(node: ast.ImportFrom, name: str) -> str:
    return next((each.name for each in node.names if (each.asname or each.name) == name), name)


Scope = tuple[Source, ast.ClassDef | None]


@dataclass
class Reader:
    """Reads a library in its `folder`; `torch` is the release by which it chooses some defaults.

    A row of `classes` has the `fields` of its own: a type whose default is None, or the type and
    its default, if any. A row with `call` is none of a dataclass: its last `call` are keywords.
    """

    library: str
    folder: Path
    torch: Sequence[int]
    classes: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: dict[Path, Source | None] = field(default_factory=dict)

    def read(self, wanted: Mapping[str, str]) -> dict[str, dict[str, Any]]:
        """The rows of everything that `wanted` names, by file."""
        for pattern, names in wanted.items():
            heads = re.compile(names.partition(r"\.")[0])
            for path in sorted(self.folder.glob(pattern)):
                text = path.read_text(encoding="utf-8", errors="replace")
                if any(map(heads.fullmatch, _DEFINED.findall(text))):
                    self._read_names(self.source(path, text), re.compile(names))
        return self.classes

    def _read_names(self, source: Source | None, wanted: re.Pattern[str]) -> None:
        for name, node in source.names.items() if source else ():
            assert source
            if isinstance(node, Function) and wanted.fullmatch(name):
                self.classes.setdefault(name, self._function(node, (source, None)))
            elif isinstance(node, ast.ClassDef):
                if wanted.fullmatch(name):
                    self._class(node, source)
                for inner in node.body:
                    full = f"{name}.{getattr(inner, 'name', '')}"
                    if isinstance(inner, Function) and wanted.fullmatch(full):
                        self.classes.setdefault(full, self._function(inner, (source, node)))

    def source(self, path: Path, text: str | None = None) -> Source | None:
        """The module in a file; None if there is none, or none that this Python can parse."""
        if path not in self.sources:
            try:
                text = path.read_text(encoding="utf-8") if text is None else text
                self.sources[path] = Source(path, ast.parse(text))
            except (OSError, SyntaxError, ValueError):
                self.sources[path] = None
        return self.sources[path]

    def _class(self, node: ast.ClassDef, source: Source) -> None:
        if node.name in self.classes:
            return
        row = self.classes[node.name] = dict[str, Any]()
        methods = {each.name: each for each in node.body if isinstance(each, Function)}
        made, scope = methods.get("__init__"), (source, node)
        if made is not None and made.args.vararg and made.args.kwarg:
            row["fields"] = self._function(made, scope)["fields"]  # it hands on the others
        elif made is not None:
            row |= self._function(made, scope)
        elif any("dataclass" in ast.unparse(each) for each in node.decorator_list):
            row["fields"] = dict(self._fields(node, scope))
        row["bases"] = [base for each in node.bases if (base := self._base(each, source))]
        after = methods["__post_init__"].body if "__post_init__" in methods else []
        if settled := [found for each in after if (found := _NOT.fullmatch(ast.unparse(each)))]:
            row["contrary"] = {found[1]: found[2] for found in settled}

    def _base(self, node: ast.expr, source: Source) -> str | None:
        name = ast.unparse(node).rpartition(".")[2]
        found = self.find(name, source)
        if found is not None and isinstance(found[0], ast.ClassDef):
            self._class(found[0], found[1])
            return f"{self.library}.{found[0].name}"
        named = source.names.get(name)
        if isinstance(named, ast.ImportFrom) and named.module and not named.level:
            root = named.module.partition(".")[0]
            return f"{root}.{_named(named, name)}" if root in SOURCES else None
        return None

    def find(self, name: str, source: Source, depth: int = 8) -> tuple[ast.stmt, Source] | None:
        """The definition of a name in this library, wherever it is imported from."""
        node = source.names.get(name)
        if not isinstance(node, ast.ImportFrom) or not depth:
            return (node, source) if isinstance(node, ast.ClassDef | Function) else None
        parts = node.module.split(".") if node.module else []
        folder = self.folder.parent if not node.level else source.path.parents[node.level - 1]
        if not node.level and parts[0] != self.folder.name:
            return None
        there = folder.joinpath(*parts)
        for path in (there.with_suffix(".py"), there / "__init__.py"):
            if (other := self.source(path)) is not None:
                return self.find(_named(node, name), other, depth - 1)
        return None

    def _fields(self, node: ast.ClassDef, scope: Scope) -> Iterator[tuple[str, Value]]:
        for line in node.body:
            if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
                continue
            kind, value = ast.unparse(line.annotation), line.value
            if "ClassVar" in kind or "KW_ONLY" in kind:
                continue
            if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
                given = {each.arg: each.value for each in value.keywords}
                if ast.unparse(given.get("init", value)) == "False":
                    continue
                made = given.get("default_factory")
                value = self._made(made, scope) if made else given.get("default")
            yield line.target.id, self._row(kind, value, scope)

    def _row(self, kind: str, value: ast.expr | None, scope: Scope) -> Value:
        if value is None:
            return [kind]
        default = self.value(value, scope)
        return kind if default is None else [kind, default]

    def _made(self, factory: ast.expr, scope: Scope) -> ast.expr:
        """The value that a default_factory makes, as an expression."""
        return factory.body if isinstance(factory, ast.Lambda) else ast.Call(factory, [], [])

    def _function(self, node: Function, scope: Scope) -> dict[str, Any]:
        its = node.args
        plain = [*its.posonlyargs, *its.args]
        blank: list[ast.expr | None] = [None] * (len(plain) - len(its.defaults))
        values = [*blank, *its.defaults, *its.kw_defaults]
        fields = {
            each.arg: self._row("", value, scope)
            for each, value in zip([*plain, *its.kwonlyargs], values, strict=True)
            if each.arg not in ("self", "cls")
        }
        row: dict[str, Any] = {"fields": fields, "call": len(its.kwonlyargs)}
        if node.name == "launch_command_parser":
            row["also"] = " ".join(_options(node))
        elif its.kwarg:
            row["open"] = True
        if its.kwarg and node.name in LOADERS:
            asked = {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant)}
            named = {name for name in asked if name.isidentifier()}
            row["also"] = " ".join(sorted(named - {"None", "True", "False", *fields}))
        return row

    def value(  # noqa: PLR0911, PLR0912 - one line for each form of an expression
        self, node: ast.expr, scope: Scope, depth: int = 8
    ) -> Value:
        """The value of an expression in plain JSON, or what stands for it."""
        unknown = {"$unknown": ast.unparse(node)[:60]}
        if not depth:
            return unknown

        def inner(each: ast.expr) -> Value:
            return self.value(each, scope, depth - 1)

        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None):
                return node.value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.List() | ast.Tuple():
                return [inner(each) for each in node.elts]
            case ast.Dict() if all(isinstance(key, ast.Constant) for key in node.keys):
                keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                return dict(zip(map(str, keys), map(inner, node.values), strict=True))
            case ast.Call(func=ast.Name(id="list" | "tuple"), args=[]):
                return []
            case ast.Call(func=ast.Name(id="dict" | "OrderedDict"), args=[], keywords=[]):
                return {}
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[]):
                found = self.find(name, scope[0])
                return {"$object": {"class": f"{self.library}.{name}"}} if found else unknown
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                sides = inner(left), inner(right)
                both = all(isinstance(side, int | float) for side in sides)
                return _OPERATORS[type(op)](*sides) if both else unknown
            case ast.Attribute(value=ast.Attribute() as member, attr="value"):
                return inner(member)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                return {"$name": f"torch.{name}"}
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                found = self.find(name, scope[0])
                if found is not None and isinstance(found[0], ast.ClassDef):
                    value = self._assigned(found[0].body, attribute)
                    return self.value(value, (found[1], found[0]), depth - 1) if value else unknown
            case ast.Name(id=name):
                for body in (scope[1].body if scope[1] else [], scope[0].tree.body):
                    if (value := self._assigned(body, name)) is not None:
                        return inner(value)
        return unknown

    def _assigned(self, body: Sequence[ast.stmt], name: str) -> ast.expr | None:
        """The last value that a name gets; None if conditions decide that are not known."""
        found: ast.expr | None = None
        for node in body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", 0)]
            if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                found = getattr(node, "value", None)
            elif isinstance(node, ast.If):
                parts = [self._assigned(part, name) for part in (node.body, node.orelse)]
                if parts == [None, None]:
                    continue
                if (holds := self._holds(node.test)) is None:
                    return None
                found = parts[not holds] or found
        return found

    def _holds(self, test: ast.expr) -> bool | None:
        text = ast.unparse(test)
        if least := re.fullmatch(r"is_torch_greater_or_equal_than_(\d+)_(\d+)", text):
            return tuple(self.torch) >= tuple(map(int, least.groups()))
        return True if text == "is_torch_available()" else None
