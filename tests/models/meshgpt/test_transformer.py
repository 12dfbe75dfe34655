"""The network: what it predicts, what it learns from, and what its keywords do."""

import inspect
import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from helicon.models.meshgpt import layers
from helicon.models.meshgpt.layers import bucket_of, mean_cross_entropy
from helicon.models.meshgpt.transformer import MeshTransformer
from helicon.nn.network import load_network
from helicon.nn.sampling import guide
from models.meshgpt.toy_tokenizer import BINS, CONDITIONS, SIZES, TEXT, TEXTS, ToyTokenizer, build, codes_of, meshes
from models.text.test_conditioning import write_t5

TOKENIZERS = {"triangles": {}, "quads": {"num_vertices_per_face": 4}, "flat": {"flat": True}}
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
each_condition = pytest.mark.parametrize("options", CONDITIONS.values(), ids=CONDITIONS.keys())


def given(options: dict[str, Any], rows: slice = slice(None)) -> dict[str, Any]:
    return {"texts": TEXTS[rows]} if options else {}


def own_loss(network: MeshTransformer, row: torch.Tensor, **condition: Any) -> tuple[float, int]:
    """Of one row without padding: the cross-entropy of its logits, token by token."""
    row = row[None, row >= 0]
    logits = network.forward_on_codes(row, return_loss=False, **condition)[0]
    labels = torch.cat((row[0], torch.tensor([network.eos_id])))
    return F.cross_entropy(logits, labels, reduction="sum").item(), len(labels)


@each_tokenizer
@each_condition
@torch.no_grad()
def test_the_loss_of_a_padded_batch_is_that_of_its_rows_alone(options, tokenizer):
    if tokenizer.get("flat"):
        options = {name: value for name, value in options.items() if name != "fine_cross_attend_text"}
    network = build(ToyTokenizer(**tokenizer), **options)
    k = network.tokens_per_face
    counts = torch.tensor([4, 1, 2])
    codes = torch.cat((codes_of(4, 1, 2, tokens=k), torch.full((3, 2 * k), -1)), dim=1)
    numbers = {"num_faces": counts} if network.num_faces_emb is not None else {}
    rows = [
        own_loss(network, codes[i], **given(options, slice(i, i + 1)), **{n: v[i : i + 1] for n, v in numbers.items()})
        for i in range(3)
    ]
    expected = sum(loss for loss, _ in rows) / sum(count for _, count in rows)
    loss = network(codes=codes, **given(options), **numbers)
    torch.testing.assert_close(loss.item(), expected, atol=1e-5, rtol=1e-5)
    assert network.num_labels(codes) == sum(count for _, count in rows)


@each_tokenizer
def test_labels_are_codes_the_end_and_nothing_else(tokenizer):
    """No label but -1 stands past the end of a row, and the end stands in the place of a first token."""
    network = build(ToyTokenizer(**tokenizer))
    k, codes = network.tokens_per_face, codes_of(3, 0, 2, tokens=network.tokens_per_face)
    labels = network.labels(network.by_face(codes)).flatten(1)
    for row, length in zip(labels, (3, 0, 2), strict=True):
        n = length * k
        assert row[n] == network.eos_id and (row[n + 1 :] == -1).all()
        assert (row[:n] >= 0).all() and (row[:n] < BINS).all()
    cut = network.labels(network.by_face(codes), append_eos=False)
    assert (cut >= 0).sum() == 5 * k and not (cut == network.eos_id).any()


@each_condition
@torch.no_grad()
def test_logits_depend_on_what_is_before_and_on_nothing_after(options):
    network, codes = build(**options), codes_of(3, 3, 3)
    before = network.forward_on_codes(codes, return_loss=False, **given(options))
    assert before.shape == (3, 28, BINS + 1)
    for place in (0, 8, 9, 13, 26):
        changed = codes.clone()
        changed[:, place] = (changed[:, place] + 1) % BINS
        after = network.forward_on_codes(changed, return_loss=False, **given(options))
        torch.testing.assert_close(after[:, : place + 1], before[:, : place + 1])
        assert not torch.allclose(after[:, place + 1], before[:, place + 1], atol=1e-3)


