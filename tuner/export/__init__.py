"""The chosen configuration as the settings of other tools."""

from tuner.export.formats import FORMATS, Exported, ExportInput, export

__all__ = ["FORMATS", "ExportInput", "Exported", "export"]
