"""Somebody's training program: how it is started, the settings in it, and copies with others."""
