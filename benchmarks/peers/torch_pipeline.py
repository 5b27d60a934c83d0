"""Our pipeline's step against PyTorch's Schedule1F1B (gloo): same GPT, weights, batch and AdamW, four ranks on two cores.

Run: python benchmarks/peers/torch_pipeline.py --torch-python PATH --layers 8 (a Python with `pip install torch==2.13.0 numpy`)
Shows: what `torch_ddp.py` shows, for `torch.distributed.pipelining` with four processes, and `ax.Pipeline` (1F1B) on four
simulated devices and as four processes. The embedding is not tied. Below 1.0 we are faster.
"""

from torch_ddp import main

if __name__ == "__main__":
    main("pipeline", __doc__)
