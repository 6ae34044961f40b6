"""A standing zoo: famous programs as people start them, each run on an emulated GPU."""
