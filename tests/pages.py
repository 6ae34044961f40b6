"""What a browser would find in a piece of HTML."""

import json
from html.parser import HTMLParser


class Page(HTMLParser):
    """Its tags, attributes, addresses, texts, scripts, and the data in the first of them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self._inside = ""
        self.feed(text)
        self.sources = [value for name, value in self.attributes if name in ("src", "href")]
        self.handlers = [name for name, _ in self.attributes if name.startswith("on")]
        self.data = json.loads(self.scripts[0]) if self.scripts else None

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.extend(attrs)
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.texts.append(data)
