"""The knowledge gate: does a prior pretrained on other games help a search in games it never saw?

Trains priors on pretraining games of the tiny family, judges them on states of held-out games, and lets each
steer a search in the true game: paired by game and seed, at equal simulations and equal entropy. What is done
is kept in ``--work`` and not done again: stop and continue at will.
"""

from __future__ import annotations

import atexit
import json
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import REPOSITORY, conclude, parser, say

from offbeat.algorithms.priorzero.pretraining import (
    MANIFEST,
    PretrainConfig,
    Pretrained,
    pretrain,
    read_manifest,
)
from offbeat.algorithms.priorzero.priors import (
    ContextFreePrior,
    MatchedPrior,
    PermutedPrior,
    Prior,
    UniformPrior,
    read_prior,
)
from offbeat.algorithms.priorzero.quality import quality_of
from offbeat.algorithms.priorzero.transcripts import Example, Play, expert_length, transcripts
from offbeat.algorithms.priorzero.true_search import Episode, Player, TrueSearchConfig, play
from offbeat.envs.text import Family, find_family
from offbeat.progress import progress_to

DOSES = (0, 10, 50, 200)
ENTROPY = 0.7
"""Entropy of the model-made priors in each state, as a share of the uniform one's; chosen, as the temperature
of the search, on games of the set ``train``."""
SLOTS = 256
LENGTHS = 4
"""Steps allowed, in lengths of the expert's solution."""
CONTROLS = ("uniform", "permuted", "context-free", "shuffled")
TRAINED = ("pretrained", "shuffled", *(f"dose-{dose}" for dose in DOSES[:-1]))
ARMS = ("pretrained", *CONTROLS, *TRAINED[2:])
ALONE = ("alone", "alone without repeats", "random play")
FIGURES = ("share", "area", "steps_to_half", "cut")
POINTS = 20
MOST_HOURS = 3.0
STEP_S, SEARCH_S = 0.21, 0.012
"""CPU-seconds of a training step and of a searched step of one player, measured; for the prediction."""


def main(arguments: Sequence[str] | None = None) -> int:
    torch.set_num_threads(1)
    options = _options(arguments)
    family = find_family(options.family)
    options.work.mkdir(parents=True, exist_ok=True)
    _predict(family, options)
    started_s = time.process_time()
    folders = _train_all(family, options)
    priors = _priors(folders, options.arms)
    figures: dict[str, Any] = {
        "family": family.name,
        "games": options.games,
        "seeds": options.seeds,
        "entropy": ENTROPY,
        "simulations": 25,
        "models": {name: _told(read_manifest(folder)) for name, folder in folders.items()},
        "quality": _qualities(family, options, priors),
    }
    parts = [_play_game(family, seed, options, priors) for seed in _held_out(family, options)]
    figures |= _compare(parts)
    figures["cpu_s"] = time.process_time() - started_s
    holds = _show(figures)
    return conclude(figures, holds, options)


def _options(arguments: Sequence[str] | None) -> Namespace:
    made = parser(__doc__)
    made.add_argument("--family", default="tiny")
    made.add_argument("--games", type=int, default=40, help="held-out games that are played")
    made.add_argument("--seeds", type=int, default=5, help="episodes of each game and prior")
    made.add_argument("--steps", type=int, default=PretrainConfig().steps, help="most training steps")
    made.add_argument("--arms", default=",".join(ARMS), help="priors that steer a search, with commas")
    made.add_argument(
        "--work", type=Path, default=REPOSITORY / "runs" / "text-priors", help="what is done is kept here"
    )
    options = made.parse_args(arguments)
    options.arms = ["pretrained", *(arm for arm in ARMS[1:] if arm in options.arms.split(","))]
    if options.quick:
        options.games, options.seeds, options.steps = 2, 2, 20
        options.work = Path(tempfile.mkdtemp(prefix="text-priors-"))
        atexit.register(shutil.rmtree, options.work)
    return options


def _held_out(family: Family, options: Namespace) -> range:
    return family.seeds("held_out")[: options.games]


# ---------------------------------------------------------------- before


