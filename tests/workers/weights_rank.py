"""One of several processes that read published weights into a sharded model and write them again.

`python weights_rank.py PORT NUM_PROCESSES PROCESS_ID FOLDER OUT`. Prints how many bytes of arrays this process has read.
"""

import sys

from flax import nnx

import axonml_jax as ax
from axonml_jax.models.transformer import Transformer
from axonml_jax.models.weights import load_pretrained, pretrained_config, write_pretrained


def main(port, num_processes, process_id, folder, out):
    coordinator = f"127.0.0.1:{port}"
    ax.init(coordinator=coordinator, num_processes=int(num_processes), process_id=int(process_id), timeout=60)
    config = pretrained_config(folder, scan_layers=True)
    model = ax.FSDP(lambda: Transformer(config, rngs=nnx.Rngs(0)), ax.make_mesh(fsdp=int(num_processes)))
    size = load_pretrained(model, folder)
    write_pretrained(out, config, model)
    print(size)


if __name__ == "__main__":
    main(*sys.argv[1:])
