"""The rules `standard` and `block` through the public API: the target's law, and what a user may rely on.

The target is a table checkpoint of eight tokens, whose law behind each token is known; the drafter
samples from another law and tells it. Where every draft must be accepted, it is the target's copy.
"""

import re

import numpy as np
import pytest
import torch

torch.set_num_threads(1)
RULES = ("standard", "block")
VOCAB, DEPTH = 8, 3
LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(21)) * 1.3
TREE = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
CHAIN = {"method": "scripted-sampler", "num_speculative_tokens": DEPTH}
DRAFTERS = {
    "standard-chain": CHAIN | {"rejection_sample_method": "standard"},
    "standard-tree": CHAIN
    | {"rejection_sample_method": "standard", "num_speculative_tokens": len(TREE), "tree": TREE},
    "standard-independent-siblings": CHAIN
    | {
        "rejection_sample_method": "standard",
        "num_speculative_tokens": len(TREE),
        "tree": TREE,
        "siblings": "independent",
    },
    "block-chain": CHAIN | {"rejection_sample_method": "block"},
}


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    from specdecode.testing import scripted
    from specdecode.testing.tiny import table_checkpoint

    scripted.install()
    return table_checkpoint(tmp_path_factory.mktemp("table"), LOGITS, max_position_embeddings=256)


@pytest.fixture
def llm_of(table):
    """Engines on the table, shut down at the end."""
    from specdecode import LLM

    made = []

    def make(config, **engine):
        defaults = {
            "dtype": "float32",
            "block_size": 4,
            "max_num_seqs": 64,
            "num_gpu_blocks_override": 4000,
            "max_model_len": 128,
            "skip_tokenizer_init": True,
        }
        made.append(LLM(str(table), speculative_config=config, **(defaults | engine)))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


def requests(count, **params):
    from specdecode import SamplingParams

    prompts = [{"prompt_token_ids": [3 + index % 5, index % VOCAB]} for index in range(count)]
    fields = {"temperature": 1.0, "max_tokens": 96, "ignore_eos": True} | params
    return prompts, [SamplingParams(seed=1000 + index, **fields) for index in range(count)]


def generate(llm, asked):
    return [output.outputs[0] for output in llm.generate(*asked, use_tqdm=False)]


def ids_of(completions):
    return [list(completion.token_ids) for completion in completions]


def metric(llm, name):
    return {metric.name: metric.value for metric in llm.get_metrics()}[name]


def filtered_law(temperature=1.0, top_k=0, top_p=1.0):
    """``[VOCAB, VOCAB]`` float64: the law behind each token, written out anew."""
    law = (LOGITS.double() / temperature).softmax(-1).numpy()
    for row in law:
        order = np.argsort(-row)
        if top_k:
            row[order[top_k:]] = 0
            row /= row.sum()
        last = int(np.searchsorted(np.cumsum(row[order]), top_p)) if top_p < 1 else VOCAB
        row[order[last + 1 :]] = 0
        row /= row.sum()
    return law


def check_law(asked, completions, law):
    """The law of each token given the one before it, for each offset in its step; the offsets seen.

    The tokens behind all tokens are tested as one: as pairs, of which the first has the law it was seen to
    have. So small a bias as that of a noise used twice shows in some thousand tokens.
    """
    from specdecode.testing.laws import assert_law

    pairs = {"any": []}
    for prompt, completion in zip(asked[0], completions, strict=True):
        last, offset = prompt["prompt_token_ids"][-1], 0
        for token, source in zip(completion.token_ids, completion.token_sources, strict=True):
            for group in (offset, "any"):
                pairs.setdefault(group, []).append((last, token))
            last, offset = token, 0 if source == "target" else offset + 1
    for group in pairs.values():
        lasts, tokens = np.array(group).T
        share = np.bincount(lasts, minlength=VOCAB) / len(lasts)
        assert_law(lasts * VOCAB + tokens, (share[:, None] * law).flatten())
        for last in set(lasts.tolist()):
            assert_law(tokens[lasts == last], law[last])
    return set(pairs) - {"any"}


