import numpy as np
import pytest
from jaxtyping import TypeCheckError

from keyhole.errors import DomainError, IllConditioned, InvalidArgument, NotIdentifiable
from keyhole.learners.base import Hypothesis
from keyhole.learners.mlp.relu.learner import ReluNetworkLearner
from keyhole.learners.transformer.learner import Transformer
from keyhole.models.attention import Attention, Head
from keyhole.models.canonical import distance
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.transformer import TransformerModel
from keyhole.oracles.base import Domain
from keyhole.recovery import recover
from keyhole.results import Outcome
from networks import CountingOracle, layer, residual_layer


def learn(secret, seed=0, **options):
    box = CountingOracle(secret, secret.width)
    return Transformer(**options).learn(box, np.random.default_rng(seed)), box


def worst_on_sequences(model, secret):
    rng = np.random.default_rng(0)
    spread = secret(rng.standard_normal((500, 1, secret.width))).std()
    gaps = []
    for length in range(1, 21):
        tokens = rng.standard_normal((20, length, secret.width))
        gaps.append(np.abs(model(tokens) - secret(tokens)).max() / spread)
    return max(gaps)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("width", "neurons"), [(8, 8), (8, 32), (16, 16), (16, 64)])
def test_one_query_per_entry(width, neurons, bias):
    secret = layer(1, width, neurons, bias=bias)
    found, box = learn(secret)
    floor = neurons * (width + 1) + 1
    gap = np.linalg.norm(found.model.score - secret.score) / np.linalg.norm(secret.score)
    assert gap < 1e-10
    assert worst_on_sequences(found.model, secret) < 1e-9
    assert box.by_purpose["score"] <= 1.05 * width**2
    assert box.queries <= 2.8 * floor + 1.1 * width**2


def test_key_bias_and_vector_answers():
    secret = layer(0, 8, 16, key_bias=True, outputs=4)
    found, _ = learn(secret)
    assert np.abs(found.model.score - secret.score).max() < 1e-7
    assert np.abs(found.model.key_bias - secret.key_bias).max() < 1e-7


@pytest.mark.parametrize("scale", [1e-2, 30.0])
def test_scores_of_other_sizes(scale):
    plain = layer(0, 8, 16)
    secret = TransformerModel(scale * plain.score, None, plain.network)
    found, _ = learn(secret)
    gap = np.linalg.norm(found.model.score - secret.score) / np.linalg.norm(secret.score)
    assert gap < 1e-7


def test_half_the_queries_for_fewer_digits():
    secret = layer(0, 8, 16)
    found, box = learn(secret, ffn=ReluNetworkLearner())
    assert np.abs(found.model.score - secret.score).max() < 1e-8
    assert "polish" not in box.by_purpose


def test_network_without_linear_part():
    """A'ᵀw = 0: nothing for the antisymmetric reduction, no harm to segments."""
    plain = layer(0, 6, 8)
    net = plain.network
    even = ReluNetwork(
        np.vstack([net.weight, -net.weight]), None, np.concatenate([net.output, net.output])
    )
    secret = TransformerModel(plain.score, None, even)
    found, _ = learn(secret)
    assert np.abs(found.model.score - secret.score).max() < 1e-8


class TinyAttentionLearner:
    """Stands in for a learner of attention: reads one head off log-odds."""

    def learn(self, oracle, rng):
        from keyhole.oracles.queries import QueryBatch

        d = oracle.spec.width
        eye = np.eye(d)
        value = oracle.ask(QueryBatch.of(eye[:, None, :], "value"))
        u = np.array([[eye[i] + eye[j], eye[j]] for j in range(d) for i in range(d)])
        answers = oracle.ask(QueryBatch.of(u, "score")).reshape(d, d)
        weight = (answers - value[:, None]) / value[None, :]
        score = np.log(weight / (1 - weight)).T
        model = Attention([Head(score, None, value)])
        return Hypothesis(model, model, float(d * d + d))

    def expected_queries(self, spec):
        return None


@pytest.mark.parametrize("attention", [None, TinyAttentionLearner()])
def test_the_papers_reduction(attention):
    secret = layer(0, 6, 12, bias=False)
    found, box = learn(secret, method="antisymmetric", attention=attention)
    assert np.abs(found.model.score - secret.score).max() < 1e-8
    assert box.by_purpose["score"] <= 2.2 * 36


