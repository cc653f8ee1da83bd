"""All parameters of a stack, refined together on all answers.

Statement.  From a start that is right to a few digits, Gauss-Newton steps converge to the stack
            that explains the answers to their rounding.
Queries.    None: sequences of all sizes and tokens with small streams are given, at least 1.3
            numbers per unknown.
Algebra.    The exact stack in torch, in coordinates of what the norms keep, all positions of all
            blocks. Scores and values are in factors, whose gauge the damping holds. First all
            answers count alike, then, in one last step, in units of their rounding. From a start
            that is nearly right one Jacobian serves for all steps (chords). A block that is
            passed several times has its unknowns once. Standard errors: the least squares solutions
            for random roundings.
Fails.      At a residual above rounding: `RefinedStack.level` tells.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.extras import need
from keyhole.fitting.bootstrap import bootstrap_errors
from keyhole.fitting.gauss_newton import Blocks, FitOptions, fit_least_squares, form_jacobian
from keyhole.fitting.torch_model import Batch, TorchModel
from keyhole.learners.block import inverse_of
from keyhole.learners.stack.epsilons import rounded_size
from keyhole.linalg.rank import count_above_share
from keyhole.models.attention import Attention, Head
from keyhole.models.base import with_scores
from keyhole.models.block import Block
from keyhole.models.mlp import Mlp, outer_table
from keyhole.models.norm import Norm, kept_plane
from keyhole.models.stack import Stack


@dataclass(frozen=True, eq=False)
class AnsweredSequences:
    """Sequences of one length, the box's answers, and how much roundings are enlarged in them."""

    tokens: Float[Array, "n length d"]
    answers: Float[Array, "n d"]
    enlarged: Float[Array, " n"]


@dataclass(frozen=True, eq=False)
class RefinedStack:
    """The stack, its standard errors (scores multiplied out), and what is left of the answers: root
    mean square in units of their rounding."""

    stack: Stack
    errors: Stack
    level: float


@dataclass(frozen=True)
class StackForm:
    """What is not fitted. `passes`: how often the blocks, which are one, are passed; `final`:
    whether there is a norm at the end."""

    kind: str
    width: int
    heads: tuple[int, ...]
    activation: str
    gated: bool
    causal: bool
    passes: int = 1
    final: bool = False
    positions: bool = False

    @property
    def plane(self) -> Float[Array, "d k"]:
        return kept_plane(self.width, self.kind)

    @property
    def shown(self) -> Float[Array, "d w"]:
        """Basis of what is seen of a sum in the stream: no mean, where no norm reads it."""
        return self.plane if self.final else np.eye(self.width)

    @property
    def distinct(self) -> int:
        """Blocks with parameters of their own."""
        return len(self.heads)


def form_of(stack: Stack, passes: int) -> StackForm:
    first = stack.blocks[0]
    assert first.mlp is not None
    own = stack.blocks[:1] if passes > 1 else stack.blocks
    heads = [0 if block.attention is None else len(block.attention.heads) for block in own]
    return StackForm(first.kind, first.width, tuple(heads), first.mlp.activation,
                first.mlp.gated, stack.causal, passes, stack.final_norm is not None,
                stack.positions is not None)  # fmt: skip


def split_stack(stack: Stack, form: StackForm) -> dict[str, Array]:
    """The parameters that are fitted, by name."""
    plane, shown, parts = form.plane, form.shown, dict[str, Array]()
    for number, block in enumerate(stack.blocks[: form.distinct]):
        layer, network = block.attention, block.mlp
        assert layer is not None
        assert network is not None
        own: dict[str, Array] = {"epsilons": np.log(block.epsilons)}
        for h, head in enumerate(layer.heads):
            assert head.score_factors is not None
            left, right = plane.T @ head.score_factors.left, head.score_factors.right @ plane
            # both factors alike in size
            ratio = np.sqrt(np.linalg.norm(right) / np.linalg.norm(left))
            left, right = ratio * left, right / ratio
            bias, *_ = np.linalg.lstsq(left, plane.T @ head.key_bias, rcond=None)
            axes, sizes, rows = np.linalg.svd(shown.T @ head.value.T @ plane, full_matrices=False)
            rank = count_above_share(sizes, 1e-6)
            root = np.sqrt(sizes[:rank])
            own |= {f"left{h}": left, f"right{h}": right, f"key{h}": bias}
            own |= {f"out{h}": axes[:, :rank] * root, f"value{h}": root[:, None] * rows[:rank]}
        own["offset"] = plane.T @ layer.offset
        own |= {"inner": network.inner @ plane, "inner_bias": network.inner_bias,
                "outer": shown.T @ outer_table(network)}  # fmt: skip
        if network.gate is not None and network.gate_bias is not None:
            own |= {"gate": network.gate @ plane, "gate_bias": network.gate_bias}
        last = number == form.distinct - 1  # of the means only the sum over all blocks is seen
        own["added"] = (shown if last else plane).T @ network.offset
        parts |= {f"{number}.{name}": part for name, part in own.items()}
    if stack.final_norm is not None:
        norm = stack.final_norm
        parts |= {"final.gain": norm.gain, "final.bias": norm.bias,
                  "final.epsilon": np.log([norm.epsilon])}  # fmt: skip
    if stack.positions is not None:
        parts["positions"] = stack.positions @ shown
    return parts


