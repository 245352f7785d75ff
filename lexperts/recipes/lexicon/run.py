"""Runs the whole recipe: base, clusters, experts, mixture, router, reward, definitions, scores.

    lexperts define run small --data data/wordnet
    lexperts define run small --data data/wordnet --jobs 2 --ablation main lexical dense
    lexperts define run --show-config small

Data is a folder of train.jsonl, validation.jsonl and test.jsonl, as `lexperts define prepare` writes it. Everything that the
run will need is checked before the first step. Each step is a command that can be run by itself; it is printed, and its
settings and log are in its folder in WORK_DIR/steps. Start the same command again after an interruption: it resumes. A step
is not repeated if its settings, files and inputs are those of an earlier run, and so ablations share steps. The times of all
attempts are in WORK_DIR/run.json.
"""

import json
import signal
import sys

from run_tools.errors import UserError, did_you_mean, short_repr
from run_tools.files import write_file
from run_tools.jsonl import read_lines
from run_tools.options import hyphenate
from run_tools.yaml_files import parse_yaml, read_yaml

from ..common.arguments import command
from ..common.configurations import find_config
from ..common.tables import align_columns
from .arguments import RunArguments
from .driver import Driver, command_line, is_done, read_record, remove_steps
from .preflight import check_run, check_step_settings
from .steps import DEFINITIONS, FOLDER, Plan, Step, merge_configs, read_config

MAIN = "main"
EXAMPLES = 10


def parse_changes(values: list[str]) -> dict:
    """["expert.train=all"] -> {"expert": {"train": "all"}}; values are YAML."""
    changes: dict = {}
    for value in values:
        name, separator, text = value.partition("=")
        if not separator or not name:
            raise UserError(f"--set {short_repr(value)} must be KEY=VALUE, as in expert.num_train_epochs=2.")
        change = parse_yaml(text, f"--set {short_repr(value)}")
        for part in reversed(name.split(".")):
            change = {part: change}
        changes = merge_configs(changes, change)
    return changes


def make_plans(args: RunArguments) -> dict[str, Plan]:
    """The plan of each ablation. Raises a `UserError` for an unknown ablation or step, and as in `read_config`."""
    changes, config = parse_changes(args.set), find_config(args.config, "lexicon", "run")
    if args.data:
        changes |= {"data": args.data, "train_files": None, "validation_files": None, "test_files": None}
    if args.work_dir:
        changes["work_dir"] = args.work_dir
    path = args.ablations or FOLDER / "ablations.yml"
    ablations = {MAIN: {}} | ({} if args.ablation == [MAIN] else read_yaml(path))
    for name in args.ablation:
        if name not in ablations:
            raise UserError(f"--ablation {name!r} is not in {path}.{did_you_mean(name, ablations)}")
    plans = {name: Plan(read_config(config, ablations[name] or {}, changes)) for name in args.ablation}
    names = {name for plan in plans.values() for step in plan.steps for name in (step.name, step.kind)}
    if args.from_step and args.from_step not in names:
        hint = did_you_mean(args.from_step, names)
        raise UserError(f"--from-step {args.from_step!r} is not a step of this recipe.{hint}")
    return plans


def show_plans(plans: dict[str, Plan]) -> None:
    """Prints the steps, and which of them are complete."""
    shown = set()
    for name, plan in plans.items():
        print(f"{name}:")
        for step in plan.steps:
            state = "started" if step.folder.exists() else "to do"
            state = "done" if is_done(step) else "as above" if step.key in shown else state
            shown.add(step.key)
            print(f"  {step.name:15} {state:9} {command_line(step)}")


def read_scores(step: Step) -> dict[str, dict[str, float]]:
    """The scores.json of a step -> per cent by system and column."""
    systems = json.loads((step.out / "scores.json").read_text(encoding="utf-8"))["systems"]
    table: dict = {}
    for system, protocols in systems.items():
        mauve = {"mauve": protocols.pop("mauve")["mean"]} if "mauve" in protocols else {}  # of all rows together
        columns = {f"{m} ({p})": value["mean"] for p, metrics in protocols.items() for m, value in metrics.items()}
        table[system] = columns | mauve
    return table