# -- the law ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", DRAFTERS)
def test_the_law_at_each_offset_and_in_the_bonus_slot(llm_of, name):
    params = {"temperature": 0.8, "top_k": 6, "top_p": 0.95}
    llm, asked = llm_of(DRAFTERS[name]), requests(90, **params)
    completions = generate(llm, asked)
    assert sum(len(completion.token_ids) for completion in completions) >= 8_000
    assert check_law(asked, completions, filtered_law(**params)) == set(range(DEPTH + 1))
    assert metric(llm, "specdecode:drafts_dropped_by_fault") == 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("by", ["what pays", "what was accepted"])
def test_the_law_stands_where_lengths_follow_what_was_verified(llm_of, rule, by):
    llm = llm_of(CHAIN | {"rejection_sample_method": rule, "adaptive": True})
    pacer, last = llm.llm_engine.core.drafting.policy.pacer, {}
    if by == "what was accepted":  # as strongly as can be: all drafts, or one after a rejection

        def each(rows, limits):
            wanted = [DEPTH if last.get(row, True) else 1 for row in rows]
            pacer._tell(rows, list(map(min, wanted, limits)), "gain")

        pacer.verified = lambda step: last.update({own.row: len(own.accepted) == own.drafted for own in step})
        pacer.each = each
    asked = requests(90)
    completions = generate(llm, asked)
    check_law(asked, completions, filtered_law())
    lengths = metric(llm, "specdecode:draft_lengths")
    assert by == "what pays" or min(lengths[1], lengths[DEPTH]) > 100


@pytest.mark.parametrize("rule", RULES)
def test_the_law_falls_where_lengths_follow_the_drafts_themselves(llm_of, monkeypatch, rule):
    """What core must never do under these rules: leave out a draft for its token."""
    llm = llm_of(CHAIN | {"rejection_sample_method": rule})
    drafting = llm.llm_engine.core.drafting
    take = drafting._take

    def choosing(drafts, rows):
        take(drafts, rows)
        for row in rows:
            if row.request.drafts and row.request.drafts.ids[0] < VOCAB // 2:
                row.request.drafts = row.request.drafts.first(0)

    monkeypatch.setattr(drafting, "_take", choosing)
    asked = requests(60)
    with pytest.raises(AssertionError, match="wrong law"):
        check_law(asked, generate(llm, asked), filtered_law())


@pytest.mark.parametrize("rule", RULES)
def test_a_drafter_that_lies_in_a_way_nobody_can_tell_fails_the_same_check(llm_of, rule):
    """It gives its likeliest token and the probabilities of a draw: fault H10."""
    asked = requests(40)
    llm = llm_of(CHAIN | {"rejection_sample_method": rule, "lie": "argmax"})
    with pytest.raises(AssertionError, match="wrong law"):
        check_law(asked, generate(llm, asked), filtered_law())


@pytest.mark.parametrize("lie", ["zero", "sum", "negative", "nan"])
def test_probabilities_that_are_none_cost_their_draft(llm_of, lie):
    """Only the last node's are spoilt: it is dropped and counted, and the law stands."""
    asked = requests(60)
    llm = llm_of(CHAIN | {"rejection_sample_method": "standard", "lie": lie})
    completions = generate(llm, asked)
    assert check_law(asked, completions, filtered_law()) == set(range(DEPTH))
    assert metric(llm, "specdecode:drafts_dropped_by_fault") > 1000
    assert metric(llm, "specdecode:proposer_failures") == 0


