"""Values into YAML, JSON and Python files: nothing but the values becomes different, or nothing."""

from __future__ import annotations

import ast
import json
import math
import os
from pathlib import Path

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tuner.app.applying import applying
from tuner.core.errors import InputError
from tuner.core.records import Configuration, KnobValue
from tuner.core.setup.schema import KnobSchema
from tuner.program.edit.notebook import notebook_python
from tuner.program.edit.place import NO_VALUE, read_number
from tuner.program.edit.write import MAX_BYTES, replace_files
from tuner.space import ApplyTarget, SearchSpace
from tuner.space.apply import read_key


def written(path: Path, **values: tuple[str, KnobValue]) -> bytes:
    """The bytes that the file would have; `values` have the key and the value of each parameter."""
    keys = {key: knob for knob, (key, _) in values.items()}
    terms = {knob: KnobSchema(knob, "text", "", "") for knob in values}
    table = {"own": ApplyTarget("own", keys)}
    space = SearchSpace("one", "my:code", apply=table, own_terms=terms)
    configuration = Configuration({knob: value for knob, (_, value) in values.items()})
    return applying(space, configuration, [str(path)]).change.after.sources[0].data


def apply(path: Path, key: str, value: KnobValue) -> bytes:
    return written(path, a_knob=(key, value))


