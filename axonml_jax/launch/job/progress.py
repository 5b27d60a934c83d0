"""What a run shows while it trains: a live bar on a terminal, one line in a notebook, plain lines anywhere else."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from axonml_jax.launch.job.fit import Record
from axonml_jax.training.progress.one_line import OneLine, rewrites


@contextmanager
def progress(steps: int, console: Console | None = None) -> Iterator[Callable[[Record], None]]:
    """A display for the records of a run of `steps` updates.

    Args:
      steps: where it ends.
      console: where it shows; None: standard output.
    """
    console = console or Console(highlight=False)
    if not console.is_terminal:
        if rewrites(console.file):  # pyright: ignore[reportArgumentType]  # rich's IO[str] is a text stream
            yield from _in_notebook(steps, OneLine(console.file))  # pyright: ignore[reportArgumentType]
        else:
            yield lambda record: print(line(record, steps), file=console.file, flush=True)
        return
    columns = [BarColumn(bar_width=24), MofNCompleteColumn(), TextColumn("{task.fields[shown]}")]
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("training", total=steps, shown="compiling ...")

        def show(record: Record) -> None:
            bar.update(task, completed=record.step, shown="  ".join(cells(record)))
            if "valid_loss" in record.metrics:
                console.print(line(record, steps), soft_wrap=True, highlight=False)

        yield show


def _in_notebook(steps: int, shown: OneLine) -> Iterator[Callable[[Record], None]]:
    """One line that is written over; validations stay."""

    def show(record: Record) -> None:
        if "valid_loss" in record.metrics:
            shown.keep(line(record, steps))
        else:
            shown.show(line(record, steps))

    yield show
    shown.end()


def line(record: Record, steps: int) -> str:
    """A record as one line of text.

    >>> line(Record(10, {"loss": 2.5, "learning_rate": 3e-4, "step_time": 0.2, "tokens_per_second": 40_960.0}), 300)
    'step  10/300  loss 2.5000  lr 3.00e-04  40,960 tokens/s  200 ms/step  ETA 0:00:58'
    """
    left = round((steps - record.step) * record.metrics.get("step_time", 0))
    more = [f"ETA {timedelta(seconds=left)}"] if left else []
    more += [f"validation loss {record.metrics['valid_loss']:.4f}"] if "valid_loss" in record.metrics else []
    return "  ".join([f"step {record.step:>{len(str(steps))}}/{steps}", *cells(record), *more])


def cells(record: Record) -> list[str]:
    """The measurements of a record in words; those it lacks are left out."""
    texts = {
        "loss": lambda value: f"loss {value:.4f}",
        "grad_norm": lambda value: f"norm {value:.2f}",
        "learning_rate": lambda value: f"lr {value:.2e}",
        "experts/busiest": lambda value: f"busiest expert {value:.2f}x",
        "experts/dropped": lambda value: f"dropped {value:.1%}" if value else "",
        "tokens_per_second": lambda value: f"{value:,.0f} tokens/s",
        "examples_per_second": lambda value: f"{value:,.0f} examples/s",
        "step_time": lambda value: f"{1000 * value:,.0f} ms/step",
        "mfu": lambda value: f"MFU {value:.1%}",
        "compile_time": lambda value: f"compiled in {value:.1f} s",
    }
    return [said for name, text in texts.items() if name in record.metrics and (said := text(record.metrics[name]))]