@pytest.mark.parametrize("rule", RULES)
def test_block_alone_never_looks_at_one_noise_twice(llm_of, monkeypatch, rule):
    """A draft that block passes over has been judged: the next one for its position takes other noise.

    One by one nothing behind the first rejection has been looked at, and its noise is as good as new.
    """
    from specdecode.engine import drafting, weighing

    drawn, judged = [], []

    def rank(logits, batch, k):
        noise = batch.noise
        drawn.extend(zip(noise.position.tolist(), noise.stream.tolist(), strict=True))
        return true_rank(logits, batch, k)

    def chances(rows, ids, device):
        judged.extend((row.position, row.stream) for row in rows)
        return true_chances(rows, ids, device)

    true_rank, true_chances = drafting.rank, weighing.chances
    monkeypatch.setattr(drafting, "rank", rank)
    monkeypatch.setattr(weighing, "chances", chances)
    generate(llm_of(CHAIN | {"rejection_sample_method": rule}, max_num_seqs=1), requests(1, max_tokens=40))
    for keys in (drawn, judged):
        assert len(keys) > 40
        assert (len(set(keys)) == len(keys)) == (rule == "block")
    assert not {stream for _, stream in drawn} & {stream for _, stream in judged}
    assert 0 not in {stream for _, stream in drawn + judged}, "the target's own"


# -- what a user may rely on -------------------------------------------------------------------------
def mixed(**changes):
    """Twelve requests: greedy, sampled under several parameters, and one without speculation."""
    from specdecode import SamplingParams

    kinds = [
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.5, "top_k": 4, "presence_penalty": 0.5},
        {"temperature": 1.0, "min_p": 0.05, "repetition_penalty": 1.2},
        {"temperature": 1.0, "speculation": False},
    ]
    prompts = [
        {"prompt_token_ids": [3 + (index * step) % 5 for step in range(2 + 3 * index)]} for index in range(12)
    ]
    fields = {"max_tokens": 24, "ignore_eos": True} | changes
    return prompts, [SamplingParams(**(kinds[index % 6] | {"seed": index} | fields)) for index in range(12)]


@pytest.mark.parametrize("name", ["standard-chain", "standard-tree", "block-chain"])
def test_a_seed_repeats_in_any_batch_order_and_schedule(llm_of, name):
    asked = mixed()
    want = ids_of(generate(llm_of(DRAFTERS[name]), asked))
    assert ids_of(generate(llm_of(DRAFTERS[name], async_scheduling=True), asked)) == want
    alone = llm_of(DRAFTERS[name], max_num_seqs=1)
    assert ids_of(generate(alone, asked)) == want
    chunked = llm_of(DRAFTERS[name], max_num_seqs=2, max_num_batched_tokens=24)
    reversed_asked = [part[::-1] for part in asked]
    assert ids_of(generate(chunked, reversed_asked))[::-1] == want
    assert ids_of(generate(chunked, asked)) == want  # now from the prefix cache
    assert metric(chunked, "vllm:prefix_cache_hits") > 0


@pytest.mark.parametrize("name", ["standard-chain", "standard-tree", "block-chain"])
def test_greedy_rows_and_rows_without_drafts_are_as_without_speculation(llm_of, name):
    prompts, params = mixed()
    chosen = [index for index in range(12) if params[index].greedy or params[index].speculation is False]
    plain = ids_of(generate(llm_of(None), (prompts, params)))
    under = ids_of(generate(llm_of(DRAFTERS[name]), (prompts, params)))
    assert [under[index] for index in chosen] == [plain[index] for index in chosen]
    assert under != plain, "sampled rows with drafts take other noise"


@pytest.mark.parametrize("rule", RULES)
def test_logprobs_are_the_targets(llm_of, rule):
    want = LOGITS.log_softmax(-1)
    asked = requests(8, logprobs=2, max_tokens=20)
    for prompt, completion in zip(
        asked[0], generate(llm_of(CHAIN | {"rejection_sample_method": rule}), asked), strict=True
    ):
        assert len(completion.logprobs) == len(completion.token_ids) == 20
        last = prompt["prompt_token_ids"][-1]
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
            assert next(iter(entry)) == token
            for other, value in entry.items():
                assert value.logprob == pytest.approx(float(want[last, other]), abs=1e-4)
            last = token


