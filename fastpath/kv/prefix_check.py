"""check_tree: what is always true of a prefix tree, looked at from outside.  For tests and soaks."""

from collections import Counter

from fastpath.kv.geometry import GLOBAL, SLIDING
from fastpath.kv.prefix_node import Node
from fastpath.kv.prefix_tree import PrefixTree


def check_tree(tree: PrefixTree) -> None:
    """
    Raises:
        AssertionError: names the run, or the kind and page
    """
    nodes = _nodes(tree._root)
    for node in nodes:
        _check_shape(tree, node)
        _check_use(tree, node)
        _check_windows(tree, node)
    checkpoints = {node for node in nodes if node.first is not None}
    assert checkpoints == set(tree._by_age), "checkpoints by age are not those of the nodes"
    ages = [node.used for node in tree._by_age]
    assert ages == sorted(ages), "checkpoints are not in the order of their last use"
    waiting = {(used, node) for used, _, node in tree._leaves}
    for node in nodes:
        assert node.children or (node.used, node) in waiting, f"{_name(node)}: a leaf that is never evicted"
    _check_holdings(tree, nodes)


def _nodes(root: Node) -> list[Node]:
    found, todo = [], [root]
    while todo:
        node = todo.pop()
        todo += node.children.values()
        if node is not root:
            found.append(node)
    return found


def _name(node: Node) -> str:
    return f"run {node.start} .. {node.stop - 1}"


def _check_shape(tree: PrefixTree, node: Node) -> None:
    assert node.parent is not None and node.start == node.parent.stop, (
        f"{_name(node)}: does not follow its parent"
    )
    assert len(node.tokens), f"{_name(node)}: no tokens"
    assert node.parent.children.get(node.label) is node, (
        f"{_name(node)}: not its parent's child {node.label!r}"
    )
    assert all(node.start <= item.start < node.stop for item in node.media), f"{_name(node)}: media elsewhere"
    expected = len(node.numbers(tree.page)) if GLOBAL in tree._pools else 0
    assert len(node.pages) == expected, f"{_name(node)}: {len(node.pages)} global pages, expected {expected}"
    assert all(number in node.numbers(tree.page) for number in node.windows), (
        f"{_name(node)}: pages elsewhere"
    )


def _check_use(tree: PrefixTree, node: Node) -> None:
    assert node.first is not None or len(node.children) >= 2, (
        f"{_name(node)}: of no use: no checkpoint, {len(node.children)} children"
    )
    if node.first is not None and tree.window is not None:
        needed = max(0, node.stop - tree.window + 1) // tree.page
        assert node.first <= needed, f"{_name(node)}: a window from page {node.first}, expected {needed}"


def _check_windows(tree: PrefixTree, node: Node) -> None:
    if SLIDING not in tree._pools:
        return
    users: Counter[int] = Counter()
    for below in [node, *_nodes(node)]:
        if below.first is not None:
            users.update(k for k in node.numbers(tree.page) if k >= below.first)
    found = {number: window.n_users for number, window in node.windows.items()}
    assert found == dict(users), f"{_name(node)}: users of sliding pages {found}, expected {dict(users)}"


def _check_holdings(tree: PrefixTree, nodes: list[Node]) -> None:
    held: dict[str, Counter[int]] = {GLOBAL: Counter(), SLIDING: Counter()}
    for node in nodes:
        held[GLOBAL].update(node.pages)
        held[SLIDING].update(window.page for window in node.windows.values())
    total = 0
    for kind, count in tree._holdings.count.items():
        assert count == dict(held[kind]), f"{kind}: pages counted {count}, held by nodes {dict(held[kind])}"
        total += len(count) * tree._page_bytes[kind]
        for page in count:
            assert tree._pools[kind].refs[page] >= 1, (
                f"{kind} page {page}: held by the tree, free in the pool"
            )
    assert tree.nbytes == total <= tree.max_bytes, (
        f"{tree.nbytes} bytes, expected {total} <= {tree.max_bytes}"
    )
