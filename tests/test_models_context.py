"""Where tokens stand: positions and documents by hand."""

import torch

from hf_poslsh.models.context import place_tokens

CPU = torch.device("cpu")


def test_a_chunk_that_begins_with_padding_continues_its_document():
    mask = torch.tensor([[1, 1, 1, 1, 0, 0, 1, 1]])
    positions, segments = place_tokens(4, 8, 4, CPU, mask, torch.tensor([[0, 0, 4, 5]]))
    assert positions.tolist() == [[0, 1, 2, 3, -1, -1, 4, 5]]
    assert segments.unique().numel() == 1


def test_slots_of_a_static_cache_that_are_still_to_come_do_not_exist():
    for seen in (3, torch.tensor(3)):
        positions, segments = place_tokens(2, 9, seen, CPU)
        assert positions.tolist() == [[0, 1, 2, 3, 4, -1, -1, -1, -1]]
        assert segments is None


def test_all_ways_to_mark_documents_agree():
    ids = torch.tensor([[0, 1, 2, 0, 0, 1]])
    ways = (
        {"position_ids": ids},
        {"position_ids": ids + 7},
        {"sequence_ids": torch.tensor([[4, 4, 4, 2, 5, 5]])},
        {"sequence_ends": torch.tensor([0, 3, 4, 6], dtype=torch.int32)},
    )
    for way in ways:
        positions, segments = place_tokens(6, 6, 0, CPU, None, **way)
        assert positions.tolist() == ids.tolist()
        assert segments.tolist() == [[0, 0, 0, 3, 4, 4]]


def test_a_jump_forward_stays_in_its_document():
    positions, segments = place_tokens(5, 5, 0, CPU, None, torch.tensor([[0, 1, 40, 41, 0]]))
    assert positions.tolist() == [[0, 1, 2, 3, 0]]
    assert segments.tolist() == [[0, 0, 0, 0, 4]]


def test_one_new_token_sees_only_its_document_in_the_cache():
    positions, segments = place_tokens(1, 8, 7, CPU, None, torch.tensor([[2]]))
    assert positions.tolist() == [[-1, -1, -1, -1, -1, 0, 1, 2]]
    assert segments is None
