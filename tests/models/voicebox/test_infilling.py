import torch

from helicon.models.voicebox.infilling import copied, frame_error, interpolated, middle_span, neighbours

FEATURES = torch.tensor([[0.0, 1, 2, 30, 40, 50, 6, 7], [0, 10, 20, 3, 99, 99, 99, 99]])[..., None]
HIDDEN = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0]]).bool()
MASK = torch.arange(8) < torch.tensor([[8], [4]])


def test_a_span_lies_in_the_middle_of_what_is_real():
    span = middle_span(torch.tensor([10, 5, 1]), 10)
    assert span.sum(dim=1).tolist() == [3, 2, 1]
    assert span[0].nonzero().flatten().tolist() == [3, 4, 5] and not span[1, 5:].any() and span[2, 0]
    assert middle_span(torch.tensor([10]), 12, share=0.5).sum() == 5


def test_hidden_frames_are_copied_from_the_nearest_given_one():
    found = copied(FEATURES, HIDDEN, MASK)[..., 0]
    assert found[0].tolist() == [0, 1, 2, 2, 2, 6, 6, 7], "in the middle the earlier one is as near as the later"
    assert found[1, :4].tolist() == [0, 0, 3, 3], "nothing is copied from the padding"


def test_hidden_frames_lie_on_a_line_between_those_around_them():
    found = interpolated(FEATURES, HIDDEN, MASK)[..., 0]
    torch.testing.assert_close(found[0], torch.arange(8.0))
    torch.testing.assert_close(found[1, :4], torch.arange(4.0))


def test_where_one_side_is_hidden_the_other_is_taken_and_where_all_is_nothing_breaks():
    hidden = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 1]]).bool()
    first, last = neighbours(hidden, torch.ones_like(hidden))
    assert first[0].tolist() == [2, 2, 2, 2] and last[0].tolist() == [2, 2, 2, 2]
    features = torch.randn(2, 4, 3)
    assert copied(features, hidden, torch.ones_like(hidden)).isfinite().all()


def test_the_error_counts_what_it_shall():
    found = FEATURES + torch.tensor([[[2.0]], [[-4.0]]])
    assert frame_error(found, FEATURES, HIDDEN) == (3 * 2 + 2 * 4) / 5
    assert frame_error(found, FEATURES, HIDDEN, squared=True) == (3 * 4 + 2 * 16) / 5
    found[~HIDDEN] = torch.nan
    assert frame_error(found, FEATURES, HIDDEN).isfinite()
