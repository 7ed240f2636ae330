"""The zoo's models in plain torch, written as users do: one class for each model, whose inputs() are its example. The
attribute `shapes` has dynamic_shapes; without it all sizes are fixed.
"""

import dataclasses
import math

import torch
import torch.utils.checkpoint
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch.nn import functional as F
from torch.nn.utils import parametrizations

BATCH = torch.export.Dim("batch", min=2, max=8)


class Seq2Seq(nn.Module):
    """nn.Transformer with masks."""

    shapes = {"source": {0: BATCH}, "target": {0: BATCH}}

    def __init__(self):
        super().__init__()
        self.net = nn.Transformer(16, 2, 1, 1, 24, batch_first=True)

    def inputs(self):
        return {"source": torch.randn(2, 7, 16), "target": torch.randn(2, 5, 16)}

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.net(source, target, tgt_mask=mask, tgt_is_causal=True)


class CrossAttention(nn.Module):
    """nn.MultiheadAttention with all options, and its weights as a result."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(16, 2, kdim=8, vdim=12, add_bias_kv=True, add_zero_attn=True, batch_first=True)

    def inputs(self):
        return {"query": torch.randn(2, 5, 16), "key": torch.randn(2, 6, 8), "value": torch.randn(2, 6, 12),
                "padding": torch.arange(12).view(2, 6) % 5 == 4}

    def forward(self, query, key, value, padding):
        return self.attend(query, key, value, key_padding_mask=padding)


class Recurrent(nn.Module):
    """Both directions, projections, cells in a Python loop."""

    def __init__(self):
        super().__init__()
        self.lstm, self.rnn = nn.LSTM(6, 8, 2, bidirectional=True, proj_size=4), nn.RNN(8, 5, nonlinearity="relu")
        self.cell, self.last = nn.LSTMCell(5, 6), nn.GRUCell(6, 6)

    def inputs(self):
        return {"x": torch.randn(5, 3, 6)}

    def forward(self, x):
        y, (hidden, cell) = self.lstm(x)
        y, _ = self.rnn(y)
        state = y.new_zeros(y.shape[1], 6), y.new_zeros(y.shape[1], 6)
        for row in y:
            state = self.cell(row, state)
        return self.last(*state), hidden, cell


class Volumes(nn.Module):
    """Convolutions and transposed ones of one and three dimensions, with every padding, and norms with statistics."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Conv1d(3, 8, 5, padding="same", dilation=2, padding_mode="circular")
        self.wider = nn.ConvTranspose1d(8, 4, 4, 2, 1, output_padding=1, groups=2)
        self.volume, self.back = nn.Conv3d(1, 4, 3, padding=1, padding_mode="reflect"), nn.ConvTranspose3d(4, 2, 2, 2)
        self.norm = nn.InstanceNorm1d(8, affine=True, track_running_stats=True)
        self.norm3, self.groups, self.local = nn.InstanceNorm3d(4), nn.GroupNorm(2, 4), nn.LocalResponseNorm(3)
        self.batch, self.pool = nn.SyncBatchNorm(4), nn.AdaptiveAvgPool3d((1, 2, 2))

    def inputs(self):
        return {"x": torch.randn(2, 3, 16)}

    def forward(self, x):
        rows = self.wider(self.norm(self.rows(x)))
        volume = self.norm3(self.volume(rows.unsqueeze(1).unflatten(-1, (3, 11))))
        return self.local(self.groups(rows)), self.pool(self.back(volume)), F.normalize(rows)


class Images(nn.Module):
    """Image operators with indices, grids and scales."""

    def __init__(self):
        super().__init__()
        self.conv, self.act, self.pool = nn.Conv2d(3, 4, 3, 2, 1), nn.PReLU(4), nn.MaxPool2d(2, return_indices=True)
        self.unpool, self.shuffle, self.larger = nn.MaxUnpool2d(2), nn.PixelShuffle(2), nn.Upsample(scale_factor=2, mode="bicubic")

    def inputs(self):
        return {"x": torch.randn(2, 3, 16, 16)}

    def forward(self, x):
        y = self.act(self.conv(x))
        grid = F.affine_grid(torch.eye(2, 3).expand(x.shape[0], 2, 3) * 0.9, [x.shape[0], 4, 8, 8], align_corners=False)
        return (self.shuffle(self.unpool(*self.pool(y))), self.larger(y), F.grid_sample(y, grid, align_corners=False),
                F.unfold(y, 2), F.lp_pool2d(y, 2, 2))


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.sum, self.max = nn.EmbeddingBag(20, 6, mode="sum"), nn.EmbeddingBag(20, 6, mode="max")
        self.table, self.pair = nn.Embedding(20, 6, padding_idx=0, scale_grad_by_freq=True), nn.Bilinear(6, 6, 3)

    def inputs(self):
        return {"ids": torch.arange(9) * 7 % 20, "offsets": torch.tensor([0, 4, 7]), "weights": torch.rand(9)}

    def forward(self, ids, offsets, weights):
        return self.pair(self.sum(ids, offsets, per_sample_weights=weights), self.max(ids, offsets)), self.table(ids)


