"""The demo's shape, and a forward pass made for training it on two cores.

The parameters are those of transformers' `Gemma4ForCausalLM`; only the order of work is ours: several
conversations share a row (segment ids keep them apart), and from the first KV-shared layer on only the
positions that carry loss are computed, since nobody reads the others. `python -m oracles.demo.model` checks
that both give the same logits.
"""

from __future__ import annotations

from oracles.needs import need

need("torch", "transformers")

import torch
import torch.nn.functional as F
from torch import nn

from . import vocab

LAYERS = (
    ["sliding_attention"] * 2
    + ["full_attention", "sliding_attention", "full_attention"]
    + ["sliding_attention"] * 2
    + ["full_attention"]
)
SHARED = 3
# The layer scalars are buffers of the checkpoint: away from one, all different, and not trained.
SCALARS = [0.875, 1.125, 0.9375, 0.8125, 1.1875, 0.90625, 1.09375, 0.84375]


def config():
    """The demo's `Gemma4TextConfig`."""
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        vocab_size=vocab.SIZE,
        vocab_size_per_layer_input=vocab.SIZE,
        hidden_size=160,
        intermediate_size=320,
        num_hidden_layers=len(LAYERS),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        global_head_dim=64,
        layer_types=list(LAYERS),
        num_kv_shared_layers=SHARED,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=32,
        sliding_window=32,
        final_logit_softcapping=30.0,
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=[vocab.ids()[t] for t in ("<eos>", "<turn|>", "<|tool_response>")],
        bos_token_id=2,
        tie_word_embeddings=True,
        attn_implementation="eager",
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1_000_000.0,
            },
        },
    )


def create(seed: int):
    """A freshly initialised `Gemma4ForCausalLM`."""
    from transformers import Gemma4ForCausalLM

    torch.manual_seed(seed)
    net = Gemma4ForCausalLM(config())
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "embed_tokens_per_layer" in name:
                p.normal_(0, net.config.hidden_size_per_layer_input**-0.5)
            elif "embed_tokens" in name:
                p.normal_(0, net.config.hidden_size**-0.5)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                p.fill_(
                    1.3 * p.numel() ** -0.25
                )  # scores of deviation about 1.7, since nothing divides by sqrt(h)
            elif p.ndim == 2:
                p.normal_(0, p.shape[1] ** -0.5)
            elif "post_" in name and "norm" in name:
                p.fill_(0.5)
        for layer, scalar in zip(net.model.layers, SCALARS):
            layer.layer_scalar.fill_(scalar)
    return net


class Rms(torch.autograd.Function):
    """x / sqrt(mean(x^2) + 1e-6) * weight in few passes over memory, which is what a CPU is short of here."""

    @staticmethod
    def forward(ctx, x, weight):
        r = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            .square_()
            .mul_(1 / x.shape[-1])
            .add_(1e-6)
            .rsqrt_()
        )
        unit = x * r
        ctx.save_for_backward(unit, r, weight)
        return unit if weight is None else unit * weight

    @staticmethod
    def backward(ctx, grad):
        unit, r, weight = ctx.saved_tensors
        n = unit.shape[-1]
        product = grad * unit
        if weight is None:
            grad_weight, along, grad_unit = None, product.sum(-1, keepdim=True), grad
        else:
            grad_weight = product.reshape(-1, n).sum(0)
            along, grad_unit = torch.mv(product.reshape(-1, n), weight).view(r.shape), grad * weight
        return torch.addcmul(grad_unit, unit, along.mul_(1 / n), value=-1).mul_(r), grad_weight


def rms(x, weight=None):
    """RMS norm over the last axis."""
    return Rms.apply(x, weight)


