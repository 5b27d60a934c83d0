"""Find a plan for Llama 3 8B on 512 TPU v5p chips, on a laptop, and read what a chip will hold and send.

Run: python examples/plan_a_pod.py
Shows: the search, the prediction of a chip's memory and traffic, and what is asserted of both.
"""

import axonml_jax as ax
from axonml_jax.models.config import preset

model = preset("llama3-8b")
answer = ax.plan(model, num_devices=512, hardware="v5p", global_batch=512)
print(answer)
print()
print(answer.prediction)

# The same plan is a value: it can be compared, changed and priced again.
narrow = ax.plan(model, num_devices=512, hardware="v5p", global_batch=512, max_memory=20 * 2**30)
held = narrow.prediction.memory.total
print(f"\nin 20 GiB: {narrow.best.candidate}, {held / 2**30:.1f} GiB")

assert answer.prediction.params == 8_030_261_248
assert held <= 20 * 2**30 and narrow.best.price.time >= answer.best.price.time
