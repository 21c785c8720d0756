"""Which of a draft's ids are the target's: by tokenizers alone, then in engines (fault H23)."""

import json
import shutil

import pytest
import torch
from specdec_draft.translation import Translation
from specdec_draft.vocabulary import STRANGER, Vocabulary, match_vocabularies
from specdecode.contract import Unsupported

WORDS = ["<s>", "</s>", "a", "b", "c", "d", "e", "f"]


def write(folder, words, special=2, unigram=False):
    folder.mkdir(exist_ok=True)
    vocab = [[word, 0.0] for word in words] if unigram else {word: i for i, word in enumerate(words)}
    added = [{"id": i, "content": words[i], "special": True} for i in range(special)]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    return folder


@pytest.fixture
def matched(tmp_path):
    """``matched(target's words, draft's words)``: their match, the sizes those of the words unless given."""

    def match(ours, theirs, sizes=None, **options):
        target, draft = write(tmp_path / "t", ours), write(tmp_path / "d", theirs, **options)
        return match_vocabularies(target, draft, *(sizes or (len(ours), len(theirs))))

    return match


@pytest.mark.parametrize("unigram", [False, True])
def test_the_same_tokenizer(matched, unigram):
    same = matched(WORDS, WORDS, unigram=unigram)
    assert same.drafts == same.feeds == tuple(range(8))


@pytest.mark.parametrize("sizes", [(10, 12), (12, 10)])
def test_padding_is_fed_as_far_as_there_are_rows_and_never_drafted(matched, sizes):
    padded = matched(WORDS, WORDS, sizes)
    assert padded.drafts == (*range(8), *[-1] * (sizes[0] - 8))
    assert padded.feeds == (*range(min(sizes)), *[STRANGER] * (sizes[0] - min(sizes)))


def test_a_prefix_either_way(matched):
    assert matched(WORDS, WORDS[:6]).drafts == (0, 1, 2, 3, 4, 5, -1, -1)
    assert matched(WORDS[:6], WORDS).drafts == (0, 1, 2, 3, 4, 5)


def test_a_reduced_vocabulary_gets_a_map(matched):
    reduced = matched(WORDS, ["<s>", "</s>", "b", "d", "f"])
    assert reduced.drafts == (0, 1, -1, 2, -1, 3, -1, 4)
    assert reduced.feeds == (0, 1, STRANGER, 2, STRANGER, 3, STRANGER, 4)
    assert reduced.shared == 5


@pytest.mark.parametrize(
    ("theirs", "first"),
    [
        (["<s>", "</s>", "a", "c", "b", "d", "e", "f"], "id 3 is 'b' in .* and 'c' in"),  # two swapped
        (["<s>", "</s>", "a", "c", "b"], "id 3 is 'b' in .* and 'c' in"),  # smaller, in another order
        (["<s>", "</s>", "a", "x"], "id 3 is 'b' in .* and 'x' in"),
    ],
)
def test_another_tokenizer_is_refused_by_its_first_entry(matched, theirs, first):
    with pytest.raises(Unsupported, match=first):
        matched(WORDS, theirs)


def test_a_control_token_of_another_name_is_not_drafted(matched):
    assert matched(WORDS, ["<s>", "<end>", *WORDS[2:]]).drafts == (0, -1, *range(2, 8))


def test_without_a_tokenizer_equal_sizes_are_believed(tmp_path):
    ours, theirs = write(tmp_path / "t", WORDS), tmp_path / "d"
    theirs.mkdir()
    assert match_vocabularies(ours, theirs, 8, 8).drafts == tuple(range(8))
    with pytest.raises(Unsupported, match=r"has no tokenizer\.json"):
        match_vocabularies(ours, theirs, 8, 9)
    (theirs / "vocab.json").write_text(json.dumps({"<s>": 0, "</s>": 1, "a": 2}))
    assert match_vocabularies(ours, theirs, 8, 9).drafts == (0, 1, 2, *[-1] * 5)


@pytest.mark.parametrize(
    ("drafts", "columns"),
    [
        ((0, 1, 2, 3), (0, 1, 2, 3)),
        ((0, 1, 2, 3, -1, -1), (0, 1, 2, 3, None, None)),
        ((0, -1, 2), (0, None, 2)),
        ((0, -1, 1, -1, 3), (0, None, 1, None, 3)),
        ((-1, 0, 1, 2, 3, -1), (None, 0, 1, 2, 3, None)),
    ],
)
def test_logits_move_to_the_targets_columns(drafts, columns):
    translation = Translation(Vocabulary(drafts, tuple(max(0, i) for i in drafts)), torch.device("cpu"))
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    want = [[float(row[i]) for i in columns if i is not None] for row in logits]
    assert torch.equal(translation.logits(logits), torch.tensor(want))
    known = [token for token, i in enumerate(columns) if i is not None]
    vocabulary = translation.vocabulary
    assert known == (list(range(len(known))) if vocabulary is None else vocabulary.tolist())
    fed = translation.feed(torch.arange(len(drafts)))
    assert fed.tolist() == [max(0, i) for i in drafts]


