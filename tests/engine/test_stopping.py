"""Stop strings: nothing of them leaks, nothing else is lost, nothing is withheld without need."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from refimpl.frontend.stop_strings import StopStrings


def run(stops, pieces):
    filtered = StopStrings(stops)
    shown = [filtered.push(piece) for piece in pieces]
    return shown, filtered.flush(), filtered.stopped


def test_a_stop_across_pieces_is_cut_exactly():
    assert run(["END OF"], ["text E", "ND", " OF all"]) == (["text ", "", ""], "", True)


def test_an_unfinished_stop_is_given_back_at_the_end():
    assert run(["END OF"], ["the E", "N"]) == (["the ", ""], "EN", False)


def test_a_false_start_is_released_as_soon_as_it_is_one():
    shown, rest, is_over = run(["aab"], ["a", "a", "a", "c"])
    assert (shown, rest, is_over) == (["", "", "a", "aac"], "", False)


def test_text_that_starts_no_stop_is_never_withheld():
    assert run(["\n\n", "###"], ["one", " two", " 3#4"])[0] == ["one", " two", " 3#4"]


def test_nothing_comes_after_a_stop():
    filtered = StopStrings(["x"])
    assert filtered.push("ax") == "a" and filtered.push("b") == "" and filtered.flush() == ""


def test_without_stops_text_passes():
    assert run([], ["a", "b"]) == (["a", "b"], "", False)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["ok", ""])


TEXTS = st.text(alphabet="ab", max_size=12)


@example(["abab", "ba"], ["abab"])
@given(st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3), st.lists(TEXTS, max_size=8))
def test_how_the_text_is_cut_does_not_matter(stops, pieces):
    """By the definition, on the whole text: it ends where the stop string that is complete first begins."""
    text = "".join(pieces)
    ends = [(n, n - len(stop)) for n in range(len(text) + 1) for stop in stops if text[:n].endswith(stop)]
    expected = text[: min(ends)[1]] if ends else text
    shown, rest, _ = run(stops, pieces)
    assert "".join(shown) + rest == expected
