"""The files that hosts, editors and newcomers look for: that they parse, and name what there is."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def list_commands(workflow: dict[str, Any]) -> list[str]:
    jobs = workflow["jobs"].values()
    return [step["run"] for job in jobs for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_a_limit_and_runs_what_there_is(path: Path) -> None:
    workflow = read_yaml(path)
    assert workflow["permissions"] == {"contents": "read"}
    building = [job for job in workflow["jobs"].values() if any("run" in s for s in job["steps"])]
    assert all(job["timeout-minutes"] <= 90 for job in building)
    for command in list_commands(workflow):
        if command.startswith("make "):
            assert command.split()[1] in TARGETS
        if command.startswith("."):
            assert (ROOT / command.split()[0]).exists()


def test_the_quick_run_covers_every_python_that_the_package_claims() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = [c.rsplit(" ", 1)[1] for c in project["classifiers"] if re.search(r"3\.\d+$", c)]
    for name, job in (("quick", "quick"), ("release", "try")):
        workflow = read_yaml(ROOT / ".github" / "workflows" / f"{name}.yml")
        assert workflow["jobs"][job]["strategy"]["matrix"]["python"] == claimed
    assert project["requires-python"] == f">={claimed[0]}"


def test_a_release_is_published_without_a_stored_secret() -> None:
    path = ROOT / ".github" / "workflows" / "release.yml"
    assert "secrets." not in path.read_text()
    assert read_yaml(path)["jobs"]["publish"]["permissions"] == {"id-token": "write"}


def test_hooks_run_what_make_lint_runs() -> None:
    (local,) = read_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    hooks = " ".join(hook["entry"] for hook in local["hooks"])
    recipe = (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0]
    for program in re.findall(r"\$\(BIN\)/(\S+)", recipe):
        assert f".venv/bin/{program}" in hooks


@pytest.mark.parametrize("name", ["wrong_result.yml", "new_box.yml", "config.yml"])
def test_a_template_parses(name: str) -> None:
    template = read_yaml(ROOT / ".github" / "ISSUE_TEMPLATE" / name)
    if name != "config.yml":
        assert {"name", "description", "body"} <= set(template)
        names = [part["id"] for part in template["body"]]
        assert len(set(names)) == len(names)


def test_the_container_builds_by_a_target_that_exists() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert container["postCreateCommand"].split()[1] in TARGETS


@pytest.mark.parametrize("name", ["SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md"])
def test_links_of_a_page_beside_the_documentation_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text())
    assert links
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_the_supported_version_is_the_one_at_hand() -> None:
    import keyhole

    minor = ".".join(keyhole.__version__.split(".")[:2])
    assert f"(today {minor})" in (ROOT / "SECURITY.md").read_text()
