"""The recommended configuration as other tools' settings."""

from tuner.program.formats.formats import FORMATS, Exported, ExportInput, export

__all__ = ["FORMATS", "ExportInput", "Exported", "export"]
