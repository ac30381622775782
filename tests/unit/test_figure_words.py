from __future__ import annotations

import pytest
from records import BLOCKS

from featcal_hf.figure_words import brief, duration, percent, short_input, short_modules, short_names, stacks


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.004, "4 ms"),
        (0.9, "900 ms"),
        (1.0, "1.0 s"),
        (9.96, "10 s"),
        (99.0, "99 s"),
        (100.0, "2 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_a_duration_is_said_as_a_person_would(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_shares_and_numbers_have_the_digits_that_matter() -> None:
    assert [percent(share) for share in (0.0123, 0.0996, 0.5, 1.02)] == ["1.2%", "10%", "50%", "102%"]
    assert [brief(value) for value in (0.1, 0.0886, 12.345, 123.0)] == ["0.100", "0.0886", "12.3", "123"]


def test_blocks_are_named_by_number_after_their_part_where_there_are_several() -> None:
    assert short_names(BLOCKS) == ["0", "1", "2", "3"]
    assert short_names(["vision_model.encoder.layers.0", "text_model.encoder.layers.0"]) == ["vision 0", "text 0"]
    assert stacks(["encoder.block.0", "encoder.block.1", "decoder.block.0"]) == [("encoder", [0, 1]), ("decoder", [2])]


def test_modules_are_named_by_as_much_of_their_paths_as_tells_them_apart() -> None:
    names = ["layer.0.SelfAttention.q", "layer.1.EncDecAttention.q", "layer.2.DenseReluDense.wi"]

    assert short_modules(names) == ["SelfAttention.q", "EncDecAttention.q", "wi"]
    assert short_modules(["a.b", "a.b"]) == ["a.b", "a.b"]
    assert short_input(["self_attn.q_proj", "self_attn.k_proj"]) == "q_proj, k_proj"
