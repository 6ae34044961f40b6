"""Importing this registers the operators of bitsandbytes and their fake implementations.

Without touching a device, which bitsandbytes itself does when it is imported.
"""

from tuner.core.meanwhile import import_bitsandbytes

import_bitsandbytes()
