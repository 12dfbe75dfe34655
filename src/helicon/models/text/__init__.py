"""Text encoders behind one contract: any frozen one of `transformers`, or the built-in trainable one over bytes."""

from collections.abc import Mapping
from typing import Any

from helicon.config import check
from helicon.models.text.base import TextEmbedding, TextEncoder
from helicon.models.text.byte import ByteTextEncoder
from helicon.models.text.pretrained import PretrainedTextEncoder

__all__ = ["ByteTextEncoder", "PretrainedTextEncoder", "TextEmbedding", "TextEncoder", "build_text_encoder"]


def build_text_encoder(spec: str | Mapping[str, Any] | None = None) -> ByteTextEncoder | PretrainedTextEncoder:
    """The encoder a recipe asks for.

    None or "bytes" is the built-in one, any other string the hub name or folder of a pretrained one; a mapping holds
    that string under `name` and the encoder's keyword arguments beside it: `{name: bytes, dim: 128}`.
    """
    options = dict(spec) if isinstance(spec, Mapping) else {"name": spec}
    name = options.pop("name", None)
    if name is None or name == "bytes":
        return ByteTextEncoder(**check(ByteTextEncoder, options, "text encoder"))
    return PretrainedTextEncoder(**check(PretrainedTextEncoder, {"name_or_folder": name, **options}, "text encoder"))
