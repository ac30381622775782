"""Whether the default ρ puts the anchor far beyond what the experts changed."""

from __future__ import annotations

from featcal_hf.recipe import Recipe

ADDING_UP = {"task_arithmetic", "dare_linear", "della_linear", "breadcrumbs"}
"""Methods of mergekit whose weights multiply each expert's change, and are not normalised unless asked for."""
NEAR_ONE = 0.75


def far_anchor(recipe: Recipe) -> list[str]:
    """One sentence if the recipe leaves ρ at 2 for a merge of weights near 1 and above; empty otherwise.

    Such a merge holds the experts' whole changes, and the anchor ρ·merged + (1-ρ)·base twice of them. Weights that
    differ by block or by tensor say nothing.
    """
    merge = recipe.merge
    normalised = (merge.parameters or {}).get("normalize", False)
    if recipe.settings.rho is not None or recipe.base is None or merge.merge_method not in ADDING_UP or normalised:
        return []
    own = [(model.parameters or {}).get("weight") for model in merge.models or () if model.model != recipe.base]
    weights = [float(weight) for weight in own if isinstance(weight, (int, float))]
    if not weights or len(weights) < len(own) or min(weights) < NEAR_ONE:
        return []
    return [
        f"rho is left out, so it is 2: with merge weights of {min(weights):g} and above the anchor lies at twice the "
        "experts' changes. Give rho: 1, which suits such a merge better"
    ]
