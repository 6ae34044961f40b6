"""`pruned.jsonl`: what a search did not try because it cannot fit, and why.

No trial ran, so it is not in the journal. It follows from the journal and the predictions: each
search writes it anew, and an earlier reason that no longer holds is kept as revived.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from tuner.core.records import Configuration
from tuner.searches.store import ResultsFolder, write_atomically


@dataclass(frozen=True, slots=True)
class Pruned:
    """A configuration that was held back, and the reason for people.

    `since` is the id of the trial after which it was, None before the first; `revived_by` is
    that of the trial which changed the verdict, None while the verdict stands.
    """

    configuration: Configuration
    reason: str
    since: str | None = None
    revived_by: str | None = None

    def to_dict(self) -> dict[str, object]:
        """JSON types only."""
        return {
            "configuration": self.configuration.to_dict(),
            "reason": self.reason,
            "since": self.since,
            "revived_by": self.revived_by,
        }


def write_pruned(folder: ResultsFolder, pruned: Iterable[Pruned]) -> None:
    """Replace `pruned.jsonl` in one step; one line for each. Raises `UnavailableError`."""
    lines = [json.dumps(entry.to_dict(), separators=(",", ":")) + "\n" for entry in pruned]
    write_atomically(folder.path / "pruned.jsonl", "".join(lines).encode("ascii"))
