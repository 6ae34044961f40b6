"""The code of notebooks: every character of it stands where it is said to stand."""

from __future__ import annotations

import ast
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from program_samples import FOLDER

from tuner.core.errors import InputError
from tuner.program.edit.notebook import cell_texts, code_cells, notebook_python, read_notebook


def notebook(*sources: object, **more: object) -> str:
    cells = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": s} for s in sources]
    return json.dumps({"cells": cells, "nbformat": 4, **more})


def python_of(*sources: object) -> str:
    return notebook_python(notebook(*sources), "n.ipynb").text


def written(raw: str) -> str:
    """What characters inside a JSON string mean."""
    return str(json.loads(f'"{raw}"'))


def meant(raw: str) -> str | None:
    try:
        return written(raw)
    except json.JSONDecodeError:
        return None


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=30), max_size=4),
    is_list=st.booleans(),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 0, 1, 4]),
)
def test_each_character_is_where_it_is_said_to_be(texts, is_list, ascii_only, indent):
    sources = [t.splitlines(keepends=True) if is_list else t for t in texts]
    cells = [
        {"source": "x = 1", "cell_type": "markdown"},
        *({"cell_type": "code", "source": s, "metadata": {"source": "y"}} for s in sources),
    ]
    text = json.dumps({"cells": cells}, ensure_ascii=ascii_only, indent=indent)
    found = list(code_cells(text, "n.ipynb"))
    wanted = [t for t in texts if t]
    assert len(found) == len(wanted)
    for cell, source in zip(found, wanted, strict=True):
        assert len(cell.starts) == len(source) + 2
        for n, character in enumerate(source):
            # A character is one, two, six or twelve: x, \\n, \\u00fc, \\ud83c\\udf70.
            at = cell.starts[n]
            assert character in {meant(text[at : at + length]) for length in (1, 2, 6, 12)}


@pytest.mark.parametrize("name", ["notebook.ipynb", "notebook_ascii.ipynb"])
def test_values_stand_in_the_file_as_they_are_read(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    sources = cell_texts(text)
    places = read_notebook(text, name)
    assert places
    for place in places:
        raw = text[place.start : place.end]
        line = sources[place.cell - 1].split("\n")[place.line - 1]
        assert written(raw.partition('\\n",')[0]).split("\n")[0] in line
        if place.value is not None and '", "' not in raw and '",\n' not in raw:
            assert ast.literal_eval(written(raw)) == place.value


def test_the_code_is_taken_and_not_what_looks_like_it():
    text = json.dumps(
        {
            "source": ["x = 1"],
            "metadata": {"cells": [{"source": "x = 2"}]},
            "cells": [
                {"cell_type": "markdown", "source": "x = 3"},
                {"source": "x = 3", "cell_type": "code", "outputs": [{"source": ["x = 3"]}]},
                {"cell_type": "raw", "source": "x = 3"},
            ],
        }
    )
    (place,) = read_notebook(text, "n.ipynb")
    assert text[: place.start].count("x = 3") == 1
    assert text[place.start] == "3"


@pytest.mark.parametrize("characters", ["süß", "🍰", '"\\"', "a\tb", "\u2028", "/"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_escapes_before_a_value_do_not_move_it(characters, ascii_only):
    source = f"t = {characters!r}; x = 4  # {characters!r}"
    text = json.dumps(
        {"cells": [{"cell_type": "code", "source": [source]}]}, ensure_ascii=ascii_only
    ).replace("/", "\\/")
    place = next(p for p in read_notebook(text, "n.ipynb") if p.path == ("x",))
    assert text[place.start : place.end] == "4"


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        ("!pip install x\nx = 1", ["x = 1"]),
        ("!pip install \\\n  trl peft\nx = 1", ["x = 1"]),
        ("%load_ext y\nx = 1", ["x = 1"]),
        ("?print\nx = 1", ["x = 1"]),
        ("print??\nx = 1", ["x = 1"]),
        ("files = !ls\nx = 1", ["x = 1"]),
        ("if x:\n    !ls\nx = 1", ["if x:", "x = 1"]),
        ("%%bash\nls\nx=2", []),
        ("\n%%bash\nif true\n  then ls; fi", []),
        ("%%time\nx = 1", ["x = 1"]),
        ("%%capture out\n!pip install x\nx = 1", ["x = 1"]),
        ('t = """\n!pip\n%x\n"""\nx = 1', ['t = """', "!pip", "%x", '"""', "x = 1"]),
        ('!a\nt = """\n!b\n"""', ['t = """', "!b", '"""']),
        ("x = (5\n% 3)", ["x = (5", "% 3)"]),
        ("x = 7 \\\n% 4  # it's \\\n!echo \"don't", ["x = 7 \\", "% 4  # it's \\"]),
        ("!a", []),
    ],
)
def test_what_is_no_python_is_taken_out_and_nothing_else(source, kept):
    python = python_of(source)
    ast.parse(python)
    assert len(python) == len(source) + 1
    assert [line for line in python.splitlines() if line.strip() not in ("", "pass", "0")] == kept


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"cells": 1}',
        '{"cells": [{"cell_type": "code"}]}',
        '{"cells": [{"cell_type": "code", "source": 1}]}',
        '{"cells": [{"cell_type": "code", "source": "\\ud83c = 1"}]}',
        '{"cells": [{"cell_type": "code", "source": "x = 1\n"}]}',
        "[" * 100_000,
    ],
)
def test_what_is_no_notebook_is_said_so(text):
    with pytest.raises(InputError, match=r"n\.ipynb"):
        read_notebook(text, "n.ipynb")


@pytest.mark.parametrize("broken", ["curl -X = = 1\n", "x = (", "x = 1\0", "(" * 1000])
def test_a_cell_that_cannot_be_parsed_is_left_out(broken):
    (place,) = read_notebook(notebook(broken, "x = 2"), "n.ipynb")
    assert (place.value, place.cell, place.line) == (2, 2, 1)


def test_a_key_that_is_there_twice_is_the_last_one():
    text = '{"cells": [{"cell_type": "code", "source": "x = 1", "source": ["x = ", "2"]}]}'
    (place,) = read_notebook(text, "n.ipynb")
    assert place.value == 2
    assert text[place.start : place.end] == "2"
    assert python_of() == ""
    assert read_notebook(notebook(""), "n.ipynb") == []
