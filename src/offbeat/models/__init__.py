"""Networks: torch-free actors for workers, torch networks for learners.

Importing this package, ``actions``, ``actor``, ``numpy_actor``, ``observations`` or ``spec`` needs no torch.
"""
