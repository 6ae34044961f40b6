"""The plotting library that a report carries with it: plotly.js, its bundle of basic charts.

The whole plotly.js that comes with the Python package is 4.8 MB, of which a report uses scatter
traces only; the bundle that its makers publish for those is a quarter of it. The file and its
licence are those of https://www.npmjs.com/package/plotly.js-basic-dist-min, unchanged. To renew it:
`npm pack plotly.js-basic-dist-min`, both files into `page/vendor/`, both constants below.
"""

from __future__ import annotations

from importlib.resources import files

VERSION = "4.1.1"
"""Of the bundle: the same major version as the plotly.js that the Python package draws for."""
SHA256 = "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
"""Of `plotly-basic.min.js` as published."""


def plotlyjs() -> str:
    """The bundle as JavaScript text; its first lines name its version and licence (MIT)."""
    return (files("tuner.report") / "page/vendor/plotly-basic.min.js").read_text("utf-8")
