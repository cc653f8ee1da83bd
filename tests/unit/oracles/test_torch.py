import numpy as np
import pytest

import keyhole
from keyhole.models.export import export, to_torch
from keyhole.models.parts import submodule
from keyhole.models.random import attention
from keyhole.oracles.torch import advise, guessed_width, inside, load_weights

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402


def queries(width=8, length=5, n=4):
    tokens = np.random.default_rng(0).standard_normal((n, length, width))
    return keyhole.QueryBatch.of(tokens, "test"), torch.from_numpy(tokens)


def test_answers_are_the_modules_in_its_own_format():
    asked, tokens = queries()
    module = to_torch(attention(np.random.default_rng(0), 8), np.float32)
    answers = keyhole.open_oracle(module).ask(asked)
    assert answers.dtype == np.float32
    assert np.array_equal(answers, module(tokens.float()).detach().numpy())


def test_evaluation_mode_is_for_the_query_only():
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.9), nn.BatchNorm1d(5)).double()
    module[2].eval()
    box = keyhole.open_oracle(module)
    first, again = box.ask(queries()[0]), box.ask(queries()[0])
    assert np.array_equal(first, again)
    assert [part.training for part in module.modules()] == [True, True, True, False]
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_is_asked_as_self_attention(batch_first):
    asked, tokens = queries()
    module = nn.MultiheadAttention(8, 2, batch_first=batch_first).double()
    box = keyhole.open_oracle(module)
    assert box.spec.width == 8
    x = tokens if batch_first else tokens.transpose(0, 1)
    whole = module(x, x, x)[0]
    expected = whole[:, -1] if batch_first else whole[-1]
    np.testing.assert_allclose(box.ask(asked), expected.detach().numpy(), rtol=1e-12)


@pytest.mark.parametrize("batch_first", [True, False])
def test_encoder_layer(batch_first):
    asked, tokens = queries()
    module = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first).double().eval()
    x = tokens if batch_first else tokens.transpose(0, 1)
    whole = module(x)
    expected = whole[:, -1] if batch_first else whole[-1]
    answers = keyhole.open_oracle(module).ask(asked)
    np.testing.assert_allclose(answers, expected.detach().numpy(), rtol=1e-9)


class SelfAttention(nn.Module):
    """In the manner of Hugging Face: hidden states and a mask in, a tuple out."""

    def __init__(self, width):
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value = nn.Linear(width, width)

    def forward(self, hidden_states, attention_mask=None):
        scores = self.query(hidden_states) @ self.key(hidden_states).transpose(1, 2)
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = scores.softmax(-1)
        return weights @ self.value(hidden_states), weights


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.attention = SelfAttention(width)
        self.after = nn.Linear(width, 3)

    def forward(self, numbers):
        mask = torch.zeros(numbers.shape[1], numbers.shape[1], dtype=torch.float64)
        self.attention(self.embed(numbers), attention_mask=mask - 0.25)
        raise AssertionError("the rest of the model is not to be run")


def test_a_submodule_with_a_tuple_for_an_answer():
    asked, tokens = queries()
    part = submodule(Encoder(8).double(), "attention")
    answers = keyhole.open_oracle(part).ask(asked)
    np.testing.assert_array_equal(answers, part(tokens)[0][:, -1].detach().numpy())


def test_a_part_asked_in_place_gets_what_the_model_passes_it():
    asked, tokens = queries()
    model = Encoder(8).double()
    part = model.attention
    run = lambda n, length: model(torch.zeros(n, length, dtype=torch.long))  # noqa: E731
    box = keyhole.open_oracle(part, adapter=inside(model, part, run))
    expected = part(tokens, torch.full((5, 5), -0.25, dtype=torch.float64))[0][:, -1]
    np.testing.assert_allclose(box.ask(asked), expected.detach().numpy(), rtol=1e-12)
    assert not part._forward_hooks
    assert not part._forward_pre_hooks


def test_inside_replaces_query_key_and_value_of_self_attention():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 4)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, numbers):
            x = self.embed(numbers)
            return self.attention(x, x, value=x, need_weights=False)[0]

    model = Model().double()
    part = model.attention

    def run(batch, length):
        return model(torch.zeros(batch, length, dtype=torch.long))

    tokens = keyhole.QueryBatch.of(np.random.default_rng(0).standard_normal((3, 5, 4)), "")
    in_place = keyhole.open_oracle(part, adapter=inside(model, part, run)).ask(tokens)
    assert np.array_equal(in_place, keyhole.open_oracle(part).ask(tokens))


def test_inside_refuses_what_is_no_part():
    with pytest.raises(keyhole.InvalidArgument, match="no part"):
        inside(Encoder(4), nn.Linear(2, 2), lambda n, length: None)


def test_a_single_head_module_is_recovered():
    secret = attention(np.random.default_rng(2), 8, outputs=3, bias=True)
    found = keyhole.recover(learner=keyhole.SingleHead(), box=to_torch(secret))
    assert keyhole.distance(found.model, secret) < 1e-11


@pytest.mark.parametrize(
    ("module", "width"),
    [
        (lambda: nn.Linear(7, 2), 7),
        (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 2)), 6),
        (lambda: nn.LSTM(5, 9), 5),
        (lambda: nn.ReLU(), None),
    ],
)
def test_width_is_told_by_the_module_or_its_first_part(module, width):
    assert guessed_width(module()) == width


