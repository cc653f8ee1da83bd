"""The parts of a transformer by what they do, whatever its authors called them.

Statement: a module of `transformers` (or any torch module) has layers, and each layer has
projections (query, key, value, output, gate, up, down), norms and an activation. Faults are stated
in these words, so that one entry of the catalogue serves every family.
Algebra: a projection may be rows of a larger weight (GPT-2's c_attn, ModernBERT's Wqkv and Wi);
`Projection.matrix` is then a view of these rows, and a change of the view is one of the model.
When it fails: a part that no pattern names is left out; faults of that part are then not tried, and
localisation still finds it by its dotted name.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

ROLES = {  # the first that fits the end of a name inside its layer
    "query": r"(query|q_proj|q_lin|\.q)",
    "key": r"(key|k_proj|k_lin|\.k)",
    "value": r"(value|v_proj|v_lin|\.v)",
    "fused attention": r"(c_attn|Wqkv|query_key_value|qkv_proj)",
    "output": r"(attention\.output\.dense|attention\.dense|o_proj|attn\.o|out_lin|attn\.c_proj"
    r"|attn\.Wo|attn\.out_proj|attention\.out_proj)",
    "gate": r"gate_proj",
    "fused gate": r"(mlp\.Wi|gate_up_proj)",
    "up": r"(intermediate\.dense|up_proj|mlp\.c_fc|lin1|ffn|linear1|fc1)",
    "down": r"(output\.dense|down_proj|mlp\.c_proj|mlp\.Wo|lin2|ffn_output|linear2|fc2)",
}
ACTIVATION_NAMES = ("intermediate_act_fn", "act_fn", "act", "activation", "activation_fn")
EPSILON_NAMES = ("variance_epsilon", "eps")


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map of a layer: rows `start` to `stop` of a module's weight."""

    name: str
    role: str
    layer: int
    module: Any
    start: int
    stop: int

    @property
    def transposed(self) -> bool:
        """Whether the weight is stored as (inputs, outputs), as in GPT-2."""
        return type(self.module).__name__ == "Conv1D"

    @property
    def matrix(self) -> Any:
        """The weight as (outputs, inputs): a view, so that writing into it changes the model."""
        return self.cut(self.module.weight.data)

    def cut(self, weight: Any) -> Any:
        """The projection's part of a weight of the module's shape, as (outputs, inputs)."""
        return (weight.T if self.transposed else weight)[self.start : self.stop]

    @property
    def bias(self) -> Any:
        """The bias as a view, or None."""
        bias = getattr(self.module, "bias", None)
        return None if bias is None else bias.data[self.start : self.stop]


@dataclass(frozen=True, eq=False)
class Layer:
    """One block of the model."""

    index: int
    name: str
    module: Any
    projections: dict[str, Projection] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Anatomy:
    """What a model is made of."""

    model: Any
    layers: tuple[Layer, ...]
    norms: tuple[tuple[str, Any], ...]
    activations: tuple[tuple[Any, str], ...]  # the module that holds one, and its attribute
    embeddings: tuple[tuple[str, Any], ...]
    rotary: tuple[Any, ...]

    @property
    def config(self) -> Any:
        """The configuration, or None for a module without one."""
        return getattr(self.model, "config", None)

    @property
    def projections(self) -> Iterator[Projection]:
        """All linear maps of all layers."""
        for layer in self.layers:
            yield from layer.projections.values()

    def role(self, role: str) -> list[Projection]:
        """The projections of one kind, from the first layer to the last."""
        return [p for p in self.projections if p.role == role]

    def embedding(self, *endings: str) -> Any:
        """The embedding table whose name ends in one of these, or None."""
        for name, module in self.embeddings:
            if name.endswith(endings):
                return module
        return None

    def of_layer(self, index: int) -> "Anatomy":
        """The same without what lies outside one layer."""
        layer = self.layers[index]
        inside = {id(m) for m in layer.module.modules()}
        return replace(
            self,
            layers=(layer,),
            norms=tuple(pair for pair in self.norms if id(pair[1]) in inside),
            activations=tuple(pair for pair in self.activations if id(pair[0]) in inside),
            embeddings=(),
            rotary=(),
        )

    @property
    def embedding_norm(self) -> Any:
        """The norm over the embeddings, in models that have one."""
        for name, module in self.norms:
            if name.startswith("embeddings"):
                return module
        return None

    @property
    def final_norm(self) -> Any:
        """The norm after the last layer, in models that have one."""
        inside = tuple(layer.name for layer in self.layers)
        for name, module in reversed(self.norms):
            if not name.startswith("embeddings") and not name.startswith(inside):
                return module
        return None

    @property
    def heads(self) -> int:
        """Heads of queries."""
        return int(getattr(self.config, "num_attention_heads", 0) or 0)

    @property
    def key_heads(self) -> int:
        """Heads of keys and values: fewer where queries share them."""
        return int(getattr(self.config, "num_key_value_heads", None) or self.heads)

    @property
    def head_width(self) -> int:
        """Numbers in one head's query."""
        own = getattr(self.config, "head_dim", None)
        if own:
            return int(own)
        width = getattr(self.config, "hidden_size", 0) or 0
        return width // self.heads if self.heads else 0

    @property
    def epsilon(self) -> float | None:
        """The number that norms add to a variance, where there is one for all."""
        named = [(m, epsilon_name(m)) for _, m in self.norms]
        values = {float(getattr(m, name)) for m, name in named if name is not None}
        return values.pop() if len(values) == 1 else None

    @property
    def activation(self) -> str:
        """The configuration's word for the activation."""
        names = ("hidden_act", "hidden_activation", "activation_function", "activation")
        words = (getattr(self.config, name, None) for name in names)
        return next((word for word in words if isinstance(word, str)), "")

    @property
    def causal(self) -> bool:
        """Whether a token sees only what stands before it."""
        flags = [getattr(m, "is_causal", None) for m in self.model.modules()]
        return any(flag is True for flag in flags)

    @property
    def uses_interface(self) -> bool:
        """Whether attention goes through transformers' register of attention functions."""
        return bool(getattr(self.model, "_supports_attention_backend", False)) or bool(
            getattr(self.model, "_supports_sdpa", False)
        )


