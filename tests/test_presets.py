"""Each preset trains a small task of its kind. The thresholds tell learning from not learning, no more."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from adafactor import Adafactor, presets
from adafactor.dialects.transformers import Adafactor as TransformersAdafactor


def train(model, optimizer, loss_of, steps):
    """The losses of the first and the last steps, averaged over five."""
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[:5]) / 5, sum(losses[-5:]) / 5


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Adapter(nn.Module):
    """A frozen weight and two halves of which one starts at zero."""

    def __init__(self, width=32, rank=4):
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(width, width) / width**0.5, requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, width) / width**0.5)
        self.up = nn.Parameter(torch.zeros(width, rank))

    def forward(self, x):
        return x @ (self.frozen + self.up @ self.down).T


def adapter_loss(target):
    x = torch.randn(256, 32)
    return lambda model: mse_loss(model(x), x @ target.T)


def test_a_zero_initialised_adapter_learns_and_with_torchs_rule_it_does_not():
    """The same model, data and lr: a step relative to a size of zero is a thousandth of one."""
    ends = {}
    for make in (presets.lora, Adafactor):
        torch.manual_seed(0)
        model = Adapter()
        target = model.frozen + torch.randn(32, 4) @ torch.randn(4, 32) / 12
        optimizer = make([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        first, ends[make] = train(model, optimizer, adapter_loss(target), 200)
    assert ends[presets.lora] < 0.05 * first
    assert ends[Adafactor] > 0.5 * first


def test_a_model_in_bfloat16_is_fine_tuned():
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64)).bfloat16()
    tokens = torch.randint(64, (256,))
    optimizer = presets.llm_fine_tuning(model.parameters(), lr=3e-3)
    first, last = train(model, optimizer, lambda m: cross_entropy(m(tokens[:-1]).float(), tokens[1:]), 150)
    assert last < 0.6 * first
    assert all(value.dtype is torch.float32 for own in optimizer.state.values() for value in own.values())


def test_t5_fine_tuning_moves_every_tensor_in_proportion():
    """Embeddings a thousand times as large as the rest: one absolute lr would leave them, or break the rest."""
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32))
    with torch.no_grad():
        model[0].weight.mul_(30)
        model[1].weight.div_(30)
    tokens = torch.randint(32, (256,))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = presets.t5_fine_tuning(model.parameters(), lr=1e-2)
    first, last = train(model, optimizer, lambda m: cross_entropy(m(tokens[:-1]), tokens[1:]), 200)
    moved = [((p - b).norm() / b.norm()).item() for p, b in zip(model.parameters(), before, strict=True)][:2]
    assert last < 0.8 * first
    assert 0.1 < moved[0] / moved[1] < 10


def denoiser():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 32, 3, padding=1), nn.SiLU(), nn.Conv2d(32, 1, 1)
    )


def test_a_convolutional_denoiser_with_a_zero_initialised_last_layer():
    model = denoiser()
    nn.init.zeros_(model[-1].weight)
    rows = torch.linspace(0, 6, 16)
    clean = torch.sin(rows[:, None] + torch.rand(64, 1, 1, 1) * 6) * torch.cos(rows[None] + torch.rand(64, 1, 1, 1) * 6)
    noise = 0.5 * torch.randn_like(clean)
    optimizer = presets.diffusion_unet(model.parameters(), lr=3e-3)
    first, last = train(model, optimizer, lambda m: mse_loss(m(clean + noise), noise), 80)
    assert last < 0.5 * first
    # A 32x32 3x3 convolution: 320 numbers of state for 9,216.
    kept = sum(value.numel() for name, value in optimizer.state[model[2].weight].items() if name != "step")
    assert kept == 32 + 288


class Patches(nn.Module):
    """A transformer over the patches of a small image."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 32)
        self.place = nn.Parameter(0.02 * torch.randn(4, 32))
        self.block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        patches = x.unfold(1, 4, 4).unfold(2, 4, 4).reshape(len(x), 4, 16)
        return self.head(self.block(self.embed(patches) + self.place).mean(1))


def test_a_vision_transformer_from_scratch():
    images = torch.randn(128, 8, 8)
    labels = images.unfold(1, 4, 4).unfold(2, 4, 4).sum((-1, -2)).flatten(1).argmax(1)
    model = Patches()
    optimizer = presets.vit_from_scratch(model.parameters(), lr=3e-3)
    first, last = train(model, optimizer, lambda m: cross_entropy(m(images), labels), 150)
    assert last < 0.3 * first
    assert optimizer.state[model.embed.weight]["exp_avg"].dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["t5_fine_tuning", "llm_fine_tuning", "diffusion_unet", "vit_from_scratch", "lora"])
def test_every_setting_can_be_changed(name):
    """A preset is a start."""
    params = [nn.Parameter(torch.ones(2))]
    optimizer = getattr(presets, name)(params, lr=0.5, weight_decay=0.25, foreach=True)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["foreach"]) == (0.5, 0.25, True)
    assert isinstance(presets.lora(params, clip_threshold=None), TransformersAdafactor)