@pytest.mark.parametrize("rule", RULES)
def test_a_logits_processor_sees_the_output_alone_and_rules_it(llm_of, rule):
    """Called once for each token, in order, never with a draft that was rejected; token 5 is forbidden."""
    seen = []

    def forbid(output_ids, logits):
        seen.append(list(output_ids))
        logits[5] = -torch.inf
        return logits

    law = filtered_law()
    law[:, 5] = 0
    law /= law.sum(-1, keepdims=True)
    asked = requests(1, max_tokens=40, logits_processors=[forbid])
    llm = llm_of(CHAIN | {"rejection_sample_method": rule}, max_num_seqs=1)
    (completion,) = generate(llm, asked)
    assert seen == [list(completion.token_ids[:end]) for end in range(40)]
    assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 0
    asked = requests(30, max_tokens=40, logits_processors=[forbid])
    check_law(asked, generate(llm_of(CHAIN | {"rejection_sample_method": rule}), asked), law)


@pytest.mark.parametrize("rule", RULES)
def test_a_logits_processor_that_raises_ends_its_request_alone(llm_of, rule):
    def moody(output_ids, logits):
        if len(output_ids) == 7:
            raise RuntimeError("enough")
        return logits

    prompts, params = requests(3, max_tokens=20)
    llm = llm_of(CHAIN | {"rejection_sample_method": rule})
    want = ids_of(generate(llm, (prompts, params)))
    params[1] = params[1].clone(logits_processors=[moody])
    completions = generate(llm, (prompts, params))
    assert completions[1].finish_reason == "error" and "enough" in completions[1].error
    assert len(completions[1].token_ids) == 7
    assert [ids_of(completions)[index] for index in (0, 2)] == [want[index] for index in (0, 2)]


@pytest.mark.parametrize("rule", RULES)
def test_drafts_that_are_not_allowed_are_rejected(llm_of, rule):
    """Prompt lookup drafts what stood in the prompt, allowed or not, and tells no probabilities."""
    allowed = [3, 4, 6]
    law = filtered_law()
    law[:, [token for token in range(VOCAB) if token not in allowed]] = 0
    law /= law.sum(-1, keepdims=True)
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    prompts, params = requests(60, max_tokens=60, allowed_token_ids=allowed)
    prompts = [{"prompt_token_ids": [3, 5, 4, 7, 3, 6, 5, 6, 3 + index % 5]} for index in range(60)]
    llm = llm_of(config | {"rejection_sample_method": rule})
    completions = generate(llm, (prompts, params))
    assert {token for ids in ids_of(completions) for token in ids} == set(allowed)
    check_law((prompts, params), completions, law)
    assert metric(llm, "vllm:spec_decode_num_accepted_tokens") > 100


@pytest.mark.parametrize("rule", RULES)
def test_a_grammar_holds(llm_of, rule):
    """Deeper drafts do not know the grammar; what it excludes has no chance."""
    llm = llm_of(CHAIN | {"rejection_sample_method": rule}, skip_tokenizer_init=False)
    completions = generate(llm, requests(20, structured_outputs={"regex": "(ab|c){6}"}, ignore_eos=False))
    assert all(re.fullmatch("(ab|c){6}", completion.text) for completion in completions)
    assert len({completion.text for completion in completions}) > 5
    drafted, accepted = (metric(llm, f"vllm:spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted"))
    assert 0 < accepted < drafted


# -- nothing is lost: a copy of the target is always accepted -----------------------------------------
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("order", "engine"),
    [
        ("plain", {}),
        ("late", {}),
        ("plain", {"max_num_batched_tokens": 16}),
        ("plain", {"num_gpu_blocks_override": 36}),
    ],
    ids=["plain", "late", "chunked", "preempted"],
)
def test_a_copy_of_the_target_is_always_accepted(lab, rule, order, engine):
    asks = [
        lab.ask(lab.prompt(index % 8), temperature=0.9, top_p=0.9, top_k=50, seed=index, max_tokens=24)
        for index in range(8)
    ]
    rig = lab.rig(
        "self-draft", order=order, policy={"rejection_sample_method": rule}, recorded=False, **engine
    )
    prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
    with rig:
        for _ in range(2):  # the second time from the prefix cache
            rig.llm.generate(prompts, [ask.params for ask in asks], use_tqdm=False)
        count = {kind: rig.metric(f"vllm:spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted")}
        assert count["draft"] > 200
        assert count["accepted"] + rig.metric("specdecode:discarded_tokens") == count["draft"]
        assert rig.metric("specdecode:drafts_dropped_by_fault") == 0
        if "num_gpu_blocks_override" in engine:
            assert rig.metric("vllm:num_preemptions") > 0


