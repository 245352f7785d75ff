"""The pages: commands, configurations, extras, Python names and links exist, and the README's blocks run on tiny models."""

import ast
import builtins
import importlib
import re
import shlex
import shutil
from configparser import ConfigParser
from pathlib import Path

import pytest
import typer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, pipeline
from transformers.pipelines import PIPELINE_REGISTRY

import merge_tools
from lexperts.cli import build_app
from lexperts.recipes import TRAIN
from lexperts_lite.call_options import OPTIONS
from modeling_exhird import ExhirdConfig, ExhirdTokenizer
from run_tools.arguments import make_parser
from tests.merge_tools.conftest import save_expert
from tests.modeling_exhird.conftest import VOCABULARY
from tests.tiny_models import make_model

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "llms.txt")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").glob("*.md"))]
REPOSITORY = "https://github.com/lexperts/lexperts/"
# of links to files on pages that are also read elsewhere, and of the picture's
PREFIXES = (
    f"{REPOSITORY}blob/main/",
    f"{REPOSITORY}tree/main/",
    "https://raw.githubusercontent.com/lexperts/lexperts/main/",
)
TEXTS = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
README = TEXTS["README.md"]
SHORTCUTS = {"keyphrases": ["lexperts", "keyphrases"], "merge-experts": ["lexperts", "merge"]}
PACKAGES = "keyphrase_tools|merge_tools|lexperts_lite|lexperts|modeling_[a-z]+"
TINY = {  # a checkpoint that the README assumes -> a tiny one
    "runs/hypernet-minilm": ("keyphrase-extraction", "HypernetForTokenClassification"),
    "runs/hypernet-squad": ("extractive-qa", "HypernetForQuestionAnswering"),
    "runs/hypernet-news": ("text-classification", "HypernetForSequenceClassification"),
    "runs/keyphrases": ("keyphrase-generation", "ExhirdForKeyphraseGeneration"),
    "runs/moesumm": ("moe-summarization", "MoeSummForConditionalGeneration"),
}
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def blocks_of(page: str, languages: str) -> list[str]:
    """The code blocks of a page in one of the languages."""
    return re.findall(rf"```(?:{languages})\n(.*?)```", TEXTS[page], re.S)


def commands_of(page: str) -> list[list[str]]:
    """The command lines of a page's shell blocks that start one of our commands, also as `python -m lexperts`."""
    lines = []
    for line in "\n".join(blocks_of(page, "bash|sh|shell|console")).replace("\\\n", " ").splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        words = words[words.index("-m") + 1 :] if "-m" in words[:-1] else words
        words = SHORTCUTS.get(words[0], [words[0]]) + words[1:] if words else []
        lines += [words] if words[:1] == ["lexperts"] else []
    return lines


def problem_of(words: list[str]) -> str | None:
    """What is wrong with a command line, as far as its names go."""
    command = typer.main.get_command(build_app())
    for name in [word for word in words[1:3] if not word.startswith("-")]:
        if not hasattr(command, "commands"):
            break
        if name not in command.commands:
            return f"no command {name!r}"
        command = command.commands[name]
    recipe = TRAIN.get(words[2] if len(words) > 2 else "") if words[1] == "train" else None
    if recipe:
        config = words[3] if len(words) > 3 else "-"
        is_name = not config.startswith("-") and not config.endswith((".yml", ".yaml"))
        if is_name and not (ROOT / "lexperts" / "recipes" / recipe.recipe / f"{config}.yml").exists():
            return f"no configuration {config!r}"
        arguments = importlib.import_module(f"lexperts.recipes.{recipe.recipe}.arguments")
        module, name = getattr(arguments, "TRAINING", ("transformers", "TrainingArguments"))
        classes = [*arguments.ARGUMENTS[recipe.module], getattr(importlib.import_module(module), name)]
        known = {*make_parser(classes)._option_string_actions, "--show-config", "--help"}
    else:
        known = {option for parameter in getattr(command, "params", []) for option in parameter.opts}
    unknown = [word for word in words if word.startswith("--") and word.split("=")[0] not in known]
    return f"no option {unknown[0]}" if unknown and words[-1] not in ("--help", "--version") else None


