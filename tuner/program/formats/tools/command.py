"""The arguments of a training script."""

from __future__ import annotations

from tuner.program.formats.format import Format

FORMAT = Format(lambda chosen, model: {}, suffix=".txt", use="the arguments of a training script")
