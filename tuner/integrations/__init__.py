"""Callbacks that report each step of existing training code to its trial.

Outside a trial they do nothing.
"""

from tuner.integrations.reporting import Reporter, in_trial, report_step

__all__ = ["Reporter", "in_trial", "report_step"]
