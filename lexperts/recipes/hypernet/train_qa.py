"""Fine-tunes the hypernetwork, or a baseline, for extractive question answering.

    lexperts train hypernet-qa squad_cpu --train-files train.jsonl --test-files validation.jsonl
    lexperts train hypernet-qa squad_paper --dataset-name rajpurkar/squad_v2

Files have SQuAD's columns: question, context and answers. The output folder contains the model
with its code and pipeline; results.json has SQuAD's exact match and F1, and the answers.
"""

from datasets import Dataset
from tqdm import tqdm
from transformers import set_seed

from modeling_hypernet import DataCollatorForTextPairs, tokenize_questions
from run_tools.errors import RESUME

from ..common.arguments import command
from ..common.run_folder import write_results
from ..common.training import RecipeTrainer, train_or_resume
from .arguments import ModelArguments, QuestionDataArguments
from .data import QUESTION_COLUMNS, load_questions
from .squad_scores import squad_scores
from .systems import build_model, make_trainer, open_folder, open_tokenizer, save_pipeline


def prepare(model_args: ModelArguments, data_args: QuestionDataArguments, folder_args, training_args):
    """The run folder, the trainer, and the rows to score: everything before training, where errors of users occur."""
    rows = load_questions(data_args)
    folder, backbone = open_folder("train_qa", model_args, data_args, folder_args, training_args)
    tokenizer = open_tokenizer(backbone, data_args.max_seq_len)
    questions = rows.pop("train")
    batch = {name: [row[name] for row in questions] for name in (*QUESTION_COLUMNS, "id") if name in questions[0]}
    options = {"max_seq_len": data_args.max_seq_len, "doc_stride": data_args.doc_stride}
    train = Dataset.from_dict(tokenize_questions(batch, tokenizer, **options))
    print(f"train: {len(questions):,} questions in {len(train):,} windows")
    set_seed(training_args.seed)
    model, collator = build_model("answers", model_args, backbone), DataCollatorForTextPairs(tokenizer)
    trainer, _ = make_trainer(RecipeTrainer, model, model_args, data_args, training_args, {"train": train}, collator)
    return folder, trainer, rows


def score(answer, split: str, rows: list[dict], args: QuestionDataArguments) -> dict:
    """The scores and the answers of a split; prints the scores and some answers."""
    gold = [list(row["answers"]["text"]) for row in rows]
    options = {"max_seq_len": args.max_seq_len, "doc_stride": args.doc_stride, "batch_size": 16}
    options["handle_impossible_answer"] = not all(gold)
    examples = ({"question": row["question"], "context": row["context"]} for row in rows)
    answers = list(tqdm(answer(examples, **options), total=len(rows), unit="question", desc=split))
    scores = squad_scores([one["answer"] for one in answers], gold)
    print(f"{split}: " + "   ".join(f"{name} {value:.1f}" for name, value in scores.items()))
    for row, one, correct in list(zip(rows, answers, gold, strict=True))[: args.show]:
        text = f"{one['answer'] or 'no answer'} ({one['score']:.2f})"
        print(f"\n{row['question']}\n  -> {text}; gold: {correct or 'no answer'}")
    by_id = {str(row.get("id", i)): one["answer"] for i, (row, one) in enumerate(zip(rows, answers, strict=True))}
    return {split: scores, f"{split}_answers": by_id}


def train(model_args, data_args, *groups) -> None:
    """Runs the command."""
    folder, trainer, rows_by_split = prepare(model_args, data_args, *groups)
    train_or_resume(trainer, folder)
    answer, results = save_pipeline("extractive-qa", folder, trainer), {}
    for split, rows in rows_by_split.items():
        results |= score(answer, split, rows, data_args)
    write_results(folder, trainer, **results)


main = command("hypernet", "train_qa", train, RESUME)
