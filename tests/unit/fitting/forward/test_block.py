"""Products with the Jacobian of a block against automatic differentiation, for all forms."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.fitting.forward.block import Norming, pad_queries, run_block
from keyhole.learners.block.refinement import form_of, split_block
from keyhole.models.random import block


def run_in_torch(form, parts, tokens):
    """The same block in a few lines that torch differentiates."""
    plane, epsilons = torch.tensor(form.plane), torch.exp(parts["epsilons"])
    pre, place = form.norm == "pre", 0

    def normed(x, epsilon):
        return x / torch.sqrt((x**2).sum(-1, keepdim=True) / form.width + epsilon)

    seen, stream = tokens, tokens[:, -1]
    if form.heads:
        seen = normed(tokens @ plane, epsilons[0]) if pre else tokens
        place = int(pre)
        read = seen[:, -1] @ parts["read"][:, :-1].T + parts["read"][:, -1]
        inside = []
        for h, some in enumerate(form.slices(form.score_ranks)):
            key = read[:, some] @ parts[f"left{h}"].T
            weight = torch.softmax((seen @ key[:, :, None])[:, :, 0], 1)
            inside.append((weight[:, None] @ seen)[:, 0] @ parts[f"value{h}"].T)
        added = torch.cat(inside, 1) @ parts["out"][:, :-1].T + parts["out"][:, -1]
        stream = stream + added if pre else stream @ plane + added
    elif not pre:
        stream = stream @ plane
    if form.activation is not None:
        x = tokens[:, -1]
        if pre:
            x = normed((x if form.parallel else stream) @ plane, epsilons[place])
        elif form.heads:
            x = normed(stream, epsilons[0])
            stream = (parts["gain"] * (x @ plane.T)) @ plane
        table = {name: x @ parts[name][:, :-1].T + parts[name][:, -1]
                 for name in ("inner", "gate") if name in parts}  # fmt: skip
        bend = {"gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu,
                "relu": torch.relu}[form.activation]  # fmt: skip
        hidden = bend(table["gate"]) * table["inner"] if form.gated else bend(table["inner"])
        stream = stream + hidden @ parts["outer"][:, :-1].T + parts["outer"][:, -1]
    if pre:
        return stream
    return parts["last_gain"] * (normed(stream, epsilons[-1]) @ plane.T) + parts["last_bias"]


FORMS = st.fixed_dictionaries(
    {
        "norm": st.sampled_from(["pre", "post"]),
        "kind": st.sampled_from(["layer", "rms"]),
        "activation": st.sampled_from(["gelu", "relu", "silu"]),
        "gated": st.booleans(),
        "parallel": st.booleans(),
    }
)


@given(FORMS, st.sampled_from([(2, 5), (0, 5), (3, 0)]), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_products_are_those_of_automatic_differentiation(how, sizes, length, seed):
    heads, neurons = sizes
    how = {**how, "parallel": how["parallel"] and how["norm"] == "pre" and heads * neurons > 0}
    rng = np.random.default_rng(seed)
    one = block(rng, 6, heads=heads, neurons=neurons, epsilon=0.01, **how)
    parts = split_block(one)
    form = form_of(one, parts)
    tokens = rng.standard_normal((7, length, 6))
    tape = run_block(form, parts, tokens)
    assert np.allclose(tape.answers, one(tokens), atol=1e-12)
    moves = {name: rng.standard_normal(part.shape) for name, part in parts.items()}
    vector = rng.standard_normal(tape.answers.shape)

    tensors = {name: torch.tensor(part, requires_grad=True) for name, part in parts.items()}
    answers = run_in_torch(form, tensors, torch.tensor(tokens))
    assert np.allclose(answers.detach(), tape.answers, atol=1e-12)
    # the gradient is linear in the vector it is pulled back from: its own gradient pushes
    weights = torch.tensor(vector, requires_grad=True)
    gradient = torch.autograd.grad(answers, tensors, weights, create_graph=True,
                                   allow_unused=True, materialize_grads=True)  # fmt: skip
    total = sum((gradient[name] * torch.tensor(moves[name])).sum() for name in parts)
    (pushed,) = torch.autograd.grad(total, weights)
    assert np.allclose(pushed, tape.push(moves), atol=1e-10)
    pulled = tape.pull(vector)
    for name in parts:
        found = np.zeros(parts[name].shape)
        if name in pulled:
            reads = tape.reads.get(name)
            found = pulled[name].sum(axis=0) if reads is None else pulled[name].T @ reads
        assert np.allclose(found, gradient[name].detach(), atol=1e-10), name


def test_queries_that_were_filled_up_have_the_same_answers_and_products():
    rng = np.random.default_rng(0)
    one = block(rng, 6, heads=2, neurons=5, norm="pre")
    parts = split_block(one)
    form = form_of(one, parts)
    pairs = [(tokens, one(tokens)) for tokens in
             (rng.standard_normal((5, length, 6)) for length in (3, 4, 1))]  # fmt: skip
    batches = list(pad_queries(pairs, most=4))
    assert [one.tokens.shape[:2] for one in batches] == [(4, 1), (1, 1), (4, 4), (4, 4), (2, 4)]
    assert [one.real is None for one in batches] == [True, True, False, False, True]
    for batch in batches:
        assert np.allclose(run_block(form, parts, batch.tokens, batch.real).answers, batch.answers)
    apart = run_block(form, parts, pairs[0][0][:4])
    filled = run_block(form, parts, batches[2].tokens, batches[2].real)
    moves = {name: rng.standard_normal(part.shape) for name, part in parts.items()}
    assert np.allclose(apart.push(moves), filled.push(moves))
    vector = rng.standard_normal(apart.answers.shape)
    for name, part in apart.pull(vector).items():
        assert np.allclose(part, filled.pull(vector)[name]), name


def test_single_precision_is_the_same_pass():
    rng = np.random.default_rng(0)
    one = block(rng, 6, heads=2, neurons=5)
    parts = split_block(one)
    tape = run_block(form_of(one, parts), parts, rng.standard_normal((5, 3, 6)))
    moves = {name: rng.standard_normal(part.shape) for name, part in parts.items()}
    single = tape.astype(np.float32)
    step = {name: part.astype(np.float32) for name, part in moves.items()}
    assert single.push(step).dtype == np.float32
    assert np.allclose(single.push(step), tape.push(moves), atol=1e-3)


@pytest.mark.parametrize("epsilon", [1e-12, 1e-30])
def test_the_derivative_by_an_epsilon_far_below_a_rounding_of_differences(epsilon):
    x = np.random.default_rng(0).standard_normal((4, 6))
    slope = Norming.of(x, np.log(epsilon), 6).slope(np.log(epsilon))
    assert np.allclose(slope, -0.5 * epsilon * x / np.mean(x**2, axis=1, keepdims=True) ** 1.5,
                       rtol=1e-9, atol=0.0)  # fmt: skip


def test_nothing_at_all_has_no_direction():
    assert not Norming.of(np.zeros((2, 3)), -800.0, 3).value.any()
