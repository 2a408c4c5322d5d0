"""How a parameter of lower precision is rounded: to the nearest, stochastically, or with a compensation.

To the nearest, a step of less than half a unit in the last place is lost: weights of 1 in bfloat16 do not move by less
than 0.002. Rounded stochastically, x goes to one of its two neighbours, and to each with the probability that makes the
mean x. With a compensation, what rounding takes off is kept in a second tensor of the parameter's dtype, and added
before the next step ("kahan"). It is itself rounded stochastically: to the nearest, it would lose steps as the
parameter does, only 256 times smaller ones.

The random bits are a hash of integers, not a generator's: of a key (the seed's and the parameter's), the step, and the
row-major index of the element in the whole parameter. They are the same on every backend, for any number of threads, in
any order, and for a part of a parameter as for all of it. ``csrc/adafactor.cpp`` has the same functions.

Sources: Gupta et al. 2015 (arXiv:1502.02551) for stochastic rounding; Kahan 1965 (Communications of the ACM 8, page 40)
for the compensation; the constants of ``mix`` are C. Wellons' and TheIronBorn's (github.com/skeeto/hash-prospector).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

Rounding = Literal["nearest", "stochastic", "kahan"]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)

PIECE = 1 << 20
"""Elements that are rounded at a time, since the hash needs several times their memory."""

LOW = {torch.bfloat16, torch.float16}
"""The dtypes that are rounded to in more than one way."""

_WORD = 0xFFFFFFFF
_LONG = 0xFFFFFFFFFFFFFFFF
_FIRST, _SECOND = 0x21F0AAAD, 0x735A2D97


class Counter(NamedTuple):
    """Where the elements of a tensor are among all draws.

    Attributes:
        key: 64 bits, of the seed and the parameter.
        start: the index of the first element in the whole parameter.
        strides: what a step along each dim adds to the index.
    """

    key: int
    start: int
    strides: tuple[int, ...]


def key(seed: int, name: str) -> int:
    """64 bits of a seed and of what names the parameter.

    FNV-1a (Fowler, Noll and Vo) of the text "seed/name" in UTF-8.

    >>> hex(key(0, "embedding.weight"))
    '0x8bae60760354170d'
    """
    found = 0xCBF29CE484222325
    for byte in f"{seed}/{name}".encode("utf-8", "surrogatepass"):
        found = (found ^ byte) * 0x100000001B3 & _LONG
    return found


def counter(key: int, shape: Sequence[int]) -> Counter:
    """That of a whole parameter.

    >>> counter(7, (2, 3, 4))
    Counter(key=7, start=0, strides=(12, 4, 1))
    """
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return Counter(key, 0, tuple(reversed(strides)))


def mix(x: Any, salt: Any = 0) -> Any:
    """Another number below 2^32 for each one and each salt, every bit of which depends on every bit.

    Args:
        x: a number below 2^32, or an int64 tensor of them.
        salt: another.
    """
    x = x ^ (x >> 16)
    x = (x * _FIRST) & _WORD
    x = x ^ (x >> 15) ^ salt
    x = (x * _SECOND) & _WORD
    return x ^ (x >> 15)


def random_bits(at: Counter, t: float | Tensor, shape: Sequence[int], device: torch.device) -> Tensor:
    """32 random bits for each element of a tensor: int64, from 0 up to 2^32.

    Args:
        at: the tensor's place.
        t: the step, 0-d where the host does not know it.
        shape: the tensor's.
        device: where it is.
    """
    index: Tensor = torch.full((), at.start, dtype=torch.int64, device=device)
    for dim, (size, stride) in enumerate(zip(shape, at.strides, strict=True)):
        along = torch.arange(0, size * stride, stride, dtype=torch.int64, device=device)
        index = index + along.reshape([-1 if i == dim else 1 for i in range(len(shape))])
    last = at.start + sum((size - 1) * stride for size, stride in zip(shape, at.strides, strict=True))
    # One number for the upper halves wherever they are all the same.
    high = at.start >> 32 if at.start >> 32 == last >> 32 else index >> 32
    step: Any = t.to(torch.int64) if isinstance(t, Tensor) else int(t)
    first = mix(at.key & _WORD ^ step)
    second = mix(at.key >> 32 ^ first)
    first = mix(first ^ second ^ high)
    second = mix(second ^ first)
    found: Tensor = mix(index & _WORD ^ first, second)
    return found


def stochastic(x: Tensor, random: Tensor, dtype: torch.dtype) -> Tensor:
    """x, rounded up or down to dtype (bfloat16 or float16), each with the probability that makes the mean x.

    What dtype holds is kept, and so are inf and nan. Beyond the largest finite number is inf.

    The random bits are added below the last place that is kept, and what is there then is cut off: a number of which
    3/4 of a unit are cut off carries into the last place in 3 of 4 cases.

    Args:
        x: float32.
        random: of x's shape, see ``random_bits``.
        dtype: what is rounded to.
    """
    bits = x.contiguous().view(torch.int32).to(torch.int64)
    magnitude, sign = bits & 0x7FFFFFFF, bits & 0x80000000
    if dtype is torch.bfloat16:
        found = (magnitude + (random & 0xFFFF)) >> 16
    else:
        # In units of the last place: of the number's own binade, and of 2^-24 where float16 has no smaller one.
        exponent = magnitude >> 23
        significand = (magnitude & 0x7FFFFF) | (exponent > 0).to(torch.int64) << 23
        binade = exponent.clamp(min=113)
        below = 13 + binade - exponent
        # 31 random bits are enough: what is below them is cut off.
        significand = significand >> (below - 31).clamp(min=0, max=31)
        below = below.clamp(max=31)
        found = (significand + (random & ((1 << below) - 1))) >> below
        found = ((binade - 113 << 10) + found).clamp(max=0x7C00)
    halves = (found | sign >> 16).to(torch.int16).view(dtype)
    return torch.where(x.isfinite(), halves, x.to(dtype))


def store(
    p: Tensor, x: Tensor, comp: Tensor | None, at: Counter | None, t: float | Tensor, stay: Tensor | None
) -> None:
    """Round x to p: with a compensation where there is one, stochastically where there is a counter, else to nearest.

    Args:
        p: the parameter.
        x: what it should be, in the arithmetic's dtype; may be p itself, which is then as it should be.
        comp: the compensation: what x was made of beside p, and what p is not of x.
        at: p's place among the draws.
        t: the step.
        stay: a 0-d mask: where it is true, p and comp are kept. None is false.
    """
    if at is None:
        put(p, x, stay)
        return
    for target, value, beside, place in pieces(p, x, comp, at):
        bits = random_bits(place, t, target.shape, target.device)
        if beside is None:
            put(target, stochastic(value, bits, target.dtype), stay)
            continue
        rounded = value.to(target.dtype)
        lost = torch.where(rounded.isfinite(), value - rounded, 0)
        put(target, rounded, stay)
        put(beside, stochastic(lost, bits, target.dtype), stay)


def put(target: Tensor, value: Tensor, stay: Tensor | None) -> None:
    """Copy a value to a target, but for where a mask is true: selected, since 0 * nan is nan."""
    if stay is not None:
        target.copy_(torch.where(stay, target, value))
    elif value is not target:
        target.copy_(value)


def pieces(
    p: Tensor, x: Tensor, comp: Tensor | None, at: Counter
) -> Iterator[tuple[Tensor, Tensor, Tensor | None, Counter]]:
    """Views of at most PIECE elements."""
    if p.numel() <= PIECE:
        yield p, x, comp, at
        return
    rows = PIECE * p.shape[0] // p.numel()
    for i in range(0, p.shape[0], max(rows, 1)):
        place = slice(i, i + rows) if rows else i
        start = at.start + i * at.strides[0]
        inner = Counter(at.key, start, at.strides if rows else at.strides[1:])
        part = None if comp is None else comp[place]
        yield from pieces(p[place], x[place], part, inner)