def test_every_weight_learns_whatever_the_options():
    """Unused ones would need a search at every distributed step; and keywords must not be ignored."""
    for options in CONDITIONS.values():
        network = build(**options).train()
        network(codes=codes_of(3, 1, 2), **given(options), cond_drop_prob=0.5).backward()
        assert [name for name, weight in network.named_parameters() if weight.grad is None] == []


def test_keywords_reach_the_layers():
    network = build(fine_attn_heads=5, fine_attn_dim_head=2, fine_attn_depth=3, dropout=0.25)
    coarse, fine = network.coarse.attention_options, network.fine.attention_options
    assert (fine.heads, fine.dim_head, fine.dim, network.fine.depth) == (5, 2, 12, 3)
    assert (coarse.heads, coarse.dim_head, coarse.dim, network.coarse.depth) == (2, 8, 16, 2)
    assert coarse.dropout == fine.dropout == 0.25
    asked = {"ff_glu": False, "attn_num_mem_kv": 0, "attn_kv_heads": 1, "attn_qk_norm": False, "ff_mult": 2}
    network = build(attn_kwargs=asked)
    layer = network.coarse.layers[0]
    assert network.coarse.num_registers == 0 and layer.feed_forward.block.glu is None
    assert network.coarse.attention_options.kv_heads == 1 and not network.fine.attention_options.qk_norm
    assert layer.feed_forward.block.to_hidden.weight.shape == (32, 16)
    assert build().coarse.num_registers == 4 and build().coarse.layers[0].feed_forward.block.glu == "geglu"
    assert build(attn_kwargs={"ff_swish": True}).fine.layers[0].feed_forward.block.glu == "swiglu"
    assert len(build().start) == 1 and len(build(**TEXT).start) == 4 and len(build(num_sos_tokens=2).start) == 2


def test_the_defaults_are_valid_and_as_large_as_said():
    signature = inspect.signature(MeshTransformer.__init__)
    assert signature.parameters["max_seq_len"].default == 8192
    with torch.device("meta"):
        network = MeshTransformer(codebook_size=16384, tokens_per_face=6)
    assert (network.max_seq_len, network.max_faces) == (8190, 1365)
    assert round(sum(weight.numel() for weight in network.parameters()) / 1e6) == 67


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_seq_len": 8}, "max_seq_len=8 is less than a face, which has 9"),
        ({"coarse_pre_gateloop_depth": 1}, "coarse_pre_gateloop_depth=1"),
        ({"coarse_post_gateloop_depth": 1}, "coarse_post_gateloop_depth=1"),
        ({"fine_pre_gateloop_depth": 3}, "fine_pre_gateloop_depth=3"),
        ({"gateloop_use_heinsen": True}, "gateloop_use_heinsen=True"),
        ({"attn_kwargs": {"attn_talking_heads": True}}, "attn_talking_heads is not known"),
        (
            {"attn_kwargs": {"num_residual_streams": 2}},
            "num_residual_streams=2: there is one residual stream, leave it out",
        ),
        ({"attn_kwargs": {"ff_glu": False, "ff_swish": True}}, "ff_glu=True"),
        ({"cross_attn_num_mem_kv": 2}, "cross_attn_num_mem_kv=2: there is one learned key, leave it out"),
        ({"pad_id": 0}, "pad_id=0"),
        ({"num_sos_tokens": 0}, "num_sos_tokens=0"),
        ({"text_condition_cond_drop_prob": 2.0}, "text_condition_cond_drop_prob=2.0 is a probability"),
        ({"quads": True}, "num_vertices_per_face=3"),
        ({"codebook_size": 9}, "codebook_size=8"),
        ({"tokens_per_face": 6}, "tokens_per_face=9"),
        ({"text_cond_with_film": True}, "text_cond_with_film belong to condition_on_text"),
        ({**TEXT, "cond_as_self_attn_prefix": True, "fine_cross_attend_text": True}, "cond_as_self_attn_prefix=False"),
        ({"condition_on_text": True, "text_condition_model_types": ("t5", "clip")}, "one encoder"),
        ({**TEXT, "text_condition_model_types": ("t5",), "text_embed_dim": 3}, "come embedded"),
    ],
)
def test_senseless_keywords_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        MeshTransformer(ToyTokenizer(), **{**SIZES, **options})