def test_the_papers_reduction_refuses_biases():
    with pytest.raises(NotIdentifiable, match="segment"):
        learn(layer(0, 6, 12), method="antisymmetric")


def test_a_constant_network_hides_the_score():
    dead = ReluNetwork(np.zeros((0, 4)), [], [], None, 1.0)
    with pytest.raises(NotIdentifiable, match="attention"):
        learn(TransformerModel(np.eye(4), None, dead))


def test_length_one_is_not_enough():
    box = CountingOracle(layer(0, 4, 6), 4, domain=Domain(max_length=1))
    with pytest.raises(DomainError):
        Transformer().learn(box, np.random.default_rng(0))


@pytest.mark.parametrize("options", [{"method": "guess"}, {"ffn": object()}])
def test_senseless_options_are_refused(options):
    with pytest.raises((InvalidArgument, TypeCheckError)):  # the checker of the tests may be first
        Transformer(**options)


def test_a_plug_in_must_return_a_network():
    class Wrong:
        def learn(self, oracle, rng):
            return Hypothesis("model", None, 1.0)

        def expected_queries(self, spec):
            return None

    with pytest.raises(InvalidArgument, match="ReluNetwork"):
        learn(layer(0, 4, 6), ffn=Wrong())


class Foreign:
    """Returns the network with an error of its own, and states none."""

    def __init__(self, network, off, errors):
        self.network, self.off, self.errors = network, off, errors

    def learn(self, oracle, rng):
        net = self.network
        weight = net.weight + self.off * np.random.default_rng(5).standard_normal(net.weight.shape)
        model = ReluNetwork(weight, net.bias, net.output, net.skip, net.offset)
        errors = self.errors and ReluNetwork(0 * weight, 0 * net.bias, 0 * net.output)
        return Hypothesis(model, errors or None, 1.0)

    def expected_queries(self, spec):
        return None


@pytest.mark.parametrize("zeros", [True, False])
def test_a_learner_that_states_no_errors_is_not_taken_for_exact(zeros):
    secret = layer(0, 6, 10)
    found, box = learn(secret, ffn=Foreign(secret.network, 1e-8, zeros))
    gap = np.linalg.norm(found.model.score - secret.score)
    assert gap > 1e-10
    assert gap < 5 * np.linalg.norm(found.errors.score)
    assert (found.errors.network.weight > 0).all()
    assert any("states no errors" in note for note in found.notes)
    assert found.diagnostics.network_error > 1e-10
    assert box.by_purpose["validation"] == 16 + 3


def test_a_foreign_network_that_is_far_off_is_refused():
    secret = layer(0, 6, 10)
    with pytest.raises(IllConditioned, match="fresh point"):
        learn(secret, ffn=Foreign(secret.network, 1e-3, errors=True))


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize(("seed", "outputs"), [(0, None), (1, None), (0, 3)])
def test_an_anchor_that_goes_around_the_attention(where, seed, outputs):
    secret = residual_layer(seed, 6, 10, where, outputs)
    found, box = learn(secret)
    assert found.model.residual
    assert distance(found.model, secret) < (1e-8 if outputs is None else 1e-5)
    assert box.by_purpose["residual"] == 2 * 10 * 6 + 3 * 6 * 7
    assert any("residual" in note for note in found.notes)
    assert [attempt.strategy for attempt in found.tried] == ["a layer without residual"]


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_residual_layer_is_recovered_with_a_clean_verdict(where):
    found = recover(CountingOracle(residual_layer(0, 6, 10, where), 6), Transformer(), throw=False)
    assert found.outcome is Outcome.RECOVERED
    assert found.details["residual"]


@pytest.mark.parametrize("seed", [1, 2])
def test_single_precision(seed):
    exact = layer(seed, 8, 8)
    box = CountingOracle(exact.astype(np.float32), 8)
    found = recover(box, Transformer(), throw=False)
    assert found.outcome is Outcome.RECOVERED
    gap = np.linalg.norm(found.model.score - exact.score)
    assert gap < 1e-3 * np.linalg.norm(exact.score)
    assert np.linalg.norm(found.errors.score) > 0.5 * gap
