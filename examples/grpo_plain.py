"""GRPO as one plain loop: generate, reward, train. No pipeline, coordinator or runtime.

It reaches, bit for bit, the weights of `offbeat train arithmetic-grpo` at k = 0 with the same seed and
number of rounds, on every runtime and with any number of engines:

    python examples/grpo_plain.py --rounds 20 --seed 0
"""

from __future__ import annotations

import argparse

import numpy as np
import torch

from offbeat.algorithms.grpo.config import GRPOConfig
from offbeat.algorithms.grpo.warmup import warm_up
from offbeat.checkpoint import digest, pack
from offbeat.llm import Decoder, Engine, Packing, Request, Shape
from offbeat.llm.packing import micro_batches
from offbeat.llm.tasks import make_task
from offbeat.ops.group_advantages import group_advantages
from offbeat.ops.token_losses import clipped_loss, token_ratios
from offbeat.seeding import derive_seed


def train(rounds: int, seed: int, prompts: int = 16, config: GRPOConfig | None = None) -> str:
    """Train a new model for some rounds of `prompts` groups; return the digest of it and its optimizer."""
    config = config or GRPOConfig()
    torch.set_num_threads(1)
    task = make_task("arithmetic", {"digits": 2})
    tokenizer, sizes = task.tokenizer, config.model
    shape = Shape(
        "LlamaForCausalLM",
        vocab_size=tokenizer.vocab_size,
        width=sizes.width,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_size=sizes.width // sizes.num_heads,
        ff_width=sizes.ff_width,
        tied=True,
        eos_ids=tokenizer.eos_ids,
    )
    model = Decoder(shape).initialize(derive_seed(seed, "init"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0)
    if config.warmup.accuracy is not None:
        warm_up(model, task, config.warmup, seed)
    engine = Engine(model, slots=prompts * config.group_size, max_length=64)

    for version in range(rounds):
        engine.load(version, model.weights())
        problems, requests = [], []
        for number in range(version * prompts, (version + 1) * prompts):
            ticket_seed = derive_seed(seed, "collect", number)
            index = derive_seed(ticket_seed, "problem") % task.num_problems("train")
            problems.append(task.problem("train", index))
            prompt = tuple(tokenizer.encode(problems[-1].prompt))
            requests.append(Request(number, prompt, config.group_size, task.max_new_tokens, seed=ticket_seed))
        responses = engine.generate(requests)

        sequences, advantages = [], []
        for number, (problem, request) in enumerate(zip(problems, requests, strict=True)):
            group = responses[number * config.group_size : (number + 1) * config.group_size]
            texts = [tokenizer.decode(one.tokens.tolist()) if one.end == "eos" else "" for one in group]
            rewards = np.array([task.reward(problem, text) for text in texts])
            advantages += group_advantages(rewards).tolist()
            sequences += [(request.prompt, one) for one in group]
        lengths = [len(prompt) + len(one.tokens) for prompt, one in sequences]
        num_own = sum(len(one.tokens) for _, one in sequences)

        for batch in micro_batches(lengths, config.tokens_per_batch):
            tokens = torch.tensor([t for i in batch for t in (*sequences[i][0], *sequences[i][1].tokens)])
            is_own = [torch.arange(lengths[i]) >= len(sequences[i][0]) for i in batch]
            own = torch.cat(is_own).nonzero()[:, 0]
            behaviour = torch.cat([torch.from_numpy(sequences[i][1].log_probs) for i in batch])
            advantage = torch.tensor([advantages[i] for i in batch for _ in sequences[i][1].tokens])
            hidden = model(tokens, Packing.of([lengths[i] for i in batch]))[own - 1]
            log_probs = model.logits(hidden).log_softmax(-1).gather(-1, tokens[own, None])[:, 0]
            ratios = token_ratios(log_probs, behaviour)
            losses = clipped_loss(ratios, advantage, clip_low=0.2, clip_high=0.28)
            (losses * (1.0 / num_own)).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return digest(pack({"weights": model.weights(), "optimizer": optimizer.state_dict()})[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(train(options.rounds, options.seed))