def problem(path: Path, key: str, value: KnobValue = 7) -> str:
    """Why it is refused; nothing may have been touched then."""
    before = path.read_bytes()
    with pytest.raises(InputError) as refused:
        apply(path, key, value)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    assert refused.value.exit_code == 2
    return str(refused.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


def write(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


# What stands around the value: everything that real configurations have.
COMMENTS = st.sampled_from(["", "", "  # why", " # a\ttab, ünïcode 🙂", "   "])
OTHERS = st.sampled_from(
    [
        "lr: 2e-4",
        "name: ${run.name}-${now:%Y}",
        "quoted: 'it''s'",
        'double: "a # b: c\\n"',
        "twice: 1\ntwice: 2",
        "list: [1, two, 'three', {four: 4}]",
        "block:\n- a\n-   b",
        "text: |\n  several\n   lines\n\n",
        "folded: >-\n  several\n  lines",
        "base: &base {lr: 1e-3, wd: 0}",
        "empty:",
        "none: ~",
        "yes: no",
        "octal: 010",
        "date: 2026-01-01",
        "# only a comment\t",
        "",
        "   ",
        "? complex\n: key",
        '"a.b": 1',
        "multi: a plain\n  scalar",
        "ümläut: ß",
        "tagged: !custom {a: 1}",
    ]
)
ALIAS_USERS = ["used: *base", "merged:\n  <<: *base\n  wd: 1"]
VALUES = [
    ("4", 2),
    ("4", 16),
    ("'4'", 16),
    ('"4"', 16),
    ("2e-4", 3e-05),
    ("2e-4", 0.5),
    ("0.05", 0.1),
    ("true", False),
    ("False", True),
    ("no", True),
    ("off", True),
    ("bf16", "nf4"),
    ("'bf16'", "it's"),
    ('"bf16"', 'a "b" \\ c'),
    ("bf16", "no"),
    ("bf16", "16-mixed"),
    ("", 4),
    ("null", "adamw"),
    ("~", True),
    ("???", 8),
    ("[a, b]", ("c",)),
    ("['a', 'b']", ("c", "d", "e")),
    ("4", 4),
    ("true", True),
]


@st.composite
def yaml_files(draw):
    """(before, raw, after, key, value): a file with `raw` between two texts, and a new value."""
    raw, value = draw(st.sampled_from(VALUES))
    depth = draw(st.integers(0, 3))
    above = draw(st.lists(OTHERS, max_size=6))
    below = draw(st.lists(OTHERS, max_size=4))
    if any("&base" in text for text in above):
        below += draw(st.lists(st.sampled_from(ALIAS_USERS), max_size=2, unique=True))
    lines = [line for text in above for line in text.split("\n")]
    step = draw(st.sampled_from([1, 2, 4]))
    names = [f"level{i}" for i in range(depth)]
    lines += [f"{' ' * (step * i)}{name}:" for i, name in enumerate(names)]
    indent = " " * (step * depth)
    if draw(st.booleans()):
        lines.append(f"{indent}sibling: 1")
    blank = " " * draw(st.integers(1, 3)) if raw else ""
    before = "\n".join([*lines, f"{indent}target:{blank}"])
    after = "\n".join([draw(COMMENTS), *(line for text in below for line in text.split("\n"))])
    if draw(st.booleans()):
        after += "\n"
    if draw(st.booleans()):
        before, after = before.replace("\n", "\r\n"), after.replace("\n", "\r\n")
    if draw(st.booleans()):
        before = "\ufeff" + before
    return before, raw, after, ".".join([*names, "target"]), value


def events(text: str) -> list[tuple]:
    """What YAML says of a text, without marks: PyYAML's parser, which `apply` does not use."""
    names = ("anchor", "tag", "implicit", "value", "style")
    return [
        (type(e).__name__, *(getattr(e, n, None) for n in names))
        for e in yaml.parse(text, Loader=yaml.SafeLoader)
    ]


def is_yaml(text: str) -> bool:
    try:
        return bool(list(yaml.compose_all(text, Loader=yaml.SafeLoader)))
    except yaml.YAMLError:
        return False


@settings(max_examples=300)
@given(yaml_files())
def test_yaml_is_equal_outside_the_value(folder, made):
    before, raw, after, key, value = made
    text = before + raw + after
    assume(is_yaml(text))  # an anchor that is defined twice is not
    path = write(folder, text)
    changed = apply(path, key, value).decode()
    assert path.read_bytes() == text.encode()  # a plan writes nothing
    assert changed.startswith(before)
    assert changed.endswith(after)
    middle = changed[len(before) : len(changed) - len(after)]
    assert "\n" not in middle
    quoted = raw[:1] in ("'", '"')
    expected = str(value) if quoted and not isinstance(value, str) else value
    if isinstance(value, tuple):
        assert yaml.safe_load(middle) == list(value)
    elif isinstance(value, float):
        assert yaml.safe_load(middle) == pytest.approx(value)
    else:
        assert yaml.safe_load(middle) == expected
    assert middle.strip()[:1] == raw[:1] or not quoted
    if not isinstance(value, tuple):
        old, new = events(text), events(changed)
        assert len(old) == len(new)
        differing = [(o, n) for o, n in zip(old, new, strict=True) if o != n]
        assert len(differing) <= 1


@settings(max_examples=200)
@given(st.text(alphabet="ab:\n -[]{}&*!|>'\"#,?%<\r\t12", max_size=40), st.sampled_from([7, "x"]))
@example("a: {b: }", 7)
@example("a: ''", "x")
@example("a: b", "x")
@example("a:\n", 7)
@example("- a: 1\n- a: 2", 7)
def test_any_text_is_changed_in_one_value_or_refused(folder, text, value):
    path = write(folder, text)
    try:
        changed = apply(path, ".a", value)
    except InputError:
        assert path.read_bytes() == text.encode()
        return
    if changed != text.encode():
        old, new = events(text), events(changed.decode())
        differing = [n for o, n in zip(old, new, strict=True) if o != n]
        assert [event[4] for event in differing] == [str(value)]


def test_merges_beyond_what_people_write_are_refused(tmp_path):
    """Each of a chain brings in the one before it; or a few thousand lines stand for gigabytes."""
    chain = [f"m{n}: &m{n}\n  <<: [*m{n - 1}]\n" for n in range(1, 300)]
    deep = "batch: 1\nm0: &m0 {z: 1}\n" + "".join(chain)
    bomb = ["batch: 1\na0: &a0 [x]\n"]
    bomb += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 60)]
    for text in (deep, "".join(bomb)):
        assert "more than 10000 values" in problem(write(tmp_path, text), "batch")


