"""The demonstration `adafactor train` runs: a small byte-level transformer, its text and its loop, in plain PyTorch.

No other part of the library imports this package.
"""
