"""From the output layer to the input dictionary, where a box also takes vectors (`inputs_embeds`).

Statement.  Behind a pre-norm network the residual stream of a single long vector is that vector,
            but for what the layers add, which is bounded: z(s x) tends to M n(x) + m with s, n the
            last norm. So M = W diag(g) is known in the basis of the inputs, no longer up to a
            rotation, but for a row a that all tokens share, which log-probabilities do not tell.
            Where input and output share their embedding, E = W = (M + a) diag(1 / g): of V h
            unknowns 2 h are left, the gain g and a, and a token t is the vector (M_t + a) / g.
Queries.    Each axis in both directions and at two lengths, 4 h in all; the answers of a few tokens
            as numbers; 2 h + 1 answers to vectors for each step of Gauss-Newton and token.
Algebra.    M_i = (z(s e_i) - z(-s e_i)) / (2 sqrt(h)), extrapolated from two lengths. A LayerNorm
            takes the mean off: M is then known up to a constant in each row, which is one more
            unknown per token and is not found: refused. log g and a by Gauss-Newton on
            F((M_t + a) / g) = f(t), with differences of answers as the Jacobian.
When it fails. Columns that leave the space of the output layer: the vector does not reach the last
            norm (no residual stream, a norm before it). A misfit on fresh tokens: the embeddings
            are not tied.
Source.     Own.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array, Float, Int, random_stream
from keyhole.errors import IllConditioned, Inconsistent, InvalidArgument
from keyhole.measurement.asker import Asker
from keyhole.models.language_model import OutputLayer
from keyhole.oracles.base import Oracle

AXES, TOKENS, GAIN = "long vectors", "tokens alone", "gain"  # purposes of queries


@dataclass(frozen=True, eq=False)
class Dictionary:
    """`vectors` (V, h): what each token is as an input. `output` (V, h): the output matrix with the
    gain of the last norm, in the same basis. `misfit`: of fresh tokens, relative to their
    answers."""

    vectors: Float[Array, "V h"]
    output: Float[Array, "V h"]
    gain: Float[Array, " h"]
    misfit: float


def recover_dictionary(
    vectors: Oracle,
    tokens: Oracle,
    layer: OutputLayer,
    *,
    long: float = 1e6,
    accuracy: float = 1e-4,
    seed: int = 0,
) -> Dictionary:
    """Recovers the input dictionary of a model whose embeddings are tied to its output layer.

    Args:
        vectors: The model as a box that takes vectors (`open_embeddings`).
        tokens: The same model as a box that takes numbers of tokens (`open_language_model`).
        layer: Its output layer, as `OutputLayerLearner` found it.
        long: Length of the vectors of which the layers add a small part.
        accuracy: Misfit of fresh tokens, relative to their answers, up to which the embeddings
            count as tied.
        seed: The same seed asks the same queries.

    Returns:
        The dictionary: a vector for every token, and how it was found.

    Raises:
        InvalidArgument: Boxes or a layer that do not belong together.
        Inconsistent: Tokens are not the vectors that tied embeddings make of them.
        IllConditioned: The layer's space is not determined well enough.

    Example:
        With `model` a Hugging Face causal LM (docs/guide/language_models.md):

        >>> def read(model, keyhole):
        ...     tokens, vectors = keyhole.open_language_model(model), keyhole.open_embeddings(model)
        ...     layer = keyhole.recover(tokens, keyhole.OutputLayerLearner()).model
        ...     return recover_dictionary(vectors, tokens, layer)
    """
    width = vectors.spec.width
    if tokens.spec.domain.tokens is None or width < 2:
        raise InvalidArgument(
            "a dictionary is found from two boxes: one that takes vectors, opened with "
            "keyhole.open_oracle, and one that takes tokens, opened with "
            "keyhole.open_language_model"
        )
    rng = random_stream(seed, "dictionary")
    output = find_output(vectors, long)
    check_space(output, layer)
    drawn = rng.permutation(len(output))
    some, fresh = drawn[:4], drawn[4:8]
    gain, shared = fit_gain(vectors, output, some, ask_tokens(tokens, some))
    found = (output + shared) / gain
    seen = ask_tokens(tokens, fresh)
    gaps = centred(ask_vectors(vectors, found[fresh], GAIN)) - seen
    misfit = float(np.linalg.norm(gaps) / np.linalg.norm(seen))
    if misfit > accuracy:
        raise Inconsistent(
            "tokens are not the vectors that tied embeddings make of them: fresh ones are answered "
            f"differently, by {misfit:.1e} of their answers. Input and output have embeddings of "
            "their own, or the fit ended early"
        )
    return Dictionary(found, output + shared, gain, misfit)


def centred(answers: Float[Array, "n V"]) -> Float[Array, "n V"]:
    """Without what is common to all tokens, which log-probabilities do not tell."""
    return np.asarray(answers - answers.mean(axis=1, keepdims=True))


def ask_vectors(box: Oracle, rows: Float[Array, "n h"], purpose: str) -> Float[Array, "n V"]:
    """Answers to prompts of one vector each."""
    return Asker(box).points(rows, purpose)


def ask_tokens(box: Oracle, numbers: Int[Array, " n"]) -> Float[Array, "n V"]:
    """Answers to prompts of one token each."""
    prompts = numbers[:, None, None].astype(np.float64)
    return centred(Asker(box)(prompts, TOKENS))


def find_output(vectors: Oracle, long: float) -> Float[Array, "V h"]:
    """W diag(g) in the basis of the inputs, from the axes at two lengths."""
    axes, width = np.eye(vectors.spec.width), vectors.spec.width
    found = []
    for size in (long, 2.0 * long):
        ahead, back = (ask_vectors(vectors, sign * size * axes, AXES) for sign in (1.0, -1.0))
        found.append(centred(ahead - back).T / (2.0 * np.sqrt(width)))
    # what the layers add falls with the length: so does its part in the answer
    return np.asarray(2.0 * found[1] - found[0])


def check_space(output: Float[Array, "V h"], layer: OutputLayer) -> None:
    """Refuses columns that are none of the output layer's."""
    if len(output) != layer.tokens or output.shape[1] != layer.width:
        raise InvalidArgument(
            f"the layer has {layer.tokens} tokens and width {layer.width}, the box of vectors "
            f"{len(output)} and {output.shape[1]}"
        )
    basis = np.linalg.qr(layer.matrix - layer.matrix.mean(axis=0))[0]
    outside = np.linalg.norm(output - basis @ (basis.T @ output)) / np.linalg.norm(output)
    if outside > 1e-3:
        raise IllConditioned(
            f"answers to long vectors leave the output space by {outside:.1e}: a vector does not "
            "reach the last norm as it is (no residual stream, or a norm before it)"
        )
    singular = np.linalg.svd(output, compute_uv=False)
    if singular[-1] < 1e-6 * singular[0]:
        raise IllConditioned(
            "the last norm hides a direction of the vectors (a LayerNorm takes their mean off): a "
            "token is then not known from its row of the output matrix"
        )


