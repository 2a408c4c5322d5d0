"""Steps of shards whose tensors have no values: whoever reads one raises, as one on an accelerator would make wait."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import Parameter
from torch.testing._internal.distributed.fake_pg import FakeStore

from adafactor import Adafactor, meeting

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def main() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    # It reads what all have sent, before the first step.
    meeting.agree = lambda links, facts: None
    mesh = DeviceMesh("meta", torch.arange(4).view(2, 2))

    def shards(shape: tuple[int, ...], *placements: Shard | Replicate) -> DTensor:
        here = [size // 2 ** placements.count(Shard(dim)) for dim, size in enumerate(shape)]
        stride = torch.empty(shape, device="meta").stride()
        local = torch.empty(here, device="meta")
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    whole = torch.empty(3, 3, device="meta")
    asked = [((8, 6), S0, S1), ((8, 6), R, S0), ((8,), S0, R), ((4, 8, 6), S1, S0)]
    for options in ({}, {"skip_nonfinite": True}, {"skip_nonfinite": "parameter"}, {"max_grad_norm": 1.0}):
        params = [*(Parameter(shards(shape, *how)) for shape, *how in asked), Parameter(whole.clone())]
        optimizer = Adafactor(params, rounding="stochastic", **options)
        for t in range(3):
            for p in params:
                p.grad = torch.empty_like(p)
            if t == 1:
                params[0].grad = None
            optimizer.step()
    print("nobody has read anything")


if __name__ == "__main__":
    main()
