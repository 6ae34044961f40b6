"""Reads what classes and functions of a library take from its source, without importing it."""

from __future__ import annotations

import ast
import contextlib
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LOADERS = "from_pretrained|from_dict|get_config_dict|_get_config_dict|_from_config"
SOURCES: Mapping[str, tuple[str, str]] = {
    "transformers": (
        "training_args.py training_args_seq2seq.py trainer.py trainer_seq2seq.py modeling_utils.py "
        "utils/quantization_config.py configuration_utils.py models/auto/auto_factory.py "
        "models/auto/configuration_auto.py",
        r"(Seq2Seq)?Train(er|ingArguments)|(?!Auto|Pre[Tt]rained)[A-Z]\w+Config|"
        r"PreTrainedModel\.[a-z]+_checkpointing_enable|"
        rf"(Pre[Tt]rained\w+|Auto\w+|_BaseAuto\w+)\.({_LOADERS})",
    ),
    "trl": (
        "trainer/*_config.py trainer/*_trainer.py experimental/*/*_config.py "
        "experimental/*/*_trainer.py scripts/utils.py utils.py",
        r"[A-Z]\w*(Config|Trainer|Arguments)",
    ),
    "peft": (
        "config.py tuners/*/config.py tuners/*.py mapping*.py utils/other.py",
        r"[A-Z]\w*Config|get_peft_model|prepare_model_for_kbit_training",
    ),
    "accelerate": (
        "accelerator.py utils/dataclasses.py parallelism_config.py commands/launch.py",
        r"Accelerator|[A-Z]\w*(Config|Configuration|Kwargs|Plugin)|launch_command_parser",
    ),
    "torch": (
        "__init__.py utils/data/dataloader.py optim/*.py",
        r"compile|DataLoader|SGD|A?SGD|Ada\w+|(N|R|Sparse)Adam|RMSprop|Rprop|LBFGS|Muon",
    ),
    "bitsandbytes": ("optim/*.py", r"(?!Optimizer|Global|Mock)[A-Z]\w+"),
    "sentence_transformers": (
        "training_args.py trainer.py */training_args.py */trainer.py",
        r"\w+(TrainingArguments|Trainer)",
    ),
    "unsloth": (
        "models/loader.py models/llama.py models/vision.py trainer.py",
        r"Fast\w+(\.(from_pretrained|get_peft_model))?|Unsloth\w*Train\w+",
    ),
    "axolotl": ("utils/schemas/config.py", "AxolotlInputConfig"),
    "llamafactory": ("hparams/*.py", "(Model|Data|Training|Finetuning|Generating)Arguments"),
}
"""By library: the files that define what programs call, the most certain first, and the names."""

_CONTRARY = re.compile(r"self\.(\w+) = not self\.(\w+) if self\.\1 is None else self\.\1")
_TORCH = re.compile(r"is_torch_greater_or_equal_than_(\d+)_(\d+)")
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow,
}  # fmt: skip

Function = ast.FunctionDef
Value = Any  # plain JSON, {"$name": "torch.int8"}, {"$object": ...} or {"$unknown": "f()"}


@dataclass(eq=False)
class Source:
    """One module of a library; `names` are its classes, functions and imports."""

    path: Path
    tree: ast.Module
    names: dict[str, ast.stmt] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in _flat(self.tree.body):
            if isinstance(node, ast.ClassDef | Function):
                self.names[node.name] = node  # the last of its overloads
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:  # not the one of `except ImportError`
                    self.names.setdefault(alias.asname or alias.name, node)


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            for part in ("body", "orelse", "handlers"):
                yield from _flat(getattr(node, part, ()))


def _named(node: ast.ImportFrom, name: str) -> str:
    return next((each.name for each in node.names if (each.asname or each.name) == name), name)


def _options(node: ast.AST) -> set[str]:
    """The options of `add_argument`, with underscores."""
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    words = [n.value for c in calls for n in c.args if isinstance(n, ast.Constant)]
    return {str(w)[2:].replace("-", "_") for w in words if str(w).startswith("--")}


Scope = tuple[Source, ast.ClassDef | None]


