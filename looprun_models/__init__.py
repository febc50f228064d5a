"""Local models for agents: measured llama-server profiles, one OpenAI client, no cloud key."""

from looprun_models._version import __version__

__all__ = ["__version__"]
