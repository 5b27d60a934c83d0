"""`axonml-jax generate RUN`: text from a trained run, written as it comes."""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np

from axonml_jax.checkpoint.team import Team
from axonml_jax.data.documents.text_so_far import TextSoFar
from axonml_jax.data.documents.tokenizer import Tokenizer, load_tokenizer
from axonml_jax.facade.parallel_generate import generate
from axonml_jax.facade.parallel_model import ParallelModel
from axonml_jax.launch.commands.saved.saved_run import SavedRun, saved_run
from axonml_jax.launch.config.run_config import ConfigError
from axonml_jax.launch.job.document_task import check_tokenizer
from axonml_jax.launch.job.run_setup import all_or_refuse, start_devices
from axonml_jax.logging import print0
from axonml_jax.models.generation.sampling import Sampling

_PATIENCE = 86_400.0
"""Seconds that the other processes wait for somebody who types."""


def generate_text(given: argparse.Namespace, flags: Sequence[str]) -> int:
    """Continue a prompt: `--prompt`, a file's, what is piped in, or line by line what is typed.

    Args:
      given: the arguments of `generate_parser`.
      flags: keys of the configuration, such as `--mesh.fsdp 4`.

    Returns:
      0.

    Raises:
      ConfigError: for a run without checkpoints, options that cannot work, or an empty prompt.
    """
    sampling = Sampling(temperature=given.temperature, top_k=given.top_k, top_p=given.top_p)
    if problems := [*sampling.problems(), *_problems(given)]:
        raise ConfigError("; ".join(problems))
    run = saved_run("generate", given, flags)
    run.config.transformer_for("generate")
    all_or_refuse(partial(check_tokenizer, run.config))
    all_or_refuse(partial(start_devices, run.config.devices.simulated))  # the processes that read a file together
    [prompts] = all_or_refuse(partial(_given, given))
    ground, model = run.open()
    if ground.world.is_main_process:
        print(f"{run.folder}, step {run.step}, on {ground.device_words}", file=sys.stderr)
    for number, prompt in enumerate(prompts or _heard(given)):
        key = jax.random.fold_in(jax.random.key(given.seed), number)
        _continue(run, model, prompt, given, sampling, key)
    return 0


def _problems(given: argparse.Namespace) -> Iterator[str]:
    if given.length < 1:
        yield f"length={given.length} is below 1"
    if given.prompt is not None and given.prompt_file is not None:
        yield "--prompt and --prompt-file both say how the text begins: give one"


def _continue(
    run: SavedRun, model: ParallelModel, prompt: str, given: argparse.Namespace, sampling: Sampling, key: jax.Array
) -> None:
    """Write a prompt and what follows it."""
    tokenizer = load_tokenizer(run.config.data.tokenizer)
    tokens = tokenizer.encode([prompt], special="before")[0][None]
    print0(prompt, end="", flush=True)
    end = None if run.config.data.end is None else tokenizer.id_of(run.config.data.end)
    show = Shown(tokens.shape[1], given.stop, lambda text: print0(text, end="", flush=True), tokenizer, end)
    window = min(run.config.transformer_for("generate").max_length, tokens.shape[1] + given.length)
    drawn = {"temperature": sampling.temperature, "top_k": sampling.top_k, "top_p": sampling.top_p}
    generate(model, tokens, given.length, key, window=window, after_token=show, **drawn)
    show.finish()
    print0("", flush=True)


def _given(given: argparse.Namespace) -> list[str]:
    """The prompts that the flags give; a file is the main process's, which may be the only one that has it."""
    if given.prompt is None and given.prompt_file is None:
        return []
    text = given.prompt
    if given.prompt_file is not None:
        text = Team().decide("read --prompt-file", partial(_content, given.prompt_file))
    if not text:
        raise ConfigError("the prompt is empty: give at least one character")
    return [text] * given.count


def _content(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompt-file {path}: is no text in UTF-8 ({error})") from error


def _heard(given: argparse.Namespace) -> Iterator[str]:
    """What is piped in, or line by line what is typed; the main process reads it, and the others hear of it."""
    team = Team(timeout=_PATIENCE)
    text = team.decide("read the prompt", lambda: None if sys.stdin.isatty() else sys.stdin.read())
    if text == "":
        raise ConfigError("no prompt: give --prompt, --prompt-file, or pipe a text in")
    if text is not None:
        yield from [text] * given.count
        return
    while (line := team.decide("read a prompt", _typed)) is not None:
        if line:
            yield line
    print0("")


def _typed() -> str | None:
    """A line, None at the end of the input."""
    try:
        return input("prompt> ")
    except EOFError:
        return None


class Shown:
    """Writes the text as its tokens come, until a stop word is complete or the end token comes, neither of which is written.

    Args:
      start: tokens of the prompt, which are not written.
      stop: words that end the text.
      write: takes the next piece.
      tokenizer: of the tokens; None: they are bytes.
      end: the token that ends a document; None: there is none.
    """

    def __init__(
        self,
        start: int,
        stop: Sequence[str],
        write: Callable[[str], None],
        tokenizer: Tokenizer | None = None,
        end: int | None = None,
    ):
        self._start, self._stop, self._write, self._end = start, tuple(stop), write, end
        self._text = TextSoFar(load_tokenizer() if tokenizer is None else tokenizer)
        self._seen, self._held = 0, ""

    def __call__(self, tokens: np.ndarray) -> bool:
        """Take the tokens so far [1, n]; true once a stop word is complete, or the document."""
        if not self._seen:  # decoders write a text's first word without the space before it
            self._text.add(tokens[0, : self._start].tolist())
            self._seen = self._start
        new, self._seen = tokens[0, self._seen :].tolist(), tokens.shape[1]
        ended = self._end in new
        self._held += self._text.add(new[: new.index(self._end)] if ended else new)
        ends = [at for word in self._stop if (at := self._held.find(word)) >= 0]
        if ends:
            self._write(self._held[: min(ends)])
            self._held = ""
            return True
        safe = len(self._held) - max((_begun(self._held, word) for word in self._stop), default=0)
        self._write(self._held[:safe])
        self._held = self._held[safe:]
        return ended

    def finish(self) -> None:
        """Write what was held back."""
        self._write(self._held + self._text.add([], final=True))
        self._held = ""


def _begun(text: str, word: str) -> int:
    """How many characters at a text's end may be a word's beginning.

    >>> _begun("it is the e", "end"), _begun("it is", "end")
    (1, 0)
    """
    return next((n for n in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:n])), 0)
