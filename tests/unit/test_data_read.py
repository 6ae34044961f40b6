"""Token lengths from JSONL files: columns, texts, conversations, and everything malformed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tuner.core.errors import InputError
from tuner.space import TokenLengths, data_file
from tuner.space.data_file import read_lengths
from tuner.space.models import guarded

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "role {{ m.content }} end {% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer that gives each word a token, and each text a first one."""
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("chat"), chat_template=CHAT_TEMPLATE)


def save_tokenizer(folder: Path, **options: Any) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", bos_token="<s>", **options
    )
    fast.save_pretrained(folder)
    return str(folder)


def write(folder: Path, *rows: object, name: str = "data.jsonl") -> Path:
    path = folder / name
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def problems_of(error: pytest.ExceptionInfo[InputError]) -> list[str]:
    return [str(problem) for problem in error.value.problems]


# --- what is read ----------------------------------------------------------------------------


def test_a_column_of_lengths(tmp_path: Path):
    path = write(tmp_path, {"n_tokens": 5}, "", {"n_tokens": 7.0, "x": None}, {"n_tokens": 0})
    found = read_lengths(path, length_column="n_tokens")
    assert found == TokenLengths.from_lengths([5, 7, 0])


def test_texts_get_the_special_tokens_of_the_tokenizer(tmp_path: Path, tokenizer: str):
    path = write(tmp_path, {"text": "one two three"}, {"text": ""})
    assert read_lengths(path, tokenizer=tokenizer) == TokenLengths.from_lengths([4, 1])


def test_several_text_columns_are_joined_as_they_are(tmp_path: Path, tokenizer: str):
    path = write(tmp_path, {"a": "one tw", "b": "o three", "text": "not this"})
    found = read_lengths(path, tokenizer=tokenizer, text_column=["a", "b"])
    assert found == TokenLengths.from_lengths([4])


def test_prompt_and_completion(tmp_path: Path, tokenizer: str):
    path = write(tmp_path, {"prompt": "one two", "completion": " three"})
    assert read_lengths(path, tokenizer=tokenizer).max == 4


def test_conversations_are_rendered_once_by_the_template(tmp_path: Path, chat_tokenizer: str):
    messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
    chat = write(tmp_path, {"messages": messages, "text": "not this"})
    assert read_lengths(chat, tokenizer=chat_tokenizer).max == 7  # and no first token added
    halves = write(tmp_path, {"prompt": messages[:1], "completion": messages[1:]})
    assert read_lengths(halves, tokenizer=chat_tokenizer).max == 7
    other = write(tmp_path, {"dialogue": messages})
    assert read_lengths(other, tokenizer=chat_tokenizer, text_column="dialogue").max == 7


