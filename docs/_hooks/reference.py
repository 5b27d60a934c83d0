"""MkDocs hook: the reference's pages get their names from the table in `reference/index.md`, and names everywhere become links.

A page of a group (`reference/train.md`) ends with `<!-- names -->`; there every name of the table's row is put with
its signature, its docstring and a link to a program of the documentation that uses it. In prose `ax.NAME` links to
it. Names of Flax, Optax, JAX and Orbax link into their own pages where these can be asked for their inventories
while the site is built, and are plain code elsewhere.
"""

import functools
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from markdown.extensions.toc import slugify

DOCS = Path(__file__).resolve().parents[1]
GROUP = re.compile(r"^\| \[[^\]]+\]\((\w+)\.md\)[^|]*\| ([^|]+) \|$", re.MULTILINE)
HERE = "<!-- names -->"
# Code, links, drawings and headings, in which no name becomes a link.
FENCED = re.compile(
    r"^(```+|~~~+)[^\n]*\n.*?^\1[^\n]*$|\[[^\]]*\]\([^)]*\)|<svg.*?</svg>|^#[^\n]*$", re.DOTALL | re.MULTILINE
)
BLOCK = re.compile(r"^(#+ [^\n]+)$|^```python[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DRAWN = re.compile(r'(?<=>\n)<img src="(guides/pictures/[\w-]+\.svg)" alt="[^"]*">')
OURS = re.compile(r"(?<![\[`])`ax\.(\w+)`(?!`|\])")
THEIRS = re.compile(r"(?<![\[`])`((?:jax|optax|nnx|linen|flax|orbax)\.[\w.]+)`(?!`|\])")
# Values whose docstrings list all that is set; their methods are the engine's.
VALUES = ("Plan", "Precision", "Replicate", "Shard", "Context", "Pipelined", "DiLoCo", "TrainState", "GradSyncStrategy")
INSIDE = (
    "checkpoint_begun|checkpoint_committed|checkpoint_leaves|take_leaves|take_resting|resting_arrays|give_up|hollow|values|whole"
    "|trace|train_step|board|caller|members|positions|run|sub_mesh|timeout|settle|place|due|state_leaves|state_of_leaves|state_specs"
    "|tree_flatten_with_keys|tree_unflatten|keeping|lower"
)
LONG = {"nnx": "flax.nnx", "linen": "flax.linen"}
INVENTORIES = (
    "https://docs.jax.dev/en/latest/objects.inv",
    "https://flax.readthedocs.io/en/latest/objects.inv",
    "https://optax.readthedocs.io/en/latest/objects.inv",
    "https://orbax.readthedocs.io/en/latest/objects.inv",
)


@functools.cache
def groups():
    """File of a group -> its names, in order."""
    text = (DOCS / "reference" / "index.md").read_text("utf-8")
    return {file: re.findall(r"`ax\.(\w+)`", row) for file, row in GROUP.findall(text)}


@functools.cache
def examples():
    """Name -> (page, heading) of the first program of the documentation that uses it; pages of the reference come first."""
    first = ("reference", "guides")
    rank = lambda page: (first.index(page.parent.name) if page.parent.name in first else len(first), page)
    found = {}
    for page in sorted(DOCS.rglob("*.md"), key=rank):
        heading = ""
        for head, block in BLOCK.findall(page.read_text("utf-8")):
            heading = head.lstrip("# ") or heading
            for name in re.findall(r"\bax\.(\w+)", "" if block.startswith("# sketch") else block):
                found.setdefault(name, (page.relative_to(DOCS).as_posix(), heading))
    return found


def entry(name):
    """A name's place on its page: where it is used, and all that its docstring says."""
    page, heading = examples().get(name, ("", ""))
    options = {
        "heading": f'"ax.{name}"',
        "toc_label": f'"{name}"',
        "show_root_heading": "true",
        "show_root_toc_entry": "true",
        **({"members": "false"} if name in VALUES else {"filters": f'["!^_", "!^({INSIDE})$"]'}),
    }
    lines = [f"::: axonml_jax.{name}", "    options:", *(f"      {key}: {value}" for key, value in options.items())]
    if page and not page.startswith("reference"):
        lines += ["", f"*Example: [{heading.replace('`', '')}](../{page}#{slugify(heading, '-')}).*"]
    return "\n".join([*lines, "", ""])


def outside(pattern, replace, text):
    """The text with what matches replaced, except in code, headings, links and drawings."""
    parts, end = [], 0
    for found in FENCED.finditer(text):
        parts += [pattern.sub(replace, text[end : found.start()]), found[0]]
        end = found.end()
    return "".join([*parts, pattern.sub(replace, text[end:])])


# In a search pages that say how come before tables of figures and of names.
BOOST = {"guides/": 2, "troubleshooting": 3, "performance": 0.3, "migration": 0.3}


def on_page_markdown(markdown, page, **_):
    """Names are put on the reference's pages, and linked to from all others."""
    folder, _, file = page.file.src_uri.rpartition("/")
    markdown = DRAWN.sub(
        lambda it: (DOCS / it[1]).read_text("utf-8"), markdown
    )  # within the page drawings have its colours
    page.meta["search"] = {"boost": next((n for start, n in BOOST.items() if page.file.src_uri.startswith(start)), 1)}
    if folder in ("adr", "maintainers"):
        page.meta["search"] = {"exclude": True}  # users search; the index is loaded with every page
    if folder == "reference" and HERE in markdown:
        before, _, after = markdown.partition(HERE)
        markdown = before + "\n".join(map(entry, groups()[file.removesuffix(".md")])) + after
    known = {name for names in groups().values() for name in names}
    markdown = outside(OURS, lambda it: f"[`ax.{it[1]}`][axonml_jax.{it[1]}]" if it[1] in known else it[0], markdown)
    return outside(THEIRS, lambda it: _optional(it[1]), markdown)


def _optional(name):
    first, _, rest = name.partition(".")
    return f'<autoref identifier="{LONG.get(first, first)}.{rest}" optional><code>{name}</code></autoref>'


def on_page_content(html, **_):
    """A column of rows' names has no heading of its own: no heading, rather than an empty one."""
    return re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)


def on_config(config):
    """Inventories that answer within two seconds are asked for; without a network the site is built without them."""
    with ThreadPoolExecutor() as pool:
        there = [url for url, answers in zip(INVENTORIES, pool.map(_answers, INVENTORIES), strict=True) if answers]
    config.plugins["mkdocstrings"].config.handlers.setdefault("python", {}).setdefault("inventories", []).extend(there)
    return config


def _answers(url):
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.read(16).startswith(b"# Sphinx")
    except OSError:
        return False
