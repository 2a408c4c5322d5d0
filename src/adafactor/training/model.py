"""A byte-level transformer, written for reading: what `adafactor train` trains.

Bytes go in, logits over the next byte come out. Pre-norm blocks, rotary positions, no biases, no dropout.
"""

import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - the name everyone reads
from torch import Tensor, nn

VOCABULARY = 256  # every value a byte can take: no tokenizer
HEAD_WIDTH = 32


def rotary(context: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines, each [context, width // 2], that turn a query or key by its position."""
    frequency = 1000.0 ** -(torch.arange(0, width, 2) / width)
    angle = torch.arange(context)[:, None] * frequency
    return angle.cos(), angle.sin()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + half]) of [batch, heads, length, head width] by its position's angle."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention: [batch, length, width] -> the same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix each position with those before it."""
        # The rows of query_key_value lie head by head: a process that has some heads has a block of rows.
        q, k, v = self.query_key_value(x).unflatten(-1, (-1, 3, HEAD_WIDTH)).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(turn(q, cos, sin), turn(k, cos, sin), v, is_causal=True)
        mixed: Tensor = self.output(y.transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """Attention, then a two-layer perceptron four times as wide; each normalised first and added to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attention = Attention(width)
        self.norm2 = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return [batch, length, width] from the same shape."""
        x = x + self.attention(self.norm1(x), cos, sin)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x  # noqa: RET504 - the two halves read alike


def parameter_count(width: int, layers: int) -> int:
    """Return how many parameters a Transformer of these sizes has, without building it."""
    block = 12 * width**2 + 2 * width
    return layers * block + 2 * VOCABULARY * width + width


class Transformer(nn.Module):
    """The model: bytes [batch, length] (int64, length <= context) -> logits [batch, length, 256].

    `width` is a multiple of 32, the width of one attention head.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        cos, sin = rotary(context, HEAD_WIDTH)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        # A small head makes the first prediction close to uniform: training starts near 8 bits per byte, not above.
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Predict, at each position, the byte that follows."""
        length = x.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, bytes_: Tensor) -> Tensor:
        """Mean cross-entropy, in nats per byte, of predicting bytes_[:, 1:] from what precedes; [batch, length].

        In float32, whatever the weights are in: a bfloat16 has less than three digits.
        """
        logits = self(bytes_[:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), bytes_[:, 1:].flatten())


@torch.no_grad()
def generate(
    model: Transformer,
    prompt: bytes,
    length: int,
    *,
    seed: int = 0,
    temperature: float = 0.8,
    seconds: float = math.inf,
    agree: Callable[[bool], bool] = bool,
) -> bytes:
    """Continue `prompt` (at least one byte) by `length` bytes drawn from the model; the same seed, the same bytes.

    After `seconds` it ends early, with what there is. Processes that share the model all call this; `agree` tells
    whether the time is up for any of them.
    """
    deadline = time.monotonic() + seconds
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor([list(prompt)])
    for _ in range(length):
        if agree(time.monotonic() >= deadline):
            break
        logits = model(text[:, -model.context :].to(model.cos.device))[0, -1].float().cpu()
        drawn = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)
        text = torch.cat((text, drawn[None]), dim=1)
    return bytes(text[0].tolist())
