"""The catalogue of faults, as data: one entry is one fault.

An entry has a name, the transformation of the reference that makes it, the values that are tried
for its free parameter, the query that shows it and what to do about it. Adding one is one more
entry in the list; docs/guide/adding_a_fault.md shows it from beginning to end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from keyhole.diagnosis import transformations as do
from keyhole.diagnosis.attention import AttentionChange
from keyhole.diagnosis.reference import Reference
from keyhole.diagnosis.simulate import Bench, Inputs

GROUPS = (  # in the order in which faults of several groups are applied
    "input", "embedding", "order", "weights", "norm", "network", "position", "attention",
    "number format", "readout",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One way in which a served model goes wrong.

    Attributes:
        name: what is wrong, as the beginning of a sentence, with {} for the value.
        group: the part of the model that it belongs to.
        apply: changes the bench so that it has the fault, given a value.
        shown_by: the query that shows it.
        advice: what to do about it.
        applies: whether a reference can have it.
        values: the values to try, for a reference; one None where there is no parameter.
        parameter: what the value is.
        refine: "log" where a value between those tried is found by least squares, "whole" where
            the neighbours of a whole number are tried.
        company: whether an answer depends on the other rows of its call.
        place: the dotted name of the part that a value stands for.
        local: whether a single layer may have it, the others being right.
        begins: the first layer that it touches, given a value.
        chaotic: whether rounding in between is so coarse that the last digit of a weight moves
            answers visibly: some rows then agree down to rounding, and the others not at all.
        say: the value in words, as it stands in the name.
    """

    name: str
    group: str
    apply: Callable[[Bench, Any], None]
    shown_by: str
    advice: str
    applies: Callable[[Reference], bool] = lambda _: True
    values: Callable[[Reference], Sequence[Any]] = lambda _: (None,)
    parameter: str = ""
    refine: str = ""
    company: bool = False
    place: Callable[[Reference, Any], str] = lambda _, __: ""
    local: bool = False
    begins: Callable[[Any], int] = lambda _: 0
    chaotic: bool = False
    say: Callable[[Any], str] = lambda value: (
        f"{value:.6g}" if isinstance(value, float) else str(value)
    )

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Variant:
    """A fault with a value, in all layers or in one."""

    fault: Fault
    value: Any = None
    layer: int | None = None

    def __str__(self) -> str:
        value = self.fault.say(self.value)
        place = "" if self.layer is None else f", in layer {self.layer} alone"
        return self.fault.name.replace("{}", value) + place

    @property
    def key(self) -> tuple[str, str, int]:
        """What tells variants apart."""
        return self.fault.name, repr(self.value), -1 if self.layer is None else self.layer

    @property
    def begins(self) -> int:
        """The first layer that it touches."""
        return self.fault.begins(self.value) if self.layer is None else self.layer


def variants(reference: Reference, extra: Sequence[Fault] = ()) -> list[Variant]:
    """All faults that a reference can have, with all values to try."""
    return [
        Variant(fault, value)
        for fault in (*CATALOGUE, *extra)
        if fault.applies(reference)
        for value in fault.values(reference)
    ]


def local_variants(reference: Reference) -> list[Variant]:
    """The faults that one layer may have by itself, with all values to try, layer by layer."""
    faults = [f for f in CATALOGUE if f.local and f.applies(reference)]
    return [
        Variant(fault, value, layer)
        for layer in range(reference.layers if layered(reference) else 0)
        for fault in faults
        for value in fault.values(reference)
    ]


def changes_rows(variant: Variant) -> bool:
    """Whether tokens are put into rows or taken out of them."""
    return variant.fault.say in (say_marks, say_ends)


def is_chaotic(hypothesis: Sequence[Variant]) -> bool:
    """Whether a hypothesis rounds so coarsely in between that only some rows can be foretold."""
    return any(v.fault.chaotic for v in hypothesis)


def tokens(reference: Reference) -> bool:
    return reference.tokens


