"""How messages list names."""

from __future__ import annotations

from featcal_hf.errors import listed


def test_six_names_are_listed_in_their_order() -> None:
    assert listed("fedcba", like="a") == "f, e, d, c, b, a"


def test_of_more_names_those_most_like_what_was_given_come_first_and_the_others_are_counted() -> None:
    names = ["task_arithmetic", "ties", "slerp", "dare_ties", "dare_linear", "linear", "della", "sce", "karcher"]
    assert listed(names, like="dare_tise").startswith("dare_ties, dare_linear, ties, ")
    assert listed(names, like="dare_tise").endswith(", ... 3 more")
    assert listed(names) == "task_arithmetic, ties, slerp, dare_ties, dare_linear, linear, ... 3 more"
