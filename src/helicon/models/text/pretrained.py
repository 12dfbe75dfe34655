"""Any text encoder of `transformers` (T5, CLIP, BERT and their kin), frozen, by hub name or folder.

Every text is encoded alone and unpadded, then padded into the batch. So the embeddings of a text do not depend, to the
last bit, on its batch mates or on whether they came from the cache; otherwise a resumed run, whose cache is empty,
would differ from one that never stopped. The price is paid once per text: after that it comes from the cache.

Letters: b texts, n tokens, d features.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from helicon.models.text.base import TextEmbedding, TruncationNotice, readable
from helicon.models.text.cache import EmbeddingCache
from helicon.nn.devices import sent
from helicon.nn.lengths import before
from helicon.nn.network import Network


class PretrainedTextEncoder(Network):
    """A frozen encoder: always in evaluation mode, never optimised, no gradients, weights never saved again.

    Arguments:
        name_or_folder  of the model and its tokenizer, which are read with `transformers`
        max_length      longest text in tokens (less where the model takes less); longer ones are cut
        layer           which of the model's hidden states to give, counted as transformers does (0 = the token
                        embeddings, -2 = before the last layer); None for the model's output
        cache_entries   texts remembered in memory
        cache_folder    also remember every text here, over runs

    A network given this one saves its name and a fingerprint; loading reads the model again from where it was, and
    refuses another one in its place. Usage: `PretrainedTextEncoder("google/t5-v1_1-base").encode(["a red circle"])`.
    """

    # Where a machine keeps its cache is no property of the model.
    unsaved_arguments: ClassVar[tuple[str, ...]] = ("cache_entries", "cache_folder")

    backbone: nn.Module

    def __init__(
        self,
        name_or_folder: str | Path,
        *,
        max_length: int = 256,
        layer: int | None = None,
        cache_entries: int = 4096,
        cache_folder: str | Path | None = None,
    ):
        super().__init__()
        is_folder = Path(name_or_folder).is_dir()
        self.name = str(Path(name_or_folder).resolve() if is_folder else name_or_folder)
        self.arguments["name_or_folder"] = self.name  # a relative path would be lost in another working directory
        self.tokenizer, backbone = _load(self.name)
        # Not a submodule: a parent must not optimise, average, initialise, save or switch the mode of these weights.
        object.__setattr__(self, "backbone", backbone)
        config = backbone.config.get_text_config()
        self.dim: int = config.hidden_size
        self.layer = _checked_layer(layer, config.num_hidden_layers)
        if max_length < 1:
            raise ValueError(f"max_length={max_length} must be at least 1")
        positions = getattr(config, "max_position_embeddings", None) or max_length
        self.max_length = min(max_length, self.tokenizer.model_max_length, positions)
        self.fingerprint = _fingerprint(self.tokenizer, backbone)
        self.cache = EmbeddingCache(cache_entries, None if cache_folder is None else Path(cache_folder))
        self.truncation = TruncationNotice(self.max_length, "tokens")

    @property
    def device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.backbone.parameters()).dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PretrainedTextEncoder":
        self.backbone._apply(fn, recurse)  # moves with its parent
        return super()._apply(fn, recurse)

    def encode(self, texts: Sequence[str]) -> TextEmbedding:
        identity = [self.fingerprint, self.layer, self.max_length, str(self.dtype)]
        rows = [self.cache.get(text, identity, self._encode_alone) for text in readable(texts)]
        length = max([1, *map(len, rows)])  # a text of no tokens is one padded token
        padded = pad_sequence([torch.zeros(length, self.dim, dtype=self.dtype), *rows], batch_first=True)[1:]
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
        mask = before(lengths, length)
        return TextEmbedding(sent(padded, self.device), sent(mask, self.device))

    forward = encode

    @torch.no_grad()
    def _encode_alone(self, text: str) -> Float[Tensor, "n d"]:
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        if len(ids) > self.max_length:
            self.truncation.give(text, len(ids))
            ids = self.tokenizer(text, truncation=True, max_length=self.max_length)["input_ids"]
        if not ids:
            return torch.zeros(0, self.dim, dtype=self.dtype)
        tokens = torch.tensor([ids], device=self.device)
        # What is remembered must not depend on whether the caller computes in half precision.
        with torch.autocast(self.device.type, enabled=False):
            output = self.backbone(
                input_ids=tokens,
                attention_mask=torch.ones_like(tokens),
                output_hidden_states=self.layer is not None,
            )
        return (output.last_hidden_state if self.layer is None else output.hidden_states[self.layer])[0]

    def own_state(self) -> dict[str, Tensor]:
        """Not the weights, which stay where they are, but what tells whether they are still the same."""
        return {"fingerprint": torch.frombuffer(bytearray.fromhex(self.fingerprint), dtype=torch.uint8)}

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        saved = state.get("fingerprint")
        if saved is None or not torch.equal(saved.cpu(), self.own_state()["fingerprint"]):
            raise ValueError(
                f"the text encoder at {self.name} is not the one this network was trained with: put the old one back"
            )


def _load(name: str) -> tuple[Any, Any]:
    """The tokenizer and the frozen encoder: of an encoder-decoder the encoder, of a text-image pair the text half."""
    from transformers import (
        MODEL_FOR_TEXT_ENCODING_MAPPING,
        AutoConfig,
        AutoModel,
        AutoModelForTextEncoding,
        AutoTokenizer,
    )

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
        if type(config) not in MODEL_FOR_TEXT_ENCODING_MAPPING:
            config = getattr(config, "text_config", config)
        has_text_class = type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING
        factory = AutoModelForTextEncoding if has_text_class else AutoModel
        model = factory.from_pretrained(name, config=config, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"the text encoder {name!r} could not be read ({reason}): give the folder of a downloaded model, "
            f"or use the built-in encoder, 'bytes'"
        ) from error
    if config.is_encoder_decoder and not has_text_class:
        model = model.get_encoder()
    return tokenizer, model.eval().requires_grad_(False)


def _checked_layer(layer: int | None, num_layers: int) -> int | None:
    if layer is not None and not -num_layers - 1 <= layer <= num_layers:
        raise ValueError(
            f"layer={layer} must lie between {-num_layers - 1} and {num_layers}: the model has {num_layers} layers"
        )
    return layer


def _fingerprint(tokenizer: Any, backbone: nn.Module) -> str:
    """Tells models apart without reading all their weights: the vocabulary, and a few numbers of every tensor."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(json.dumps([type(backbone).__name__, sorted(tokenizer.get_vocab().items())]).encode())
    for name, value in backbone.state_dict().items():
        flat = value.detach().flatten()
        some = flat[:: max(1, len(flat) // 64)][:64].double().cpu()
        digest.update(json.dumps([name, list(value.shape), some.tolist()]).encode())
    return digest.hexdigest()
