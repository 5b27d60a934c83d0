"""What lm-evaluation-harness asks of a model: likelihoods equal to a plain sum over positions, text equal to `generate`'s."""

import json
import sys
import types
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax

import axonml_jax as ax
from axonml_jax.data.documents import ByteTokenizer
from axonml_jax.facade import generate as parallel_generate
from axonml_jax.facade.lm_eval import Asked, Continuation, EvaluatedModel, _class, windows
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer

LENGTH = 32
CONFIG = TransformerConfig(
    vocab_size=256, num_layers=1, hidden_size=16, num_heads=4, max_length=LENGTH, param_dtype="float64"
)


@dataclass(frozen=True)
class Request:
    """What is used of `lm_eval.api.instance.Instance`."""

    args: tuple[Any, ...]


def asked(*each):
    return [Request(args) for args in each]


@pytest.fixture(scope="module")
def plain():
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda x: x * 8, nnx.state(model, nnx.Param)))  # sure of what it says
    return model


@pytest.fixture(scope="module")
def evaluated(plain):
    parallel = ax.parallelize(plain, ax.make_mesh(data=2, fsdp=2, tensor=2))
    return EvaluatedModel(parallel, ByteTokenizer(), prefix="\n", batch_size=4, max_gen_toks=6)


@pytest.fixture(scope="module")
def loglikelihood(plain):
    """Of the last `count` tokens, on one device, and whether each was the most likely."""
    logits_of = nnx.jit(lambda model, tokens: model(tokens))

    def of(tokens, count):
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens) - 1] = tokens[:-1]
        logits = log_softmax(np.asarray(logits_of(plain, padded)[0], np.float64), axis=-1)
        places = range(len(tokens) - 1 - count, len(tokens) - 1)
        each = [(logits[place, tokens[place + 1]], logits[place].argmax() == tokens[place + 1]) for place in places]
        return sum(one for one, _ in each), all(best for _, best in each)

    return of


def ids(text):
    return list(text.encode())


@pytest.mark.slow
def test_a_continuation_has_the_sum_of_its_tokens(evaluated, loglikelihood):
    pairs = [("the cat", " sat"), ("", "mat"), ("spaces  ", "belong"), ("a" * 60, "bcd"), ("né", "e")]
    expected = [
        loglikelihood(ids("the cat sat"), 4),
        loglikelihood(ids("\nmat"), 3),
        loglikelihood(ids("spaces  belong"), 8),
        loglikelihood(ids("a" * 60 + "bcd")[-LENGTH - 1 :], 3),  # the end of a long context
        loglikelihood(ids("née"), 1),
    ]
    found = evaluated.loglikelihood(asked(*pairs))
    np.testing.assert_allclose([value for value, _ in found], [value for value, _ in expected], rtol=1e-6)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


class Merging(ByteTokenizer):
    """Like learned tokens: "nt" is one token, spaces at a text's end are none, and of "~" nothing is left."""

    def encode(self, texts, *, special=True):
        return super().encode([text.rstrip(" ").replace("~", "").replace("nt", "\x01") for text in texts])


@pytest.mark.slow
def test_a_continuation_without_a_token_of_its_own_never_wins_unasked(evaluated, loglikelihood):
    merging = EvaluatedModel(evaluated.model, Merging(), prefix="\n", batch_size=4)
    found = merging.loglikelihood(asked(("can", "t"), ("~", "mat"), ("", "\n")))
    expected = [loglikelihood(ids("cant"), 1), loglikelihood(ids("\nmat"), 3), loglikelihood(ids("\n\n"), 1)]
    np.testing.assert_allclose([value for value, _ in found], [value for value, _ in expected], rtol=1e-6)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    for context, nothing in (("a cat", " "), ("a cat", ""), ("a ", ""), ("", "~")):
        with pytest.raises(
            ValueError, match=rf"no token of the continuation '{nothing}' after the context '{context}'"
        ):
            merging.loglikelihood(asked(("the", "mat"), (context, nothing)))
    assert merging.generate_until(asked(("~", {"max_gen_toks": 2}))) == merging.generate_until(
        asked(("", {"max_gen_toks": 2}))
    )


def test_what_greedy_decoding_writes_is_greedy(evaluated):
    [text] = evaluated.generate_until(asked(("ab", {"max_gen_toks": 3})))
    if "\ufffd" not in text:
        [(_, greedy)] = evaluated.loglikelihood(asked(("ab", text)))
        assert greedy


def test_a_text_of_any_length_is_scored_token_by_token(evaluated, loglikelihood):
    long = "".join(chr(97 + n % 23) for n in range(75))
    tokens = ids("\n" + long)
    first, second = loglikelihood(tokens[:33], 32)[0], loglikelihood(tokens[32:65], 32)[0]
    last = loglikelihood(tokens[-33:], 75 - 64)[0]
    found = evaluated.loglikelihood_rolling(asked((long,), ("hi",), ("",)))
    np.testing.assert_allclose(found, [first + second + last, loglikelihood(ids("\nhi"), 2)[0], 0.0], rtol=1e-6)


def test_windows_are_the_harnesss():
    utilities = pytest.importorskip("lm_eval.utils")
    for count in range(1, 12):
        tokens = list(range(1, count + 1))
        theirs = [
            ([*inputs, predicted[-1]], len(predicted))
            for inputs, predicted in utilities.get_rolling_token_windows(tokens, 0, 4, 1)
        ]
        assert [(list(row.tokens), row.scored) for row in windows(tokens, 0, 4)] == theirs