class Parametrized(nn.Module):
    shapes = {"x": {0: BATCH}}

    def __init__(self):
        super().__init__()
        self.scaled = parametrizations.weight_norm(nn.Linear(5, 6))
        self.rotated = parametrizations.orthogonal(nn.Linear(6, 6))
        self.conv = parametrizations.weight_norm(nn.Conv1d(1, 2, 3))

    def inputs(self):
        return {"x": torch.randn(3, 5)}

    def forward(self, x):
        return self.conv(self.rotated(self.scaled(x)).unsqueeze(1))


class Fourier(nn.Module):
    """A Fourier neural operator, rotary positions as complex numbers, and audio spectra."""

    shapes = {"x": {0: BATCH}, "sound": {0: BATCH}}

    def __init__(self):
        super().__init__()
        self.modes, self.query = nn.Parameter(torch.randn(2, 4, 5, 2)), nn.Linear(4, 4)
        self.register_buffer("turns", torch.polar(torch.ones(12, 2), torch.rand(12, 2)), persistent=False)
        self.register_buffer("window", torch.hann_window(16))

    def inputs(self):
        return {"x": torch.randn(2, 2, 12), "sound": torch.randn(2, 64)}

    def forward(self, x, sound):
        spectrum = torch.fft.rfft(x, dim=-1, norm="ortho")[..., :5]
        y = torch.einsum("bik,iok->bok", spectrum, torch.view_as_complex(self.modes))
        y = self.query(torch.fft.irfft(y, n=x.shape[-1], dim=-1, norm="ortho").transpose(1, 2))
        turned = torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (2, 2))) * self.turns).flatten(2)
        spectrogram = torch.stft(sound, 16, 4, window=self.window, return_complex=True)
        return turned, spectrogram.abs() * self.modes.mean(), torch.istft(spectrogram, 16, 4, window=self.window)


class GraphAttention(nn.Module):
    """Messages along edges with softmax over incoming ones: scatter, gather and related operators."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.scale = nn.Linear(4, 8), nn.Linear(4, 8), nn.Parameter(torch.randn(1))

    def inputs(self):
        edges = torch.cat([torch.randint(0, 6, (2, 11)), torch.arange(6).repeat(2, 1)], 1)
        return {"x": torch.randn(6, 4), "edges": edges, "graph": torch.tensor([0, 0, 1, 1, 1, 0])}

    def forward(self, x, edges, graph):
        to, key = edges[1], self.key(x)[edges[0]]
        score = (self.query(x)[to] * key).sum(-1)
        most = torch.full((x.shape[0],), -math.inf).scatter_reduce(0, to, score, "amax")
        part = (score - most.gather(0, to)).exp()
        total = torch.zeros(x.shape[0]).scatter_add(0, to, part)
        nodes = torch.zeros(x.shape[0], 8).index_add(0, to, key * (part / total[to]).unsqueeze(-1))
        nodes[graph == 0] = nodes[graph == 0] * self.scale
        return torch.zeros(2, 8).index_reduce(0, graph, nodes, "mean", include_self=False), graph.bincount(minlength=2)


class Flow(nn.Module):
    """Branches, checkpointed parts, rows by vmap and map, a region with another dtype."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.each = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.block = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def inputs(self):
        return {"x": torch.randn(3, 4)}

    def forward(self, x):
        # Each branch uses both layers: Python's gradients of a branch not taken are 0; here there are none.
        x = torch.cond(x.sum() > -1000, lambda v: self.a(v).sin() + self.b(v), lambda v: self.b(v).cos() - self.a(v), (x,))
        x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        with torch.autocast("cpu", torch.bfloat16):
            y = self.block(x).float()
        outer = torch.vmap(lambda row: self.each(row).softmax(-1).outer(row))(x)
        return y, outer, map_rows(lambda row: self.each(row).sin(), x)


