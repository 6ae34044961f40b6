"""The first folder on PYTHONPATH of an emulated program.

It contains only `sitecustomize`: any other module could hide one of the program's.
"""
