"""Strided copies in words of 16 bytes."""

import pytest
import torch

from mplug_ops.words import in_words, packed, put


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_words_carry_every_bit_of_heads_and_only_where_they_fit(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 256, (2, 6, 5, 16 * dtype.itemsize), dtype=torch.uint8, generator=torch.manual_seed(3))
    heads = bits.view(dtype)
    for of in (heads[:, :, 1:3], heads[:, :, 1:3, 1:9], heads[..., ::2], heads.transpose(1, 2)):
        place = torch.zeros(2, 7, *of.shape[1:], dtype=dtype)[:, 2]
        put(place, of)
        for copy in (place, packed(of)):
            assert torch.equal(copy.contiguous().view(torch.uint8), of.contiguous().view(torch.uint8))
    assert in_words(heads[:, :, 1:3]) is not None
    assert [in_words(one) for one in (heads[..., 1:9], heads[..., ::2], heads[..., :1])] == [None] * 3
