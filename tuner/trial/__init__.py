"""Runs one trial, on a device or an emulated one."""
