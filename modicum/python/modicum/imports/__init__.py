"""Readers of other programs' checkpoints. They need no torch and execute nothing they read."""
