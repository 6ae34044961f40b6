"""The user's training program: how it starts, its settings, and copies with other settings."""
