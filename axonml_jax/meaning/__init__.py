"""The loss of the whole batch, computed inside `shard_map` from each rank's rows.

The loss is traced once at the whole batch's shape, so numbers that its code made from the batch's size are right. That program
is then run on this rank's part: every value is whole, split along a dim, or a partial sum (`places.py`), rules say what an
operation makes of them (there too), and collectives that have exact transposes change one place into another
(`values.py`). The objective is the sum over ranks of what each rank returns, which is what a step differentiates and sums.
"""