class Quantizer(nn.Module):
    """A code table that forward updates, with straight-through gradients; weights quantized as in int8."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(4, 6)
        for name, value in (("codes", torch.randn(5, 6)), ("counts", torch.zeros(5)), ("steps", torch.zeros((), dtype=torch.long)),
                            ("scale", torch.tensor(0.1)), ("zero", torch.tensor(0, dtype=torch.int32))):
            self.register_buffer(name, value)

    def inputs(self):
        return {"x": torch.randn(3, 4)}

    def forward(self, x):
        weight = torch.fake_quantize_per_tensor_affine(self.encode.weight, self.scale, self.zero, -128, 127)
        z = F.linear(x, weight, self.encode.bias)
        nearest = torch.cdist(z, self.codes).argmin(-1)
        code = self.codes[nearest]
        with torch.no_grad():
            chosen = F.one_hot(nearest, 5).float()
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.lerp_(chosen.t() @ z, 0.1)
            self.steps.add_(1)
        return z + (code - z).detach(), F.mse_loss(z, code.detach())


class InPlace(nn.Module):
    """Writes to views, masks, indices."""

    def __init__(self):
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 6), nn.Parameter(torch.randn(6))

    def inputs(self):
        return {"x": torch.randn(3, 4)}

    def forward(self, x):
        y = self.fc(x)
        y[:, 1] = y[:, 0] * 2
        y[..., 2:4] += 1
        y.index_put_((torch.tensor([0, 1]), torch.tensor([1, 2])), torch.tensor([1.0, 2.0]), accumulate=True)
        z = torch.empty_like(y).copy_(y)
        z[x[:, 0] > 0] = 0.0
        z.add_(self.scale).mul_(2)
        return z, y.view(-1)[::2], y.t().contiguous().flip(0)


class Lengths(nn.Module):
    """Sizes that depend on data, and arithmetic on sizes known at run time."""

    shapes = {"x": {0: BATCH, 1: torch.export.Dim("length", min=2, max=40)}, "rows": None, "mask": None}

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def inputs(self):
        return {"x": torch.randn(2, 7, 6), "rows": torch.randn(5, 6),
                "mask": torch.tensor([True, False, True, True, False])}

    def forward(self, x, rows, mask):
        length = x.shape[1]
        y = F.pad(x, (0, 0, 0, (8 - length % 8) % 8))
        y = y.unflatten(1, (y.shape[1] // 4, 4)).mean(2) * length**-0.5
        y = self.fc(y) + torch.arange(y.shape[1] - 1, -1, -1).unsqueeze(-1) / max(length, 3)
        count = mask.sum().item()
        torch._check(count >= 0)
        torch._check(count <= 5)
        chosen = torch.zeros(5, 6).index_put((mask.nonzero().squeeze(1),), self.fc(rows[mask])) / (count + 1)
        return F.interpolate(y.transpose(1, 2), scale_factor=1.5), chosen, torch.zeros(count).sum()


class Losses(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 5)

    def inputs(self):
        return {"x": torch.randn(4, 6), "labels": torch.tensor([0, 1, 2, 4])}

    def forward(self, x, labels):
        z = self.fc(x)
        log = F.log_softmax(z, -1)
        return {"loss": F.cross_entropy(z, labels, label_smoothing=0.1, ignore_index=3, weight=torch.ones(5)) +
                F.huber_loss(z, z.detach() * 2) + F.triplet_margin_loss(z, z.roll(1, 0), z.flip(0)) +
                F.cosine_embedding_loss(z, z.roll(1, 0), torch.ones(4)) + F.multi_margin_loss(z, labels) +
                F.kl_div(log, log.detach().roll(1, 0), log_target=True) + F.poisson_nll_loss(z, x[:, :5].abs()) +
                F.binary_cross_entropy_with_logits(z, F.one_hot(labels, 5).float())}


class Algebra(nn.Module):
    shapes = {"x": {0: BATCH}}

    def __init__(self):
        super().__init__()
        self.weight, self.experts = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(3, 4, 4))

    def inputs(self):
        return {"x": torch.randn(3, 4)}

    def forward(self, x):
        a = self.weight @ self.weight.t() + 4 * torch.eye(4)
        share, chosen = (x @ self.weight[:, :3]).softmax(-1).topk(2)
        y = torch.einsum("bd,edf->bef", x, self.experts).gather(1, chosen.unsqueeze(-1).expand(-1, -1, 4))
        return (torch.linalg.solve(a, x.t()).t() @ torch.linalg.cholesky(a), torch.linalg.eigvalsh(a), torch.logdet(a),
                torch.matrix_exp(self.weight - self.weight.t()), torch.linalg.svdvals(self.weight), torch.linalg.inv(a),
                (y * share.unsqueeze(-1)).sum(1), torch.sparse.mm(torch.eye(4).to_sparse(), a), x.cumsum(0))


class Norms(nn.Module):
    """The older weight and spectral norms, whose buffers forward changes in training."""

    def __init__(self):
        super().__init__()
        self.normed, self.spectral = nn.utils.weight_norm(nn.Linear(5, 6)), nn.utils.spectral_norm(nn.Linear(6, 6))
        self.iterated = parametrizations.spectral_norm(nn.Linear(6, 4), n_power_iterations=2)
        self.last = nn.Sequential(nn.RMSNorm(4), nn.GLU(), nn.Mish(), nn.Hardswish(), nn.PReLU(), nn.Softplus(), nn.CELU())

    def inputs(self):
        return {"x": torch.randn(3, 5)}

    def forward(self, x):
        return self.last(self.iterated(self.spectral(self.normed(x))))


class Nested(nn.Module):
    """Nested dictionaries of modules, one module under two names and called in a loop, a buffer that each call changes,
    numbers as inputs."""

    shapes = {"x": {0: BATCH}, "mask": {0: BATCH}}

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleDict({key: nn.ModuleDict({"into": nn.Linear(4, 4)}) for key in "ab"})
        self.shared = self.experts["a"]["into"]
        self.register_buffer("seen", torch.zeros(3))
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4) * i) for i in range(1, 4)])

    def inputs(self):
        return {"x": torch.randn(3, 4), "mask": torch.tensor([[True, False, True, True]] * 3)}

    def forward(self, x, mask):
        for i, scale in enumerate(self.scales):
            x = self.experts["b"]["into"](self.shared(x) * scale).masked_fill(~mask, 0.5).tanh()
            self.seen[i] += x.detach().abs().mean()
        return {"x": x, "any": mask.any(-1), "picked": torch.where(mask & (x > 0), x, -x)}


class Complex(nn.Module):
    """Complex parameters."""

    shapes = {"x": {0: BATCH}}

    def __init__(self):
        super().__init__()
        self.weight, self.phase = nn.Parameter(torch.randn(4, 4, dtype=torch.cfloat)), nn.Parameter(torch.randn(4))

    def inputs(self):
        return {"x": torch.randn(3, 4)}

    def forward(self, x):
        z = (x + 0j) @ self.weight * torch.polar(torch.ones(4), self.phase)
        z = z / (1 + z.abs()) + z.conj() * 0.1
        return z.real, z.imag.cos(), z.angle() * 0.01, torch.fft.fft2(z).abs()


class Rays(nn.Module):
    """Volume rendering: encodings, cumulative products, samples drawn in training."""

    def __init__(self):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(18, 16), nn.ReLU(), nn.Linear(16, 4))

    def inputs(self):
        return {"origins": torch.randn(5, 3), "directions": F.normalize(torch.randn(5, 3), dim=-1)}

    def forward(self, origins, directions):
        depth = torch.linspace(0.5, 2.0, 6).expand(5, 6)
        points = origins[:, None] + directions[:, None] * depth[..., None]
        encoded = torch.cat([torch.sin(points * 2**i) if j == 0 else torch.cos(points * 2**i) for i in range(3) for j in range(2)], -1)
        color, density = self.field(encoded).split([3, 1], -1)
        alpha = 1 - torch.exp(-F.softplus(density[..., 0]) * 0.3)
        through = torch.cumprod(torch.cat([torch.ones(5, 1), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return (color.sigmoid() * (alpha * through)[..., None]).sum(1), (alpha * through * depth).sum(1)


class Ode(nn.Module):
    """Runge-Kutta steps through one network, with time as input."""

    shapes = {"x": {0: BATCH}}

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def inputs(self):
        return {"x": torch.randn(3, 3)}

    def forward(self, x):
        def f(t, y):
            return self.net(torch.cat([y, y.new_full((y.shape[0], 1), t)], -1))

        for i in range(3):
            t, h = i / 3, 1 / 3
            a = f(t, x)
            b = f(t + h / 2, x + h / 2 * a)
            c = f(t + h / 2, x + h / 2 * b)
            x = x + h / 6 * (a + 2 * b + 2 * c + f(t + h, x + h * c))
        return x


class Hyper(nn.Module):
    """Weights generated by a network for each example: grouped convolution, batched products."""

    def __init__(self):
        super().__init__()
        self.weights, self.embed, self.rows = nn.Linear(4, 2 * 3 * 9), nn.Embedding(5, 4), nn.Bilinear(4, 4, 6)

    def inputs(self):
        return {"x": torch.randn(2, 3, 8, 8), "task": torch.tensor([1, 4])}

    def forward(self, x, task):
        e = self.embed(task)
        w = self.weights(e).view(4, 3, 3, 3)
        y = F.conv2d(x.reshape(1, 6, 8, 8), w, groups=2, padding=1).view(2, 2, 8, 8)
        return y, torch.einsum("nchw,nc->nhw", y, self.rows(e, e)[:, :2]), F.fold(F.unfold(y, 3, padding=1), (8, 8), 3, padding=1)


class FlowOfDensity(nn.Module):
    """A normalizing flow, and splines by bins."""

    shapes = {"x": {0: BATCH}}

    def __init__(self):
        super().__init__()
        self.nets = nn.ModuleList([nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(3)])
        self.heights = nn.Parameter(torch.rand(6))
        self.register_buffer("knots", torch.linspace(-3, 3, 6))

    def inputs(self):
        return {"x": torch.randn(3, 4)}

    def forward(self, x):
        log = x.new_zeros(x.shape[0])
        for net in self.nets:
            a, b = x.chunk(2, -1)
            scale, shift = net(a).chunk(2, -1)
            x, log = torch.cat([b * scale.tanh().exp() + shift, a], -1), log + scale.tanh().sum(-1)
        bins = torch.bucketize(x.detach().clamp(-2.9, 2.9), self.knots).clamp(1, 5)
        left, right = self.heights.cumsum(0)[bins - 1], self.heights.cumsum(0)[bins]
        return torch.lerp(left, right, 0.3).sum(-1), -0.5 * x.pow(2).sum(-1) + log, torch.searchsorted(self.knots, x)


class Crf(nn.Module):
    """Sums over all paths by a loop over time, and the best path."""

    def __init__(self):
        super().__init__()
        self.emit, self.move = nn.LSTM(4, 5, bidirectional=True, batch_first=True, proj_size=3), nn.Parameter(torch.randn(6, 6))

    def inputs(self):
        return {"x": torch.randn(2, 5, 4), "tags": torch.randint(0, 6, (2, 5)), "mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]).bool()}

    def forward(self, x, tags, mask):
        emitted, _ = self.emit(x)
        alpha, best, back = emitted[:, 0], emitted[:, 0], []
        for t in range(1, x.shape[1]):
            new = torch.logsumexp(alpha[:, :, None] + self.move + emitted[:, t, None], 1)
            alpha = torch.where(mask[:, t, None], new, alpha)
            best, index = (best[:, :, None] + self.move).max(1)
            best, back = best + emitted[:, t], back + [index]
        score = emitted.gather(2, tags[..., None])[..., 0] + F.pad(self.move[tags[:, :-1], tags[:, 1:]], (1, 0))
        return {"loss": (alpha.logsumexp(-1) - (score * mask).sum(-1)).mean(), "path": torch.stack(back), "last": best.argmax(-1)}


class Speech(nn.Module):
    """Losses at each time. (torch.export supports neither ctc_loss nor gaussian_nll_loss.)"""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv1d(4, 8, 3, padding=1), nn.Linear(8, 6)

    def inputs(self):
        return {"x": torch.randn(2, 4, 9), "labels": torch.randint(1, 6, (2, 9))}

    def forward(self, x, labels):
        z = self.fc(self.conv(x).transpose(1, 2))
        log = z.log_softmax(-1)
        return {"loss": F.nll_loss(log.transpose(1, 2), labels, ignore_index=2) +
                F.soft_margin_loss(z[..., 0], x[:, 0].sign()) + F.smooth_l1_loss(z[..., 2], x[:, 1]) +
                F.multilabel_soft_margin_loss(z[:, 0], (x[:, 0, :6] > 0).float()) + F.margin_ranking_loss(z[0, :, 0], z[1, :, 0], x[0, 0].sign())}


class While(nn.Module):
    """A loop of torch.while_loop with a branch; without gradients, which it lacks in 2.11."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def inputs(self):
        return {"x": torch.randn(3, 4)}

    def forward(self, x):
        from torch._higher_order_ops.while_loop import while_loop

        with torch.no_grad():
            count, y = while_loop(lambda i, v: i < 4, lambda i, v: (i + 1, v * 0.5 + i), (torch.tensor(0), x))
        y = torch.cond(count > 3, lambda v: v.sin(), lambda v: v.cos(), (y,))
        return self.fc(y) + x, count


