"""The finder of valid actions in worlds made up for it."""

from __future__ import annotations

from offbeat.envs.text.finding import Sight, Vocabulary, candidates, find, name_of


class Switch:
    """A world of one switch: `push` changes it, `pull` does the same, `look` and the rest do nothing."""

    def outcome(self, command: str) -> bytes:
        return b"on" if command in ("push switch", "pull switch") else b"off"


WORDS = ("push", "pull", "look", "wait", "switch", "put", "in", "take")
VOCABULARY = Vocabulary(6, frozenset(WORDS), ("push",), frozenset({"switch"}))


def test_the_first_of_equal_actions_is_kept() -> None:
    found = find(Switch(), VOCABULARY, Sight(("switch",), (), ""))
    assert found.labels == ("push switch", "wait")
    assert found.num_left == 0


def test_candidates_are_words_the_story_knows() -> None:
    tried = list(candidates(VOCABULARY, Sight(("switch", "lamp"), ("lamp",), "a Switches panel")))
    assert "put lamp in switch" in tried
    assert "put switch in lamp" not in tried, "what is not held cannot be put"
    assert not any(word in " ".join(tried) for word in ("open", "give", "north"))


def test_names_are_whole_words_where_they_can_be() -> None:
    assert name_of("small mailbox", ["mailbo", "box"], 6, "") == "mailbox"
    assert name_of("", ["lanter", "lamp"], 6, "a brass Lantern (off)") == "lantern"
    assert name_of("", ["xyz"], 6, "") == "xyz"


def test_what_the_budget_leaves_out_is_counted() -> None:
    sight = Sight(("switch",), (), "")
    whole = find(Switch(), VOCABULARY, sight)
    for budget in range(1, whole.num_tried):
        found = find(Switch(), VOCABULARY, sight, budget)
        assert (found.num_tried, found.num_left) == (budget, whole.num_tried - budget)
        assert set(found.labels) <= set(whole.labels)
