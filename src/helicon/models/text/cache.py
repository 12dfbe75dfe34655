"""Remembers what a frozen encoder made of a text: the latest in memory, all of them in a folder where one is given."""

import hashlib
import json
import logging
import os
import tempfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor

from helicon.nn.network import load_state

logger = logging.getLogger(__name__)


class EmbeddingCache:
    """`get(text, identity, compute)` computes a text's embeddings once.

    `identity` is everything else the embeddings depend on (weights, tokenizer, settings). A file is named by the hash
    of identity and text, and appears whole or not at all, so several processes may share a folder. The folder only
    grows: delete it to start over.
    """

    def __init__(self, max_entries: int, folder: Path | None):
        if max_entries < 0:
            raise ValueError(f"cache_entries={max_entries} must be at least 0")
        self.max_entries, self.folder = max_entries, folder
        self.entries: OrderedDict[str, Float[Tensor, "n d"]] = OrderedDict()

    def get(self, text: str, identity: Any, compute: Callable[[str], Float[Tensor, "n d"]]) -> Float[Tensor, "n d"]:
        key = hashlib.blake2b(json.dumps([identity, text]).encode(), digest_size=20).hexdigest()
        embeddings = self.entries.get(key)
        if embeddings is None:
            embeddings = self._read(key)
        if embeddings is None:
            embeddings = compute(text).cpu()
            self._write(key, embeddings)
        self.entries[key] = embeddings
        self.entries.move_to_end(key)
        if len(self.entries) > self.max_entries:
            self.entries.popitem(last=False)
        return embeddings

    def _path(self, key: str) -> Path | None:
        return None if self.folder is None else self.folder / key[:2] / f"{key}.safetensors"

    def _read(self, key: str) -> Float[Tensor, "n d"] | None:
        path = self._path(key)
        if path is None or not path.exists():
            return None
        try:
            return load_state(path)["embeddings"]
        except (ValueError, KeyError) as error:
            logger.warning("a damaged file of cached embeddings is computed anew: %s", error)
            return None

    def _write(self, key: str, embeddings: Float[Tensor, "n d"]) -> None:
        path = self._path(key)
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(save({"embeddings": embeddings.contiguous()}))
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
