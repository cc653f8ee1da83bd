import pytest

import keyhole
from keyhole.models.parts import submodule
from keyhole.targets import suggest

torch = pytest.importorskip("torch")


def test_parts_by_dotted_and_by_numbered_names():
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.ReLU()))
    assert submodule(model, "1.0") is model[1][0]
    assert submodule(torch.nn.ModuleDict({"layers": model}), "layers[0]") is model[0]


def test_a_part_that_is_not_there():
    model = torch.nn.ModuleDict({"embed": torch.nn.ReLU(), "attention": torch.nn.ReLU()})
    with pytest.raises(keyhole.InvalidArgument, match="did you mean attention"):
        submodule(model, "atention")
    with pytest.raises(keyhole.InvalidArgument, match="it has embed, attention"):
        submodule(model, "xyz")


def test_many_names_are_cut():
    assert suggest("?", [str(k) for k in range(100, 130)]).endswith("119 …")