@pytest.mark.parametrize(
    ("text", "key", "reason"),
    [
        ("a: &x {c: 4}\nb: *x\n", "a.c", NO_VALUE),
        ("a: &x {c: 4}\nb: *x\n", "b.c", NO_VALUE),
        ("a: &x {c: 4}\nb: {<<: *x, d: 1}\n", "b.c", NO_VALUE),
        ("a: &x {c: 4}\ny: &y {e: 1}\nb: {<<: [*x, *y]}\n", "b.e", NO_VALUE),
        ("a: 1\nb: 2\na: 3\n", "a", "is there 2 times: line 1 (a), line 3 (a)"),
        ("t: {a: 1}\nu: 1\nt: {b: 1}\n", "t.a", NO_VALUE),
        ("t: {a: 1}\nu: {a: 2}\n", ".a", "is there 2 times: line 1 (t.a), line 2 (u.a)"),
        ("a: 1\n---\na: 2\n", "a", "is there 2 times"),
        ("a: ${b}\nb: 4\n", "a", NO_VALUE),
        ("a: '{{ b }}'\n", "a", NO_VALUE),
        ("a: |\n  4\n", "a", NO_VALUE),
        ("a: 4\n  5\n", "a", NO_VALUE),
        ("a: !!int 4\n", "a", NO_VALUE),
        ("a: {b: 4}\n", "a", NO_VALUE),
        ("a: [b, 4]\n", "a", "the number 7 can't take its place"),
        ("a: true\n", "a", "says true, kept: the number 7 can't take its place"),
        ("a: auto\n", "a", "says auto, kept: the number 7 can't take its place"),
        ("a: [1, 2\n", "a", "config.yaml:2: broken YAML"),
        ("a: 1\t# tab\n", "a", "broken YAML"),
        ("b: 1\n", "a", "not set there: a_knob = 7"),
        ("", "a", "not set there: a_knob = 7"),
    ],
)
def test_yaml_that_is_refused(tmp_path, text, key, reason):
    assert reason in problem(write(tmp_path, text), key)


@pytest.mark.parametrize(
    ("text", "value", "reason"),
    [
        ("a: 4\n", True, "says 4, kept: True can't take its place"),
        ("a: 4\n", "nf4", "says 4, kept: the text 'nf4' can't take its place"),
        ("a: 4\n", ("b", "c"), "says 4, kept: a list can't take its place"),
        ("a:\n- b\n- c\n", ("b", "d"), NO_VALUE),
    ],
)
def test_other_types_are_refused(tmp_path, text, value, reason):
    assert reason in problem(write(tmp_path, text), "a", value)


def test_equal_values_are_left_as_they_are_written(tmp_path):
    for raw, value in [("0004", 4), ("[ b,c ]", ("b", "c")), ("\n- b\n- c", ("b", "c"))]:
        path = write(tmp_path, f"a: {raw}\n")
        assert (apply(path, "a", value) == path.read_bytes()) == (raw != "0004")
    assert apply(write(tmp_path, "a: 16.0\n"), "a", 16) == b"a: 16.0\n"
    assert apply(write(tmp_path, "a: 1.0\n"), "a", 16) == b"a: 16.0\n"
    assert apply(write(tmp_path, "a: YES\n"), "a", False) == b"a: NO\n"


JSON = '{\n\t"train": {"batch":4, "lr": 2e-4},\n\t"name": "a\\/b", "flags": [true, "x"]\n}'


def test_json_with_tabs(tmp_path):
    path = write(tmp_path, JSON, "ds.json")
    assert apply(path, "train.batch", 8) == JSON.replace(":4", ":8").encode()
    assert apply(path, "name", 'c"') == JSON.replace('"a\\/b"', '"c\\""').encode()
    assert json.loads(apply(path, "train.lr", 1e-05))["train"]["lr"] == 1e-05
    assert "broken JSON" in problem(write(tmp_path, "{'a': 1}", "ds.json"), "a")