def _predict(family: Family, options: Namespace) -> None:
    """Print what this will take in CPU time, and cut the games if that is too much."""
    training_s = STEP_S * options.steps * sum(arm in TRAINED and arm != "dose-0" for arm in options.arms)
    mean = np.mean([LENGTHS * expert_length(family, seed) for seed in _held_out(family, options)])
    per_game_s = float(mean) * options.seeds * (len(options.arms) + 1) * SEARCH_S
    predicted_s = training_s + per_game_s * options.games
    say(f"predicted: at most {predicted_s / 60:.0f} CPU-minutes, {training_s / 60:.0f} of them training")
    if predicted_s > MOST_HOURS * 3600:
        options.games = max(2, int((MOST_HOURS * 3600 - training_s) / per_game_s))
        say(f"that is above {MOST_HOURS:.0f} hours: cut to {options.games} games")


def _train_all(family: Family, options: Namespace) -> dict[str, Path]:
    config = PretrainConfig(steps=options.steps, check_every=min(options.steps, 250))
    if options.quick:
        config = replace(config, games=4, play=Play(), checks=2, most_checked=40)
    folders = {"pretrained": _train(family, "pretrained", config, options)}
    for dose in DOSES[:-1]:
        if f"dose-{dose}" in options.arms:
            games = max(1, min(dose, config.games))
            chosen = replace(config, games=games, steps=config.steps if dose else 0)
            folders[f"dose-{dose}"] = _train(family, f"dose-{dose}", chosen, options)
    if "shuffled" in options.arms:
        looks = read_manifest(folders["pretrained"])["looks"]
        steps = max(looks, key=lambda look: look["log_prob"])["step"]
        dealt = replace(config, deals=True, steps=steps, check_every=steps)
        folders["shuffled"] = _train(family, "shuffled", dealt, options)
    return folders


def _train(family: Family, name: str, config: PretrainConfig, options: Namespace) -> Path:
    folder: Path = options.work / f"{family.name}-{name}"
    if not (folder / MANIFEST).exists():
        say(f"training {name} ...")
        with progress_to(lambda text: say(f"  {text}") if text else None):
            made: Pretrained = pretrain(family, config)
        made.write(folder)
        say(f"trained {name}: {_told(made.manifest)}")
    return folder


def _told(manifest: dict[str, Any]) -> dict[str, Any]:
    best = max(manifest["looks"], key=lambda look: look["log_prob"], default={})
    kept = {name: manifest[name] for name in ("examples", "parameters", "cpu_s", "weights")}
    return {**kept, "step": best.get("step", 0)}


def _priors(folders: dict[str, Path], arms: Sequence[str]) -> dict[str, Prior]:
    """Return the priors as they are, before their entropy is matched."""
    models: dict[str, Prior] = {name: read_prior(folder) for name, folder in folders.items()}
    pretrained = models["pretrained"]
    found = {
        **models,
        "uniform": UniformPrior(),
        "permuted": PermutedPrior(pretrained),
        "context-free": ContextFreePrior(pretrained),
    }
    return {arm: found[arm] for arm in arms}


# ---------------------------------------------------------------- quality


def _versions(priors: dict[str, Prior]) -> dict[str, str]:
    """Return what figures depend on: those that were made of something else are made again."""
    found = {name: prior.version for name, prior in priors.items()}
    return {**found, "search": f"{TrueSearchConfig(slots=SLOTS)} at entropy {ENTROPY}"}


def _qualities(family: Family, options: Namespace, priors: dict[str, Prior]) -> dict[str, Any]:
    path = options.work / f"quality-{options.games}.json"
    versions = _versions(priors)
    if path.exists() and (kept := json.loads(path.read_text()))["versions"] == versions:
        return dict(kept["found"])
    examples = transcripts(family, "held_out", _held_out(family, options), Play(), PretrainConfig().prompts)
    if len(examples) > 1000:
        chosen = np.random.default_rng(0).permutation(len(examples))[:1000]
        examples = [examples[at] for at in sorted(chosen.tolist())]
    found: dict[str, Any] = {}
    for name, prior in {**priors, "nearest neighbour": _nearest(family, options)}.items():
        found[name] = asdict(quality_of(prior, examples))
        if name not in ("uniform", "nearest neighbour"):
            found[name]["matched"] = asdict(quality_of(MatchedPrior(prior, ENTROPY), examples))
    path.write_text(json.dumps({"versions": versions, "found": found}))
    return found