# -- in engines ------------------------------------------------------------------------------------
@pytest.fixture
def drafted(monkeypatch):
    """Every id drafted within a row's length."""
    from specdec_draft.proposer import DraftModelProposer

    propose, seen = DraftModelProposer.propose, set()

    def note(self, step, out):
        propose(self, step, out)
        for row, count in zip(out.ids.tolist(), out.lens.tolist(), strict=True):
            seen.update(row[:count])

    monkeypatch.setattr(DraftModelProposer, "propose", note)
    return seen


def resized(kit, source, folder, rows):
    """A copy of a checkpoint with other embedding rows: ``rows(weight, is_head)``."""
    folder = shutil.copytree(source, folder)

    def change(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = rows(tensors[name], name.startswith("lm_head")).contiguous()
        kit.edit(folder, vocab_size=len(tensors["lm_head.weight"]))

    kit.retensor(folder, change)
    return folder


@pytest.mark.parametrize("sizes", [(304, 320), (320, 304)])
@pytest.mark.parametrize("late", [False, True])
def test_padded_sizes_both_ways(kit, llm_of, target, drafted, tmp_path, sizes, late):
    """The draft's padding would win every time; the target's never does, so all drafts are accepted."""

    def padded(size, tempting):
        def rows(weight, head):
            extra = weight[:1].expand(size - 300, -1) * 0
            if tempting:
                extra = extra + 50 * torch.randn(extra.shape, generator=torch.Generator().manual_seed(1))
            return torch.cat((weight, extra))

        return rows

    ours = resized(kit, target, tmp_path / "target", padded(sizes[0], False))
    theirs = resized(kit, target, tmp_path / "draft", padded(sizes[1], True))
    asks = [kit.ask(range(9, 15 + i), temperature=0, max_tokens=40) for i in range(3)]
    llm = llm_of(ours, theirs, async_scheduling=late)
    assert kit.ids(kit.generate(llm, asks)) == kit.ids(kit.generate(llm_of(ours), asks))
    assert drafted and max(drafted) < 300
    accepted = kit.metric(llm, "vllm:spec_decode_num_accepted_tokens")
    assert accepted == kit.metric(llm, "vllm:spec_decode_num_draft_tokens") > 60


@pytest.mark.parametrize("late", [False, True])
def test_a_reduced_vocabulary_in_an_engine(kit, llm_of, target, drafted, tmp_path, late):
    """The target with 120 of its tokens: right wherever those are all there is, and never outside of them."""
    generator = torch.Generator().manual_seed(3)
    keep = sorted({0, 1, 2, *torch.randperm(300, generator=generator)[:117].tolist()})
    theirs = resized(kit, target, tmp_path / "draft", lambda weight, head: weight[keep])
    file = theirs / "tokenizer.json"
    content = json.loads(file.read_text("utf-8"))
    numbers = {old: new for new, old in enumerate(keep)}
    vocab = content["model"]["vocab"]
    content["model"]["vocab"] = {token: numbers[i] for token, i in vocab.items() if i in numbers}
    file.write_text(json.dumps(content), "utf-8")
    llm = llm_of(target, theirs, async_scheduling=late)

    free = [kit.ask(range(9, 15), temperature=t, seed=4, max_tokens=60) for t in (0, 1.0)]
    assert kit.ids(kit.generate(llm, free)) == kit.ids(kit.generate(llm_of(target), free))
    assert drafted and drafted <= set(keep)

    held = [
        kit.ask(keep[5:12], temperature=t, seed=4, max_tokens=60, allowed_token_ids=keep) for t in (0, 1.0)
    ]
    for output in kit.generate(llm, held):
        assert output.metrics.accepted == output.metrics.drafted > 30


def test_two_swapped_entries_are_named_before_the_target_is_loaded(
    kit, llm_of, target, tmp_path, monkeypatch
):
    from specdecode import models

    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    theirs = shutil.copytree(target, tmp_path / "draft")
    content = json.loads((theirs / "tokenizer.json").read_text("utf-8"))
    vocab = content["model"]["vocab"]
    names = {i: token for token, i in vocab.items()}
    vocab[names[40]], vocab[names[50]] = 50, 40
    (theirs / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    with pytest.raises(Unsupported, match=f"id 40 is {names[40]!r} in .* and {names[50]!r} in"):
        llm_of(target, theirs)
