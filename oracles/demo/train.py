"""Train the demo on two CPU cores: `python -m oracles.demo.train --out DIR --minutes 79`.

Seeded and resumable: DIR/state.pt is rewritten every few minutes and picked up again. Hidden matrices learn
by Muon (orthogonalised momentum), the rest by AdamW; what is saved for use is a running mean of the
weights. The loss covers answers only. Each step sees one batch of short rows (mostly sums) and one of long
rows (everything else), each in a process of its own: two processes that meet once a step lose less than two
threads that meet at every operation, above all on a busy machine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import time

from oracles.needs import need

need("torch", "transformers")

import torch
import torch.distributed as dist
import torch.nn.functional as F

from . import data, model, pack, vocab

SHORT, LONG = (36, 72, 22), (8, 288, 150)  # rows, tokens per row, predicted tokens per row
SMOOTH = 0.99
PATIENCE = 8  # conversations that find no room before a batch is closed


class Muon(torch.optim.Optimizer):
    """SGD momentum whose update is brought near an orthogonal matrix; matrices of one shape go through
    together.
    """

    def __init__(self, params, lr, momentum=0.95, decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, decay=decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes: dict[tuple, list] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                buf = state.setdefault("momentum", torch.zeros_like(p))
                buf.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buf, group["momentum"])
                flip = update.shape[0] > update.shape[1]
                shapes.setdefault((min(p.shape), max(p.shape)), []).append(
                    (p, update.T if flip else update, flip)
                )
            for (_, large), items in shapes.items():
                x = torch.stack([u for _, u, _ in items])
                x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
                for a, b, c in (
                    (4.0848, -6.8946, 2.9270),
                    (3.9505, -6.3029, 2.6377),
                    (3.7418, -5.5913, 2.3037),
                    (2.8769, -3.1427, 1.2046),
                    (2.8366, -3.0525, 1.2012),
                ):
                    gram = x @ x.mT
                    x = a * x + (b * gram + c * gram @ gram) @ x
                for (p, _, flip), u in zip(items, x):
                    p.mul_(1 - group["lr"] * group["decay"])
                    p.add_(u.T if flip else u, alpha=-group["lr"] * 0.2 * large**0.5)


def optimizers(net, lr: float, decay: float):
    """Muon for the layers' matrices, AdamW for embeddings and vectors."""
    matrices = [p for n, p in net.named_parameters() if p.ndim == 2 and "embed" not in n]
    tables = [p for n, p in net.named_parameters() if p.ndim == 2 and "embed" in n]
    vectors = [p for p in net.parameters() if p.ndim < 2]
    adam = torch.optim.AdamW(
        [{"params": tables, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
        lr=lr,
        betas=(0.9, 0.98),
        fused=True,
    )
    return [Muon(matrices, lr=lr, decay=decay), adam]


class Feed:
    """Endless packed batches of both shapes; each process draws all and uses one."""

    def __init__(self, seed, mixture):
        self.examples = data.stream(seed, mixture)
        self.packers = [pack.Packer(*SHORT), pack.Packer(*LONG)]
        self.ready: list[list] = [[], []]
        self.late: list[list] = [[], []]
        self.dropped = 0

    def next(self):
        while not (self.ready[0] and self.ready[1]):
            for ids, weights in pack.encode([next(self.examples) for _ in range(256)]):
                slots = sum(w > 0 for w in weights)
                which = 0 if len(ids) <= SHORT[1] and slots <= SHORT[2] else 1
                if len(ids) > LONG[1] or slots > LONG[2] or len(self.ready[which]) > 3:
                    self.dropped += 1
                    continue
                if not self.packers[which].add(ids, weights):
                    self.late[which].append((ids, weights))
                    if len(self.late[which]) >= PATIENCE:
                        self.ready[which].append(self.packers[which].batch())
                        self.late[which] = [
                            late for late in self.late[which] if not self.packers[which].add(*late)
                        ]
        return [[torch.from_numpy(a) for a in queue.pop(0)] for queue in self.ready]


def run_batch(trainer, batch):
    """Losses and weights of the tokens that count."""
    ids, segs, pos, cols, targets, weights = batch
    keep = weights > 0
    hidden = trainer(ids, segs, pos, torch.arange(ids.shape[0])[:, None], cols)
    return F.cross_entropy(trainer.head(hidden[keep]), targets[keep], reduction="none"), weights[keep]


def held_out_rows(seed: int, count: int):
    """A fixed held-out set: (skill, batch of one conversation) padded into one batch per length class."""
    examples = []
    per: dict[str, int] = {}
    for ex in data.stream(
        seed,
        {
            **data.MIXTURE,
            "arithmetic": 0.2,
            "tool": 0.1,
            "extract": 0.1,
            "long_sum": 0.05,
            "think_other": 0.1,
        },
        held=True,
    ):
        if per.get(ex.skill, 0) < count:
            per[ex.skill] = per.get(ex.skill, 0) + 1
            examples.append(ex)
        if len(examples) > 4000 or sum(v >= count for v in per.values()) >= 10:
            break
    return examples


@torch.no_grad()
def evaluate(trainer, examples, chunk=64, wrong=None) -> dict[str, tuple[int, int]]:
    """Exact matches per skill by teacher forcing, which for a wholly right answer is greedy decoding.

    `wrong`, a dict, collects (prompt, expected, greedy) of what went wrong.
    """
    order = sorted(zip(examples, pack.encode(examples)), key=lambda t: len(t[1][0]))
    score: dict[str, list[int]] = {}
    for i in range(0, len(order), chunk):
        part = order[i : i + chunk]
        packer = pack.Packer(
            len(part), max(len(e[1][0]) for e in part), max(sum(w > 0 for w in e[1][1]) for e in part)
        )
        for r, (_, (ids, weights)) in enumerate(part):
            packer.items[r].append((ids, weights))
        ids, segs, pos, cols, targets, weights = (torch.from_numpy(a) for a in packer.batch())
        hidden = trainer(ids, segs, pos, torch.arange(len(part))[:, None], cols)
        greedy = trainer.head(hidden).argmax(-1)
        right = (greedy == targets) | (weights == 0)
        for r, ((ex, _), ok) in enumerate(zip(part, right.all(1).tolist())):
            if not ok and wrong is not None:
                shown = [
                    vocab.tokenizer().decode(t[r][weights[r] > 0].tolist(), skip_special_tokens=False)
                    for t in (targets, greedy)
                ]
                wrong.setdefault(ex.skill, []).append(("".join(p for p, w in ex.pieces[:-1]), *shown))
            s = score.setdefault(ex.skill, [0, 0])
            s[0] += ok
            s[1] += 1
    return {k: tuple(v) for k, v in sorted(score.items())}


def keep_memory():
    """Ask glibc to keep freed blocks: the same large buffers come back every step, and fresh pages cost as
    much as the arithmetic.
    """
    if hasattr(ctypes, "CDLL") and os.uname().sysname == "Linux":
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 30), libc.mallopt(-1, (1 << 31) - 1)


def learning_rate(step: int, share: float) -> float:
    """Warm-up, a plateau, then a straight line down to three percent; `share` is the part of the time that
    is spent.
    """
    return min(1.0, (step + 1) / 100) * (
        1.0 if share < 0.4 else max(0.0, 1 - (share - 0.4) / 0.6) * 0.97 + 0.03
    )


def average(net, loss_sum, weight_sum):
    """Sum gradients and totals over both processes and divide by the weight; returns the mean loss."""
    flat = torch.cat([p.grad.flatten() for p in net.parameters()] + [torch.stack((loss_sum, weight_sum))])
    dist.all_reduce(flat)
    flat[:-1] /= flat[-1].clone()
    offset = 0
    for p in net.parameters():
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()
    return flat[-2].item()


def work(rank: int, args, port: int):
    """One of the two processes: rank 0 takes short rows, saves and reports; rank 1 takes long rows."""
    keep_memory()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    path = os.path.join(args.out, "state.pt")
    net = model.create(args.seed)
    trainer = model.Trainer(net)
    opts = optimizers(net, args.lr, args.decay)
    step, spent = 0, 0.0
    if os.path.exists(path):
        state = torch.load(path)
        net.load_state_dict(state.get("raw", state["net"]))
        for o, s in zip(opts, state["opts"]):
            o.load_state_dict(s)
        step, spent = state["step"], state["spent"]
    smooth = {n: p.detach().clone() for n, p in net.named_parameters()}  # the running mean that is shipped
    if step:
        smooth = {n: state["net"][n].clone() for n in smooth}
    feed = Feed(args.seed * 100_003 + step, {**data.MIXTURE, **json.loads(args.mixture)})
    held = held_out_rows(7, 60)
    if rank == 0:
        print(
            f"{sum(p.numel() for p in net.parameters())} parameters, {len(held)} held-out examples, "
            f"from step {step}, {vars(args)}",
            flush=True,
        )

    def report():
        raw = {k: v.clone() for k, v in net.state_dict().items()}
        net.load_state_dict(
            {k: smooth.get(k, v) for k, v in raw.items() if k != "lm_head.weight"}, strict=False
        )
        scores = evaluate(trainer, held[rank::2])
        both = [None, None]
        dist.all_gather_object(both, scores)
        parts = [
            f"{k}={sum(b.get(k, (0, 0))[0] for b in both)}/{sum(b.get(k, (0, 0))[1] for b in both)}"
            for k in sorted({**both[0], **both[1]})
        ]
        if rank == 0:
            print(f"eval {step} min {spent / 60:.1f} " + " ".join(parts), flush=True)
            torch.save(
                {
                    "net": net.state_dict(),
                    "raw": raw,
                    "opts": [o.state_dict() for o in opts],
                    "step": step,
                    "spent": spent,
                },
                path + ".tmp",
            )
            os.replace(path + ".tmp", path)
        net.load_state_dict(raw)

    total, last, reported = args.minutes * 60, time.monotonic(), spent
    mean, mark = [], spent
    while spent < total and step < args.steps:
        rate = args.lr * learning_rate(step, spent / total)
        for group in (g for o in opts for g in o.param_groups):
            group["lr"] = rate
        losses, weights = run_batch(trainer, feed.next()[rank])
        loss = (losses * weights).sum()
        loss.backward()
        mean.append(average(net, loss.detach(), weights.sum()))
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for o in opts:
            o.step()
            o.zero_grad(set_to_none=True)
        for n, p in net.named_parameters():
            smooth[n].lerp_(p.detach(), 1 - SMOOTH)
        step += 1
        clock = torch.tensor([time.monotonic() - last if rank == 0 else 0.0], dtype=torch.float64)
        dist.broadcast(clock, 0)  # both must agree on the time, and so on the rate and the end
        spent, last = spent + clock.item(), time.monotonic()
        if rank == 0 and step % 50 == 0:
            tokens = len(mean) * (SHORT[0] * SHORT[1] + LONG[0] * LONG[1])
            print(
                f"step {step} min {spent / 60:.1f} loss {sum(mean) / len(mean):.4f} lr {rate:.2e} "
                f"tok/s {tokens / (spent - mark):.0f}",
                flush=True,
            )
        if step % 50 == 0:
            mean, mark = [], spent
        if spent - reported > 240:
            report()
            reported = spent
    report()


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--out", required=True)
    ap.add_argument(
        "--minutes",
        type=float,
        default=79,
        help="training time over all resumed parts; the learning rate falls to its end over them",
    )
    ap.add_argument("--seed", type=int, default=4)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--decay", type=float, default=0.1)
    ap.add_argument("--mixture", default="{}", help="JSON with shares that differ from data.MIXTURE")
    ap.add_argument("--steps", type=int, default=10**9)
    args = ap.parse_args()
    os.makedirs(args.out, exist_ok=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(work, (args, port), nprocs=2)


if __name__ == "__main__":
    main()