class Capsules(nn.Module):
    """Routing by agreement with detached logits; queues of features as in momentum encoders."""

    def __init__(self):
        super().__init__()
        self.first, self.votes = nn.Linear(8, 12), nn.Parameter(torch.randn(3, 5, 4, 4) * 0.3)
        self.register_buffer("queue", F.normalize(torch.randn(6, 4), dim=-1))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def inputs(self):
        return {"x": torch.randn(2, 8)}

    def forward(self, x):
        u = self.first(x).view(2, 3, 4)
        votes = torch.einsum("bip,ijpq->bijq", u, self.votes)
        logits = votes.new_zeros(2, 3, 5)
        for _ in range(3):
            s = (logits.softmax(2).unsqueeze(-1) * votes).sum(1)
            v = s * s.norm(dim=-1, keepdim=True) / (1 + s.pow(2).sum(-1, keepdim=True))
            logits = logits + (votes.detach() * v.detach().unsqueeze(1)).sum(-1)
        keys = F.normalize(v[:, 0], dim=-1)
        similar = keys @ self.queue.clone().detach().t()
        with torch.no_grad():
            self.queue.index_copy_(0, (self.at + torch.arange(2)) % 6, keys)
            self.at.add_(2).remainder_(6)
        return v.norm(dim=-1), similar