def test_width_must_be_given_where_nothing_tells_it():
    with pytest.raises(keyhole.InvalidArgument, match="width="):
        keyhole.open_oracle(nn.ReLU())


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_weights_from_a_file(tmp_path, suffix):
    from safetensors.torch import save_file

    source, target = nn.Linear(8, 2).double(), nn.Linear(8, 2).double()
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pt":
        torch.save(source.state_dict(), path)
    else:
        save_file(source.state_dict(), path)
    asked, tokens = queries(length=1)
    answers = keyhole.open_oracle(target, weights=path).ask(asked)
    np.testing.assert_array_equal(answers, source(tokens)[:, -1].detach().numpy())


class Malicious:
    def __reduce__(self):
        return (print, ("executed",))


@pytest.mark.parametrize("content", ["code", "noise", "other", "missing"])
def test_weights_that_are_none(tmp_path, content, capsys):
    path = tmp_path / "weights.pt"
    if content == "code":
        torch.save({"weight": Malicious()}, path)
    elif content == "noise":
        path.write_bytes(b"\x00\x01nothing")
    elif content == "other":
        torch.save(nn.Linear(3, 3).state_dict(), path)
    with pytest.raises(keyhole.FileFormatError):
        load_weights(nn.Linear(8, 2), path)
    assert "executed" not in capsys.readouterr().out


def test_export_pt_is_a_state_dict_for_the_exported_module(tmp_path):
    secret = attention(np.random.default_rng(2), 4, heads=2, rank=2, bias=True)
    other = to_torch(attention(np.random.default_rng(3), 4, heads=2, rank=2, bias=True))
    load_weights(other, export(secret, tmp_path / "model.pt"))
    tokens = np.random.default_rng(0).standard_normal((3, 4, 4))
    answers = other(torch.from_numpy(tokens)).detach().numpy()
    np.testing.assert_allclose(answers, secret(tokens), rtol=1e-12)


def test_what_a_module_raises_is_an_oracle_error():
    with pytest.raises(keyhole.OracleError, match=r"RuntimeError.*may not be 8 wide"):
        keyhole.open_oracle(nn.Linear(7, 2), width=8).ask(queries()[0])


def test_a_module_that_wants_another_format_says_what_to_pass():
    class Hidden(nn.Module):  # parameters that are not registered: the format cannot be seen
        def forward(self, tokens):
            return tokens[:, -1] @ torch.ones(8, 2, dtype=torch.float32)

    with pytest.raises(keyhole.OracleError, match=r"on float64 tokens .* Pass dtype="):
        keyhole.open_oracle(Hidden(), width=8).ask(queries()[0])
    assert keyhole.open_oracle(Hidden(), width=8, dtype="float32").ask(queries()[0]).shape[1] == 2


@pytest.mark.parametrize("module", [nn.Linear(4, 2, device="meta"), nn.LazyLinear(2)])
def test_parameters_without_numbers_are_refused(module):
    with pytest.raises(keyhole.InvalidArgument, match="parameters without numbers"):
        keyhole.open_oracle(module, width=4)


def test_key_biases_of_zero_do_not_make_a_layer_ill_conditioned():
    torch.manual_seed(1031)  # rounding leaves 2e-13 of them, known to a third
    layer = nn.MultiheadAttention(12, 3, batch_first=True).double()
    recovery = keyhole.recover(layer)
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    for head, error in zip(recovery.model.heads, recovery.errors.heads, strict=True):
        assert not head.key_bias.any()
        assert 0 < np.linalg.norm(error.key_bias) < 1e-11


def test_identity_tells_two_trainings_apart():
    one, two = nn.Linear(3, 2), nn.Linear(3, 2)
    names = [keyhole.open_oracle(m).spec.identity for m in (one, two, one)]
    assert names[0] == names[2] != names[1]
    assert "bfloat16" not in keyhole.open_oracle(nn.Linear(3, 2).bfloat16()).spec.identity


def test_bfloat16_answers_arrive():
    answers = keyhole.open_oracle(nn.Linear(8, 2).bfloat16()).ask(queries()[0])
    assert answers.dtype == np.float32


@pytest.mark.parametrize("dtype", ["float32", "nonsense", "int64"])
def test_dtype(dtype):
    module = nn.Flatten(0, 1)
    if dtype == "float32":
        box = keyhole.open_oracle(module, width=8, dtype=dtype)
        assert box.ask(queries(length=1)[0]).dtype == np.float32
    else:
        with pytest.raises(keyhole.InvalidArgument, match="dtype"):
            keyhole.open_oracle(module, width=8, dtype=dtype)


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("mat1 and mat2 must have the same dtype, but got Float and Double", "--dtype"),
        ("Tensor on device meta is not on the expected device cpu!", "--device"),
        ("mat1 and mat2 shapes cannot be multiplied (3x5 and 8x8)", "--width"),
        ("index out of range in self", "--max-length"),
        ("forward() missing 2 required positional arguments", "adapter="),
    ],
)
def test_every_cause_has_a_hint_of_its_own(error: str, hint: str) -> None:
    told = advise(error, (1, 3, 5))
    others = {"--dtype", "--device", "--width", "--max-length", "adapter="} - {hint}
    assert hint in told
    assert not any(other in told for other in others)