def test_codes_of_another_tokenizer_are_refused():
    network, codes = build(), codes_of(2, 3)
    codes[1, 4] = BINS
    with pytest.raises(ValueError, match=f"code {BINS} is none of the tokenizer's, which are 0 to {BINS - 1}"):
        network(codes=codes)
    with pytest.raises(ValueError, match=r"cond_drop_prob=-1\.0 is a probability: it must be between 0 and 1"):
        network(codes=codes_of(2, 3), cond_drop_prob=-1.0)


def test_the_defaults_of_the_reference_written_out_mean_what_leaving_them_out_means():
    copied = build(
        **TEXT,
        attn_kwargs={
            "ff_glu": True,
            "attn_num_mem_kv": 4,
            "add_value_residual": True,
            "learned_value_residual_mix": True,
            "num_residual_streams": 4,
        },
        flash_attn=True,
        cross_attn_num_mem_kv=4,
        dropout=0.0,
        coarse_pre_gateloop_depth=2,
        coarse_post_gateloop_depth=0,
        coarse_adaptive_rmsnorm=False,
        fine_pre_gateloop_depth=2,
        gateloop_use_heinsen=False,
        fine_cross_attend_text=False,
        pad_id=-1,
        num_sos_tokens=None,
        text_cond_with_film=False,
        text_condition_cond_drop_prob=0.25,
        quads=False,
    )
    asked = {"codes": codes_of(3, 1), "texts": TEXTS[:2], "cache": None}
    assert copied(**asked) == build(**TEXT)(**asked)
    encoder = {"text_condition_model_types": ("t5",), "text_condition_model_kwargs": ({},)}
    assert build(condition_on_text=False, **encoder).text_encoder is None  # and nothing is downloaded


