"""One module for each system whose Adafactor is matched: its own arguments and defaults, on the one core."""
