import torch
from torch.nn import functional as F

from helicon.nn.codes import CodeVectors


def test_the_vectors_of_codes_are_those_of_their_digits_and_their_own():
    torch.manual_seed(0)
    vectors = CodeVectors(6, 64)
    with torch.no_grad():
        vectors.own.weight.zero_()
    ones, twos, fours = 2 * vectors.of_digits.weight.T  # from a digit of 0 to one of 1
    assert torch.allclose(vectors.weight()[5] - vectors.weight()[0], ones + fours, atol=1e-6)
    assert torch.allclose(vectors.weight()[3] - vectors.weight()[1], twos, atol=1e-6)
    assert (vectors.weight()[6] == 0).all()  # the end has no digits
    vectors = CodeVectors(5000, 64)
    codes = torch.randint(5000, (3, 7))
    embedded = vectors(codes)
    assert torch.allclose(embedded, vectors.scale * vectors.weight()[codes], atol=1e-5)
    assert 0.9 < vectors(torch.arange(5000)).std() < 1.1
    assert set(vectors.state_dict()) == {"own.weight", "of_digits.weight"}
    assert CodeVectors(1, 4).weight().shape == (2, 4)


def test_what_is_learned_of_codes_holds_for_codes_never_seen():
    """To repeat a code, learned of half of the codes, holds for the others, but not with vectors of codes alone."""
    seen, unseen = (torch.tensor([code for code in range(64) if code.bit_count() % 2 == part]) for part in (0, 1))

    def repeats(has_digits: bool) -> float:
        torch.manual_seed(0)
        vectors, between = CodeVectors(64, 32), torch.nn.Linear(32, 32)
        if not has_digits:
            torch.nn.init.zeros_(vectors.of_digits.weight)
            vectors.of_digits.requires_grad_(False)
        with torch.no_grad():
            between.weight.copy_(torch.randn(32, 32) / 32**0.5)  # what is said must be found first
        optimizer = torch.optim.Adam([*vectors.parameters(), *between.parameters()], lr=1e-2)
        for _ in range(150):
            codes = seen[torch.randint(len(seen), (64,))]
            loss = F.cross_entropy(between(vectors(codes)) @ vectors.weight().T, codes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        said = between(vectors(unseen)) @ vectors.weight()[unseen].T  # (those that were seen are louder)
        return float((said.argmax(dim=1) == torch.arange(len(unseen))).float().mean())

    found = repeats(has_digits=True), repeats(has_digits=False)
    assert found[0] >= 0.9 and found[1] <= 0.5, found
