"""Adafactor for PyTorch: one core for every dialect. ``Adafactor`` has the signature of ``torch.optim.Adafactor``."""

from .dialects.torch import Adafactor

__all__ = ["Adafactor", "__version__"]
__version__ = "0.1.0"
