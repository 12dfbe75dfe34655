from pathlib import Path

import pytest
import torch
from torch import Tensor

from helicon.data.mesh import Mesh, dequantize_coordinates, tidy
from helicon.data.mesh_data import collate_meshes
from helicon.data.synthetic_meshes import SyntheticMeshes
from helicon.models.meshgpt.compact import MOST_TOKENS_PER_FACE, RECENT, CompactMeshTokenizer, may_follow
from helicon.nn.network import load_network, same_network, sha256
from models.meshgpt.tiny import compact, transformer

# On the grid of 128: a square in its first block, a tip above it, and a vertex in the block at the other end of the row.
CORNERS = {"a": (0, 0, 0), "b": (5, 0, 0), "c": (5, 5, 0), "d": (0, 5, 0), "e": (2, 2, 9), "x": (100, 0, 0)}


def oriented(corners: Tensor) -> list[tuple]:
    """Faces by their corners' coordinates, from the lowest on: the same whichever corner comes first."""
    faces = [[tuple(corner) for corner in face] for face in corners.tolist()]
    return sorted(min((a, b, c), (b, c, a), (c, a, b)) for a, b, c in faces)


def each_oriented(corners: Tensor) -> list[tuple]:
    return [oriented(face[None])[0] for face in corners]


def soup(num_vertices: int, num_faces: int, bins: int, seed: int) -> Mesh:
    generator = torch.Generator().manual_seed(seed)
    faces = torch.rand(num_faces, num_vertices, generator=generator).argsort(dim=1)[:, :3]
    return tidy(Mesh(2 * torch.rand(num_vertices, 3, generator=generator) - 1, faces), bins)


def named(*faces: str, bins: int = 128) -> Mesh:
    names = sorted({name for face in faces for name in face})
    places = torch.tensor([CORNERS[name] for name in names])
    return Mesh(
        dequantize_coordinates(places, bins), torch.tensor([[names.index(name) for name in face] for face in faces])
    )


def check_whole(tokenizer: CompactMeshTokenizer, mesh: Mesh) -> int:
    codes = tokenizer.tokenize(mesh.vertices, mesh.faces)
    corners, mask = tokenizer.decode_from_codes_to_faces(codes)
    assert mask.all() and oriented(corners) == oriented(mesh.vertices[mesh.faces])
    assert codes.min() >= 0 and codes.max() < tokenizer.codebook_size
    assert len(codes) <= MOST_TOKENS_PER_FACE * len(mesh.faces)
    return len(codes)


def test_furniture_comes_back_as_it_was_in_three_tokens_a_face():
    tokenizer = CompactMeshTokenizer()
    meshes = [Mesh(sample["vertices"], sample["faces"]) for sample in SyntheticMeshes(40)]
    tokens = sum(check_whole(tokenizer, mesh) for mesh in meshes)
    assert tokens < 3 * sum(len(mesh.faces) for mesh in meshes)


