"""Terminal output: fields, tables, progress, JSON."""
