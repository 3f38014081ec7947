"""The prefix tree, case by case: the faults of other engines first (E2, E3, E4: their smallest inputs)."""

import numpy as np
import pytest

from fastpath.kv.pages import OutOfPages, PagePool
from fastpath.kv.prefix_check import check_tree
from fastpath.kv.prefix_key import prefix_key
from fastpath.kv.prefix_tree import SHORTEST, PrefixTree
from refimpl.batch import SoftTokens
from tests.kv.prefix_world import PAGE_BYTES, World, media


def words(n, seed=0):
    return np.random.default_rng(seed).integers(1, 1000, n).tolist()


# E2: the next request shares 64 of 70 tokens, window 8.


@pytest.mark.parametrize("page", [4, 32, 3])
def test_two_requests_that_share_64_of_70_tokens(page):
    world = World(window=8, page=page)
    first = words(70)
    lane = world.start(first)
    for stop in (32, 64, 70):  # a turn ended at 64
        world.write(lane, stop)
        assert world.insert(lane)
    world.release(lane)
    second = first[:64] + words(6, seed=1)
    assert world.run(second) == 64
    world.run(second + words(5, seed=2))
    counters = world.tree.counters
    assert (counters.lookups, counters.hits) == (3, 2)
    assert counters.tokens_reused == 64 + 70


