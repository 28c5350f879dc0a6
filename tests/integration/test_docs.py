"""The documentation is true: its code runs, its links lead somewhere, its lists are complete.

A block after ``<!-- run -->`` is run as it stands, but with few rounds; one after ``<!-- file: NAME -->``
is a file of a project that the page builds up.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from offbeat.cli.main import VERBS
from offbeat.config.recipes import RecipeBook
from tests.integration import test_surface

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])
BLOCK = re.compile(r"<!-- (run|file: \S+) -->\n```\w+\n(.*?)\n```\n", re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text())


def runnable(page: Path) -> str:
    """All runnable blocks of a page as one program, in short mode."""
    code = "\n\n".join(text for kind, text in blocks(page) if kind == "run")
    return re.sub(r"\brounds=\d+", "rounds=3", code)


def execute(directory: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=directory, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)], ids=lambda page: page.name)
def test_code_of_the_page_runs(page: Path, tmp_path: Path) -> None:
    for kind, text in blocks(page):
        if kind.startswith("file: "):
            (tmp_path / kind.removeprefix("file: ")).write_text(text + "\n")
    (tmp_path / "page.py").write_text(runnable(page))
    execute(tmp_path, "page.py")


def test_algorithm_of_the_page_is_a_plugin_that_trains_and_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind, text in blocks(ROOT / "docs" / "write-an-algorithm.md"):
        if kind != "run":
            (tmp_path / kind.removeprefix("file: ")).write_text(text + "\n")
    install(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = ("run.rounds=4", "run.dir=run", "env.num_envs=4", "observe.tensorboard=false")
    execute(tmp_path, "-m", "offbeat", "train", "reinforce.yaml", *settings)
    report = json.loads(execute(tmp_path, "-m", "offbeat", "replay", "run", "--json").splitlines()[-1])
    assert report["identical"]
    assert report["rounds"] == 4


def install(project: Path) -> None:
    """Do what matters here of ``pip install -e``: make the entry points known."""
    about = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    metadata = project / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
    )
    lines = [
        f"[{group}]\n" + "\n".join(f"{name} = {value}" for name, value in points.items())
        for group, points in about["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {name for name in pages if f"({name})" not in index} == set()


def test_tests_named_in_the_readme_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "README.md").read_text())
    assert len(named) >= 7
    for path, name in named:
        functions = ast.walk(ast.parse((ROOT / path).read_text()))
        assert name in {node.name for node in functions if isinstance(node, ast.FunctionDef)}, path


def test_readme_lists_all_commands_and_recipes() -> None:
    text = (ROOT / "README.md").read_text()
    assert sorted(re.findall(r"^\| `offbeat (\w+)", text, re.MULTILINE)) == sorted(VERBS)
    for recipe in RecipeBook().names():
        assert f"| `{recipe}` |" in text


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "dependencies.md").read_text()
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    packages = {re.split(r"[><=\[]", requirement)[0] for group in groups for requirement in group}
    extras = set(project["optional-dependencies"]) - {"dev"}
    assert [name for name in packages - {"offbeat"} if name not in page] == []
    assert [name for name in extras if f"| `{name}` |" not in page] == []


def test_every_metric_is_explained() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    names = [*test_surface.ROUND_METRICS, *test_surface.PPO_METRICS, *test_surface.EVAL_METRICS]
    explained = {name.rpartition("/")[2] for name in re.findall(r"`([\w/]+)`", page)}
    assert [name for name in names if name.partition("/")[2] not in explained] == []


def test_every_place_on_the_architecture_page_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "src" / "offbeat"
    named = set(re.findall(r"`([\w/]+(?:/|\.py))`", page))
    assert len(named) > 40, "the pattern finds the places"
    missing = sorted(place for place in named if not (package / place).exists())
    assert not missing
    folders = {f"{path.name}/" for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= named, "every folder is on the map"
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py", "__main__.py"}
    assert modules <= named, "every module at the top is on the map"


def test_every_function_on_the_architecture_page_exists() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    places = re.findall(r"`([\w/]+\.py)`:? `(\w+)`", page)
    assert len(places) >= 10, "the pattern finds the functions"
    for place, name in places:
        source = (ROOT / "src" / "offbeat" / place).read_text()
        assert re.search(rf"(def|class) {name}\b", source), f"{place} has no {name}"
