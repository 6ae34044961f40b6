"""The plotting library that reports carry: unchanged, licensed, and of the version drawn for."""

import hashlib
from importlib.resources import files

from tuner.report.report import SHA256, VERSION, plotlyjs


def test_the_bundle_is_the_published_one_and_comes_with_its_licence():
    vendored = files("tuner.report") / "page/vendor"
    data = (vendored / "plotly-basic.min.js").read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256
    assert f"plotly.js (basic - minified) v{VERSION}" in plotlyjs()[:200]
    assert "Permission is hereby granted" in (vendored / "LICENSE").read_text("utf-8")


def test_the_bundle_is_of_the_version_that_figures_are_made_for():
    from plotly.offline import get_plotlyjs_version

    assert VERSION.split(".")[0] == get_plotlyjs_version().split(".")[0]
