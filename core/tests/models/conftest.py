"""Driving a decoder over a paged cache, as an engine would."""

from __future__ import annotations

import pytest
import torch
from specdec_kernels.attention import AttentionMetadata
from specdecode.models import load_model, resolve_model

torch.set_num_threads(1)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


class Paged:
    """Rows of tokens on scattered blocks of one cache."""

    def __init__(self, decoder, *, block_size=4, num_blocks=300, seed=0):
        self.decoder, self.block_size, self.device = decoder, block_size, decoder.device
        config = decoder.config
        shape = (num_blocks, block_size, config.num_kv_heads)
        self.caches = [
            tuple(
                torch.zeros((*shape, dim), dtype=decoder.dtype, device=self.device)
                for dim in (config.head_dim, config.value_dim)
            )
            for _ in range(config.num_layers)
        ]
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
        self.free = order.tolist()
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    @torch.inference_mode()
    def feed(self, tokens, *, trees=None, taps=()):
        """Append ``tokens[row]`` to each row; ``trees[row] = (ids, parents)`` hang below its last one.

        Returns ``(logits of each row's tokens and then its nodes, taps)``.
        """
        rows, ids, positions, base, extra, slots = [], [], [], [], [], []
        for index, (row, new) in enumerate(tokens.items()):
            start = self.lengths.get(row, 0)
            end = self.lengths[row] = start + len(new)
            nodes, parents = (trees or {}).get(row, ((), ()))
            table = self.tables.setdefault(row, [])
            while len(table) * self.block_size < end + len(nodes):
                table.append(self.free.pop())
            paths: list[list[int]] = []
            for node, parent in enumerate(parents):
                paths.append((paths[parent] if parent >= 0 else []) + [end + node])
            rows += [index] * (len(new) + len(nodes))
            ids += [*new, *nodes]
            positions += [*range(start, end), *(end - 1 + len(path) for path in paths)]
            base += [*range(start + 1, end + 1), *(end for _ in nodes)]
            extra += [[] for _ in new] + paths
            slots += [
                table[slot // self.block_size] * self.block_size + slot % self.block_size
                for slot in range(start, end + len(nodes))
            ]
        width = max(len(self.tables[row]) for row in tokens)
        most = max(map(len, extra))
        meta = AttentionMetadata(
            rows=self._tensor(rows),
            positions=self._tensor(positions),
            write_slots=self._tensor(slots),
            base=self._tensor(base),
            block_table=self._tensor(
                [self.tables[row] + [0] * (width - len(self.tables[row])) for row in tokens]
            ),
            block_size=self.block_size,
            extra=self._tensor([path + [-1] * (most - len(path)) for path in extra]) if most else None,
        )
        hidden, tapped = self.decoder(self._tensor(ids), meta.positions, meta, self.caches, taps)
        logits = self.decoder.compute_logits(hidden)
        assert logits.dtype is torch.float32
        counts = torch.bincount(meta.rows).tolist()
        return dict(zip(tokens, logits.cpu().split(counts), strict=True)), (hidden, *tapped)

    def _tensor(self, values):
        return torch.tensor(values, device=self.device)


@pytest.fixture
def paged():
    """The class :class:`Paged`: a decoder on a cache of its own."""
    return Paged


@pytest.fixture(params=DEVICES)
def native(request):
    """``native(checkpoint, max_model_len=512, dtype=float32, block_size=4)``: a paged decoder of it."""
    device = torch.device(request.param)

    def build(path, *, max_model_len=512, dtype=torch.float32, block_size=4):
        decoder = load_model(resolve_model(path), dtype=dtype, device=device, max_model_len=max_model_len)
        return Paged(decoder, block_size=block_size)

    return build


@pytest.fixture
def reference():
    """``reference(checkpoint)``: transformers' model of it, as a function of ids to its output."""
    from transformers import AutoModelForCausalLM

    def build(path, dtype=torch.float32):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()

        @torch.inference_mode()
        def run(ids):
            return model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)

        return run

    return build


@pytest.fixture
def prompt():
    """``prompt(n, seed=0)``: ``n`` random byte tokens."""

    def build(count, seed=0):
        return torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(seed)).tolist()

    return build