def epsilon_name(module: Any) -> str | None:
    """The attribute that holds a norm's epsilon."""
    return next((n for n in EPSILON_NAMES if isinstance(getattr(module, n, None), float)), None)


def describe(model: Any) -> Anatomy:
    """Looks at a torch module and finds its parts."""
    named = list(model.named_modules())
    layers = tuple(
        Layer(index, name, module, dict(_projections(name, module, index, model)))
        for index, (name, module) in enumerate(_layers(model, named))
    )
    norms = tuple((n, m) for n, m in named if _is_norm(m))
    holders = [(m, a) for _, m in named for a in ACTIVATION_NAMES if callable(getattr(m, a, None))]
    inner = {id(getattr(m, a)) for m, a in holders}
    activations = tuple((m, a) for m, a in holders if id(m) not in inner)
    embeddings = tuple((n, m) for n, m in named if type(m).__name__.endswith("Embedding")
                       and getattr(getattr(m, "weight", None), "ndim", 0) == 2)  # fmt: skip
    rotary = tuple(m for _, m in named if "Rotary" in type(m).__name__)
    return Anatomy(model, layers, norms, activations, embeddings, rotary)


def _list_type() -> Any:
    from torch.nn import ModuleList

    return ModuleList


def _is_norm(module: Any) -> bool:
    name = type(module).__name__
    return name.endswith(("LayerNorm", "RMSNorm")) and getattr(module, "weight", None) is not None


def _layers(model: Any, named: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The longest list of modules of one kind that hold linear maps."""
    lists = [(n, m) for n, m in named if isinstance(m, _list_type()) and len(m)]
    lists = [(n, m) for n, m in lists if any(_is_linear(part) for part in m.modules())]
    if not lists:
        return []
    depth = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    fitting = [pair for pair in lists if len(pair[1]) == depth]
    name, found = (fitting or sorted(lists, key=lambda pair: -len(pair[1])))[0]
    inner = [n for n, m in lists if n.startswith(f"{name}.") and len(m) == len(found) == 1]
    if inner:  # ALBERT: a group of one, which holds a list of one
        name = inner[0]
        found = dict(named)[name]
    return [(f"{name}.{k}", module) for k, module in enumerate(found)]


def _is_linear(module: Any) -> bool:
    weight = getattr(module, "weight", None)
    kind = type(module).__name__
    return getattr(weight, "ndim", 0) == 2 and "Embedding" not in kind


def _projections(
    start: str, layer: Any, index: int, model: Any
) -> Iterator[tuple[str, Projection]]:
    taken: set[str] = set()
    for inner, module in layer.named_modules():
        if not _is_linear(module):
            continue
        role = next((r for r, ends in ROLES.items() if re.search(f"{ends}$", f".{inner}")), None)
        if role is None or role in taken:
            continue
        taken.add(role)
        name = f"{start}.{inner}"
        weight = module.weight
        rows = weight.shape[1] if type(module).__name__ == "Conv1D" else weight.shape[0]
        for part, first, last in _cut(role, rows, model):
            yield part, Projection(name, part, index, module, first, last)


def _cut(role: str, rows: int, model: Any) -> list[tuple[str, int, int]]:
    """The parts of a weight that holds several projections, one below the other."""
    if role == "fused gate":
        return [("gate", 0, rows // 2), ("up", rows // 2, rows)]
    if role != "fused attention":
        return [(role, 0, rows)]
    config = getattr(model, "config", None)
    heads = getattr(config, "num_attention_heads", 1)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    unit = rows // (heads + 2 * key_heads)
    ends = [0, heads * unit, (heads + key_heads) * unit, rows]
    return [(part, ends[k], ends[k + 1]) for k, part in enumerate(("query", "key", "value"))]
