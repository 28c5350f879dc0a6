"""Pretraining on transcripts of a family's own games."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from offbeat.algorithms.priorzero.pretraining import (
    MANIFEST,
    PretrainConfig,
    pretrain,
    read_manifest,
)
from offbeat.algorithms.priorzero.priors import ModelPrior, ModelScores, version_of
from offbeat.algorithms.priorzero.prompts import Prompts
from offbeat.algorithms.priorzero.transcripts import Play, dealt, expert_length, transcripts
from offbeat.envs.text import Family, find_family
from offbeat.errors import ConfigError
from offbeat.llm.model import Decoder
from offbeat.llm.tokens import load_tokenizer

TINY = find_family("tiny")
SMALL = PretrainConfig(
    games=2, checks=1, play=Play(plays=1), width=16, num_layers=1, num_heads=2, ff_width=16, batch=4,
    steps=4, check_every=2, most_checked=10,
)  # fmt: skip


def test_transcripts_are_labelled_by_the_expert():
    found = transcripts(TINY, "pretrain", [0], Play(random_moves=0.0), Prompts())
    assert len(found) == expert_length(TINY, 0)
    game = TINY.make(0)
    game.start()
    for one in found:
        assert one.label == game.expert()
        assert one.actions == tuple(game.actions())
        game.step(one.label)


def test_random_moves_lead_off_the_path_and_the_labels_lead_back():
    found = transcripts(TINY, "pretrain", [0, 1, 2], Play(random_moves=0.4), Prompts())
    assert len(found) > 1.2 * sum(expert_length(TINY, seed) for seed in (0, 1, 2))
    assert all(one.label in one.actions for one in found)


@pytest.mark.parametrize("part", ["train", "held_out"])
def test_games_of_another_set_are_refused(part):
    with pytest.raises(ConfigError, match="different games"):
        transcripts(TINY, "pretrain", [0, TINY.seeds(part)[0]], Play(), Prompts())


def test_pretraining_makes_games_of_its_own_set_only():
    made = []

    def maker(name, seed, part):
        made.append(seed)
        return TINY.maker(name, seed, part)

    watched = Family(TINY.name, TINY.about, TINY.sizes, maker)
    found = pretrain(watched, SMALL)
    assert {TINY.part_of(seed) for seed in made} == {"pretrain"}
    seeds = found.manifest["seeds"]
    learned, checked = (set(range(seeds[key][0], seeds[key][1] + 1)) for key in ("learned", "checked"))
    assert not learned & checked
    assert learned | checked == set(made)


def test_the_folder_says_what_it_is_and_gives_the_model_back(tmp_path):
    made = pretrain(TINY, SMALL)
    made.write(tmp_path / "prior")
    manifest = read_manifest(tmp_path / "prior")
    assert manifest["family"] == "tiny"
    assert manifest["seeds"] == {"learned": [0, 1], "checked": [5999, 5999]}
    assert {look["step"] for look in manifest["looks"]} <= {2, 4}
    assert {"top_1", "log_prob", "chance"} <= manifest["looks"][0].keys()
    model = Decoder.read(tmp_path / "prior")
    assert version_of(model) == manifest["weights"] == version_of(made.model)
    assert load_tokenizer(tmp_path / "prior").vocab_size == made.tokenizer.vocab_size
    (tmp_path / "prior" / MANIFEST).write_text("[]")
    with pytest.raises(ConfigError, match="offbeat text pretrain"):
        read_manifest(tmp_path / "prior")


def test_the_same_settings_give_the_same_weights():
    assert version_of(pretrain(TINY, SMALL).model) == version_of(pretrain(TINY, SMALL).model)


def test_more_games_than_there_are_is_an_error():
    with pytest.raises(ConfigError, match="of the 6000 pretraining games"):
        pretrain(TINY, replace(SMALL, games=6000))


def test_dealt_labels_are_the_same_labels_of_other_states():
    examples = transcripts(TINY, "pretrain", [0, 1], Play(), Prompts())
    found = dealt(examples, 0)
    assert sorted(one.label for one in found) == sorted(one.label for one in examples)
    assert [one.prompt for one in found] == [one.prompt for one in examples]
    kept = np.mean([one.label == other.label for one, other in zip(found, examples, strict=True)])
    assert kept < 0.5


def test_renaming_gives_names_others_and_leaves_the_rest():
    from offbeat.algorithms.priorzero.renaming import Renaming
    from offbeat.llm.words import WordTokenizer

    games = [transcripts(TINY, "pretrain", [seed], Play(), Prompts()) for seed in range(12)]
    examples = [one for game in games for one in game]
    tokenizer = WordTokenizer.of(["".join(one.prompt for one in game) for game in games], common=0.3)
    renaming, rng = Renaming(tokenizer, examples), np.random.default_rng(0)
    common = {word.strip() for word in tokenizer.words}
    for one in examples[::40]:
        found, again = renaming.of(one, rng), renaming.of(one, rng)
        assert found.prompt != one.prompt
        assert found.prompt != again.prompt
        assert found.label == found.actions[one.actions.index(one.label)]
        before, after = (re.findall("[A-Za-z]+", text) for text in (one.prompt, found.prompt))
        other = dict(zip(before, after, strict=True))  # one name for each name, everywhere
        assert [other[word] for word in before] == after
        assert all(other[word] == word for word in before if word in common)


def test_training_learns_what_the_label_is():
    """One game by heart: the log-prob of its labels rises far above chance."""
    from offbeat.algorithms.priorzero.pretraining import _train
    from offbeat.algorithms.priorzero.quality import quality_of
    from offbeat.llm.words import WordTokenizer

    torch.set_num_threads(1)
    examples = transcripts(TINY, "pretrain", [0], Play(random_moves=0.0), Prompts())[:8]
    tokenizer = WordTokenizer.of([one.prompt + one.label for one in examples])
    config = replace(SMALL, width=32, num_heads=4, batch=8, steps=80, check_every=80)
    model, _ = _train(examples, examples, tokenizer, config)
    found = quality_of(ModelPrior(ModelScores(model, tokenizer, "0")), examples)
    assert found.log_prob > 0.3 * found.chance_log_prob
