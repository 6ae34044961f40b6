"""Comments that name a value which is to be replaced: "# batch 4 fits"."""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Sequence

from tuner.program.edit.source import Edit, SourceFile

_COMMENT = re.compile(r"(?:^|(?<=\s))#[^\r\n]*", re.MULTILINE)
_WORD = re.compile(r"[a-z]{3,}")


def stale_comments(source: SourceFile, edits: Sequence[Edit]) -> Iterator[str]:
    """What still names the old value: "train.py:12 still says 4: # batch 4 fits".

    A comment counts on the line of the value, on those right above it, and anywhere in the file
    where a word of the key stands beside the value.
    """
    if source.path.suffix == ".json":
        return  # it has no comments
    text = source.data.decode("utf-8")
    breaks = [match.start() for match in re.finditer("\n", text)]
    comments = [
        (bisect.bisect_left(breaks, found.start()) + 1, found[0].strip())
        for found in _COMMENT.finditer(text)
    ]
    own_lines = {
        bisect.bisect_left(breaks, found.start()) + 1
        for found in re.finditer(r"^[ \t]*#", text, re.MULTILINE)
    }
    for edit in edits:
        old = edit.place.raw.strip("\"'")
        if not re.search(r"\w", old):
            continue
        line = bisect.bisect_left(breaks, edit.place.start) + 1
        near = {line}
        above = line - 1
        while above in own_lines:
            near.add(above)
            above -= 1
        names = set(_WORD.findall(str(edit.place.path[-1:]).lower()))
        for number, comment in comments:
            if not re.search(rf"(?<![\w.]){re.escape(old)}(?![\w]|\.\d)", comment):
                continue
            if number in near or names & set(_WORD.findall(comment.lower())):
                yield f"{source.path}:{number} still says {old}: {comment}"