def fit_gain(
    vectors: Oracle, output: Float[Array, "V h"], some: Int[Array, " n"], seen: Float[Array, "n V"]
) -> tuple[Float[Array, " h"], Float[Array, " h"]]:
    """g and a from the answers of some tokens, by Gauss-Newton on log g and a, steps halved where
    they lead nowhere."""
    width, rows = output.shape[1], output[some]
    size = float(np.sqrt(np.mean(output**2)))  # the unit of a

    def gap(unknowns: Array) -> Array:
        logs, shared = unknowns[:width], size * unknowns[width:]
        answers = ask_vectors(vectors, (rows + shared) / np.exp(logs), GAIN)
        return np.asarray((centred(answers) - seen).ravel())

    unknowns = np.zeros(2 * width)
    off = gap(unknowns)
    small = 1e-4  # between the rounding of answers, of single precision too, and their curvature
    for _ in range(30):
        columns = [(gap(unknowns + small * axis) - off) / small for axis in np.eye(2 * width)]
        step = np.linalg.lstsq(np.stack(columns, axis=1), -off, rcond=1e-9)[0]
        step *= min(1.0, 0.5 / max(float(np.abs(step).max()), TINY))
        for _ in range(6):
            other = gap(unknowns + step)
            if np.linalg.norm(other) < np.linalg.norm(off):
                break
            step = step / 2.0
        else:
            break
        gained = np.linalg.norm(other) < 0.9 * np.linalg.norm(off)
        unknowns, off = unknowns + step, other
        if not gained and np.linalg.norm(off) < 1e-6 * np.linalg.norm(seen):
            break
    return np.asarray(np.exp(unknowns[:width])), np.asarray(size * unknowns[width:])
