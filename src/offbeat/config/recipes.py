"""Recipes: named configurations that come with the package."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

_SHIPPED = Path(__file__).parent.parent / "recipes"


@dataclass(frozen=True, slots=True)
class RecipeBook:
    """A directory of ``NAME.yaml`` files. The first sentence of a recipe's first comment describes it."""

    directory: Path = _SHIPPED

    def names(self) -> list[str]:
        """Names of all recipes, sorted."""
        return sorted(path.stem for path in self.directory.glob("*.yaml"))

    def path(self, name: str) -> Path:
        """The file of a recipe, whether or not it exists."""
        return self.directory / f"{name}.yaml"

    def description(self, name: str) -> str:
        """The first sentence of the recipe's comment; empty when the file does not start with one."""
        with self.path(name).open(encoding="utf-8") as file:
            comment = " ".join(
                line.strip("# \n") for line in takewhile(lambda line: line.startswith("#"), file)
            )
        sentence, stop, _ = comment.partition(". ")
        return sentence + stop.strip()
