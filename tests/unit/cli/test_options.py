"""Options are declared once: what two commands share reads the same in both."""

from collections import defaultdict
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from keyhole.cli import commands  # noqa: F401 - which fills the app
from keyhole.cli.main import app
from keyhole.cli.target import Box, refuse_language_models
from keyhole.errors import InvalidArgument
from keyhole.learners.names import LEARNERS, make_learner

# what a command means otherwise than the rest: `serve` offers a box and `bench`, `demo`, `learn` have
# none; `doctor` asks rows instead of sequences; `verify` takes a random seed
APART = {"serve", "bench", "demo", "learn"}
OTHERWISE = {
    ("doctor", "--budget"),
    ("doctor", "--request"),
    ("doctor", "--answer"),
    ("verify", "--seed"),
    ("sign", "--seed"),
    ("sign", "--out"),
    ("sign", "--queries"),
    ("layers", "--out"),
    ("report", "--out"),
    ("audit", "--max-norm"),
}
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def list_helps() -> dict[str, dict[str, set[str]]]:
    """Option -> help -> the commands that say so."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name, command in COMMANDS.items():
        for option in command.params:
            own = name in APART or (name, option.opts[0]) in OTHERWISE
            if option.param_type_name == "option" and not own:
                found[option.opts[0]][option.help or ""].add(name)
    return found


def test_an_option_that_several_commands_have_reads_the_same_in_all() -> None:
    helps = list_helps()
    assert not {option: dict(said) for option, said in helps.items() if len(said) > 1}


def test_every_command_prints_json_and_says_so_alike() -> None:
    (having,) = list_helps()["--json"].values()
    assert having == set(COMMANDS) - APART
    for name in APART:
        assert any("--json" in option.opts for option in COMMANDS[name].params)


def test_the_learners_are_listed() -> None:
    (help_text,) = list_helps()["--learner"]
    assert all(name in help_text for name in LEARNERS)


def test_every_method_is_listed() -> None:
    (help_text,) = list_helps()["--method"]
    for learner, methods in {
        "single-head": ("keyhole", "paper", "theorem-4.1"),
        "low-rank": ("adaptive", "convex"),
        "transformer": ("segment", "antisymmetric"),
    }.items():
        for method in methods:
            assert make_learner(learner, method=method).method == method
            assert method in help_text


def test_no_star_is_eaten() -> None:
    shown = CliRunner().invoke(app, ["recover", "--help"], env={"COLUMNS": "200"}).output
    assert "predictions.*.score (* takes every entry)" in " ".join(shown.split())


@pytest.mark.parametrize(
    "address",
    [
        "http://localhost:8080/v1",
        "https://api.host/v1/chat/completions?x=1",
        "http://h/completion/",
    ],
)
def test_the_address_of_a_language_model_gets_a_hint(address: str) -> None:
    with pytest.raises(InvalidArgument, match="add --language-model"):
        Box(target=address, width=4).opened()


def test_other_addresses_get_none() -> None:
    refuse_language_models(["https://host/v2/models/head", "https://host/score", "hf:folder/v1"])