def test_senseless_inputs_are_refused():
    network = build()
    with pytest.raises(ValueError, match="cache: one is kept by generate and nobody else"):
        network(codes=codes_of(2), cache=())
    with pytest.raises(ValueError, match="nothing to learn from"):
        network(vertices=torch.rand(1, 3, 3))
    with pytest.raises(
        ValueError, match=r"\[1, 10\] are not .* of 9 tokens: give \[b, n, 3\] with n a multiple of 3, or"
    ):
        network(codes=torch.zeros(1, 10, dtype=torch.long))
    with pytest.raises(ValueError, match=r"give \[b, n, 3\]"):
        network(codes=torch.zeros(1, 9, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="108 tokens are more than max_seq_len=99"):
        network(codes=torch.zeros(1, 108, dtype=torch.long))
    with pytest.raises(ValueError, match="does not take texts"):
        network(codes=codes_of(2), texts=["a box"])
    with pytest.raises(ValueError, match="condition_on_num_faces=True"):
        network(codes=codes_of(2), num_faces=torch.tensor([2]))
    with pytest.raises(ValueError, match="this network reads texts"):
        build(**TEXT)(codes=codes_of(2))
    with pytest.raises(ValueError, match="2 texts cannot belong to 3 rows"):
        build(**TEXT)(codes=codes_of(2, 1, 1), texts=TEXTS[:2])
    with pytest.raises(ValueError, match="return_loss=False"):
        build(**TEXT)(codes=codes_of(2), texts=TEXTS[:1], cond_scale=2.0)
    with pytest.raises(ValueError, match="no text to be guided by"):
        network.forward_on_codes(codes_of(2), return_loss=False, cond_scale=2.0)
    with pytest.raises(ValueError, match="without an autoencoder give codebook_size"):
        MeshTransformer(codebook_size=4)
    with pytest.raises(ValueError, match="multiple of the 3 vertices"):
        MeshTransformer(codebook_size=4, tokens_per_face=4)
    with pytest.raises(ValueError, match="give one number"):
        MeshTransformer(ToyTokenizer(flat=True), dim=(8, 4))
    bare = MeshTransformer(codebook_size=BINS, tokens_per_face=9, **SIZES)
    with pytest.raises(ValueError, match="built without an autoencoder"):
        bare(**meshes())
    flat = build(ToyTokenizer(flat=True), condition_on_num_faces=True)
    with pytest.raises(ValueError, match="give num_faces"):
        flat(codes=codes_of(5, tokens=1))


@each_tokenizer
@torch.no_grad()
def test_codes_alone_give_the_loss_of_the_meshes(tokenizer):
    """With the tokenizer, and without one; where it is conditioned on their number, faces are counted in either."""
    tokenizer = ToyTokenizer(**tokenizer)
    network, batch = build(tokenizer, condition_on_num_faces=True), meshes(tokenizer.num_vertices_per_face)
    codes, counts = tokenizer.eval().tokenize(**batch), torch.tensor([4, 2, 3])
    loss = network(**batch)
    numbers = {"num_faces": counts} if tokenizer.flat else {}
    assert network(codes=codes, **numbers) == network(codes=codes.flatten(1), num_faces=counts) == loss
    sizes = {"codebook_size": BINS, "tokens_per_face": tokenizer.tokens_per_face}
    quads = tokenizer.num_vertices_per_face == 4
    dim = 16 if tokenizer.flat else SIZES["dim"]
    bare = MeshTransformer(**{**SIZES, "dim": dim}, **sizes, quads=quads, condition_on_num_faces=True).eval()
    bare.load_own_state(network.own_state())
    assert bare(codes=codes, num_faces=counts) == loss
    assert network(codes=codes, num_faces=counts * 4) != loss


@torch.no_grad()
def test_a_tokenizer_keeps_its_own_padding():
    class Own(ToyTokenizer):
        pad_id = -7

        def tokenize(self, *mesh):
            codes = super().tokenize(*mesh)
            return codes.where(codes >= 0, -7)

    network = build(Own())
    assert network(**meshes()) == build(ToyTokenizer())(**meshes())
    assert network.autoencoder.pad_id == -7


def test_the_tokenizer_is_used_and_left_as_it_is(tmp_path):
    tokenizer = ToyTokenizer().train()
    before = {name: weight.clone() for name, weight in tokenizer.state_dict().items()}
    network = build(tokenizer).train()
    assert len({network(**meshes()).item() for _ in range(3)}) == 1  # its dropout is off
    network(**meshes()).backward()
    assert tokenizer.training and tokenizer.dropout.training and tokenizer.pad_id == -1
    assert tokenizer.scale.requires_grad and tokenizer.scale.grad is None
    used = network.autoencoder
    assert not used.training and not used.scale.requires_grad and torch.equal(used.scale, tokenizer.scale)
    assert all(torch.equal(weight, before[name]) for name, weight in tokenizer.state_dict().items())
    assert not any("autoencoder" in name for name in (*network.state_dict(), *dict(network.named_modules())))
    network.double()
    assert used.scale.dtype == torch.float32
    network.float().save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["arguments"]["autoencoder"] == {
        "stage": "autoencoder"
    }
    loaded = load_network(tmp_path / "saved")
    assert loaded.autoencoder is not tokenizer
    assert loaded(**meshes()) == network.eval()(**meshes())


@each_condition
@torch.no_grad()
def test_guided_logits_are_two_passes(options):
    if not options:
        return
    network, codes = build(**options), codes_of(3, 1, 2)
    numbers = {"num_faces": torch.tensor([3, 1, 2])} if network.num_faces_emb is not None else {}
    guidance = {"rescale_phi": 0.3, "remove_parallel_component": True}
    asked = {**given(options), **numbers}
    cond = network.forward_on_codes(codes, return_loss=False, **asked)
    # Without the text, but with the number of faces: an empty context, which is what a dropped text is.
    nothing = {"text_embeds": torch.zeros(3, 2, 12), "text_mask": torch.zeros(3, 2, dtype=torch.bool)}
    null = network.forward_on_codes(codes, return_loss=False, **nothing, **numbers)
    guided = network.forward_on_codes(codes, return_loss=False, cond_scale=2.5, **guidance, **asked)
    torch.testing.assert_close(guided, guide(cond, null, 2.5, **guidance), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(guided, guide(cond, null, 2.5), atol=1e-2)


@torch.no_grad()
def test_texts_are_dropped_row_by_row_in_training_alone():
    network = build(**{**CONDITIONS["everything"], "text_condition_cond_drop_prob": 0.5})
    drawn = lambda: network.condition(64, texts=["a box"], num_faces=torch.tensor([3]))
    torch.manual_seed(0)
    assert drawn().text.mask.all() and len(drawn().num_faces.unique(dim=0)) == 1
    network.train()
    condition = drawn()
    has_text = condition.text.mask.all(dim=1)
    has_count = (condition.num_faces == network.num_faces_emb.weight[bucket_of(torch.tensor([3]))]).all(dim=1)
    assert torch.equal(has_text, condition.text.mask.any(dim=1))
    for kept in (has_text, has_count):
        assert 20 < kept.sum() < 44
    assert 5 < (has_text & ~has_count).sum() < 30  # each by itself
    assert (condition.num_faces[~has_count] == network.num_faces_emb.weight[0]).all()


@torch.no_grad()
def test_each_way_to_read_a_text_reads_it():
    for options in CONDITIONS.values():
        if not options:
            continue
        network, codes = build(**options), codes_of(3)
        first = network(codes=codes, texts=["a box"])
        assert network(codes=codes, texts=["a big box"]) != first
        assert network(codes=codes, texts=["a box"], cond_drop_prob=1.0) != first
        read = network.read_texts(["a box"], multiple_of=16)
        torch.testing.assert_close(network(codes=codes, **read), first)
        torch.testing.assert_close(network(codes=codes, text_embeds=network.embed_texts(["a box"])), first)
        for name, weights in (("film", network.film), ("modulation", network.coarse.modulation)):
            if weights is not None:
                weights = weights.shared if name == "modulation" else weights
                kept = weights.weight.clone()
                weights.weight.zero_()
                assert network(codes=codes, texts=["a box"]) != first
                weights.weight.copy_(kept)


def test_a_frozen_encoder_is_found_again(tmp_path, monkeypatch):
    """By its type with a name, or by its folder; where that is, does not depend on the working directory."""
    folder = write_t5(tmp_path / "t5")
    monkeypatch.chdir(tmp_path)
    for asked in (
        {"text_condition_model_types": ("t5",), "text_condition_model_kwargs": ({"name": "t5", "max_length": 7},)},
        {"text_condition_model_types": ("./t5",)},
    ):
        network = build(condition_on_text=True, **asked)
        assert network.arguments["text_condition_model_types"] == [str(folder.resolve())]
        network.save(tmp_path / "saved")
        monkeypatch.chdir(tmp_path / "saved")
        loaded = load_network(tmp_path / "saved")
        monkeypatch.chdir(tmp_path)
        assert loaded.text_encoder.max_length == network.text_encoder.max_length
        assert loaded(codes=codes_of(2), texts=["a"]) == network(codes=codes_of(2), texts=["a"])


def test_texts_may_come_embedded():
    network = build(condition_on_text=True, text_embed_dim=5)
    assert network.text_encoder is None
    embeds = torch.randn(2, 3, 5)
    assert network(codes=codes_of(2, 1), text_embeds=embeds) != network(codes=codes_of(2, 1), text_embeds=-embeds)


def test_numbers_of_faces_have_few_buckets():
    buckets = bucket_of(torch.tensor([0, 1, 2, 3, 100, 101, 800, 1600, 10**9]))
    assert buckets.tolist() == [1, 1, 5, 7, 27, 27, 39, 43, layers.NUM_BUCKETS]
    assert (bucket_of(torch.arange(1, 5000)).diff() >= 0).all()


@pytest.mark.parametrize("rows_at_once", [1, 4, 100])
def test_the_loss_in_parts_is_the_loss(rows_at_once, monkeypatch):
    torch.manual_seed(0)
    hidden, weight = torch.randn(11, 6, requires_grad=True), torch.randn(7, 6, requires_grad=True)
    labels = torch.tensor([3, -1, 0, 6, -1, -1, -1, -1, 2, 2, -1])
    F.cross_entropy(hidden @ weight.T, labels, ignore_index=-1).backward()
    expected = [hidden.grad.clone(), weight.grad.clone()]
    hidden.grad = weight.grad = None
    monkeypatch.setattr(layers, "LOGITS_AT_ONCE", rows_at_once * 7)
    made = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, w: made.append(len(x)) or linear(x, w))
    loss = mean_cross_entropy(hidden, weight, labels)
    loss.backward()
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, labels, ignore_index=-1))
    torch.testing.assert_close([hidden.grad, weight.grad], expected)
    assert max(made) <= rows_at_once and len(made) == (1 if rows_at_once == 100 else 2 * math.ceil(11 / rows_at_once))
    with torch.no_grad():
        assert mean_cross_entropy(hidden, weight, torch.full((11,), -1)) == 0  # nothing to learn from, and no NaN


