import numpy as np
import pytest

import keyhole
from keyhole.models.language_model import OutputLayer, Reading, Table, TokenAttention, TokenHead


def layer(seed: int = 0, level: str = "gram", **options) -> OutputLayer:
    rng = np.random.default_rng(seed)
    offset = rng.standard_normal(20) if level == "gram" else None
    return OutputLayer(rng.standard_normal((20, 4)), offset, level=level, **options)


def tables(seed: int, tokens: int = 9, heads: int = 2) -> TokenAttention:
    rng = np.random.default_rng(seed)

    def table(rank: int) -> Table:
        return Table(rng.standard_normal((tokens, rank)), rng.standard_normal((rank, tokens)))

    return TokenAttention(table(4), [TokenHead(table(2), table(3)) for _ in range(heads)])


@pytest.mark.parametrize("level", ["space", "gram"])
@pytest.mark.parametrize("shifted", [False, True])
def test_an_output_layer_survives_its_file(tmp_path, level, shifted):
    readings = (Reading("layer", 4), Reading("rms", 3))
    before = layer(1, level, readings=readings, shifted=shifted, spread=0.25)
    from keyhole.models.files import load_model, save_model

    after = load_model(save_model(before, tmp_path / "layer.safetensors"))
    assert after.readings == before.readings
    assert (after.level, after.shifted, after.spread) == (level, shifted, 0.25)
    assert keyhole.distance(after, before) < 1e-15


def test_a_rotation_is_no_distance_a_linear_map_only_at_the_level_of_spaces():
    one = layer()
    turn = np.linalg.qr(np.random.default_rng(5).standard_normal((4, 4)))[0]
    assert keyhole.distance(OutputLayer(one.matrix @ turn, one.offset, level="gram"), one) < 1e-14
    stretched = one.matrix * np.array([1.0, 2.0, 3.0, 4.0])
    assert keyhole.distance(OutputLayer(stretched, one.offset, level="gram"), one) > 0.1
    assert keyhole.distance(OutputLayer(stretched, one.offset, level="space"), one) < 1e-14
    assert keyhole.distance(layer(7, "space"), layer(8, "space")) > 0.5
    with pytest.raises(keyhole.InvalidArgument):
        keyhole.distance(one, tables(0))


@pytest.mark.parametrize("shifted", [False, True])
def test_nearest_is_a_possible_answer_and_keeps_those(shifted):
    one = layer(2, shifted=False)
    matrix, offset = (part - part.mean(axis=0) if shifted else part
                      for part in (one.matrix, one.offset))  # fmt: skip
    one = OutputLayer(matrix, offset, level="gram", shifted=shifted)
    states = np.random.default_rng(3).standard_normal((5, 4))
    states *= 2.0 / np.linalg.norm(states, axis=1, keepdims=True)
    answers = one.logits(states) + (7.0 if shifted else 0.0)
    assert np.allclose(one.nearest(answers), answers)
    longer = one.logits(1.1 * states) + (7.0 if shifted else 0.0)
    assert np.allclose(one.nearest(longer), answers)
    other = answers + np.random.default_rng(4).standard_normal(answers.shape)
    assert np.linalg.norm(one.nearest(other) - other) > 1.0


def test_attention_on_tokens_is_the_sum_over_its_tables():
    model = tables(0)
    tokens = np.array([[3.0, 1.0, 1.0, 5.0]])[:, :, None]
    numbers, wanted = [3, 1, 1, 5], np.asarray(model.direct)[5]
    for head in model.heads:
        weights = np.exp(np.asarray(head.qk)[5, numbers])
        wanted = wanted + weights @ np.asarray(head.ov)[numbers] / weights.sum()
    assert np.allclose(model(tokens), wanted)
    again = TokenAttention.from_arrays(model.to_arrays())
    assert np.array_equal(again(tokens), model(tokens))


def test_moved_constants_and_order_of_heads_are_no_distance():
    model, rng = tables(1), np.random.default_rng(6)
    moved, added = rng.standard_normal(9), rng.standard_normal(9)
    head = model.heads[0]
    ones = np.ones((9, 1))
    changed = TokenHead(
        Table(np.hstack([head.qk.left, added[:, None]]), np.vstack([head.qk.right, ones.T])),
        Table(np.hstack([head.ov.left, ones]), np.vstack([head.ov.right, moved])),
    )
    direct = Table(np.hstack([model.direct.left, -ones]), np.vstack([model.direct.right, moved]))
    other = TokenAttention(direct, [model.heads[1], changed])
    tokens = rng.integers(9, size=(4, 6, 1)).astype(float)
    assert np.allclose(other(tokens), model(tokens))
    assert keyhole.distance(other, model) < 1e-13
    assert keyhole.distance(tables(2), model) > 0.1


def test_an_output_layer_of_some_tokens_allows_the_same_answers():
    rng = np.random.default_rng(4)
    matrix, offset = rng.standard_normal((30, 5)), rng.standard_normal(30)
    layer = OutputLayer(matrix, offset, shifted=True)
    some = layer.choose([3, 1, 20, 21, 22, 7, 9, 11])
    answers = layer.logits(rng.standard_normal((4, 5)))[:, [3, 1, 20, 21, 22, 7, 9, 11]] + 2.0
    assert np.allclose(some.nearest(answers), answers)
    assert not np.allclose(some.nearest(answers[:, ::-1]), answers[:, ::-1])
