"""Tokens and passwords do not reach records, wherever a trial printed them."""

import string
from collections.abc import Iterator
from typing import Any

import pytest
from cli_samples import trial_of
from hypothesis import given
from hypothesis import strategies as st
from runner_bodies import measurement

from tuner.core.environment import LEAST_CHARS, MASK, masked, names_secret, secret_values
from tuner.core.outcome import Ending, Raised, classify
from tuner.core.records import Configuration

# Made up, each in the form of its kind.
KNOWN = [
    "hf_" + "aBcD" * 8,
    "sk-proj-" + "a1B2_" * 8,
    "ghp_" + "x9" * 18,
    "github_pat_" + "a1_" * 20,
    "glpat-" + "a1B2" * 5,
    "AKIA" + "ABCD" * 4,
    "xoxb-" + "123456-abcdef",
    "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSM",
]
IN_CONTEXT = [
    ("Authorization: Bearer {}", "PLANTED_TOKEN"),
    ("authorization='Basic {}'", "dXNlcjpwYXNz"),
    ("Authorization: {}", "planted-token"),
    ("wandb login: api key {} is wrong", "0123456789" * 4),
    ("could not reach https://me:{}@example.org/x", "hunter2"),
    ("could not reach https://{}@example.org/x", "planted0token0of0twenty"),
    ('{{"api_key": "{}"}}', "planted-key"),
    ("DB_PASSWORD={}", "correcthorse"),
]
PLAIN = [
    "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 47.40 GiB",
    "Asking to pad but the tokenizer has no padding token: set pad_token = '<|endoftext|>'",
    "KeyError: 'input_ids' at https://example.org:8080/a@b",
    "Qwen2TokenizerFast, commit 0123456789012345678901234567890123456789",
    "HF_HUB_ENABLE_HF_TRANSFER=1 and disk-usage-of-something-that-is-long",
]

# One that begins with "/" may name a file that exists.
values = st.text(string.ascii_letters + string.digits + "!#$%&+-.:=@^_~'\"\\", min_size=8)


def texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from texts_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_of(each)


@given(
    st.one_of(st.tuples(values, st.just(True)), st.tuples(st.sampled_from(KNOWN), st.just(False))),
    st.text(" abc\n", max_size=700),
    st.text(" abc\n", max_size=700),
    st.sampled_from(["log", "raised", "notes"]),
)
def test_no_secret_survives_in_a_record(planted, before, after, where):
    secret, is_variable = planted
    text = f"{before} {secret} {after}"
    known = secret_values({"HF_TOKEN": secret} if is_variable else {})
    ran = measurement().to_dict()
    ending = {
        "log": Ending(device="cpu", exit_code=1, log_tail=text),
        "raised": Ending(device="cpu", raised=(Raised(("builtins.ValueError",), text),)),
        "notes": Ending(device="cpu", measurement={**ran, "notes": [text]}),
    }[where]
    outcome = classify(ending.masked(known))
    record = trial_of(Configuration({"lora_rank": 8}), outcome).to_dict()
    assert not [found for found in texts_of(record) if secret in found]


@pytest.mark.parametrize(("text", "secret"), IN_CONTEXT)
def test_a_secret_is_known_by_what_stands_around_it(text, secret):
    found = masked(text.format(secret))
    assert MASK in found
    assert secret not in found
    assert masked(found) == found


@pytest.mark.parametrize("text", PLAIN)
def test_a_message_without_a_secret_stays(text):
    assert masked(text) == text


def test_variables_that_hold_secrets_are_known_by_their_names(tmp_path):
    secret = "HF_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY PGPASSWORD db_pass GITHUB_PAT OPENAIKEY"
    plain = "TOKENIZERS_PARALLELISM HF_TOKEN_PATH SSH_AUTH_SOCK PWD PATH AUTH_URL KEYBOARD"
    assert [name for name in secret.split() if not names_secret(name)] == []
    assert [name for name in plain.split() if names_secret(name)] == []
    assert secret_values({"HF_TOKEN": "x" * (LEAST_CHARS - 1)}) == frozenset()
    assert secret_values({"MY_KEY": str(tmp_path)}) == frozenset()
    assert "a%2Fb%20c%22defg" in secret_values({"MY_KEY": 'a/b c"defg'})
