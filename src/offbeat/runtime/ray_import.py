"""Ray, or a refusal that says how to get it. The other modules of the Ray runtime take it from here."""

from __future__ import annotations

from offbeat.errors import ConfigError

try:
    import ray
except ImportError:
    raise ConfigError('runtime.kind=ray needs Ray: pip install "offbeat[ray]"') from None

__all__ = ["ray"]
