import pytest
import torch

from helicon.nn.packing import Part, left_packed, pack, unique_consecutive
from helicon.nn.transformer import Transformer

DIM = 3
MASKS = {
    "one part": [[[0, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 1]]],
    "a row of a part is empty": [[[1, 0], [0, 0], [1, 1]], [[0, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0]]],
    "a part is empty": [[[1, 0], [0, 1], [1, 1]], [[0], [0], [0]], [[1, 1, 0], [0, 1, 1], [0, 0, 1]]],
    "a part has no width": [[[1, 0], [0, 1], [1, 1]], [[], [], []], [[1], [0], [1]]],
    "a part has no mask": [[[1, 0], [0, 0], [0, 1]], 4, [[0, 1], [0, 0], [1, 0]]],
    "nothing is real": [[[0, 0], [0, 0], [0, 0]], [[0], [0], [0]]],
}
each_mask = pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())


def parts_of(masks) -> list[Part]:
    """Random parts; a width in place of a mask is a part without one."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randn(3, n, DIM, generator=generator, dtype=torch.double, requires_grad=True)
    return [
        Part(draw(mask)) if isinstance(mask, int) else Part(draw(len(mask[0])), torch.tensor(mask).bool())
        for mask in masks
    ]


def real(part: Part, row: int) -> list[int]:
    everywhere = torch.ones(part.embeddings.shape[:2], dtype=torch.bool)
    return (everywhere if part.mask is None else part.mask)[row].nonzero()[:, 0].tolist()


def packed_by_loop(parts: list[Part]) -> tuple[torch.Tensor, torch.Tensor]:
    total = sum(part.embeddings.shape[1] for part in parts)
    rows, masks = [], []
    for row in range(3):
        tokens = [part.embeddings[row, i] for part in parts for i in real(part, row)]
        missing = total - len(tokens)
        rows.append(torch.stack(tokens + [torch.zeros(DIM).double()] * missing))
        masks.append(torch.tensor([True] * len(tokens) + [False] * missing))
    return torch.stack(rows), torch.stack(masks)


def unpacked_by_loop(parts: list[Part], hidden: torch.Tensor) -> list[torch.Tensor]:
    result = [torch.zeros(*part.embeddings.shape[:2], hidden.shape[-1]).double() for part in parts]
    for row in range(3):
        places = [(part, i) for part in range(len(parts)) for i in real(parts[part], row)]
        for slot, (part, i) in enumerate(places):
            result[part][row, i] = hidden[row, slot]
    return result


def gradients(outputs, inputs) -> list[torch.Tensor]:
    """Of a sum with unequal weights, so that a gradient in the wrong place is seen."""
    weights = torch.arange(1.0, sum(x.numel() for x in outputs) + 1).double()
    total = torch.cat([x.flatten() for x in outputs]) @ weights
    return list(torch.autograd.grad(total, inputs, materialize_grads=True))


@each_mask
def test_packing_is_a_loop_over_rows(masks):
    parts = parts_of(masks)
    packed, (embeddings, mask) = pack(parts), packed_by_loop(parts)
    assert torch.equal(packed.embeddings, embeddings) and torch.equal(packed.mask, mask)
    if mask.any():
        inputs = [part.embeddings for part in parts]
        for found, expected in zip(
            gradients([packed.embeddings], inputs), gradients([embeddings], inputs), strict=True
        ):
            assert torch.equal(found, expected)


@each_mask
def test_unpacking_is_a_loop_over_rows(masks):
    parts = parts_of(masks)
    packed = pack(parts)
    hidden = torch.randn(*packed.mask.shape, 5, dtype=torch.double, requires_grad=True)
    found, expected = packed.unpack(hidden), unpacked_by_loop(parts, hidden)
    assert [x.shape for x in found] == [(*part.embeddings.shape[:2], 5) for part in parts]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    if packed.mask.any():
        assert torch.equal(gradients(found, [hidden])[0], gradients(expected, [hidden])[0])


def test_without_masks_the_parts_are_joined_and_split():
    parts = parts_of([2, 1, 4])
    packed = pack(parts)
    assert packed.mask is None
    assert torch.equal(packed.embeddings, torch.cat([part.embeddings for part in parts], dim=1))
    assert all(torch.equal(x, part.embeddings) for x, part in zip(packed.unpack(packed.embeddings), parts, strict=True))


def test_what_is_not_real_may_be_anything():
    parts = parts_of(MASKS["a row of a part is empty"])
    poisoned = [
        Part(part.embeddings.detach().masked_fill(~part.mask[..., None], torch.nan).requires_grad_(), part.mask)
        for part in parts
    ]
    packed = pack(poisoned)
    assert torch.equal(packed.embeddings, pack(parts).embeddings)
    for gradient in gradients([packed.embeddings], [part.embeddings for part in poisoned]):
        assert gradient.isfinite().all()
    poisoned_hidden = packed.embeddings.masked_fill(~packed.mask[..., None], torch.nan)
    assert all(x.isfinite().all() for x in packed.unpack(poisoned_hidden))


@torch.no_grad()
def test_a_causal_transformer_needs_no_mask():
    """Each row alone, without its padding, gives what it gives packed: the positions are right, too."""
    torch.manual_seed(0)
    transformer = Transformer(DIM, 2, heads=2, dim_head=4, causal=True).double().eval()
    parts = parts_of(MASKS["a part has no mask"])
    packed = pack(parts)
    found = packed.unpack(transformer(packed.embeddings))
    for row in range(3):
        alone = torch.cat([part.embeddings[row, real(part, row)] for part in parts])
        expected = transformer(alone[None])[0]
        together = torch.cat([x[row, real(part, row)] for x, part in zip(found, parts, strict=True)])
        assert torch.allclose(together, expected, atol=1e-12)


def test_left_packed():
    values = torch.tensor([[4, 9, 4, 7], [1, 2, 3, 4], [5, 6, 7, 8]])
    keep = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
    assert left_packed(values, keep, -2).tolist() == [[9, 7, -2, -2], [-2] * 4, [5, 6, 7, 8]]


@pytest.mark.parametrize("pad_id", [-1, 0])
def test_unique_consecutive_is_a_loop_over_rows(pad_id):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 4, (50, 9), generator=generator)
    lengths = torch.randint(0, 10, (50,), generator=generator)
    ids[torch.arange(9) >= lengths[:, None]] = pad_id
    given = ids.clone()
    expected = []
    for row, length in zip(ids.tolist(), lengths.tolist(), strict=True):
        kept = [row[i] for i in range(length) if i == 0 or row[i] != row[i - 1]]
        expected.append(kept + [pad_id] * (9 - len(kept)))
    assert unique_consecutive(ids, pad_id).tolist() == expected
    assert torch.equal(ids, given)
    assert unique_consecutive(ids[:, :0], pad_id).shape == (50, 0)


def test_nothing_asks_the_host():
    """Tensors without values: what needs one raises."""
    embeddings, mask = torch.empty(2, 5, DIM, device="meta"), torch.empty(2, 5, dtype=torch.bool, device="meta")
    packed = pack([Part(embeddings, mask), Part(embeddings)])
    assert [x.shape for x in packed.unpack(packed.embeddings)] == [(2, 5, DIM)] * 2
    ids = torch.empty(2, 5, dtype=torch.long, device="meta")
    assert left_packed(ids, mask, 0).shape == unique_consecutive(ids).shape == (2, 5)


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"\(2, 4\) does not fit embeddings of \(2, 5, 3\)"):
        pack([Part(torch.zeros(2, 5, DIM), torch.ones(2, 4).bool())])
