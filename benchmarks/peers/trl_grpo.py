"""GRPO by trl, for llm_trl.py: reads a request as JSON, prints what it found. In an environment of its own.

Everything is set as offbeat's recipe sets it, and to trl's advantage where there is a choice: no gradient
checkpointing, no reference model, no logging, all responses in one batch.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

request = json.load(sys.stdin)
torch.set_num_threads(request["threads"])


def make_tokenizer():
    """One id per character, as offbeat's."""
    first, end = request["first_id"], request["end_id"]
    vocabulary = {character: first + place for place, character in enumerate(request["characters"])}
    vocabulary |= {f"<{number}>": number for number in range(first)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<0>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token=f"<{end}>", pad_token=f"<{end}>", padding_side="left"
    )


tokenizer = make_tokenizer()
model = LlamaForCausalLM.from_pretrained(request["folder"], dtype=torch.float32)


class EndAtCap(StoppingCriteria):
    """Ends each row where its task cuts it off: by the length of its prompt."""

    def __init__(self):
        self.start, self.caps = None, None

    def __call__(self, input_ids, scores, **kwargs):
        if self.start is None:
            self.start = input_ids.shape[1] - 1
            lengths = (input_ids[:, : self.start] != tokenizer.pad_token_id).sum(1) - 1
            self.caps = (lengths + request["spare"]).clamp(max=request["longest"])
        return input_ids.shape[1] - self.start >= self.caps


if request["spare"] is not None:
    plain = model.generate

    def generate(*arguments, **options):
        """Generate, and end rows at their caps."""
        return plain(*arguments, stopping_criteria=StoppingCriteriaList([EndAtCap()]), **options)

    model.generate = generate

counted = {"tokens": 0}


def reward(prompts, completions, completion_ids, answer, **columns):
    """Reward as the task does, and count tokens."""
    counted["tokens"] += sum(map(len, completion_ids))
    if request["rule"] == "equal":
        return [float(text == right) for text, right in zip(completions, answer, strict=True)]
    found = []
    for text, right in zip(completions, answer, strict=True):
        pairs = enumerate(zip(right, text, strict=False))
        same = next((place for place, (a, b) in pairs if a != b), min(len(right), len(text)))
        found.append(same / max(len(right), len(text)))
    return found


def accuracy():
    """Share of held-out problems that greedy responses solve."""
    right = 0
    model.eval()
    for at in range(0, len(request["held_out"]), 256):
        part = request["held_out"][at : at + 256]
        asked = tokenizer([prompt for prompt, _ in part], return_tensors="pt", padding=True)
        asked.pop("token_type_ids", None)
        with torch.no_grad():
            made = model.generate(**asked, max_new_tokens=request["longest"], do_sample=False)
        texts = tokenizer.batch_decode(made[:, asked["input_ids"].shape[1] :], skip_special_tokens=True)
        right += sum(text == answer for text, (_, answer) in zip(texts, part, strict=True))
    model.train()
    return right / len(request["held_out"])


class Watch(TrainerCallback):
    """Times the steps after the first few; evaluations count for nothing."""

    def __init__(self):
        self.marks, self.points, self.away_s = [], [], 0.0

    def on_step_end(self, args, state, control, **kwargs):
        """Note the end of a step."""
        self.marks.append((time.perf_counter() - self.away_s, time.process_time(), counted["tokens"]))
        if request["every"] and state.global_step % request["every"] == 0:
            began_s = time.perf_counter()
            self.points.append((state.global_step, self.marks[-1][0] - self.marks[0][0], accuracy()))
            self.away_s += time.perf_counter() - began_s


watch = Watch()
size = request["prompts"] * request["group"]
settings = {
    "per_device_train_batch_size": size,
    "num_generations": request["group"],
    "max_completion_length": request["longest"],
    "max_steps": request["steps"],
    "learning_rate": request["lr"],
    "lr_scheduler_type": "constant",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "beta": 0.0,
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "temperature": 1.0,
    "max_grad_norm": 1.0,
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "report_to": [],
    "logging_strategy": "no",
    "save_strategy": "no",
    "disable_tqdm": True,
    "output_dir": request["scratch"],
    "seed": request["seed"],
}
if request["least"]:
    settings["generation_kwargs"] = {"min_new_tokens": request["least"]}
rows = {name: [row[place] for row in request["train"]] for place, name in enumerate(("prompt", "answer"))}
trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward,
    args=GRPOConfig(**settings),
    train_dataset=Dataset.from_dict(rows),
    processing_class=tokenizer,
    callbacks=[watch],
)
trainer.train()
(wall, cpu, tokens), (last_wall, last_cpu, last_tokens) = watch.marks[request["first"]], watch.marks[-1]
found = {"wall_s": last_wall - wall, "cpu_s": last_cpu - cpu, "tokens": last_tokens - tokens}
print(json.dumps({**found, "steps": len(watch.marks) - 1 - request["first"], "points": watch.points}))