def test_a_long_prompt_leaves_checkpoints_on_its_way():
    """Without them a request that shares 630 of 700 tokens would find nothing."""
    world = World(window=16, page=4, n_pages=1000)
    prompt = words(700)
    key = world.key(prompt)
    places = world.tree.places(0, key)
    assert places[-1] == 700 and all(n % 4 == 0 for n in places[:-1])
    lane = world.start(prompt)
    before = world.pools["global"].n_free
    for stop in places:
        world.write(lane, stop)
        world.insert(lane)
    assert before - world.pools["global"].n_free == -(-700 // 4)  # no page was copied on the way
    world.release(lane)
    world.check()
    assert 630 - world.tree.spacing < world.run(prompt[:630] + words(50, seed=1)) <= 630


@pytest.mark.parametrize(
    ("window", "page_bytes", "spacing"),
    [
        # page 64.  E2B: 12 sliding owners of 1 x 256, 3 global ones of 1 x 512, f16
        (512, {"sliding": 12 * 256 * 2 * 2 * 64, "global": 3 * 512 * 2 * 2 * 64}, 9 * 2 * 64),
        # 26B-A4B: 25 sliding layers of 8 x 256, 5 global ones of 2 x 512
        (1024, {"sliding": 25 * 8 * 256 * 2 * 2 * 64, "global": 5 * 2 * 512 * 2 * 2 * 64}, 17 * 10 * 64),
        (1024, {"sliding": 1, "global": 1000}, 1024),
    ],
)
def test_checkpoints_cost_no_more_than_what_they_stand_in(window, page_bytes, spacing):
    """A window of 512 touches 9 pages of 64: of E2B these weigh as much as 18 global ones."""
    pools = {kind: PagePool(1) for kind in page_bytes}
    assert PrefixTree(pools, window, 64, 1 << 40, page_bytes).spacing == spacing


def test_too_large_for_the_budget_is_counted_and_costs_nothing_else():
    world = World(window=6, page=4, max_bytes=10 * PAGE_BYTES["global"] + 3 * PAGE_BYTES["sliding"])
    short, long = words(20), words(60, seed=1)
    world.run(short)
    lane = world.start(long)
    world.write(lane, 60)
    assert not world.insert(lane)
    world.release(lane)
    assert world.tree.counters.refused == 1
    assert world.run([*short, 5]) == 20


# E3: a window that has slid on is no window of a shorter prefix.


@pytest.mark.parametrize("page", [1, 4, 8, 32])
def test_forty_cached_tokens_and_a_request_that_shares_thirty(page):
    """Window 8: to go on at 30 takes 23 .. 29; the lane at 40 has 32 .. 39 and what is on their pages."""
    world = World(window=8, page=page)
    first = words(40)
    lane = world.start(first)
    for stop in (10, 20, 40):
        world.write(lane, stop)
        if stop == 20:
            world.insert(lane)
    world.insert(lane)
    world.release(lane)
    second = [*first[:30], 1001, *words(5, seed=1)]
    assert world.tree.match(world.key(second)[:-1]).wanted == 30
    assert world.run(second) == 20
    assert world.run([*first[:30], *words(6, seed=2)]) == 30  # the second one left its window there


def test_whoever_computes_a_known_prefix_is_asked_to_leave_its_window():
    world = World(window=8, page=4)
    first = words(60)
    world.run(first)
    second, third = (first[:45] + words(20, seed) for seed in (1, 2))
    hit = world.tree.match(world.key(second)[:-1])
    assert (hit.n, hit.wanted) == (0, 45)
    assert world.tree.places(0, world.key(second), hit.wanted) == [45, world.tree.spacing, 65]
    world.run(second)
    hit = world.tree.match(world.key(third)[:-1])
    assert (hit.n, hit.wanted) == (45, None)


def test_shorter_than_the_window_is_found_at_any_length():
    world = World(window=50, page=8)
    first = words(49)
    world.run(first)
    for n in range(1, 49):
        assert world.tree.match(world.key([*first[:n], 1001])).n == n


def test_the_same_prompt_again_computes_its_last_token_only():
    for length in range(20, 40):  # also where the window begins with a page
        world = World(window=8, page=4)
        assert world.run(words(length)) == 0
        assert world.run(words(length)) == length - 1


def test_checkpoints_that_are_close_serve_what_is_between():
    world = World(window=9, page=4)
    first = words(80)
    lane = world.start(first)
    for stop in range(40, 81, 8):
        world.write(lane, stop)
        world.insert(lane)
    world.release(lane)
    for n in range(40, 80):
        assert world.tree.match(world.key([*first[:n], 1001])).n == n


# E4: the same text, another picture.


def photo(value, n_rows=4, vision=True):
    return media(value, n_rows, vision)


@pytest.mark.parametrize("window", [8, 20])
@pytest.mark.parametrize("whole", [True, False])
def test_a_red_and_a_blue_picture_of_one_size(whole, window):
    world = World(window=window, page=4, whole=whole)
    question = words(9, seed=3)
    assert world.run([11, 12, 13, *photo(1), *question]) == 0
    blue = world.key([11, 12, 13, *photo(2), *question])[:-1]
    hit = world.tree.match(blue)
    assert (hit.n, hit.wanted) == ((3, None) if window == 20 else (0, 3))  # up to the first soft token
    assert world.run([11, 12, 13, *photo(2), *question]) == hit.n
    assert world.run([11, 12, 13, *photo(1), *question]) == 3 + 4 + 8
    assert world.run([11, 12, 13, *photo(2), *question]) == 3 + 4 + 8


def test_a_sound_is_not_a_picture_of_the_same_rows():
    world = World(window=8, page=4)
    world.run([11, 12, *photo(1, vision=True), 13, 14])
    assert world.run([11, 12, *photo(1, vision=False), 13, 14]) == 2


@pytest.mark.parametrize("whole", [True, False])
def test_the_same_picture_in_the_third_turn(whole):
    """A hit goes through it, and on to the words behind it."""
    world = World(window=12, page=4, whole=whole)
    chat = words(21)
    for turn in (words(7, seed=1), [*photo(1, 6), *words(5, seed=2)], words(8, seed=3)):
        before = len(chat)
        chat = chat + turn
        cached = world.run(chat)
        assert cached == (0 if before == 21 else before)
    assert world.run([*chat, *words(3, seed=4)]) == len(chat)


@pytest.mark.parametrize(("whole", "cached"), [(True, 5), (False, 5 + 3)])
def test_a_prefix_never_ends_inside_an_image_whose_rows_see_each_other(whole, cached):
    world = World(window=20, page=4, whole=whole)
    seen = [*words(5), *photo(1, 6)]
    world.run([*seen, *words(4, seed=1)])
    assert world.tree.match(world.key(seen)[: 5 + 3]).n == cached
    lane = world.start(seen)
    assert lane.length == (5 if whole else 5 + 5)  # its last token is computed, and with it the image


def test_two_pictures_side_by_side():
    world = World(window=20, page=4, whole=True)
    world.run([7, *photo(1, 3), *photo(2, 3), 8, 9])
    assert world.run([7, *photo(1, 3), *photo(3, 3), 8, 9]) == 4
    assert world.run([7, *photo(2, 3), *photo(1, 3), 8, 9]) == 1
    assert world.run([7, *photo(1, 3), *photo(2, 4), 8, 9]) == 4
    assert world.run([7, *photo(1, 3), *photo(2, 3), 8, 9, 10]) == 9


def test_digests():
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    same = SoftTokens(5, rows[::-1][::-1].copy(), True)
    base = SoftTokens(0, rows, True)
    assert base.digest == same.digest and len(base.digest) == 32
    assert base.digest is base.digest
    strided = SoftTokens(0, np.repeat(rows, 2, axis=1)[:, ::2], True)
    assert strided.digest == base.digest
    changed = rows.copy()
    changed[3, 2] = np.nextafter(changed[3, 2], 100)
    others = [
        SoftTokens(0, rows, False),
        SoftTokens(0, changed, True),
        SoftTokens(0, rows.reshape(3, 4), True),
        SoftTokens(0, rows.astype(np.float64), True),
        SoftTokens(0, -0.0 * rows, True),
        SoftTokens(0, 0.0 * rows, True),
    ]
    assert len({item.digest for item in [base, *others]}) == 7


def test_a_word_with_the_id_of_a_soft_token_is_no_soft_token():
    rows = np.ones((2, 3), np.float32)
    key = prefix_key([5, 0, 0, 6], [SoftTokens(1, rows, True)])
    plain = prefix_key([5, 0, 0, 6])
    assert key.tokens.tolist() == [5, -1, -2, 6]
    assert key.first_difference(plain.tokens, plain.media, 0) == 1
    assert key.label(1) != plain.label(1) and key.label(3) == plain.label(3) == 6


def test_the_ids_under_soft_tokens_do_not_matter():
    soft = [SoftTokens(1, np.ones((2, 3), np.float32), True)]
    a, b = prefix_key([5, 0, 0, 6], soft), prefix_key([5, 258880, 258880, 6], soft)
    assert a.first_difference(b.tokens, b.media, 0) == 4


def test_equal_tokens_of_different_items_differ():
    """As if a short hash of both were the same: identity is the whole digest, item by item."""
    one, two = (SoftTokens(1, np.full((2, 3), v, np.float32), True) for v in (1, 2))
    a, b = prefix_key([5, 0, 0, 6], [one]), prefix_key([5, 0, 0, 6], [two])
    assert a.tokens.tolist() == b.tokens.tolist()
    assert a.first_difference(b.tokens, b.media, 0) == 1


def test_slices_of_keys():
    key = prefix_key([5, 0, 0, 6], [SoftTokens(1, np.ones((2, 3), np.float32), True)], whole_images=True)
    assert len(key[:-1]) == 3 and len(key[:1].media) == 0
    assert [key.outside(n) for n in range(5)] == [0, 1, 1, 3, 4]
    assert [key[:2].outside(n) for n in range(3)] == [0, 1, 1]
    with pytest.raises(ValueError, match=r"expected key\[:n\]"):
        key[1:]


# Memory.


def test_a_page_counts_once():
    world = World(window=8, page=4)
    first = words(30)
    lane = world.start(first)
    for stop in (28, 30):
        world.write(lane, stop)
        world.insert(lane)
    world.release(lane)
    pages = 8 * PAGE_BYTES["global"] + 3 * PAGE_BYTES["sliding"]  # positions 0 .. 29; 20 .. 29 in three pages
    assert world.tree.nbytes == pages
    world.run(first)
    assert world.tree.nbytes == pages  # the same again takes nothing


def test_going_on_in_a_shared_page_replaces_it():
    """29 tokens end inside a page; the longer copy of it serves both, the older one is free."""
    world = World(window=8, page=4)
    first = words(29)
    world.run(first)
    world.run(first + words(1, seed=1))
    assert world.tree.nbytes == 8 * PAGE_BYTES["global"] + 3 * PAGE_BYTES["sliding"]
    assert world.run(first + words(7, seed=2)) == 29  # parts inside the page: this one needs its own
    assert world.tree.nbytes == (8 + 2) * PAGE_BYTES["global"] + (3 + 2) * PAGE_BYTES["sliding"]


def test_the_least_recently_used_goes_first():
    one, two, three = (words(16, seed) for seed in (1, 2, 3))
    each = (
        4 * PAGE_BYTES["global"] + 3 * PAGE_BYTES["sliding"]
    )  # window 8: 8 .. 15, in pages 2, 3; and page 1
    world = World(window=8, page=4, max_bytes=2 * each)
    world.run(one)
    world.run(two)
    world.run([*one[:16], 5])  # used again, and longer
    world.run(three)
    lengths = [world.tree.match(world.key([*ids, 9])).n for ids in (one, two, three)]
    assert lengths[1] == 0 and lengths[2] == 16
    assert world.tree.counters.evicted >= 1
    assert world.tree.nbytes <= 2 * each


def test_a_leaf_that_was_used_again_is_younger():
    world = World(window=8, page=4)
    for seed in (1, 2):
        world.run(words(24, seed))
    world.run(words(24, 1))
    assert world.evict("global", 1) == 6
    assert [world.tree.match(world.key([*words(24, seed), 9])).n for seed in (1, 2)] == [24, 0]


def test_being_used_again_and_again_takes_no_memory():
    world = World(window=8, page=4)
    prompts = [words(24, seed) for seed in range(30)]
    for ids in prompts:
        world.run(ids)
    for _ in range(20):
        for ids in prompts:
            world.tree.used(world.tree.match(world.key([*ids, 9])))
            check_tree(world.tree)
    assert len(world.tree._leaves) < 400
    assert world.evict("global", 1) == 6
    assert [ids for ids in prompts if not world.tree.match(world.key([*ids, 9])).n] == prompts[:1]


def test_eviction_by_kind():
    world = World(window=8, page=4, n_pages=64)
    for seed in range(3):
        world.run(words(24, seed))
    free = world.pools["global"].n_free
    assert world.evict("global", 4) == 6  # the oldest sequence, whole
    assert world.pools["global"].n_free == free + 6
    assert world.tree.match(world.key([*words(24, 0), 9])).n == 0
    assert world.tree.match(world.key([*words(24, 1), 9])).n == 24
    assert world.evict("sliding", 1) == 2
    assert world.evict("sliding", 100) == 2
    assert world.tree.nbytes == 0 and world.evict("global", 1) == 0


def test_what_a_lane_holds_is_passed_over():
    world = World(window=8, page=4)
    lane = world.start(words(24))
    world.write(lane, 24)
    world.insert(lane)
    assert world.evict("global", 5) == world.evict("sliding", 5) == 0
    assert world.tree.match(world.key([*words(24), 9])).n == 24  # still known
    world.release(lane)
    assert world.evict("global", 5) == 6
    world.check()


def test_an_inner_checkpoint_goes_without_its_tokens():
    """Sliding pages of an old turn are given up; the conversation stays in use, and its runs join."""
    world = World(window=8, page=4)
    chat = words(40)
    lane = world.start(chat)
    for stop in (20, 40):
        world.write(lane, stop)
        world.insert(lane)
    world.release(lane)
    assert world.evict("sliding", 2) == 2
    assert len(world.tree._root.children) == 1
    (node,) = world.tree._root.children.values()
    assert (node.start, node.stop, node.children) == (0, 40, {})
    hit = world.tree.match(world.key([*chat[:20], 9]))
    assert (hit.n, hit.wanted) == (0, 20)
    assert world.tree.match(world.key([*chat, 9])).n == 40


def test_a_window_that_is_there_is_not_held_twice():
    """The windows of 29 and of 33 tokens have two pages in common: whoever brings the first once more, in
    pages of its own, adds the third."""
    world = World(window=8, page=4)
    first = words(33)
    lanes = [world.start(first) for _ in range(2)]
    for stop in (29, 33):
        world.write(lanes[0], stop)
        world.insert(lanes[0])
    world.release(lanes[0])
    assert world.evict("sliding", 1) == 1  # of 29: page 5; 6 and 7 are of the window of 33 as well
    before = world.tree.nbytes
    world.write(lanes[1], 29)
    world.insert(lanes[1])
    assert world.tree.nbytes == before + PAGE_BYTES["sliding"]
    world.release(lanes[1])
    world.check()


def test_runs_that_join_keep_the_longer_page_and_the_media():
    """Two continue inside one page; the one whose page the common run holds goes, the other one joins it."""
    world = World(window=30, page=4)
    common = [5, 6, *photo(1, 3), 7]
    one, two = common + words(9, seed=1), common + words(9, seed=2)
    world.run(common)
    world.run(one)
    world.run(two)  # the common run has the page of `two`
    world.tree.used(world.tree.match(world.key([*one, 9])))
    while len(world.tree._by_age) > 1:
        world.tree._forget(next(iter(world.tree._by_age)))
        world.check()
        world.prefixes()
    assert world.tree.match(world.key([*one, 9])).n == len(one)
    other = [5, 6, *photo(2, 3), 7]
    assert world.tree.match(world.key([*other, 9])).n == 2


def test_a_prompt_that_is_inserted_inside_an_image_is_kept_up_to_it():
    world = World(window=30, page=4, whole=True)
    seen = [*words(5), *photo(1, 6), 8]
    lane = world.start(seen)
    world.write(lane, 12)
    assert world.tree.insert(world.key(seen, 8), world.held(lane))
    world.check()
    world.prefixes()
    assert [(node.start, node.stop) for node in world.tree._by_age] == [(0, 5)]


def test_a_hit_keeps_what_it_found():
    """The end of the longer sequence may go; the place where another one went on from stays."""
    world = World(window=50, page=4)
    long = words(40)
    world.run(long)
    lane = world.start(long[:17] + words(30, seed=2))
    assert lane.length == 17
    world.release(lane)
    assert world.evict("global", 1) == 5  # the oldest leaf: the end of `long`
    world.check()
    assert world.tree.match(world.key([*long, 9])).n == 17


def test_short_sequences_are_not_kept():
    world = World(window=8, page=4, shortest=SHORTEST)
    world.run(words(SHORTEST - 1))
    assert world.tree.nbytes == 0
    world.run(words(SHORTEST))
    assert world.run([*words(SHORTEST), 9]) == SHORTEST


def test_a_window_that_is_not_in_the_lane():
    world = World(window=8, page=4)
    lane = world.start(words(40))
    world.write(lane, 40)
    with pytest.raises(
        ValueError, match="prefix tree: 20 tokens without sliding page 3, expected pages 3 to 4"
    ):
        world.tree.insert(world.key(lane.elements, 20), world.held(lane))
    world.check()
    assert world.tree.nbytes == 0


def test_clear():
    world = World()
    world.run(words(30))
    world.clear()
    assert world.tree.nbytes == 0
    assert all(pool.n_free == pool.n for pool in world.pools.values())
    assert world.run(words(30)) == 0


def test_out_of_pages_leaves_everything_in_order():
    world = World(n_pages=6)
    lane = world.start(words(24))
    world.write(lane, 24)
    world.insert(lane)
    lane.elements += words(4, seed=1)
    with pytest.raises(OutOfPages):
        world.write(lane, 28)
    world.release(lane)
    world.check()
    assert world.run(words(24, seed=2)) == 0  # the old one made room
