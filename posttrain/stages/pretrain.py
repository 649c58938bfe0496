"""Pretraining: the same loss on every token, prompts included."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.stages.sft import SFTStage


@dataclass(frozen=True, kw_only=True)
class PretrainStage(SFTStage):
    """A supervised stage with loss on all tokens, not only the assistant's."""

    all_tokens = True