@dataclass
class Reader:
    """Reads a library in its `folder`; `torch` is the release by which it chooses some defaults.

    A row of `rows` has the `fields` of its own: a type alone for a default of None, else a list of
    the type and the default, if any. One with `call` is no dataclass: its last `call` are keywords.
    """

    library: str
    folder: Path
    torch: Sequence[int]
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: dict[Path, Source | None] = field(default_factory=dict)

    def read(self) -> dict[str, dict[str, Any]]:
        """The rows of everything that `SOURCES` names."""
        files, wanted = SOURCES[self.library]
        for path in [path for each in files.split() for path in sorted(self.folder.glob(each))]:
            if (source := self.source(path)) is None:
                continue
            for name, node in source.names.items():
                if isinstance(node, Function) and re.fullmatch(wanted, name):
                    self._keep(name, node, (source, None))
                elif isinstance(node, ast.ClassDef):
                    self._named_in(node, source, wanted)
        return self.rows

    def _named_in(self, node: ast.ClassDef, source: Source, wanted: str) -> None:
        if re.fullmatch(wanted, node.name):
            self._class(node, source)
        for inner in node.body:
            if isinstance(inner, Function) and re.fullmatch(wanted, f"{node.name}.{inner.name}"):
                self._keep(f"{node.name}.{inner.name}", inner, (source, node))

    def _keep(self, name: str, node: Function, scope: Scope) -> None:
        """Keep what a function takes; in transformers all that loads a model is one row."""
        if node.args.vararg and node.args.kwarg and self.library != "transformers":
            return  # it hands on what it gets to its base
        row = self._function(node, scope)
        if re.fullmatch(_LOADERS, node.name) and self.library == "transformers":
            asked = {str(n.value) for n in ast.walk(node) if isinstance(n, ast.Constant)}
            names = {*row["fields"], *(one for one in asked if one.isidentifier())}
            row = self.rows.setdefault("from_pretrained", row)
            names |= {*row.get("also", "").split()}
            row["also"] = " ".join(sorted(names - {"None", "True", "False", *row["fields"]}))
        else:
            self.rows.setdefault(name, row)

    def source(self, path: Path) -> Source | None:
        """The module in a file; None if there is none, or none that this Python can parse."""
        if path not in self.sources:
            self.sources[path] = None
            with contextlib.suppress(OSError, SyntaxError, ValueError):
                self.sources[path] = Source(path, ast.parse(path.read_bytes()))
        return self.sources[path]

    def _class(self, node: ast.ClassDef, source: Source) -> None:
        for parent in node.bases:  # TRL has classes of the same name at two places
            found = self.find(ast.unparse(parent), source)
            if found is not None and found[0].name == node.name and found[0] is not node:
                self._class(*found)
        if node.name in self.rows:
            return
        row = self.rows[node.name] = dict[str, Any]()
        methods = {each.name: each for each in node.body if isinstance(each, Function)}
        marks = " ".join(map(ast.unparse, node.decorator_list))
        made, scope = methods.get("__init__"), (source, node)
        if made is not None:
            row |= self._function(made, scope)
            if made.args.vararg and made.args.kwarg:
                row = self.rows[node.name] = {"fields": row["fields"]}  # it hands on the others
        elif "dataclass" in marks or self.library == "axolotl":
            row["fields"] = dict(self._fields(node, scope))
        row["bases"] = [base for each in node.bases if (base := self._base(each, source))]
        after = methods["__post_init__"].body if "__post_init__" in methods else []
        settled = [_CONTRARY.fullmatch(ast.unparse(each)) for each in after]
        if any(settled):
            row["contrary"] = {each[1]: each[2] for each in settled if each}

    def _base(self, node: ast.expr, source: Source) -> str | None:
        name = ast.unparse(node).rpartition(".")[2]
        if name not in source.names:  # another name for it
            flat = [each for each in _flat(source.tree.body) if isinstance(each, ast.Assign)]
            other = _assigned(flat, name, self.torch)
            name = other.id if isinstance(other, ast.Name) else name
        found = self.find(name, source)
        if found is not None:
            self._class(*found)
            return f"{self.library}.{found[0].name}"
        node_of = source.names.get(name)
        if isinstance(node_of, ast.ImportFrom) and not node_of.level:
            root = str(node_of.module).partition(".")[0]
            return f"{root}.{_named(node_of, name)}" if root in SOURCES else None
        return None

    def find(self, name: str, source: Source) -> tuple[ast.ClassDef, Source] | None:
        """The class of a name, wherever in this library it is."""
        own, home = self._home(name, source)
        node = home.names.get(own) if home else None
        return (node, home) if home and isinstance(node, ast.ClassDef) else None

    def _home(self, name: str, source: Source, depth: int = 8) -> tuple[str, Source | None]:
        """The name that something has in the module that it is imported from, and this module."""
        node = source.names.get(name)
        if not isinstance(node, ast.ImportFrom):
            return name, source
        parts = node.module.split(".") if node.module else []
        if depth and (node.level or parts[:1] == [self.folder.name]):
            folder = source.path.parents[node.level - 1] if node.level else self.folder.parent
            there = folder.joinpath(*parts)
            for path in (there.with_suffix(".py"), there / "__init__.py"):
                if (other := self.source(path)) is not None:
                    return self._home(_named(node, name), other, depth - 1)
        return name, None

    def _fields(self, node: ast.ClassDef, scope: Scope) -> Iterator[tuple[str, Value]]:
        for line in node.body:
            if not isinstance(line, ast.AnnAssign) or not isinstance(line.target, ast.Name):
                continue
            kind, value = ast.unparse(line.annotation), line.value
            given: dict[str | None, ast.expr] = {}
            if isinstance(value, ast.Call) and ast.unparse(value.func).lower().endswith("field"):
                given = {each.arg: each.value for each in value.keywords}
                value = given.get("default", value.args[0] if value.args else None)
                if made := given.get("default_factory"):
                    value = made.body if isinstance(made, ast.Lambda) else ast.Call(made, [], [])
            is_made = "init" in given and ast.unparse(given["init"]) == "False"
            if not is_made and "ClassVar" not in kind and "KW_ONLY" not in kind:
                yield line.target.id, self._row(kind, value, scope)
            if isinstance(alias := given.get("alias"), ast.Constant):
                yield str(alias.value), kind

    def _row(self, kind: str, value: ast.expr | None, scope: Scope) -> Value:
        default = None if value is None else self.value(value, scope)
        return [kind] if value is None else kind if default is None else [kind, default]

    def _function(self, node: Function, scope: Scope) -> dict[str, Any]:
        its = node.args
        plain = [*its.posonlyargs, *its.args]
        blank: list[ast.expr | None] = [None] * (len(plain) - len(its.defaults))
        values = zip(
            [*plain, *its.kwonlyargs], [*blank, *its.defaults, *its.kw_defaults], strict=True
        )
        fields = {
            each.arg: self._row("", value, scope)
            for each, value in values
            if each.arg not in ("self", "cls")
        }
        row: dict[str, Any] = {"fields": fields, "call": len(its.kwonlyargs)}
        if its.kwarg:
            row["open"] = True
        # @deprecate_kwarg("tokenizer", new_name="processing_class") takes another name.
        marks = [m for m in node.decorator_list if isinstance(m, ast.Call) and m.args]
        old = {str(ast.literal_eval(m.args[0])) for m in marks if "_kwarg" in ast.unparse(m.func)}
        if old := old | (_options(node) if node.name == "launch_command_parser" else set()):
            row["also"] = " ".join(sorted(old))
        return row

    def value(  # noqa: PLR0911, PLR0912 - a case for each form
        self, node: ast.expr, scope: Scope, depth: int = 8
    ) -> Value:
        """The value of an expression in plain JSON, or what stands for it."""

        def inner(each: ast.expr) -> Value:
            return self.value(each, scope, depth - 1)

        match node:
            case _ if not depth:
                pass
            case ast.Constant(value=bool() | int() | float() | str() | None):
                return node.value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
            case ast.List() | ast.Tuple():
                return [inner(each) for each in node.elts]
            case ast.Dict() if all(isinstance(key, ast.Constant) for key in node.keys):
                pairs = zip(node.keys, node.values, strict=True)
                return {str(k.value): inner(v) for k, v in pairs if isinstance(k, ast.Constant)}
            case ast.Call(func=ast.Name(id=name), args=[], keywords=[]):
                if name in ("list", "tuple", "dict"):
                    return {} if name == "dict" else []
                if self.find(name, scope[0]):
                    return {"$object": {"class": f"{self.library}.{name}"}}
            case ast.BinOp(op=op) if type(op) in _OPERATORS:
                sides = inner(node.left), inner(node.right)
                if all(isinstance(side, int | float) for side in sides):
                    return _OPERATORS[type(op)](*sides)
            case ast.Attribute(value=ast.Attribute() as member, attr="value"):
                return inner(member)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                return {"$name": f"torch.{name}"}
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                found = self.find(name, scope[0])
                if found and (value := _assigned(found[0].body, attribute, self.torch)):
                    return self.value(value, (found[1], found[0]), depth - 1)
            case ast.Name(id=name):
                if scope[1] and (value := _assigned(scope[1].body, name, self.torch)):
                    return inner(value)
                own, home = self._home(name, scope[0])
                if home and (value := _assigned(home.tree.body, own, self.torch)):
                    return self.value(value, (home, None), depth - 1)
        return {"$unknown": ast.unparse(node)[:60]}


def _assigned(body: Sequence[ast.stmt], name: str, torch: Sequence[int]) -> ast.expr | None:
    """The last value that a name gets; None if a condition decides it that is not known."""
    found: ast.expr | None = None
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(each, ast.Name) and each.id == name for each in targets):
            found = getattr(node, "value", None)
        elif isinstance(node, ast.If):
            parts = [_assigned(part, name, torch) for part in (node.body, node.orelse)]
            if parts != [None, None]:
                test = ast.unparse(node.test)
                least = _TORCH.fullmatch(test)
                if least is None and test != "is_torch_available()":
                    return None
                holds = least is None or tuple(torch) >= tuple(map(int, least.groups()))
                found = parts[not holds] or found
    return found
