"""Advantages from rewards: relative to a group, along a response, and by GAE from a critic's values. A sequence without a score counts
in no baseline and has advantage 0. GAE skips tokens without loss, because only loss tokens are actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from posttrain.ops.weights import loss_token_rows, sequence_sums


def group_advantages(
    reward_N: Tensor,
    valid_N: Tensor,
    group_N: Tensor,
    *,
    baseline: str = "mean",
    scale: str = "group",
    ddof: int = 1,
    epsilon: float = 1e-4,
    episode_N: Tensor | None = None,
) -> Tensor:
    """A_i = (r_i - b_i) / (s_i + epsilon), over the valid members V of the group of i. If an episode has several sequences in a group,
    `episode_N` is its index: they share its one vote, so that counts, means and deviations are over episodes.

    baseline  "mean": b = mean of V;  "leave_one_out": b_i = mean of V without i (RLOO), so r_i - b_i = n/(n-1) (r_i - mean); without
              the whole episode of i, whose mean is e: r_i - b_i = r_i - mean + (e - mean) / (n-1)
    scale     "group": s = std of V with `ddof`;  "batch": s = std of all valid rewards;  "none": no division
    A is exactly 0 in a group whose valid rewards are all equal (tested by max == min, never by a small std) or fewer than two, and for
    every sequence that is not valid, whatever its reward is. Sums are float64; the result has the dtype of the rewards.
    """
    narrow, wide = reward_N.dtype, torch.float64
    reward_N = torch.where(valid_N, reward_N, 0.0).to(wide)
    groups = int(group_N.max()) + 1 if group_N.numel() else 0
    vote_N = _votes(valid_N, episode_N)
    zeros = torch.zeros(groups, dtype=wide, device=reward_N.device)
    count_P = zeros.index_add(0, group_N, vote_N).round()
    mean_P = zeros.index_add(0, group_N, vote_N * reward_N) / count_P.clamp(min=1)
    centred_N = torch.where(valid_N, reward_N - mean_P[group_N], 0.0)
    if baseline == "mean":
        advantage_N = centred_N
    elif baseline == "leave_one_out":
        others_P = (count_P - 1).clamp(min=1)
        advantage_N = centred_N * (count_P / others_P)[group_N]
        if episode_N is not None:
            own_N = _by_episode(vote_N * centred_N, episode_N)
            advantage_N = advantage_N + (own_N - centred_N) / others_P[group_N]
    else:
        raise ValueError(f"unknown baseline {baseline!r}: mean or leave_one_out")
    if scale == "group":
        square_P = zeros.index_add(0, group_N, vote_N * centred_N**2)
        std_P = (square_P / (count_P - ddof).clamp(min=1)).sqrt()
        advantage_N = advantage_N / (std_P + epsilon)[group_N]
    elif scale == "batch":
        mean = (vote_N * reward_N).sum() / vote_N.sum()
        square = (vote_N * (reward_N - mean) ** 2).sum()
        std = (square / (count_P.sum() - ddof).clamp(min=1)).sqrt()
        advantage_N = advantage_N / (std + epsilon)
    elif scale != "none":
        raise ValueError(f"unknown scale {scale!r}: group, batch or none")
    differ_P = (group_spread(reward_N, valid_N, group_N) > 0) & (count_P > 1)
    return torch.where(valid_N & differ_P[group_N], advantage_N, 0.0).to(narrow)


def _votes(valid_N: Tensor, episode_N: Tensor | None) -> Tensor:
    """[N]: the share of a valid sequence in the one vote of its episode; 0 for others."""
    valid = valid_N.to(torch.float64)
    return valid if episode_N is None else valid / _by_episode(valid, episode_N).clamp(min=1)


def _by_episode(value_N: Tensor, episode_N: Tensor) -> Tensor:
    """[N]: the sum over the sequences of an episode, at each of them. A part of a step has some of its episodes."""
    _, place_N = torch.unique(episode_N, return_inverse=True)
    return torch.zeros_like(value_N).index_add(0, place_N, value_N)[place_N]


def pass_at_k_advantages(
    reward_N: Tensor,
    valid_N: Tensor,
    group_N: Tensor,
    *,
    k: int,
    solved: float,
    epsilon: float = 1e-4,
    episode_N: Tensor | None = None,
) -> Tensor:
    """Advantages of pass@k (Chen et al. 2025, arXiv:2508.10751, the analytic form). n- of the n responses of a group have a reward
    below `solved`. Every subset of k responses is one sample, with reward 1 if at least one of its members is right. The advantage
    of a response is the mean over the samples that contain it:

        R = 1 - C(n-, k) / C(n, k),    sigma = sqrt(R (1 - R))
        A_right = (1 - R) / (sigma + epsilon),    A_wrong = (1 - R - C(n- - 1, k - 1) / C(n - 1, k - 1)) / (sigma + epsilon)

    k = 1 gives the group's mean and population std. A is 0 in groups of fewer than k, and if all samples are right or all are wrong.
    """
    narrow, wide = reward_N.dtype, torch.float64
    groups = int(group_N.max()) + 1 if group_N.numel() else 0
    vote_N = _votes(valid_N, episode_N)
    right_N = valid_N & (reward_N >= solved)
    zeros = torch.zeros(groups, dtype=wide, device=reward_N.device)
    count_P = zeros.index_add(0, group_N, vote_N).round()
    wrong_P = zeros.index_add(0, group_N, vote_N.where(~right_N, 0.0)).round()

    def share(chosen_P: Tensor, of_P: Tensor, size: int) -> Tensor:
        """C(chosen, size) / C(of, size)."""
        factors = [(chosen_P - n).clamp(min=0) / (of_P - n).clamp(min=1) for n in range(size)]
        return torch.stack([torch.ones_like(chosen_P), *factors]).prod(0)

    fail_P = share(wrong_P, count_P, k)
    sigma_P = ((1 - fail_P) * fail_P).sqrt()
    others_P = share(wrong_P - 1, count_P - 1, k - 1)
    advantage_N = fail_P[group_N] - others_P[group_N].where(~right_N, 0.0)
    counts_N = valid_N & ((count_P >= k) & (fail_P > 0) & (fail_P < 1))[group_N]
    return torch.where(counts_N, advantage_N / (sigma_P + epsilon)[group_N], 0.0).to(narrow)


def part_advantages(
    part_NK: Tensor,
    weights: Sequence[float],
    valid_N: Tensor,
    group_N: Tensor,
    *,
    epsilon: float = 1e-4,
    **scaling: Any,
) -> Tensor:
    """Normalise each of several rewards within the group separately, before they are added (GDPO, arXiv:2601.05242, equations 4 to 6).
    The sum is divided by its std over the optimizer step, so that its scale does not depend on the number of rewards:

        A_ik = (r_ik - mean_i(r_ik)) / (std_i(r_ik) + epsilon),    S_i = sum_k w_k A_ik,    A_i = S_i / (std(S) + epsilon)

    If rewards were added first, one that varies little or rarely would be lost among those that vary much.
    """
    columns = [
        weight * group_advantages(r_N, valid_N, group_N, epsilon=epsilon, **scaling)
        for weight, r_N in zip(weights, part_NK.T, strict=True)
    ]
    sum_N = torch.stack(columns).sum(0)
    valid = sum_N[valid_N].double()
    if not bool((valid != 0).any()):
        return sum_N
    return (sum_N / (valid.std(correction=0) + epsilon)).to(sum_N.dtype)


def group_spread(reward_N: Tensor, valid_N: Tensor, group_N: Tensor) -> Tensor:
    """max - min of the valid rewards of each group, 0 if fewer than two are valid."""
    groups = int(group_N.max()) + 1 if group_N.numel() else 0
    high, low = (torch.where(valid_N, reward_N, sign * torch.inf) for sign in (-1, 1))
    empty = torch.zeros(groups, dtype=reward_N.dtype, device=reward_N.device)
    top_P = empty.scatter_reduce(0, group_N, high, "amax", include_self=False)
    bottom_P = empty.scatter_reduce(0, group_N, low, "amin", include_self=False)
    return torch.where(torch.isfinite(top_P), top_P - bottom_P, 0.0)


def sums_to_go(value_T: Tensor, mask_T: Tensor, sequence_T: Tensor, sequences: int) -> Tensor:
    """sum_{s >= t} x_s over the loss tokens of the same sequence; 0 at other tokens. Sums are float64.

    Each sequence is summed in a row of its own, so that rounding does not depend on the sequences before it in the batch.
    """
    at, row, column, longest = loss_token_rows(mask_T, sequence_T, sequences)
    value_NL = torch.zeros(sequences, longest, dtype=torch.float64, device=value_T.device)
    value_NL[row, column] = value_T[at].to(torch.float64)
    to_go_M = value_NL.flip(1).cumsum(1).flip(1)[row, column]
    return torch.zeros_like(value_T).index_copy(0, at, to_go_M.to(value_T.dtype))


def process_advantages(
    step_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    group_N: Tensor,
    *,
    scale: str = "group",
    ddof: int = 1,
    epsilon: float = 1e-4,
) -> Tensor:
    """Process supervision (DeepSeekMath, section 4.1.3). All step rewards R of a group are normalised together. The advantage of a
    token is the sum over the steps that end at it or later:

        r~_j = (r_j - mean(R)) / (std(R) + epsilon),    A_it = sum over steps j of y_i with index(j) >= t of r~_j

    `step_T` holds the reward of a step at the loss token where it ends, and NaN elsewhere.
    """
    ends_T = mask_T & torch.isfinite(step_T)
    reward_S, group_S = step_T[ends_T], group_N[sequence_T[ends_T]]
    valid_S = torch.ones_like(reward_S, dtype=torch.bool)
    normal_S = group_advantages(reward_S, valid_S, group_S, scale=scale, ddof=ddof, epsilon=epsilon)
    normal_T = torch.zeros_like(step_T).masked_scatter(ends_T, normal_S)
    return sums_to_go(normal_T, mask_T, sequence_T, len(group_N))


def step_advantages(
    value_T: Tensor, begin_N: Tensor, end_N: Tensor, mask_T: Tensor, sequence_T: Tensor
) -> Tensor:
    """[T]: what each step changes. The steps of sequence i have the values v_0 = begin_i, v_1, ..., v_m = end_i, and the tokens of step
    k have A = v_k - v_{k-1}. `value_T` holds v_k at the loss token where step k ends, and NaN elsewhere; at the last loss token of
    a sequence it is not used, because the value there is `end_N`.
    """
    count = len(begin_N)
    last_T = sums_to_go(mask_T.float(), mask_T, sequence_T, count) == 1
    ends_T = mask_T & torch.isfinite(value_T) & ~last_T
    of_M = sequence_T[ends_T]
    steps_N = torch.zeros_like(sequence_T[:1].expand(count)).index_add(
        0, of_M, torch.ones_like(of_M)
    )
    # the values of all sequences, one after the other: each has two more than inner ends
    first_N = (steps_N + 2).cumsum(0) - steps_N - 2
    inner_N = steps_N.cumsum(0) - steps_N
    place_T = ends_T.cumsum(0) - ends_T.long() - inner_N[sequence_T] + first_N[sequence_T]
    values = begin_N.new_empty(len(of_M) + 2 * count)
    values[first_N], values[first_N + steps_N + 1] = begin_N, end_N
    values[place_T[ends_T] + 1] = value_T[ends_T].to(values.dtype)
    return values[place_T + 1] - values[place_T]


def turn_starts(mask_T: Tensor, sequence_T: Tensor) -> Tensor:
    """bool [T]: the first token of each turn. Given tokens separate the turns, so a turn is a run of loss tokens."""
    again_T = mask_T[1:] & mask_T[:-1] & (sequence_T[1:] == sequence_T[:-1])
    return mask_T & ~torch.nn.functional.pad(again_T, (1, 0))


def turn_advantages(
    reward_N: Tensor,
    paid_T: Tensor,
    valid_N: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    group_N: Tensor,
    **scaling: Any,
) -> Tensor:
    """[T]: credit by turn within groups. With r_i the whole return of episode i and p_ij the reward of its turn j,

        G_ik = r_i - sum_{j < k} p_ij,    A_ik = (G_ik - mean_i(G_ik)) / (std_i(G_ik) + epsilon)

    for all tokens of turn k: a turn gets credit for its own reward and later ones. At every k each episode of the group has one vote;
    an episode with fewer turns votes with the return of its last turn. So if everything is paid at the end, every turn has the
    advantage of the whole episode. `scaling` are the options of `group_advantages`.
    """
    starts_T, sequences = turn_starts(mask_T, sequence_T), len(group_N)
    at = starts_T.nonzero()[:, 0]
    if not len(at):
        return torch.zeros_like(paid_T)
    whose_M = sequence_T[at]
    place_M = torch.arange(len(at), device=at.device) - torch.searchsorted(whose_M, whose_M)
    turns = torch.arange(int(place_M.max()) + 1, device=at.device)
    total_N = sequence_sums(paid_T.double(), mask_T, sequence_T, sequences).to(paid_T.dtype)
    left_M = sums_to_go(paid_T, mask_T, sequence_T, sequences)[at]
    return_NK = reward_N[:, None].expand(-1, len(turns)).clone()
    return_NK[whose_M, place_M] -= total_N[whose_M] - left_M
    last_N = (torch.bincount(whose_M, minlength=sequences) - 1).clamp(min=0)
    return_NK = return_NK.gather(1, torch.minimum(turns, last_N[:, None]))
    columns = [group_advantages(g_N, valid_N, group_N, **scaling) for g_N in return_NK.T]
    advantage_M = torch.stack(columns, 1)[whose_M, place_M]
    number_T = (starts_T.long().cumsum(0) - 1).clamp(min=0)
    return torch.where(mask_T, advantage_M[number_T], 0.0)


def overlong_punishment(length_N: Tensor, l_max: float, l_cache: float) -> Tensor:
    """The soft overlong punishment of DAPO (section 3.4): 0 up to l_max - l_cache tokens, -1 from l_max on, linear in between:

    R(y) = ((l_max - l_cache) - |y|) / l_cache,    kept within [-1, 0]
    """
    return ((l_max - l_cache - length_N) / l_cache).clamp(-1.0, 0.0)


def generalised_advantages(
    reward_T: Tensor,
    value_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    sequences: int,
    gamma: float,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (GAE, Schulman 2015), and the returns that the critic learns. `lam` may be [N], one for each
    sequence:

        delta_t = r_t + gamma V_t' - V_t,    A_t = delta_t + gamma lam A_t',    R_t = A_t + V_t

    with t' the next loss token of the same sequence. Tool output in between is part of the next state and not an action, so its tokens
    are skipped, whatever their values. After the last loss token V = A = 0: the episode ends there, also one that the length limit cut
    off. lam = 1 gives the return minus the value, lam = 0 the one-step error. Sums are float64; results have the dtype of the values
    and are 0 at tokens without loss.
    """
    device, wide = value_T.device, torch.float64
    empty_T = torch.zeros_like(value_T)
    at, row, column, longest = loss_token_rows(mask_T, sequence_T, sequences)
    if not longest:
        return empty_T, empty_T.clone()
    reward_NL, value_NL = torch.zeros(2, sequences, longest + 1, dtype=wide, device=device)
    reward_NL[row, column], value_NL[row, column] = reward_T[at].to(wide), value_T[at].to(wide)
    # after the end of a sequence rewards and values are 0, and so are all sums that start there
    delta_NL = reward_NL[:, :-1] + gamma * value_NL[:, 1:] - value_NL[:, :-1]
    summed = _summed_by_doubling if value_T.is_cuda else _summed_by_token
    advantage_M = summed(delta_NL, gamma * lam)[row, column]
    return_M = advantage_M + value_NL[row, column]
    advantage_M, return_M = advantage_M.to(value_T.dtype), return_M.to(value_T.dtype)
    return empty_T.index_copy(0, at, advantage_M), empty_T.index_copy(0, at, return_M)


