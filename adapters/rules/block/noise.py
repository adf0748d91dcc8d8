"""Counter-based noise: the same numbers on every replica, on every device, in every batch.

Philox-4x32-10 (Salmon et al., SC 2011) with key = a slot's 64-bit seed and counter = (token, kind + 4 row, step low,
step high). `step` counts a slot's verifications, `row` is the position in the block, `token` stands for a token of the
vocabulary (TOKEN), a chunk of it (PIECE) or a position (ETA). A coin takes the first of the four words. The race among
the tokens of chunk c takes all four: word j at counter c CHUNK/4 + g belongs to token c CHUNK + j CHUNK/4 + g.
"""

from __future__ import annotations

import torch
from torch import Tensor

ETA, PIECE, TOKEN = 0, 1, 2
CHUNK = 2048  # tokens whose masses race together; the same in every batch, so that answers do not depend on it
_M0, _M1, _W0, _W1, _32 = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xFFFFFFFF


def _mul(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * b; 32-bit values in int64 tensors."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    total = low + ((high & 0xFFFF) << 16)
    return (high >> 16) + (total >> 32), total & _32


def words(
    seed: Tensor, step: Tensor, kind: int, row: Tensor | int, token: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four times 32 random bits as int64. Arguments broadcast; seed and step int64."""
    rows = torch.as_tensor(row, dtype=torch.int64, device=seed.device)
    seed, step, rows, token = torch.broadcast_tensors(seed, step, rows, token)
    c0, c1, c2, c3 = token & _32, (kind + 4 * rows) & _32, step & _32, (step >> 32) & _32
    k0, k1 = seed & _32, (seed >> 32) & _32
    for _ in range(10):
        (h1, l1), (h0, l0) = _mul(_M1, c2), _mul(_M0, c0)
        c0, c1, c2, c3 = h1 ^ c1 ^ k0, l1, h0 ^ c3 ^ k1, l0
        k0, k1 = (k0 + _W0) & _32, (k1 + _W1) & _32
    return c0, c1, c2, c3


def uniform(seed: Tensor, step: Tensor, position: Tensor) -> Tensor:
    """eta of a position, float32 in [0, 1)."""
    return (words(seed, step, ETA, 0, position)[0] >> 8).float() * 2.0**-24


def exponential(bits: Tensor) -> Tensor:
    """Exp(1) as -log(1 - u) of 32 bits, float32; the series keeps small values, which win races, fine."""
    u = (bits.float() + 0.5) * 2.0**-32
    return torch.where(u < 0.01, u * (1 + u * (0.5 + u * 0.3333333333)), -torch.log(1 - u))


def of_pieces(seed: Tensor, step: Tensor, row: Tensor | int, piece: Tensor) -> Tensor:
    """Exp(1) of chunks of the vocabulary."""
    return exponential(words(seed, step, PIECE, row, piece)[0])


def of_tokens(seed: Tensor, step: Tensor, row: Tensor | int, token: Tensor, chunk: int = CHUNK) -> Tensor:
    """Exp(1) of tokens."""
    quarter = chunk // 4
    drawn = words(seed, step, TOKEN, row, token // chunk * quarter + token % quarter)
    word = (token % chunk // quarter).expand(drawn[0].shape)
    return exponential(torch.stack(drawn).gather(0, word[None])[0])
