"""Trains two attention layers of width 384 with 12 heads on associative recall, so that their
spectra are those of trained layers: key-value pairs, then a key, whose value is to be named."""

import torch

WIDTH, HEADS, VOCABULARY, PAIRS, BATCH = 384, 12, 64, 12, 32


class Recall(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.position = torch.nn.Parameter(0.3 * torch.randn(2 * PAIRS + 1, WIDTH))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(3))
        self.layers = torch.nn.ModuleList(
            torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2)
        )
        self.out = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        x = self.embedding(sequence) + self.position
        mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            h = norm(x)
            x = x + layer(h, h, h, attn_mask=mask, need_weights=False)[0]
        return self.out(self.norms[2](x[:, -1]))


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    half = VOCABULARY // 2
    keys = torch.stack([torch.randperm(half, generator=generator)[:PAIRS] for _ in range(BATCH)])
    values = torch.randint(half, VOCABULARY, (BATCH, PAIRS), generator=generator)
    chosen = torch.randint(0, PAIRS, (BATCH, 1), generator=generator)
    pairs = torch.stack([keys, values], 2).reshape(BATCH, 2 * PAIRS)
    return torch.cat([pairs, keys.gather(1, chosen)], 1), values.gather(1, chosen)[:, 0]


def trained_layers(steps: int, seed: int = 0) -> list[torch.nn.MultiheadAttention]:
    """The two attention layers after training, in float64."""
    torch.manual_seed(seed)
    net, generator = Recall(), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.05)
    for step in range(steps):
        sequence, target = batch(generator)
        loss = torch.nn.functional.cross_entropy(net(sequence), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 200 == 0 or step == steps - 1:
            print(f"    training step {step}: loss {loss.item():.2f}", flush=True)
    return [layer.double().eval() for layer in net.layers]
