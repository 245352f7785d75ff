"""Hooks of mkdocs: links out of docs/ lead to GitHub, figures take the colours of the page, commands describe themselves."""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import typer  # noqa: E402

from lexperts.cli import build_app  # noqa: E402
from lexperts.recipes import TRAIN  # noqa: E402

DEMO = ROOT / "build" / "demo"  # see docs/demo/assemble.py
REPOSITORY = "https://github.com/lexperts/lexperts/blob/main/"
LINK = re.compile(r"\]\((?P<path>(?:\.\./)[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
COMMANDS = "<!-- commands -->"
ALONE = ("index.md", "getting_started.md", "merging.md")  # tabs of one page
FIGURE = re.compile(r"!\[[^\]]*\]\((images/(?:seke|exhird|hypernetwork|moesumm|lexicon)\.svg)\)")


def to_repository(link: re.Match, page: Path) -> str:
    """The link itself within docs/, else that of the file on GitHub; raises an error if the file does not exist."""
    path = (page.parent / link["path"]).resolve()
    if path.is_relative_to(ROOT / "docs"):
        return link[0]
    if not path.exists():
        raise FileNotFoundError(f"{page}: there is no {link['path']}")
    return f"]({REPOSITORY}{path.relative_to(ROOT)}{link['anchor'] or ''})"


def inline(figure: re.Match) -> str:
    """The figure itself instead of an image, so that it has the colours of the page; without its own colours."""
    svg = (ROOT / "docs" / figure[1]).read_text(encoding="utf-8")
    svg = re.sub(r"<style>.*?</style>|<rect class=\"panel\"[^>]*/>", "", svg, flags=re.S)
    return '<div class="figure">' + re.sub(r"\s*\n\s*", "", svg) + "</div>"


def in_cell(text: str | None) -> str:
    """A help text as a cell of a table."""
    text = re.sub(r"\[/?(?:bold|dim|cyan|red|green|yellow)\]|\x08", "", text or "")
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")


def describe_option(option) -> str:
    """A row: its names, its help, and its default."""
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    default = option.default
    shown = "" if default in (None, False, ()) or callable(default) or option.required else f"`{default}`"
    return f"| {names} | {in_cell(getattr(option, 'help', ''))} | {shown} |"


def recipe_of(path: str) -> list[str]:
    """The names of a recipe's configurations; none for other commands."""
    group, _, name = path.removeprefix("lexperts ").partition(" ")
    folder = ROOT / "lexperts" / "recipes" / TRAIN[name].recipe if group == "train" and name in TRAIN else None
    return sorted(path.stem for path in folder.glob("*.yml")) if folder else []


def describe_command(command, path: str) -> list[str]:
    """The section of a command, and those of its sub-commands."""
    lines = []
    if hasattr(command, "commands"):
        for name, child in sorted(command.commands.items()):
            lines += [f"### {path} {name}", ""] if hasattr(child, "commands") else []
            lines += describe_command(child, f"{path} {name}")
        return lines
    arguments = [option for option in command.params if option.param_type_name == "argument"]
    options = [
        option for option in command.params if option.param_type_name == "option" and "--help" not in option.opts
    ]
    usage = " ".join([path, *(argument.name.upper() for argument in arguments), *(["[OPTIONS]"] if options else [])])
    summary, *examples = re.split(r"\n\s*\n", (command.help or "").strip())
    recipe = recipe_of(path)
    usage += " CONFIGURATION" if recipe else ""
    usage += "" if options else " [OPTIONS]"  # those of recipes are not typer's
    lines += [f"#### {path}", "", in_cell(summary), "", "```text", usage, "```", ""]
    lines += [f"Configurations: {', '.join(f'`{name}`' for name in recipe)}.", ""] if recipe else []
    shown = [
        line.strip().removeprefix("Example:").strip()
        for part in examples
        for line in part.splitlines()
        if "lexperts " in line
    ]
    lines += ["```bash", *shown, "```", ""] if shown else []
    if options or arguments:
        lines += ["| option | | default |", "| --- | --- | --- |"]
        lines += [f"| `{a.name.upper()}` | {in_cell(getattr(a, 'help', ''))} | |" for a in arguments]
        lines += [*map(describe_option, options), ""]
    return lines


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Rewrites the links of a page, and fills in the commands."""
    if page.file.src_uri in ALONE:
        page.meta["hide"] = ["navigation"]
    if COMMANDS in markdown:
        commands = describe_command(typer.main.get_command(build_app()), "lexperts")
        markdown = markdown.replace(COMMANDS, "\n".join(commands))
    markdown = FIGURE.sub(inline, markdown)
    return LINK.sub(lambda link: to_repository(link, Path(page.file.abs_src_path)), markdown)


def on_post_build(config) -> None:
    """Copies llms.txt, the page for coding agents, to the root of the site, and to its demo what that runs on."""
    shutil.copyfile(ROOT / "llms.txt", Path(config.site_dir) / "llms.txt")
    if not (DEMO / "lib").exists():
        raise FileNotFoundError(
            f"{DEMO / 'lib'} does not exist. Write it with `python docs/demo/assemble.py`, or run `make docs`."
        )
    shutil.copytree(DEMO, Path(config.site_dir) / "demo", dirs_exist_ok=True)
