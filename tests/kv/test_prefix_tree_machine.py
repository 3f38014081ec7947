"""The prefix tree under random use, against the definition by brute force (prefix_world)."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastpath.kv.pages import OutOfPages
from tests.kv.prefix_world import World, media

words = st.integers(1, 2)
pieces = st.one_of(
    st.lists(words, min_size=1, max_size=9),
    st.builds(media, st.integers(1, 2), st.integers(1, 7), st.booleans()),
)


class PrefixTreeMachine(RuleBasedStateMachine):
    @initialize(
        window=st.integers(1, 11),
        page=st.integers(1, 5),
        n_pages=st.sampled_from([12, 40, 300]),
        max_bytes=st.sampled_from([150, 600, 10**9]),
        whole=st.booleans(),
        shortest=st.sampled_from([1, 1, 6]),
        kinds=st.sampled_from([("global", "sliding")] * 4 + [("global",), ("sliding",)]),
    )
    def begin(self, **options):
        self.world = World(**options)
        self.seen = [[1]]  # sequences so far: new ones often begin as they do

    @rule(data=st.data())
    def request(self, data):
        """A new sequence, most often one that begins like an earlier one."""
        base = data.draw(st.sampled_from(self.seen))
        kept = base[: data.draw(st.integers(0, len(base)))]
        while kept and not self._is_whole(kept):
            kept.pop()
        new = [e for piece in data.draw(st.lists(pieces, min_size=1, max_size=3)) for e in piece]
        elements = (kept + new)[:60]
        while not self._is_whole(elements):
            elements.pop()
        if elements:
            self.seen.append(elements)
            self.world.start(elements)

    @staticmethod
    def _is_whole(elements):
        """Does it not end inside an image or a sound?"""
        last = elements[-1] if elements else 0
        return not isinstance(last, tuple) or last[3] == last[1] - 1

    @precondition(lambda self: self.world.lanes)
    @rule(data=st.data())
    def compute(self, data):
        """A call: some more of a prompt, then perhaps an insert in the middle or at its end."""
        lane = data.draw(st.sampled_from(self.world.lanes))
        stops = [n for n in range(lane.length + 1, len(lane.elements) + 1) if self._may_stop(lane, n)]
        if stops:
            self._write(lane, data.draw(st.sampled_from(stops)))

    def _may_stop(self, lane, n):
        return self.world.may_end(lane.elements, n)

    @precondition(lambda self: self.world.lanes)
    @rule(data=st.data(), word=words)
    def decode(self, data, word):
        lane = data.draw(st.sampled_from(self.world.lanes))
        if lane.length == len(lane.elements) < 60:
            lane.elements.append(word)
            self._write(lane, len(lane.elements))

    def _write(self, lane, stop):
        try:
            self.world.write(lane, stop)
        except OutOfPages:
            self.world.release(lane)

    @precondition(lambda self: self.world.lanes)
    @rule(data=st.data())
    def insert(self, data):
        lane = data.draw(st.sampled_from(self.world.lanes))
        if lane.length:
            before = self.world.tree.counters.refused
            kept = self.world.insert(lane)
            assert kept == (
                lane.length >= self.world.tree.shortest and before == self.world.tree.counters.refused
            )
            if kept:
                self._is_served(lane.elements[: lane.length])

    def _is_served(self, elements):
        """What was inserted last is found: whole by a longer prompt, all but its last token by itself."""
        longer = [*elements, 3]
        assert self.world.tree.match(self.world.key(longer)[:-1]).n == len(elements)

    @precondition(lambda self: self.world.lanes)
    @rule(data=st.data(), keep=st.booleans())
    def finish(self, data, keep):
        lane = data.draw(st.sampled_from(self.world.lanes))
        if keep and lane.length:
            self.world.insert(lane)
        self.world.release(lane)

    @rule(kind=st.sampled_from(["global", "sliding"]), n=st.integers(1, 9))
    def evict(self, kind, n):
        if kind in self.world.kinds:
            self.world.evict(kind, n)

    @precondition(lambda self: len(self.seen) > 6)
    @rule()
    def clear(self):
        self.world.clear()
        assert self.world.tree.nbytes == 0
        self.seen = self.seen[:1] + self.seen[-2:]

    @rule(data=st.data())
    def look(self, data):
        """A match changes nothing."""
        base = data.draw(st.sampled_from(self.seen))
        tree = self.world.tree
        before = tree.nbytes, list(tree._by_age)
        self.world.check_hit([*base, 9], tree.match(self.world.key([*base, 9])[:-1]))
        assert (tree.nbytes, list(tree._by_age)) == before

    @invariant()
    def sound(self):
        if hasattr(self, "world"):
            self.world.check()
            self.world.prefixes()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        for lane in list(self.world.lanes):
            self.world.release(lane)
        for kind, pool in self.world.pools.items():  # with no lane about, everything can be had back
            self.world.evict(kind, len(pool.refs))
            assert pool.n_free == len(pool.refs)
        self.world.check()


TestPrefixTree = PrefixTreeMachine.TestCase
TestPrefixTree.settings = settings(max_examples=2 * settings.default.max_examples, stateful_step_count=40)