class Tied(nn.Module):
    """An autoencoder with a tied, transposed decoder, contrastive losses, sorting, differentiable ranking."""

    shapes = {"x": {0: BATCH}}

    def __init__(self):
        super().__init__()
        self.encode, self.temperature = nn.Linear(6, 3), nn.Parameter(torch.tensor(0.5))

    def inputs(self):
        return {"x": torch.randn(4, 6)}

    def forward(self, x):
        z = self.encode(x)
        n = F.normalize(z, dim=-1)
        similar = n @ n.t() / self.temperature.exp()
        similar = similar.masked_fill(torch.eye(x.shape[0], dtype=torch.bool), float("-inf"))
        ordered, index = z.sort(0, descending=True)
        return (F.linear(z, self.encode.weight.t()), similar.softmax(-1), ordered * index, torch.logcumsumexp(z, 0),
                torch.median(z, 0).values, z.var(0, unbiased=False), torch.cummax(z, 0).values, z.prod(-1), torch.atan2(z, z + 2))


class Operator(nn.Module):
    """A 2-d Fourier neural operator: complex weights on parts of a spectrum that is filled in place."""

    shapes = {"x": {0: BATCH}}

    def __init__(self):
        super().__init__()
        self.lift, self.last = nn.Conv2d(2, 4, 1), nn.Conv2d(4, 1, 1)
        self.low, self.high = (nn.ParameterList([nn.Parameter(torch.randn(4, 4, 3, 3, dtype=torch.cfloat) * 0.1) for _ in range(2)])
                               for _ in range(2))
        self.skip = nn.ModuleList([nn.Conv2d(4, 4, 1) for _ in range(2)])

    def inputs(self):
        return {"x": torch.randn(2, 2, 8, 12)}

    def forward(self, x):
        x = self.lift(x)
        for low, high, skip in zip(self.low, self.high, self.skip):
            spectrum = torch.fft.rfft2(x)
            out = torch.zeros_like(spectrum)
            out[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :3, :3], low)
            out[:, :, -3:, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -3:, :3], high)
            x = F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + skip(x))
        return self.last(x)


