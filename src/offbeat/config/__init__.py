"""Configuration: models, loader and error messages. Imports no torch.

Import from the modules: workers need the models only, and not the YAML reader.
"""
