"""Fine-tunes the hypernetwork for extractive question answering.

    lexperts train hypernet-qa squad_cpu --train-files train.jsonl --test-files validation.jsonl
    lexperts train hypernet-qa squad_paper --dataset-name rajpurkar/squad_v2

Files have SQuAD's columns: question, context and answers. The output folder contains the model with its code and pipeline;
results.json has SQuAD's exact match and F1.
"""

from datasets import Dataset
from tqdm import tqdm

from modeling_hypernet import DataCollatorForTextPairs, HypernetForQuestionAnswering, tokenize_questions

from ..data import Rows, load_splits, to_columns
from ..training import RecipeTrainer, fit, write_results
from .arguments import ModelArguments, QuestionDataArguments
from .models import build_model, make_trainer, open_tokenizer, save_pipeline
from .squad_scores import squad_scores

COLUMNS = ("question", "context", "answers")


def load_questions(args: QuestionDataArguments) -> Rows:
    """Rows of training and test. The validation split of a data set on the Hub is used for testing, as for SQuAD."""
    rows = load_splits(args, COLUMNS)
    if args.dataset_name:
        rows = {"train": rows["train"], "test": rows["validation"]}
    limits = {"train": args.max_train_rows, "test": args.max_test_rows}
    return {split: own[: limits.get(split) or len(own)] for split, own in rows.items()}


def score(answer, split: str, rows: list[dict], args: QuestionDataArguments) -> dict:
    """The scores of a split; prints them, and some answers."""
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
    return {split: scores, f"{split}_answers": [one["answer"] for one in answers]}


def train(model_args: ModelArguments, data_args: QuestionDataArguments, training_args, checkpoint) -> None:
    """Trains, scores and saves a model."""
    rows = load_questions(data_args)
    tokenizer = open_tokenizer(model_args.backbone, data_args.max_seq_len)
    questions = rows.pop("train")
    batch = to_columns(questions, [name for name in (*COLUMNS, "id") if name in questions[0]])
    options = {"max_seq_len": data_args.max_seq_len, "doc_stride": data_args.doc_stride}
    windows = Dataset.from_dict(tokenize_questions(batch, tokenizer, **options))
    print(f"train: {len(questions):,} questions in {len(windows):,} windows")
    model = build_model(HypernetForQuestionAnswering, model_args, training_args.seed)
    arguments = model, model_args, data_args, training_args, {"train": windows}, DataCollatorForTextPairs(tokenizer)
    trainer, _ = make_trainer(RecipeTrainer, *arguments)
    fit(trainer, checkpoint)
    answer, results = save_pipeline("extractive-qa", trainer), {}
    for split, own in rows.items():
        results |= score(answer, split, own, data_args)
    write_results(trainer, **results)
