"""The encoder a recipe asks for."""

import subprocess
import sys

import pytest

from helicon.config import ConfigError
from helicon.models.text import ByteTextEncoder, build_text_encoder


def test_the_default_is_the_built_in_encoder() -> None:
    assert isinstance(build_text_encoder(), ByteTextEncoder)
    assert isinstance(build_text_encoder("bytes"), ByteTextEncoder)
    assert build_text_encoder({"name": "bytes", "dim": 24, "depth": 1}).dim == 24
    assert build_text_encoder({"dim": 24, "depth": 1}).dim == 24


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"text encoder has no argument 'dpeth': did you mean depth\?"):
        build_text_encoder({"dpeth": 1})
    with pytest.raises(ConfigError, match="wants int"):
        build_text_encoder({"dim": "wide"})


def test_a_name_is_a_pretrained_encoder(tmp_path) -> None:
    for spec in (str(tmp_path), {"name": str(tmp_path), "max_length": 7}):
        with pytest.raises(ValueError, match="use the built-in encoder"):  # an empty folder holds none
            build_text_encoder(spec)


def test_transformers_is_loaded_only_when_used() -> None:
    code = "import sys, helicon.models.text as t; t.build_text_encoder(); sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
