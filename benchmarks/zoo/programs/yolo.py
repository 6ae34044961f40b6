"""The `yolo` command of Ultralytics: python yolo.py ARGUMENTS."""

from ultralytics.cfg import entrypoint

entrypoint()
