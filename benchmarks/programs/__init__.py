"""Programs as people write them, each run for three steps on an emulated GPU."""