def test_a_cascade_hands_the_probabilities_on(lab):
    """The union of two drafters that tell theirs tells them too."""
    half = {"method": "scripted-self-draft", "num_speculative_tokens": 2, "layers": 1}
    whole = {"method": "scripted-self-draft", "num_speculative_tokens": 4}
    asks = [lab.ask(lab.prompt(index), temperature=1.0, seed=index, max_tokens=16) for index in range(4)]
    prompts, params = [{"prompt_token_ids": ask.prompt} for ask in asks], [ask.params for ask in asks]
    counts = []
    for children in ([whole, half], [half, whole]):
        config = {"method": "scripted-cascade", "children": children}
        with lab.rig(config, policy={"rejection_sample_method": "block"}, recorded=False) as rig:
            rig.llm.generate(prompts, params, use_tqdm=False)
            assert rig.metric("specdecode:drafts_dropped_by_fault") == 0
            counts.append(
                [rig.metric(f"vllm:spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted")]
            )
    (drafted, accepted), (poor, kept) = counts
    assert accepted > 0.8 * drafted and kept < 0.8 * poor  # of the elder child, in each case


# -- what is refused ---------------------------------------------------------------------------------
def test_block_refuses_a_drafter_of_trees(llm_of):
    from specdecode.contract import Unsupported

    config = DRAFTERS["standard-tree"] | {"rejection_sample_method": "block"}
    with pytest.raises(
        Unsupported, match=r"drafts trees.*'block' decides chains only.*'standard' or 'invariant'"
    ):
        llm_of(config)


@pytest.mark.parametrize("rule", RULES)
def test_shadow_mode_is_refused(llm_of, rule):
    from specdecode.contract import Unsupported

    with pytest.raises(Unsupported, match=rf"shadow_rate=0.5.*'{rule}'.*'invariant'"):
        llm_of(CHAIN | {"rejection_sample_method": rule}, shadow_rate=0.5)


def test_probabilities_are_for_those_who_declare_them():
    from specdecode.contract import Needs, Probs, StepView, Undeclared

    class Source:
        def probs(self, *asked):
            return asked

    with pytest.raises(Undeclared, match=r"StepView.probs.*probs=FULL"):
        StepView(Needs(width=1, depth=1), Source()).probs(1, 2, 3, 4)
    asked = StepView(Needs(width=1, depth=1, probs=Probs.FULL), Source()).probs(1, 2, 3, 4)
    assert asked == (1, 2, 3, 4, None)


def test_a_chain_drafter_that_branches_is_cut(table):
    """What it said it drafts is what a rule may build on."""
    from specdecode.api.params import SamplingParams
    from specdecode.contract import Drafts
    from specdecode.engine.taking import take_drafts

    class Row:
        budget = room = 3

        class request:
            params = SamplingParams(temperature=1.0)
            drafts = None

    drafts = Drafts(
        ids=np.array([[3, 4, 5]]), lens=np.array([3]), parents=np.array([[-1, 0, 0]]), score=np.zeros((1, 3))
    )
    assert take_drafts(drafts, [Row], VOCAB, chain=True, weighed=False) == 1
    assert Row.request.drafts.ids == (3, 4)
    assert take_drafts(drafts, [Row], VOCAB, chain=False, weighed=False) == 0
    assert Row.request.drafts.parents == (-1, 0, 0)
