"""Tables of scores as frozen priors."""

import numpy as np
import pytest

from offbeat.algorithms.priorzero.priors import ModelPrior, ModelScores
from offbeat.algorithms.priorzero.prompts import EMPTY
from offbeat.algorithms.priorzero.score_table import TableScores, fill
from offbeat.errors import ConfigError
from tests.unit.priorzero_fakes import ACTIONS, PROMPT, make_model, make_tokenizer

TOKENIZER = make_tokenizer()


def make_scores(seed=0):
    return ModelScores(make_model(TOKENIZER, seed), TOKENIZER, f"model-{seed}")


def filled(path):
    table = TableScores(path, make_scores())
    fill(table, [PROMPT], [ACTIONS], EMPTY)
    table.close()


@pytest.mark.parametrize("normalise", ["sum", "mean", "context_free"])
def test_a_table_answers_as_its_model_does(tmp_path, normalise):
    filled(tmp_path / "scores.jsonl")
    table = TableScores(tmp_path / "scores.jsonl")
    assert (len(table), table.version) == (2, "model-0")
    (found,) = ModelPrior(table, normalise).log_probs([PROMPT], [ACTIONS])
    (expected,) = ModelPrior(make_scores(), normalise).log_probs([PROMPT], [ACTIONS])
    np.testing.assert_array_equal(found, expected)


def test_a_new_state_is_scored_and_added(tmp_path):
    path = tmp_path / "scores.jsonl"
    filled(path)
    table = TableScores(path, make_scores())
    table.of(["Another room.\n>"], [ACTIONS[:2]])
    table.close()
    assert len(TableScores(path)) == 3
    with pytest.raises(ConfigError, match="no scores for a prompt"):
        TableScores(path).of(["A third room.\n>"], [ACTIONS])


def test_a_line_that_was_torn_is_left_out_and_the_next_one_is_whole(tmp_path):
    path = tmp_path / "scores.jsonl"
    filled(path)
    path.write_bytes(path.read_bytes()[:-20])
    assert len(TableScores(path)) == 1
    filled(path)
    assert len(TableScores(path)) == 2


def test_what_is_no_table_of_this_model_is_refused(tmp_path):
    path = tmp_path / "scores.jsonl"
    with pytest.raises(ConfigError, match="does not exist"):
        TableScores(path)
    filled(path)
    with pytest.raises(ConfigError, match="another model"):
        TableScores(path, make_scores(1))
    for content in ("", "hello\n", "[1]\n", '{"model": 3}\n'):
        path.write_text(content)
        with pytest.raises(ConfigError, match="no table of scores"):
            TableScores(path)
