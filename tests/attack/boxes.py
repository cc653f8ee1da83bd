"""Boxes of all families by random combination: honest ones, and ones that are not what they seem.

An honest box may end in anything but REJECTED, and in RECOVERED only with a model that answers as
the box does, within the tolerance that the verdict states. No box may end RECOVERED with a model that
contradicts an answer of its own run. A box that is something else on one ordinary query in twenty or
more may end RECOVERED once in twenty such runs, by chance: these are counted, and a run is a finding
where the model is wrong on more queries than a verdict lets pass once in a thousand times.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import keyhole
import regression as zoo
from keyhole.arrays import random_stream
from keyhole.oracles.base import Domain, Spec
from keyhole.verification.challenge_queries import Designer

LENGTH = 64  # longest sequence that is declared
FAMILIES = ("single", "low rank", "heads", "layer", "network", "block", "wide values", "smooth")
FORMS = ("float64",) * 6 + ("float32", "float32", "float16", "bfloat16", "decimals 5", "noise 1e-3")
LEARNERS = {
    "single": "SingleHead",
    "low rank": "LowRank",
    "heads": "MultiHead",
    "layer": "MultiHead",
    "network": "ReluNetwork",
    "block": "Transformer",
    "wide values": "MultiHead",
    "smooth": "Auto",
}
CHANGES = ("lengths", "odd", "multiples", "scores", "extra head", "drift", "clipped")
CHANGES += ("some answers", "zero tokens", "batches")
ACTIVATIONS = ("gelu", "silu", "tanh", "gelu_tanh")
DIFFERENT = 1e-3  # of the answers' size: an answer this far off is another answer
EXACT = 1e-10  # of the answers' size: below this, rounding in float64 is all
OFTEN = 0.05  # share of ordinary queries of which a verdict speaks
SELDOM = 1e-3  # chance that a verdict lets a wrong model pass, from which on it is a finding
ORDINARY = 200  # ordinary queries by which box and model are compared afterwards
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
    if family == "wide values":
        width = int(rng.integers(4, 9))
        spec |= {"heads": 2, "width": width, "outputs": width, "rank": max(1, width // 2)}
    if family == "smooth":
        spec |= {"activation": ACTIVATIONS[rng.integers(len(ACTIVATIONS))], "outputs": None}
    if rng.random() < 0.2:  # decades of scale: of a score, or of all weights of a network
        most = 3 if spec["form"] == "float16" else 6  # float16 ends at 65,504
        spec["power"] = int(rng.integers(-most, most + 1))
    if rng.random() < 0.5:
        plain = family in ("network", "block", "smooth")
        known = CHANGES[:3] + CHANGES[5:] if plain else CHANGES
        spec |= {"change": known[rng.integers(len(known))], "form": "float64"}
        spec["which"] = int(rng.integers(2**31))
    return spec


def model_of(spec, seed=None):
    seed, width = spec["seed"] if seed is None else seed, spec["width"]
    if spec["family"] == "layer":
        return zoo.multihead_attention(seed, width, 2)
    size = 10.0 ** spec.get("power", 0)
    if spec["family"] == "network":
        net = zoo.draw_network(seed, width, spec["neurons"])
        return net.rounded(lambda array: size * array)
    if spec["family"] == "smooth":
        return smooth_network(spec, seed, size)
    if spec["family"] == "block":
        return zoo.draw_block(seed, width, spec["neurons"])
    return zoo.draw(
        seed,
        width,
        spec["outputs"],
        heads=spec["heads"],
        rank=spec["rank"],
        scale=spec["scale"] * size,
        bias=spec["bias"],
    )


class SmoothNetwork:
    """A network with one hidden layer and a smooth activation, read at the last token."""

    def __init__(self, model):
        self.model = self.truth = model

    def rounded(self, shorten):
        arrays = {name: shorten(array) for name, array in self.model.to_arrays().items()}
        return SmoothNetwork(type(self.model).from_arrays(arrays))

    def __call__(self, tokens):
        return self.model(tokens)


def smooth_network(spec, seed, size):
    rng, width, neurons = np.random.default_rng([seed, 77]), spec["width"], spec["neurons"]
    weights = size * rng.standard_normal((neurons, width)) / np.sqrt(width)
    bias = size * 0.5 * rng.standard_normal(neurons)
    if rng.random() < 0.2:
        bias[0] = -30.0  # a neuron that is off where one looks
    outgoing = rng.standard_normal(neurons)
    return SmoothNetwork(keyhole.Mlp(weights, bias, outgoing, activation=spec["activation"]))


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
    if kind == "some answers":
        every, seen = int(rng.integers(20, 80)), [0]

        def forgetful(tokens):
            answers = np.array(model(tokens))
            answers[(seen[0] + np.arange(len(tokens))) % every == every - 1] = 0.0
            seen[0] += len(tokens)
            return answers

        return forgetful
    if kind == "zero tokens":
        zero = lambda tokens: (tokens == 0).all(axis=2).any(axis=1)  # noqa: E731

        def padding(tokens):
            answers = np.array(model(tokens))
            answers[zero(tokens)] = np.asarray(other(tokens))[zero(tokens)]
            return answers

        return padding
    if kind == "batches":
        share = float(10 ** rng.uniform(-3, -1))
        return lambda tokens: (1 - share) * model(tokens) + share * np.mean(model(tokens), axis=0)
    lengths = np.arange(LENGTH + 1)
    if kind == "odd":
        chosen = (lengths > int(rng.integers(3, 12))) & (lengths % 2 == int(rng.integers(2)))
    elif kind == "multiples":
        chosen = lengths % int(rng.integers(3, 9)) == 0
    else:
        chosen = rng.random(LENGTH + 1) < rng.uniform(0.15, 0.6)
    return lambda tokens: (other if chosen[tokens.shape[1]] else model)(tokens)


def ordinary(spec, model, count=ORDINARY):
    """Queries of the kinds that a verdict on this model speaks of, drawn from another seed than any
    run's."""
    rng = random_stream(spec["seed"], "attack")
    longest = 1 if spec["family"] in ("network", "smooth") else LENGTH
    described = Spec(spec["width"], domain=Domain(max_length=longest))
    natural = getattr(model, "natural_length", lambda: spec["width"] ** 0.5)()
    calls = Designer(described, natural, rng).stream()
    while count > 0:
        tokens = np.stack([query.tokens for query, _ in next(calls)])
        count -= len(tokens)
        yield tokens


