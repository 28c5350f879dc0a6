"""PriorZero: language models as priors of a tree search in text games.

Prompts (`prompts`), priors (`priors`) and their quality (`quality`), pretraining on a family's own games
(`transcripts`, `pretraining`), and a search in the true game that judges priors (`true_search`).
"""
