"""``offbeat list``."""

from __future__ import annotations

from offbeat.cli.output import JsonFlag, reporting, show_table


def list_all(as_json: JsonFlag = False) -> None:
    """List recipes and algorithms."""
    with reporting(as_json) as report:
        from offbeat import algorithms
        from offbeat.config.recipes import RecipeBook

        book = RecipeBook()
        recipes = {name: book.description(name) for name in book.names()}
        known = {name: "built in" if name in algorithms.BUILTIN else "plugin" for name in algorithms.names()}
        show_table("recipes", recipes)
        show_table("algorithms", known)
        report.values["recipes"] = [{"name": name, "description": text} for name, text in recipes.items()]
        report.values["algorithms"] = list(known)