def bidirectional(reference: Reference) -> bool:
    return reference.tokens and not reference.anatomy.causal


def causal(reference: Reference) -> bool:
    return reference.tokens and reference.anatomy.causal


def attends(reference: Reference) -> bool:
    return reference.tokens and reference.anatomy.uses_interface


def rotates(reference: Reference) -> bool:
    """Rotary positions with one set of frequencies, and heads that can be permuted."""
    names = [n for m in reference.anatomy.rotary for n, _ in m.named_buffers()]
    return attends(reference) and names.count("inv_freq") == len(reference.anatomy.rotary) > 0


def learned_positions(reference: Reference) -> bool:
    return reference.tokens and positions(reference) is not None


def positions(reference: Reference) -> Any:
    return reference.anatomy.embedding("position_embeddings", "wpe")


def token_types(reference: Reference) -> Any:
    return reference.anatomy.embedding("token_type_embeddings")


def layered(reference: Reference) -> bool:
    return reference.layers > 1


def feed(**changes: Any) -> Callable[[Bench, Any], None]:
    """A fault of what goes into the model: attributes of Inputs, where "$" stands for the value."""

    def apply(bench: Bench, value: Any) -> None:
        def change(inputs: Inputs) -> None:
            for name, given in changes.items():
                setattr(inputs, name, value if given == "$" else given)

        bench.feed(change)

    return apply


def attend(**changes: Any) -> Callable[[Bench, Any], None]:
    """A fault of attention: switches of Attention, where "$" stands for the value."""
    return lambda bench, value: bench.attend(
        **{name: value if given == "$" else given for name, given in changes.items()}
    )


def read(**changes: Any) -> Callable[[Bench, Any], None]:
    """A fault of the readout: attributes of Readout, where "$" stands for the value."""
    return lambda bench, value: bench.read(
        **{name: value if given == "$" else given for name, given in changes.items()}
    )


def lose_causality_in_equal_batches(bench: Bench, _: Any) -> None:
    def change(inputs: Inputs) -> None:
        lengths = {len(row) for row in inputs.rows}
        if inputs.together > 1 and len(lengths) == 1:
            inputs.attention.append(AttentionChange(causal=False))

    bench.feed(change)


def has_bias(role: str) -> Callable[[Reference], bool]:
    return lambda r: any(p.bias is not None for p in r.anatomy.role(role))


def projection_name(reference: Reference, value: tuple[int, str]) -> str:
    return reference.anatomy.layers[value[0]].projections[value[1]].name


def single_biases(reference: Reference) -> list[tuple[int, str]]:
    found = [p for p in reference.anatomy.projections if p.bias is not None]
    return [(p.layer, p.role) for p in found if p.role != "key"]  # which softmax does not see