def join_stack(parts: dict[str, Array], form: StackForm) -> Stack:
    """The stack with these parameters."""
    plane, shown, blocks = form.plane, form.shown, []
    for number, heads in enumerate(form.heads):
        own = {name.partition(".")[2]: part for name, part in parts.items()
               if name.startswith(f"{number}.")}  # fmt: skip
        members = []
        for h in range(heads):
            left, right = plane @ own[f"left{h}"], own[f"right{h}"] @ plane.T
            value = shown @ own[f"out{h}"] @ own[f"value{h}"] @ plane.T
            members.append(Head((left, right), left @ own[f"key{h}"], value.T))
        gated = "gate" in own
        network = Mlp(
            own["inner"] @ plane.T,
            own["inner_bias"],
            shown @ own["outer"],
            activation=form.activation,
            offset=(shown if number == form.distinct - 1 else plane) @ own["added"],
            gate=own["gate"] @ plane.T if gated else None,
            gate_bias=own["gate_bias"] if gated else None,
        )
        attention = Attention(members, plane @ own["offset"])
        epsilons = np.exp(own["epsilons"])
        blocks.append(Block(attention, network, norm="pre", kind=form.kind, epsilons=epsilons))
    norm = None
    if form.final:
        epsilon = float(np.exp(parts["final.epsilon"][0]))
        norm = Norm(parts["final.gain"], parts["final.bias"], epsilon, form.kind)
    positions = parts["positions"] @ shown.T if form.positions else None
    return Stack(blocks * form.passes, norm, causal=form.causal, positions=positions)


def forward(form: StackForm) -> Callable[[dict[str, Any], Any], Any]:
    """The answer to one query, as a torch function of the fitted parameters."""
    torch: Any = need("torch", "torch", "the refinement of a stack")
    plane, shown = torch.as_tensor(form.plane), torch.as_tensor(form.shown)
    functional = torch.nn.functional
    phi = {
        "gelu": functional.gelu,
        "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
        "silu": functional.silu,
        "tanh": torch.tanh,
    }[form.activation]

    def normed(x: Any, log_epsilon: Any) -> Any:
        """In coordinates of the plane."""
        return x * torch.rsqrt((x * x).sum(-1, keepdim=True) / form.width + log_epsilon.exp())

    def attend(p: dict[str, Any], number: int, seen: Any, rows: int) -> Any:
        """What the heads add at the last so many positions."""
        length, total = seen.shape[0], 0.0
        hidden = torch.zeros(rows, length, dtype=seen.dtype)
        if form.causal:
            late = torch.arange(length)[None, :] > torch.arange(length - rows, length)[:, None]
            hidden = torch.where(late, -torch.inf, hidden)
        for h in range(form.heads[number]):
            at = f"{number}."
            keys = (seen[-rows:] @ p[f"{at}right{h}"].T + p[f"{at}key{h}"]) @ p[f"{at}left{h}"].T
            weights = torch.softmax(keys @ seen.T + hidden, dim=-1)
            total = total + weights @ seen @ p[f"{at}value{h}"].T @ p[f"{at}out{h}"].T
        return total @ shown.T

    def network(p: dict[str, Any], number: int, x: Any) -> Any:
        at = f"{number}."
        inner = x @ p[at + "inner"].T + p[at + "inner_bias"]
        bent = phi(inner)
        if form.gated:
            bent = phi(x @ p[at + "gate"].T + p[at + "gate_bias"]) * inner
        added = (shown if number == form.distinct - 1 else plane) @ p[at + "added"]
        return bent @ p[at + "outer"].T @ shown.T + added

    def answer(p: dict[str, Any], tokens: Any) -> Any:
        stream = tokens
        if form.positions:
            stream = stream + p["positions"][: tokens.shape[0]] @ shown.T
        places = list(range(form.distinct)) * form.passes
        for step, number in enumerate(places):
            rows = 1 if step == len(places) - 1 else tokens.shape[0]
            seen = normed(stream @ plane, p[f"{number}.epsilons"][0])
            stream = stream[-rows:] + attend(p, number, seen, rows)
            stream = stream + plane @ p[f"{number}.offset"]
            read = normed(stream @ plane, p[f"{number}.epsilons"][1])
            stream = stream + network(p, number, read)
        if not form.final:
            return stream[-1]
        seen = plane @ normed(stream[-1] @ plane, p["final.epsilon"])
        return p["final.gain"] * seen + p["final.bias"]

    return answer


