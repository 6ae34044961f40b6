"""One function for each thing people do, the Python API and the command line."""
