"""What drawing several samples and keeping some does to a distribution. Plain numbers, no tensors."""

from __future__ import annotations

from math import log


def best_of_n_kl(n: int) -> float:
    """KL(best-of-n || reference) <= log n - (n - 1) / n, for any reference and any reward.

    With equality where no two responses have the same reward and none has much probability of its own: then the best of n has the
    density n F^(n-1) in terms of its quantile F, and E[log(n F^(n-1))] = log n - (n - 1) / n. Ties and likely responses
    bring the best of n closer to the reference than that (Beirami et al. 2024, arXiv:2401.01879).

    >>> best_of_n_kl(1), round(best_of_n_kl(2), 4), round(best_of_n_kl(16), 4)
    (0.0, 0.1931, 1.8351)
    """
    if n < 1:
        raise ValueError(f"the best of {n} samples does not exist")
    return log(n) - (n - 1) / n
