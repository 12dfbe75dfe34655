import pytest
import torch

from helicon.models.text.byte import ByteTextEncoder
from helicon.nn.devices import sent

TEXTS = ["a red circle", "a kitchen chair with four legs"]


def test_what_is_sent_is_what_arrives() -> None:
    tensor = torch.arange(6).reshape(2, 3)
    assert torch.equal(sent(tensor, torch.device("cpu")), tensor)


@pytest.mark.gpu
def test_texts_are_read_without_waiting_for_the_device() -> None:
    encoder = ByteTextEncoder(dim=32, depth=1, heads=1, dim_head=32)
    expected = encoder.tokenize(TEXTS)
    encoder.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = encoder.tokenize(TEXTS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for here, there in zip(found, expected, strict=True):
        assert here.is_cuda and torch.equal(here.cpu(), there)
