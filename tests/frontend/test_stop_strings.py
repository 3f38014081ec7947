"""Stop strings across the borders of pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.frontend.stop_strings import StopStrings


def passed(stops, pieces):
    stop = StopStrings(stops)
    return "".join(map(stop.push, pieces)) + stop.flush(), stop.stopped


def test_reported_cases():
    assert passed(["END OF"], ["text E", "ND", " OF all"]) == ("text ", True)
    assert passed(["END OF"], ["the E", "N"]) == ("the EN", False)


def test_only_a_possible_beginning_is_withheld():
    stop = StopStrings(["END OF", "ab"])
    assert stop.push("text E") == "text "
    assert stop.push("x") == "Ex"
    assert stop.push("xa") == "x"
    assert stop.push("a") == "a"
    assert stop.push("b rest") == ""
    assert stop.stopped
    assert stop.push("more") == stop.flush() == ""


def test_the_stop_that_is_complete_first_counts():
    assert passed(["bc", "abcd"], ["xabc", "d"]) == passed(["bc", "abcd"], ["xabcd"]) == ("xa", True)
    assert passed([], ["abc"]) == ("abc", False)


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="stop: an empty string"):
        StopStrings(["a", ""])


def test_a_false_start_is_released_as_soon_as_it_is_one():
    stop = StopStrings(["aab"])
    assert [stop.push(piece) for piece in "aaac"] == ["", "", "a", "aac"]
    assert StopStrings(["\n\n", "###"]).push(" 3#4") == " 3#4"


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text(alphabet="abc", max_size=4), max_size=8),
)
def test_nothing_from_a_stop_on_passes(stops, pieces):
    text, stopped = passed(stops, pieces)
    whole = "".join(pieces)
    assert stopped == any(stop in whole for stop in stops)
    assert whole.startswith(text)
    assert not any(stop in text for stop in stops)
    assert passed(stops, list(whole)) == (text, stopped)
    # the text ends where the stop string that is complete first begins
    ends = [(n, n - len(stop)) for n in range(len(whole) + 1) for stop in stops if whole[:n].endswith(stop)]
    assert text == (whole[: min(ends)[1]] if ends else whole)
