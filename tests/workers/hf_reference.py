"""Small random models of `transformers` of every family, with tokens and logits: `python hf_reference.py FOLDER`.

Runs in an environment with torch and transformers (no JAX). With `check` as a second argument it loads what
`write_pretrained` wrote into FOLDER/KIND/back and compares.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM

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
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=8,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=8)
DEEPSEEK_YARN = YARN | dict(mscale=1.0, mscale_all_dim=0.5, beta_fast=16, beta_slow=2)
EXPERTS = dict(num_experts_per_tok=2, experts_implementation="eager")  # the grouped product takes no float64
QWEN_MOE = dict(num_experts=4, moe_intermediate_size=20, head_dim=8)
GPT_OSS = dict(num_local_experts=4, head_dim=8, sliding_window=5, num_hidden_layers=4)
GEMMA2 = dict(
    head_dim=8, sliding_window=5, query_pre_attn_scalar=10, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
)
GEMMA3_ROPE = {
    "full_attention": dict(rope_type="linear", rope_theta=1000.0, factor=4.0),
    "sliding_attention": dict(rope_type="default", rope_theta=50.0),
}
GEMMA3 = dict(
    head_dim=8, sliding_window=5, query_pre_attn_scalar=10, num_hidden_layers=3, rope_parameters=GEMMA3_ROPE,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
)  # fmt: skip
DEEPSEEK = LLAMA | EXPERTS | dict(
    num_hidden_layers=3, num_key_value_heads=6, n_routed_experts=8, moe_intermediate_size=20, n_shared_experts=2, n_group=4,
    topk_group=2, first_k_dense_replace=1, q_lora_rank=10, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4,
    v_head_dim=5, rms_norm_eps=1e-4, rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=1.0),
)  # fmt: skip
CLASSES = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}

MODELS = {
    "gpt2": ("GPT2", GPT2),
    "llama": ("Llama", LLAMA),
    "llama-tied": ("Llama", LLAMA | dict(tie_word_embeddings=True, rms_norm_eps=1e-4)),
    "llama3": ("Llama", LLAMA | dict(rope_parameters=LLAMA3, head_dim=8)),
    "llama-yarn": ("Llama", LLAMA | dict(rope_parameters=YARN)),
    "llama-yarn-scaled": ("Llama", LLAMA | dict(rope_parameters=DEEPSEEK_YARN)),
    "llama-linear": ("Llama", LLAMA | dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=2.0))),
    "mistral": ("Mistral", LLAMA | dict(sliding_window=5, head_dim=8)),
    "mixtral": ("Mixtral", LLAMA | EXPERTS | dict(num_local_experts=4)),
    "mixtral-window": ("Mixtral", LLAMA | EXPERTS | dict(num_local_experts=4, sliding_window=3)),
    "qwen2": ("Qwen2", LLAMA | dict(tie_word_embeddings=True)),
    "qwen2-window": ("Qwen2", LLAMA | dict(use_sliding_window=True, sliding_window=4, max_window_layers=0)),
    "qwen3": ("Qwen3", LLAMA | dict(head_dim=8)),
    "qwen3_moe": ("Qwen3Moe", LLAMA | EXPERTS | QWEN_MOE | dict(norm_topk_prob=True)),
    "qwen3_moe-dense-first": ("Qwen3Moe", LLAMA | EXPERTS | QWEN_MOE | dict(mlp_only_layers=[0])),
    "gpt_oss": ("GptOss", LLAMA | EXPERTS | GPT_OSS),
    "deepseek_v3": ("DeepseekV3", DEEPSEEK),
    "deepseek_v3-plain": (
        "DeepseekV3",
        DEEPSEEK | dict(q_lora_rank=None, n_shared_experts=1, norm_topk_prob=False, rope_parameters=None),
    ),
    "gemma2": ("Gemma2", LLAMA | GEMMA2),
    "gemma3": ("Gemma3Text", LLAMA | GEMMA3),
    "gemma3-windows": ("Gemma3Text", LLAMA | dict(head_dim=8, sliding_window=5, final_logit_softcapping=4.0)),
}


def logits_of(model, tokens):
    with torch.no_grad():
        return model.double()(torch.from_numpy(tokens)).logits.numpy()


def main(folder, mode="write"):
    torch.manual_seed(0)
    tokens = np.random.default_rng(0).integers(0, 37, (2, 16))
    for kind, (name, options) in MODELS.items():
        place = Path(folder) / kind
        if mode == "write":
            config = getattr(transformers, f"{name}Config")(**options)
            model = getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config)
            for _, p in model.named_parameters():  # biases and norms start at 0 and 1: make every one count
                p.data = 0.02 * torch.randn_like(p) if not p.isfinite().all() or p.abs().max() > 10 else p.data
                p.data += 0.3 * torch.randn_like(p)
            for name, b in model.named_buffers():  # what balances experts, which begins with zeros
                b.data += 0.3 * torch.randn_like(b) if name.endswith("correction_bias") else 0
            model.double().eval()
            model.float().save_pretrained(place)
            np.savez(place / "reference.npz", tokens=tokens, logits=logits_of(model, tokens))
        else:
            how = {"experts_implementation": "eager"} if "experts_implementation" in options else {}
            back = AutoModelForCausalLM.from_pretrained(place / "back", **how).eval()
            right = np.load(place / "reference.npz")["logits"]
            np.testing.assert_allclose(logits_of(back, tokens), right, rtol=1e-6, atol=1e-6, err_msg=kind)
    print("done")


if __name__ == "__main__":
    main(*sys.argv[1:])
