"""Hypothesis strategies for damaged files: edits of bytes, of lines, of words and of structure.

An example is a real file and a few edits, so that it shrinks to the one edit that matters.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import yaml
from hypothesis import strategies as st

from shared_cases.hostile import EXPRESSIONS, JSON_TEXTS, SCALARS, WHOLE_FILES, YAML_TEXTS, Raw

Edit = tuple[str, float, float, int]
"""What is done, two places from 0 to 1, and a number that chooses among values."""

_WORD = re.compile(rb"[\w.+*/%<>=!-]+")
_MARK = "raw7f3a{}raw7f3a"
_BYTES = (
    b"\x00", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r\n", b"\n", b"\t", b" ", b":", b"- ",
    b"[", b"]", b"{", b"}", b'"', b"'", b"&a ", b"*a", b"!!", b"%", b"#", b"9" * 400, b"\x7f",
    b"\\",
)  # fmt: skip
_STRUCTURE = ("replace", "remove", "rename", "copy", "add", "wrap", "swap")
_TEXT = ("bytes", "cut", "double", "end", "word", "line", "crlf", "indent")

number = st.integers(0, 2**16)
place = st.floats(0, 1, exclude_max=True, allow_subnormal=False)


def edits(kinds: Sequence[str], most: int = 4) -> st.SearchStrategy[list[Edit]]:
    one = st.tuples(st.sampled_from(kinds), place, place, number)
    return st.lists(one, min_size=1, max_size=most)


def damaged(
    files: Sequence[bytes], *, form: str, values: Sequence[object] = ()
) -> st.SearchStrategy[bytes]:
    """One of `files` after some edits.

    `form` is yaml (whose reader takes every value as text), typed yaml, json, jsonl or text.
    `values` come beside the hostile ones that suit every file of the form.
    """
    raws = YAML_TEXTS if form.endswith("yaml") else JSON_TEXTS
    pool = (*SCALARS, *raws, *values)
    text = st.builds(text_edited, st.sampled_from(files), edits(_TEXT, most=3))
    if form == "text":
        return text
    trees = [tree for file in files if (tree := parsed(file, form)) is not None]
    made = st.builds(
        lambda tree, changes: written(structure_edited(tree, changes, pool), form),
        st.sampled_from(trees),
        st.one_of(edits(_STRUCTURE, most=1), edits(_STRUCTURE)),
    )
    both = st.builds(text_edited, made, edits(_TEXT, most=1))
    whole = st.sampled_from(WHOLE_FILES)
    # In structure lies the most; whole files are few and soon used up.
    return st.one_of(made, made, made, text, text, both, st.one_of(whole, st.binary(max_size=200)))


# --- text ------------------------------------------------------------------------------------


def text_edited(data: bytes, changes: Sequence[Edit]) -> bytes:
    for kind, first, second, choice in changes:
        data = _text_edit(data, kind, (first, second), choice)
    return data


def _text_edit(  # noqa: PLR0911 - a case for each kind
    data: bytes, kind: str, places: tuple[float, float], choice: int
) -> bytes:
    start = int(places[0] * (len(data) + 1))
    length = 1 + int(places[1] * 40)
    if kind == "bytes":
        return data[:start] + _BYTES[choice % len(_BYTES)] + data[start + choice % 2 :]
    if kind == "cut":
        return data[:start] + data[start + length :]
    if kind == "double":
        return data[:start] + data[start : start + length] * (2 + choice % 5) + data[start:]
    if kind == "end":
        return data[:start]
    if kind == "word":
        words = list(_WORD.finditer(data))
        if not words:
            return data
        word = words[int(places[0] * len(words))]
        pool = (*EXPRESSIONS, *(s for s in SCALARS if isinstance(s, str | int | float)))
        new = str(_short(pool[choice % len(pool)])).encode("utf-8", "surrogatepass")
        return data[: word.start()] + new + data[word.end() :]
    if kind == "crlf":
        return data.replace(b"\n", b"\r\n" if choice % 2 else b"\r")
    lines = data.split(b"\n")
    at, other = (int(p * len(lines)) for p in places)
    if kind == "line":
        lines[at], lines[other] = lines[other], lines[at] if choice % 2 else lines[other]
    else:
        lines[at] = b" " * (choice % 9) + lines[at].lstrip()
    return b"\n".join(lines)


def _short(value: object) -> object:
    """Numbers of more digits than Python writes, cut."""
    return "9" * 4000 if isinstance(value, int) and abs(value) > 10**3999 else value


# --- structure -------------------------------------------------------------------------------


def parsed(data: bytes, form: str) -> Any:
    """The file as lists and mappings; None where it is none."""
    if form == "yaml":
        return yaml.load(data, yaml.BaseLoader)
    if form == "typed yaml":
        return yaml.safe_load(data)
    if form == "json":
        return json.loads(data)
    return [json.loads(line) for line in data.splitlines() if line.strip()]


def written(tree: Any, form: str) -> bytes:
    """The text of a tree, its `Raw` parts as they are."""
    raws: list[str] = []
    plain = _marked(tree, raws)
    if form.endswith("yaml"):
        text = yaml.dump(plain, Dumper=yaml.CSafeDumper, sort_keys=False, width=10**6)
    elif form == "jsonl" and isinstance(plain, list):
        text = "".join(json.dumps(line) + "\n" for line in plain)
    else:
        text = json.dumps(plain)
    for index, raw in enumerate(raws):
        mark = _MARK.format(index)
        text = text.replace(f'"{mark}"', raw).replace(mark, raw)
    return text.encode("utf-8", "surrogatepass")


def _marked(tree: Any, raws: list[str]) -> Any:
    if isinstance(tree, dict):
        return {_key(_marked(k, raws)): _marked(v, raws) for k, v in tree.items()}
    if isinstance(tree, list | tuple):
        return [_marked(item, raws) for item in tree]
    if isinstance(tree, int) and abs(tree) > 10**3999:
        tree = Raw("1" + "0" * 4000)
    if isinstance(tree, str) and not tree.isprintable() and tree:
        tree = Raw(json.dumps(tree))
    if isinstance(tree, Raw):
        raws.append(tree.text)
        return _MARK.format(len(raws) - 1)
    return tree


def _key(value: Any) -> Any:
    return value if isinstance(value, str) else str(value)


def structure_edited(tree: Any, changes: Sequence[Edit], pool: Sequence[object]) -> Any:
    """A copy of `tree` with the changes, each at the node that its place chooses."""
    root = {"": _copied(tree)}
    for kind, first, second, choice in changes:
        nodes = list(_nodes(root, ()))
        holder, key = nodes[int(first * len(nodes))]
        other = nodes[int(second * len(nodes))]
        _EDITS[kind](holder, key, other, _copied(pool[choice % len(pool)]))
    return root[""]


def _copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copied(value) for key, value in tree.items()}
    return [_copied(item) for item in tree] if isinstance(tree, list) else tree


def _nodes(tree: Any, above: tuple[int, ...]) -> Any:
    """Each value by what holds it and where."""
    if id(tree) in above or len(above) > 12:
        return
    if isinstance(tree, dict):
        items: Any = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    else:
        return
    for key, value in list(items):
        yield tree, key
        yield from _nodes(value, (*above, id(tree)))


def _replace(holder: Any, key: Any, other: Any, value: object) -> None:
    holder[key] = value


def _remove(holder: Any, key: Any, other: Any, value: object) -> None:
    if "" not in holder:
        del holder[key]


def _rename(holder: Any, key: Any, other: Any, value: object) -> None:
    if isinstance(holder, dict) and "" not in holder:
        name = value if isinstance(value, str) else str(_short(value))[:200]
        holder[name] = holder.pop(key)


def _copy(holder: Any, key: Any, other: Any, value: object) -> None:
    holder[key] = _copied(other[0][other[1]]) if "" not in other[0] else value


def _add(holder: Any, key: Any, other: Any, value: object) -> None:
    inside = holder[key]
    if isinstance(inside, list):
        inside.append(value)
    elif isinstance(inside, dict):
        inside[str(other[1])] = value
    else:
        holder[key] = [inside, value]


def _wrap(holder: Any, key: Any, other: Any, value: object) -> None:
    holder[key] = [holder[key]] if isinstance(other[1], int) else {str(other[1]): holder[key]}


def _swap(holder: Any, key: Any, other: Any, value: object) -> None:
    if "" not in holder and "" not in other[0]:
        there = _copied(other[0][other[1]])
        other[0][other[1]], holder[key] = _copied(holder[key]), there


_EDITS: dict[str, Callable[[Any, Any, Any, object], None]] = {
    "replace": _replace,
    "remove": _remove,
    "rename": _rename,
    "copy": _copy,
    "add": _add,
    "wrap": _wrap,
    "swap": _swap,
}


# --- expressions -----------------------------------------------------------------------------

_ATOMS = (
    "micro_batch", "lora_rank", "precision", "max_length", "effective_batch", "grad_accum", "x",
    "1", "0", "-1", "2.5", "1e30", "9", "64", "10**12", "'nf4'", "'a'", "true", "false", "(1, 2)",
    "lora_targets", "[nf4, bf16]", "1e-300", "0.1",
)  # fmt: skip
_SIGNS = (
    "+", "-", "*", "/", "//", "%", "**", "==", "!=", "<", "<=", ">", ">=", " and ", " or ", " in ",
    " not in ", " is ", "<<", ",", " if ", "=", "&&",
)  # fmt: skip


def expressions() -> st.SearchStrategy[str]:
    """Expressions over a space's names, right and wrong ones."""
    atom = st.sampled_from(_ATOMS)
    grown = st.recursive(
        atom,
        lambda inner: st.one_of(
            st.builds(lambda a, sign, b: f"({a}{sign}{b})", inner, st.sampled_from(_SIGNS), inner),
            st.builds(lambda a, sign, b: f"{a}{sign}{b}", inner, st.sampled_from(_SIGNS), inner),
            st.builds(lambda a, b, c: f"({a} if {b} else {c})", inner, inner, inner),
            st.builds(
                lambda f, a: f"{f}({a})", st.sampled_from(("max", "round", "abs", "y")), inner
            ),
            inner.map(lambda a: f"not {a}"),
            inner.map(lambda a: f"-{a}"),
        ),
        max_leaves=12,
    )
    return st.one_of(grown, grown, st.sampled_from(EXPRESSIONS), st.text(max_size=30))
