"""An installation without PyTorch, as far as predictions see it."""

import pytest


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timelines that ship answer, and nothing is traced."""
    for module in ("predictor", "traces", "compiling"):
        monkeypatch.setattr(f"tuner.predict.{module}.can_trace", lambda: False)
