"""Generation: what the cache, batches, guidance and prompts give is what a plain loop over whole sequences gives, row by row."""

from typing import Any

import pytest
import torch
from torch import Tensor

from helicon.models.meshgpt import generate
from helicon.models.meshgpt.generate import filters
from helicon.models.meshgpt.transformer import MeshTransformer
from helicon.nn import decode
from helicon.nn.decode import Decoder
from helicon.nn.sampling import Sampling
from models.meshgpt.toy_tokenizer import BINS, CONDITIONS, TEXT, TEXTS, ToyTokenizer, build, codes_of, meshes

SAMPLINGS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.9, "filter_thres": 0.3}}
each_sampling = pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
each_condition = pytest.mark.parametrize("options", CONDITIONS.values(), ids=CONDITIONS.keys())
SEED = 4


class Plain:
    """One row, without cache, batch or padding: every token from a pass over the whole sequence before it."""

    def __init__(self, network: MeshTransformer, row: int, sampling: dict[str, Any], noise: list[Tensor], **given: Any):
        self.network, self.row, self.sampling, self.noise = network, row, Sampling(**sampling), noise
        self.given = {name: value[row : row + 1] for name, value in given.items()}

    def logits(self, codes: list[int], guidance: dict[str, Any]) -> Tensor:
        whole = codes + [0] * (-len(codes) % self.network.tokens_per_face)
        made = self.network.forward_on_codes(torch.tensor([whole]).long(), return_loss=False, **self.given, **guidance)
        return made[0, len(codes)]

    def mesh(self, prompt: list[int], most: int, **guidance: Any) -> list[int]:
        k, end, codes = self.network.tokens_per_face, self.network.eos_id, list(prompt)
        while len(codes) < most * k:
            step, place = divmod(len(codes) - len(prompt), k)
            may_end = place == 0 and len(codes) > 0
            allowed = torch.arange(end + 1) < end + may_end
            noise = self.noise[step][self.row : self.row + 1, place]
            token = int(self.sampling.token(self.logits(codes, guidance)[None], noise, allowed))
            if token == end:
                break
            codes.append(token)
        return codes