PYTHON = '''\
"""Ein Skript für die Größe."""
import os
MAX_SEQ_LENGTH = 1024  # tokens
TRAINING_CONFIG = {
    "per_device_train_batch_size": 4, "ä": 1,   # pro GPU
    'optim': 'adamw_torch',
    "bf16": True, "lr": 2e-4, "eval": None,
}
TRAINING_CONFIG["late"] = 3
LORA_CONFIG = dict(r=8, target_modules=["q_proj", "v_proj"])
a = b = 5
left, right = 1, 2
class Config:
    batch: int = 4
    size: int = field(default=3)
def train(lr=1e-4, *, rank=8):
    args = TrainingArguments(gradient_accumulation_steps=2, logging_steps=os.cpu_count())
    if rank:
        x = 1
    else:
        x = 2
parser.add_argument("-b", "--batch-size", type=int, default=16)
'''


@pytest.mark.parametrize(
    ("key", "value", "old", "new"),
    [
        ("MAX_SEQ_LENGTH", 2048, "= 1024", "= 2048"),
        ('TRAINING_CONFIG["per_device_train_batch_size"]', 2, 'size": 4', 'size": 2'),
        ("TRAINING_CONFIG.optim", "it's", "'adamw_torch'", '"it\'s"'),
        ("TRAINING_CONFIG.optim", "sgd", "'adamw_torch'", "'sgd'"),
        ("TRAINING_CONFIG.bf16", False, '"bf16": True', '"bf16": False'),
        ("TRAINING_CONFIG.lr", 3e-05, "2e-4", "3.0e-05"),
        ("TRAINING_CONFIG.eval", "x", "None", '"x"'),
        ("TRAINING_CONFIG.late", 4, "= 3", "= 4"),
        ("LORA_CONFIG.r", 16, "r=8", "r=16"),
        (".dict.r", 16, "r=8", "r=16"),
        (".target_modules", ("o_proj",), '["q_proj", "v_proj"]', '["o_proj"]'),
        ("right", 3, "1, 2\n", "1, 3\n"),
        ("Config.batch", 8, "batch: int = 4", "batch: int = 8"),
        (".size", 8, "default=3", "default=8"),
        ("train.rank", 4, "rank=8", "rank=4"),
        (".TrainingArguments.gradient_accumulation_steps", 4, "steps=2", "steps=4"),
        (".args.gradient_accumulation_steps", 4, "steps=2", "steps=4"),
        ("batch_size", 4, "default=16", "default=4"),
    ],
)
def test_python_is_equal_outside_the_value(tmp_path, key, value, old, new):
    newline = ("\n", "\r\n", "\r")[len(key) % 3]
    text, old, new = (t.replace("\n", newline) for t in (PYTHON, old, new))
    assert text.count(old) == 1
    path = write(tmp_path, text, "train.py")
    changed = apply(path, key, value)
    assert changed == text.replace(old, new).encode()
    ast.parse(changed)


