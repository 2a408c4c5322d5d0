"""Record what a real peer does: the cases of timm whose shapes and arguments the first recordings lack.

    python tests/data/record.py FOLDER_OF_TIMM

FOLDER_OF_TIMM is an unpacked wheel of timm 1.0.31: its optimizer files need torch alone, the package torchvision too.
"""

import importlib
import json
import sys
import types
from pathlib import Path

import numpy as np
import torch

SHAPES = {"18x17x3x3": (18, 17, 3, 3), "3x20x18": (3, 20, 18), "20x30": (20, 30), "5": (5,)}
CASES = {
    "timm_dims": ("adafactor", "Adafactor", {}),
    "timm_all": ("adafactor", "Adafactor", {"betas": [0.9, 0.99], "weight_decay": 0.05, "warmup_init": True}),
    "timm_bigvision_dims": ("adafactor_bv", "AdafactorBigVision", {"lr": 0.01, "clipping_threshold": 1.0}),
    "timm_bigvision_unscaled": (
        "adafactor_bv",
        "AdafactorBigVision",
        {"lr": 0.01, "weight_decay": 0.001, "unscaled_wd": True, "momentum": None, "decay_offset": 2, "beta2_cap": 0.6},
    ),
}


def main() -> None:
    root = Path(sys.argv[1]) / "timm"
    for package, path in (("timm", root), ("timm.optim", root / "optim")):
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = [str(path)]
    for case, (module, name, options) in CASES.items():
        cls = getattr(importlib.import_module(f"timm.optim.{module}"), name)
        draw = torch.Generator().manual_seed(0)
        arrays = {"meta": json.dumps({"peer": f"timm.{name}", "version": "1.0.31", "kwargs": options})}
        for key, shape in SHAPES.items():
            start = 0.1 * torch.randn(shape, generator=draw)
            rows = torch.exp(torch.randn(shape[:1], generator=draw)).reshape(-1, *[1] * (len(shape) - 1))
            grads = torch.randn((6, *shape), generator=draw) * rows
            p = torch.nn.Parameter(start.clone())
            optimizer = cls([p], **options)
            path = []
            for g in grads:
                p.grad = g.clone()
                optimizer.step()
                path.append(p.detach().clone())
            arrays |= {f"{key}.p0": start.numpy(), f"{key}.g": grads.numpy(), f"{key}.p": torch.stack(path).numpy()}
        np.savez_compressed(Path(__file__).parent / f"{case}.npz", **arrays)


if __name__ == "__main__":
    main()
