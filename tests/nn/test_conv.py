import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from helicon.nn.conv import CausalConv1d, CausalUpsample1d, convolve, convolve_folded, in_eights


def randomised(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def plain_conv(conv, x, mode="constant"):
    """The same by torch's own strided convolution, over channels-first signals padded on the left."""
    out, taps, _ = conv.weight.shape
    weight = conv.weight.reshape(out, taps, conv.stride, conv.in_channels).permute(0, 3, 1, 2).flatten(2)
    padded = F.pad(x.transpose(1, 2), (conv.context, 0), mode=mode)
    return F.conv1d(padded, weight, conv.bias, conv.stride, dilation=conv.dilation).transpose(1, 2)


def plain_upsample(upsample, x):
    """The same by torch's own transposed convolution, with the last `stride` samples cut off."""
    stride, channels = upsample.factor, upsample.out_channels // upsample.factor
    before, now = upsample.weight.unflatten(0, (stride, channels)).permute(2, 3, 1, 0)  # [c, e, s] each
    whole = F.conv_transpose1d(x.transpose(1, 2), torch.cat((now, before), dim=-1), upsample.bias, stride)
    return whole[..., :-stride].transpose(1, 2)


SHAPES = {
    "plain": dict(kernel_size=7),
    "one tap": dict(kernel_size=1),
    "dilated": dict(kernel_size=7, dilation=3),
    "strided": dict(kernel_size=8, stride=4),
    "strided, three frames": dict(kernel_size=9, stride=3),
    "one frame": dict(kernel_size=3, stride=3),
}
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


@each_shape
def test_is_torch_s_convolution_of_the_padded_signal(shape):
    conv = randomised(CausalConv1d(3, 5, **shape))
    x = torch.randn(2, 24, 3, requires_grad=True)
    out, expected = conv(x), plain_conv(conv, x)
    assert out.shape == (2, 24 // conv.stride, 5)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    given = torch.randn_like(out)
    actual = torch.autograd.grad(out, (x, *conv.parameters()), given)
    for one, other in zip(actual, torch.autograd.grad(expected, (x, *conv.parameters()), given), strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stride", [1, 2, 5])
def test_upsampling_is_torch_s_transposed_convolution(stride):
    upsample = randomised(CausalUpsample1d(3, 4, stride))
    x = torch.randn(2, 7, 3)
    out = upsample(x)
    assert out.shape == (2, 7 * stride, 4)
    torch.testing.assert_close(out, plain_upsample(upsample, x), atol=1e-5, rtol=1e-5)


@each_shape
def test_mirrored_beginning(shape):
    conv = randomised(CausalConv1d(3, 5, **shape, pad_mode="reflect"))
    x = torch.randn(2, 24, 3)
    torch.testing.assert_close(conv(x), plain_conv(conv, x, "reflect"), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_signal_too_short_to_be_mirrored_is_mirrored_as_far_as_it_goes(length):
    conv = randomised(CausalConv1d(3, 5, 7, dilation=2, pad_mode="reflect"))
    x = torch.randn(2, length, 3)
    extended = torch.cat((torch.zeros(2, 13 - length, 3), x[:, 1:].flip(1), x), dim=1)
    torch.testing.assert_close(conv(x), convolve(extended, conv.weight, conv.bias, 2))


@pytest.mark.parametrize(
    ("layer", "frame", "widens"),
    [
        (CausalConv1d(2, 3, 7), 1, 1),
        (CausalConv1d(2, 3, 7, dilation=3), 1, 1),
        (CausalConv1d(2, 3, 8, stride=4), 4, 1),
        (CausalUpsample1d(2, 3, 3), 1, 3),
    ],
)
def test_nothing_is_seen_of_the_future(layer, frame, widens):
    x = torch.randn(1, 20, 2, requires_grad=True)
    for t in range(20 // frame):
        (gradient,) = torch.autograd.grad(layer(x)[0, t * widens : (t + 1) * widens].sum(), x)
        seen = gradient[0].abs().sum(-1).nonzero().flatten()
        assert seen.max() == (t + 1) * frame - 1  # to the end of its own frame


@pytest.mark.parametrize("sizes", [(24,), (1,) * 24, (5, 1, 9, 9), (23, 1)])
@each_shape
@torch.no_grad()
def test_chunks_are_the_whole(shape, sizes):
    conv = randomised(CausalConv1d(3, 5, **shape))
    x, state = torch.randn(2, 24 * conv.stride, 3), {}
    parts = [conv(part, state) for part in x.split([size * conv.stride for size in sizes], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), conv(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sizes", [(9,), (1,) * 9, (4, 5)])
@torch.no_grad()
def test_upsampled_chunks_are_the_whole(sizes):
    upsample = randomised(CausalUpsample1d(3, 4, 5))
    x, state = torch.randn(2, 9, 3), {}
    parts = [upsample(part, state) for part in x.split(sizes, dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), upsample(x), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_what_is_remembered_is_the_context_alone():
    conv, state = CausalConv1d(3, 5, 7, dilation=2), {}
    for length in (1, 1000, 2):
        conv(torch.randn(2, length, 3), state)
        assert state[conv].shape == (2, 12, 3)
        assert state[conv].untyped_storage().nbytes() == 2 * 12 * 3 * 4  # not a view that keeps the chunk alive


@pytest.mark.parametrize(("channels_in", "channels_out"), [(1, 32), (32, 1), (2, 3), (8, 16)])
def test_channels_filled_up_to_eights_change_nothing(channels_in, channels_out):
    x, weight, bias = (
        torch.randn(2, 9, channels_in),
        torch.randn(channels_out, 3, channels_in),
        torch.randn(channels_out),
    )
    filled = in_eights(x, weight, bias)
    assert all(size % 8 == 0 for size in (filled[0].shape[2], *filled[1].shape[::2], len(filled[2])))
    expected = convolve(x, weight, bias)
    torch.testing.assert_close(convolve(*filled)[..., :channels_out], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_the_variance_is_kept_at_the_start(gain):
    torch.manual_seed(0)
    for conv in (CausalConv1d(16, 64, 7, gain=gain), CausalConv1d(16, 64, 8, stride=4, gain=gain)):
        assert abs(conv(torch.randn(8, 400, 16)).std() / gain - 1) < 0.1
    assert abs(CausalUpsample1d(16, 64, 4)(torch.randn(8, 100, 16)).std() - 1) < 0.1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(kernel_size=7, stride=2), "kernel_size=7"),
        (dict(kernel_size=8, stride=2, dilation=3), "not both"),
        (dict(kernel_size=3, pad_mode="replicate"), "replicate"),
    ],
)
def test_senseless_options_are_refused(options, said):
    constructor = CausalConv1d.__init__
    with pytest.raises(ValueError, match=said):  # as for a user without a type checker
        getattr(constructor, "__wrapped__", constructor)(CausalConv1d.__new__(CausalConv1d), 2, 3, **options)


@pytest.mark.parametrize("num_taps", [1, 2, 7])
@pytest.mark.parametrize("zero_rows", [0, 1, 6])
@pytest.mark.parametrize(("samples", "dilation"), [(13, 1), (30, 3), (31, 3), (55, 9), (13, 2)])
def test_folded_is_the_same(samples: int, dilation: int, zero_rows: int, num_taps: int) -> None:
    """What runs on a GPU, with its gradients."""
    inputs = torch.randn(2, samples, 3), torch.randn(5, num_taps, 3), torch.randn(5)
    inputs = [value.requires_grad_() for value in inputs]
    outputs = [how(*inputs, dilation, zero_rows * dilation) for how in (convolve_folded, convolve)]
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-5)
    given = torch.randn_like(outputs[0])
    gradients = [torch.autograd.grad(out, inputs, given) for out in outputs]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


def test_a_signal_shorter_than_its_context_is_folded() -> None:
    x, weight, bias = torch.randn(2, 1, 3), torch.randn(5, 7, 3), torch.randn(5)
    torch.testing.assert_close(
        convolve_folded(x, weight, bias, 9, 54), convolve(x, weight, bias, 9, 54), atol=1e-5, rtol=1e-5
    )


class Passes(TorchDispatchMode):
    """Operations that write a tensor as large as the signal."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.names = size, []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        if out.numel() >= self.size and not operation.is_view:
            self.names.append(operation.overloadpacket.__name__)
        return out


@pytest.mark.parametrize(("samples", "dilation", "copies"), [(90, 1, []), (90, 9, []), (91, 9, ["constant_pad_nd"])])
def test_folding_copies_no_signal_but_one_that_does_not_fill_its_last_row(samples, dilation, copies) -> None:
    x, weight, bias = torch.randn(2, samples, 8), torch.randn(8, 7, 8), torch.randn(8)
    with Passes(x.numel()) as passes:
        out = convolve_folded(x, weight, bias, dilation, 6 * dilation)
    assert passes.names == [*copies, "convolution"]
    assert out.stride()[1:] == (8, 1)  # channels last, as what comes after it reads them
