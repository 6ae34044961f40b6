"""Runs a program with stand-ins for its heavy libraries, and records what reaches `train()`.

The process of one reading: `python -P -m tuner.program.standins`, with a request on its input.
"""
