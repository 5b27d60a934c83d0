"""Our FSDP step (FULL_SHARD) against PyTorch's FSDP2 (gloo): same GPT, weights, batch and AdamW, two ranks on two cores.

Run: python benchmarks/peers/torch_fsdp.py --torch-python PATH (a Python with `pip install torch==2.13.0 numpy`, default: this)
Shows: what `torch_ddp.py` shows, for `fully_shard` on every block and on the model, and `ax.FSDP` with its default units.
Below 1.0 we are faster.
"""

from torch_ddp import main

if __name__ == "__main__":
    main("fsdp", __doc__)
