"""The folder that stands first on PYTHONPATH of an emulated program.

It has `sitecustomize` and nothing else, which could hide a module of the program.
"""
