"""Pretraining: a language model made from nothing but transcripts of a family's pretraining games."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from offbeat.algorithms.priorzero.priors import ModelPrior, ModelScores, version_of
from offbeat.algorithms.priorzero.prompts import EMPTY, Prompts, label
from offbeat.algorithms.priorzero.quality import quality_of
from offbeat.algorithms.priorzero.renaming import Renaming
from offbeat.algorithms.priorzero.transcripts import Example, Play, dealt, transcripts
from offbeat.envs.text import Family
from offbeat.errors import ConfigError
from offbeat.llm.model import Decoder
from offbeat.llm.scoring import label_log_probs
from offbeat.llm.shape import Shape
from offbeat.llm.words import WordTokenizer
from offbeat.progress import report_progress
from offbeat.reading import DESCRIPTION_BYTES, parse_json, read_file
from offbeat.seeding import derive_seed

MANIFEST = "pretraining.json"
_TEXT_WEIGHT = 0.5
"""Weight of the log-probs of valid actions' tokens among all texts: what can be typed here, which teaches to
copy names, beside which of it is right."""
_EMPTY_SHARE = 1 / 16
"""Share of labels learned without a state, so that the model is at home there, too."""
_WARMUP_SHARE, _LAST_LR = 0.05, 0.05


@dataclass(frozen=True, slots=True)
class PretrainConfig:
    """Settings of pretraining.

    ``games`` are the first seeds of the family's ``pretrain`` set, ``checks`` the last ones, which stop the
    training: after ``patience`` looks in a row without a better log-prob the best weights are kept.
    """

    games: int = 200
    checks: int = 20
    play: Play = field(default_factory=lambda: Play(plays=2))
    prompts: Prompts = field(default_factory=Prompts)
    renames: bool = True
    """Give invented names other ones each time an example is learned from, and in games that are checked."""
    deals: bool = False
    """Deal the labels to other states: a control, trained for ``steps`` without stopping."""
    width: int = 96
    num_layers: int = 4
    num_heads: int = 4
    ff_width: int = 192
    batch: int = 12
    others: int = 7
    """Valid actions beside the right one that a label is told from; drawn anew each time."""
    steps: int = 6000
    check_every: int = 250
    patience: int = 6
    most_checked: int = 200
    lr: float = 2e-3
    weight_decay: float = 0.1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Pretrained:
    """A trained model, its tokenizer, and what is known of it."""

    model: Decoder
    tokenizer: WordTokenizer
    manifest: dict[str, Any]

    def write(self, folder: Path) -> None:
        """Write the model's folder in the layout of Hugging Face, with the tokenizer and the manifest."""
        with tempfile.TemporaryDirectory() as made:
            self.tokenizer.save(Path(made))
            self.model.write(folder, Path(made))
        (Path(folder) / MANIFEST).write_text(json.dumps(self.manifest, indent=1) + "\n")


def pretrain(family: Family, config: PretrainConfig) -> Pretrained:
    """Train a model on transcripts of the family's ``pretrain`` games; no other game is looked at."""
    seeds = family.seeds("pretrain")
    if not 1 <= config.games <= len(seeds) - config.checks or config.checks < 1:
        raise ConfigError(
            f"games: {config.games} with checks: {config.checks}: give 1 or more of each, of the "
            f"{len(seeds)} pretraining games of {family.name}"
        )
    learned, checked = seeds[: config.games], seeds[len(seeds) - config.checks :]
    examples = transcripts(family, "pretrain", learned, config.play, config.prompts)
    watched = transcripts(family, "pretrain", checked, replace(config.play, plays=1), config.prompts)
    watched = _sample(watched, config.most_checked, config.seed)
    tokenizer = WordTokenizer.of(_texts(examples, config.games))
    renaming = Renaming(tokenizer, examples) if config.renames else None
    if renaming is not None:
        rng = np.random.default_rng(derive_seed(config.seed, "checked-names"))
        watched = [renaming.of(one, rng) for one in watched]
    if config.deals:
        examples = dealt(examples, config.seed)
    started_s = time.process_time()
    model, looks = _train(examples, watched, tokenizer, config, renaming)
    manifest: dict[str, Any] = {
        "family": family.name,
        "seeds": {"learned": [learned[0], learned[-1]], "checked": [checked[0], checked[-1]]},
        "settings": asdict(config),
        "examples": len(examples),
        "parameters": model.shape.num_parameters,
        "looks": looks,
        "cpu_s": round(time.process_time() - started_s, 1),
        "weights": version_of(model),
    }
    return Pretrained(model, tokenizer, manifest)


def pretrain_folder(family: Family, config: PretrainConfig, folder: Path) -> dict[str, Any]:
    """Train a model, write its folder, and return the manifest."""
    made = pretrain(family, config)
    made.write(folder)
    return made.manifest


