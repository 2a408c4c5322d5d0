"""The Adafactor of towhee: the class to put in its place. It is transformers', for any number of dims."""

from .transformers import Adafactor

__all__ = ["Adafactor"]