def test_every_text_of_several_groups_is_counted(
    tmp_path: Path, tokenizer: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(data_file, "GROUP_EXAMPLES", 3)
    monkeypatch.setattr(data_file, "GROUP_CHARACTERS", 20)
    path = write(tmp_path, *({"text": "word " * n} for n in range(10)))
    found = read_lengths(path, tokenizer=tokenizer)
    assert found == TokenLengths.from_lengths(range(1, 11))


def test_byte_order_mark_and_windows_line_ends(tmp_path: Path):
    path = tmp_path / "windows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"n": 3}\r\n{"n": 4}')
    assert read_lengths(path, length_column="n").examples == 2


# --- malformed files -------------------------------------------------------------------------


def test_every_malformed_line_is_named(tmp_path: Path):
    path = write(
        tmp_path,
        {"n": 1},
        '{"n": 2',
        "[1, 2]",
        {"m": 3},
        {"n": -4},
        {"n": True},
        {"n": "5"},
        {"n": 1.5},
        "[" * 100_000,
        '{"n": ' + "9" * 5000 + "}",
        {"n": 2**40},
    )
    with pytest.raises(InputError) as error:
        read_lengths(path, length_column="n")
    found = problems_of(error)
    assert [text.split(":")[1] for text in found] == [str(n) for n in range(2, 12)]
    assert all(text.startswith(f"{path}:") for text in found)
    for text, part in zip(
        found,
        (
            "not JSON at column",
            "a list where an object is needed",
            "no column 'n' (there are: m)",
            "n is -4",
            "n is True",
            "n is a string",
            "n is 1.5",
            "nested too deeply",
            "not readable as JSON",
            "n is 1099511627776",
        ),
        strict=True,
    ):
        assert part in text


def test_malformed_bytes(tmp_path: Path):
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n": "\xff"}\n')
    with pytest.raises(InputError, match=r"bytes.jsonl:2: not UTF-8 at byte 8"):
        read_lengths(path, length_column="n")


def test_a_huge_line_is_skipped_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data_file, "MAX_LINE_BYTES", 1000)
    fits = '{"n": 1' + " " * 992 + "}"
    path = write(tmp_path, fits, '{"n": 2}' + " " * 9000, {"n": "last"})
    with pytest.raises(InputError) as error:
        read_lengths(path, length_column="n")
    first, second = problems_of(error)
    assert f"{path}:2: the line is longer" in first
    assert f"{path}:3: n is a string" in second


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": "hello"}, "messages is a string, and not a list of messages"),
        ({"messages": []}, "messages is an empty list"),
        ({"messages": ["hello"]}, "messages[0] is a string"),
        ({"messages": [{"content": "a"}]}, "messages[0] has no role"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "no tools here"),
        ({"text": "a"}, "no column 'messages'"),
    ],
)
def test_malformed_conversations(
    tmp_path: Path, chat_tokenizer: str, record: dict[str, Any], message: str
):
    good = {"messages": [{"role": "user", "content": "a"}]}
    path = write(tmp_path, good, record)
    with pytest.raises(InputError) as error:
        read_lengths(path, tokenizer=chat_tokenizer)
    assert [text.partition(": ")[0] for text in problems_of(error)] == [f"{path}:2"]
    assert message in problems_of(error)[0]


def test_malformed_texts(tmp_path: Path, tokenizer: str):
    path = write(tmp_path, {"text": "a"}, {"text": None}, '{"text": "\\ud800"}', {"Text": "b"})
    with pytest.raises(InputError) as error:
        read_lengths(path, tokenizer=tokenizer)
    null, half, name = problems_of(error)
    assert f"{path}:2: text is null" in null
    assert f"{path}:3: the text has half of a surrogate pair" in half
    assert "did you mean 'Text'?" in name


def test_conversations_need_a_chat_template(tmp_path: Path, tokenizer: str):
    path = write(tmp_path, {"messages": [{"role": "user", "content": "a"}]})
    with pytest.raises(InputError, match="has no chat template"):
        read_lengths(path, tokenizer=tokenizer)


@pytest.mark.parametrize("content", ["", "\n\n  \n"])
def test_a_file_without_examples(tmp_path: Path, content: str):
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match="holds no examples"):
        read_lengths(path, length_column="n")


def test_a_compressed_file_and_a_json_array_say_what_to_do(tmp_path: Path):
    packed = tmp_path / "data.jsonl.gz"
    packed.write_bytes(b"\x1f\x8b\x08\x00rest")
    with pytest.raises(InputError, match=r"compressed[\s\S]*gunzip"):
        read_lengths(packed, length_column="n")
    array = write(tmp_path, '[{"n": 1},', '{"n": 2}]')
    with pytest.raises(InputError, match=r"jq -c"):
        read_lengths(array, length_column="n")


def test_a_file_that_is_not_there_and_a_folder(tmp_path: Path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InputError, match="cannot be read"):
            read_lengths(path, length_column="n")


# --- arguments and tokenizers ----------------------------------------------------------------


def test_arguments_that_contradict_each_other(tmp_path: Path):
    path = write(tmp_path, {"n": 1, "text": "a", "ok": True})
    for options in ({"tokenizer": "x"}, {"text_column": "text"}):
        with pytest.raises(InputError, match="already holds"):
            read_lengths(path, length_column="n", **options)
    with pytest.raises(InputError, match="need a tokenizer"):
        read_lengths(path, text_column="text")
    with pytest.raises(InputError, match=r"is unknown[\s\S]*first line: n\)"):
        read_lengths(path)