class _Nearest:
    """A bag-of-words prior: actions are as likely as they share words with labels of the nearest states."""

    version = "nearest"

    def __init__(self, examples: Sequence[Example], neighbours: int = 5) -> None:
        counts = Counter(word for one in examples for word in set(_words(one.prompt)))
        self._places = {word: place for place, word in enumerate(counts)}
        self._weights = np.array([np.log(len(examples) / count) for count in counts.values()], np.float32)
        self._rows = np.stack([self._row(one.prompt) for one in examples])
        self._labels, self._neighbours = [set(_words(one.label)) for one in examples], neighbours

    def _row(self, text: str) -> np.ndarray:
        row = np.zeros(len(self._places), np.float32)
        for word in _words(text):
            if word in self._places:
                row[self._places[word]] += 1
        row *= self._weights
        return row / max(float(np.linalg.norm(row)), 1e-9)

    def log_probs(self, prompts: Sequence[str], actions: Sequence[Sequence[str]]) -> list[np.ndarray]:
        found = []
        for prompt, own in zip(prompts, actions, strict=True):
            near = np.argsort(-(self._rows @ self._row(prompt)))[: self._neighbours]
            scores = np.array([sum(self._alike(action, at) for at in near) for action in own]) + 1e-3
            found.append(np.log(scores / scores.sum()))
        return found

    def _alike(self, action: str, at: int) -> float:
        words, other = set(_words(action)), self._labels[at]
        return len(words & other) / len(words | other)


def _words(text: str) -> list[str]:
    return text.lower().replace(".", " ").replace(",", " ").split()


def _nearest(family: Family, options: Namespace) -> Prior:
    games = 4 if options.quick else DOSES[-1]
    return _Nearest(
        transcripts(family, "pretrain", family.seeds("pretrain")[:games], Play(), PretrainConfig().prompts)
    )


# ---------------------------------------------------------------- search


def _play_game(family: Family, seed: int, options: Namespace, priors: dict[str, Prior]) -> dict[str, Any]:
    """Play one game with all priors and seeds, or read how that went."""
    versions = _versions(priors)
    path = options.work / f"game-{family.name}-{seed}-{options.seeds}.json"
    if path.exists() and (kept := json.loads(path.read_text()))["versions"] == versions:
        return dict(kept)
    started_s = time.process_time()
    players: dict[str, list[Player]] = {}
    for name, prior in priors.items():
        used = prior if name == "uniform" else MatchedPrior(prior, ENTROPY)
        players[name] = [Player(used, number) for number in range(options.seeds)]
    alone = priors["pretrained"]
    seeds = range(options.seeds)
    players["alone"] = [Player(alone, number, searches=False) for number in seeds]
    players["alone without repeats"] = [
        Player(alone, number, searches=False, repeats=False) for number in seeds
    ]
    players["random play"] = [Player(UniformPrior(), number, searches=False) for number in seeds]
    limit = LENGTHS * expert_length(family, seed)
    config = TrueSearchConfig(slots=SLOTS)
    episodes = play(family.make(seed), [one for own in players.values() for one in own], limit, config)
    found: dict[str, Any] = {"versions": versions, "seed": seed, "limit": limit, "arms": {}}
    for name, own in players.items():
        found["arms"][name] = [_figures(one) for one in episodes[: len(own)]]
        del episodes[: len(own)]
    found["cpu_s"] = time.process_time() - started_s
    path.write_text(json.dumps(found))
    say(
        f"game {seed}: "
        + ", ".join(f"{name} {_mean(own, 'share'):.2f}" for name, own in found["arms"].items())
    )
    return found


def _figures(episode: Episode) -> dict[str, Any]:
    at = [round(episode.limit * point / POINTS) for point in range(1, POINTS + 1)]
    scores = [0.0, *episode.scores]
    curve = [scores[min(step, len(scores) - 1)] / episode.max_score for step in at]
    return {
        "share": episode.share,
        "area": episode.area,
        "steps_to_half": episode.steps_to_half,
        "curve": curve,
        "cut": episode.cut,
    }


def _mean(own: Sequence[dict[str, Any]], figure: str) -> float:
    return float(np.mean([one[figure] for one in own]))


# ---------------------------------------------------------------- comparison


