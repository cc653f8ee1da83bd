"""Boxes of all families by random combination: honest ones, and ones that are not what they seem.

An honest box may end in anything but REJECTED, and in RECOVERED only with a model that answers as
the box does, within the tolerance that the verdict states. A box that is something else must not end
RECOVERED with a model that answers differently on a larger share of queries than n fresh answers
concede at the verdict's confidence.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import keyhole
import regression as zoo
from keyhole.verification.statement import share_conceded

LENGTH = 64  # longest sequence that is declared
FAMILIES = ("single", "low rank", "heads", "layer", "network", "block")
FORMS = ("float64",) * 6 + ("float32", "float32", "float16", "bfloat16", "decimals 5", "noise 1e-3")
LEARNERS = {
    "single": "SingleHead",
    "low rank": "LowRank",
    "heads": "MultiHead",
    "layer": "MultiHead",
    "network": "ReluNetwork",
    "block": "Transformer",
}
CHANGES = ("lengths", "odd", "multiples", "scores", "extra head", "drift", "clipped")
DIFFERENT = 1e-3  # of the answers' size: an answer this far off is another answer
OFTEN = 0.1  # share of wrong answers that is counted apart among what is conceded
WITHIN = 10.0  # times the tolerance of a verdict, a median: what single answers may be off


def draw(rng):
    family = FAMILIES[rng.integers(len(FAMILIES))]
    width = int(rng.integers(2, 11))
    spec = {
        "family": family,
        "width": width,
        "outputs": None if rng.random() < 0.4 else int(rng.integers(1, 6)),
        "heads": int(rng.integers(2, 4)) if family == "heads" else 1,
        "rank": int(rng.integers(1, max(2, width // 2))) if family == "low rank" else None,
        "bias": ("", "key", "offset", "key offset")[rng.integers(4)],
        "scale": float(np.round(np.exp(rng.uniform(-1, 1)), 3)),
        "neurons": int(rng.integers(2, 9)),
        "form": FORMS[rng.integers(len(FORMS))],
        "learner": "Auto" if rng.random() < 0.6 else LEARNERS[family],
        "seed": int(rng.integers(2**31)),
        "change": None,
    }
    if family == "layer":
        spec |= {"heads": 2, "width": 2 * int(rng.integers(1, 5))}
    if rng.random() < 0.5:
        known = CHANGES[:3] + CHANGES[5:] if family in ("network", "block") else CHANGES
        spec |= {"change": known[rng.integers(len(known))], "form": "float64"}
        spec["which"] = int(rng.integers(2**31))
    return spec


def model_of(spec, seed=None):
    seed, width = spec["seed"] if seed is None else seed, spec["width"]
    if spec["family"] == "layer":
        return zoo.multihead_attention(seed, width, 2)
    if spec["family"] == "network":
        return zoo.draw_network(seed, width, spec["neurons"])
    if spec["family"] == "block":
        return zoo.draw_block(seed, width, spec["neurons"])
    return zoo.draw(
        seed,
        width,
        spec["outputs"],
        heads=spec["heads"],
        rank=spec["rank"],
        scale=spec["scale"],
        bias=spec["bias"],
    )


def changed(spec):
    """The box that is another one on part of its inputs, and what it is by now."""
    box = impostor(spec)
    return box, getattr(box, "now", lambda: box)


def impostor(spec):
    model, other = model_of(spec), model_of(spec, spec["seed"] + 1)
    rng = np.random.default_rng(spec["which"])
    kind = spec["change"]
    if kind == "scores":
        names = sorted(zoo.CHANGES)
        change = zoo.CHANGES[names[rng.integers(len(names))]]
        return lambda tokens: model(tokens, change)
    if kind == "extra head":
        size = float(10 ** rng.uniform(-2, 0))
        return lambda tokens: model(tokens) + size * other(tokens)
    if kind == "clipped":
        most = float(rng.uniform(1.0, 2.5))
        return lambda tokens: model(np.clip(tokens, -most, most))
    if kind == "drift":
        left = [int(rng.integers(5, 60))]

        def drifting(tokens):
            left[0] -= len(tokens)
            return drifting.now()(tokens)

        drifting.now = lambda: model if left[0] > 0 else other
        return drifting
    lengths = np.arange(LENGTH + 1)
    if kind == "odd":
        chosen = (lengths > int(rng.integers(3, 12))) & (lengths % 2 == int(rng.integers(2)))
    elif kind == "multiples":
        chosen = lengths % int(rng.integers(3, 9)) == 0
    else:
        chosen = rng.random(LENGTH + 1) < rng.uniform(0.15, 0.6)
    return lambda tokens: (other if chosen[tokens.shape[1]] else model)(tokens)


def queries(spec, count=300):
    """Queries of every length that the box accepts, and of several sizes."""
    rng = np.random.default_rng([spec["seed"], 9])
    longest = 1 if spec["family"] == "network" else LENGTH
    for _ in range(count):
        size = 10 ** rng.uniform(-0.5, 0.5)
        yield size * rng.standard_normal((1, int(rng.integers(1, longest + 1)), spec["width"]))


def share_of_others(box, model, spec, different):
    """How often the recovered model answers differently than the box."""
    pairs = [(np.ravel(box(q)), np.ravel(model(q))) for q in queries(spec)]
    size = np.sqrt(np.mean([np.mean(a**2) for a, _ in pairs]))
    return float(np.mean([np.abs(a - b).max() > different * size for a, b in pairs]))


def run(spec, folder):
    del folder
    honest = spec["change"] is None
    if honest:
        box, now = zoo.answering(model_of(spec), spec["form"])[0], lambda: model_of(spec)
    else:
        box, now = changed(spec)
    longest = None if honest else LENGTH
    opened = keyhole.open_oracle(box, width=spec["width"], max_length=longest)
    learner = zoo.LEARNERS[spec["learner"]]()
    title = f"{spec['family']}, {spec['change'] or spec['form']}, {spec['learner']}"
    try:
        with np.errstate(all="ignore"):
            found = keyhole.recover(opened, learner, seed=spec["seed"] % 1000, throw=False)
    except keyhole.KeyholeError as error:
        return {"errors in words": 1}, [("error", f"{title}: {type(error).__name__}: {error}")]
    except Exception as error:
        return {}, [("traceback", f"{title}: {type(error).__name__}: {error}")]
    kind = "honest" if honest else "impostors"
    counts = {kind: 1, f"{kind} {found.outcome.name}": 1}
    if honest and found.outcome is keyhole.Outcome.REJECTED:
        return counts, [("honest box rejected", f"{title}: {found.reason}")]
    if found.outcome is not keyhole.Outcome.RECOVERED:
        return counts, []
    # noise and rounding of an honest box are not the model's; an impostor may not have turned yet
    different = WITHIN * found.verdict.tolerance if honest else DIFFERENT
    with np.errstate(all="ignore"):
        share = share_of_others(now(), found.model, spec, different)
    if share > share_conceded(found.verdict.queries):
        return counts, [("wrong model recovered", f"{title}: {share:.0%} of answers differ")]
    if not honest:
        # conceded is not harmless: how often the model is wrong is told apart
        often = "a tenth of queries or more" if share >= OFTEN else "less than a tenth of queries"
        counts[f"impostors recovered, wrong on {often}"] = 1
    return counts, []
