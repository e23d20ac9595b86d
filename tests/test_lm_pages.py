"""The page table alone, against a model of it in plain Python: what every row holds, token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smcgen.errors import ModelError
from smcgen.lm import pages as pages_module
from smcgen.lm.pages import CacheShape, Pages, pages_needed

torch.set_num_threads(1)
CPU = torch.device("cpu")
ONE = CacheShape(layers=1, heads=1, key_dim=1, value_dim=1, dtype=torch.float32)


class Book:
    """Pages whose "keys" are the numbers of tokens, so that what a row would read can be compared with what it should."""

    def __init__(self, groups, particles, page, prompt_tokens=10, new_tokens=12):
        self.pages = Pages.reserve(ONE, groups, particles, prompt_tokens, new_tokens, CPU, "m", page)
        self.rows = [[] for _ in range(groups * particles)]
        self.written = 0

    def write(self, counts):
        pages = self.pages
        assert pages.grow(torch.tensor(counts)).tolist() == [len(row) for row in self.rows]
        pages.verify()
        assert pages.in_use() <= pages.count - 1
        for row, count in enumerate(counts):
            for _ in range(count):
                self.written += 1
                at = len(self.rows[row])
                page = int(pages.table[row, at // pages.page])
                assert page > 0
                pages.keys[0, page, 0, at % pages.page] = self.written
                self.rows[row].append(self.written)

    def fork(self, ancestors):
        self.pages.fork(torch.tensor(ancestors))
        self.rows = [list(self.rows[i]) for i in ancestors]

    def trim(self, lengths):
        self.pages.length.copy_(torch.tensor(lengths))
        self.rows = [row[:n] for row, n in zip(self.rows, lengths, strict=True)]

    def check(self):
        pages = self.pages
        names = set()
        for row, tokens in enumerate(self.rows):
            count = -(-len(tokens) // pages.page)
            own = pages.table[row, :count].tolist()
            assert 0 not in own
            names.update(own)
            assert pages.keys[0, own].flatten()[: len(tokens)].tolist() == tokens
        assert pages.in_use() == len(names)
        assert pages.unshared() == sum(-(-len(tokens) // pages.page) for tokens in self.rows)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), page=st.integers(1, 5), particles=st.integers(1, 5), groups=st.integers(1, 2))
def test_rows_hold_what_was_written(data, page, particles, groups):
    book = Book(groups, particles, page, prompt_tokens=0)
    count = groups * particles

    def numbers(low, high):
        return data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    for _ in range(data.draw(st.integers(1, 12))):
        room = [12 - len(row) for row in book.rows]
        book.write([min(n, r) for n, r in zip(numbers(0, 4), room, strict=True)])
        book.check()
        book.fork([row // particles * particles + n % particles for row, n in enumerate(numbers(0, particles - 1))])
        book.check()
        book.trim([max(0, len(row) - n) for row, n in zip(book.rows, numbers(0, 3), strict=True)])
        book.check()


@pytest.mark.parametrize("page", [1, 4, 16])
def test_nothing_leaks_in_a_thousand_rounds(page):
    random = torch.Generator().manual_seed(page)
    groups, particles, prompt = 3, 4, 10
    book = Book(groups, particles, page, prompt, new_tokens=12)

    def fill(group):
        first = group * particles
        book.pages.length[first : first + particles] = 0
        for row in range(first, first + particles):
            book.rows[row] = []
        book.write([prompt if row == first else 0 for row in range(groups * particles)])
        book.fork([first if row // particles == group else row for row in range(groups * particles)])

    for group in range(groups):
        fill(group)
    for step in range(1000):
        draws = torch.randint(0, 4, (3, groups * particles), generator=random).tolist()
        book.write([min(n, prompt + 12 - len(row)) for n, row in zip(draws[0], book.rows, strict=True)])
        book.fork([row // particles * particles + n for row, n in enumerate(draws[1])])
        book.trim([max(prompt, len(row) - n) for n, row in zip(draws[2], book.rows, strict=True)])
        if step % 10 == 0:
            fill(step // 10 % groups)
            book.check()
    for row in range(groups * particles):
        book.pages.length[row] = 0
    assert book.pages.in_use() == 0


@pytest.mark.parametrize("page", [1, 3, 4, 16])
def test_the_pool_is_as_large_as_the_worst_case_and_no_larger(page):
    """Rows that share their prompt and then go their own ways, for every length of the prompt."""
    groups, particles, prompt, new = 2, 3, 7, 9
    pages, most = pages_needed(groups, particles, prompt, new, page), 0
    for tokens in range(prompt + 1):
        book = Book(groups, particles, page, prompt, new)
        rows = range(groups * particles)
        book.write([tokens if row % particles == 0 else 0 for row in rows])
        book.fork([row // particles * particles for row in rows])
        for _ in range(new):
            book.write([1] * len(rows))
            book.check()
        assert book.pages.count == pages
        most = max(most, book.pages.in_use())
    assert most <= pages - 1 <= most + groups * (1 + particles)


def test_rows_that_read_nothing_take_nothing():
    book = Book(1, 3, 4)
    book.write([3, 0, 5])
    assert book.pages.in_use() == 3
    before = book.pages.table.clone()
    book.write([0, 0, 0])
    assert torch.equal(book.pages.table, before)


def test_only_writers_copy_and_one_namer_keeps_the_page():
    book = Book(1, 4, 4)
    book.write([6, 0, 0, 0])
    book.fork([0, 0, 0, 0])
    assert book.pages.in_use() == 2
    book.write([0, 1, 0, 0])
    assert book.pages.in_use() == 3  # row 1 has its own last page, the others still share theirs
    book.write([1, 0, 1, 1])
    assert book.pages.in_use() == 5
    book.check()


def test_a_trimmed_row_does_not_write_into_what_another_reads():
    book = Book(1, 2, 4)
    book.write([4, 0])
    book.fork([0, 0])
    book.trim([2, 4])  # row 0, the lowest, now stands inside a page that row 1 reads to its end
    book.write([2, 0])
    book.check()
    book.write([1, 1])
    book.check()


def test_room_that_was_not_declared():
    book = Book(1, 2, 4, prompt_tokens=4, new_tokens=4)
    with pytest.raises(RuntimeError, match="more tokens than its context was opened for"):
        book.write([9, 0])


def test_a_cache_that_does_not_fit(monkeypatch):
    monkeypatch.setattr(pages_module, "available_bytes", lambda device: 10**6)
    with pytest.raises(ModelError, match=r"needs 0\.\d\d GB, and 0\.00 GB are free on cpu: take fewer") as error:
        Pages.reserve(ONE, 1000, 64, 100, 1000, CPU, "m")
    assert "\n" not in str(error.value)
