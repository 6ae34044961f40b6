"""What the commands and the Python API do: plan, predict, search, choose. It prints nothing."""