def test_the_loss_is_fp32_under_autocast():
    network = build().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = network(codes=codes_of(3, 1))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, network(codes=codes_of(3, 1)), atol=0.2, rtol=0.05)
    seen = []
    for transformer in (network.coarse, network.fine):
        transformer.layers[-1].register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        network(codes=codes_of(3, 1))
    assert seen == [torch.float32] * 2  # what layers add up in


COMPILED = """
import torch
from helicon.models.meshgpt import layers
from helicon.models.meshgpt.transformer import MeshTransformer
layers.LOGITS_AT_ONCE = 200  # several parts
torch.manual_seed(0)
network = MeshTransformer(
    codebook_size=8, tokens_per_face=6, dim=(16, 12), attn_depth=1, attn_heads=2, attn_dim_head=8, fine_attn_heads=2,
    fine_attn_dim_head=4, condition_on_text=True, text_embed_dim=5, text_cond_with_film=True, fine_cross_attend_text=True,
    coarse_adaptive_rmsnorm=True, condition_on_num_faces=True, fine_attn_depth=1,
)
codes = torch.randint(8, (2, 18))
codes[1, 6:] = -1
inputs = {"codes": codes, "text_embeds": torch.randn(2, 3, 5), "cond_drop_prob": 0.0}
def run(call):
    network.zero_grad()
    loss = call(**inputs)
    loss.backward()
    return loss.item(), torch.stack([w.grad.norm() for w in network.parameters()])
plain, compiled = run(network), run(torch.compile(network, fullgraph=True, backend="aot_eager"))
torch.testing.assert_close(compiled[0], plain[0])
torch.testing.assert_close(compiled[1], plain[1], atol=1e-5, rtol=1e-4)
"""


@pytest.mark.slow
def test_it_compiles_as_one_graph():
    subprocess.run([sys.executable, "-c", COMPILED], check=True, timeout=600)