def share_of_others(box, model, spec, different):
    """How often the model answers ordinary queries differently than the box."""
    pairs = [(np.asarray(box(q)), np.asarray(model(q))) for q in ordinary(spec, model)]
    size = np.median([np.abs(a).max() for a, _ in pairs])
    wrong = [
        (np.abs(a - b).reshape(len(a), -1).max(axis=1))
        > different * np.maximum(size, np.abs(a).reshape(len(a), -1).max(axis=1))
        for a, b in pairs
    ]
    return float(np.mean(np.concatenate(wrong)))


class Remembering:
    """A box that keeps what it was asked and what it answered."""

    def __init__(self, box):
        self.box, self.pairs = box, []

    def __call__(self, tokens):
        answers = np.array(self.box(tokens))
        self.pairs.append((tokens.copy(), answers))
        return answers

    def contradictions(self, model):
        """Answers that were given and that the model contradicts."""
        size = np.median([np.abs(a).max() for _, a in self.pairs])
        return sum(
            int(
                (
                    np.abs(a - model(q)).reshape(len(a), -1).max(axis=1)
                    > DIFFERENT * np.maximum(size, np.abs(a).reshape(len(a), -1).max(axis=1))
                ).sum()
            )
            for q, a in self.pairs
        )


def run(spec, folder):
    del folder
    honest = spec["change"] is None
    if honest:
        box, now = zoo.answering(model_of(spec), spec["form"])[0], lambda: model_of(spec)
    else:
        box, now = changed(spec)
    longest, asked = None if honest else LENGTH, Remembering(box)
    opened = keyhole.open_oracle(asked, width=spec["width"], max_length=longest)
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
    recovered = found.outcome is keyhole.Outcome.RECOVERED
    # noise and rounding of an honest box are not the model's; an impostor may not have turned yet
    different = DIFFERENT
    if honest and recovered:
        different = max(WITHIN * found.verdict.tolerance, EXACT)
    with np.errstate(all="ignore"):
        if not honest and share_of_others(box, model_of(spec), spec, DIFFERENT) >= OFTEN:
            counts["impostors that differ on one ordinary query in twenty"] = 1
        if not recovered:
            return counts, []
        # what near ties of huge tokens do to answers in few digits is no lie of an honest box
        against = 0 if honest else asked.contradictions(found.model)
        share = share_of_others(now(), found.model, spec, different)
    if against:
        return counts, [("recovered against its own answers", f"{title}: {against} of them")]
    if not honest and share >= OFTEN:
        counts["impostors recovered, wrong on one ordinary query in twenty"] = 1
    if share > 0 and (1.0 - share) ** found.verdict.queries < SELDOM:
        return counts, [("wrong model recovered", f"{title}: {share:.0%} of answers differ")]
    return counts, []