class Mesh(nn.Module):
    """A mesh of any size: messages by scatter, inputs normalised by sums that forward accumulates."""

    shapes = {"nodes": {0: torch.export.Dim("node", min=2, max=50)}, "lengths": {0: torch.export.Dim("edge", min=2, max=50)},
              "edges": {1: torch.export.Dim("edge", min=2, max=50)}}

    def __init__(self):
        super().__init__()

        def perceptron(into, out):
            return nn.Sequential(nn.Linear(into, 12), nn.ReLU(), nn.Linear(12, out), nn.LayerNorm(out))

        self.node, self.edge = perceptron(3, 8), perceptron(1, 8)
        self.messages, self.updates = (nn.ModuleList([perceptron(into, 8) for _ in range(2)]) for into in (24, 16))
        self.last = nn.Linear(8, 3)
        for name, value in (("count", torch.tensor(0.0)), ("total", torch.zeros(3)), ("squares", torch.zeros(3))):
            self.register_buffer(name, value)

    def inputs(self):
        return {"nodes": torch.randn(7, 3), "lengths": torch.rand(12, 1), "edges": torch.arange(24).view(2, 12) * 5 % 7}

    def forward(self, nodes, lengths, edges):
        with torch.no_grad():
            self.count += nodes.shape[0]
            self.total += nodes.sum(0)
            self.squares += nodes.pow(2).sum(0)
        mean = self.total / self.count
        deviation = (self.squares / self.count - mean**2).clamp(min=1e-4).sqrt()
        node, edge = self.node((nodes - mean) / deviation), self.edge(lengths)
        for message, update in zip(self.messages, self.updates):
            edge = edge + message(torch.cat([edge, node[edges[0]], node[edges[1]]], -1))
            got = torch.zeros(node.shape[0], 8).scatter_add_(0, edges[1].unsqueeze(-1).expand(-1, 8), edge)
            node = node + update(torch.cat([node, got], -1))
        return self.last(node)


class Molecule(nn.Module):
    """An energy of atoms by distances, as in SchNet; the zoo computes its forces."""

    shapes = {"positions": {0: torch.export.Dim("atom", min=2, max=20)}, "kinds": {0: torch.export.Dim("atom", min=2, max=20)}}

    def __init__(self):
        super().__init__()
        self.embed, self.last = nn.Embedding(10, 8), nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1))
        self.filters = nn.Sequential(nn.Linear(5, 8), nn.Softplus(), nn.Linear(8, 8))
        self.register_buffer("centers", torch.linspace(0, 3, 5))

    def inputs(self):
        return {"positions": torch.randn(5, 3), "kinds": torch.tensor([1, 6, 8, 1, 7])}

    def forward(self, positions, kinds):
        same = torch.eye(positions.shape[0])
        distance = ((positions[:, None] - positions[None]).pow(2).sum(-1) + same).sqrt()
        cut = (0.5 * (torch.cos(distance * math.pi / 5) + 1) * (1 - same)).unsqueeze(-1)
        weight = self.filters(torch.exp(-(distance.unsqueeze(-1) - self.centers) ** 2)) * cut
        atoms = self.embed(kinds)
        return self.last(atoms + torch.einsum("ijk,jk->ik", weight, atoms)).sum()


class Structures(nn.Module):
    """Inputs as in simulators: dictionaries, lists and dataclasses of tensors, numbers, texts and None."""

    def __init__(self):
        super().__init__()
        self.first, self.extra = nn.Linear(4, 4), nn.Linear(3, 4)

    def inputs(self):
        return {"batch": {"x": torch.randn(3, 4), "extras": [torch.randn(3, 3), torch.randn(3, 3)], "scale": {"by": torch.tensor(2.0)}},
                "state": State(torch.randn(3, 4), torch.randn(3, 4)), "steps": 3, "dt": 0.25, "act": "tanh", "flipped": True, "mask": None}

    def forward(self, batch, state, steps=1, dt=0.1, act="relu", flipped=False, mask=None):
        force = self.first(batch["x"]) * batch["scale"]["by"]
        for extra in batch["extras"]:
            force = force + self.extra(extra)
        position, velocity = state.position, state.velocity
        for _ in range(steps):
            velocity = velocity + dt * getattr(torch, act)(force - position)
            position = position + dt * velocity
        if flipped:
            position = position.flip(0)
        return State(position, velocity), {"all": [force, (position, {"steps": steps, "mask": mask})], "batch": batch["x"].shape[0]}


@dataclasses.dataclass
class State:
    position: torch.Tensor
    velocity: torch.Tensor


torch.export.register_dataclass(State, serialized_type_name="programs.State")


class Weather(nn.Module):
    """Fields on a globe: longitudes wrap around, latitudes are weighted, windows are shifted."""

    shapes = {"now": {0: BATCH}, "later": {0: BATCH}}

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.back = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 2, 1)
        self.places = nn.Parameter(torch.zeros(1, 4, 8, 16))
        self.register_buffer("areas", torch.cos(torch.linspace(-1.5, 1.5, 8)))

    def inputs(self):
        return {"now": torch.randn(2, 2, 8, 16), "later": torch.randn(2, 2, 8, 16)}

    def forward(self, now, later):
        x = F.pad(F.pad(now, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1), mode="replicate")
        x = torch.roll(F.silu(self.norm(self.conv(x))) + self.places, (2, -3), (-2, -1))
        x = torch.roll(F.pixel_shuffle(F.pixel_unshuffle(x, 2) * 1.5, 2), (-2, 3), (-2, -1))
        errors = (now + self.back(x) - later) ** 2 * (self.areas / self.areas.mean()).unsqueeze(-1)
        return {"loss": errors.mean(), "rmse": errors.detach().mean((0, 2, 3)).sqrt(), "next": now + self.back(x)}


