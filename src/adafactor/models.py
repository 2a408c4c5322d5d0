"""The tensors of public language models, and how tensor parallelism splits them: shapes alone, nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Weight(NamedTuple):
    """One parameter of a model.

    Attributes:
        name: the parameter's.
        shape: the parameter's.
        split: the dim that tensor parallelism splits; None where each process has all of it.
        heads: of that dim, which have to stay whole; None where it has none.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    heads: int | None = None


@dataclass(frozen=True)
class Llama:
    """A decoder of the Llama family, by the numbers of its configuration.

    Attributes:
        layers: blocks.
        hidden: width of the model.
        intermediate: width of the perceptrons.
        heads: of queries.
        kv_heads: of keys and of values.
        vocabulary: rows of the embedding, and of the head, which is a tensor of its own.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def weights(self) -> list[Weight]:
        """Its tensors, under transformers' names, split as PyTorch's tensor parallelism does it.

        What makes heads and the perceptron's inner numbers is split by rows, what takes them by columns; the embedding
        and the head by rows of the vocabulary; norms not at all.
        """
        own = self.hidden // self.heads
        found = [Weight("model.embed_tokens.weight", (self.vocabulary, self.hidden), 0)]
        for i in range(self.layers):
            layer = f"model.layers.{i}"
            attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
            found += [
                Weight(f"{attention}.q_proj.weight", (self.heads * own, self.hidden), 0, self.heads),
                Weight(f"{attention}.k_proj.weight", (self.kv_heads * own, self.hidden), 0, self.kv_heads),
                Weight(f"{attention}.v_proj.weight", (self.kv_heads * own, self.hidden), 0, self.kv_heads),
                Weight(f"{attention}.o_proj.weight", (self.hidden, self.heads * own), 1, self.heads),
                Weight(f"{mlp}.gate_proj.weight", (self.intermediate, self.hidden), 0),
                Weight(f"{mlp}.up_proj.weight", (self.intermediate, self.hidden), 0),
                Weight(f"{mlp}.down_proj.weight", (self.hidden, self.intermediate), 1),
                Weight(f"{layer}.input_layernorm.weight", (self.hidden,)),
                Weight(f"{layer}.post_attention_layernorm.weight", (self.hidden,)),
            ]
        return [
            *found,
            Weight("model.norm.weight", (self.hidden,)),
            Weight("lm_head.weight", (self.vocabulary, self.hidden), 0),
        ]


# The config.json that each was published with: meta-llama/Llama-2-7b-hf and Llama-2-70b-hf (Touvron et al., Llama 2,
# arXiv:2307.09288), meta-llama/Llama-3.1-405B (Grattafiori et al., The Llama 3 Herd of Models, arXiv:2407.21783; in its
# table 3 the vocabulary is rounded).
MODELS = {
    "llama-2-7b": Llama(32, 4096, 11008, 32, 32, 32000),
    "llama-2-70b": Llama(80, 8192, 28672, 64, 8, 32000),
    "llama-3.1-405b": Llama(126, 16384, 53248, 128, 8, 128256),
}
"""Models by name."""
