"""posttrain: reinforcement learning for language models."""

import os

# Threads of OpenMP sleep while they wait for each other: spinning, they take the cores from every other process (6 times slower beside
# one). It is read once, when torch is loaded, and child processes inherit it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