@pytest.mark.parametrize(("bins", "blocks"), [(128, 8), (12, 3), (4, 4), (10, 1)])
@pytest.mark.parametrize(("num_vertices", "num_faces"), [(3, 5), (5, 70), (13, 40), (90, 300), (60, 20)])
def test_any_jumble_of_faces_comes_back_as_it_was(bins: int, blocks: int, num_vertices: int, num_faces: int):
    tokenizer = CompactMeshTokenizer(bins, blocks)
    assert tokenizer.codebook_size == 2 * blocks**3 + (bins // blocks) ** 3
    for seed in range(5):
        check_whole(tokenizer, soup(num_vertices, num_faces, bins, seed))


def test_the_tokens_are_those_of_the_definition():
    """A square: one patch; around its lowest corner, in the order of the winding, with the block named once."""
    tokenizer, offset = CompactMeshTokenizer(), 2 * 512
    a, b, c, d = (offset + x + 16 * y for x, y, _ in (CORNERS[name] for name in "abcd"))
    for faces in (("abc", "acd"), ("cda", "bca")):
        mesh = named(*faces)
        assert tokenizer.tokenize(mesh.vertices, mesh.faces).tolist() == [512, a, b, c, d]
    mesh = named("acb", "adc")  # the other side
    assert tokenizer.tokenize(mesh.vertices, mesh.faces).tolist() == [512, a, d, c, b]
    mesh = named("abx", "bdx")  # around b, and x is in block 6, four places from its beginning
    assert tokenizer.tokenize(mesh.vertices, mesh.faces).tolist() == [512, b, d, 6, offset + 4, 0, a]
    mesh = named("abe", "bce", "cde", "dae")  # closed: it ends where it began
    e = offset + 2 + 16 * 2 + 256 * 9
    assert tokenizer.tokenize(mesh.vertices, mesh.faces).tolist() == [512, e, a, b, c, d, a]


def test_the_tokens_are_a_function_of_the_faces_alone():
    tokenizer = CompactMeshTokenizer()
    mesh = soup(17, 60, 128, 0)
    expected = tokenizer.tokenize(mesh.vertices, mesh.faces)
    generator = torch.Generator().manual_seed(1)
    order, names = (torch.randperm(count, generator=generator) for count in (len(mesh.faces), len(mesh.vertices)))
    faces = names.argsort()[mesh.faces[order]].roll(1, dims=1)
    assert torch.equal(tokenizer.tokenize(mesh.vertices[names], faces), expected)
    padded = torch.cat([faces, faces[:5], faces[:3, [0, 0, 1]], torch.full((4, 3), -1)])  # twice, no area, padding
    assert torch.equal(tokenizer.tokenize(mesh.vertices[names], padded.int()), expected)
    near = mesh.vertices[names] + 0.4 / 64 * (2 * torch.rand(len(names), 3, generator=generator) - 1)
    assert torch.equal(tokenizer.tokenize(near, faces), expected)


def test_patches_come_in_order():
    """The lowest face of a patch that no patch before has is above that of the one before it."""
    tokenizer = CompactMeshTokenizer()
    for sample in SyntheticMeshes(9, seed=3):
        codes = tokenizer.tokenize(sample["vertices"], sample["faces"])
        starts = ((codes >= 512) & (codes < 1024)).nonzero().flatten().tolist()
        ranks = {face: rank for rank, face in enumerate(each_oriented(sample["vertices"][sample["faces"]]))}
        lowest = []
        for start, end in zip(starts, [*starts[1:], len(codes)], strict=True):
            patch, _ = tokenizer.decode_from_codes_to_faces(codes[start:end])
            lowest.append(min(ranks[face] for face in each_oriented(patch)))
        assert lowest == sorted(lowest) and len(starts) > 2


def test_a_batch_is_each_mesh_padded():
    tokenizer = CompactMeshTokenizer()
    samples = [SyntheticMeshes(3)[index] for index in range(3)]
    batch = collate_meshes(samples)
    codes = tokenizer.tokenize(batch["vertices"], batch["faces"], batch["face_edges"])
    # A face with any negative corner is padding, as for an autoencoder.
    padded = torch.cat((batch["faces"], torch.tensor([0, 1, -2]).expand(3, 1, 3)), dim=1)
    assert torch.equal(tokenizer.tokenize(batch["vertices"], padded), codes)
    corners, mask = tokenizer.decode_from_codes_to_faces(codes)
    for row, sample in enumerate(samples):
        alone = tokenizer.tokenize(sample["vertices"], sample["faces"])
        assert torch.equal(codes[row, : len(alone)], alone) and codes[row, len(alone) :].eq(-1).all()
        one, _ = tokenizer.decode_from_codes_to_faces(alone)
        assert torch.equal(corners[row, mask[row]], one) and corners[row, ~mask[row]].isnan().all()
        assert mask[row].sum() == len(sample["faces"])
    for other in (
        tokenizer.decode_from_codes_to_faces(codes[..., None]),
        tokenizer.decode_from_codes_to_faces(codes.where(codes >= 0, 7), face_mask=codes >= 0),
    ):
        assert torch.equal(other[1], mask) and torch.equal(other[0][mask], corners[mask])


def test_nothing_is_no_tokens():
    tokenizer = CompactMeshTokenizer()
    codes = tokenizer.tokenize(torch.zeros(2, 4, 3), torch.full((2, 5, 3), -1))
    assert codes.shape == (2, 0)
    for empty in (codes, torch.full((2, 7), -1), torch.tensor([[3, 1024, 1025], [512, 1024, 1025]])):
        corners, mask = tokenizer.decode_from_codes_to_faces(empty)
        assert corners.shape == (2, 0, 3, 3) and mask.shape == (2, 0)
    together = torch.zeros(3, 3)
    assert len(tokenizer.tokenize(together, torch.tensor([[0, 1, 2]]))) == 0


def by_the_grammar(tokenizer: CompactMeshTokenizer, codes: list[int]) -> list[tuple]:
    """One token after the other."""
    blocks, side, places = tokenizer.num_blocks, tokenizer.blocks_per_side, tokenizer.places_per_block_side
    spread = lambda number, base: (number % base, number // base % base, number // base**2)
    faces, patch, block = [], None, None
    for code in codes:
        if 0 <= code < 2 * blocks:
            patch, block = [] if code >= blocks else patch, spread(code % blocks, side)
        elif 0 <= code < tokenizer.codebook_size and patch is not None:
            offset = spread(code - 2 * blocks, places)
            patch.append(tuple(places * b + o for b, o in zip(block, offset, strict=True)))
            face = (patch[0], *patch[-2:])
            if len(patch) > 2 and len(set(face)) == 3:
                faces.append(face)
    return faces


@pytest.mark.parametrize("length", [1, 2, 3, 50, 3000])
def test_any_tokens_are_read_as_the_grammar_has_it(length: int):
    for tokenizer in (CompactMeshTokenizer(), CompactMeshTokenizer(4, 2), CompactMeshTokenizer(2, 1)):
        for seed in range(6):
            generator = torch.Generator().manual_seed(seed)
            codes = torch.randint(-2, tokenizer.codebook_size + 2, (length,), generator=generator)
            corners, mask = tokenizer.decode_from_codes_to_faces(codes)
            places = ((corners + 1) / 2 * tokenizer.num_discrete_coors - 0.5).round().int()
            found = [tuple(map(tuple, face)) for face in places.tolist()]
            assert found == by_the_grammar(tokenizer, codes.tolist()) and mask.all()
            assert len(found) or length < 3000


def test_it_is_saved_and_hashed_like_a_network(tmp_path: Path):
    tokenizer = CompactMeshTokenizer(64, 4)
    tokenizer.save(tmp_path / "one")
    CompactMeshTokenizer(128, 4).save(tmp_path / "two")
    again = load_network(tmp_path / "one")
    assert isinstance(again, CompactMeshTokenizer) and again.codebook_size == tokenizer.codebook_size
    assert same_network(again, tokenizer) and not same_network(again, load_network(tmp_path / "two"))
    assert sha256(tmp_path / "one" / "model.safetensors") != sha256(tmp_path / "two" / "model.safetensors")
    assert not list(tokenizer.parameters())


def test_mistakes_are_said_in_a_sentence():
    tokenizer = CompactMeshTokenizer()
    with pytest.raises(ValueError, match=r"the faces have 4 corners: this tokenizer takes triangles"):
        tokenizer.tokenize(torch.rand(4, 3), torch.tensor([[0, 1, 2, 3]]))
    with pytest.raises(ValueError, match="not all finite"):
        tokenizer.tokenize(torch.full((3, 3), torch.nan), torch.tensor([[0, 1, 2]]))
    for wrong in ((1, 1), (2048, 8), (100, 8), (128, 0)):
        with pytest.raises(ValueError, match=f"num_discrete_coors={wrong[0]}, blocks_per_side={wrong[1]}"):
            CompactMeshTokenizer(*wrong)


# ---------------------------------------------------------------------------------------------- what may follow what


def makes_sense(codes: list[int], tokenizer: CompactMeshTokenizer) -> bool:
    """A patch first; behind each block an offset; three vertices or more in each patch. The end is a token, too."""
    kinds = ["bPo"[min(code // tokenizer.num_blocks, 2)] for code in codes if code < tokenizer.codebook_size]
    patches = "".join(kinds).split("P")
    is_whole = len(kinds) < len(codes)
    return (
        patches[0] == ""
        and len(patches) > is_whole
        and all(
            "bb" not in patch
            and patch[:1] != "b"
            and ((patch.count("o") >= 3 and patch[-1] == "o") or (number == len(patches) - 1 and not is_whole))
            for number, patch in enumerate(patches[1:], 1)
        )
    )


def allowed_after(codes: list[int], tokenizer: CompactMeshTokenizer) -> Tensor:
    recent = torch.tensor([[*[-1] * RECENT, *codes][-RECENT:]])
    return may_follow(recent, tokenizer.num_blocks, tokenizer.codebook_size + 1)[0]


def test_exactly_what_makes_sense_may_follow():
    """All sequences of up to eight tokens of a tokenizer that has one block and eight offsets, of which two are enough."""
    tokenizer, alphabet = CompactMeshTokenizer(2, 1), (0, 1, 2, 9, 10)
    assert tokenizer.codebook_size == 10
    sequences: list[list[int]] = [[]]
    for _ in range(8):
        longer = []
        for codes in sequences:
            allowed = allowed_after(codes, tokenizer)
            assert {token for token in alphabet if makes_sense([*codes, token], tokenizer)} == {
                token for token in alphabet if allowed[token]
            }, codes
            longer += [[*codes, token] for token in (0, 1, 2) if allowed[token]]
        sequences = longer
    assert len(sequences) > 20


def test_every_mesh_may_be_drawn():
    tokenizer = CompactMeshTokenizer(12, 3)
    for seed in range(10):
        mesh = soup(13, 40, 12, seed)
        codes = [*tokenizer.tokenize(mesh.vertices, mesh.faces).tolist(), tokenizer.codebook_size]
        assert makes_sense(codes, tokenizer)
        assert all(allowed_after(codes[:place], tokenizer)[code] for place, code in enumerate(codes))


@torch.no_grad()
def test_only_what_makes_sense_is_drawn():
    """By a network that has learned nothing, behind prompts that end in the middle of a patch, and behind none."""
    tokenizer = compact()
    network = transformer(tokenizer)
    begin, offset = tokenizer.num_blocks + 5, 2 * tokenizer.num_blocks + 7
    prompt = torch.full((4, 5), -1)
    for row, codes in enumerate(([], [begin], [begin, offset, offset + 1], [begin, offset, 3])):
        prompt[row, : len(codes)] = torch.tensor(codes, dtype=torch.long)
    for codes in network.generate(prompt, return_codes=True, max_seq_len=60, seed=0, filter_thres=0).tolist():
        found = [code for code in codes if code >= 0]
        assert len(found) > 3 and makes_sense(found, tokenizer)
