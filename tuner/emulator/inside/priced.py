"""Puts pricing to work in an emulated process."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from tuner.emulator.rates import gpu_from_dict


def price_operators(mode: Any, rates: Mapping[str, Any]) -> Any | None:
    """Have all that runs priced, from now on, at the rates of a GPU type (`gpu_to_dict`).

    `mode` shows operators to its `observer`, and calls `before` before each. None in an environment
    without numpy, which the rooflines need: memory is emulated there, and time is not.
    """
    if find_spec("numpy") is None:
        return None
    from tuner.emulator.inside.core import DeviceCore
    from tuner.emulator.inside.pricing import Pricer
    from tuner.emulator.inside.triton_launches import watch

    pricer = Pricer(gpu_from_dict(rates), DeviceCore())
    mode.observer, mode.before = pricer.note, pricer.before
    watch(pricer)
    return pricer
