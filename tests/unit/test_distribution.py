"""The lists of long files name files, and those whose tests go apart share nothing."""

from pathlib import Path

import pytest
from distribution import APART, TOGETHER

ROOT = Path(__file__).parents[2]


def test_each_file_is_there_and_named_once():
    named = (*APART, *TOGETHER)
    assert len(set(named)) == len(named)
    assert [path for path in named if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("path", APART)
def test_tests_that_go_apart_share_no_fixture(path):
    text = (ROOT / path).read_text("utf-8")
    assert 'scope="module"' not in text
    assert 'scope="class"' not in text
