"""The part of the emulator that runs inside the program; see `path/sitecustomize.py`.

These modules import nothing but the standard library, PyTorch, and modules of this package that
do the same: the program's environment may have none of tuner's other packages.
"""
