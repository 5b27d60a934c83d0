"""Documents: tokenizers, packing, masks on prompts; a packed epoch has the loss of every document alone."""

import json
import re
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from data_sources import documents
from flax import nnx

import axonml_jax as ax
from axonml_jax.cli import tasks as text_task
from axonml_jax.config.config import SampleConfig
from axonml_jax.config.sections import DataConfig
from axonml_jax.data.documents import Document, PackedDocuments, TextSoFar, best_fit, cut
from axonml_jax.models.config import TransformerConfig
from axonml_jax.models.transformer import Transformer

WORDS = ["<unk>", "</s>", "the", "cat", "sat", "on", "mat"]


def write_tokenizer(folder):
    rules = {
        "version": "1.0",
        "added_tokens": [{"id": 1, "content": "</s>", "special": True} | dict.fromkeys(
            ("single_word", "lstrip", "rstrip", "normalized"), False)],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(WORDS)}, "unk_token": "<unk>"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    return folder / "tokenizer.json"


def test_a_tokenizer_is_read_from_its_file(tmp_path):
    pytest.importorskip("tokenizers")
    tokenizer = ax.load_tokenizer(write_tokenizer(tmp_path))
    assert tokenizer.vocab_size == 7 and ax.load_tokenizer(tmp_path).fingerprint == tokenizer.fingerprint
    assert [ids.tolist() for ids in tokenizer.encode(["the cat sat", "dog on mat"])] == [[2, 3, 4], [0, 5, 6]]
    assert tokenizer.decode([2, 3, 1]) == "the cat" and tokenizer.id_of("</s>") == 1
    rows = ax.pack([{"text": "the cat sat on the mat"}], 8, tokenizer, end="</s>")
    assert rows[0]["targets"].tolist() == [3, 4, 5, 2, 6, 1, -1, -1]
    with pytest.raises(ValueError, match=r"no token '<s>': did you mean '</s>'\?"):
        ax.pack(documents(), 8, tokenizer, end="<s>")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is no tokenizer\.json"):
        ax.load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer at 'nowhere'"):
        ax.load_tokenizer("nowhere")


def test_stored_truncation_and_padding_cut_nothing_and_are_no_targets(tmp_path, caplog):
    tokenizers = pytest.importorskip("tokenizers")
    text, rules = "the cat sat on the mat", tokenizers.Tokenizer.from_file(str(write_tokenizer(tmp_path)))
    rules.save(str(tmp_path / "tokenizer.json"))
    known = ax.load_tokenizer(tmp_path).fingerprint
    rules.enable_truncation(3)
    rules.enable_padding(length=9, pad_id=1, pad_token="</s>")
    rules.save(str(tmp_path / "tokenizer.json"))
    for _ in range(2):
        tokenizer = ax.load_tokenizer(tmp_path)
        for special in (True, False, "before"):
            found = [ids.tolist() for ids in tokenizer.encode([text, "cat"], special=special)]
            assert found == [[2, 3, 4, 5, 2, 6], [3]]
        assert tokenizer.fingerprint == known  # positions in data go on
    [message] = caplog.messages
    assert "tokenizer.json stores truncation and padding" in message and "left out" in message


def test_tokenizers_whose_ids_or_unknown_words_cannot_be_are_refused_by_name(tmp_path):
    pytest.importorskip("tokenizers")
    path = write_tokenizer(tmp_path)
    said = json.loads(path.read_text())
    said["model"]["unk_token"] = "<nothing>"
    path.write_text(json.dumps(said))
    tokenizer = ax.load_tokenizer(path)
    assert tokenizer.encode(["the cat"], special="before")[0].tolist() == [2, 3]
    with pytest.raises(
        ValueError, match=r"tokenizer.json cannot encode 'a dog': .*Missing \[UNK\].*unk_token or unk_id"
    ):
        ax.pack([{"text": "the cat"}, {"text": "a dog"}], 8, tokenizer)
    said["model"]["vocab"]["mat"] = 2**31
    path.write_text(json.dumps(said))
    with pytest.raises(ValueError, match="the token 'mat' has the id 2147483648, and token ids are int32"):
        ax.load_tokenizer(path)
    said |= {"model": said["model"] | {"vocab": {}}, "added_tokens": []}
    path.write_text(json.dumps(said))
    with pytest.raises(ValueError, match=r"tokenizer.json has no tokens"):
        ax.load_tokenizer(path)


def write_template(tmp_path):
    """The tokenizer with tokens around every text."""
    tokenizers = pytest.importorskip("tokenizers")
    write_tokenizer(tmp_path)
    rules = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    around = tokenizers.processors.TemplateProcessing(
        single="<unk> $A </s>", special_tokens=[("<unk>", 0), ("</s>", 1)]
    )
    rules.post_processor = around
    rules.save(str(tmp_path / "tokenizer.json"))