def rotate(x, cos, sin):
    """NeoX-halves rotation; x [B, T, H, h], cos and sin [B, T, 1, h/2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Trainer(nn.Module):
    """Packed, loss-positions-only forward over the parameters of an HF model."""

    def __init__(self, net):
        super().__init__()
        self.net, c = net, net.config
        self.kinds, self.window, self.width = c.layer_types, c.sliding_window, c.hidden_size_per_layer_input
        self.first_shared = len(self.kinds) - c.num_kv_shared_layers
        rope = net.model.rotary_emb
        self.freqs = {k: getattr(rope, f"{k}_inv_freq").float() for k in set(self.kinds)}

    def forward(self, ids, segs, pos, rows, cols):
        """Normed last rows [B, M, D] at (rows, cols), for ids, segs and pos [B, T]; rows [B, 1], cols [B,
        M].
        """
        m = self.net.model
        emb = m.embed_tokens.weight
        x = F.embedding(ids, emb) * emb.shape[1] ** 0.5
        B, T = ids.shape
        L = len(self.kinds)
        a = m.per_layer_model_projection(x) * emb.shape[1] ** -0.5
        a = rms(a.view(B, T, L, self.width), m.per_layer_projection_norm.weight)
        b = F.embedding(ids, m.embed_tokens_per_layer.weight).view(B, T, L, self.width) * self.width**0.5
        ple = (a + b) * 2**-0.5

        angle = {k: pos[..., None, None].float() * f for k, f in self.freqs.items()}
        cs = {k: (v.cos(), v.sin()) for k, v in angle.items()}
        gap = pos[:, :, None] - pos[:, None, :]
        near = (segs[:, :, None] == segs[:, None, :]) & (gap >= 0)
        masks = {"full_attention": near, "sliding_attention": near & (gap < self.window)}
        masks = {k: torch.where(v, 0.0, -1e9)[:, None] for k, v in masks.items()}
        kept = {}
        for i, (layer, kind) in enumerate(zip(m.layers, self.kinds)):
            if i == self.first_shared:
                x, ple = x[rows, cols], ple[rows, cols]
                cs = {k: (c[rows, cols], s[rows, cols]) for k, (c, s) in cs.items()}
                masks = {k: v[:, 0][rows, cols][:, None] for k, v in masks.items()}
            x = self.layer(layer, x, ple[:, :, i], cs[kind], masks[kind], kept, kind, i < self.first_shared)
        x = rms(x, m.norm.weight)
        return x

    def layer(self, layer, x, ple, cs, mask, kept, kind, own):
        att = layer.self_attn
        u = rms(x, layer.input_layernorm.weight)
        B, Q = x.shape[:2]
        h = att.head_dim
        q = rotate(rms(att.q_proj(u).view(B, Q, -1, h), att.q_norm.weight), *cs)
        if own:
            k = rotate(rms(att.k_proj(u).view(B, Q, -1, h), att.k_norm.weight), *cs)
            v = rms(att.v_proj(u).view(B, Q, -1, h))
            kept[kind] = (k.transpose(1, 2), v.transpose(1, 2))
        k, v = kept[kind]
        o = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask, scale=1.0, enable_gqa=True
        )
        o = o.transpose(1, 2).reshape(B, Q, -1)
        x = x + rms(att.o_proj(o), layer.post_attention_layernorm.weight)
        z = rms(x, layer.pre_feedforward_layernorm.weight)
        mlp = layer.mlp
        y = mlp.down_proj(F.gelu(mlp.gate_proj(z), approximate="tanh") * mlp.up_proj(z))
        x = x + rms(y, layer.post_feedforward_layernorm.weight)
        g = F.gelu(layer.per_layer_input_gate(x), approximate="tanh") * ple
        x = x + rms(layer.per_layer_projection(g), layer.post_per_layer_input_norm.weight)
        return x * layer.layer_scalar

    def head(self, f):
        """Soft-capped float32 logits of normed rows f [n, D]."""
        logits = F.linear(f, self.net.model.embed_tokens.weight)
        return 30.0 * torch.tanh(logits / 30.0)


def check(net) -> float:
    """Largest logit difference between `Trainer` and the HF forward on two packed random conversations."""
    g = torch.Generator().manual_seed(5)
    lens = (70, 41)
    convs = [torch.randint(3, vocab.SIZE, (n,), generator=g) for n in lens]
    ids = torch.cat(convs)[None]
    segs = torch.cat([torch.full((n,), i) for i, n in enumerate(lens)])[None]
    pos = torch.cat([torch.arange(n) for n in lens])[None]
    cols = torch.arange(0, sum(lens), 3)[None]
    t = Trainer(net)
    with torch.no_grad():
        mine = t.head(t(ids, segs, pos, torch.zeros(1, 1, dtype=torch.long), cols)[0])
        theirs = torch.cat([net(c[None]).logits[0] for c in convs])[cols[0]]
    return float((mine - theirs).abs().max())


if __name__ == "__main__":
    net = create(1)
    print(
        sum(p.numel() for p in net.parameters()),
        "parameters; max logit difference to transformers",
        check(net),
    )