def _summed_by_token(delta_NL: Tensor, decay: float | Tensor) -> Tensor:
    """[N, L]: A_t = delta_t + decay A_t+1, computed from the last token backwards; `decay` may be [N]."""
    advantage_NL, following_N = torch.zeros_like(delta_NL), torch.zeros_like(delta_NL[:, 0])
    for t in range(delta_NL.shape[1] - 1, -1, -1):
        following_N = delta_NL[:, t] + decay * following_N
        advantage_NL[:, t] = following_N
    return advantage_NL


def _summed_by_doubling(delta_NL: Tensor, decay: float | Tensor) -> Tensor:
    """The same in O(log L) kernel launches: sums over 1, 2, 4, ... tokens."""
    advantage_NL, width = delta_NL, 1
    decay_N1 = torch.as_tensor(decay, dtype=delta_NL.dtype, device=delta_NL.device).reshape(-1, 1)
    while width < delta_NL.shape[1]:
        more_NL = pad(decay_N1 * advantage_NL[:, width:], (0, width))
        advantage_NL, decay_N1, width = advantage_NL + more_NL, decay_N1**2, 2 * width
    return advantage_NL


def length_adaptive(length_N: Tensor, alpha: float) -> Tensor:
    """[N]: lambda_i = max(0, 1 - 1 / (alpha l_i)). The weights lambda^k of the errors k tokens ahead add up to alpha l_i, so that a
    long response looks further ahead (VAPO, arXiv:2504.05118)."""
    return (1 - 1 / (alpha * length_N.double().clamp(min=1))).clamp(min=0.0)