@pytest.mark.parametrize("suffix", ["py", "json"])
def test_half_a_character_is_written_nowhere(tmp_path, suffix):
    path = write(tmp_path, 'a = "x"\n' if suffix == "py" else '{"a": "x"}', f"file.{suffix}")
    assert r"would become '\ud800', which UTF-8 cannot say" in problem(path, "a", "\ud800")


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("train.x", "is there 2 times"),
        (".logging_steps", "is computed"),
        ("TRAINING_CONFIG", NO_VALUE),
        (".target_modules", "the number 7 can't take its place"),
    ],
)
def test_python_that_is_refused(tmp_path, key, reason):
    assert reason in problem(write(tmp_path, PYTHON, "train.py"), key)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a = f'{b}'\n", "is computed"),
        ("a = 'x' 'y'\n", NO_VALUE),
        ("a = '''x'''\n", NO_VALUE),
        ("a = b'x'\n", NO_VALUE),
        ("a = 1\na += 1\n", "is there 2 times"),
        ("CONFIG = {'a': 1}\nCONFIG.update(a=2)\n", "is there 2 times"),
        ("CONFIG = {'a': 1}\nCONFIG['a'] = 2\n", "is there 2 times"),
        ("a = (\n", "broken Python"),
        ("a = 1\0", "broken Python"),
        ("# coding: utf-16\na = 'y'\n", "it says that it is utf-16"),
        (
            "# coding: latin-1\na = 'y'  # \N{GREEK SMALL LETTER ALPHA}\n",
            "it says that it is iso-8859-1",
        ),
        ("# coding: nothing\na = 'y'\n", "unknown encoding"),
    ],
)
def test_python_values_that_are_no_plain_literals(tmp_path, text, reason):
    assert reason in problem(write(tmp_path, text, "train.py"), ".a", "x")


@settings(max_examples=50)
@given(
    st.lists(
        st.sampled_from(
            [
                "x = 'ü' ; y = 2",
                "# 🙂 comment\t",
                "def f(a=1, *b, c: int = 2, **d): return g(h=a)",
                "z = {'k': [1, 2, {'t': 'v'}], **y}",
                "\x0cpage = 1",
                "s = '''two\nlines'''",
                "if x: w = 1",
                "v: int",
                "async def k(): await m(n=1)",
                "match x:\n    case 1: q = 3",
            ]
        ),
        max_size=5,
    ),
    st.sampled_from([("4", 16), ("2e-4", 0.5), ("'a'", "b"), ("True", False), ("-1", 3)]),
    st.sampled_from(
        ["target = {}", "CONFIG = dict(a='ä', target={})", "C = {{'ö': 1, 'target': {}}}"]
    ),
    st.sampled_from(["\n", "\r\n"]),
)
def test_generated_python_changes_in_one_literal(folder, lines, values, form, newline):
    raw, value = values
    marked = form.format("\0")
    text = newline.join([*lines, marked, *lines]).replace("\n", newline).replace("\r\r", "\r")
    before, after = text.split("\0")
    path = write(folder, before + raw + after, "train.py")
    changed = apply(path, ".target", value).decode()
    assert changed.startswith(before)
    assert changed.endswith(after)
    assert ast.literal_eval(changed[len(before) : len(changed) - len(after)]) == value


def test_a_value_that_is_passed_on_is_written_where_it_stands(tmp_path):
    text = "CONFIG = {'batch': 4}\nTrainer(batch=CONFIG['batch'])\nOther(steps=CONFIG['batch'])\n"
    path = write(tmp_path, text, "train.py")
    assert apply(path, ".batch", 8) == text.replace("4", "8").encode()
    assert "is computed" in problem(path, ".steps")


def test_a_place_gets_one_value(tmp_path):
    path = write(tmp_path, "batch: &n 4\naccum: *n\n")
    assert written(path, one=("batch", 8), two=("accum", 8)) == b"batch: &n 8\naccum: *n\n"
    with pytest.raises(InputError, match="sets something else too, which is to get another value"):
        written(path, one=("batch", 8), two=("accum", 2))


