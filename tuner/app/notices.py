"""What preparing a search says to whoever asked for it."""

from __future__ import annotations


class Notices:
    """Hears everything and tells nobody: the base of those that do."""

    def say(self, text: str) -> None:
        """What happened, in a sentence: nothing that the answer would not hold without it."""

    def warn(self, text: str) -> None:
        """What the user should hear even where nothing else is said."""

    def note(self, text: str) -> None:
        """Something about the space that its author may want to know."""


UNHEARD = Notices()