def turn_generalised_advantages(
    reward_T: Tensor,
    value_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    sequences: int,
    gamma: float,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """GAE over turns: each turn is one action, in the state before its first token, with the sum of its tokens' rewards as its reward:

        delta_k = r_k + gamma V_k+1 - V_k,    A_k = delta_k + gamma lam A_k+1,    R_k = A_k + V_k

    Every token of turn k has A_k, and the critic learns R_k at each of them.
    """
    starts_T = turn_starts(mask_T, sequence_T)
    at, number_T = starts_T.nonzero()[:, 0], (starts_T.long().cumsum(0) - 1).clamp(min=0)
    reward_M = torch.zeros(len(at), dtype=torch.float64, device=at.device)
    if not len(at):
        return torch.zeros_like(value_T), torch.zeros_like(value_T)
    reward_M = reward_M.index_add(0, number_T, reward_T.where(mask_T, 0.0).double())
    every_M, which_M = torch.ones_like(at, dtype=torch.bool), sequence_T[at]
    made = generalised_advantages(reward_M, value_T[at], every_M, which_M, sequences, gamma, lam)
    advantage_T, return_T = (column[number_T].where(mask_T, 0.0) for column in made)
    return advantage_T, return_T


def last_tokens(mask_T: Tensor, sequence_T: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
    """(position, sequence): the last loss token of each sequence that has any, and the index of the sequence."""
    at = mask_T.nonzero()[:, 0]
    last_N = torch.full((sequences,), -1, dtype=at.dtype, device=at.device)
    last_N = last_N.scatter_reduce(0, sequence_T[at], at, "amax")
    whose = (last_N >= 0).nonzero()[:, 0]
    return last_N[whose], whose


def whiten(value_T: Tensor, mask_T: Tensor, shift: bool = True, epsilon: float = 1e-8) -> Tensor:
    """(x - mean) / sqrt(var + epsilon) over the loss tokens of the step, 0 elsewhere. Without `shift` the mean is added back,
    (x - mean) / sqrt(var + epsilon) + mean, as in the code of Ziegler et al. 2019.

    The variance is that of the population (ddof 0). If all values are equal (by max == min), they become exactly 0 with `shift`, and
    stay as they are without it. Sums are float64; the result has the dtype of the values.
    """
    inside_M = value_T[mask_T].to(torch.float64)
    if not len(inside_M) or bool(inside_M.max() == inside_M.min()):
        return torch.zeros_like(value_T) if shift else value_T.where(mask_T, 0.0)
    mean, scale = inside_M.mean(), (inside_M.var(correction=0) + epsilon).rsqrt()
    whitened_M = (inside_M - mean) * scale + (0.0 if shift else mean)
    return torch.zeros_like(value_T).masked_scatter(mask_T, whitened_M.to(value_T.dtype))
