"""Whether a program takes a value that its files say: a constant that nobody reads does nothing."""

from __future__ import annotations

import ast

from tuner.program.names import Script
from tuner.program.parsed import last_name
from tuner.program.program import Program
from tuner.program.settings import Setting, scripts_of


def is_taken(program: Program, setting: Setting) -> bool:
    """Whether the value is passed to a call, or its name is read somewhere in the scripts."""
    place, scripts = setting.location, scripts_of(program)
    if setting.word is not None or setting.source is None or place is None or not scripts:
        return True
    own = next((s for s in scripts if s.source is setting.source), None)
    if own is not None:
        node = own.node_at(place)
        if node is None or own.keyword_of(node) is not None:
            return True
    key, owner = (str(step) for step in ("", "", *place.path)[-1:-3:-1])
    return any(_reads(script, key, owner, own is not None) for script in scripts)


def _reads(script: Script, key: str, owner: str, is_name: bool) -> bool:
    """Whether a script reads `key`, or passes on the whole of `owner`.

    `is_name` is whether a name alone may be meant: those in a file of settings are keys.
    """
    for node, parent in script.parents.items():
        read = _read_key(node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and is_name:
            read = node.id
        if read and read == key:
            return True
        is_whole = not isinstance(parent, ast.Attribute | ast.Subscript)
        if read and read == owner and is_whole:
            return True
    return False


def _read_key(node: ast.AST) -> object:
    """The key of `x.key`, `x["key"]` and `x.get("key")`."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return getattr(node.slice, "value", None)
    if isinstance(node, ast.Call) and last_name(node.func) == "get" and node.args:
        return getattr(node.args[0], "value", None)
    return None
