"""Keyphrases of Parquet files on a Ray cluster, by Ray Data.

    pip install --find-links dist "lexperts[ray]"
    python examples/ray_keyphrases.py "s3://bucket/documents/*.parquet" s3://bucket/keyphrases --workers 8 --gpus-per-worker 1

Each worker loads the model once. Documents that cannot be processed have a reason in the column `error`. This writes many files
in any order and starts over after an interruption. `lexperts keyphrases extract --workers 8` resumes and writes one file in the
order of the source.
"""

import argparse

import ray

from keyphrase_tools.extractor import KeyphraseExtractor


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="Parquet files with the columns text, title and id")
    parser.add_argument("output", help="folder to write")
    parser.add_argument("--model", help="folder or Hub id, or tiny; by default lexperts-seke-minilm")
    parser.add_argument("--address", help="of a cluster; by default Ray is started on this machine")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpus-per-worker", type=float, default=0)
    args = parser.parse_args(argv)

    ray.init(address=args.address, ignore_reinit_error=True)
    options = {"model": args.model, "title_column": "title", "top_k": 10}
    documents = ray.data.read_parquet(args.source, columns=["id", "title", "text"])
    keyphrases = documents.map_batches(
        KeyphraseExtractor,
        fn_constructor_kwargs=options,
        batch_format="pyarrow",  # the types of columns do not depend on the batch
        batch_size=512,
        concurrency=(1, args.workers),  # reading and writing need a core too
        num_cpus=1,
        num_gpus=args.gpus_per_worker,
    )
    keyphrases.drop_columns(["title", "text"]).write_parquet(args.output)


if __name__ == "__main__":
    main()