def test_files_that_are_no_configurations(tmp_path):
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("a: ä\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"latin\.yaml:1: not text in UTF-8"):
        apply(latin, "a", 1)
    for name, reason in [("x.ini", "is not a program"), ("none.yaml", "cannot be read")]:
        if name == "x.ini":
            (tmp_path / name).write_text("a = 1\n")
        with pytest.raises(InputError, match=reason):
            apply(tmp_path / name, "a", 1)


def test_hard_links_and_read_only_files_are_refused(tmp_path):
    path = write(tmp_path, "a: 1\n")
    path.chmod(0o444)
    assert "is read-only" in problem(path, "a")
    path.chmod(0o644)
    os.link(path, tmp_path / "other.yaml")
    with pytest.raises(InputError, match="has 2 hard links"):
        apply(path, "a", 2)


def test_replacing_keeps_mode_and_links_and_makes_backups(tmp_path):
    path = write(tmp_path, "a: 1\n")
    path.chmod(0o640)
    link = tmp_path / "link.yaml"
    link.symlink_to(path)
    backups = [
        replace_files({link: (b"a: 1\n", b"a: 2\n")})[link],
        replace_files({link: (b"a: 2\n", b"a: 3\n")})[link],
    ]
    assert link.is_symlink()
    assert path.read_bytes() == b"a: 3\n"
    assert path.stat().st_mode & 0o777 == 0o640
    assert [b.read_bytes() for b in backups] == [b"a: 1\n", b"a: 2\n"]
    assert len(set(backups)) == 2
    assert len(list(tmp_path.iterdir())) == 4


def test_a_file_that_changed_meanwhile_is_not_overwritten(tmp_path):
    one, two = write(tmp_path, "a: 1\n"), write(tmp_path, "b: 1\n", "two.yaml")
    with pytest.raises(InputError, match="changed meanwhile by another program"):
        replace_files({one: (b"a: 1\n", b"a: 2\n"), two: (b"other", b"b: 2\n")})
    assert (one.read_bytes(), two.read_bytes()) == (b"a: 1\n", b"b: 1\n")
    assert len(list(tmp_path.iterdir())) == 2


def test_when_the_second_file_fails_the_first_is_put_back(tmp_path, monkeypatch):
    from tuner.core.errors import UnavailableError

    one, two = write(tmp_path, "a: 1\n"), write(tmp_path, "b: 1\n", "two.yaml")
    replace = Path.replace

    def failing(self, target):
        if Path(target).name == "two.yaml":
            raise OSError(28, "No space left on device", str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing)
    with pytest.raises(UnavailableError, match="No space left"):
        replace_files({one: (b"a: 1\n", b"a: 2\n"), two: (b"b: 1\n", b"b: 2\n")})
    assert (one.read_bytes(), two.read_bytes()) == (b"a: 1\n", b"b: 1\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.yaml", "two.yaml"]


@pytest.mark.parametrize(
    "text", ["", ".", "a..b", "a.", "a[", "a[x]", "a b", "[0]b", ".[", "a.[0]"]
)
def test_what_is_no_key(text):
    with pytest.raises(InputError, match="is not a key"):
        read_key(text)


@pytest.mark.parametrize("text", ["a", ".a.b", "a[0].b-c", 'a["b.c"].d', "a['b']", '["x y"][3]'])
def test_keys_are_shown_as_they_are_read(text):
    assert read_key(str(read_key(text))) == read_key(text)


def test_a_number_of_more_digits_than_python_reads_is_no_number():
    assert math.isnan(read_number("9" * 5000))
    assert read_number("9" * 4000) == int("9" * 4000)


# -- notebooks ----------------------------------------------------------------------------------


def notebook(*sources: str, shown: str = "") -> str:
    cells = [
        {"cell_type": "code", "source": source, "outputs": [{"data": {"image/png": shown}}]}
        for source in sources
    ]
    return json.dumps({"cells": cells, "nbformat": 4})


def test_a_cell_of_many_lines_for_the_shell(tmp_path):
    number = 400
    cell = "!pip install 'a package\n" * number + "batch = 4\n"
    python = notebook_python(notebook(cell), "run.ipynb").text
    assert ast.parse(python).body[-1].lineno == number + 1


def test_what_cells_have_shown_does_not_count_as_code(tmp_path):
    shown = "A" * (MAX_BYTES + 1)
    path = write(tmp_path, notebook("batch = 4", shown=shown), "run.ipynb")
    assert b"batch = 9" in apply(path, "batch", 9)
    path.write_text(notebook("batch = 4", "# " + shown))
    assert f"more than {MAX_BYTES} characters of code" in problem(path, "batch")
