"""PyTorch's `context_parallel` on CPUs, two processes over gloo: whether it runs, and how its result compares.

    python benchmarks/peers/torch_context.py --torch-python PATH   # a Python with `pip install torch==2.13.0 numpy`

Each rank enters `context_parallel` with its buffers of one sequence, calls `scaled_dot_product_attention` and its backward, and
holds what comes back to attention of the whole sequence. Prints the error where PyTorch has no such path, and else the largest
difference and seconds; `context_time.py` has this library's.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

RANK = """
import sys, time, torch, torch.distributed as dist, torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

length = int(sys.argv[1])
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("context",))
torch.manual_seed(0)
q, k, v = (torch.randn(1, 4, length, 64) for _ in range(3))
wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
try:
    for _ in range(2):
        start = time.perf_counter()
        own = [x.clone() for x in (q, k, v)]
        with context_parallel(mesh, buffers=own, buffer_seq_dims=[2] * 3, no_restore_buffers=set(own)):
            for x in own:
                x.requires_grad_()
            out = F.scaled_dot_product_attention(*own, is_causal=True)
            out.sum().backward()
        seconds = time.perf_counter() - start
    (whole,) = context_parallel_unshard(mesh, [out.detach()], [2])
    if dist.get_rank() == 0:
        print(f"forward and backward in {seconds:.2f} s, difference {(whole - wanted).abs().max():.2g}")
except Exception as error:
    if dist.get_rank() == 0:
        print(f"does not run: {type(error).__name__}: {str(error).splitlines()[0]}")
dist.destroy_process_group()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--length", type=int, default=8192)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rank.py"
        file.write_text(RANK, "utf-8")
        command = [given.torch_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        done = subprocess.run([*command, str(file), str(given.length)], capture_output=True, text=True, timeout=600)
    version = [given.torch_python, "-c", "import torch; print(torch.__version__)"]
    print(
        f"PyTorch {subprocess.run(version, capture_output=True, text=True).stdout.strip()}, {given.length:,} positions:"
    )
    print(done.stdout.strip() or done.stderr[-2000:])


if __name__ == "__main__":
    main()
