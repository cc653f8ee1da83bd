import numpy as np
import pytest

import keyhole
from keyhole.errors import InvalidArgument
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.canonical import canonical_block
from keyhole.models.files import load_model, save_model
from keyhole.models.mlp import with_parts
from keyhole.models.random import block

FORMS = [
    {"heads": 2, "neurons": 6},
    {"heads": 2},
    {"neurons": 6},
]
ORDERS = [("post", "layer", False), ("pre", "layer", False), ("none", "layer", False),
          ("post", "rms", False), ("pre", "rms", False), ("pre", "layer", True)]  # fmt: skip


def tokens(width=6, seed=3):
    return np.random.default_rng(seed).standard_normal((5, 4, width))


def parts(model, **changes):
    known = {
        "norm": model.norm,
        "kind": model.kind,
        "epsilons": model.epsilons,
        "gain": model.gain if model.norms else None,
        "bias": model.bias if model.norms else None,
        "parallel": model.parallel,
    }
    attention = changes.pop("attention", model.attention)
    mlp = changes.pop("mlp", model.mlp)
    return Block(attention, mlp, **(known | changes))


@pytest.mark.parametrize(("norm", "kind", "parallel"), ORDERS)
@pytest.mark.parametrize("form", FORMS)
def test_arrays_files_and_canonical_form_keep_the_function(norm, kind, parallel, form, tmp_path):
    if parallel and len(form) < 2:
        pytest.skip("a parallel block has both parts")
    model = block(np.random.default_rng(0), 6, norm=norm, kind=kind, parallel=parallel, **form)
    again = load_model(save_model(model, tmp_path / "block.safetensors"))
    assert np.array_equal(again(tokens()), model(tokens()))
    assert keyhole.distance(again, model) < 1e-15
    other = canonical_block(model)
    assert np.allclose(other(tokens()), model(tokens()), atol=1e-11)
    assert keyhole.distance(other, model) < 1e-12


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("relu", [True, False])
def test_it_computes_what_a_torch_layer_computes(first, relu):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(
        6, 2, 9, activation="relu" if relu else "gelu", norm_first=first, batch_first=True,
        dtype=torch.float64,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for part in layer.parameters():
            part += 0.1 * torch.randn_like(part)
    model = block_of_layer(layer)
    x = tokens()
    with torch.no_grad():
        wanted = layer(torch.tensor(x))[:, -1].numpy()
    assert np.allclose(model(x), wanted, atol=1e-12)


def block_of_layer(layer):
    """The block of a torch encoder layer."""
    own = {name: part.detach().numpy() for name, part in layer.named_parameters()}
    width = len(own["norm1.weight"])
    heads, rank = layer.self_attn.num_heads, width // layer.self_attn.num_heads
    maps = own["self_attn.in_proj_weight"].reshape(3, heads, rank, width)
    biases = own["self_attn.in_proj_bias"].reshape(3, heads, rank)
    out = own["self_attn.out_proj.weight"].reshape(width, heads, rank)
    offset, members = own["self_attn.out_proj.bias"].copy(), []
    for h in range(heads):
        query, key, value = maps[:, h]
        scale = np.sqrt(rank)
        members.append(
            Head((key.T / scale, query), key.T @ biases[0, h] / scale, value.T @ out[:, h].T)
        )
        offset += out[:, h] @ biases[2, h]
    mlp = keyhole.Mlp(
        own["linear1.weight"],
        own["linear1.bias"],
        own["linear2.weight"],
        activation="relu" if layer.activation is torch_relu() else "gelu",
        offset=own["linear2.bias"],
    )
    return Block(
        Attention(members, offset),
        mlp,
        norm="pre" if layer.norm_first else "post",
        epsilons=[layer.norm1.eps, layer.norm2.eps],
        gain=np.array([own["norm1.weight"], own["norm2.weight"]]),
        bias=np.array([own["norm1.bias"], own["norm2.bias"]]),
    )


def torch_relu():
    import torch

    return torch.nn.functional.relu


def test_what_a_post_norm_hides():
    rng = np.random.default_rng(1)
    model = block(rng, 6, heads=2, neurons=6, norm="post")
    shift, factor = rng.standard_normal(6), 3.0
    heads = [Head(h.score, h.key_bias, h.value + rng.standard_normal((6, 1))) for h in
             model.attention.heads]  # fmt: skip
    mlp = with_parts(
        model.mlp,
        inner=model.mlp.inner / factor,
        inner_bias=model.mlp.inner_bias - model.mlp.inner @ shift,
        outer=factor * model.mlp.outer + rng.standard_normal(6),
        offset=factor * (model.mlp.offset - shift),
    )
    gain, bias = model.gain * [[factor], [1.0]], model.bias.copy()
    bias[0] = factor * (bias[0] + shift)
    other = parts(
        model,
        attention=Attention(heads, model.attention.offset + 2.0),
        mlp=mlp,
        gain=gain,
        bias=bias,
        epsilons=model.epsilons * [1.0, factor**2],
    )
    assert np.allclose(other(tokens()), model(tokens()), atol=1e-11)
    assert keyhole.distance(other, model) < 1e-12


def test_distance_sees_every_part():
    model = block(np.random.default_rng(2), 6, heads=2, neurons=6, norm="pre")
    for name, array in model.to_arrays().items():
        if array.any():
            changed = np.array(array)
            changed.flat[0] *= 1.0 + 1e-4
            other = Block.from_arrays({**model.to_arrays(), name: changed})
            assert 1e-7 < keyhole.distance(other, model) < 1e-2, name


def test_structures_that_differ_are_infinitely_far_apart():
    rng = np.random.default_rng(0)
    models = [block(rng, 6, heads=2, norm=norm) for norm in ("pre", "post")]
    assert keyhole.distance(*models) == np.inf
    with pytest.raises(InvalidArgument, match="cannot compare"):
        keyhole.distance(models[0], models[0].attention)


def test_single_precision_stays_single():
    model = block(np.random.default_rng(0), 6, heads=2, neurons=3).astype(np.float32)
    assert model(tokens()).dtype == np.float32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "batch"}, "norm must be one of"),
        ({"attention": None, "mlp": None}, "needs attention"),
        ({"parallel": True}, "a parallel block"),
        ({"gain": np.ones((1, 6))}, "has 2 norms"),
    ],
)
def test_bad_arguments_are_refused(changes, message):
    model = block(np.random.default_rng(0), 6, heads=2, neurons=3)
    with pytest.raises(InvalidArgument, match=message):
        parts(model, **changes)


def test_parts_must_have_the_width():
    layer = block(np.random.default_rng(0), 6, heads=2).attention
    network = block(np.random.default_rng(0), 5, neurons=4).mlp
    with pytest.raises(InvalidArgument, match="parts of a block of width 6"):
        Block(layer, network, norm="none")