def set_threads(count: int) -> None:
    """Let torch compute with so many threads."""
    torch.set_num_threads(count)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read what a pretrained folder says about itself."""
    path = Path(folder) / MANIFEST
    try:
        found = parse_json(read_file(path, DESCRIPTION_BYTES).decode())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}); make the folder by: offbeat text pretrain FAMILY"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds no JSON object; make the folder by: offbeat text pretrain FAMILY")
    return found


def _texts(examples: Sequence[Example], games: int) -> list[str]:
    """Return about one text for each game."""
    size = math.ceil(len(examples) / games)
    return [
        "".join(one.prompt + label(one.label) for one in examples[begin : begin + size])
        for begin in range(0, len(examples), size)
    ]


def _sample(examples: list[Example], most: int, seed: int) -> list[Example]:
    rng = np.random.default_rng(derive_seed(seed, "checked"))
    chosen = rng.permutation(len(examples))[:most]
    return [examples[one] for one in sorted(chosen.tolist())]


def make_shape(tokenizer: WordTokenizer, config: PretrainConfig, longest: int) -> Shape:
    """Return the shape of the network: a small one of the Qwen3 family, with tied embeddings."""
    return Shape(
        architecture="Qwen3ForCausalLM",
        vocab_size=tokenizer.vocab_size,
        width=config.width,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_heads,
        head_size=config.width // config.num_heads,
        ff_width=config.ff_width,
        qk_norm=True,
        tied=True,
        max_positions=longest,
        eos_ids=tokenizer.eos_ids,
        pad_id=tokenizer.pad_id,
    )


# ---------------------------------------------------------------- training


Tokens = tuple[int, ...]


class _Item(NamedTuple):
    """An example as token ids: the prompt, the label, and the other valid actions."""

    prompt: Tokens
    label: Tokens
    others: tuple[Tokens, ...]


_POSITIONS = 1024


def _train(
    examples: Sequence[Example],
    watched: Sequence[Example],
    tokenizer: WordTokenizer,
    config: PretrainConfig,
    renaming: Renaming | None = None,
) -> tuple[Decoder, list[dict[str, float]]]:
    """Train until the log-prob of watched labels has not risen for a while; return the best weights."""
    model = Decoder(make_shape(tokenizer, config, _POSITIONS)).initialize(derive_seed(config.seed, "weights"))
    optimizers = _optimizers(model, config)
    rng, order = np.random.default_rng(derive_seed(config.seed, "batches")), list[int]()
    best, best_weights, looks = -math.inf, model.weights(), list[dict[str, float]]()
    num_worse = 0
    for step in range(1, config.steps + 1):
        if len(order) < config.batch:
            order = rng.permutation(len(examples)).tolist() + order
        batch = [examples[order.pop()] for _ in range(config.batch)]
        if renaming is not None:
            batch = [renaming.of(one, rng) for one in batch]
        items = [_drawn(one, tokenizer, config, rng) for one in batch]
        _learn(model, items, optimizers, _lr_at(step, config))
        if step % config.check_every and step != config.steps:
            continue
        found = quality_of(ModelPrior(ModelScores(model, tokenizer, str(step))), watched)
        looks.append({"step": step, **asdict(found)})
        report_progress(f"step {step}: top-1 {found.top_1:.2f}, log-prob {found.log_prob:.2f} on other games")
        if config.deals or found.log_prob > best:
            best, num_worse = found.log_prob, 0
            best_weights = {name: weight.clone() for name, weight in model.weights().items()}
        elif (num_worse := num_worse + 1) == config.patience:
            break
    report_progress("")
    model.set_weights(best_weights)
    return model, looks


def _drawn(
    example: Example, tokenizer: WordTokenizer, config: PretrainConfig, rng: np.random.Generator
) -> _Item:
    """Encode an example with some of the other actions, now and then without its state."""
    others = [action for action in example.actions if action != example.label]
    kept = [others[at] for at in rng.permutation(len(others))[: config.others].tolist()]
    prompt = EMPTY if rng.random() < _EMPTY_SHARE else example.prompt
    encoded = [tuple(tokenizer.encode(label(action))) for action in (example.label, *kept)]
    return _Item(tuple(tokenizer.encode(prompt)), encoded[0], tuple(encoded[1:]))


def _optimizers(model: Decoder, config: PretrainConfig) -> list[torch.optim.Optimizer]:
    """Return Muon (https://kellerjordan.github.io/posts/muon/) for layers' matrices, AdamW for the rest."""
    matrices = [weight for layer in model.layers for weight in layer.parameters() if weight.ndim == 2]
    chosen = set(map(id, matrices))
    rest = [weight for weight in model.parameters() if id(weight) not in chosen]
    return [
        torch.optim.Muon(
            matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def _lr_at(step: int, config: PretrainConfig) -> float:
    """Return the learning rate: a linear rise, then a cosine."""
    share = step / config.steps
    fall = _LAST_LR + (1 - _LAST_LR) * 0.5 * (1 + math.cos(math.pi * share))
    return config.lr * min(1.0, share / _WARMUP_SHARE) * fall


def _learn(
    model: Decoder, batch: Sequence[_Item], optimizers: Sequence[torch.optim.Optimizer], lr: float
) -> None:
    """Take one step on the cross-entropy of the label, which comes first, among the actions of its state."""
    labels = [(one.label, *one.others) for one in batch]
    found, counts = label_log_probs(model, [one.prompt for one in batch], labels)
    among = found.masked_fill(counts == 0, -torch.inf).log_softmax(-1)[:, 0]
    loss = -among.mean() - _TEXT_WEIGHT * found.sum() / counts.sum()
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