def noise_for(network: MeshTransformer, rows: int, steps: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return [torch.rand(rows, network.tokens_per_face, BINS + 1, generator=generator) for _ in range(steps)]


def rows_of(codes: Tensor) -> list[list[int]]:
    flat = codes.flatten(1)
    for row in flat:
        assert ((row < 0).int().diff() >= 0).all()  # nothing stands behind the end
    return [row[row >= 0].tolist() for row in flat]


@torch.no_grad()
def ending(network: MeshTransformer) -> MeshTransformer:
    """With ends that come often."""
    network.tokens.vectors.own.weight[-1] *= 3
    return network


def given_for(network: MeshTransformer) -> dict[str, Any]:
    texts = {} if network.text_proj is None else {"texts": TEXTS}
    return texts | ({} if network.num_faces_emb is None else {"num_faces": torch.tensor([40, 2, 9])})


@each_sampling
@each_condition
@torch.no_grad()
def test_drawing_is_recomputing(options, sampling):
    """Behind prompts of two, no and one faces."""
    network, prompt = build(**options), codes_of(2, 0, 1)
    given, noise = given_for(network), noise_for(network, 3, 11)
    guidances: list[dict[str, Any]] = [{}]
    if "texts" in given:
        guidances.append({"cond_scale": 3.0, "remove_parallel_component": True, "rescale_phi": 0.5})
    for guidance in guidances if sampling["temperature"] == 0 else guidances[-1:]:
        codes = network.generate(
            prompt,
            return_codes=True,
            max_seq_len=35,
            seed=SEED,
            **given,
            **guidance,
            **{"filter_thres": 0, **sampling},
        )
        assert codes.shape[2] == 3 and codes.shape[1] % 3 == 0
        plain = [Plain(network, row, sampling, noise, **given) for row in range(3)]
        expected = [one.mesh(row, 3, **guidance) for one, row in zip(plain, rows_of(prompt), strict=True)]
        assert rows_of(codes) == expected
        assert all(row[: len(known)] == known for row, known in zip(expected, rows_of(prompt), strict=True))


@each_sampling
@pytest.mark.parametrize("tokenizer", [{"num_vertices_per_face": 4}, {"flat": True}], ids=["quads", "flat"])
@torch.no_grad()
def test_faces_of_four_and_tokens_without_faces(tokenizer, sampling):
    network = build(ToyTokenizer(**tokenizer), **TEXT)
    k = network.tokens_per_face
    prompt, noise = codes_of(2, 0, 1, tokens=k), noise_for(network, 3, 20)
    codes = network.generate(
        prompt, texts=TEXTS, return_codes=True, max_seq_len=3 * k, seed=SEED, **{"filter_thres": 0, **sampling}
    )
    assert codes.shape[2:] == (() if network.is_flat else (3,))
    expected = [Plain(network, row, sampling, noise, texts=TEXTS).mesh(rows_of(prompt)[row], 3) for row in range(3)]
    assert rows_of(codes) == expected


@torch.no_grad()
def test_rows_end_between_faces_and_none_is_empty():
    network = ending(build())
    codes = network.generate(batch_size=40, return_codes=True, seed=0, filter_thres=0)
    lengths = [len(row) for row in rows_of(codes)]
    assert codes.max() < BINS and min(lengths) == 9 and len(set(lengths)) > 3 and max(lengths) <= 99
    assert all(length % 9 == 0 for length in lengths)
    # A whole mesh may end at once, whoever stands beside it.
    prompt = torch.cat((codes.flatten(1)[:4], torch.full((1, codes[0].numel()), -1)))
    again = network.generate(prompt, return_codes=True, seed=0, temperature=0.0)
    for i in range(5):
        alone = network.generate(prompt[i : i + 1], return_codes=True, seed=0, temperature=0.0)
        assert rows_of(alone)[0] == rows_of(again)[i]
    kept = [len(row) == length for row, length in zip(rows_of(again), lengths[:4], strict=False)]
    assert any(kept) and len(rows_of(again)[4]) >= 9


@torch.no_grad()
def test_the_limit_is_in_tokens_and_whole_faces():
    network = build()
    network.tokens.vectors.own.weight[-1] = 0  # seldom the likeliest
    made = lambda **asked: network.generate(return_codes=True, temperature=0.0, **asked)
    assert made(max_seq_len=9).shape == made(max_seq_len=17).shape == (1, 3, 3)
    assert made(max_seq_len=18).shape == (1, 6, 3) and made().shape[1] <= 33
    prompt = codes_of(2, 2)
    assert torch.equal(made(prompt=prompt, max_seq_len=20).flatten(1), prompt)
    full = codes_of(11, 4)
    assert rows_of(made(prompt=full))[0] == rows_of(full)[0]
    assert torch.equal(made(prompt=full[:1]).flatten(1), full[:1])
    with pytest.raises(ValueError, match="max_seq_len=8 is less than a face, which has 9 tokens"):
        made(max_seq_len=8)
    with pytest.raises(ValueError, match="max_seq_len=100 is more than the 99"):
        made(max_seq_len=100)
    with pytest.raises(ValueError, match="a prompt of 2 faces is longer than max_seq_len=9"):
        made(prompt=prompt, max_seq_len=9)


@torch.no_grad()
def test_meshes_are_what_the_tokenizer_makes_of_the_codes():
    tokenizer = ToyTokenizer().train()
    network, asked = ending(build(tokenizer)), {"batch_size": 6, "seed": 1, "filter_thres": 0}
    codes = network.generate(**asked, return_codes=True)
    coordinates, mask = network.generate(**asked)
    assert coordinates.shape == (6, codes.shape[1] // 3, 3, 3) and mask.shape == coordinates.shape[:2]
    assert mask.sum(dim=1).tolist() == [len(row) // 9 for row in rows_of(codes)] and not mask.all()
    assert tokenizer.training
    expected = tokenizer.eval().decode_from_codes_to_faces(codes)
    assert torch.equal(coordinates, expected[0]) and torch.equal(mask, expected[1])
    files = network.generate(**asked, face_coords_to_file=lambda faces: tuple(faces.shape))
    assert files == [(int(count), 3, 3) for count in mask.sum(dim=1)]
    whole, batch = build(tokenizer), meshes()
    prompt = whole.tokenize(**batch)
    kept, _ = whole.generate(prompt, max_seq_len=36)
    corners = batch["vertices"][0][batch["faces"][0]]
    torch.testing.assert_close(kept[0], corners, atol=1 / BINS, rtol=0)
    bare = MeshTransformer(codebook_size=BINS, tokens_per_face=9, max_seq_len=18, dim=8, attn_depth=1)
    assert bare.generate(return_codes=True).shape[2] == 3
    with pytest.raises(ValueError, match="return_codes=True"):
        bare.generate(on_face=lambda face: pytest.fail("it was to be said before anything is drawn"))


@pytest.mark.parametrize("tokenizer", [{}, {"flat": True}], ids=["faces", "flat"])
@torch.no_grad()
def test_on_face_sees_each_new_face_once(tokenizer):
    network, seen = ending(build(ToyTokenizer(**tokenizer))), []
    prompt = codes_of(2, 1, tokens=network.tokens_per_face)
    asked = {"seed": 3, "return_codes": True, "filter_thres": 0}
    each = (2, 1) if network.is_flat else (2, 3, 3)
    for most in (99, 3 * network.tokens_per_face):
        seen.clear()
        codes = network.generate(prompt, **asked, max_seq_len=most, on_face=seen.append)
        assert torch.equal(codes, network.generate(prompt, **asked, max_seq_len=most))
        assert all(face.shape == each and (face >= 0).any() for face in seen)
        for row, known in enumerate(rows_of(prompt)):
            new = torch.cat([face[row].flatten() for face in seen])
            assert known + new[new >= 0].tolist() == rows_of(codes)[row]


@torch.no_grad()
def test_the_host_looks_seldom(monkeypatch):
    network, polls = build(), []
    network.tokens.vectors.own.weight[-1] = 0
    is_finished = decode._Session.is_finished
    monkeypatch.setattr(decode._Session, "is_finished", lambda session: polls.append(1) or is_finished(session))
    codes = network.generate(batch_size=3, return_codes=True, seed=0)
    assert codes.shape[1] > 3 and len(polls) <= 1 + codes.shape[1] // 3 // 16


@torch.no_grad()
def test_the_seed_decides():
    network = build(dropout=0.5)
    made = lambda seed: rows_of(network.generate(batch_size=4, return_codes=True, seed=seed, filter_thres=0.5))
    assert made(1) == made(1) != made(2)
    assert made(None) != made(None)
    first = made(1)
    network.train()
    assert made(1) == first
    assert network.training and network.fine.training


def test_it_generates_in_and_out_of_inference_mode():
    network = build()
    made = lambda: rows_of(network.generate(batch_size=2, return_codes=True, seed=1))
    with torch.inference_mode():
        inside = made()
    assert made() == inside


@torch.no_grad()
def test_one_text_or_prompt_is_for_all_rows():
    network = build(**TEXT)
    asked = {"return_codes": True, "temperature": 0.0, "max_seq_len": 45}
    both = network.generate(codes_of(1), texts=TEXTS, **asked)
    for row, text in enumerate(TEXTS):
        alone = network.generate(codes_of(1), texts=[text], **asked)
        assert rows_of(alone)[0] == rows_of(both)[row]
    four = network.generate(texts=TEXTS[:1], batch_size=4, **asked)
    assert len(four) == 4 and rows_of(four) == rows_of(four[:1]) * 4
    embedded = network.generate(codes_of(1), text_embeds=network.embed_texts(TEXTS), **asked)
    assert torch.equal(embedded, both)
    without = network.generate(codes_of(1), batch_size=3, **asked)
    assert rows_of(without) == rows_of(without[:1]) * 3 and rows_of(without) != rows_of(both)
    with pytest.raises(ValueError, match=r"different numbers, \[2, 3\]"):
        network.generate(batch_size=2, texts=TEXTS)
    with pytest.raises(ValueError, match=r"write \['a box'\]"):
        network.generate(texts="a box")
    with pytest.raises(ValueError, match=r"cond_scale=3\.0 guides by a text"):
        network.generate(cond_scale=3.0)
    with pytest.raises(ValueError, match="batch_size=0"):
        network.generate(batch_size=0)
    with pytest.raises(ValueError, match="prompts, texts and num_faces must not be empty"):
        network.generate(texts=[])
    with pytest.raises(ValueError, match="the prompt holds 8, and the codes are 0 to 7"):
        network.generate(torch.full((1, 9), BINS))


@torch.no_grad()
def test_a_number_of_faces_can_be_asked_for():
    network = build(condition_on_num_faces=True)
    with torch.no_grad():
        network.num_faces_emb.weight *= 4  # so that numbers count for more than chance
    asked = {"return_codes": True, "temperature": 0.0, "max_seq_len": 45}
    few, many = (network.generate(num_faces=count, **asked) for count in (3, 300))
    assert rows_of(few) != rows_of(many) and rows_of(network.generate(**asked)) not in (rows_of(few), rows_of(many))
    for counts in (torch.tensor([3, 300]), [3, 300]):
        assert rows_of(network.generate(num_faces=counts, **asked)) == rows_of(few) + rows_of(many)
    assert rows_of(network.generate(num_faces=[3], batch_size=2, **asked)) == rows_of(few) * 2
    with pytest.raises(ValueError, match="must be at least 1"):
        network.generate(num_faces=0)


def top_k() -> None:
    """By its name alone is a function known."""


@pytest.mark.parametrize(
    ("function", "keywords", "expected"),
    [
        (None, None, {"filter_thres": 0.7, "top_k": None, "top_p": None}),
        (None, {"thres": 0.8}, {"filter_thres": 0.8, "top_k": None, "top_p": None}),
        ("top_k", {}, {"filter_thres": 0.9, "top_k": None, "top_p": None}),
        (top_k, {"frac_num_tokens": 0.25}, {"filter_thres": 0.75, "top_k": None, "top_p": None}),
        (top_k, {"k": 5}, {"filter_thres": None, "top_k": 5, "top_p": None}),
        ("top_p", None, {"filter_thres": None, "top_k": None, "top_p": 0.9}),
        ("top_p", {"thres": 0.5}, {"filter_thres": None, "top_k": None, "top_p": 0.5}),
    ],
)
def test_filters_of_other_packages(function, keywords, expected):
    assert filters(function, keywords, filter_thres=0.7, top_k=None, top_p=None) == expected


@pytest.mark.parametrize(
    ("given", "kept"), [({}, 0.9), ({"top_k": 5}, None), ({"top_p": 0.5}, None), ({"filter_thres": 0}, 0)]
)
def test_a_filter_that_is_asked_for_is_the_only_one(given: dict[str, Any], kept: float | None) -> None:
    asked = {"filter_thres": None, "top_k": None, "top_p": None, **given}
    assert filters(None, None, **asked) == {**asked, "filter_thres": kept}


def test_other_filters_are_refused():
    with pytest.raises(ValueError, match="'top_a': a step that is captured"):
        build().generate(filter_logits_fn="top_a")
    with pytest.raises(ValueError, match="top_p does not know k, but thres"):
        build().generate(filter_logits_fn="top_p", filter_kwargs={"k": 3})
    assert rows_of(build().generate(filter_kwargs={"k": 1}, return_codes=True, seed=0)) == rows_of(
        build().generate(temperature=0.0, return_codes=True)
    )


@pytest.mark.slow
def test_it_learns_which_mesh_a_text_means():
    torch.manual_seed(0)
    tokenizer = ToyTokenizer()
    options = {"condition_on_num_faces": True, "num_sos_tokens": 1, "text_condition_cond_drop_prob": 0.2, **TEXT}
    network = MeshTransformer(tokenizer, dim=(32, 24), attn_depth=2, attn_heads=2, attn_dim_head=16, **options).train()
    codes = tokenizer.eval().tokenize(**meshes())
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    for _ in range(250):
        optimizer.zero_grad()
        loss = network(codes=codes, texts=TEXTS)
        loss.backward()
        optimizer.step()
    network.eval()
    assert network(codes=codes, texts=TEXTS) < 0.05
    for guidance in ({}, {"cond_scale": 2.0}, {"num_faces": torch.tensor([4, 2, 3])}):
        made = network.generate(texts=TEXTS, temperature=0.0, return_codes=True, **guidance)
        assert rows_of(made) == rows_of(codes)
    completed = network.generate(codes[:, :3], texts=TEXTS, temperature=0.0, return_codes=True)
    assert rows_of(completed) == rows_of(codes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each_condition
@torch.no_grad()
def test_captured_faces_are_eager_faces(options):
    """With other texts, prompts and numbers of faces at each call, which a captured graph must read anew."""
    network = build(**options).cuda()
    model = generate._Faces(network)
    given, made = given_for(network), {False: [], True: []}
    for capture in made:
        decoder = Decoder(model, eos_id=network.eos_id, dtype=torch.float32, capture=capture, compile=False)
        generate._decoders[network] = decoder
        for call in range(3):
            asked = {name: [*value][call:] + [*value][:call] for name, value in given.items()}
            if "num_faces" in asked:
                asked["num_faces"] = torch.stack(asked["num_faces"])
            scale = {"cond_scale": 2.0} if "texts" in given else {}
            prompt = codes_of(2, 0, 1, seed=call)
            made[capture].append(network.generate(prompt, return_codes=True, seed=call, **asked, **scale).tolist())
    assert made[True] == made[False]
