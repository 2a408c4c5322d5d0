"""Named settings with their reasons: each a function that returns an optimizer, for people who would rather train.

Every preset takes the parameters, an lr, and any argument of its dialect to change. "An AdamW lr" is one that works for
the same model and data with AdamW.

All have rounding="stochastic": in bfloat16 a step below half a unit in the last place (0.2% of the weight) is lost by
rounding to the nearest, and at most of these lrs most are. It keeps nothing, and in float32 it does nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from .dialects import big_vision, transformers

ROUNDING: dict[str, Any] = {"rounding": "stochastic"}


def t5_fine_tuning(params: ParamsT, lr: float | Tensor = 1e-3, **changes: Any) -> transformers.Adafactor:
    """T5 and its kin, fine-tuned at a constant lr.

    - lr=1e-3, constant, no warm-up: what T5 was fine-tuned with on every task.
    - scale_parameter=True: T5's lr is relative to each tensor's own size. Its embeddings start at a size of 1, its
      other weights at width^-1/2: no one absolute lr suits both.
    - relative_step=False: the schedule that starts at 1e-2 is for pre-training.
    - clip_threshold=1.0: bounds the first steps, whose statistics are of one batch; so no warm-up is needed.

    From AdamW: divide its lr by the typical size of a weight. 5e-5 on weights of rms 0.05 is 1e-3.

    Source: Raffel et al. 2020 (arXiv:1910.10683), section 3.1.2; T5X's fine-tuning configuration.
    """
    settings = {"scale_parameter": True, "relative_step": False, "clip_threshold": 1.0, **ROUNDING}
    return transformers.Adafactor(params, lr=lr, **{**settings, **changes})


def llm_fine_tuning(params: ParamsT, lr: float | Tensor = 1e-5, **changes: Any) -> transformers.Adafactor:
    """All weights of a language model, in bfloat16, on a card that has no room for AdamW.

    - scale_parameter=False, relative_step=False: lr is absolute, as with AdamW, so recipes carry over.
    - beta1=None: momentum would be the size of the model, in float32.
    - clip_threshold=1.0: takes the place of clipping by the global norm, and needs no second look at the gradients.
    - weight_decay=0.0: fine-tuning is short.

    From AdamW: take its lr. u has an rms of at most 1, like Adam's update early in training.

    Source: what Hugging Face's Trainer builds for ``optim="adafactor"``; the rounding is this library's.
    """
    settings = {
        "scale_parameter": False,
        "relative_step": False,
        "clip_threshold": 1.0,
        "weight_decay": 0.0,
        **ROUNDING,
    }
    return transformers.Adafactor(params, lr=lr, **{**settings, **changes})


def diffusion_unet(params: ParamsT, lr: float | Tensor = 1e-5, **changes: Any) -> transformers.Adafactor:
    """A diffusion model whose weights are convolutions.

    - factor="matrix": factored over its last two dims, a 3x3 convolution keeps two thirds of its size as state, and a
      1x1 convolution twice its size; split between output channels and the rest, less than 1% from 192 channels up.
    - scale_parameter=False, relative_step=False: such models start layers at zero (the last of every block), which a
      step relative to the parameter's size hardly moves.
    - beta1=None, clip_threshold=1.0: as in ``llm_fine_tuning``.

    From AdamW: take its lr.

    Source: the settings that trainers for Stable Diffusion recommend (kohya-ss/sd-scripts, OneTrainer); factor="matrix"
    and the rounding are this library's.
    """
    settings = {"scale_parameter": False, "relative_step": False, "clip_threshold": 1.0, "factor": "matrix", **ROUNDING}
    return transformers.Adafactor(params, lr=lr, **{**settings, **changes})


def vit_from_scratch(params: ParamsT, lr: float | Tensor = 1e-3, **changes: Any) -> big_vision.Adafactor:
    """A vision transformer from random weights.

    - momentum=0.9 in bfloat16: from scratch, momentum is worth its memory, and half precision is enough for it.
    - no parameter scale, no update clipping: this dialect has none; clip the gradients' global norm at 1.
    - beta2_cap=0.999: late in training, an uncapped beta2 no longer follows the gradients.
    - weight_decay=0.1, times lr: at an lr of 1e-3 that is big_vision's 1e-4, and follows the schedule as theirs does.
    - min_dim_size_to_factor=32: big_vision's own.

    Use a warm-up (10,000 steps there) and a cosine or rsqrt decay. From AdamW: take its lr; the weight decay too.

    Source: Zhai et al. 2022 (arXiv:2106.04560), on memory-efficient optimizers; big_vision's ViT configurations.
    """
    settings = {"momentum": 0.9, "beta2_cap": 0.999, "weight_decay": 0.1, "min_dim_size_to_factor": 32, **ROUNDING}
    return big_vision.Adafactor(params, lr=lr, **{**settings, **changes})


def lora(params: ParamsT, lr: float | Tensor = 2e-4, **changes: Any) -> transformers.Adafactor:
    """Low-rank adapters, one half of which starts at zero.

    - scale_parameter=False: with it, a step is lr times rms(p), or times 1e-3 where p is zero: the zero half starts a
      thousand times too slowly, and torch.optim.Adafactor cannot turn that off.
    - relative_step=False: lr is absolute.
    - clip_threshold=1.0: the first gradient of the zero half says little about the next.

    From AdamW: take its lr.

    Source: Hu et al. 2021 (arXiv:2106.09685) for the adapters; OneTrainer's issue 455 for what the scale does to them.
    """
    settings = {"scale_parameter": False, "relative_step": False, "clip_threshold": 1.0, **ROUNDING}
    return transformers.Adafactor(params, lr=lr, **{**settings, **changes})
