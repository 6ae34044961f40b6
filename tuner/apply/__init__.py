"""The chosen values back into the user's own files, byte for byte the same around them."""
