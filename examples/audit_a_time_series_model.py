"""How many queries until a forecasting model is out? Small attention is trained on the flow of the
Nile at Aswan, served over HTTP, and recovered by who knows its architecture alone.

The data: annual flow 1871 to 1970 in 10^8 cubic metres (Cobb 1978), in the public domain.
"""

import queue
import threading

import numpy as np
import torch
from torch import nn

import keyhole
from keyhole.serving.server import Bind, run, service

# fmt: off
NILE = [
    1120, 1160, 963, 1210, 1160, 1160, 813, 1230, 1370, 1140, 995, 935, 1110, 994, 1020, 960, 1180,
    799, 958, 1140, 1100, 1210, 1150, 1250, 1260, 1220, 1030, 1100, 774, 840, 874, 694, 940, 833,
    701, 916, 692, 1020, 1050, 969, 831, 726, 456, 824, 702, 1120, 1100, 832, 764, 821, 768, 845,
    864, 862, 698, 845, 744, 796, 1040, 759, 781, 865, 845, 944, 984, 897, 822, 1010, 771, 676, 649,
    846, 812, 742, 801, 1040, 860, 874, 848, 890, 744, 749, 838, 1050, 918, 986, 797, 923, 975, 815,
    1020, 906, 901, 1170, 912, 746, 919, 718, 714, 740,
]
# fmt: on
YEARS = 6  # that a forecast looks back


class Forecaster(nn.Module):
    """Flow and change of the last years in, the next year's flow out."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(2, 4)
        self.positions = nn.Parameter(0.3 * torch.randn(YEARS, 4))
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        placed = self.project(tokens) + self.positions[: tokens.shape[1]]
        read, _ = self.attend(placed, placed, placed, need_weights=False)
        forecast: torch.Tensor = self.out((placed + read).mean(1))
        return forecast


def windows() -> tuple[torch.Tensor, torch.Tensor]:
    """The last years' flow and change, and the flow that followed, both standardised."""
    flow = np.array(NILE, dtype=np.float64)
    flow = (flow - flow.mean()) / flow.std()
    tokens = np.stack([flow[1:], np.diff(flow)], axis=1)
    starts = range(len(tokens) - YEARS)
    inputs = np.stack([tokens[start : start + YEARS] for start in starts])
    return torch.as_tensor(inputs), torch.as_tensor(flow[1 + YEARS :, None])


def train(steps: int = 60) -> tuple[Forecaster, float]:
    """The model, stopped early, and the share of variance that it explains on years it has seen."""
    torch.manual_seed(0)
    model, (inputs, wanted) = Forecaster().double(), windows()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, weight_decay=1e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = ((model(inputs) - wanted) ** 2).mean()
        loss.backward()
        optimizer.step()
    return model.eval(), 1.0 - float(loss.detach() / wanted.var())


def serve(model: Forecaster) -> str:
    """Its address."""
    addresses: queue.Queue[str] = queue.Queue()
    served = service(model, "nile", width=2)
    threading.Thread(target=run, args=(served, Bind(port=0), addresses.put), daemon=True).start()
    return addresses.get(timeout=60)


def main(seconds: float = 120.0) -> keyhole.Recovery:
    model, explained = train()
    print(f"trained: {explained:.0%} of the variance of the years seen")
    with keyhole.open_oracle(serve(model), width=2, max_length=YEARS) as box:
        learner = keyhole.FromTemplate(Forecaster(), seconds=seconds)
        recovery = keyhole.recover(box, learner, throw=False)
    inputs, _ = windows()
    with torch.no_grad():
        truth = model(inputs).numpy()
    off = np.abs(recovery.model(inputs.numpy()) - truth).max() / truth.std()
    print(f"{recovery.outcome.name} after {recovery.ledger.learning} queries to learn,", end=" ")
    print(f"{recovery.ledger.verifying} to verify; {recovery.details['weights']} weights,", end=" ")
    print(f"{recovery.details['starts']} starts")
    print(f"forecasts of the copy differ by up to {off:.0e} of their spread")
    return recovery


if __name__ == "__main__":
    main()
