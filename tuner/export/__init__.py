"""The chosen configuration as the settings of other tools."""

from tuner.export.formats import FORMATS, Exported, Subject, export

__all__ = ["FORMATS", "Exported", "Subject", "export"]
