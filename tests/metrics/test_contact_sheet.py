import numpy as np
import pytest
import torch

from helicon.metrics.contact_sheet import GAP, MIN_WIDTH, contact_sheet


def test_pictures_stand_in_rows_with_their_captions_below():
    rows = [torch.zeros(2, 3, 8, 8), torch.full((2, 3, 16, 16), 0.5)]
    sheet = np.asarray(contact_sheet(rows, ["a", "a red circle on a blue background at the top left of a picture"]))
    assert sheet.shape[1] == 2 * MIN_WIDTH + GAP and sheet.shape[2] == 3
    assert (sheet[:MIN_WIDTH, :MIN_WIDTH] == 0).all() and (sheet[:MIN_WIDTH, MIN_WIDTH : MIN_WIDTH + GAP] == 255).all()
    ink = (sheet < 128).all(axis=2)
    below = ink[MIN_WIDTH:]
    top = MIN_WIDTH + int(np.argmax((sheet[MIN_WIDTH:, 0] == 128).all(axis=1)))
    assert (sheet[top : top + MIN_WIDTH, :MIN_WIDTH] == 128).all()
    words = ink[MIN_WIDTH:top], ink[top + MIN_WIDTH :]
    for part in words:
        short, long = part[:, :MIN_WIDTH].sum(), part[:, MIN_WIDTH + GAP :].sum()
        assert 0 < short < long
    assert below.any() and not ink[:, MIN_WIDTH : MIN_WIDTH + GAP].any()


def test_what_hangs_below_a_line_is_not_cut_off():
    rows = [torch.zeros(1, 3, 8, 8)] * 2
    above, last = np.split(np.asarray(contact_sheet(rows, ["a gypsy"])), 2)
    assert (above == last).all() and (last[-1] == 255).all()


def test_what_is_transparent_lies_on_white():
    sheet = np.asarray(contact_sheet([torch.zeros(1, 4, 8, 8)], ["a"]))
    assert (sheet[:MIN_WIDTH] == 255).all()


def test_large_pictures_keep_their_size_and_long_captions_end():
    sheet = contact_sheet([torch.rand(1, 1, 150, 200)], ["word " * 500])
    assert sheet.width == 200 and sheet.height < 150 + 100


def test_captions_must_be_as_many_as_pictures():
    with pytest.raises(ValueError, match="1 captions for rows of"):
        contact_sheet([torch.rand(2, 3, 4, 4)], ["a"])
