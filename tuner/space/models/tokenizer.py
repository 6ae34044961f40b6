"""Reads a tokenizer of transformers, without the network and without remote code.

In the process of `tuner.space.models.tokenizer_process` alone: what it reads may mean ill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuner.core.errors import InputError, UnavailableError
from tuner.space.models.catalogue import get_entry

HINT = (
    "give a folder with tokenizer.json and tokenizer_config.json, or fetch it first: "
    "hf download {name} --include 'tokenizer*' '*.jinja'"
)


MAX_FILE_BYTES = 256 << 20
"""Limit for one file of a tokenizer; the largest published one has 33 MB."""

_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")


def render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: object) -> str:
    """The text that the chat template makes of messages and, where it is a list, `tools`.

    Raises `ValueError` with the reason when the template refuses them.
    """
    try:
        text = tokenizer.apply_chat_template(
            messages, tools=tools if isinstance(tools, list) and tools else None, tokenize=False
        )
    except Exception as error:  # the template is a program, and may fail in any way
        raise ValueError(_reason(error)) from error
    return str(text)


def count(tokenizer: Any, texts: Sequence[str], *, special: bool) -> list[int]:
    """Tokens of each text; `special` adds those that the tokenizer puts around a text."""
    encoded = tokenizer(
        list(texts),
        add_special_tokens=special,
        return_attention_mask=False,
        truncation=False,
        padding=False,
        verbose=False,  # a text above the model's maximum is nothing to warn of here
    )
    return [len(ids) for ids in encoded["input_ids"]]


def load_here(name: str) -> Any:
    """The tokenizer in a folder, or the one of a model in the local Hugging Face cache.

    Names of the model catalogue stand for their hub id. Raises `InputError` for one that is
    broken or not there, `UnavailableError` when a library that it needs is not installed.
    """
    from transformers import AutoTokenizer  # seconds: only where texts are counted

    try:
        folder = Path(name).expanduser()
    except RuntimeError as error:  # an unknown ~user, or no home directory
        raise InputError(f"tokenizer {name!r}: {error}") from error
    if folder.exists() and not folder.is_dir():
        raise InputError(f"tokenizer {name!r} is a file", hint="give its folder")
    if folder.is_dir():
        check_files(folder)
    entry = None if folder.is_dir() else get_entry(name)
    source = str(folder) if folder.is_dir() else entry.hub_id if entry else name
    try:
        return AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise UnavailableError(f"tokenizer {name!r} needs a library: {_reason(error)}") from error
    except OSError as error:
        if folder.is_dir():
            raise InputError(f"folder {name!r} has no tokenizer: {_reason(error)}") from error
        raise InputError(
            f"tokenizer {name!r} is neither a folder nor in the local Hugging Face cache",
            hint=HINT.format(name=source),
        ) from error
    except Exception as error:  # RecursionError, and the bare class of the tokenizers library
        raise InputError(
            f"tokenizer {name!r} cannot be read: {_reason(error)}", hint=HINT.format(name=source)
        ) from error


def check_files(folder: Path) -> None:
    """Raise `InputError` for a pipe, a device or a huge file in the place of one of a tokenizer."""
    for pattern in _FILES:
        for path in folder.glob(pattern):
            if not path.is_file():
                raise InputError(f"{str(path)!r} is not a file")
            if path.stat().st_size > MAX_FILE_BYTES:
                raise InputError(
                    f"{str(path)!r} is larger than the {MAX_FILE_BYTES >> 20} MiB that a file of a "
                    "tokenizer may have"
                )


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
