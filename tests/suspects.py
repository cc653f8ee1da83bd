"""Served models with faults that can be switched on: BERT and Llama written from scratch.

Nothing here is shared with the catalogue of the doctor: weights come from a state dict, the forward
pass, the padding and the pooling are this file's own. A suspect is a callable
(tokens, attention_mask) -> (rows, outputs).
"""

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional


@dataclass
class Served:
    """What all suspects share: number format, inputs, pooling."""

    weights: dict
    config: object
    dtype: torch.dtype = torch.float32
    pooling: str = "mean"
    normalize: bool = True
    faults: dict = field(default_factory=dict)

    def __post_init__(self):
        self.weights = {k: v.clone().float() for k, v in self.weights.items()}
        for edit in self.faults.get("edits", ()):
            edit(self.weights)
        self.weights = {k: v.to(self.dtype) for k, v in self.weights.items()}
        self.calls = 0

    def has(self, name, default=None):
        return self.faults.get(name, default)

    def __call__(self, tokens, attention_mask=None):
        self.calls += 1
        rows = [t[m == 1].tolist() for t, m in zip(tokens, attention_mask, strict=True)]
        change = self.has("rows")
        rows = [change(r) for r in rows] if change else rows
        if (limit := self.has("truncate")) is not None:
            rows = [r[:limit] for r in rows]
        longest = max(map(len, rows))
        multiple = self.has("pad_to", 1)
        longest = math.ceil(longest / multiple) * multiple
        ids = torch.zeros((len(rows), longest), dtype=torch.long)
        mask = torch.zeros((len(rows), longest), dtype=torch.bool)
        places = torch.arange(longest).repeat(len(rows), 1)
        filler = getattr(self.config, "pad_token_id", None) or 0
        ids[:] = filler
        for k, row in enumerate(rows):
            where = slice(longest - len(row), longest) if self.has("left") else slice(0, len(row))
            ids[k, where] = torch.tensor(row)
            mask[k, where] = True
        seen = torch.ones_like(mask) if self.has("no_mask") else mask
        equal = len(rows) > 1 and len({len(r) for r in rows}) == 1
        with torch.no_grad():
            states = self.forward(ids, seen, places + self.has("shift", 0), equal)
            out = self.pool(states, torch.ones_like(mask) if self.has("pool_padding") else mask)
        if self.has("noise"):
            out = out + self.has("noise") * out.norm(dim=-1, keepdim=True) * torch.randn_like(out)
        return (out * self.has("scale", 1.0)).float().numpy()

    def pool(self, states, mask):
        states = states if self.has("pool_low") else states.float()
        kind = self.has("pooling", self.pooling)
        if self.has("no_specials"):
            mask = mask.clone()
            for row in mask:
                where = torch.nonzero(row).ravel()
                if len(where) > 2:
                    row[where[0]] = False
                    row[where[-1]] = False
        w = mask[..., None].to(states.dtype)
        if kind == "mean":
            out = (states * w).sum(1) / w.sum(1)
        elif kind == "sqrt":
            out = (states * w).sum(1) / w.sum(1).sqrt()
        elif kind == "max":
            out = torch.where(mask[..., None], states, -torch.inf).max(1).values
        else:
            where = [torch.nonzero(m).ravel() for m in mask]
            at = [int(p[0] if kind == "cls" else p[-1]) + self.has("off", 0) for p in where]
            out = torch.stack([s[max(a, 0)] for s, a in zip(states, at, strict=True)])
        if self.normalize != self.has("flip_normalize", False):
            out = out / out.norm(dim=-1, keepdim=True)
        return out

    def attend(self, q, k, v, seen, causal, layer):
        """(rows, heads, length, width) each; keys may have fewer heads."""
        only = self.has("only")
        faults = self.faults if only is None or only == layer else {}
        if faults.get("swap_qk"):
            q, k = (k.repeat_interleave(q.shape[1] // k.shape[1], 1), q) if q.shape[1] != k.shape[1] else (k, q)  # fmt: skip
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            index = [h % k.shape[1] if faults.get("tiled") else h // groups for h in range(q.shape[1])]  # fmt: skip
            k = k[:, index] if k.shape[1] != q.shape[1] else k
            v = v[:, index]
        elif v.shape[1] != q.shape[1]:
            v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
        s = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
        s = s * faults.get("temperature", 1.0)
        if (cap := faults.get("cap")) is not None:
            s = cap * torch.tanh(s / cap)
        n = s.shape[-1]
        i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
        ok = seen[:, None, None, :].expand(-1, 1, n, n)
        if faults.get("blind"):  # to the first token, where there is another
            ok = ok & ((j > 0) | (i == 0))
        if faults.get("late_values"):
            v = torch.cat([v[:, :, :1], v[:, :, :-1]], 2)
        if causal:
            ok = ok & (j <= i)
        if (window := faults.get("window")) is not None:
            ok = ok & ((i - j).abs() < window)
        s = s.masked_fill(~ok, torch.finfo(s.dtype).min)
        if faults.get("softmax1"):
            top = s.amax(-1, keepdim=True).clamp(min=0)
            e = torch.exp(s - top)
            p = e / (e.sum(-1, keepdim=True) + torch.exp(-top))
        elif faults.get("softmax2"):
            p = torch.pow(2.0, s - s.amax(-1, keepdim=True))
            p = p / p.sum(-1, keepdim=True)
        else:
            p = torch.softmax(s.float(), -1).to(s.dtype)
        out = torch.einsum("bhij,bhjd->bhid", p, v)
        if (head := faults.get("mute")) is not None:
            out[:, head] = 0
        return out.roll(1, 1) if faults.get("turned") else out


ACTIVATIONS = {
    "gelu": functional.gelu,
    "tanh_gelu": lambda x: (
        0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": functional.relu,
    "silu": functional.silu,
    "elu": functional.elu,
    "relu2": lambda x: functional.relu(x) ** 2,
}


class ServedBert(Served):
    """BERT, post-norm, learned positions."""

    def norm(self, x, name, layer=None):
        w, b = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        eps = self.has("eps", self.config.layer_norm_eps)
        x = x.float()
        rms = self.has("rms") in (True, layer) and self.has("rms") is not None
        centred = x if rms else x - x.mean(-1, keepdim=True)
        n = x.shape[-1] - (1 if self.has("unbiased") else 0)
        var = centred.pow(2).sum(-1, keepdim=True) / n
        if self.has("eps_outside"):
            y = centred / (var.sqrt() + 1e-3)
        elif layer is not None and self.has("absolute") == layer:
            y = centred / centred.abs().mean(-1, keepdim=True)
        else:
            y = centred / (var + eps).sqrt()
        return (y * (w.float() + self.has("gain", 0.0)) + b.float()).to(self.dtype)

    def linear(self, x, name):
        if self.has("dynamic"):
            return multiply_bytes(x, self.weights[f"{name}.weight"]) + self.weights[f"{name}.bias"]
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def forward(self, ids, seen, places, equal):
        W = self.weights
        x = W["embeddings.word_embeddings.weight"][ids] * self.has("embed_scale", 1.0)
        if not self.has("no_positions"):
            top = W["embeddings.position_embeddings.weight"].shape[0] - 1
            x = x + W["embeddings.position_embeddings.weight"][places.clamp(0, top)]
        if not self.has("no_types"):
            x = x + W["embeddings.token_type_embeddings.weight"][self.has("type", 0)]
        if not self.has("no_embed_norm"):
            x = self.norm(x, "embeddings.LayerNorm")
        order = self.has("order", range(self.config.num_hidden_layers))
        for layer in order:
            x = self.block(x, layer, seen)
        return x

    def block(self, x, layer, seen):
        p = f"encoder.layer.{layer}"
        h, d = self.config.num_attention_heads, self.config.hidden_size

        def split(t):
            if self.has("interleaved"):
                return t.view(*t.shape[:2], d // h, h).permute(0, 3, 1, 2)
            return t.view(*t.shape[:2], h, d // h).transpose(1, 2)

        q, k, v = (split(self.linear(x, f"{p}.attention.self.{n}")) for n in ("query", "key", "value"))  # fmt: skip
        if self.has("causal"):
            seen_all, causal = seen, True
        else:
            seen_all, causal = seen, False
        a = self.attend(q, k, v, seen_all, causal, layer)
        a = a.transpose(1, 2).reshape(x.shape)
        a = self.linear(a, f"{p}.attention.output.dense")
        if self.has("no_attention") == layer and self.has("no_attention") is not None:
            a = a * 0 + self.weights[f"{p}.attention.output.dense.bias"] * 0
        x = self.norm(a if self.has("no_skip") == "attention" else x + a, f"{p}.attention.output.LayerNorm", layer)  # fmt: skip
        name = self.has("activation", "gelu")
        if isinstance(name, dict):
            name = name.get(layer, "gelu")
        f = ACTIVATIONS[name](self.linear(x, f"{p}.intermediate.dense"))
        if (kept := self.has("narrow", {}).get(layer)) is not None:
            f[..., kept:] = 0
        if self.has("clip", {}).get(layer):
            f = f.clamp(max=self.has("clip")[layer])
        f = self.linear(f, f"{p}.output.dense")
        if self.has("no_network") == layer and self.has("no_network") is not None:
            f = f * 0
        if self.has("scale_layer", {}).get(layer):
            f = f * self.has("scale_layer")[layer]
        y = f if self.has("no_skip") == "network" else x + f
        return self.norm(y, f"{p}.output.LayerNorm", layer)


class ServedLlama(Served):
    """Llama: RMS norms in front, rotary positions, shared keys, gated network."""

    def norm(self, x, name, layer=None):
        x = x.float()
        if self.has("center") in (True, layer) and self.has("center") is not None:
            x = x - x.mean(-1, keepdim=True)
        eps = self.has("eps", self.config.rms_norm_eps)
        root = (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
        y = x * root if layer is not None and self.has("times_root") == layer else x / root
        return ((self.weights[f"{name}.weight"].float() + self.has("gain", 0.0)) * y).to(self.dtype)

    def linear(self, x, name):
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def rotate(self, x, places):
        """x (rows, heads, length, width)."""
        width = x.shape[-1]
        turned = round(width * self.has("share", 1.0))
        base = self.has("base", self.config.rope_parameters["rope_theta"])
        angle = places[:, None, :, None].float() / self.has("divisor", 1.0)
        freq = base ** (-torch.arange(0, turned, 2).float() / max(turned, 1))
        angle = angle * freq * (-1 if self.has("other_way") else 1)
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        part, rest = x[..., :turned], x[..., turned:]
        if self.has("neighbours"):
            a, b = part[..., 0::2], part[..., 1::2]
            out = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        else:
            a, b = part[..., : turned // 2], part[..., turned // 2 :]
            out = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        return torch.cat([out, rest], -1)

    def forward(self, ids, seen, places, equal):
        x = self.weights["embed_tokens.weight"][ids] * self.has("embed_scale", 1.0)
        for layer in self.has("order", range(self.config.num_hidden_layers)):
            x = self.block(x, layer, seen, places, equal)
        return x if self.has("no_final") else self.norm(x, "norm")

    def block(self, x, layer, seen, places, equal):
        p = f"layers.{layer}"
        c = self.config
        width = c.head_dim
        y = self.norm(x, f"{p}.input_layernorm", layer)
        q, k, v = (
            self.linear(y, f"{p}.self_attn.{n}_proj").view(*y.shape[:2], -1, width).transpose(1, 2)
            for n in "qkv"
        )
        q, k = self.rotate(q, places), self.rotate(k, places)
        causal = not self.has("bidirectional") and not (equal and self.has("equal_batches"))
        a = self.attend(q, k, v, seen, causal, layer).transpose(1, 2).reshape(*y.shape[:2], -1)
        a = self.linear(a, f"{p}.self_attn.o_proj")
        x = (
            x
            if self.has("no_attention") == layer and self.has("no_attention") is not None
            else x + a
        )
        y = self.norm(x, f"{p}.post_attention_layernorm", layer)
        act = self.has("activation", "silu")
        act = act.get(layer, "silu") if isinstance(act, dict) else act
        g, u = self.linear(y, f"{p}.mlp.gate_proj"), self.linear(y, f"{p}.mlp.up_proj")
        if self.has("swap_gate"):
            g, u = u, g
        f = ACTIVATIONS[act](g) * u
        if layer is not None and self.has("no_gate") == layer:
            f = u
        if self.has("clip", {}).get(layer):
            f = f.clamp(-self.has("clip")[layer], self.has("clip")[layer])
        f = self.linear(f, f"{p}.mlp.down_proj")
        if self.has("scale_layer", {}).get(layer):
            f = f * self.has("scale_layer")[layer]
        return (
            x if self.has("no_network") == layer and self.has("no_network") is not None else x + f
        )


def serve_bert(model, *, dtype=torch.float32, pooling="mean", normalize=True, **faults):
    return ServedBert(model.state_dict(), model.config, dtype, pooling, normalize, faults)


def serve_llama(model, *, dtype=torch.float32, pooling="last", normalize=False, **faults):
    return ServedLlama(model.state_dict(), model.config, dtype, pooling, normalize, faults)


def small_bert(seed=0, **more):
    import transformers

    torch.manual_seed(seed)
    known = {
        "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 64, "max_position_embeddings": 96, "initializer_range": 0.25,
        "layer_norm_eps": 1e-12, "attn_implementation": "eager", **more,
    }  # fmt: skip
    model = transformers.BertModel(transformers.BertConfig(**known), add_pooling_layer=False)
    return randomize(model, seed)


def small_llama(seed=0, **more):
    import transformers

    torch.manual_seed(seed)
    known = {
        "vocab_size": 200, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 256,
        "initializer_range": 0.1, "rms_norm_eps": 1e-6, "head_dim": 16, "pad_token_id": 0, **more,
    }  # fmt: skip
    return randomize(transformers.LlamaModel(transformers.LlamaConfig(**known)), seed)


def randomize(model, seed):
    """Norms and biases that are not all ones and zeros, as after training."""
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            parameter.data = 0.2 * noise
        elif "norm" in name.lower():
            parameter.data = 1 + 0.2 * noise
    return model.eval()


def quantise(kind, keep=lambda name: False):
    """An edit that rounds matrices: "int8" per tensor, "int8 rows", "int4 groups"."""

    def edit(weights):
        for name, w in weights.items():
            if w.ndim != 2 or keep(name):
                continue
            if kind == "int8":
                unit = float(w.abs().max()) / 127
                weights[name] = torch.clamp(torch.round(w / unit), -128, 127) * unit
            elif kind == "int8 rows":
                unit = w.abs().max(1).values[:, None].clamp(min=1e-12) / 127
                weights[name] = torch.clamp(torch.round(w / unit), -128, 127) * unit
            elif kind == "int4 groups":
                g = w.reshape(w.shape[0], w.shape[1] // 32, 32)
                unit = g.abs().max(2).values[..., None].clamp(min=1e-12) / 7
                weights[name] = (torch.clamp(torch.round(g / unit), -8, 7) * unit).reshape(w.shape)
            elif kind == "fp8":
                unit = float(w.abs().max()) / 448
                weights[name] = (w / unit).to(torch.float8_e4m3fn).float() * unit

    return edit


def multiply_bytes(x, w):
    """A product in whole numbers: w as int8, x as uint8 with one scale for the whole request."""
    unit = float(w.abs().max()) / 127
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    step = (high - low) / 255
    zero = round(-low / step)
    whole = (torch.round(x / step) + zero).clamp(0, 255).long() - zero
    return (whole @ torch.round(w / unit).long().T).float() * (step * unit)


def tables_of_bytes(weights):
    """An edit that rounds embedding tables to uint8."""
    for name, w in weights.items():
        if name.startswith("embeddings.") and w.ndim == 2:
            low, high = min(float(w.min()), 0.0), max(float(w.max()), 0.0)
            step = (high - low) / 255
            zero = round(-low / step)
            weights[name] = ((torch.round(w / step) + zero).clamp(0, 255) - zero) * step


def zero(*endings):
    """An edit that sets weights to zero by the end of their names."""

    def edit(weights):
        for name in weights:
            if name.endswith(endings):
                weights[name] = torch.zeros_like(weights[name])

    return edit


def add_low_rank(name, rank, size, seed=0):
    """An edit that adds a random update of a rank to a weight, of a size relative to it."""

    def edit(weights):
        rng = np.random.default_rng(seed)
        w = weights[name]
        u = torch.from_numpy(rng.standard_normal((w.shape[0], rank))).float()
        v = torch.from_numpy(rng.standard_normal((rank, w.shape[1]))).float()
        d = u @ v
        weights[name] = w + d * (size * w.norm() / d.norm())

    return edit