def print_examples(steps: dict[str, Step]) -> None:
    """Prints ten definitions of test rows, with typical terms of their domains."""
    rows = read_lines((steps.get("best") or steps["plain"]).out / DEFINITIONS)
    domains: list = []
    if "cluster" in steps:
        domains = json.loads((steps["cluster"].out / "clusters.json").read_text(encoding="utf-8"))["terms"]
    count = min(EXAMPLES, len(rows))
    for i in [round(j * (len(rows) - 1) / max(count - 1, 1)) for j in range(count)]:
        row = rows[i]
        domain = f"  [{row['domain']}: {', '.join(domains[row['domain']][:3])}]" if domains and "domain" in row else ""
        print(f"\n{row['term']}{domain}\n  context    {row['context']}")
        print(f"  generated  {row['generated']}\n  gold       {row['definition']}")


def write_report(name: str, plan: Plan, ran: set[str]) -> dict:
    """Writes the configuration, steps, times and scores of a plan to run.json -> its content."""
    steps = [{"name": step.name, "folder": str(step.folder)} for step in plan.steps]
    for step, about in zip(plan.steps, steps, strict=True):
        about |= {"seconds": read_record(step)["seconds"], "run_now": step.key in ran}
    config = {key: value for key, value in plan.config.items() if key != "folder"}
    report = {"config": config, "steps": steps, "seconds": round(sum(step["seconds"] for step in steps), 2)}
    report["scores"] = next((read_scores(step) for step in plan.steps if step.kind == "evaluate"), {})
    write_file(plan.work / report_file(name), json.dumps(report, ensure_ascii=False, indent=1))
    return report


def report_file(name: str) -> str:
    """The name of the report of an ablation."""
    return "run.json" if name == MAIN else f"run.{name}.json"


def print_results(plans: dict[str, Plan], ran: set[str]) -> None:
    """Writes the reports; prints scores, times (in brackets those of earlier runs) and examples."""
    scores: dict[str, dict[str, float]] = {}
    for name, plan in plans.items():
        report = write_report(name, plan, ran)
        scores |= {f"{name} {system}": cells for system, cells in report["scores"].items()}
        times = (("{:.0f}" if step["run_now"] else "({:.0f})").format(step["seconds"]) for step in report["steps"])
        steps = ", ".join(f"{step['name']} {time}" for step, time in zip(report["steps"], times, strict=True))
        print(f"\n{name}: {report['seconds']:.0f} s: {steps}")
    if scores:
        columns = list(dict.fromkeys(column for cells in scores.values() for column in cells))
        lines = [[name, *(f"{cells[c]:.2f}" if c in cells else "" for c in columns)] for name, cells in scores.items()]
        print("\nScores in per cent, with references of the same context, and of the same term in any sense\n")
        print(align_columns([["", *columns], *lines], right=True))
    name, plan = next(iter(plans.items()))
    print(f"\nDefinitions of {name}")
    print_examples({step.name: step for step in plan.steps})
    print(f"\nIn {plan.work}: {', '.join(map(report_file, plans))}, and the folders of the steps")


def run(args: RunArguments, driver: Driver | None = None) -> None:
    """Checks and runs all steps that are not complete, and prints the results."""
    plans = make_plans(args)
    steps = list({step.folder: step for plan in plans.values() for step in plan.steps}.values())
    if args.dry_run:
        for step in steps:
            check_step_settings(step)
        return show_plans(plans)
    restart = [step for step in steps if args.from_step and step.depends_on(args.from_step)]
    check_run(plans.values(), [step for step in steps if step in restart or not is_done(step)])
    remove_steps(restart)
    driver = driver or Driver(args.jobs)
    for name, plan in plans.items():
        if len(plans) > 1:
            print(f"\n{name}", flush=True)
        driver.run(plan.steps)
    print_results(plans, driver.ran)


def main(argv: list[str] | None = None) -> None:
    """`lexperts define run`; the first argument may be the recipe, without --config."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given and not given[0].startswith("-"):
        given.insert(0, "--config")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # also ends the running steps
    again = any(hyphenate(word).startswith("--from-step") for word in given)
    resume = f"Start the same command again{' without --from-step' * again} to resume."
    command("lexicon", "run", run, resume)(given)
