"""posttrain: reinforcement learning for language models, small enough to read in an evening."""

from posttrain import version

__version__ = version.VERSION