def unknown_names(code: str) -> set[str]:
    """Names that a block reads and neither binds nor imports."""
    names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)} | set(dir(builtins))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return {node.id for node in names} - bound


def exists(dotted: str) -> bool:
    """Whether a module, or an attribute of one, exists."""
    parts = dotted.split(".")
    for i, name in enumerate(parts):
        try:
            value = importlib.import_module(".".join(parts[: i + 1]))
        except ImportError:
            if i == 0 or not hasattr(value, name):
                return False
            value = getattr(value, name)
    return True


def anchors_of(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_the_checks_find_what_they_are_for():
    assert problem_of(["lexperts", "train", "sekke"]) == "no command 'sekke'"
    assert problem_of(["lexperts", "train", "seke", "minilm"]) == "no configuration 'minilm'"
    assert problem_of(["lexperts", "merge", "compose", "a.yml", "b", "--dryrun"]) == "no option --dryrun"
    assert problem_of(["lexperts", "train", "seke", "minilm_cpu", "--train-files", "x", "--seed", "1"]) is None
    assert problem_of(["lexperts", "train", "seke", "minilm_cpu", "--train-file", "x"]) == "no option --train-file"
    assert unknown_names("x = [y for y in z]\nprint(x, torch.ones(1))") == {"z", "torch"}


@each_page
def test_every_command_exists(page):
    assert {" ".join(words): problem for words in commands_of(page.name) if (problem := problem_of(words))} == {}


def test_the_pages_show_every_group_of_commands():
    shown = {words[1] for page in PAGES for words in commands_of(page.name)}
    assert shown >= set(typer.main.get_command(build_app()).commands)


@each_page
def test_every_name_in_prose_exists(page):
    """Those in blocks exist because the blocks run."""
    prose = re.sub(r"```.*?```|\]\([^)]*\)", "", TEXTS[page.name], flags=re.S)
    dotted = set(re.findall(rf"(?<![\w/.])(?:{PACKAGES})(?:\.\w+)+", prose))
    assert [name for name in dotted if not exists(name) and not name.endswith((".py", ".yml"))] == []


@each_page
def test_every_extra_exists(page):
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = re.findall(r'install [^\n`]*"[\w.]+\[([\w,]+)\]"', TEXTS[page.name])
    assert {name for extra in extras for name in extra.split(",")} <= set(setup["options.extras_require"])


def test_the_claims_of_the_first_page_are_those_of_its_tables():
    rows = {row.split("|")[1].strip(): row.split("|")[2:-1] for row in README.splitlines() if row.startswith("|")}
    for name, (*cells, interval) in ((name, cells) for name, cells in rows.items() if "**" in "".join(cells[2:3])):
        ours, tool, lead = (float(re.search(r"[-+]?\d+\.\d", cell)[0]) for cell in cells)
        assert round(ours - tool, 1) == lead, name
        assert (float(re.search(r"\[(.+?),", interval)[1]) > 0) == name.startswith("nus")  # authors' keywords
    claims = []
    for k in (5, 10):
        (table,) = re.findall(rf"^\| F1@{k} \(%\) .*?\n\n", TEXTS["keyphrases.md"], re.M | re.S)
        leads = [float(lead) for lead in re.findall(r"\*\*([-+]\d+\.\d)\*\*", table)]
        claims.append(
            f"F1@{k} {sum(leads) / len(leads):.1f} points above the best free tool of each set, and ahead on {sum(x > 0 for x in leads)}"
        )
    for page in ("README.md", "index.md"):
        assert all(claim in TEXTS[page] for claim in claims), claims
    claim = re.search(r"(\d+)% of each one's gain on its domain, where averaged weights keep (\d+)%", TEXTS["index.md"])
    for name, number in zip(
        ("by token, gates in closed form", "one dense model, the mean"), claim.groups(), strict=True
    ):
        assert round(float(re.search(r"([\d.]+)%", rows[name][0])[1])) == int(number)


@each_page
def test_every_link_leads_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page.name]):
        folder = page.parent
        for prefix in PREFIXES:
            if target.startswith(prefix):
                folder, target = ROOT, target.removeprefix(prefix)
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (folder / path).resolve() if path else page
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors_of(file)):
            broken.append(target)
    assert broken == []