def test_text_goes_on_as_generate_writes_it(evaluated, plain):
    prompts = ["the cat", "a dog!!", ""]
    texts = evaluated.generate_until(asked(*((prompt, {"until": []}) for prompt in prompts)))
    for prompt, text in zip(prompts, texts, strict=True):
        start = ids(prompt) or ids("\n")
        [whole] = ax.generate(plain, [start], 6, jax.random.key(0), temperature=0)
        assert text == ByteTokenizer().decode(whole[len(start) :])


def test_text_ends_before_a_stop_word_and_at_the_end_token(evaluated):
    def written(tokens, until, end=None):
        text = Continuation(ByteTokenizer(), ids("go"), until, end)
        for token in tokens:
            text.add(token)
        return text.ended, text.finish()

    assert written(ids("one. two"), [". ", "w"]) == (True, "one")
    assert written(ids("one"), ["two"]) == (False, "one")
    assert written([*ids("né"), 0, *ids("x")], [], end=0) == (True, "né")
    assert written(ids("é")[:1], []) == (False, "\ufffd")
    [whole] = evaluated.generate_until(asked(("the cat", {"max_gen_toks": 6})))
    [cut] = evaluated.generate_until(asked(("the cat", {"until": [whole[2]], "max_tokens": 6})))
    assert cut == whole[: whole.index(whole[2])]


def test_a_repeated_request_draws_anew_in_every_batch(evaluated):
    alone = EvaluatedModel(evaluated.model, ByteTokenizer(), prefix="\n", batch_size=1)
    drawn = {"do_sample": True, "temperature": 5.0, "max_gen_toks": 8}
    texts = alone.generate_until(asked(*[("the cat", drawn)] * 3))
    assert len(set(texts)) == 3
    assert texts == alone.generate_until(asked(*[("the cat", drawn)] * 3))


def test_options_mean_what_tasks_mean_by_them():
    given = {"until": ["a", ""], "do_sample": True, "temperature": 0.5, "top_k": 3, "max_new_tokens": 9}
    found = Asked.of(given, 256)
    assert (found.until, found.length, found.sampling.temperature, found.sampling.top_k) == (("a",), 9, 0.5, 3)
    assert Asked.of({"do_sample": True}, 256).sampling.temperature == 1.0
    with pytest.raises(ValueError, match=r"num_beams=2 has no effect here: leave it out; length=0 is below 1"):
        Asked.of({"num_beams": 2, "max_gen_toks": 0}, 256)


def test_what_cannot_be_evaluated_is_refused(evaluated, plain):
    with pytest.raises(ValueError, match=r"a continuation of 33 tokens is longer than max_length=32"):
        evaluated.loglikelihood(asked(("a", "b" * 33)))
    with pytest.raises(ValueError, match=r"32 new tokens leave no room in max_length=32"):
        evaluated.generate_until(asked(("a", {"max_gen_toks": 32})))
    with pytest.raises(ValueError, match=r"puts no token before a text.*give prefix="):
        EvaluatedModel(evaluated.model, ByteTokenizer())
    with pytest.raises(TypeError, match=r"model=Transformer must be a parallel model, such as ax.parallelize"):
        EvaluatedModel(plain, ByteTokenizer())
    with pytest.raises(ValueError, match=r"max_length=33 must be at most the model's 32"):
        EvaluatedModel(evaluated.model, ByteTokenizer(), prefix="\n", max_length=33)
    with pytest.raises(ValueError, match=r"max_length=0 must be at most the model's 32 and at least 1"):
        EvaluatedModel(evaluated.model, ByteTokenizer(), prefix="\n", max_length=0)


@pytest.mark.slow
def test_prompts_of_any_length_are_read_by_few_programs(evaluated, monkeypatch):
    read, plain = set(), parallel_generate._Extend.__call__

    def extend(self, tokens, caches, starts):
        read.add((tokens.shape[1], caches is not None))
        return plain(self, tokens, caches, starts)

    monkeypatch.setattr(parallel_generate._Extend, "__call__", extend)
    evaluated.generate_until(asked(*(("x" * n, {"max_gen_toks": 1}) for n in (3, 5, 7, 9, 11, 13, 14, 15))))
    assert read == {*((n, False) for n in (2, 4, 8)), *((n, True) for n in (1, 2, 4))}


def test_without_the_harness_the_extra_is_named(evaluated, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    _class.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'axonml-jax\[lm-eval\]'"):
        ax.lm_eval_model(evaluated.model, ByteTokenizer(), prefix="\n")


def test_with_a_harness_it_is_one_of_its_models(evaluated, monkeypatch):
    """A stand-in for the documented interface: a base class without arguments, whose methods are the three."""

    class LM:
        def __init__(self):
            self.made = True

    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(LM=LM))
    _class.cache_clear()
    model = ax.lm_eval_model(evaluated.model, ByteTokenizer(), prefix="\n")
    assert isinstance(model, LM) and model.made and model.batch_size == 8
    _class.cache_clear()


@pytest.mark.filterwarnings("ignore")
def test_the_harness_evaluates_it(evaluated, loglikelihood, tmp_path, monkeypatch):
    lm_eval = pytest.importorskip("lm_eval")
    for name in ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "1")
    rows = [{"question": "one and one is", "choices": ["two", "three"], "answer": 0}] * 3
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "sums", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test", "output_type": "multiple_choice", "doc_to_text": "question", "doc_to_choice": "choices",
        "doc_to_target": "answer", "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    _class.cache_clear()
    model = ax.lm_eval_model(evaluated.model, ByteTokenizer(), prefix="\n", batch_size=4)
    found = lm_eval.simple_evaluate(model=model, tasks=[task], bootstrap_iters=0)
    sums = [loglikelihood(ids(f"one and one is {word}"), len(word) + 1)[0] for word in ("two", "three")]
    assert found["results"]["sums"]["acc,none"] == float(sums[0] > sums[1])
