"""Ends a stream of text at a stop string, wherever the borders between its pieces lie."""

from collections.abc import Iterable


class StopStrings:
    """Passes text on and withholds only what may yet become a stop string.

    stopped  True once one was found; the text before it has been passed on, and nothing after it will be
    which    the one that was found
    """

    def __init__(self, stops: Iterable[str]):
        self._stops = tuple(stops)
        if not all(self._stops):
            raise ValueError("stop: an empty string, expected at least one character; leave it out instead")
        self._held, self.which = "", ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What of the text so far is certain to come before any stop string."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        # the stop string that is complete first counts: so it does not matter how the text is cut
        found = [(k + len(stop), k, stop) for stop in self._stops if (k := text.find(stop)) >= 0]
        if found:
            _, at, self.which = min(found)
            self.stopped, self._held = True, ""
            return text[:at]
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """The withheld rest, when no more text comes."""
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that `stop` begins with."""
        return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