def _compare(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def table(arm: str, figure: str) -> np.ndarray:
        return np.array([[one[figure] for one in part["arms"][arm]] for part in parts], np.float64)

    arms = {
        arm: {
            **{
                figure: float(table(arm, figure).mean())
                for figure in ("share", "area", "steps_to_half", "cut")
            },
            "curve": table(arm, "curve").mean((0, 1)).tolist(),
        }
        for arm in parts[0]["arms"]
    }
    against = {
        arm: {
            "area": _interval(table("pretrained", "area") - table(arm, "area")),
            "share": _interval(table("pretrained", "share") - table(arm, "share")),
            "steps_to_half": _interval(table(arm, "steps_to_half") - table("pretrained", "steps_to_half")),
            "times_fewer": arms[arm]["steps_to_half"] / arms["pretrained"]["steps_to_half"],
        }
        for arm in arms
        if arm != "pretrained"
    }
    found: dict[str, Any] = {"arms": arms, "pretrained_minus": against}
    if "uniform" in arms and "permuted" in arms:
        worse = _interval(table("uniform", "area") - table("permuted", "area"))
        found["uniform_minus_permuted_area"] = worse
    return found


def _interval(differences: np.ndarray) -> dict[str, float]:
    """Return the mean of paired differences ``[games, seeds]`` and its 95 % interval over games."""
    rng = np.random.default_rng(0)
    by_game = differences.mean(1)
    drawn = by_game[rng.integers(len(by_game), size=(10_000, len(by_game)))].mean(1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return {"mean": float(by_game.mean()), "low": float(low), "high": float(high)}


def _show(figures: dict[str, Any]) -> bool:
    say("\nprior on states of held-out games      top-1  top-3  log-prob  entropy")
    for name, own in figures["quality"].items():
        say(
            f"  {name:36} {own['top_1']:5.2f}  {own['top_3']:5.2f}  {own['log_prob']:8.2f}"
            f"  {own['entropy']:7.2f}"
        )
    chance = figures["quality"]["pretrained"]
    say(f"  chance: top-1 {chance['chance']:.2f}, log-prob {chance['chance_log_prob']:.2f}")
    say(
        "\nplay of held-out games     share of max   area   steps to 50 %   pretrained better by (area, 95 %)"
    )
    for name, own in figures["arms"].items():
        row = f"  {name:24} {own['share']:12.2f}  {own['area']:5.2f}  {own['steps_to_half']:14.1f}"
        if name != "pretrained":
            area = figures["pretrained_minus"][name]["area"]
            row += f"   {area['mean']:+.3f} ({area['low']:+.3f} to {area['high']:+.3f})"
        say(row)
    return _holds(figures)


def _holds(figures: dict[str, Any]) -> bool:
    """Check the aims, and say which is met, as far as their arms were there."""
    against, arms, quality = figures["pretrained_minus"], figures["arms"], figures["quality"]
    checks = {"top-1 of the pretrained prior at least 0.7": quality["pretrained"]["top_1"] >= 0.7}
    for name in (*CONTROLS, *ALONE[:2]):
        if name in arms:
            checks[f"area above that of {name}, interval above 0"] = against[name]["area"]["low"] > 0
    for name in ("uniform", "permuted"):
        if name in arms:
            fewer = against[name]["times_fewer"] >= 2
            checks[f"at most half as many steps to 50 % as {name}"] = fewer
    doses = [arms[name]["area"] for name in (*TRAINED[2:], "pretrained") if name in arms]
    if len(doses) > 1:
        checks["area rises with the pretraining games"] = doses == sorted(doses)
    if "uniform_minus_permuted_area" in figures:
        worse = figures["uniform_minus_permuted_area"]["mean"] > 0
        checks["permuted worse than uniform"] = worse
    if "uniform" in arms:
        checks["hard: uniform search at most 0.4 of the maximum"] = arms["uniform"]["share"] <= 0.4
    nearest = quality["nearest neighbour"]["top_1"]
    checks["hard: nearest neighbour top-1 at most 0.5"] = nearest <= 0.5
    say("")
    for name, met in checks.items():
        say(f"  {'yes' if met else 'NO '}  {name}")
    figures["checks"] = checks
    return all(checks.values())


if __name__ == "__main__":
    sys.exit(main())