def test_nothing_is_added_between_a_prompt_and_its_completion(tmp_path):
    write_template(tmp_path)
    tokenizer = ax.load_tokenizer(tmp_path)
    assert tokenizer.encode(["the cat"])[0].tolist() == [0, 2, 3, 1]
    assert tokenizer.encode(["the cat"], special="before")[0].tolist() == [0, 2, 3]
    assert [each.tolist() for each in tokenizer.encode(["", "cat"], special="before")] == [[0], [0, 3]]
    pair = [{"prompt": "the cat", "completion": "sat"}]
    rows = ax.pack(pair, 4, tokenizer, prompt_field="prompt", completion_field="completion")
    assert rows[0]["tokens"].tolist() == [0, 2, 3, 0] and rows[0]["targets"].tolist() == [-1, -1, 4, -1]


LLAMA = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]
LLAMA += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]
DECODERS = {
    "bytes": None,
    "spaces": (None, "the cat s at on"),
    "metaspace": ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}, "▁the ▁cat s ▁ ."),
    "llama": (
        {"type": "Sequence", "decoders": LLAMA},
        "▁the ▁c at ▁ . <0xC3> <0xA9> <0xE2> <0x82> <0xAC> <0x41> <0x0A>",
    ),
    "wordpiece": ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "the cat ##s . , do n't 's !"),
    "byte level": ({"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}, "Ġthe at Ã © â Ĥ ¬ Ġ . ĠÃ"),
}


@pytest.mark.parametrize("decoder", DECODERS)
def test_text_comes_piece_by_piece_as_of_all_tokens_and_each_is_decoded_a_few_times(decoder, tmp_path):
    if decoder == "bytes":
        tokenizer, ids = ax.load_tokenizer(), [*"né€ a".encode(), 0xC3, 0xE2, 0xFF]
    else:
        pytest.importorskip("tokenizers")
        rules, words = json.loads(write_tokenizer(tmp_path).read_text()), DECODERS[decoder][1].split()
        rules["model"]["vocab"] = {word: i for i, word in enumerate(["<unk>", "</s>", *words])}
        (tmp_path / "tokenizer.json").write_text(json.dumps(rules | {"decoder": DECODERS[decoder][0]}))
        tokenizer, ids = ax.load_tokenizer(tmp_path), range(1, len(words) + 2)
    decoded = []
    counting = types.SimpleNamespace(decode=lambda some: decoded.append(len(some)) or tokenizer.decode(some))
    for seed in range(20):
        drawn, taken, known = np.random.default_rng(seed).choice(ids, 60).tolist(), 0, 0
        decoded.clear()
        text = TextSoFar(counting)
        for n in (*range(seed, 60), 61):
            whole = tokenizer.decode(drawn[:n])
            whole = whole if n == 61 else whole.rstrip("\N{REPLACEMENT CHARACTER}")
            assert text.add(drawn[taken:n], final=n == 61) == whole[known:]
            taken, known = n, max(known, len(whole))
        assert sum(decoded) < 12 * 60


def test_samples_follow_their_prompt_and_end_with_their_document(tmp_path, monkeypatch):
    write_template(tmp_path)
    given = []

    def generate(model, prompts, length, key, **options):
        given.append(prompts.tolist())
        return np.concatenate([prompts, [[4, 1, 5], [6, 5, 4]]], axis=1)

    monkeypatch.setattr(text_task, "generate", generate)
    model = types.SimpleNamespace(plan=types.SimpleNamespace(independent=False))
    section = SampleConfig(count=2, length=3, prompt="the cat")
    texts = text_task.write_samples(model, section, 8, 0, str(tmp_path), "</s>")
    assert given == [[[0, 2, 3]] * 2] and texts == ["<unk> the cat sat", "<unk> the cat mat on sat"]


def opening(tmp_path, text, **section):
    path = tmp_path / ("data.jsonl" if section else "data.txt")
    path.write_text(text)
    config = DataConfig(path=str(path), length=32, valid_fraction=0.5, **section)
    return text_task.opening_of(text_task.read_data(config), config)


def test_samples_without_a_prompt_begin_as_the_validation_text_does(tmp_path):
    lines = "".join(f"line {number} has six words here\n" for number in range(9))
    assert opening(tmp_path, lines) == "line 5 has six"  # the file is cut in its line 4
    assert opening(tmp_path, "\t\n " * 40) == "\n"
    documents = "".join(json.dumps({"text": f"a document of number {number}"}) + "\n" for number in range(8))
    assert opening(tmp_path, documents, format="jsonl") == "a document of number"
    pairs = "".join(json.dumps({"ask": f"{number}+1 =", "say": " is it"}) + "\n" for number in range(8))
    begins = opening(tmp_path, pairs, prompt_field="ask", completion_field="say")
    assert re.fullmatch(r"\d\+1 =", begins)


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_fills_rows_and_leaves_no_piece_out(seed):
    draw = np.random.default_rng(seed)
    length = int(draw.integers(1, 60))
    pieces = cut(draw.integers(0, 3 * length, 200), length)
    rows = best_fit(pieces.size, length)
    assert sorted(piece for row in rows for piece in row) == list(range(len(pieces.size)))
    filled = [int(pieces.size[row].sum()) for row in rows]
    assert max(filled) <= length and min(pieces.size) >= 1
    # At most one row is half empty: two of them would have fitted into one.
    assert sum(2 * each <= length for each in filled) <= 1


def test_a_packed_epoch_has_the_loss_of_every_document_alone():
    texts = [each["text"] for each in documents()]
    options = {
        "vocab_size": 256,
        "num_layers": 2,
        "hidden_size": 16,
        "num_heads": 2,
        "max_length": 16,
        "position": "learned",
    }
    model = Transformer(TransformerConfig(**options, param_dtype="float64"), rngs=nnx.Rngs(0))
    of_rows = jax.jit(lambda rows: model.loss(**rows))
    of_one = jax.jit(lambda tokens, targets: model.loss(tokens, targets))
    expected = np.zeros(2)
    for text in texts:
        ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
        for start in range(0, len(ids) - 1, 16):  # longer documents are cut
            piece = ids[start : start + 17]
            padded = np.full((2, 16), -1, np.int32)
            padded[0, : len(piece) - 1], padded[1, : len(piece) - 1] = piece[:-1], piece[1:]
            expected += np.array(of_one(np.maximum(padded[:1], 0), padded[1:]))
    packed, stream = ax.pack(texts, 16), ax.pack((each for each in texts), 16)
    assert packed.num_targets == expected[1] and len(packed) < len(texts) * 0.75
    alone = ax.pack(texts, 16, share=False)
    for rows in ([packed[i] for i in range(len(packed))], list(stream), [alone[i] for i in range(len(alone))]):
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        np.testing.assert_allclose(np.array(of_rows(batch)), expected, rtol=1e-12)


def test_prompts_are_given_and_not_learned():
    samples = [{"ask": "ab", "answer": "cd"}, {"ask": "a", "answer": "bcdefgh"}, {"ask": "abcdefgh", "answer": "i"}]
    samples += [{"ask": "abc", "answer": ""}]
    fields = {"prompt_field": "ask", "completion_field": "answer"}
    rows = ax.pack(samples, 4, share=False, **fields)
    text = lambda ids: bytes(id for id in ids if id >= 0).decode()
    found = sorted(
        (text(row["tokens"][row["segment_ids"] > 0]), text(row["targets"])) for row in map(rows.__getitem__, range(4))
    )
    # Of the third document the first piece is prompt alone, and the fourth has no completion.
    assert found == [("abc", "cd"), ("abcd", "bcde"), ("efg", "fgh"), ("efgh", "i")]
    assert rows.num_targets == 10 and rows.num_documents == 3
    streamed = sorted(text(row["targets"]) for row in ax.pack(iter(samples), 4, share=False, **fields))
    assert streamed == [targets for _, targets in sorted(found, key=lambda each: each[1])]


def test_what_is_no_document_is_refused():
    with pytest.raises(RuntimeError, match="reading document 1: ValueError: the sample has no field 'text'"):
        ax.pack([{"text": "ab"}, {"body": "ab"}], 4)
    with pytest.raises(RuntimeError, match="document 0: TypeError: these fields of a sample are no text: text: int"):
        ax.pack([{"text": 3}], 4)
    with pytest.raises(ValueError, match="none of 1 documents has a token to predict"):
        ax.pack(["a"], 4)
    with pytest.raises(ValueError, match="prompt_field='a', completion_field=None: give both or none"):
        ax.pack(["ab"], 4, prompt_field="a")
    with pytest.raises(ValueError, match="bytes have no token '</s>'"):
        ax.pack(["ab"], 4, end="</s>")
    with pytest.raises(ValueError, match="length=0"):
        PackedDocuments([Document(np.arange(3), 0)], 0)
    with pytest.raises(ValueError, match="length=0"):
        ax.pack(lambda: iter(["ab"]), 0)
    with pytest.raises(ValueError, match="no tokenizer at 'nowhere'"):
        ax.pack(["ab"], 4, Path("nowhere"))
    with pytest.raises(ValueError, match="the sample holds a NoneType"):  # and does not end the epoch there
        list(ax.pack(lambda: iter(["ab", None, None, "cd"]), 4))
