"""Recipes: named configurations that come with the package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_SHIPPED = Path(__file__).parent.parent / "recipes"


@dataclass(frozen=True, slots=True)
class RecipeBook:
    """A directory of ``NAME.yaml`` files. The first comment line of a recipe is its description."""

    directory: Path = _SHIPPED

    def names(self) -> list[str]:
        """Names of all recipes, sorted."""
        return sorted(path.stem for path in self.directory.glob("*.yaml"))

    def path(self, name: str) -> Path:
        """The file of a recipe, whether or not it exists."""
        return self.directory / f"{name}.yaml"

    def description(self, name: str) -> str:
        """The recipe's first comment line; empty when it does not start with one."""
        with self.path(name).open(encoding="utf-8") as file:
            first = file.readline().strip()
        return first.lstrip("# ") if first.startswith("#") else ""
