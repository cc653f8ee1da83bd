"""What else could be tried on a ReLU network: a trained student, and ART's extraction.

Run through benchmarks/relu_network.py, which says what ART needs.
"""

import time

import numpy as np

from keyhole.learners.mlp.relu.learner import ReluNetworkLearner
from keyhole.models.relu_network import ReluNetwork
from relu_boxes import Box, function_error, random_network

ART_LIMIT = 300_000  # queries after which ART is stopped: it can loop for ever


def student(quick: bool) -> None:
    import torch

    print("A PyTorch student with the right number of neurons, trained on as many queries")
    for d, m in ((16, 16), (16, 64)):
        secret = random_network(0, d, m)
        box = Box(secret, d)
        ReluNetworkLearner().learn(box, np.random.default_rng(0))
        torch.manual_seed(0)
        x = torch.tensor(np.random.default_rng(5).standard_normal((box.queries, d)))
        y = torch.tensor(secret(x.numpy()))
        net = torch.nn.Sequential(
            torch.nn.Linear(d, m), torch.nn.ReLU(), torch.nn.Linear(m, 1)
        ).double()
        optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
        start = time.process_time()
        for _ in range(500 if quick else 10000):
            optimiser.zero_grad()
            ((net(x)[:, 0] - y) ** 2).mean().backward()
            optimiser.step()
        seconds = time.process_time() - start
        parts = [p.detach().numpy() for p in net.parameters()]
        model = ReluNetwork(parts[0], parts[1], parts[2][0], None, parts[3][0])
        error = function_error(model, secret, d, 0)
        print(f"  ({d}, {m}): {box.queries} queries, error {error:.1e}, {seconds:.0f} s")


def art(quick: bool) -> None:
    """ART's FunctionallyEquivalentExtraction: m given, at least two outputs."""
    try:
        from art import config
        from art.attacks.extraction import functionally_equivalent_extraction as extraction
        from art.estimators.classification import blackbox
        from art.preprocessing.standardisation_mean_std import numpy as preprocessing
    except ImportError:
        print(
            "ART is not installed: pip install adversarial-robustness-toolbox six scikit-learn tqdm"
        )
        return
    # the default float32 destroys its finite differences; it is read from the configuration at
    # every call, and copied into the preprocessing when that is imported
    for module in (config, extraction, blackbox, preprocessing):
        for name in ("NUMPY_DTYPE", "ART_NUMPY_DTYPE"):
            if hasattr(module, name):
                setattr(module, name, np.float64)
    attack = extraction.FunctionallyEquivalentExtraction
    wrapper = blackbox.BlackBoxClassifierNeuralNetwork
    print("ART, m given to it, beside ours, m not given (success: error below 1e-6)")
    for d, m, k in ((10, 4, 3), (10, 8, 3)):
        theirs, ours = [], []
        for seed in range(2 if quick else 5):
            secret = random_network(seed, d, m, k)
            ours.append(measured_ours(secret, d, seed))
            theirs.append(measured_art(secret, d, m, k, seed, attack, wrapper))
        for name, rows in (("ART", theirs), ("ours", ours)):
            good = sum(error < 1e-6 for error, _, _ in rows)
            print(
                f"  ({d}, {m}, {k}) {name:4s}: {good}/{len(rows)} exact, "
                f"median queries {np.median([r[1] for r in rows]):.0f}, "
                f"median {np.median([r[2] for r in rows]):.2f} s"
            )


def measured_ours(secret: ReluNetwork, d: int, seed: int) -> tuple[float, int, float]:
    box = Box(secret, d)
    start = time.process_time()
    model = ReluNetworkLearner().learn(box, np.random.default_rng(seed)).model
    seconds = time.process_time() - start
    return function_error(model, secret, d, seed), box.queries, seconds


def measured_art(
    secret: ReluNetwork, d: int, m: int, k: int, seed: int, attack: type, wrapper: type
) -> tuple[float, int, float]:
    asked = 0

    def predict(x: np.ndarray) -> np.ndarray:
        nonlocal asked
        asked += len(x)
        if asked > ART_LIMIT:
            raise RuntimeError(f"no end after {ART_LIMIT} queries")
        return secret(np.asarray(x, dtype=np.float64))

    np.random.seed(seed)  # noqa: NPY002 - ART draws from the global generator
    classifier = wrapper(predict, input_shape=(d,), nb_classes=k)
    if classifier.predict(np.zeros((1, d))).dtype != np.float64:
        raise RuntimeError("ART still works in single precision: not a fair comparison")
    asked = 0
    start = time.process_time()
    try:
        extraction = attack(classifier=classifier, num_neurons=m)
        points = np.random.default_rng(seed).standard_normal((100, d))
        stolen = extraction.extract(points, delta_0=0.05, fraction_true=0.3, rel_diff_slope=1e-5)
        model = stolen.predict
        error = function_error(lambda x: np.asarray(model(x)), secret, d, seed)
    except Exception as problem:
        print(f"    ART failed on seed {seed}: {type(problem).__name__}: {problem}")
        error = float("inf")
    return error, asked, time.process_time() - start
