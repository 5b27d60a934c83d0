"""Small random GPT-2, Llama and Mixtral models of `transformers`, with tokens and logits: `python hf_reference.py FOLDER`.

Runs in an environment with torch and transformers (no JAX). With `check` as a second argument it loads what
`write_pretrained` wrote into FOLDER/KIND/back and compares.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

GPT2 = dict(vocab_size=37, n_positions=16, n_embd=24, n_layer=2, n_head=3, n_inner=40)
LLAMA = dict(
    vocab_size=37,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=16,
)


def models():
    yield "gpt2", GPT2LMHeadModel(GPT2Config(**GPT2))
    yield "llama", LlamaForCausalLM(LlamaConfig(**LLAMA))
    yield (
        "mixtral",
        MixtralForCausalLM(
            MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager")
        ),
    )
    yield "llama-tied", LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True, rms_norm_eps=1e-4))


def main(folder, mode="write"):
    torch.manual_seed(0)
    tokens = np.random.default_rng(0).integers(0, 37, (2, 16))
    for kind, model in models():
        place = Path(folder) / kind
        if mode == "write":
            for _, p in model.named_parameters():  # biases and norms start at 0 and 1: make every one count
                p.data += 0.3 * torch.randn_like(p)
            model.double().eval()
            model.float().save_pretrained(place)
            with torch.no_grad():
                logits = model.double()(torch.from_numpy(tokens)).logits.numpy()
            np.savez(place / "reference.npz", tokens=tokens, logits=logits)
        else:
            how = (
                {"experts_implementation": "eager"} if kind == "mixtral" else {}
            )  # its grouped product takes no float64
            back = AutoModelForCausalLM.from_pretrained(place / "back", **how).double().eval()
            with torch.no_grad():
                logits = back(torch.from_numpy(tokens)).logits.numpy()
            np.testing.assert_allclose(logits, np.load(place / "reference.npz")["logits"], rtol=1e-6, atol=1e-6)
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