def refine_stack(
    start: Stack,
    passes: int,
    data: Sequence[AnsweredSequences],
    unit: float,
    rng: np.random.Generator,
    dense: int = 7000,
) -> RefinedStack:
    """`unit`: relative rounding of the box. `dense`: unknowns up to which matrices are formed."""
    form = form_of(start, passes)
    parts = split_stack(start, form)
    blocks = Blocks.of(parts)
    function = forward(form)

    roundings = [unit * rounded_size(start, each.tokens, each.answers) for each in data]

    def weighed(equal: bool) -> TorchModel:
        batches = []
        for each, rounding in zip(data, roundings, strict=True):
            errors = each.enlarged if equal else 4.0 * rounding * each.enlarged
            batches.append(Batch(each.tokens, each.answers, errors))
        return TorchModel(function, blocks, batches)

    # near the end, steps only follow roundings
    enough = 2.0 * float(np.sqrt(np.mean(np.concatenate(roundings) ** 2)))
    alike, exact, point = weighed(True), weighed(False), blocks.join(parts)
    jacobian = form_jacobian(alike.linearize(point))
    point, left = follow_chords(alike, point, inverse_of(jacobian), enough)
    if left > enough:
        rough = FitOptions(steps=30, damping=1e-6, dense_unknowns=dense, probes=0, tolerance=1e-3,
                           target=enough)  # fmt: skip
        point = fit_least_squares(alike, point, rough, rng=rng, blocks=blocks).point
        jacobian = form_jacobian(alike.linearize(point))
    ratio = np.repeat(0.25 / np.concatenate(roundings), form.width)
    jacobian *= ratio[:, None]
    solve = inverse_of(jacobian)
    rest = exact.residual(point)
    moved = point - solve(rest)
    if np.linalg.norm(exact.residual(moved)) < 2.0 * np.linalg.norm(rest):
        point = moved  # weak directions, too
    level = float(np.sqrt(np.mean(exact.residual(point) ** 2)))
    best = join_stack(blocks.split(point), form)
    told = with_scores(best)
    names = [name for name, part in told.items() if part.size]

    def repeat() -> Sequence[Array]:
        """Parameters for answers that are rounded otherwise."""
        step = max(level, 1.0) * solve(rng.standard_normal(len(jacobian)))
        other = with_scores(join_stack(blocks.split(point + step), form))
        return [other[name][None] for name in names]

    found = bootstrap_errors([told[name][None] for name in names], repeat, 8)
    errors = {name: part[0] for name, part in zip(names, found, strict=True)}
    return RefinedStack(best, Stack.from_arrays({**told, **errors}), level)


def follow_chords(
    model: TorchModel,
    point: Float[Array, " unknowns"],
    solve: Callable[[Array], Array],
    target: float,
) -> tuple[Float[Array, " unknowns"], float]:
    """Steps with the inverse of one Jacobian while each takes half off what is left, down to this
    root mean square; the point, and what is left there."""
    rest = model.residual(point)
    left = float(np.sqrt(np.mean(rest**2)))
    while left > target:
        moved = point - solve(rest)
        rest = model.residual(moved)
        found = float(np.sqrt(np.mean(rest**2)))
        if not found < 0.5 * left:
            break
        point, left = moved, found
    return point, left