@pytest.mark.parametrize("content", ["{", "{}", '{"added_tokens": [], "model": {"type": "No"}}'])
def test_a_broken_tokenizer(tmp_path: Path, content: str):
    folder = tmp_path / "broken"
    save_tokenizer(folder)
    (folder / "tokenizer.json").write_text(content)
    path = write(tmp_path, {"text": "a"})
    with pytest.raises(InputError, match="broken"):
        read_lengths(path, tokenizer=str(folder))


def test_a_tokenizer_that_is_not_there(tmp_path: Path):
    path = write(tmp_path, {"text": "a"})
    (tmp_path / "nothing").mkdir()
    for name, message in (
        ("no-such-tokenizer", "neither a folder nor in the local"),
        ("not a name!", "neither a folder nor in the local"),
        (str(tmp_path / "nothing"), "nothing"),
        (str(path), "is a file"),
    ):
        with pytest.raises(InputError, match=message):
            read_lengths(path, tokenizer=name)


# --- tokenizers that mean ill ------------------------------------------------------------------


def changed_tokenizer(folder: Path, **changes: object) -> str:
    name = save_tokenizer(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**content, **changes}))
    return name


BACKTRACKING = {
    "type": "Split", "pattern": {"Regex": "(((a+)+)+)+$"}, "behavior": "Isolated", "invert": False,
}  # fmt: skip
REPLACING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}


def test_a_pattern_that_never_ends_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(guarded, "ANSWER_WITHIN_S", 1.0)
    path = write(tmp_path, {"text": "a" * 5000 + "!"})
    name = changed_tokenizer(tmp_path / "t", pre_tokenizer=BACKTRACKING)
    with pytest.raises(InputError, match=r"took more than 1 s|ended the process"):
        read_lengths(path, tokenizer=name)


@pytest.mark.proof
def test_a_normalizer_that_takes_all_memory_is_given_up(tmp_path):
    path = write(tmp_path, {"text": "a" * 100})
    normalizer = {"type": "Sequence", "normalizers": [REPLACING] * 3}
    name = changed_tokenizer(tmp_path / "t", normalizer=normalizer)
    with pytest.raises(InputError, match=r"ended the process that was to count \(SIG"):
        read_lengths(path, tokenizer=name)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "too big|took more than|ended the process"),
        pytest.param(
            "{% for a in [1] * 100000000 %}{% for b in [1] * 99999 %}{% endfor %}{% endfor %}",
            "took more than|ended the process",
            marks=pytest.mark.proof,
        ),
        ("{{ 'a' * 10**11 }}", "MemoryError"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "RecursionError|recursion"),
    ],
)  # fmt: skip
def test_a_template_that_means_ill_is_an_error(tmp_path, monkeypatch, template, message):
    if "took" in message:
        monkeypatch.setattr(guarded, "ANSWER_WITHIN_S", 1.0)
    name = save_tokenizer(tmp_path / "t", chat_template=template)
    path = write(tmp_path, {"messages": [{"role": "user", "content": "x"}]})
    with pytest.raises(InputError, match=message):
        read_lengths(path, tokenizer=name)


@pytest.mark.parametrize("kind", ["pipe", "endless", "large", "nested"])
def test_a_tokenizer_that_is_no_file_is_not_read(tmp_path, kind):
    (tmp_path / "t").mkdir()
    file = tmp_path / "t" / "tokenizer.json"
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "endless":
        file.symlink_to("/dev/zero")
    elif kind == "large":
        file.touch()
        os.truncate(file, 10 << 30)
    else:
        file.write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"is not a file|is larger than|cannot be read"):
        read_lengths(write(tmp_path, {"text": "x"}), tokenizer=str(tmp_path / "t"))


def test_what_one_may_log_in_with_stays_here(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert "HF_TOKEN" not in guarded._environment()
