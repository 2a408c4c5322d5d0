"""How the model is split between processes: by blocks (FSDP2), by heads and perceptrons (tensor parallelism)."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from .model import Transformer


class Whole(ParallelStyle):
    """A module that every process computes whole.

    Its parameters become DTensors all the same: optimizers refuse to step DTensors and plain tensors together.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        def leave(module: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local()

        return distribute_module(module, device_mesh, input_fn=enter, output_fn=leave)


# Attention is split by heads: a row of query_key_value belongs to a head, and rows lie head by head.
PLAN: dict[str, ParallelStyle] = {
    "embedding": Whole(),
    "blocks.*.norm1": Whole(),
    "blocks.*.attention.query_key_value": ColwiseParallel(),
    "blocks.*.attention.output": RowwiseParallel(),
    "blocks.*.norm2": Whole(),
    "blocks.*.up": ColwiseParallel(),
    "blocks.*.down": RowwiseParallel(),
    "norm": Whole(),
    "head": Whole(),
}


def shard(model: Transformer, data: DeviceMesh, tensor: DeviceMesh, *, fsdp: bool) -> None:
    """Split the model, which has the same values on all processes, along one or both meshes; it computes the same.

    data: the processes that share a batch, between which `fsdp` splits every parameter. tensor: those that share heads.
    """
    if tensor.size() > 1:
        parallelize_module(model, tensor, PLAN)
    if fsdp:
        # Of the logits under tensor parallelism: nobody changes them in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)  # gradients of bfloat16 are added up in float32
        for block in model.blocks:
            fully_shard(block, mesh=data, mp_policy=policy)
        fully_shard(model, mesh=data, mp_policy=policy)
