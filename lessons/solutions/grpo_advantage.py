"""The advantage of GRPO; posttrain/ops/advantages.py has it for tensors, in group_advantages."""

import statistics


def advantages(rewards):
    scored = [r for r in rewards if r is not None]
    if len(scored) < 2 or max(scored) == min(scored):
        return [0.0 for _ in rewards]
    mean, deviation = statistics.fmean(scored), statistics.stdev(scored)
    return [0.0 if r is None else (r - mean) / (deviation + 1e-4) for r in rewards]
