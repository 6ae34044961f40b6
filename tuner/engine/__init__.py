"""Plan, predict, search, recommend: shared by commands and Python API. It prints nothing."""
