"""Lesson: generalised advantage estimation, as PPO uses it.

A critic gives each token t the value V_t, the expected discounted sum of the rewards from t on. With the reward r_t of each token:

    delta_t = r_t + gamma V_(t+1) - V_t
    A_t     = delta_t + gamma lam A_(t+1)

After the last token the response is over: V and A are 0 there.

python lessons/check.py gae FILE
"""


def gae(rewards, values, gamma, lam):
    """The advantages of the tokens of one response: a list as long as `rewards`."""
    raise NotImplementedError
