"""From the last token to the first; posttrain/ops/advantages.py has it for many responses at once, in generalised_advantages."""


def gae(rewards, values, gamma, lam):
    found, advantage, following = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        delta = reward + gamma * following - value
        advantage = delta + gamma * lam * advantage
        following = value
        found.append(advantage)
    return found[::-1]
