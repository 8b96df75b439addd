"""The Python tests, a folder per area, and the helpers that they share."""