def test_the_site_has_every_page_and_all_of_its_settings():
    settings, _, nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    assert all(f"\n{name}:" in settings for name in ("theme", "plugins", "hooks", "markdown_extensions", "validation"))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= set(re.findall(r"\w+\.md", nav))


def test_the_readme_is_short_and_has_no_relative_links():
    """A package index shows it without the files beside it."""
    assert len(README.splitlines()) <= 100
    assert [link for link in re.findall(r"\]\(([^)\s]+)\)", README) if not link.startswith("https://")] == []


@pytest.mark.parametrize("page", ["README.md", "llms.txt"])
def test_every_block_stands_for_itself_and_imports_what_exists(page):
    for block in blocks_of(page, "python"):
        assert unknown_names(block) == set()
        imports = [node for node in ast.walk(ast.parse(block)) if isinstance(node, (ast.Import, ast.ImportFrom))]
        exec("\n".join(map(ast.unparse, imports)), {})
    assert set(re.findall(r'pipeline\("([\w-]+)"', TEXTS[page])) <= set(PIPELINE_REGISTRY.get_supported_tasks())


def test_the_page_for_coding_agents_has_all_options_and_its_blocks_run():
    page, (keyphrases, merging, *_) = TEXTS["llms.txt"], blocks_of("llms.txt", "python")
    options = re.findall(r"`(\w+)`", re.search(r"Options of a call: (.*?)\. There", page, re.S).group(1))
    assert sorted(options) == sorted([*OPTIONS, "batch_size"])
    recipe = run(merging.split("merge_tools.compose")[0])["recipe"]
    assert [expert.source_model for expert in merge_tools.read_recipe(recipe).experts] == [
        "llama-law",
        "llama-medicine",
    ]
    pytest.importorskip("lexperts_seke_minilm", reason="the default model is not installed")
    names = run(keyphrases)
    assert names["first"][0] == "tidal barrage" and len(names["many"]) == 2
    assert [phrase["keyphrase"] for phrase in names["scored"]] == ["graph cut", "maximum flow"]


def tiny_tokenizer():
    """A tokenizer of a few words with BERT's special tokens."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *["the", "graph", "cut", "is", "a", "problem", "of", "learning"]]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {f"{name.strip('[]').lower()}_token": name for name in words[:4]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, eos_token="[SEP]", **special)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A folder with the checkpoints that the pages assume."""
    folder = tmp_path_factory.mktemp("pages")
    for name, (task, cls) in TINY.items():
        model, tokenizer = make_model(cls), tiny_tokenizer()
        if task == "keyphrase-generation":
            tokenizer = ExhirdTokenizer.from_texts(VOCABULARY)
            model = type(model)(ExhirdConfig.from_tokenizer(tokenizer, encoder_type="bigru", hidden_size=16))
        pipeline(task, model=model, tokenizer=tokenizer).save_pretrained(folder / name)
    for name in ("corpus", "smollm2"):
        shutil.copytree(ROOT / "examples" / name, folder / "examples" / name)
    for seed, name in enumerate(("llama-base", "llama-law", "llama-medicine")):
        save_expert(folder / name, seed)
    return folder


def run(code: str) -> dict:
    """Runs a block as a notebook does -> its names, and `_` the values of its expressions."""
    space = {"_": [], "pipeline": pipeline}  # imported by an earlier block of the page
    for statement in ast.parse(code).body:
        part = ast.unparse(statement)
        if isinstance(statement, ast.Expr):
            space["_"].append(eval(part, space))
        else:
            exec(part, space)
    return space