class Routed(nn.Module):
    """Experts: tokens sorted by expert, gathered weights, a load balance tracked by a buffer."""

    shapes = {"x": {0: torch.export.Dim("token", min=2, max=32)}}

    def __init__(self):
        super().__init__()
        self.gate, self.into, self.out = nn.Linear(4, 3), nn.Parameter(torch.randn(3, 4, 8)), nn.Parameter(torch.randn(3, 8, 4))
        self.register_buffer("load", torch.zeros(3))

    def inputs(self):
        return {"x": torch.randn(6, 4)}

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        weight, expert = share.topk(2, -1)
        expert, weight = expert.flatten(), (weight / weight.sum(-1, keepdim=True)).flatten()
        order = expert.argsort(stable=True)
        count = torch.zeros(3).scatter_add(0, expert, torch.ones_like(expert, dtype=torch.float))
        self.load.lerp_(count, 0.1)
        hidden = torch.bmm(x.repeat_interleave(2, 0)[order].unsqueeze(1), self.into[expert[order]]).relu()
        made = torch.bmm(hidden, self.out[expert[order]]).squeeze(1) * weight[order].unsqueeze(-1)
        y = torch.zeros_like(x).index_add(0, order // 2, made)
        return {"loss": y.pow(2).mean() + 0.03 * (count / count.sum() * share.mean(0)).sum(), "y": y, "count": count}


class Chosen(nn.Module):
    """Results with data-dependent sizes, also converted back to known sizes."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def inputs(self):
        return {"x": torch.randn(6, 4), "mask": torch.tensor([1, 0, 1, 1, 0, 1]).bool(), "repeats": torch.tensor([1, 2, 0, 3, 1, 1])}

    def forward(self, x, mask, repeats):
        y = self.fc(x)
        chosen = y[mask]
        _, inverse = torch.unique(repeats, return_inverse=True)
        return (chosen.sum(0), torch.masked_select(y, y > 0).pow(2).sum(), inverse, y[mask.nonzero()[:, 0]].mean(),
                torch.repeat_interleave(y, repeats, dim=0, output_size=8),
                torch.zeros(6, 4).masked_scatter(mask.unsqueeze(-1).expand(6, 4), chosen))


class FreeSizes(nn.Module):
    """Sizes that torch.export infers as dynamic, an integer input, a size that is twice another."""

    half = torch.export.Dim("half", min=2, max=8)
    shapes = {"x": {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}, "count": torch.export.Dim.DYNAMIC, "y": {0: half},
              "z": {0: 2 * half}}

    def __init__(self):
        super().__init__()
        self.conv, self.pool, self.fc = nn.Conv1d(1, 3, 3, padding=1), nn.AdaptiveAvgPool1d(4), nn.Linear(4, 4)

    def inputs(self):
        return {"x": torch.randn(3, 10), "count": 5, "y": torch.randn(3, 4), "z": torch.randn(6, 4)}

    def others(self):
        return {"x": torch.randn(5, 10), "count": 9, "y": torch.randn(4, 4), "z": torch.randn(8, 4)}

    def forward(self, x, count, y, z):
        h = F.max_pool1d(self.conv(x.unsqueeze(1)), 2)
        last = h[:, :, -(x.shape[1] // 4):]
        return (self.pool(h), last, h.reshape(x.shape[0], -1)[:, : 3 * (x.shape[1] // 2)], F.interpolate(h, size=x.shape[1]),
                self.fc(y).repeat(2, 1) + z, self.fc(z).view(y.shape[0], 2, 4).mean(1) * count / 7, torch.arange(count).sum())


class Scans(nn.Module):
    """A recurrence by scan, backwards in time, and one by associative_scan. The initial carry must require a gradient:
    otherwise torch 2.11 omits gradients through it, in Python."""

    def __init__(self):
        super().__init__()
        self.fc, self.gates, self.first = nn.Linear(4, 4), nn.Linear(4, 8), nn.Parameter(torch.randn(3, 4))

    def inputs(self):
        return {"x": torch.randn(3, 5, 4)}

    def forward(self, x):
        last, rows = scan(lambda carried, row: ((carried + self.fc(row)).tanh(), (carried * row).clone()), self.first, x, dim=1, reverse=True)
        keep, new = self.gates(x).chunk(2, -1)
        _, states = associative_scan(lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1]), (keep.sigmoid(), new), 1, combine_mode="generic")
        return last, rows, states


class Distributions(nn.Module):
    """Losses of torch.distributions: mixtures, divergences, entropies."""

    def __init__(self):
        super().__init__()
        self.fc, self.centers = nn.Linear(4, 6), nn.Parameter(torch.randn(3, 4))

    def inputs(self):
        return {"x": torch.randn(5, 4)}

    def forward(self, x):
        mean, log = self.fc(x).chunk(2, -1)
        normal = lambda a, b: torch.distributions.Normal(a, b, validate_args=False)  # noqa: E731
        mine = normal(mean, log.exp())
        mixed = normal(self.centers, torch.ones_like(self.centers)).log_prob(x.unsqueeze(1)).sum(-1).logsumexp(-1)
        chosen = torch.distributions.Categorical(logits=mean, validate_args=False)
        flags = torch.distributions.Bernoulli(logits=log, validate_args=False)
        apart = torch.distributions.kl_divergence(mine, normal(torch.zeros_like(mean), torch.ones_like(mean)))
        return {"loss": -mixed.mean() + apart.mean() + mine.log_prob(mean + 0.3 * log.exp()).mean() + chosen.entropy().mean() +
                flags.log_prob((mean > 0).float()).mean() + mine.cdf(x[:, :3]).mean()}


class Factors(nn.Module):
    """More linear algebra: factors, solutions, norms."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 4) + 4 * torch.eye(4))

    def inputs(self):
        return {"b": torch.randn(3, 4, 1)}

    def forward(self, b):
        q, r = torch.linalg.qr(self.a)
        values, vectors = torch.linalg.eigh(self.a @ self.a.t())
        triangle = torch.linalg.cholesky(self.a @ self.a.t())
        return (r.abs(), (q @ r), torch.linalg.pinv(self.a[:, :3]), torch.linalg.slogdet(self.a)[1], (vectors * values).abs().sum(),
                torch.linalg.solve_triangular(r, b.squeeze(-1).t(), upper=True), torch.cholesky_solve(b[0], triangle),
                torch.linalg.matrix_norm(self.a, ord=2), torch.linalg.cond(self.a), torch.linalg.matrix_power(self.a / 4, 3),
                torch.cdist(self.a, b[..., 0], p=1.0), torch.linalg.cross(self.a[:, :3], b[0].expand(4, 3)),
                torch.linalg.lu_factor(self.a)[0], torch.linalg.multi_dot([self.a, self.a, b[0]]), torch.trapezoid(self.a))


class Integers(nn.Module):
    """Small integer, boolean and half-precision inputs; byte weights with scales."""

    def __init__(self):
        super().__init__()
        self.embed, self.fc = nn.Embedding(10, 4), nn.Linear(4, 3)
        self.register_buffer("bytes", torch.randint(-128, 127, (3, 4), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(3, 1))
        self.register_buffer("mean", torch.rand(4, dtype=torch.float64))

    def inputs(self):
        return {"short": torch.tensor([1, 2, 3], dtype=torch.int16), "ids": torch.tensor([3, 4, 5], dtype=torch.int32),
                "image": torch.randint(0, 255, (3, 4), dtype=torch.uint8), "mask": torch.tensor([True, False, True]),
                "half": torch.randn(3, 4, dtype=torch.float16)}

    def forward(self, short, ids, image, mask, half):
        x = self.embed(ids).masked_fill(mask.unsqueeze(-1), 0.5) + (image / 255 - self.mean).float()
        return (self.fc(x), F.linear(half.float(), self.bytes.float() * self.scales) + self.fc.bias, self.fc.weight.double().sum() * self.mean,
                torch.bitwise_and(image, 3), short // 2 % 2, mask.logical_not(), image.sum(), F.one_hot(ids.long(), 10))


PROGRAMS = {"transformer": Seq2Seq, "cross_attention": CrossAttention, "recurrent": Recurrent, "volumes": Volumes,
            "images": Images, "bags": Bags, "parametrized": Parametrized, "fourier": Fourier,
            "graph_attention": GraphAttention, "flow": Flow, "quantizer": Quantizer, "in_place": InPlace,
            "lengths": Lengths, "losses": Losses, "algebra": Algebra, "norms": Norms, "nested": Nested, "complex": Complex,
            "rays": Rays, "ode": Ode, "hyper": Hyper, "density": FlowOfDensity, "crf": Crf, "speech": Speech, "while": While,
            "capsules": Capsules, "tied": Tied, "operator": Operator, "mesh": Mesh, "molecule": Molecule, "structures": Structures,
            "weather": Weather, "routed": Routed, "chosen": Chosen, "free_sizes": FreeSizes, "scans": Scans,
            "distributions": Distributions, "factors": Factors, "integers": Integers}


# ---- models that torch.export would change, so they are refused --------------------------------------


class Sign(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, gradient):
        x, = ctx.saved_tensors
        return gradient * x.sigmoid() * (1 + x * (1 - x.sigmoid()))


class WithBackward(nn.Module):
    """A function whose backward is or is not the derivative of its forward, or a hook."""

    def __init__(self, act):
        super().__init__()
        self.fc, self.norm, self.act = nn.Linear(4, 4), nn.BatchNorm1d(4), act

    def inputs(self):
        return {"x": torch.randn(3, 4)}

    def forward(self, x):
        return F.dropout(self.norm(self.act(self.fc(x))), 0.1, self.training)


def reversed_gradient(x):
    if x.requires_grad:
        x.register_hook(torch.neg)
    return x * 1


def with_hook(register):
    """A module whose parameter had a hook before the export."""
    net = WithBackward(torch.tanh)
    getattr(net.fc.weight, register)(lambda gradient: gradient * 0.5)
    return net


ANOTHER = "the gradient of 'fc.weight' would be another"
REFUSED = {"straight_through": (lambda: WithBackward(Sign.apply), ANOTHER, "Sign (torch.autograd.Function)"),
           "reversed_gradient": (lambda: WithBackward(reversed_gradient), ANOTHER, "Tensor.register_hook"),
           "halved_gradient": (lambda: with_hook("register_hook"), ANOTHER, "Tensor.register_hook (of 'fc.weight')"),
           "steps_in_backward": (lambda: with_hook("register_post_accumulate_grad_hook"), "the parameter 'fc.weight' has a hook")}
PROGRAMS["swish"] = lambda: WithBackward(Swish.apply)
