"""Recipes by name: the values of `train.recipe` and the keys each one sets. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

RECIPES: dict[str, dict[str, Any]] = {
    "runbook": {
        "model.qk_norm": False,
        "model.logit_soft_cap": 0.0,
        "train.optimizer": "adamw",
        "train.zero_init": False,
        "train.schedule": "cosine",
    },
    "speedrun": {
        "model.qk_norm": True,
        "model.logit_soft_cap": 15.0,
        "train.optimizer": "muon",
        "train.zero_init": True,
        "train.schedule": "trapezoid",
        "train.decay_fraction": 0.5,
        "train.lr_min_ratio": 0.0,
        "train.warmup_steps": 50,
        "train.lr": 2e-3,
        "train.muon_lr": 4e-3,
        "train.batch_tokens": 2**19,
    },
}


def apply_recipe(tree: dict[str, Any], given: Iterable[str] | None = None) -> None:
    """Set the keys of the recipe that a tree of sections names, except those that are `given` as `section.key`.

    By default these are all keys in the tree. A tree that is wrong in itself is left for validation.
    """
    train = tree.get("train")
    name = train.get("recipe") if isinstance(train, dict) else None
    recipe = RECIPES.get(name, {}) if isinstance(name, str) else {}
    kept = None if given is None else set(given)
    for dotted, value in recipe.items():
        section, _, key = dotted.partition(".")
        keys = tree.setdefault(section, {})
        if isinstance(keys, dict) and (key not in keys if kept is None else dotted not in kept):
            keys[key] = value