def say_marks(value: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    """As "101 in front and 102 behind"."""
    places = zip(value, ("in front", "behind"), strict=True)
    return " and ".join(f"{', '.join(map(str, part))} {where}" for part, where in places if part)


def say_ends(value: tuple[int, int]) -> str:
    """As "the first token and the last token"."""
    ends = zip(value, ("the first token", "the last token"), strict=True)
    return " and ".join(name for missing, name in ends if missing)


def first_layer(value: Any) -> int:
    return int(value[0] if isinstance(value, tuple) else value)


def layer_name(reference: Reference, value: Any) -> str:
    return reference.anatomy.layers[first_layer(value)].name


def square(role: str) -> Callable[[Reference], bool]:
    def check(reference: Reference) -> bool:
        found = reference.anatomy.role(role)
        return bool(found) and all(p.matrix.shape[0] == p.matrix.shape[1] for p in found)

    return check


def same_shapes(first: str, second: str) -> Callable[[Reference], bool]:
    def check(reference: Reference) -> bool:
        a, b = reference.anatomy.role(first), reference.anatomy.role(second)
        return bool(a) and len(a) == len(b) and a[0].matrix.shape == b[0].matrix.shape

    return check


def post_norm(reference: Reference) -> bool:
    found = reference.anatomy.layers
    return bool(found) and any(type(m).__name__.endswith("SelfOutput")
                               for m in found[0].module.modules())  # fmt: skip


def other_activations(reference: Reference) -> list[str]:
    own = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh", "swish": "silu"}
    now = own.get(reference.anatomy.activation, reference.anatomy.activation)
    known = ("gelu", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu", "tanh", "leaky_relu")
    return [name for name in known if name != now]


def other_epsilons(reference: Reference) -> list[float]:
    own = reference.anatomy.epsilon or 0.0
    grid = (1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
    return [value for value in grid if abs(value - own) > 0.01 * own]


def roundings(reference: Reference) -> list[tuple[str, bool]]:
    return [(kind, whole) for kind in do.ROUNDINGS for whole in (False, True)]


def score_factors(reference: Reference) -> list[float]:
    """No division by the root of the head width, a second one, by the root of the model's width."""
    root = reference.anatomy.head_width**0.5
    return sorted({root, 1 / root, 2.0, 0.5, (root**2 / reference.width) ** 0.5} - {1.0})


def rotary_bases(reference: Reference) -> list[float]:
    own = 10_000.0
    for module in reference.anatomy.rotary:
        data = module.inv_freq
        own = float((data[0] / data[1]) ** len(data)) if len(data) > 1 else own
    grid = (1e3, 1e4, 1e5, 5e5, 1e6)
    return [value for value in grid if abs(value / own - 1) > 0.01]


def forms_of_specials(reference: Reference) -> list[tuple[int, int]]:
    return [(1, 0), (0, 1), (1, 1)]


def other_poolings(reference: Reference) -> list[str]:
    known = ("mean", "cls", "last", "max", "sqrt")
    return [name for name in known if name != reference.readout.pooling]


def pools(reference: Reference) -> bool:
    return reference.tokens and reference.readout.pooling is not None


def marks(reference: Reference) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Special tokens that a server may put around a row, once more or for the first time."""
    config = reference.anatomy.config
    start = reference.start or tuple(
        n for n in (getattr(config, "bos_token_id", None),) if isinstance(n, int)
    )
    end = reference.end or tuple(
        n for n in (getattr(config, "eos_token_id", None),) if isinstance(n, int)
    )
    found = [(start, ()), ((), end), (start, end)]
    inside = [pair for pair in found if pair != ((), ())]
    return [
        pair
        for k, pair in enumerate(inside)
        if pair not in inside[:k] and all(n < reference.vocabulary for part in pair for n in part)
    ]


CATALOGUE: tuple[Fault, ...] = (
    # -- what goes in --------------------------------------------------------------------------
    Fault(
        "the attention mask is ignored", "input", feed(unmasked=True),
        "a row alone and beside a longer one",
        "pass attention_mask to every layer of the model", bidirectional, company=True,
    ),
    Fault(
        "the attention mask is ignored, by pooling as well", "input",
        feed(unmasked=True, pooled=True), "a row alone and beside a longer one",
        "pass attention_mask to the model and to pooling", tokens, company=True,
    ),
    Fault(
        "rows are padded to a multiple of {} without a mask", "input",
        feed(unmasked=True, multiple="$"), "a row alone",
        "pass attention_mask, also where a single row is padded", bidirectional,
        lambda _: (8, 16, 32, 64), "multiple", company=True,
    ),
    Fault(
        "rows are padded to a multiple of {} without a mask, and padding is pooled", "input",
        feed(unmasked=True, pooled=True, multiple="$"), "a row alone",
        "pass attention_mask to the model and to pooling", tokens,
        lambda _: (8, 16, 32, 64), "multiple", company=True,
    ),
    Fault(
        "padding on the left is counted in positions", "input", feed(left=True, counted=True),
        "a row alone and beside a longer one",
        "count positions from the first token, or pad on the right", learned_positions,
        company=True,
    ),
    Fault(
        "causality is lost in batches of equal lengths", "input", lose_causality_in_equal_batches,
        "a row alone and in a batch of equal lengths",
        "build the causal mask also where no row is padded",
        lambda r: causal(r) and attends(r), company=True,
    ),
    Fault(
        "positions are shifted by {}", "input", feed(shift="$"), "any row",
        "begin positions where the model was trained to", learned_positions,
        lambda _: (-2, -1, 1, 2), "shift",
    ),
    Fault(
        "tokens are added to every row: {}", "input",
        lambda bench, value: do.put_around(bench, *value), "any row",
        "send token numbers as they are: add_special_tokens=False", tokens, marks, "tokens",
        say=say_marks,
    ),
    Fault(
        "tokens are missing from every row: {}", "input",
        lambda bench, value: do.take_off(bench, *value), "any row of two tokens or more",
        "let the tokenizer add its special tokens", tokens, forms_of_specials, "tokens",
        say=say_ends,
    ),
    # -- embeddings ----------------------------------------------------------------------------
    Fault(
        "the token type embedding is missing", "embedding",
        lambda bench, _: bench.edit(token_types(bench.reference).weight).zero_(),
        "a single token", "add the embedding of token type 0",
        lambda r: token_types(r) is not None,
    ),
    Fault(
        "token types are 1 in place of 0", "embedding", feed(token_type=1), "a single token",
        "pass token_type_ids of zeros",
        lambda r: token_types(r) is not None and token_types(r).weight.shape[0] > 1,
    ),
    Fault(
        "position embeddings are missing", "embedding",
        lambda bench, _: bench.edit(positions(bench.reference).weight).zero_(),
        "a single token", "add the position embeddings", learned_positions,
    ),
    Fault(
        "the norm over the embeddings is missing", "embedding",
        lambda bench, _: do.pass_through(bench, bench.anatomy.embedding_norm),
        "a single token", "apply the norm over the embeddings",
        lambda r: r.anatomy.embedding_norm is not None,
    ),
    Fault(
        "embeddings are multiplied by {}", "embedding",
        lambda bench, value: bench.hook(
            bench.model.get_input_embeddings(), lambda states: states * value
        ),
        "a single token", "check whether the model scales embeddings by the root of its width",
        tokens, lambda r: (r.width**0.5, r.width**-0.5), "factor", "log",
    ),
    # -- the order of layers -------------------------------------------------------------------
    Fault(
        "layer {} is skipped", "order", do.bypass_layer, "a single token",
        "run all layers", layered, lambda r: range(r.layers), "layer", place=layer_name,
        begins=first_layer,
    ),
    Fault(
        "layers {} are exchanged", "order", do.exchange_layers, "a single token",
        "run layers in order", layered,
        lambda r: [(k, k + 1) for k in range(r.layers - 1)], "layers", place=layer_name,
        begins=first_layer, say=lambda value: f"{value[0]} and {value[1]}",
    ),
    # -- weights -------------------------------------------------------------------------------
    Fault(
        "the {} biases are missing", "weights",
        lambda bench, role: do.silence(bench, bench.anatomy.role(role), True),
        "a single token", "load the biases",
        values=lambda r: [x for x in ("query", "key", "value", "output", "gate", "up", "down")
                          if has_bias(x)(r)],
        parameter="kind",
    ),
    Fault(
        "the bias of the {} is missing", "weights",
        lambda bench, value: do.silence(
            bench, [bench.anatomy.layers[value[0]].projections[value[1]]], True
        ),
        "a single token", "load this bias", layered, single_biases, "layer, projection",
        place=projection_name, begins=first_layer,
        say=lambda value: f"{value[1]} projection in layer {value[0]}",
    ),
    Fault(
        "attention of layer {} is left out", "weights",
        lambda bench, k: do.silence(
            bench, [bench.anatomy.layers[k].projections["output"]], False
        ),
        "a single token", "run attention in every layer",
        lambda r: layered(r) and len(r.anatomy.role("output")) == r.layers,
        lambda r: range(r.layers), "layer", place=layer_name,
        begins=first_layer,
    ),
    Fault(
        "the network of layer {} is left out", "weights",
        lambda bench, k: do.silence(bench, [bench.anatomy.layers[k].projections["down"]], False),
        "a single token", "run the network in every layer",
        lambda r: layered(r) and len(r.anatomy.role("down")) == r.layers,
        lambda r: range(r.layers), "layer", place=layer_name,
        begins=first_layer,
    ),
    Fault(
        "the {} weights are transposed", "weights", do.transpose_weights, "a single token",
        "transpose these weights when loading",
        values=lambda r: [x for x in ("query", "key", "value", "output") if square(x)(r)],
        parameter="kind", local=True,
    ),
    Fault(
        "queries and values are exchanged", "weights",
        lambda bench, _: do.exchange_weights(bench, "query", "value"), "a single token",
        "load query, key and value in their order", same_shapes("query", "value"), local=True,
    ),
    Fault(
        "keys and values are exchanged", "weights",
        lambda bench, _: do.exchange_weights(bench, "key", "value"), "a single token",
        "load query, key and value in their order", same_shapes("key", "value"), local=True,
    ),
    Fault(
        "gate and up projections are exchanged", "weights",
        lambda bench, _: do.exchange_weights(bench, "gate", "up"), "a single token",
        "load gate and up in their order", same_shapes("gate", "up"), local=True,
    ),
    Fault(
        "the skip connection around {} is missing", "weights",
        lambda bench, value: do.drop_residual(
            bench, {"attention": "output", "the network": "down"}[value]
        ),
        "a single token", "add the input of the block to its output", post_norm,
        lambda _: ("attention", "the network"), "block", local=True,
    ),
    Fault(
        "what attention adds is multiplied by {}", "weights",
        lambda bench, value: do.scale_projections(bench, "output", value), "a single token",
        "add what attention answers as it is (residual_multiplier)",
        lambda r: bool(r.anatomy.role("output")), lambda _: (0.5, 2.0), "factor", "log",
        local=True,
    ),
    Fault(
        "what the network adds is multiplied by {}", "weights",
        lambda bench, value: do.scale_projections(bench, "down", value), "a single token",
        "add what the network answers as it is (residual_multiplier)",
        lambda r: bool(r.anatomy.role("down")), lambda _: (0.5, 2.0), "factor", "log",
        local=True,
    ),
    # -- norms ---------------------------------------------------------------------------------
    Fault(
        "the norms' epsilon is {}", "norm", do.set_epsilon, "a single token",
        "take epsilon from the model's configuration",
        lambda r: bool(r.anatomy.norms) and r.anatomy.epsilon is not None, other_epsilons,
        "epsilon", "log", local=True,
    ),
    Fault(
        "{} is added to the norms' gains", "norm", do.shift_gains, "a single token",
        "some models multiply by 1 + w, others by w: check which",
        lambda r: bool(r.anatomy.norms), lambda _: (1.0, -1.0), "offset", local=True,
    ),
    Fault(
        "the last norm is missing", "norm",
        lambda bench, _: do.pass_through(bench, bench.anatomy.final_norm), "a single token",
        "apply the norm after the last layer", lambda r: r.anatomy.final_norm is not None,
    ),
    Fault(
        "norms do not subtract the mean", "norm", lambda bench, _: do.center_norms(bench, False),
        "a single token", "this is LayerNorm, not RMSNorm",
        lambda r: any(type(m).__name__ == "LayerNorm" for _, m in r.anatomy.norms), local=True,
    ),
    Fault(
        "norms subtract the mean", "norm", lambda bench, _: do.center_norms(bench, True),
        "a single token", "this is RMSNorm, not LayerNorm",
        lambda r: any(type(m).__name__.endswith("RMSNorm") for _, m in r.anatomy.norms)
        and "Gemma" not in type(r.model).__name__, local=True,
    ),
    Fault(
        "norms divide the variance by one less than the width", "norm",
        lambda bench, _: do.unbias_norms(bench), "a single token",
        "use the biased variance, as LayerNorm does",
        lambda r: any(type(m).__name__ == "LayerNorm" for _, m in r.anatomy.norms), local=True,
    ),
    # -- networks ------------------------------------------------------------------------------
    Fault(
        "the activation is {}", "network", do.set_activation, "a single token",
        "take the activation from the model's configuration",
        lambda r: r.tokens and bool(r.anatomy.activations), other_activations, "activation",
        local=True,
    ),
    # -- positions -----------------------------------------------------------------------------
    Fault(
        "the base of rotary positions is {}", "position", do.set_rotary_base,
        "a row of two tokens or more", "take rope_theta from the model's configuration", rotates,
        rotary_bases, "base", "log",
    ),
    Fault(
        "rotary positions are divided by {}", "position", do.scale_rotary,
        "a row of two tokens or more", "check the scaling of rotary positions", rotates,
        lambda _: (0.5, 2.0, 4.0, 8.0), "divisor", "log",
    ),
    Fault(
        "a share of {} of each head is rotated", "position", do.share_rotary,
        "a row of two tokens or more", "rotate the whole head", rotates,
        lambda _: (0.0, 0.25, 0.5, 0.75), "share",
    ),
    Fault(
        "rotary positions turn neighbours, not halves", "position",
        lambda bench, _: do.interleave_rotary(bench), "a row of two tokens or more",
        "permute query and key weights, or rotate halves", rotates,
    ),
    Fault(
        "rotary positions turn the other way", "position",
        lambda bench, _: do.scale_rotary(bench, -1.0), "a row of two tokens or more",
        "check the sign of the sine", rotates,
    ),
    # -- attention -----------------------------------------------------------------------------
    Fault(
        "attention scores are multiplied by {}", "attention", attend(factor="$"),
        "a row of two tokens or more", "scale scores by one over the root of the head width",
        attends, score_factors, "factor", "log", local=True,
    ),
    Fault(
        "attention scores are capped at {}", "attention", attend(cap="$"),
        "a row of two tokens or more", "this model has no cap (logit_softcapping)", attends,
        lambda _: (1.0, 3.0, 10.0, 30.0, 50.0), "cap", "log", local=True,
    ),
    Fault(
        "attention looks only {} tokens far", "attention", attend(window="$"),
        "a row longer than the window", "this model attends to all tokens (sliding_window)",
        attends, lambda _: (2, 3, 4, 6, 8, 12, 16), "window", "whole", local=True,
    ),
    Fault(
        "attention is causal", "attention", attend(causal=True), "a row of two tokens or more",
        "this model sees tokens on both sides: is_causal=False",
        lambda r: attends(r) and bidirectional(r), local=True,
    ),
    Fault(
        "attention is not causal", "attention", attend(causal=False),
        "a row of two tokens or more", "build the causal mask",
        lambda r: attends(r) and causal(r), local=True,
    ),
    Fault(
        "queries and keys are exchanged", "attention", attend(exchanged=True),
        "a row of two tokens or more", "load query and key in their order",
        lambda r: attends(r) and r.anatomy.heads == r.anatomy.key_heads, local=True,
    ),
    Fault(
        "heads are split in the wrong order ({})", "attention", attend(interleaved="$"),
        "a single token", "split a projection into (heads, head width), not the reverse",
        lambda r: attends(r) and r.anatomy.heads == r.anatomy.key_heads > 1,
        lambda _: ("split", "split and merge"), "where", local=True,
    ),
    Fault(
        "shared keys and values are repeated in the wrong order", "attention",
        attend(tiled=True), "a single token", "repeat as a a b b (repeat_interleave)",
        lambda r: attends(r) and r.anatomy.heads > r.anatomy.key_heads > 1, local=True,
    ),
    Fault(
        "softmax has a one added below the line", "attention", attend(sink=True),
        "a single token", "use the plain softmax", attends, local=True,
    ),
    # -- number formats of weights -------------------------------------------------------------
    Fault(
        "weights are quantised: {}", "number format",
        lambda bench, value: do.round_weights(bench, value), "any row",
        "serve the weights in the format that was signed off",
        lambda r: any(True for _ in r.anatomy.projections), roundings, "format, embeddings too",
        say=lambda value: value[0] + (", embeddings too" if value[1] else ", embeddings not"),
    ),
    Fault(
        "weights and activations are int8 ({}), with one scale for all rows of a request",
        "number format", lambda bench, kind: do.quantise_dynamically(bench, kind, False),
        "a row alone and beside another",
        "answers depend on the batch: quantise weights alone, or sign off this model", tokens,
        lambda _: ("int8 per tensor", "int8 per channel"), "weights", company=True, chaotic=True,
    ),
    Fault(
        "weights and activations are int8 ({}), with one scale for each row", "number format",
        lambda bench, kind: do.quantise_dynamically(bench, kind, True), "any row",
        "quantise weights alone, or sign off this model", tokens,
        lambda _: ("int8 per tensor", "int8 per channel"), "weights", chaotic=True,
    ),
    # -- readout -------------------------------------------------------------------------------
    Fault(
        "pooling is {}", "readout", read(pooling="$"), "a row of two tokens or more",
        "pool as the model's folder states", pools, other_poolings, "pooling",
    ),
    Fault(
        "padding is pooled", "readout", read(padding=True), "a row alone and beside a longer one",
        "pass attention_mask to pooling", pools, company=True,
    ),
    Fault(
        "the first and the last token are not pooled", "readout", read(specials=False),
        "a row of three tokens or more", "pool all tokens, special ones too",
        lambda r: pools(r) and r.readout.pooling not in ("cls", "last"),
    ),
    Fault(
        "the answer is that of the token {} places off", "readout", read(shift="$"),
        "a row of two tokens or more", "answer with the state of the right token",
        lambda r: pools(r) and r.readout.pooling in ("last", "cls"), lambda _: (-1, 1), "places",
    ),
    Fault(
        "answers are not normalised", "readout", read(normalize=False), "any row",
        "divide answers by their length", lambda r: r.readout.normalize,
    ),
    Fault(
        "answers are normalised", "readout", read(normalize=True), "any row",
        "send answers as they are", lambda r: not r.readout.normalize,
    ),
)  # fmt: skip

MULTIPLIED = Fault(
    "answers are multiplied by {}", "readout", read(factor="$"), "any row",
    "send answers as they are", parameter="factor",
)  # fmt: skip
CUT = Fault(
    "rows are cut after {} tokens", "input", lambda bench, n: do.cut_rows(bench, n),
    "a long row", "raise the server's max_length", parameter="tokens",
)  # fmt: skip
CUT_INSIDE = Fault(
    "rows are cut to {} tokens, special tokens kept", "input",
    lambda bench, n: do.cut_rows(
        bench, n, (len(bench.reference.start), len(bench.reference.end))
    ),
    "a long row", "raise the server's max_length", parameter="tokens",
)  # fmt: skip
CUT_LEFT = Fault(
    "rows are cut to their last {} tokens", "input",
    lambda bench, n: do.cut_rows(bench, n, left=True), "a long row",
    "cut at the end, or raise the server's max_length", parameter="tokens",
)  # fmt: skip
LONG_WINDOW = Fault(
    "attention looks only {} tokens far", "attention", attend(window="$"), "a long row",
    "this model attends to all tokens (sliding_window)", attends, parameter="window",
)  # fmt: skip
